"""Salt, main-thread queue, hold, status, replica name, API key, redaction, read-back: one behaviour each."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from delta_sync.errors import FormatError, MappingError, StoreError
from vllm_delta_plugin.api_key import KeyRing
from vllm_delta_plugin.cache_salt import CacheSalt, Salted
from vllm_delta_plugin.holding import Hold
from vllm_delta_plugin.main_thread import EngineBroken, MainThread, Stopped
from vllm_delta_plugin.read_back import assemble
from vllm_delta_plugin.redact import redact_text
from vllm_delta_plugin.replica_id import replica_id
from vllm_delta_plugin.status import Facts, Refusal, Status


class Request:
    def __init__(self, salt: str | None, tokens: int = 3) -> None:
        self.cache_salt, self.tokens = salt, tokens
        self.block_hashes: list[Any] = []
        self.mm_features: list[Any] = []
        self.num_preemptions = 0
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        self.block_hashes.extend((self.cache_salt, i) for i in range(len(self.block_hashes), self.tokens))


def test_a_waiting_request_is_hashed_anew_once_after_a_commit() -> None:
    salt = CacheSalt()
    salted = Salted(salt, "user")
    request = Request(salted.cache_salt)
    before = list(request.block_hashes)
    assert not salted.refresh(request)
    assert request.block_hashes == before
    salt.advance()
    assert salted.refresh(request)
    assert len(request.block_hashes) == 3
    assert not set(before) & set(request.block_hashes)
    assert not salted.refresh(request)


def test_salts_differ_by_engine_run_generation_and_user() -> None:
    one, two = CacheSalt(), CacheSalt()
    salts = {one.combine(g, u) for g in (0, 1) for u in (None, "a", "b")} | {two.combine(0, None)}
    assert len(salts) == 7
    assert one.combine(0, "a") == one.combine(0, "a")


def test_functions_run_on_the_pumping_thread_and_bring_back_results_and_errors() -> None:
    woken = threading.Event()
    main = MainThread(threading.Event(), woken.set)
    results: list[Any] = []

    def ask() -> None:
        results.append(main.run(threading.get_ident))
        try:
            main.run(lambda: 1 // 0)
        except ZeroDivisionError as error:
            results.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    deadline = time.monotonic() + 10
    while thread.is_alive() and time.monotonic() < deadline:
        if woken.wait(0.01):
            woken.clear()
            main.pump()
    assert results[0] == threading.get_ident()
    assert isinstance(results[1], ZeroDivisionError)


def test_a_broken_engine_reaches_the_loop() -> None:
    main = MainThread(threading.Event())
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            main.run(fail)
        except EngineBroken as error:
            caught.append(error)

    def fail() -> None:
        raise EngineBroken("no")

    thread = threading.Thread(target=ask)
    thread.start()
    with pytest.raises(EngineBroken):
        while thread.is_alive():
            main.pump()
    thread.join(10)
    assert caught


def test_a_stopping_engine_is_not_waited_for() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        MainThread(stop).run(lambda: None)


def test_a_hold_doubles_and_ends_early_on_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("vllm_delta_plugin.holding.time.monotonic", lambda: now[0])
    hold = Hold(longest=1.0)
    assert not hold.active
    waits = []
    for _ in range(4):
        hold.start("a")
        start = now[0]
        while not hold.over("a"):
            now[0] += 0.05
        waits.append(round(now[0] - start, 2))
    assert waits == pytest.approx([0.25, 0.5, 1.0, 1.0], abs=0.06)
    hold.start("a")
    assert not hold.over("a")
    assert hold.over("b")
    hold.start()  # a failure that no change in the store can mend
    assert not hold.over("b")
    hold.clear()
    assert not hold.active


def make_status(uri: str = "runs/a") -> Status:
    return Status(Facts("r", uri, "m", "BF16", "processed_logprobs", "f"))


def test_status_states_and_lag() -> None:
    status = make_status()
    assert status.to_dict()["state"] == "waiting"
    status.saw(4)
    assert status.to_dict()["lag"] == 4
    status.served.version = 3
    assert (status.state, status.to_dict()["lag"]) == ("live", 1)
    refusal = Refusal(4, "sha", "deltas/4", "IntegrityError", "bad")
    assert status.refuse(refusal)
    assert not status.refuse(refusal)  # the same one again is neither counted nor logged
    assert (status.state, status.counters.refusals) == ("refused", 1)
    status.update(poisoned=True)
    assert status.state == "poisoned"


def test_status_hides_secrets_in_uri_and_errors() -> None:
    uri = "https://me:secret@host/run"
    status = make_status(uri)
    status.note_error(StoreError(f"store {uri}", got="time-out"))
    status.refuse(Refusal(1, "s", None, "ChainError", f"no anchor in {uri}"))
    assert "secret" not in str(status.to_dict())
    assert "host/run" in str(status.to_dict())


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("runs/a", "runs/a"),
        ("/abs/run", "/abs/run"),
        ("file:///abs/run", "file:///abs/run"),
        ("s3://key:secret@bucket/run", "s3://bucket/run"),
        ("https://host/run?sig=secret", "https://host/run"),
    ],
)
def test_redaction(uri: str, shown: str) -> None:
    assert redact_text(f"at {uri}: no", uri) == f"at {shown}: no"


def test_replica_names() -> None:
    assert replica_id("box-1") == "box-1"
    assert replica_id("box-1", 2) == "box-1-dp2"
    assert replica_id(None) != replica_id(None)
    for bad in ("", "a/b", "..", ".hidden", "a" * 200):
        with pytest.raises(FormatError):
            replica_id(bad)


def test_api_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert KeyRing(None).accepts(None)
    ring = KeyRing(["one", "two"])
    assert ring.accepts("Bearer one")
    assert ring.accepts("bearer two")
    for bad in (None, "", "Bearer", "Bearer three", "Basic one", "one"):
        assert not ring.accepts(bad)
    monkeypatch.setenv("VLLM_API_KEY", "env")
    assert KeyRing(None).accepts("Bearer env")
    assert not KeyRing(["one"]).accepts("Bearer env")  # the option wins over the environment, as in vLLM


def test_read_back_puts_shards_together() -> None:
    whole = np.arange(12, dtype="<u2").reshape(3, 4)
    described = {"dtype": "BF16", "shape": [3, 4]}
    left, right = "w|0|(4, 1)|(3, 2)", "w|2|(4, 1)|(3, 2)"
    replies = [
        {"ok": True, "regions": {left: whole[:, :2].tobytes()}},
        {"ok": True, "regions": {right: whole[:, 2:].tobytes(), left: whole[:, :2].tobytes()}},
    ]
    assert assemble("w", described, replies) == whole.tobytes()
    replies[1]["regions"][left] = bytes(12)  # type: ignore[index]
    with pytest.raises(MappingError, match="rank 1"):
        assemble("w", described, replies)
