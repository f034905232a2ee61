"""Engines that share experts, as two processes with vLLM's meeting, gloo and store, but no model: all or none."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_fakes import ANSWER, SHAPES, Weights
from helpers.publish import Publisher
from helpers.server import QUIET_CPU, free_port

HERE = Path(__file__).parent
CHILD = HERE / "sharing_engine.py"
SECONDS = 60.0  # until a test gives up


class Engine:
    """One of the two processes."""

    def __init__(self, number: int, port: int, run: str, settings: dict[str, Any], log: Path) -> None:
        self.log = log
        command = [sys.executable, str(CHILD), str(number), "2", str(port), run, json.dumps(settings)]
        paths = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, **QUIET_CPU, "PYTHONPATH": os.pathsep.join(paths)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log.open("w")}
        self.process = subprocess.Popen(command, text=True, env=env, **pipes)

    def send(self, **question: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise AssertionError(self.log.read_text()[-3000:])

    def ask(self, **question: Any) -> Any:
        self.send(**question)
        return self.receive()


class Engines:
    """Both of them, and the trainer."""

    def __init__(self, folder: Path, fail: dict[str, list[str]] | None = None, **config: Any) -> None:
        random = np.random.default_rng(0)
        weights: Weights = {n: random.integers(0, 2**15, shape).astype("<u2") for n, shape in SHAPES.items()}
        self.trainer = Publisher(str(folder / "run"), weights)
        self.trainer.origin()
        bits = {name: value.tobytes().hex() for name, value in weights.items()}
        settings = {"weights": bits, "fail": fail or {}, "config": config}
        port = free_port()
        self.each = [Engine(n, port, str(folder / "run"), settings, folder / f"{n}.log") for n in range(2)]
        for engine in self.each:
            assert engine.receive() == "ready"

    def all(self, **question: Any) -> list[Any]:
        for engine in self.each:
            engine.send(**question)
        return [engine.receive() for engine in self.each]

    def wait(self, what: str, condition: Callable[[dict[str, Any]], Any], *, every: bool = True) -> list[Any]:
        deadline = time.monotonic() + SECONDS
        while True:
            found = self.all()
            if (all if every else any)(condition(status) for status in found):
                return found
            assert time.monotonic() < deadline, (what, found, [engine.log.read_text()[-2000:] for engine in self.each])
            time.sleep(0.02)

    def wait_version(self, version: int) -> list[Any]:
        found = self.wait(f"version {version}", lambda status: status["version"] == version)
        assert found[0]["group"]["step"] == found[1]["group"]["step"]
        return found

    def publish(self) -> int:
        """A version of which every tensor differs, and the mark that steps compare in particular."""
        version = (self.trainer.writer.head.version if self.trainer.writer.head else 0) + 1
        self.trainer.weights["norm"][0] = version
        return self.trainer.step(version, 0.2).version

    def assert_live(self, weights: Weights) -> list[Any]:
        """Each engine's part, of every tensor; no step ever computed with two versions."""
        found = self.all()
        for number, status in enumerate(found):
            assert status["mixed"] == 0
            bits = {n: np.frombuffer(bytes.fromhex(b), "<u2").reshape(SHAPES[n]) for n, b in status["bits"].items()}
            assert np.array_equal(bits["norm"], weights["norm"])
            columns = slice(3 * number, 3 * number + 3)
            assert np.array_equal(bits["w"][:, columns], weights["w"][:, columns])
        return found

    def close(self) -> None:
        for engine in self.each:
            assert engine.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                engine.process.stdin.close()
        for engine in self.each:
            try:
                engine.process.wait(10)
            except subprocess.TimeoutExpired:
                engine.process.kill()
                engine.process.wait()


@pytest.fixture
def engines_of(tmp_path: Path) -> Iterator[Callable[..., Engines]]:
    made: list[Engines] = []

    def make(**settings: Any) -> Engines:
        made.append(Engines(tmp_path, **settings))
        return made[-1]

    yield make
    for engines in made:
        engines.close()


def copy(weights: Weights) -> Weights:
    return {name: bits.copy() for name, bits in weights.items()}


