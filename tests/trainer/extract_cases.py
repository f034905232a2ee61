"""Cases that test_extract.py runs, on the GPU or in Triton's interpreter: kernels and fallback beside host loops."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from delta_sync.delta import apply, diff
from delta_sync.dtypes import dtype
from trl_callback.extract import SIGNED, TORCH_DTYPES, Pair, torch_extract
from trl_callback.extract_kernels import ROOM, TILE
from trl_callback.extract_pipeline import BUCKETS, Kind, Pipeline, _Capture
from trl_callback.gpu_snapshot import GpuSnapshot, snapshot_of
from trl_callback.serving_image import ServingImage

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HOST = torch.device("cpu")
SPECIAL = [0.0, -0.0, 1e-40, -1e-40, 6e-8, 65519.0, 65520.0, 3.3895e38, float("inf"), -float("inf"), 1.00390625]


def tensor(size: int, kind: torch.dtype, seed: int) -> torch.Tensor:
    """Random weights with infinities, both zeros, subnormals and ties between two roundings among them."""
    made = torch.from_numpy(np.random.default_rng(seed).standard_normal(size).astype(np.float32))
    made[: len(SPECIAL)] = torch.tensor(SPECIAL)[:size]
    ties = made.view(torch.int32)
    ties[len(SPECIAL) : size // 3] = (ties[len(SPECIAL) : size // 3] & ~0xFFFF) | 0x8000
    return made.to(kind)


def bits(live: torch.Tensor, served: str) -> torch.Tensor:
    return live.to(TORCH_DTYPES[served]).view(SIGNED[dtype(served).itemsize])


def pair(name: str, size: int, kind: torch.dtype, served: str, density: float, held_on: torch.device) -> Pair:
    """A tensor of which about ``density`` changed, by one step or by any."""
    seed = sum(name.encode())
    live, random = tensor(size, kind, seed), np.random.default_rng(seed)
    held = bits(live, served).clone()
    at = torch.from_numpy(np.flatnonzero(random.random(size) < density))
    held[at] += torch.from_numpy(random.choice([1, -1, 7, -30000], at.numel())).to(held.dtype)
    return Pair(name, name, dtype(served), (size,), live.to(DEVICE), held.to(held_on))


def pairs(held_on: torch.device) -> list[Pair]:
    """Sizes about a tile, a tensor over several buckets, none and all changed, every kind of cast."""
    shapes = [
        ("norm", 64, torch.float32, "BF16", 0.1),
        ("embed", 5 * TILE + 77, torch.float32, "BF16", 0.02),
        ("dense", 2 * TILE + 1, torch.float32, "BF16", 1.0),
        ("same", TILE, torch.float32, "BF16", 0.0),
        ("plain", TILE - 1, torch.bfloat16, "BF16", 0.05),
        ("half", TILE + 5, torch.float32, "F16", 0.2),
        ("wide", TILE // 2, torch.float32, "F32", 0.03),
        ("widened", 3000, torch.bfloat16, "F32", 0.3),
        ("odd", TILE, torch.float16, "BF16", 0.01),
        ("one", 1, torch.bfloat16, "BF16", 1.0),
        ("none", 0, torch.bfloat16, "BF16", 1.0),
        ("last", TILE + 9, torch.float32, "BF16", 0.3),
    ]
    return [pair(*shape, held_on) for shape in shapes]


def by_the_host(chosen: list[Pair]) -> dict:
    found = {}
    for p in chosen:
        new = bits(p.live, p.dtype.name).cpu().numpy().view(p.dtype.carrier)
        delta = diff(p.name, p.dtype, p.shape, p.held.cpu().numpy().view(p.dtype.carrier), new)
        if delta.changed:
            found[p.key] = delta
    return found


def assert_same(got, wanted) -> None:
    assert list(got) == list(wanted)
    for key, delta in wanted.items():
        np.testing.assert_array_equal(got[key].positions, delta.positions)
        np.testing.assert_array_equal(got[key].values, delta.values)
        assert (got[key].name, got[key].dtype, got[key].shape) == (delta.name, delta.dtype, delta.shape)
        assert (got[key].positions.dtype, got[key].values.dtype) == (delta.positions.dtype, delta.values.dtype)


@pytest.mark.parametrize("held_on", [HOST, DEVICE] if DEVICE != HOST else [HOST])
@pytest.mark.parametrize("bucket_bytes", [1, 400_000, 1 << 26])
def test_extraction_is_that_of_the_host(held_on: torch.device, bucket_bytes: int) -> None:
    """Buckets of one tile, of a few, and one for all; tiles with more changes than are kept, and none."""
    chosen = pairs(held_on)
    wanted = by_the_host(chosen)
    assert len(wanted) == 10 and wanted["dense"].changed == 2 * TILE + 1 > 2 * ROOM
    extract = Pipeline(DEVICE, bucket_bytes)
    for _ in range(2):  # the second capture has the first one's memory
        assert_same(extract(iter(chosen)), wanted)
    assert_same(torch_extract(iter(chosen), bucket_bytes=80 * TILE), wanted)


def test_snapshot_streamed_through_two_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path that a snapshot in host memory takes, also where there is no other memory than the host's."""
    monkeypatch.setattr(Kind, "of", classmethod(_streamed(Kind.of)))
    chosen = pairs(HOST)
    assert_same(Pipeline(DEVICE, 400_000)(iter(chosen)), by_the_host(chosen))


