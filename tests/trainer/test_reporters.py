"""tensorboard, wandb and trackio, the packages themselves and offline: what they stored of a run's numbers."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bucket
import pytest
from several_ranks import FSDP2, HERE, run_ranks

for package in ("tensorboard", "wandb", "trackio"):
    pytest.importorskip(package, reason="comes with the extra dev")

Series = dict[str, list[float]]
OURS = ("version", "changed_elements", "changed_fraction", "bytes", "publish_seconds", "extract_seconds")


def offline(folder: Path) -> dict[str, str]:
    """The environment in which each keeps what it is told in ``folder``."""
    for name in ("tensorboard", "wandb", "trackio"):
        (folder / name).mkdir()
    return {
        "TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard"),
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder / "wandb"),
        "WANDB_SILENT": "true",
        "TRACKIO_DIR": str(folder / "trackio"),
        "HF_HUB_OFFLINE": "1",
    }


def of_tensorboard(folder: Path) -> Series:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [events] = (folder / "tensorboard").rglob("events.out.tfevents.*")
    found = EventAccumulator(str(events))
    found.Reload()
    return {tag: [scalar.value for scalar in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def wandb_records(log: bytes) -> Iterator[bytes]:
    """A .wandb file is a LevelDB log: blocks of 32 KiB, records cut into pieces, a header of 7 bytes before each."""
    assert log[:4] == b":W&B"
    at, record = 7, b""
    while at + 7 <= len(log):
        left = -at % 32768
        if 0 < left < 7:  # no header begins so late in a block
            at += left
            continue
        size, piece = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]  # 1 whole, 2 first, 3 middle, 4 last
        record = (b"" if piece in (1, 2) else record) + log[at + 7 : at + 7 + size]
        at += 7 + size
        if piece in (1, 4):
            yield record


def of_wandb(folder: Path) -> Series:
    from wandb.proto.wandb_internal_pb2 import Record

    [log] = (folder / "wandb").rglob("run-*.wandb")
    found: Series = {}
    for data in wandb_records(log.read_bytes()):
        for item in Record.FromString(data).history.item:
            key = item.key or "/".join(item.nested_key)
            found.setdefault(key, []).append(json.loads(item.value_json))
    return found


def of_trackio(folder: Path) -> Series:
    [database] = (path for path in (folder / "trackio").rglob("*.db") if "huggingface" in path.name)
    found: Series = {}
    with sqlite3.connect(database) as connection:
        for (row,) in connection.execute("SELECT metrics FROM metrics ORDER BY id"):
            for name, value in json.loads(row).items():
                found.setdefault(name, []).append(value)
    return found


def check(folder: Path, uri: str, logged: list[dict[str, Any]]) -> None:
    """Each tracker has what the trainer's own log has, and the bucket has the log's own numbers."""
    assert len(logged) == 3
    assert {f"delta_sync/{name}" for name in OURS} <= {name for entry in logged for name in entry}
    for read in (of_tensorboard, of_wandb, of_trackio):
        found = read(folder)
        for name in ("loss", *(f"delta_sync/{name}" for name in OURS)):
            expected = [entry[name] for entry in logged if name in entry]
            assert found[f"train/{name}"] == pytest.approx(expected, rel=1e-6), (read.__name__, name)
    first, *deltas = bucket.chain(uri)
    assert first.metrics == {}
    own = [{n: v for n, v in entry.items() if not n.startswith("delta_sync/") and n != "step"} for entry in logged]
    assert {"loss", "learning_rate", "grad_norm", "epoch"} <= own[-1].keys()
    published = deltas[-1].metrics
    assert any(published == pytest.approx(log) for log in own[-2:]), "its own step's log, or that of the step before"


def test_every_tracker_has_our_numbers(tmp_path: Path) -> None:
    uri = str(tmp_path / "run")
    said = json.dumps({"folder": str(tmp_path / "out"), "uri": uri})
    command = [sys.executable, str(HERE / "reported_child.py"), said]
    done = subprocess.run(command, env={**os.environ, **offline(tmp_path)}, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    check(tmp_path, uri, json.loads(done.stdout.strip().splitlines()[-1]))


@pytest.mark.long
def test_of_several_ranks_only_the_first_reports(tmp_path: Path) -> None:
    uri = str(tmp_path / "run")
    said = {"folder": str(tmp_path / "out"), "uri": uri}
    lines = run_ranks(2, "reported_child.py", said, {**FSDP2, **offline(tmp_path)}, timeout=400)
    first, second = map(json.loads, lines)
    assert not any(name.startswith("delta_sync/") for entry in second for name in entry)
    check(tmp_path, uri, first)
