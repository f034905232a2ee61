"""Says at the end how many blocks of the documentation were run, parsed only, and not run."""

from __future__ import annotations

from tallies import TOLD


def pytest_terminal_summary(terminalreporter):
    if TOLD:
        terminalreporter.section("code blocks of the documentation")
        for what, told in sorted(TOLD.items(), reverse=True):
            terminalreporter.line(f"{len(told):3d} {what}")
        for line in TOLD["not run"]:
            terminalreporter.line(f"    {line}")
