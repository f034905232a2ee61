"""Parts of the worker that need no engine: swaps, audits, jobs, headers."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace as Space
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from delta_sync.errors import FormatError, IntegrityError, MappingError, SyncTimeoutError
from vllm_delta_plugin import background, quantised_load, rank_sync
from vllm_delta_plugin.audit import Scan, scan
from vllm_delta_plugin.background import Cancelled, Job, describe
from vllm_delta_plugin.checkpoint_index import checkpoint_tensors
from vllm_delta_plugin.commit import HalfSwapped, Host, HostSwap, all_or_none
from vllm_delta_plugin.coverage import TensorInfo, WeightMap
from vllm_delta_plugin.faults import Faults, InjectedFault
from vllm_delta_plugin.gpu_swap import _TorchGroup
from vllm_delta_plugin.live_storage import LiveStorage, live_storage, model_device
from vllm_delta_plugin.regions import make_region
from vllm_delta_plugin.rehearsal import rehearse
from vllm_delta_plugin.requantised import Module, Requantised
from vllm_delta_plugin.staged import StageBuilder, StageTooLargeError, Update


def storages(count: int = 3, size: int = 50) -> list[LiveStorage]:
    generator = torch.Generator().manual_seed(1)
    return [live_storage(f"p{i}", torch.randn(size, generator=generator).to(torch.bfloat16)) for i in range(count)]


def updates(live: list[LiveStorage]) -> list[Update]:
    rng = np.random.default_rng(2)
    return [
        Update(s, np.sort(rng.choice(s.array.size, 9, replace=False)), rng.integers(0, 2**16, 9).astype(np.uint16))
        for s in live
    ]


def test_swapping_twice_restores_every_bit() -> None:
    live = storages()
    staged = updates(live)
    before, wanted = [s.array.copy() for s in live], [u.bits.copy() for u in staged]
    swap = HostSwap(staged)
    swap.swap(lambda: None)
    for storage, update, new, old in zip(live, staged, wanted, before, strict=True):
        assert np.array_equal(storage.array[update.index], new)
        untouched = np.ones(old.size, bool)
        untouched[update.index] = False
        assert np.array_equal(storage.array[untouched], old[untouched])
    swap.swap(lambda: None)
    assert all(np.array_equal(s.array, b) for s, b in zip(live, before, strict=True))
    assert all(np.array_equal(u.bits, w) for u, w in zip(staged, wanted, strict=True))


def test_a_swap_that_fails_half_way_puts_the_old_bits_back() -> None:
    live = storages()
    before = [s.array.copy() for s in live]
    touched = []

    def fail() -> None:
        touched.append(not np.array_equal(live[0].array, before[0]))
        raise InjectedFault("half way")

    with pytest.raises(InjectedFault):
        HostSwap(updates(live)).swap(fail)
    assert touched == [True], "the fault must come after something was written"
    assert all(np.array_equal(s.array, b) for s, b in zip(live, before, strict=True))


def test_a_swap_that_cannot_be_taken_back_says_so() -> None:
    tries: list[int] = []

    def exchange(part: int) -> None:
        tries.append(part)
        if part == 1 or tries.count(part) == 2:
            raise InjectedFault(f"at {part}")

    with pytest.raises(HalfSwapped, match=r"at 1.*at 0"):
        all_or_none([0, 1], exchange, lambda: None)
    assert tries == [0, 1, 0]


def test_a_rank_whose_swap_was_not_taken_back_cannot_undo(tmp_path: Path) -> None:
    """So the engine ends, rather than serve half of a version as the one before."""
    rank = rank_sync.RankSync(weight_map(), {"uri": str(tmp_path / "run")}, rank=0, world_size=1)

    def swap(between: Callable[[], None]) -> None:
        raise HalfSwapped("at 1, and then at 0")

    rank._stage = run(lambda job: Space(target=2, swap=Space(swap=swap)))
    rank._base = rank._generation
    with pytest.raises(HalfSwapped):
        rank.commit(2)
    with pytest.raises(IntegrityError, match="some of version 2's"):
        rank.undo(2)


def test_a_load_that_nobody_waits_for_is_stopped_and_stands_in_the_way_of_nothing(tmp_path: Path) -> None:
    rank = rank_sync.RankSync(weight_map(), {"uri": str(tmp_path / "run")}, rank=0, world_size=1)
    release = threading.Event()

    def load(job: Job[dict[str, int]]) -> dict[str, int]:
        assert release.wait(20)
        job.check()
        return {}

    rank._dense = Job("load", 0, load)
    with pytest.raises(SyncTimeoutError, match="being stopped"):  # which says nothing about the version
        rank.stage_drop()
    release.set()
    wait_for(rank._dense)
    assert rank.stage_drop() == {"state": "idle"}


def test_a_setting_that_makes_no_sense_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTA_SYNC_THREADS", "0")
    with pytest.raises(FormatError, match="DELTA_SYNC_THREADS"):
        rank_sync.RankSync(weight_map(), {"uri": str(tmp_path / "run")}, rank=0, world_size=1)


class StandsStill(Host):
    """A device whose swaps do nothing."""

    def prepare(self, updates: object) -> Space:
        return Space(swap=lambda between: None)


class InTurn(Host):
    """A device where only what is made while ``reading`` comes before what is read then, as on a GPU's side stream."""

    def __init__(self) -> None:
        self.reads = False

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        self.reads = True
        yield
        self.reads = False


