"""One engine of a group that shares experts, and its letters: what is left when a store fails at the wrong moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.server import free_port

from delta_sync.errors import StoreError, SyncTimeoutError
from vllm_delta_plugin import expert_group
from vllm_delta_plugin.engine_stage import Stager
from vllm_delta_plugin.expert_group import ExpertGroup
from vllm_delta_plugin.group import PeerError
from vllm_delta_plugin.mailbox import Mailbox
from vllm_delta_plugin.proof import Layout
from vllm_delta_plugin.ranks import RankError, Ranks, is_transient

dist: Any = torch.distributed
SECONDS = 2.0  # after which the store's own waits end


@pytest.fixture
def store() -> Any:
    """As vLLM makes it: a TCPStore behind a prefix."""
    return dist.PrefixStore("dp", dist.TCPStore("127.0.0.1", free_port(), 1, True, timeout=timedelta(seconds=SECONDS)))


class Between:
    """A store of which each call may have something happen before it."""

    def __init__(self, store: Any, before: Callable[[str, str], None]) -> None:
        self._store, self._before = store, before

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            key = args[0][0] if isinstance(args[0], list) else args[0]
            self._before(name, str(key))
            return getattr(self._store, name)(*args)

        return call


class Steps:
    """Meetings at which the other engine is armed for the same round."""

    engines = 2

    def __init__(self, store: Any, engine: int) -> None:
        self.store, self.engine = store, engine
        self.meet: Callable[[], None] = lambda: None
        self.step = (0, 0)

    def meet_at(self, function: Callable[[], None]) -> None:
        self.meet = function

    def highest(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def wake(self) -> None:
        pass


MAIN: Any = SimpleNamespace(run=lambda function: function())
PLAN: Any = SimpleNamespace(
    target=SimpleNamespace(version=7, sha256="a" * 64), start="position", anchor=None, deltas=()
)


@pytest.mark.parametrize("size", [1, 3 << 20])
def test_a_letter_of_any_size_is_read_as_it_was_written_until_it_is_burnt(store: Any, size: int) -> None:
    box = Mailbox(store)
    assert box.read("1/ready/0") is None
    box.post("1/ready/0", {"text": "x" * size})
    assert box.has("1/ready/0")
    assert box.read("1/ready/0") == {"text": "x" * size}
    box.burn("1/ready/0")
    assert not box.has("1/ready/0")
    assert box.read("1/ready/0") is None
    box.burn("1/ready/0")
    assert store.num_keys() <= 1, "nothing of it is left"


def test_a_letter_that_is_burnt_while_it_is_read_holds_nobody_up(store: Any) -> None:
    """The store's own ``get`` would wait for what is gone: vLLM's for half an hour."""
    box = Mailbox(store)
    for burn_at in range(1, 4):
        box.post("1/ready/0", "x" * (2 << 20))
        calls: list[str] = []

        def burn(name: str, key: str, last: int = burn_at, calls: list[str] = calls) -> None:
            calls.append(name)
            if len(calls) == last + 1:
                box.burn("1/ready/0")

        assert Mailbox(Between(store, burn)).read("1/ready/0") is None, calls


def test_what_is_armed_when_the_store_fails_is_not_committed_behind_the_coordinators_back(store: Any) -> None:
    failing = False

    def fail(name: str, key: str) -> None:
        if failing and name == "add":
            raise RuntimeError("the engine that serves the store is gone")

    steps = Steps(Between(store, fail), engine=1)
    group = ExpertGroup(steps, threading.Event(), 5.0)
    Mailbox(store).post("1/proposal", _proposal())
    Mailbox(store).count("round", 1)
    assert group.proposed() is not None
    failing, ran = True, []
    with pytest.raises(RuntimeError, match="is gone"):
        group.commit(MAIN, lambda: ran.append(1))
    steps.meet()
    assert not ran


def engine_of(store: Any, engine: int) -> ExpertGroup:
    return ExpertGroup(Steps(store, engine), threading.Event(), 5.0)


def leader_that_cannot_write(store: Any, until: threading.Event) -> ExpertGroup:
    def fail(name: str, key: str) -> None:
        if name == "set" and not until.is_set():
            raise RuntimeError("no")

    return engine_of(Between(store, fail), 0)


def test_a_proposal_that_failed_half_way_does_not_put_the_rounds_out_of_step(store: Any) -> None:
    writable = threading.Event()
    leader, follower = leader_that_cannot_write(store, until=writable), engine_of(store, 1)
    with pytest.raises(RuntimeError, match="no"):
        leader.open(PLAN, "base")
    writable.set()
    leader.open(PLAN, "base")
    proposal = follower.proposed()
    assert proposal is not None
    assert (proposal.round, proposal.version) == (leader.shown()["group"]["round"], 7)


@pytest.mark.parametrize("guilty", [0, 1])
def test_who_fails_after_all_were_ready_is_waited_for_no_longer(store: Any, guilty: int) -> None:
    groups = [ExpertGroup(Steps(store, engine), threading.Event(), 30.0) for engine in range(2)]
    groups[0].open(PLAN, "base")
    assert groups[1].proposed() is not None
    groups[1].open(PLAN, "base")
    with ThreadPoolExecutor() as threads:
        for ready in [threads.submit(group.exchange, [{}]) for group in groups]:
            assert ready.result(10) == [{}, {}]
        ran: list[int] = []
        waits = threads.submit(groups[1 - guilty].commit, MAIN, lambda: ran.append(1))
        groups[guilty].fail(StoreError("the disk is full"))
        with pytest.raises(PeerError, match=f"engine {guilty}: the disk is full") as told:
            waits.result(10)
    assert is_transient(told.value), "no refusal"
    for group in groups:
        group.meet()
    assert not ran


@pytest.mark.parametrize("late", [0, 1])
def test_who_does_not_get_ready_to_commit_is_named(store: Any, late: int) -> None:
    groups = [ExpertGroup(Steps(store, engine), threading.Event(), 1.0) for engine in range(2)]
    groups[0].open(PLAN, "base")
    assert groups[1].proposed() is not None
    waiting = groups[1 - late]
    with ThreadPoolExecutor() as threads:
        waits = threads.submit(waiting.commit, MAIN, lambda: None)
        while waiting.shown()["group"]["waiting_for"] != [late]:
            assert not waits.done()
        with pytest.raises(SyncTimeoutError, match=f"got engines \\[{late}\\] are not"):
            waits.result(10)
    assert waiting.shown()["group"]["waiting_for"] == []


def test_who_goes_on_to_another_round_is_waited_for_no_longer(store: Any) -> None:
    groups = [ExpertGroup(Steps(store, engine), threading.Event(), 30.0) for engine in range(2)]
    groups[0].open(PLAN, "base")
    assert groups[1].proposed() is not None
    groups[0].open(PLAN, "base")
    with pytest.raises(SyncTimeoutError, match="expected no newer round within 30 s, got one"):
        groups[1].check()


def test_who_fails_is_heard_of_while_others_still_stage(store: Any) -> None:
    groups = [ExpertGroup(Steps(store, engine), threading.Event(), 30.0) for engine in range(2)]
    groups[0].open(PLAN, "base")
    assert groups[1].proposed() is not None
    groups[1].fail(RankError(0, "FormatError", "no delta", "deltas/7"))
    staging: Any = [{"ok": True, "error": None, "state": "staging"}]
    stager = Stager(MAIN, Ranks(lambda *_, **__: staging), 30.0, groups[0])
    began = time.monotonic()
    with pytest.raises(PeerError, match="engine 1: rank 0: no delta") as told:
        stager.stage(PLAN, Layout({}, []), [])
    assert (told.value.kind, told.value.object_key) == ("FormatError", "deltas/7")
    assert time.monotonic() - began < 10


def test_the_newest_pin_is_told_once_even_after_one_that_could_not_be(store: Any) -> None:
    writable = threading.Event()
    leader, follower = leader_that_cannot_write(store, until=writable), engine_of(store, 1)
    assert follower.held() is None
    with pytest.raises(RuntimeError, match="no"):
        leader.hold(1)
    writable.set()
    for version in (2, None, 3):
        leader.hold(version)
    assert follower.held() == {"version": 3}
    assert follower.held() is None
    leader.hold(None)
    assert follower.held() == {"version": None}


def test_answers_to_commands_do_not_pile_up(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_group, "_KEPT_ANSWERS", 2)
    group = ExpertGroup(Steps(store, engine=0), threading.Event(), 5.0)
    for order in "abcd":
        done: Future[dict[str, Any]] = Future()
        group.post_when_done(done, order)
        done.set_result({"ok": True, "code": 200, "error": None, "status": {"pinned": None}})
    assert [group.answer(order) is not None for order in "abcd"] == [False, False, True, True]


def _proposal() -> dict[str, Any]:
    return {
        "round": 1, "version": 7, "manifest": "a" * 64, "start": "position", "anchor": None, "folds": False,
        "seconds": 5.0, "keeps_refusal": False, "newest": 7,
    }  # fmt: skip