def test_idle_and_busy_engines_commit_at_one_step(engines_of: Callable[..., Engines]) -> None:
    engines = engines_of()
    engines.wait_version(1)
    engines.wait_version(engines.publish())  # idle: they are woken for it
    engines.assert_live(engines.trainer.weights)
    engines.all(busy=True)
    for _ in range(5):
        engines.wait_version(engines.publish())
        found = engines.assert_live(engines.trainer.weights)
    assert all(status["forwards"] > 20 and status["commits"] == 6 for status in found)
    assert all(status["switch"] < 1.1e-4 for status in found), "threads do not keep the interpreter from the engine's"
    engines.all(busy=False)
    newest = [engines.publish() for _ in range(3)][-1]
    engines.wait_version(newest)
    engines.assert_live(engines.trainer.weights)


@pytest.mark.parametrize("guilty", [0, 1])
def test_what_one_engine_cannot_stage_no_engine_takes(guilty: int, engines_of: Callable[..., Engines]) -> None:
    engines = engines_of(fail={str(guilty): ["stage"]})
    engines.wait_version(1)
    old = copy(engines.trainer.weights)
    engines.all(busy=True)
    version = engines.publish()
    found = engines.wait("a refusal", lambda status: status["refusal"])
    assert [status["version"] for status in found] == [1, 1]
    assert "stage fails" in found[guilty]["refusal"]["error"]
    assert f"engine {guilty}: " in found[1 - guilty]["refusal"]["error"]
    assert found[0]["refusal"]["version"] == found[1]["refusal"]["version"] == version
    engines.assert_live(old)
    engines.each[guilty].ask(fail=[])
    engines.wait_version(version)
    engines.assert_live(engines.trainer.weights)


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_commit_that_fails_on_one_engine_is_undone_on_all(guilty: int, engines_of: Callable[..., Engines]) -> None:
    engines = engines_of(fail={str(guilty): ["commit"]})
    engines.wait_version(1)
    old = copy(engines.trainer.weights)
    engines.all(busy=True)
    version = engines.publish()
    found = engines.wait("two rollbacks", lambda status: status["rollbacks"] >= 2)
    assert [status["version"] for status in found] == [1, 1]
    assert "commit fails" in found[guilty]["last_error"]["error"]
    assert f"engine {guilty}: could not commit" in found[1 - guilty]["last_error"]["error"]
    engines.assert_live(old)
    engines.each[guilty].ask(fail=[])
    engines.wait_version(version)
    engines.assert_live(engines.trainer.weights)


@pytest.mark.long
def test_an_engine_that_cannot_undo_ends_and_takes_the_group_along(engines_of: Callable[..., Engines]) -> None:
    engines = engines_of(fail={"0": ["commit"], "1": ["undo"]})
    engines.wait_version(1)
    engines.all(busy=True)
    engines.publish()
    for engine in reversed(engines.each):
        engine.process.wait(SECONDS)
    assert "could not be undone" in engines.each[1].log.read_text()


