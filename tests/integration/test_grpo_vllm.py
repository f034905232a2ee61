"""GRPOTrainer against a real ``vllm serve MODEL --delta-sync URI``: on-policy, bit-exact, through damage and kills."""

from __future__ import annotations

import http.client
import math
import os
import random
import re
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpo_run
import pytest
from helpers import tiny_models
from helpers.server import QUIET_CPU, VllmServer
from transformers import TrainerCallback

from delta_sync.ledger import Ledger
from delta_sync.store.open import open_store
from trl_callback import DeltaSyncCallback
from trl_callback.serving_image import ServingImage
from trl_callback.snapshot import Snapshot

pytestmark = pytest.mark.timeout(900)
STEPS = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny checkpoint; the bucket will lie beside it."""
    folder = tmp_path_factory.mktemp("grpo")
    tiny_models.build(folder / "model", "qwen3")
    return folder


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[VllmServer]:
    with VllmServer(place / "model", place / "server.log", ["--delta-sync", str(place / "bucket")]) as running:
        yield running


class BitExact(TrainerCallback):
    """After every wait: the server's tensors have the digests of the trainer's cast weights, all of them."""

    def __init__(self, sync: DeltaSyncCallback, server: VllmServer) -> None:
        self.server, self.checked, self.versions = server, 0, []  # type: ignore[var-annotated]
        self.model: Any = None
        original = sync.sync

        def sync_and_compare() -> None:
            while True:
                kills = server.kills
                original()
                try:
                    return self.compare()
                except (OSError, http.client.HTTPException):
                    if server.kills == kills:
                        raise  # else it was killed between the wait and the look

        sync.sync = sync_and_compare  # type: ignore[method-assign]

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.model = model

    def compare(self, *, scan: bool = False) -> None:
        answer = self.server.get("/delta_sync/tensors" + ("?scan=1" if scan else ""))
        served = {name: int(entry["digest"], 16) for name, entry in answer["tensors"].items()}
        states = Snapshot(ServingImage(self.model, lambda name: "BF16")).states
        assert served == {name: state.digest for name, state in states.items()}
        self.checked += 1
        self.versions.append(answer["version"])


def run(
    place: Path, server: VllmServer, *, steps: int, more: list | None = None, **settings: Any
) -> tuple[Any, BitExact]:
    sync = DeltaSyncCallback(str(place / "bucket"), **{"sync_timeout": 120.0, **settings})
    exact = BitExact(sync, server)
    trainer = grpo_run.trainer_of(place / "model", server.url, sync, steps=steps, more=[exact, *(more or [])])
    trainer.train()
    sync.sync()
    exact.compare(scan=True)
    sync.close()
    return trainer, exact


def test_every_rollout_is_sampled_from_exactly_the_trainers_weights(place: Path, server: VllmServer) -> None:
    trainer, exact = run(place, server, steps=STEPS)
    assert exact.checked >= STEPS + 1 and exact.versions[:STEPS] == list(range(1, STEPS + 1))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == STEPS
    assert all(entry["delta_sync/staleness"] == 0 for entry in logs)
    assert all(entry["delta_sync/changed_elements"] > 0 for entry in logs[1:])
    assert all(entry["sampling/sampling_logp_difference/mean"] < 0.1 for entry in logs)
    status = server.status()
    assert status["anchors_taken"] == 0 and status["refusals"] == 0  # the first version was proven, not sent


def refusals(place: Path) -> list[str]:
    """The kinds of all distinct refusals that the server has logged."""
    return re.findall(r"version \d+ refused: (\w+)", (place / "server.log").read_text())


def test_a_damaged_object_is_refused_and_healed_while_the_trainer_waits(
    place: Path, server: VllmServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from delta_sync.store.local import LocalStore

    original, damaged = LocalStore.put, []

    def put(self: LocalStore, key: str, data: bytes | memoryview) -> None:
        if key.startswith("deltas/") and not damaged:
            damaged.append(key)
            data = bytes(data[:-1]) + bytes([data[-1] ^ 1])
        original(self, key, data)

    monkeypatch.setattr(LocalStore, "put", put)
    before, logged = server.status(), len(refusals(place))
    _, exact = run(place, server, steps=2)
    after = server.status()
    assert damaged and exact.checked >= 3
    assert after["refusal"] is None
    # The object once, and maybe the new epoch's origin, if it was seen in the moment before its anchor was there.
    kinds = refusals(place)[logged:]
    assert kinds.count("IntegrityError") == 1 and kinds.count("ChainError") <= 1 and len(kinds) <= 2, kinds
    assert after["refusals"] == before["refusals"] + len(kinds)
    assert after["anchors_taken"] <= before["anchors_taken"] + 1  # the new epoch's start; none for the damage


def test_a_killed_trainer_is_followed_by_one_that_continues(place: Path, server: VllmServer) -> None:
    moment = random.Random(3)
    command = [sys.executable, grpo_run.__file__, str(place / "model"), server.url, str(place / "bucket"), "1000"]
    log = place / "killed.log"
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **QUIET_CPU})
    try:
        wait_for(lambda: "finished step 2" in log.read_text(), child, log)
        time.sleep(moment.uniform(0.0, 1.5))
    finally:
        child.kill()
        child.wait(30)
    newest = Ledger(open_store(str(place / "bucket"))).head()
    assert newest is not None
    _, exact = run(place, server, steps=2)
    assert min(exact.versions) > newest.version and exact.checked >= 3


def kill_the_engine_while_it_is_asked(server: VllmServer) -> tuple[Any, float]:
    """It hangs, is asked for its status, and dies: what who asked heard of that, and after how many seconds."""
    heard: list[tuple[Any, float]] = []

    def ask() -> None:
        try:
            heard.append((server.status(), time.monotonic()))
        except urllib.error.HTTPError as error:
            heard.append((error.code, time.monotonic()))
        except OSError as error:
            heard.append((error, time.monotonic()))

    server.engine().suspend()
    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.5)
    killed = time.monotonic()
    server.kill_engine()
    asking.join(90)
    [(answer, when)] = heard or [(None, math.inf)]
    return answer, when - killed


@pytest.mark.parametrize(("kill", "codec"), [(VllmServer.kill, "gap"), (kill_the_engine_while_it_is_asked, "context")])
def test_a_killed_server_comes_back_to_the_trainers_bits(
    place: Path, server: VllmServer, kill: Any, codec: str
) -> None:
    """It is killed while training goes on, and started again a little later: the trainer waits, then goes on."""
    moment = random.Random(5)
    restarted, killed = threading.Event(), []

    def kill_and_restart() -> None:
        time.sleep(moment.uniform(0.0, 1.0))
        killed.append(kill(server))
        time.sleep(1)
        server.start()
        restarted.set()

    class AtStepTwo(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                threading.Thread(target=kill_and_restart).start()

    trainer, exact = run(place, server, steps=20, more=[AtStepTwo()], sync_timeout=300.0, codec=codec)
    newest = Ledger(open_store(str(place / "bucket"))).head()
    assert newest is not None and newest.codec is not None and newest.codec.startswith(codec)
    assert restarted.is_set() and exact.checked >= 21 and trainer.state.global_step == 20
    if kill is kill_the_engine_while_it_is_asked:
        [(answer, seconds)] = killed
        assert answer == 503 and seconds < 15, "not when the patience of who asked ends"


def wait_for(done: Any, child: subprocess.Popen[bytes], log: Path, timeout: float = 180) -> None:
    deadline = time.monotonic() + timeout
    while not done():
        assert child.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.05)
