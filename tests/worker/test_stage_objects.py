"""A version in several objects, staged one by one while the next are fetched; no engine is needed for that."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from publishing import Publisher, bits, nudged

from delta_sync import fetch as fetching
from delta_sync.dtypes import dtype
from delta_sync.errors import DeltaSyncError, IntegrityError, MappingError
from delta_sync.fetch import fetch
from delta_sync.plan import Position
from vllm_delta_plugin.background import STAGING, Job
from vllm_delta_plugin.commit import Host
from vllm_delta_plugin.coverage import TensorInfo, WeightMap
from vllm_delta_plugin.live_storage import live_storage
from vllm_delta_plugin.regions import make_region
from vllm_delta_plugin.stage import Rank, Staged, stage

SHAPES = {f"layer{k}": (40, 30 + k) for k in range(6)}


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in SHAPES.items()}


def served(values: dict[str, torch.Tensor], aliases: dict[str, str] | None = None) -> WeightMap:
    live = WeightMap(known=frozenset(values), aliases=aliases or {})
    for number, (name, value) in enumerate(values.items()):
        live.storages.append(live_storage(name, value.clone()))
        live.tensors[name] = TensorInfo(dtype("BF16"), tuple(value.shape))
        live.regions[name] = [make_region(name, number, (value.numel(),), 0, (1,), 0, (1,))]
    return live


def staged(live: WeightMap, publisher: Publisher, manifest) -> Staged:
    plan = publisher.ledger.plan(Position(publisher.origin.version, publisher.origin.sha256), None)
    assert plan is not None and plan.target == manifest
    rank = Rank(live, Host(), only_rank=True, limit=2**30)
    job: Job[Staged] = Job("stage", STAGING, lambda job: stage(job, rank, publisher.ledger, plan))
    job._thread.join(60)
    if job.error is not None:
        raise job.error
    assert job.result is not None
    return job.result


def published(folder: Path, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], **how: object):
    """A run of two versions, and the second one's manifest."""
    publisher = Publisher(folder, before)
    for name, value in how.items():
        setattr(publisher, name, value)
    return publisher, publisher.delta(after)


@pytest.mark.parametrize("how", [{"per_tensor": True}, {"ranks": 3}, {}])
def test_what_is_staged_is_what_was_published(tmp_path: Path, how) -> None:
    """Objects with tensors of their own, and objects that share all of them, as several ranks publish them."""
    before = weights()
    after = nudged(before, 0.05, 1)
    publisher, manifest = published(tmp_path / "run", before, after, **how)
    live = served(before)
    assert len(manifest.objects) == {"per_tensor": len(SHAPES), "ranks": 3}.get(next(iter(how), ""), 1)
    ready = staged(live, publisher, manifest)
    sums = live.digests()
    ready.swap.swap(lambda: None)
    for storage in live.storages:
        np.testing.assert_array_equal(storage.array, bits(after[storage.owner]))
    moved = live.digests()
    assert all((sums[key] + change) % 2**64 == moved[key] for key, change in ready.parts.items())
    ready.swap.swap(lambda: None)
    assert live.digests() == sums


def test_an_object_missing_in_the_middle_leaves_everything_as_it_was(tmp_path: Path) -> None:
    before = weights()
    publisher, manifest = published(tmp_path / "run", before, nudged(before, 0.05, 1), per_tensor=True)
    live = served(before)
    publisher.ledger.store.delete(manifest.objects[3].key)
    with pytest.raises(DeltaSyncError, match=manifest.objects[3].key):
        staged(live, publisher, manifest)
    for storage in live.storages:
        np.testing.assert_array_equal(storage.array, bits(before[storage.owner]))


def test_a_stage_that_is_refused_midway_leaves_no_thread_behind(tmp_path: Path) -> None:
    """However long its error is kept, and with it what it was raised in."""
    before = weights()
    publisher, manifest = published(tmp_path / "run", before, nudged(before, 0.05, 1), per_tensor=True)
    live = served({name: value[:7] if name == "layer1" else value for name, value in before.items()})
    others = set(threading.enumerate())
    with pytest.raises(MappingError, match="layer1") as kept:
        staged(live, publisher, manifest)
    deadline = time.monotonic() + 10
    while any(thread.name == "delta-sync-fetch" for thread in set(threading.enumerate()) - others):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert kept.value.__traceback__ is not None


def test_objects_come_in_order_a_few_ahead_and_no_more_bytes_than_allowed(tmp_path: Path) -> None:
    before = weights()
    publisher, manifest = published(tmp_path / "run", before, nudged(before, 0.05, 1), per_tensor=True)
    refs = manifest.objects
    begun: list[str] = []
    lock = threading.Lock()
    read = publisher.ledger.read_object

    def noted(ref):
        with lock:
            begun.append(ref.key)
        return read(ref)

    publisher.ledger.read_object = noted
    coming = fetch(publisher.ledger, refs, bytes)
    assert next(coming) == read(refs[0])
    assert len(begun) <= fetching.AHEAD
    assert list(coming) == [read(ref) for ref in refs[1:]]
    begun.clear()
    for ref, data in zip(refs, fetch(publisher.ledger, refs, bytes, most_bytes=1), strict=True):
        assert len(begun) <= refs.index(ref) + 2 and data == read(ref)


def test_objects_do_not_begin_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an engine in the same process would have to wait for the interpreter behind all their threads."""
    before = weights()
    publisher, manifest = published(tmp_path / "run", before, nudged(before, 0.05, 1), per_tensor=True)
    done: list[object] = []
    begin = fetching.Crew.begin

    def noted(crew, call):
        done.append("begin")
        return begin(crew, call)

    monkeypatch.setattr(fetching.Crew, "begin", noted)
    monkeypatch.setattr(fetching, "time", SimpleNamespace(sleep=done.append))
    assert len(list(fetch(publisher.ledger, manifest.objects, bytes))) == len(manifest.objects) > 3
    assert done == ["begin", fetching.BETWEEN] * len(manifest.objects)


def test_bytes_are_worked_on_by_no_more_threads_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTA_SYNC_THREADS", "2")
    before = weights()
    publisher, manifest = published(tmp_path / "run", before, nudged(before, 0.05, 1), per_tensor=True)
    assert len(manifest.objects) > 3
    lock, at_work, most = threading.Lock(), 0, 0

    def work(data: bytes) -> int:
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        time.sleep(0.02)
        with lock:
            at_work -= 1
        return len(data)

    assert list(fetch(publisher.ledger, manifest.objects, work)) == [ref.size for ref in manifest.objects]
    assert most <= 2


def test_a_damaged_object_is_an_error_where_it_is_due(tmp_path: Path) -> None:
    before = weights()
    publisher, manifest = published(tmp_path / "run", before, nudged(before, 0.05, 1), per_tensor=True)
    refs = manifest.objects
    publisher.ledger.store.put(refs[2].key, b"x" * refs[2].size)
    coming = fetch(publisher.ledger, refs, bytes)
    assert [next(coming), next(coming)] == [publisher.ledger.read_object(ref) for ref in refs[:2]]
    with pytest.raises(IntegrityError, match=refs[2].key):
        next(coming)
