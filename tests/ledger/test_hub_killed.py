"""kill -9 of a writer on the test Hub, before and after each request that writes: of the storage's and of the Hub's."""

from __future__ import annotations

import json
import os
import signal
import threading

import pytest
from object_writer import publish, start
from test_object_store_runs import recover

NAMED, STORED = "/batch$", r"^(POST|PUT) /cas/"  # requests that give content its path, and that store content
HUB = ("HF_ENDPOINT", "HF_TOKEN", "HF_HOME", "HF_XET_CACHE")


def run_to_its_end(hub, uri, log=None, killed_at=None):
    """A writer process; ``killed_at``: at which of which requests, and whether the Hub still carries that one out."""
    started = threading.Event()

    def kill():
        started.wait(60)
        os.kill(process.pid, signal.SIGKILL)

    if killed_at is not None:
        where, number, after = killed_at
        hub.faults.add("drop after" if after else "drop", where, times=1, skip=number, call=kill)
    process = start(publish, {name: os.environ[name] for name in HUB}, uri, 1, log)
    started.set()
    process.join(120)
    hub.faults.clear()
    assert process.exitcode is not None, "the writer did not end within 120 s"
    return process.exitcode


def path_named(request):
    return json.loads(request.body.splitlines()[0])["path"]


@pytest.mark.parametrize("chosen", ["some", pytest.param("all", marks=pytest.mark.long)])
def test_a_writer_killed_at_its_writes(hub, hub_bucket, tmp_path, chosen):
    hub.forget()
    assert run_to_its_end(hub, f"hf://buckets/{hub_bucket}/dry") == 0
    stages = [path_named(request) for request in hub.requests if request.path.endswith("/batch")]
    assert [stage.split("/")[1] for stage in stages] == [
        "epochs", "manifests", "HEAD.json", "anchors", "anchors", "anchors", "HEAD.json", "deltas", "manifests",
        "HEAD.json",
    ]  # fmt: skip
    # what was stored for one run need not be stored for the next: count no more of those than every run needs
    places = [(where, number, after) for where, count in ((NAMED, len(stages)), (STORED, 10)) for number in range(count)
              for after in (False, True)]  # fmt: skip
    for number, place in enumerate(places if chosen == "all" else [places[3], places[16], places[23]]):
        uri, log = f"hf://buckets/{hub_bucket}/{number}", tmp_path / str(number)
        stage = f"{place}, {stages[place[1]]}"
        assert run_to_its_end(hub, uri, str(log), place) == -signal.SIGKILL, stage
        recover(uri, log, tmp_path / f"files-{number}", stage)