@pytest.mark.parametrize("how", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_nothing_is_taken_while_an_engine_is_late_or_gone(
    how: signal.Signals, engines_of: Callable[..., Engines]
) -> None:
    engines = engines_of(stage_timeout=2.0)
    engines.wait_version(1)
    late = engines.each[1].process
    late.send_signal(how)
    version = engines.publish()
    deadline = time.monotonic() + SECONDS
    while (status := engines.each[0].ask())["last_error"] is None:
        assert time.monotonic() < deadline
    assert "no answer from engines [1]" in status["last_error"]["error"]
    assert "within 2 s" in status["last_error"]["error"]
    assert (status["version"], status["refusal"], status["ready"]) == (1, None, True)
    if how == signal.SIGSTOP:
        late.send_signal(signal.SIGCONT)
        engines.wait_version(version)
        engines.assert_live(engines.trainer.weights)


@pytest.mark.long
@pytest.mark.parametrize("guilty", [0, 1])
def test_an_engine_killed_half_way_through_a_commit_ends_the_others(
    guilty: int, engines_of: Callable[..., Engines]
) -> None:
    engines = engines_of(fail={str(guilty): ["die"]})
    engines.wait_version(1)
    engines.all(busy=True)
    engines.publish()
    for engine in engines.each:
        engine.process.wait(SECONDS)
    assert "half way through a commit" in engines.each[1 - guilty].log.read_text()


@pytest.mark.long
def test_an_engine_that_stages_too_long_holds_up_no_step(engines_of: Callable[..., Engines]) -> None:
    engines = engines_of(stage_timeout=1.0)
    engines.wait_version(1)
    engines.all(busy=True)
    engines.each[1].ask(may_stage=False)
    version = engines.publish()
    found = engines.wait("an error", lambda status: status["last_error"])
    assert "staging version 2" in found[1]["last_error"]["error"]
    assert [status["version"] for status in found] == [1, 1]
    before = found[0]["forwards"]
    engines.wait("more steps", lambda status: status["forwards"] > before + 50)
    engines.each[1].ask(may_stage=True)
    engines.wait_version(version)
    engines.assert_live(engines.trainer.weights)


@pytest.mark.long
def test_an_operator_takes_all_engines_back_and_on_again(engines_of: Callable[..., Engines]) -> None:
    engines = engines_of()
    engines.wait_version(1)
    engines.wait_version(engines.publish())
    second = copy(engines.trainer.weights)
    engines.wait_version(engines.publish())
    answers = engines.all(control=["rollback", 2], order="order 0")
    assert [(answer["code"], answer["status"]["version"]) for answer in answers] == [(200, 2)] * 2
    assert [answer["status"]["pinned"] for answer in answers] == [2, 2]
    engines.wait_version(2)
    engines.assert_live(second)
    answers = engines.all(control=["rollback", 3], order="order 1")
    assert [answer["code"] for answer in answers] == [409, 409]
    assert [answer["code"] for answer in engines.all(control=["unpin", None], order="order 2")] == [200, 200]
    engines.wait_version(3)
    engines.assert_live(engines.trainer.weights)


@pytest.mark.long
def test_damage_in_one_engine_is_everyones_and_an_anchor_heals_it(engines_of: Callable[..., Engines]) -> None:
    engines = engines_of()
    engines.wait_version(1)
    manifest = engines.trainer.writer.head
    engines.each[1].ask(spoil=True)
    engines.each[1].ask(scan=True)
    found = engines.wait("all to know", lambda status: status["state"] == "poisoned")
    assert "engine 1: live region" in found[0]["last_error"]["error"]
    assert [status["ready"] for status in found] == [False, False]
    assert manifest is not None
    data = np.concatenate([engines.trainer.weights[name].ravel() for name in SHAPES]).tobytes()
    engines.trainer.anchor(manifest, {"w.safetensors": data})
    engines.wait_version(1)
    engines.assert_live(engines.trainer.weights)


@pytest.mark.long
def test_an_anchor_too_large_to_stage_is_refused_by_name(engines_of: Callable[..., Engines]) -> None:
    engines = engines_of(fail={"1": ["too_small"]})
    engines.wait_version(1)
    data = np.concatenate([engines.trainer.weights[name].ravel() for name in SHAPES]).tobytes()
    assert engines.trainer.writer.head is not None
    engines.trainer.anchor(engines.trainer.writer.head, {"w.safetensors": data})
    answers = engines.all(control=["reload", None], order="order 3")
    assert [answer["code"] for answer in answers] == [409, 409]
    assert "engines that share experts load none in place" in answers[0]["error"]
    engines.assert_live(engines.trainer.weights)


def test_what_is_newest_is_the_same_on_all_whatever_is_taken(engines_of: Callable[..., Engines]) -> None:
    """Else the followers' lag would be none, and they ready, while they hold or fall back to something older."""
    engines = engines_of()
    for _ in range(2):
        newest = engines.publish()
    engines.wait_version(newest)
    for order, (action, version) in enumerate((("rollback", 1), ("pin", 2))):
        engines.all(control=[action, version], order=f"order {order}")
        found = engines.wait_version(version)
        assert [status["newest_version"] for status in found] == [newest, newest]


def test_only_what_engine_0_refuses_is_refused(engines_of: Callable[..., Engines]) -> None:
    """Not what an order fails at, nor what is tried in the place of a refused version."""
    engines = engines_of(fail={"1": ["stage"]})
    engines.wait_version(1)
    assert [answer["code"] for answer in engines.all(control=["pin", None], order="order 0")] == [200, 200]
    for _ in range(2):
        newest = engines.publish()
    answers = engines.all(control=["pin", 2], order="order 1")
    assert [answer["code"] for answer in answers] == [409, 409]
    assert [(status["refusal"], status["refusals"]) for status in engines.all()] == [(None, 0)] * 2
    engines.all(control=["unpin", None], order="order 2")
    engines.wait("a refusal", lambda status: status["refusal"])
    engines.wait("a look at version 2", lambda status: status["group"]["round"] >= 4)
    engines.wait("the same", lambda status: status["refusal"]["version"] == newest)
    assert [status["refusals"] for status in engines.all()] == [1, 1]
    engines.each[1].ask(fail=[])
    found = engines.wait_version(newest)
    assert [status["refusal"] for status in found] == [None, None]


def test_an_engine_that_may_not_commit_before_a_scan_which_fails_says_so(engines_of: Callable[..., Engines]) -> None:
    engines = engines_of(audit_commits=1)
    engines.wait_version(1)
    engines.each[1].ask(fail=["audit_poll"])
    engines.wait_version(engines.publish())
    version = engines.publish()
    found = engines.wait("an error", lambda status: status["last_error"])
    assert "engine 1: scan of live memory" in found[0]["last_error"]["error"]
    assert [(status["version"], status["refusals"]) for status in found] == [(version - 1, 0)] * 2
    engines.each[1].ask(fail=[])
    engines.wait_version(version)
    engines.assert_live(engines.trainer.weights)


def test_damage_that_a_round_healed_before_the_others_heard_of_it_is_no_damage_any_more(
    engines_of: Callable[..., Engines],
) -> None:
    """Engine 0 looks at the store for up to a second: what it proposes then is older than the news."""
    engines = engines_of()
    engines.wait_version(1)
    for version in (2, 3):
        engines.each[1].ask(damaged="layers.0.experts")
        engines.each[1].ask(scan=True)
        engines.publish()
        engines.wait("all healthy", lambda s, version=version: (s["version"], s["state"]) == (version, "live"))
        engines.assert_live(engines.trainer.weights)
        found = engines.each[1].ask(scan=True)
        assert found["version"] == version, "made anew with the version"


def test_what_engine_0_saw_first_is_no_refusal(engines_of: Callable[..., Engines]) -> None:
    """To which a trainer would answer with complete weights."""
    engines = engines_of(fail={"1": ["sees late"]})
    engines.wait_version(1)
    for _ in range(2):
        found = engines.wait_version(engines.publish())
        assert [(status["refusals"], status["last_error"]) for status in found] == [(0, None)] * 2
    data = np.concatenate([engines.trainer.weights[name].ravel() for name in SHAPES]).tobytes()
    assert engines.trainer.writer.head is not None
    engines.trainer.anchor(engines.trainer.writer.head, {"w.safetensors": data})
    answers = engines.all(control=["reload", None], order="order 0")
    assert [answer["code"] for answer in answers] == [200, 200], answers
    found = engines.assert_live(engines.trainer.weights)
    assert [(status["refusals"], status["last_error"]) for status in found] == [(0, None)] * 2


def test_a_command_is_answered_in_time_during_a_round(engines_of: Callable[..., Engines]) -> None:
    engines = engines_of()
    engines.wait_version(1)
    engines.each[1].ask(may_stage=False)
    version = engines.publish()
    engines.wait("a round", lambda status: status["group"]["round"] == 2)
    answers = engines.all(control=["pin", None], order="order 0", seconds=0.5)
    assert [answer["code"] for answer in answers] == [504, 504]
    engines.each[1].ask(may_stage=True)
    engines.wait_version(version)
    engines.wait("what is carried out late", lambda status: status["pinned"] == version)


def test_what_follows_readiness_fails_for_all_at_once(engines_of: Callable[..., Engines]) -> None:
    engines = engines_of(fail={"1": ["arm"]})  # and stage_timeout is far longer than a test
    engines.wait_version(1)
    old = copy(engines.trainer.weights)
    version = engines.publish()
    found = engines.wait("an error", lambda status: status["last_error"])
    assert "engine 1: it can't be armed" in found[0]["last_error"]["error"]
    assert [status["version"] for status in found] == [1, 1]
    engines.assert_live(old)
    engines.each[1].ask(fail=[])
    engines.wait_version(version)
    engines.assert_live(engines.trainer.weights)