def test_a_rehearsals_memory_is_made_in_turn_with_what_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it is read before it is zero, and a start fails where a GPU is busy."""
    device, zeros, made = InTurn(), torch.zeros, []
    monkeypatch.setattr(torch, "zeros", lambda *size, **more: made.append(device.reads) or zeros(*size, **more))
    rehearse(storages(1)[0], device)
    assert made == [True]


def test_a_rehearsal_finds_out_a_device_that_does_not_swap() -> None:
    live = storages(1)[0]
    rehearse(live, Host())
    with pytest.raises(IntegrityError, match="in scratch memory"):
        rehearse(live, StandsStill())


def test_attaching_rehearses_once_for_each_element_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(rank_sync, "rehearse", lambda storage, device: seen.append(storage.dtype.name))
    rank_sync.RankSync(weight_map(), {"uri": str(tmp_path / "run")}, rank=0, world_size=1)
    assert seen == ["BF16"]


def test_the_torch_fallback_swaps_like_the_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    live, same = storages(), storages()
    HostSwap(updates(live)).swap(lambda: None)
    groups = [_TorchGroup(update, torch.device("cpu")) for update in updates(same)]
    for group in groups:
        group.flip(None)
    assert all(np.array_equal(a.array, b.array) for a, b in zip(live, same, strict=True))
    for group in groups:
        group.flip(None)
    assert all(np.array_equal(a.array, b.array) for a, b in zip(storages(), same, strict=True))


def weight_map() -> WeightMap:
    live = storages(2)
    regions = {f"t{i}": [make_region(f"t{i}", i, (50,), 0, (1,), 0, (1,))] for i in range(2)}
    return WeightMap(live, {f"t{i}": TensorInfo(s.dtype, (50,)) for i, s in enumerate(live)}, regions)


def run(work: Callable[[Job[Any]], Any]) -> Job[Any]:
    return wait_for(Job("test", 0, work))


def wait_for(job: Job[Any]) -> Job[Any]:
    deadline = time.monotonic() + 20
    while job.running:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return job


@pytest.mark.parametrize(("before", "after"), [(5e-3, 1e-4), (5e-5, 5e-5)])
def test_a_rank_makes_threads_share_the_interpreter_sooner(before: float, after: float, tmp_path: Path) -> None:
    ours = sys.getswitchinterval()
    sys.setswitchinterval(before)
    try:
        rank_sync.RankSync(weight_map(), {"uri": str(tmp_path / "run")}, rank=0, world_size=1)
        assert sys.getswitchinterval() == pytest.approx(after, rel=0.05)  # kept in whole microseconds
    finally:
        sys.setswitchinterval(ours)


@pytest.mark.parametrize(("now", "asked", "got"), [(0, 5, 5), (7, 5, None), (5, 5, None), (0, 0, None)])
def test_a_job_gives_way_but_takes_no_priority(
    now: int, asked: int, got: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may itself have been started with less, and taking more is a right that few have."""
    said: list[int] = []
    monkeypatch.setattr(background.os, "getpriority", lambda which, who: now)
    monkeypatch.setattr(background.os, "setpriority", lambda which, who, niceness: said.append(niceness))
    assert wait_for(Job("test", asked, lambda job: "done")).result == "done"
    assert said == ([] if got is None else [got])


