import subprocess
import sys

import pytest

from examples.wordle.plot import draw, read_rewards, smooth
from examples.wordle.space_files import ROOT


def test_the_mean_so_far_and_then_of_the_window():
    assert smooth([1.0, 3.0, 5.0, 7.0], window=2) == [1.0, 2.0, 4.0, 6.0]
    assert smooth([]) == []


def test_a_picture_of_a_run_that_is_still_going_on(tmp_path):
    rows = ['{"step": 1, "loss": 0.1, "reward": 0.25}', '{"step": 2, "reward": 0.5}', '{"train_runtime": 3.0}']
    (tmp_path / "metrics.jsonl").write_text("\n".join([*rows, '{"step": 3, "rew']))
    assert read_rewards(tmp_path / "metrics.jsonl") == ([1, 2], [0.25, 0.5])
    assert draw(tmp_path).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("folder", ["nowhere", "."])
def test_a_folder_that_holds_no_run_is_said(tmp_path, folder):
    command = [sys.executable, "-m", "examples.wordle.plot", str(tmp_path / folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "expected metrics.jsonl" in done.stderr and "Traceback" not in done.stderr
