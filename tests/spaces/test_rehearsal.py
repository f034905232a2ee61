"""The rehearsal with a tiny model: what `make rehearsal ARGS=--kill-server` runs, in fewer minutes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.container import why_not
from helpers.tiny_models import build

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "wordle"))
from helpers.byte_tokenizer import byte_tokenizer

from examples.wordle.space_files import ROOT


@pytest.mark.long
@pytest.mark.rare
@pytest.mark.timeout(1500)
@pytest.mark.skipif(why_not() is not None, reason=f"the rehearsal {why_not()}")
def test_two_spaces_and_a_kill_in_the_middle(tmp_path):
    model = build(tmp_path / "model", "llama")
    byte_tokenizer().save_pretrained(model)
    subprocess.run(["chmod", "-R", "a+rX", model], check=True)  # transformers writes weights for their owner alone
    words = ["--kill-server", "--model", model, "--output", tmp_path / "runs", "--generations=4", "--turns=1"]
    words += ["--server-timeout=900"]
    command = [sys.executable, "-m", "examples.wordle.rehearsal", *map(str, words), "--learning-rate=1e-4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1400, env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["failed"] == [] and summary["bit_exact"] is True and summary["server_kills"] == 1
    assert summary["versions"] == 8 and summary["min_changed_elements"] > 0
    logs = [path.read_text(errors="replace") for path in tmp_path.rglob("*.log")]
    keys = [line.partition("=")[2] for path in tmp_path.rglob("keys.env") for line in path.read_text().splitlines()]
    assert len(keys) == 2 and len(logs) >= 4 and not [key for key in keys if any(key in log for log in logs)]
