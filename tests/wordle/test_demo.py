"""The whole demo, with light programs in the places of vLLM and the trainer; bucket, core and streams are real."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from delta_sync.ledger import Ledger
from delta_sync.store import open_store

STAND_INS = Path(__file__).resolve().with_name("stand_ins.py")


@pytest.fixture
def begin(tmp_path):
    """Start a demo with a fault; at the end make sure that nothing of it runs."""
    generator = torch.Generator().manual_seed(3)
    weights = {name: torch.randn(size, generator=generator).bfloat16() for name, size in (("a", (64, 9)), ("b", (30,)))}
    (tmp_path / "model").mkdir()
    save_file(weights, tmp_path / "model" / "model.safetensors")
    command = [sys.executable, str(STAND_INS), "demo", str(tmp_path / "model"), str(tmp_path / "runs")]
    started = []

    def start(fault="none", **more):
        env = {
            **os.environ,
            **more,
            "PYTHONPATH": os.pathsep.join(str(folder) for folder in STAND_INS.parents[1:3][::-1]),
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
        started.append(subprocess.Popen([*command, fault], env=env, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
    left = [p.cmdline() for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert not left


def test_a_good_run(begin, tmp_path):
    demo = begin()
    out, err = demo.communicate(timeout=120)
    assert demo.returncode == 0, err
    assert len(out.splitlines()) == 1  # stdout is the result and nothing else
    summary = json.loads(out)
    assert summary["failed"] == [] and summary["versions"] == 8 and summary["bit_exact"] is True
    assert summary["tensors_compared"] == 2 and summary["streams_interrupted"] == 0
    assert summary["most_commits_in_one_stream"] >= 2 and summary["min_changed_elements"] > 0
    report = Path(summary["report"])
    assert report.is_relative_to(tmp_path / "runs") and (report.parent / "timeline.png").exists()
    assert [row["version"] for row in json.loads(report.read_text())["versions"]] == list(range(2, 10))
    assert "version 9" in err and "step 8 of 8" in err  # progress, also where there is no terminal


def test_a_run_on_a_bucket(begin, proxy, bucket):
    demo = begin(DELTA_SYNC_URI=f"s3://{bucket}/wordle")
    out, err = demo.communicate(timeout=120)
    assert demo.returncode == 0, err
    summary = json.loads(out)
    assert summary["failed"] == [] and summary["versions"] == 8 and summary["bit_exact"] is True
    assert len(Ledger(open_store(f"s3://{bucket}/wordle")).epochs()) == 1


def test_criteria_that_fail_are_named_and_cost_the_exit_code(begin):
    demo = begin("wrong bit, stream dropped")
    out, err = demo.communicate(timeout=120)
    assert demo.returncode == 1, err
    failed = json.loads(out.splitlines()[-1])["failed"]
    assert {"bit_exact", "tensor b: 1 of 60 bytes", "streams_interrupted == 0"} <= set(failed)
    assert all(f"criterion failed: {name}" in err for name in failed)


@pytest.mark.parametrize(
    ("fault", "said"),
    [("trainer dies", ("trainer ended with exit code 1", "loss is NaN")), ("server dies", ("vllm ended", "no kernel"))],
)
def test_a_process_that_dies_is_named_with_its_log(begin, fault, said):
    demo = begin(fault)
    out, err = demo.communicate(timeout=120)
    assert demo.returncode == 1 and out == ""
    assert all(text in err for text in said) and "logs" in err


def test_a_signal_ends_everything(begin, tmp_path):
    demo = begin("hangs")
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("runs/*/training/metrics.jsonl")):
        assert time.monotonic() < deadline and demo.poll() is None
        time.sleep(0.1)
    demo.send_signal(signal.SIGTERM)
    _, err = demo.communicate(timeout=120)
    assert demo.returncode == 130 and "every process was ended" in err


def test_a_run_in_a_bucket_of_the_hub(begin, hub, hub_bucket, monkeypatch):
    monkeypatch.setenv("DELTA_SYNC_URI", f"hf://buckets/{hub_bucket}/wordle")
    demo = begin()
    out, err = demo.communicate(timeout=240)
    assert demo.returncode == 0, err
    summary = json.loads(out)
    assert summary["failed"] == [] and summary["versions"] == 8 and summary["bit_exact"] is True
    assert any(path.startswith("wordle/manifests/") for path in hub.api.buckets[hub_bucket].files)
