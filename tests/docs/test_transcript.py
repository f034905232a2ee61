"""The session of docs/TRANSCRIPT.md, run anew: its commands lead from the README to why a replica lags."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from blocks import ROOT


def commands(text: str) -> list[str]:
    """What is typed in a transcript."""
    return [line for line in text.splitlines() if line.startswith("$ ")]


@pytest.mark.long
@pytest.mark.rare
@pytest.mark.timeout(1800)
def test_the_commands_lead_to_the_cause(tmp_path):
    pytest.importorskip("vllm")
    page = tmp_path / "TRANSCRIPT.md"
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "transcript.py"), str(page)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=1750, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    kept = (ROOT / "docs" / "TRANSCRIPT.md").read_text()
    assert commands(page.read_text()) == commands(kept), "write docs/TRANSCRIPT.md anew: python scripts/transcript.py"
