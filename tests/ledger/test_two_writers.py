"""Two writers started together, as processes, on each kind of store: one goes on, and no fork is ever served."""

from __future__ import annotations

import contextlib
import os
import time

import pytest
from helpers.moto_server import ENVIRONMENT
from object_writer import barrier, contend, start
from test_object_store_runs import CONFLICT, Replica, chain
from tiny_run import TinyRun

from delta_sync import DeltaSyncError
from delta_sync.ledger import Ledger
from delta_sync.store import open_store

HUB = ("HF_ENDPOINT", "HF_TOKEN", "HF_HOME", "HF_XET_CACHE")
DELTAS = 8


@pytest.fixture(params=["local", "s3", "hub", pytest.param("hub, answers late", marks=pytest.mark.long)])
def place(request, tmp_path):
    """A run's URI, the environment that leads to it, and whether the store prevents what it can only detect else."""
    if request.param == "local":
        return str(tmp_path / "run"), {}, True
    if request.param == "s3":
        proxy, bucket = request.getfixturevalue("proxy"), request.getfixturevalue("bucket")
        return f"s3://{bucket}/run", {**ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.url}, True
    hub, bucket = request.getfixturevalue("hub"), request.getfixturevalue("hub_bucket")
    if request.param != "hub":
        hub.faults.add("delay", "batch", rate=0.5, seconds=0.2)
    return f"hf://buckets/{bucket}/run", {name: os.environ[name] for name in HUB}, False


def test_of_two_writers_at_most_one_goes_on(place, tmp_path, capfd):
    uri, environment, prevents = place
    logs, together, opened = [tmp_path / "0", tmp_path / "1"], barrier(2), barrier(2)
    both = [start(contend, environment, uri, DELTAS, str(log), together, opened) for log in logs]
    replica = Replica(open_store(uri))
    deadline = time.monotonic() + 120
    while any(process.exitcode is None for process in both):
        assert time.monotonic() < deadline
        with contextlib.suppress(DeltaSyncError):  # no anchor yet; a writer that lost attaches none
            replica.follow()  # proves every bit, and never goes back
        time.sleep(0.01)
    codes = sorted(process.exitcode for process in both)
    assert codes == [0, CONFLICT] or (not prevents and codes == [CONFLICT, CONFLICT])
    assert capfd.readouterr().err.count("second publisher") + codes.count(0) >= 1, "who stops says why"

    promised = [{line.split()[1] for line in log.read_text().splitlines()} if log.exists() else set() for log in logs]
    seen = chain(open_store(uri))
    for process, versions in zip(both, promised, strict=True):
        if process.exitcode == 0:
            assert len(versions) == DELTAS + 1
            assert versions <= seen
            replica.follow()
            assert replica.position.manifest == Ledger(open_store(uri)).head().sha256
        elif prevents:
            assert versions <= seen, "a commit that returned is part of the run"
    following = TinyRun(open_store(uri))  # whatever they left, the next trainer goes on there
    following.origin()
    following.anchor(tmp_path / "files")
    following.delta()
    replica.follow()
    assert all((replica.bits[name] == following.now[name]).all() for name in following.now)
