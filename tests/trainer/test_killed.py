"""kill -9 and Ctrl-C of a real trainer process: the bucket stays a proven chain, and the next trainer continues it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import bucket
import torch

from delta_sync.ledger import Ledger
from delta_sync.store.open import open_store

CHILD = Path(__file__).parent / "killed_child.py"


def start(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(CHILD), str(folder), str(folder / "bucket"), str(steps)],
            stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def end(child: subprocess.Popen[bytes], folder: Path, number: int, after: float) -> None:
    try:
        deadline = time.monotonic() + 120
        while b"training" not in (log := (folder / "log").read_bytes()):
            assert child.poll() is None and time.monotonic() < deadline, log[-3000:].decode()
            time.sleep(0.02)
        time.sleep(after)
        child.send_signal(number)
        child.wait(120)  # after Ctrl-C it still publishes what was trained last
    finally:
        child.kill()
        child.wait()


def check(folder: Path) -> int:
    """The newest version can be rebuilt from the bucket alone, every digest proven; nothing half-written counts."""
    uri = str(folder / "bucket")
    assert bucket.materialise(uri)
    ledger = Ledger(open_store(uri))
    for manifest in bucket.chain(uri):
        for ref in manifest.objects:
            ledger.read_object(ref)
    return bucket.newest(uri).version


def test_a_trainer_killed_anywhere_leaves_a_chain_that_the_next_one_continues(tmp_path: Path) -> None:
    moments = random.Random(7)
    reached = [0]
    for round_ in range(3):
        number = signal.SIGINT if round_ == 1 else signal.SIGKILL
        end(start(tmp_path, 100_000), tmp_path, number, moments.uniform(0.0, 0.5))
        reached.append(check(tmp_path))
    assert reached == sorted(set(reached))
    last = start(tmp_path, 3)
    assert last.wait(120) == 0, (tmp_path / "log").read_text()[-3000:]
    assert check(tmp_path) > reached[-1]
    chain = bucket.chain(str(tmp_path / "bucket"))
    assert [m.version for m in chain] == list(range(1, len(chain) + 1))
    assert sorted({m.epoch for m in chain}) == [1, 2, 3, 4]
    final = torch.load(tmp_path / "final.pt", weights_only=True)
    assert bucket.materialise(str(tmp_path / "bucket")) == bucket.cast_bytes(final)
