"""A version in several objects: they overlap, memory is bounded, and a failure in the middle commits nothing."""

from __future__ import annotations

import threading
import time

import bucket
import numpy as np
import pytest
import tiny
from test_publisher import Run, running

from delta_sync.dtypes import dtype
from delta_sync.errors import MappingError, StoreError
from delta_sync.manifest import ObjectRef
from delta_sync.tensor_delta import TensorDelta
from trl_callback import parts
from trl_callback.parts import PARALLEL, Parts

BF16 = dtype("BF16")


def delta(number: int, size: int = 100) -> TensorDelta:
    return TensorDelta(f"t{number}", BF16, (size,), "ulp", np.array([number]), np.ones(1, np.uint16))


def ref(data: bytes) -> ObjectRef:
    return ObjectRef(data.decode(), len(data), "0" * 64)


def names(part) -> tuple[bytes, str]:
    return ",".join(d.name for d in part).encode(), "gap"


def test_objects_hold_whole_tensors_up_to_the_bucket_in_order() -> None:
    made = Parts(names, ref, bucket_bytes=400)
    for number, size in enumerate((100, 100, 1, 500, 100)):
        made.add(delta(number, size))
    assert [one.data for one in made.finish()] == [b"t0,t1", b"t2", b"t3", b"t4"]
    assert Parts(names, ref, 400).finish() == []


def test_uploads_run_while_more_is_found_and_never_too_many() -> None:
    first, more = threading.Event(), threading.Event()
    busy, most, lock = [0], [0], threading.Lock()

    def put(data: bytes) -> ObjectRef:
        with lock:
            busy[0] += 1
            most[0] = max(most[0], busy[0])
        first.set()
        assert more.wait(20)
        time.sleep(0.01)
        with lock:
            busy[0] -= 1
        return ref(data)

    made = Parts(names, put, bucket_bytes=200)
    for number in range(2):
        made.add(delta(number))
    assert first.wait(20)  # t0 is on its way although nobody has said that all is found
    for number in range(2, 20):
        made.add(delta(number))
    more.set()
    assert [one.data for one in made.finish()] == [f"t{n}".encode() for n in range(20)]
    assert most[0] == PARALLEL


def test_a_failed_object_is_stored_again_with_the_same_bytes_and_no_other() -> None:
    encoded: list[bytes] = []
    stored: list[bytes] = []
    faults = [True]

    def encode(part) -> tuple[bytes, str]:
        encoded.append(names(part)[0])
        return names(part)

    def put(data: bytes) -> ObjectRef:
        if data == b"t1" and faults:
            faults.pop()
            raise StoreError("t1", expected="a write", got="an injected fault")
        stored.append(data)
        return ref(data)

    made = Parts(encode, put, bucket_bytes=200)
    for number in range(3):
        made.add(delta(number))
    with pytest.raises(StoreError):
        made.finish()
    assert sorted(stored) == [b"t0", b"t2"]
    assert [one.data for one in made.finish()] == [b"t0", b"t1", b"t2"]
    assert sorted(stored) == sorted(encoded) == [b"t0", b"t1", b"t2"]


@pytest.mark.parametrize("codec", ["gap", "context"])
def test_versions_in_many_objects_hold_the_models_bits(codec: str) -> None:
    with running(bucket_bytes=10_000, codec=codec) as run:
        for _ in range(3):
            run.train()
            run.check()
        chain = bucket.chain(run.uri)
        assert len(chain) == 4 and all(len(manifest.objects) > 3 for manifest in chain[1:])
        run.publisher.report({"a": None})
        run.chain.republish(chain[-1].version)  # all of its objects are at hand


def test_a_failure_between_two_objects_commits_nothing_and_the_next_try_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PARALLEL", 1)
    with running(bucket_bytes=10_000) as run:
        run.train()
        run.check()
        run.store.faults = [("deltas/", True), ("deltas/", False), ("deltas/", False)]
        run.train()
        run.check()
        assert not run.store.faults
        assert [m.version for m in bucket.chain(run.uri)] == [1, 2, 3]


def test_a_capture_that_fails_halfway_leaves_no_version() -> None:
    run = Run(bucket_bytes=2_000)
    run.publisher.start()
    try:
        run.train()
        run.check()
        tiny.nudge(run.model, seed=9)
        last = run.model.model.norm
        last.weight = type(last.weight)(last.weight.detach()[:-1])
        with pytest.raises(MappingError, match="norm"):
            run.publisher.capture(run.image, 2)
        run.publisher.flush(120)
        assert [m.version for m in bucket.chain(run.uri)] == [1, 2]
        stored = [info.key for info in run.store.list("deltas/")]
        assert len(stored) >= len(bucket.chain(run.uri)[1].objects)
    finally:
        run.publisher.stop()
