"""``delta-sync``: a run in a bucket, looked at and checked from a terminal; see docs/CLI.md."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; without the extra that it needs, say in one line how to get it."""
    try:
        from delta_sync.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"delta-sync needs {error.name}: pip install 'delta-weight-sync[cli]'", file=sys.stderr)
        sys.exit(2)
    app()
