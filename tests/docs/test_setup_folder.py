"""What `make` sets up an environment in: never a folder that holds somebody's files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "setup_env.py"


def test_a_folder_that_it_did_not_make_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / ".venv"
    mine.mkdir()
    (mine / "pyvenv.cfg").write_text("home = /usr/bin\n")
    done = subprocess.run([sys.executable, SCRIPT, mine], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "expected an environment that this script made" in done.stderr
    assert (mine / "pyvenv.cfg").read_text() == "home = /usr/bin\n"