def test_a_job_works_where_priorities_may_not_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: int) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(background.os, "setpriority", refused)
    assert wait_for(Job("test", 19, lambda job: "done")).result == "done"


def test_a_scan_crossed_by_a_commit_starts_over() -> None:
    weights = weight_map()
    # A commit starts at the end of the first scan; the second meets one at its second region, of two; the third none.
    reads = iter([0, 0, 0, 0, 1, 2, 2, 2, 3, 4, 4, 4, 4, 4])

    job = run(lambda job: scan(job, weights, Host(), lambda: next(reads)))
    assert job.result == Scan(weights.digests(), None)
    assert next(reads, None) is None


def test_a_scan_does_not_begin_within_a_swap() -> None:
    """However long that takes: waiting for it is no try."""
    weights = weight_map()
    reads = iter([1] * 150 + [2] * 5)
    job = run(lambda job: scan(job, weights, Host(), lambda: next(reads)))
    assert job.result == Scan(weights.digests(), None)


def test_a_scan_tells_of_copies_that_differ() -> None:
    """Which of them is right it doesn't know: the sums are the first one's, as staging counts that one's changes."""
    live = storages(1) + storages(1)
    regions = {"t": [make_region("t", i, (50,), 0, (1,), 0, (1,)) for i in range(2)]}
    weights = WeightMap(live, {"t": TensorInfo(live[0].dtype, (50,))}, regions)
    sums = weights.digests()
    for damaged in (1, 0):
        live[damaged].array[7] ^= 1
        found = run(lambda job: scan(job, weights, Host(), lambda: 0)).result
        assert found.unequal == regions["t"][0].key
        assert (found.sums == sums) == (damaged == 1)
        live[damaged].array[7] ^= 1


def test_where_the_model_is_says_the_storage_that_is_no_shadow() -> None:
    there = LiveStorage("w", storages(1)[0].dtype, torch.empty(4, dtype=torch.int16, device="meta"))
    assert model_device([*storages(1), there]) == there.bits.device
    assert model_device(storages(1)) == torch.device("cpu")


def test_what_is_made_lies_alone_in_its_memory() -> None:
    """Two parameters in one place would be flipped twice by a commit, which is not at all."""
    memory = torch.zeros(4, 2, dtype=torch.bfloat16)
    left, right, whole = memory[:, :1], memory[:, 1:], memory.view(2, 4)
    beside = quantised_load._made(WeightMap(), {"left": ("m.left", left), "right": ("m.right", right)})
    assert [(box.storage, box.offset) for box in beside.values()] == [(0, 0), (0, 1)]
    for other in (whole, memory.view(torch.int8)[:, 3:]):
        with pytest.raises(MappingError, match=r"'m.other'.*memory of its own"):
            quantised_load._made(WeightMap(), {"right": ("m.right", right), "other": ("m.other", other)})
    with pytest.raises(MappingError, match=r"'m.left'.*memory of its own"):
        quantised_load._made(WeightMap([live_storage("w", memory)]), {"left": ("m.left", left)})


def test_a_scan_that_commits_never_leave_alone_gives_up() -> None:
    ticks = iter(range(10**6))
    job = run(lambda job: scan(job, weight_map(), Host(), lambda: next(ticks)))
    assert isinstance(job.error, SyncTimeoutError)