@pytest.mark.skipif(DEVICE != HOST, reason="the host's memory stands in for what a GPU frees")
def test_buffers_that_larger_ones_replace_are_kept_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense changes are read again when the next bucket, of a wider kind, is launched already."""
    monkeypatch.setattr(Kind, "of", classmethod(_streamed(Kind.of)))
    monkeypatch.setattr(_Capture, "_empty", lambda _, size, kind: _overwritten_when_freed(size, kind))
    shapes = [("dense", TILE, torch.float32, "BF16", 1.0, HOST), ("wide", TILE, torch.float32, "F32", 0.03, HOST)]
    chosen = [pair(*shape) for shape in shapes]
    assert_same(Pipeline(DEVICE, 274_286)(iter(chosen)), by_the_host(chosen))


def _overwritten_when_freed(size: int, kind: torch.dtype) -> torch.Tensor:
    memory = torch.zeros(size, dtype=kind)
    lent = memory.numpy().view()  # a tensor made of it, and every view of that, holds on to this object
    weakref.finalize(lent, memory.fill_, 0x55).atexit = False
    return torch.from_numpy(lent)


def test_weights_made_for_the_capture_live_as_long_as_their_buckets() -> None:
    """As those with adapters merged are: never all of them at once."""
    made: list[weakref.ref] = []
    alive: list[int] = []

    def merged():
        held = torch.zeros(TILE, dtype=torch.int16, device=DEVICE)
        for k in range(20):
            live = torch.ones(TILE, dtype=torch.bfloat16, device=DEVICE)
            made.append(weakref.ref(live))
            alive.append(sum(ref() is not None for ref in made))
            yield Pair(k, f"w{k}", dtype("BF16"), (TILE,), live, held)

    found = Pipeline(DEVICE, 1)(merged())  # buckets of one tensor
    assert len(found) == 20 and all(delta.changed == TILE for delta in found.values())
    assert max(alive) <= BUCKETS + 1  # and the one that comes next


def _streamed(of):
    def streamed(cls, pair):
        kind = of(pair)
        return cls(kind.cast, kind.converted, kind.dtype, kind.width, True)

    return streamed


def test_unaligned_parameters() -> None:
    """A view into a flat buffer, as FSDP keeps them, starts anywhere."""
    whole = pair("embed", 2 * TILE, torch.float32, "BF16", 0.05, DEVICE)
    shifted = Pair("view", "view", whole.dtype, (2 * TILE - 3,), whole.live[3:], whole.held[3:])
    assert_same(Pipeline(DEVICE, 1 << 24)([shifted]), by_the_host([shifted]))


def test_a_weight_that_is_not_a_number_is_the_one_that_pytorch_makes() -> None:
    live = torch.tensor([float("nan"), 1.0, -float("nan")], device=DEVICE).repeat(50)
    for served in ("BF16", "F16"):
        held = torch.zeros(150, dtype=torch.int16, device=DEVICE)
        [delta] = Pipeline(DEVICE, 1 << 20)([Pair("w", "w", dtype(served), (150,), live, held)]).values()
        zero = np.zeros(150, np.uint16)
        made = zero.copy()
        apply(delta, made)
        values = torch.from_numpy(made.view(np.int16)).view(TORCH_DTYPES[served])
        assert values.isnan().tolist() == [True, False, True] * 50
        assert len(set(made[::3].tolist())) == 1


@pytest.mark.skipif(DEVICE == HOST, reason="needs a GPU")
@pytest.mark.parametrize("held_on", [HOST, DEVICE])
def test_device_memory_stays_within_the_bucket(held_on: torch.device) -> None:
    bucket_bytes = 64 * 1024**2
    chosen = [pair(f"w{k}", 40 * 1024**2, torch.float32, "BF16", 0.02, held_on) for k in range(3)]
    extract = Pipeline(DEVICE, bucket_bytes)
    extract(chosen[:1])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = extract(chosen)
    assert torch.cuda.max_memory_allocated() - before <= bucket_bytes
    assert_same(got, by_the_host(chosen))


@pytest.mark.skipif(DEVICE == HOST, reason="needs a GPU")
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_snapshot_of_a_model_on_the_gpu_moves_with_it(place: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(700, 900), torch.nn.LayerNorm(900)).to(DEVICE)
    snapshot = snapshot_of(ServingImage(model, lambda name: "BF16"), place, 1 << 20)
    assert isinstance(snapshot, GpuSnapshot)
    for _ in range(3):
        with torch.no_grad():
            model[0].weight += 1e-3 * torch.randn_like(model[0].weight)
        image = ServingImage(model, lambda name: "BF16")
        deltas = snapshot.diff(image)
        assert list(deltas) == ["0.weight"]
        snapshot.apply(deltas, snapshot.advanced(deltas))
        assert {t.name: t.bits.tobytes() for t in image} == {name: held.tobytes() for name, _, _, held in snapshot}
        assert snapshot.diff(image) == {}
