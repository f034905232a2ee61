"""Shell completion as docs/CLI.md has it installed, in a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

ASK = """
source <(delta-sync --show-completion)
complete -p delta-sync
COMP_WORDS=(delta-sync roll); COMP_CWORD=1; _delta_sync_completion delta-sync; echo "commands: ${COMPREPLY[@]}"
COMP_WORDS=(delta-sync rollback --ver); COMP_CWORD=2; _delta_sync_completion delta-sync; echo "options: ${COMPREPLY[@]}"
COMP_WORDS=(delta-sync diff --codec c); COMP_CWORD=3; _delta_sync_completion delta-sync; echo "values: ${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_commands_options_and_values(tmp_path):
    script = tmp_path / "delta-sync"
    script.write_text(f"#!{sys.executable}\nfrom delta_sync.cli import main\nmain()\n")
    script.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", ASK], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    registered, *said = done.stdout.splitlines()
    assert registered.startswith("complete ") and registered.endswith(" delta-sync")
    assert said == ["commands: rollback", "options: --version", "values: context"]