def test_a_cancelled_job_ends() -> None:
    started = threading.Event()

    def work(job: Job[dict[str, int]]) -> dict[str, int]:
        started.set()
        while True:
            job.reading("deltas/x")
            time.sleep(0.001)

    job = Job("test", 0, work)
    assert started.wait(20)
    job.cancel()
    deadline = time.monotonic() + 20
    while job.running and time.monotonic() < deadline:
        time.sleep(0.001)
    assert isinstance(job.error, Cancelled) and job.object == "deltas/x"


EXITS = """
import threading, torch
from vllm_delta_plugin.background import Job

one, begun = torch.zeros(1 << 20), threading.Event()
other = one.clone()

def compare(job):
    while True:
        job.check()
        begun.set()
        torch.equal(one, other)

job = Job("test", 0, compare)
assert begun.wait(20)
"""


def test_a_process_that_exits_lets_its_job_end_first() -> None:
    """Python ends threads that are left at their next wait for the interpreter; inside torch that is an abort."""
    done = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_errors_are_described_for_the_engine() -> None:
    error = describe(MappingError("tensor 'x'", expected=1, got=2), "deltas/1")
    assert error == {
        "kind": "MappingError",
        "action": "unsupported",
        "error": "tensor 'x', expected 1, got 2",
        "object": "deltas/1",
    }
    assert describe(RuntimeError())["error"] == "RuntimeError"


def test_staging_stops_at_its_limit_and_drops_what_does_not_change() -> None:
    weights = weight_map()
    region = weights.regions["t0"][0]
    live = weights.storages[0].array
    index = np.arange(50, dtype=np.int64)
    builder = StageBuilder(weights, limit=100)
    builder.add_values(region, index, index, live, live.copy())
    assert (builder.changed, builder.parts, builder.updates()) == (0, {}, [])
    with pytest.raises(StageTooLargeError):
        builder.add_values(region, index, index, live, live + np.uint16(1))


def test_faults_fire_as_often_as_asked_on_the_named_rank(tmp_path: Path) -> None:
    faults = Faults(1, {"rank": 1, "at": "commit", "times": 2})
    faults.at("stage")
    for _ in range(2):
        with pytest.raises(InjectedFault):
            faults.at("commit")
    faults.at("commit")
    Faults(0, {"rank": 1, "at": "commit"}).at("commit")
    (tmp_path / "fail").touch()
    faults = Faults(1, {"rank": 1, "at": "commit", "while": str(tmp_path / "fail")})
    for _ in range(3):
        with pytest.raises(InjectedFault):
            faults.at("commit")
    (tmp_path / "fail").unlink()
    faults.at("commit")
    with pytest.raises(ValueError, match="nowhere"):
        Faults(0, {"at": "nowhere"})


def test_checkpoint_headers_are_read_over_shards(tmp_path: Path) -> None:
    for number, name in ((1, "a"), (2, "b")):
        save_file({name: torch.zeros(number, 3)}, tmp_path / f"model-{number}.safetensors")
    save_file({"stray": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert checkpoint_tensors(str(tmp_path)) == {"a": (1, 3), "b": (2, 3)}
    index = '{"weight_map": {"b": "model-2.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert checkpoint_tensors(str(tmp_path)) == {"b": (2, 3)}


@pytest.mark.parametrize("name", ["model.gguf", "pytorch_model.bin"])
def test_other_checkpoints_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(MappingError, match="safetensors"):
        checkpoint_tensors(str(tmp_path))
    with pytest.raises(MappingError, match="a file or URL"):
        checkpoint_tensors(str(tmp_path / name))


def test_a_damaged_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(MappingError, match="a safetensors header"):
        checkpoint_tensors(str(tmp_path))


def test_every_module_comes_to_its_turn_in_scans_that_count() -> None:
    modules = [Module(str(number), dict, {}, frozenset(), {}) for number in range(13)]
    requantised = Requantised(modules=modules)
    seen: set[str] = set()
    for _ in range(8):
        requantised.next_turn()
        turn = [module.name for module in requantised.turn()]
        assert turn == [module.name for module in requantised.turn()], "the same again, of one that did not count"
        seen.update(turn)
    assert len(seen) == len(modules)
