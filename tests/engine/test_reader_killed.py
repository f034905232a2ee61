"""kill -9 of a replica at every stage of a version: nothing half done is to be seen, and the next start is exact."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_fakes import SHAPES, Weights
from helpers.moto_server import ENVIRONMENT
from helpers.publish import Publisher
from killed_reader import POINTS, start, with_cache
from test_coordinator import Replica

from delta_sync.ledger import Ledger
from delta_sync.store.open import open_store

HUB = ("HF_ENDPOINT", "HF_TOKEN", "HF_HOME", "HF_XET_CACHE")


@pytest.fixture(
    params=["local", pytest.param("s3", marks=pytest.mark.long), pytest.param("hub", marks=pytest.mark.long)]
)
def place(request: Any, tmp_path: Path) -> tuple[str, dict[str, str]]:
    """A run's URI, and the environment that leads to it."""
    if request.param == "local":
        return str(tmp_path / "run"), {}
    if request.param == "s3":
        proxy = request.getfixturevalue("proxy")
        return f"s3://{request.getfixturevalue('bucket')}/run", {**ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.url}
    bucket = request.getfixturevalue("hub_bucket")
    return f"hf://buckets/{bucket}/run", {name: os.environ[name] for name in HUB}


@pytest.mark.parametrize("point", POINTS)
def test_killed(point: str, place: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    uri, environment = place
    random = np.random.default_rng(0)
    checkpoint: Weights = {name: random.integers(0, 2**15, shape).astype("<u2") for name, shape in SHAPES.items()}
    trainer = Publisher(uri, checkpoint)
    trainer.origin()
    trainer.step(1)
    served = tmp_path / "served"
    process = start(environment, uri, str(tmp_path / "cache"), checkpoint, point, str(served))
    deadline = time.monotonic() + 90
    while process.exitcode is None and not served.exists():
        assert time.monotonic() < deadline, "version 2 was not served within 90 s"
        time.sleep(0.02)
    assert served.exists(), f"it ended with {process.exitcode} before version 2"
    before = keys(uri)
    third = trainer.step(2)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL

    store = open_store(uri)
    assert keys(uri) == before | {third.key, third.objects[0].key}, "a replica leaves nothing but its acknowledgement"
    said = Ledger(store).acknowledgements()["r"]  # whole, whenever it was killed
    assert said.version == (3 if point == "acknowledgement written" else 2)
    for path in (tmp_path / "cache").iterdir():
        if path.suffix != ".part":
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
    trainer.step(3)  # nobody else is held up
    replica = with_cache(Replica(uri, checkpoint), uri, str(tmp_path / "cache")).start()
    try:
        replica.wait("version 4", lambda status: status["version"] == 4, 60)
        assert replica.executor.equal(trainer.weights)
        replica.wait("word of it", lambda _: Ledger(store).acknowledgements()["r"].version == 4, 60)
        assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix == ".part"]
    finally:
        replica.close()


def keys(uri: str) -> set[str]:
    tops = ("HEAD.json", "anchors/", "deltas/", "epochs/", "manifests/", "replicas/")
    store = open_store(uri)
    return {info.key for top in tops for info in store.list(top)}
