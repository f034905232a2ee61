"""``delta-sync``: a run in a bucket, looked at and checked from a terminal; see docs/CLI.md."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Run the command line; without the extra that it needs, say in one line how to get it."""
    _mend_outputs()
    try:
        from delta_sync.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"delta-sync needs {error.name}: pip install 'delta-weight-sync[cli]'", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # while modules load, which takes a while on a busy machine
        sys.exit(130)
    app(prog_name="delta-sync")  # also as python -m delta_sync.cli: what it says can be typed


def _mend_outputs() -> None:
    """Let nothing that is to be printed end a command: an output that is closed, or of an encoding without "█"."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # opened, or the next file of a checkpoint would get its number
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - for as long as the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
