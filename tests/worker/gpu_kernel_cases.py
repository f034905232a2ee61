"""Cases that test_gpu_kernels.py runs, on the GPU or in Triton's interpreter."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from delta_sync.delta import diff, fold, raw
from delta_sync.delta_file import DEFAULT_CODEC, DeltaHeader, decode_delta, encode_delta, unpack_delta
from delta_sync.digest import tensor_key
from delta_sync.dtypes import dtype
from delta_sync.errors import FormatError
from delta_sync.tensor_delta import TensorDelta
from vllm_delta_plugin import gpu_digest, gpu_stage, gpu_swap, live_digest
from vllm_delta_plugin.commit import HostSwap, device_of
from vllm_delta_plugin.coverage import TensorInfo, WeightMap
from vllm_delta_plugin.gpu_decode import can_decode
from vllm_delta_plugin.gpu_stage import GpuStageBuilder
from vllm_delta_plugin.live_storage import SIGNED, LiveStorage
from vllm_delta_plugin.regions import make_region
from vllm_delta_plugin.rehearsal import rehearse
from vllm_delta_plugin.staged import StageBuilder, StageTooLargeError
from vllm_delta_plugin.transfer import PIECE, PIECES, to_device, to_host, together_to_device

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, COLUMNS = 70, 90


def one_model(device: torch.device) -> WeightMap:
    """Three tensors of random bits (NaN and both zeros among them): whole, a column shard of two, and float32."""
    random = np.random.default_rng(1)
    weights = WeightMap()
    for name, kind in (("whole", "BF16"), ("columns", "BF16"), ("wide", "F32")):
        carrier = dtype(kind).carrier
        bits = random.integers(0, 2 ** (8 * carrier.itemsize), ROWS * COLUMNS, carrier)
        live = torch.from_numpy(bits.view(f"<i{carrier.itemsize}")).to(device)
        weights.storages.append(LiveStorage(name, dtype(kind), live.view(SIGNED[carrier.itemsize])))
        weights.tensors[name] = TensorInfo(dtype(kind), (ROWS, COLUMNS))
    whole = make_region("whole", 0, (ROWS, COLUMNS), 0, (COLUMNS, 1), 0, (COLUMNS, 1))
    shard = make_region("columns", 1, (ROWS, 40), 17, (COLUMNS, 1), 5, (41, 1))
    turned = make_region("wide", 2, (ROWS, COLUMNS), 0, (COLUMNS, 1), 0, (1, ROWS))
    weights.regions = {"whole": [whole], "columns": [shard], "wide": [turned]}
    return weights


def changes(seed: int):
    """Folded deltas of every tensor: steps of any size, and bits, at disjoint positions."""
    random = np.random.default_rng(seed)
    folded = {}
    for name, kind, share in (("whole", "BF16", 0.5), ("columns", "BF16", 0.05), ("wide", "F32", 0.2)):
        carrier, size = dtype(kind).carrier, ROWS * COLUMNS
        old = random.integers(0, 2 ** (8 * carrier.itemsize), size, carrier)
        at = np.sort(random.choice(size, int(size * share), replace=False)).astype(np.int64)
        new = old.copy()
        new[at] = random.integers(0, 2 ** (8 * carrier.itemsize), at.size, carrier)
        bits = random.integers(0, 2 ** (8 * carrier.itemsize), at[::7].size, carrier)
        shape = (ROWS, COLUMNS)
        folded[name] = fold([diff(name, dtype(kind), shape, old, new), raw(name, dtype(kind), shape, at[::7], bits)])
    return folded


def host_bits(weights: WeightMap) -> list[np.ndarray]:
    return [storage.bits.cpu().numpy().copy() for storage in weights.storages]


@pytest.mark.parametrize("batch", [1 << 20, 100])
def test_staging_and_swapping(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same bits, sums and counts as on the host; the second swap takes the first one back."""
    monkeypatch.setattr(gpu_stage, "_BATCH", batch)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    host, device = one_model(torch.device("cpu")), one_model(DEVICE)
    before = host_bits(host)
    here, there = StageBuilder(host, limit=2**30), GpuStageBuilder(device, limit=2**30)
    for builder in (here, there):
        builder.add_deltas(changes(3))
    assert there.parts == here.parts and len(here.parts) == 3
    assert there.changed == here.changed > 3000
    HostSwap(here.updates()).swap(lambda: None)
    groups = gpu_swap._groups(there, DEVICE)
    for expected in (host_bits(host), before):
        for group in groups:
            group.flip(None)
        for got, wanted in zip(host_bits(device), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_objects_of_one_version_are_flipped_in_one_launch_of_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """However each was staged: decoded there or on the host, or made of what is; some are longer than a program."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    host, device = one_model(torch.device("cpu")), one_model(DEVICE)
    before = host_bits(host)
    here, there = StageBuilder(host, limit=2**30), GpuStageBuilder(device, limit=2**30)
    [whole, *others] = steps(4, 0.3)
    assert there.add_unpacked(unpack_delta(encode_delta(HEADER, [whole])))
    for builder in (here, there):
        builder.add_deltas({delta.name: [delta] for delta in ([whole] if builder is here else []) + others})
    at = torch.tensor([0, 1, 6300 - 1])
    there.add_made(1, at.to(DEVICE), device.storages[1].bits[at.to(DEVICE)] ^ 5)
    here.add_made(1, at, host.storages[1].bits[at] ^ 5)
    there.finish()
    HostSwap(here.updates()).swap(lambda: None)
    groups = gpu_swap._groups(there, DEVICE)
    assert len(groups) == 2, "one of two bytes, one of four"
    for expected in (host_bits(host), before):
        for group in groups:
            group.flip(None)
        for got, wanted in zip(host_bits(device), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("kind", ["F8_E4M3", "BF16", "F32"])
def test_neighbours_in_a_word_of_memory_are_flipped_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flips go by words of four bytes, changes by elements; also where a storage ends within a word."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    random, carrier = np.random.default_rng(5), dtype(kind).carrier
    old, new = (random.integers(0, 2 ** (8 * carrier.itemsize), 4099, carrier) for _ in range(2))
    live = torch.from_numpy(old.view(f"<i{carrier.itemsize}").copy()).to(DEVICE)
    at = torch.from_numpy(np.unique(np.append(random.choice(old.size, 2500), old.size - 1))).to(DEVICE)
    builder = GpuStageBuilder(WeightMap([LiveStorage("w", dtype(kind), live)]), limit=2**30)
    builder.add_made(0, at, torch.from_numpy(new.view(f"<i{carrier.itemsize}")).to(DEVICE)[at])
    builder.finish()
    [group] = gpu_swap._groups(builder, DEVICE)
    wanted = old.copy()
    wanted[at.cpu()] = new[at.cpu()]
    for expected in (wanted, old):
        group.flip(None)
        np.testing.assert_array_equal(live.cpu().numpy().view(carrier), expected)


def test_what_would_not_fit_is_not_uploaded() -> None:
    builder = GpuStageBuilder(one_model(DEVICE), limit=1000)
    with pytest.raises(StageTooLargeError):
        builder.add_deltas(changes(3))


def small_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest's programs take 256 elements, and launches three of them."""
    for name, value in (("DIGEST_BLOCK", 128), ("ROUNDS", 2), ("_EACH", 256)):
        monkeypatch.setattr(gpu_digest, name, value)
    monkeypatch.setattr(live_digest, "_LAUNCH", 800)


def launches(regions) -> int:
    """How many such launches regions of one kind take."""
    return -(-sum(-(-region.numel // 256) for region in regions) // 3)


@pytest.mark.parametrize(
    ("shape", "source", "live"),
    [
        ((), (), ()),
        ((0, 4), (4, 1), (4, 1)),
        ((256,), (3,), (1,)),
        ((6000,), (1,), (1,)),
        ((50, 40), (90, 1), (41, 1)),
        ((7, 11, 13), (200, 15, 1), (1, 8, 90)),
        ((3, 5, 7, 9), (700, 100, 10, 1), (350, 70, 9, 1)),
        ((2, 3, 2, 3, 2), (300, 80, 30, 8, 3), (100, 30, 12, 3, 1)),  # more dimensions than the kernel takes
    ],
)
@pytest.mark.parametrize("kind", ["F8_E4M3", "BF16", "F32"])
def test_digest_of_a_region(kind: str, shape, source, live, monkeypatch: pytest.MonkeyPatch) -> None:
    small_launches(monkeypatch)
    carrier = dtype(kind).carrier
    bits = (
        np.random.default_rng(2).integers(0, 2 ** (8 * carrier.itemsize), 9000, carrier).view(f"<i{carrier.itemsize}")
    )
    region = make_region("w", 0, shape, 2, source, 5, live)
    memory = LiveStorage("w", dtype(kind), torch.from_numpy(bits))
    expected = live_digest.region_digest(memory, region)
    monkeypatch.setattr(LiveStorage, "on_cpu", False)
    digests = live_digest.Digests([LiveStorage("w", dtype(kind), memory.bits.to(DEVICE))], [region])
    assert sum(digests) == (launches([region]) if len(shape) <= 4 else 0)
    assert digests.result == [expected]
    assert live_digest.torch_digest(memory.bits.to(DEVICE), region, tensor_key("w"), carrier.itemsize) == expected


def test_digests_of_many_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many in a launch, without waiting for any but one that has more dimensions than the kernel takes."""
    device, host = one_model(DEVICE), one_model(torch.device("cpu"))
    far = make_region("whole", 0, (2, 3, 2, 3, 2), 300, (900, 80, 30, 8, 3), 5, (900, 80, 30, 8, 3))
    more = make_region("columns", 1, (ROWS - 1, 30), 3, (COLUMNS, 1), 2, (41, 1))
    regions = [*(region for regions in host.regions.values() for region in regions), far, more]
    expected = [live_digest.region_digest(host.storages[region.storage], region) for region in regions]
    monkeypatch.setattr(LiveStorage, "on_cpu", False)
    whole = live_digest.Digests(device.storages, regions)
    kinds: dict = {}
    for region in regions:
        if region is not far:
            kinds.setdefault((len(region.shape), host.storages[region.storage].dtype), []).append(region)
    assert sum(whole) == len(kinds) < len(regions) - 1
    assert whole.result == expected
    small_launches(monkeypatch)
    digests = live_digest.Digests(device.storages, regions)
    assert sum(digests) == sum(map(launches, kinds.values())) > len(kinds)
    assert digests.result == expected


HEADER = DeltaHeader("run", 2, 1, DEFAULT_CODEC)


def steps(seed: int, share: float) -> list[TensorDelta]:
    """ULP steps of every tensor, short ones and some that need an extension."""
    random = np.random.default_rng(seed)
    deltas = []
    for name, kind in (("whole", "BF16"), ("columns", "BF16"), ("wide", "F32")):
        old = random.integers(0, 2**16, ROWS * COLUMNS).astype(dtype(kind).carrier)
        at = np.sort(random.choice(old.size, int(old.size * share), replace=False))
        new = old.copy()
        new[at] += random.choice([1, 1, 1, 2, 255, 256, 257, 30000], at.size).astype(old.dtype)
        deltas.append(diff(name, dtype(kind), (ROWS, COLUMNS), old, new))
    return deltas


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.3, 1.0])
def test_an_object_that_the_gpu_decodes(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same bits, sums and counts as of deltas decoded on the host; what lies outside a region is left alone."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    data = encode_delta(HEADER, steps(4, share))
    object_ = unpack_delta(data)
    assert can_decode(object_)
    host, device = one_model(torch.device("cpu")), one_model(DEVICE)
    here, there = StageBuilder(host, limit=2**30), GpuStageBuilder(device, limit=2**30)
    here.add_deltas({delta.name: [delta] for delta in decode_delta(data)[1]})
    assert there.add_unpacked(object_) and not here.add_unpacked(object_)
    there.finish()
    assert there.parts == here.parts and there.changed == here.changed > 0
    HostSwap(here.updates()).swap(lambda: None)
    for group in gpu_swap._groups(there, DEVICE):
        group.flip(None)
    for got, wanted in zip(host_bits(device), host_bits(host), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_bytes_come_to_the_device_and_back_as_they_were() -> None:
    """In pieces, where there are several, more than the ring has, behind work that keeps a GPU's stream busy."""
    parts = [np.random.default_rng(size).bytes(size) for size in (0, 1, 17, 3 * PIECE + 5, 2 * PIECE, 40_000)]
    numbers = np.arange(PIECES * PIECE // 8, dtype=np.int64)
    with torch.cuda.stream(torch.cuda.Stream()) if DEVICE.type == "cuda" else nullcontext():
        if DEVICE.type == "cuda":
            torch.cuda._sleep(200_000_000)
        there, more = together_to_device(parts, DEVICE), to_device(numbers, DEVICE)
        assert [to_host(one).tobytes() for one in there] == parts
        np.testing.assert_array_equal(to_host(more), numbers)
    assert all(one.data_ptr() % 16 == 0 for one in there if one.numel())
    assert to_host(to_device(numbers[:0], DEVICE)).size == 0


def test_what_the_gpu_does_not_decode_is_left_to_the_host() -> None:
    """Bits instead of steps, and a tensor in two groups."""
    [whole, *_] = changes(3)["whole"], changes(3)["columns"]
    for deltas in ([whole[1]], whole):
        builder = GpuStageBuilder(one_model(DEVICE), limit=2**30)
        assert not builder.add_unpacked(unpack_delta(encode_delta(HEADER, deltas))) and not builder.on_device


@pytest.mark.parametrize(
    ("stream", "change", "message"),
    [
        ("gap", lambda content: content[:-1] + bytes([255]), "gap without an end|changes"),
        ("gap", lambda content: bytes([255]) * 40 + content[40:], "changes"),
        ("gap", lambda content: content[:-1] + bytes([254]), "positions below 6300"),
        ("gap", lambda content: bytes([254]) * len(content), "positions below 6300|changes"),
        ("step", lambda content: bytes([255]) * len(content), "step extensions"),
        ("step", lambda content: content[:-1] + bytes([255]), "step extensions"),
        ("step_ext", lambda content: content[:-2], "step extensions"),
        ("step_ext", lambda content: bytes(len(content)), "step extensions from 255"),
        ("sign", lambda content: content[:-1] + bytes([255]), "last sign bit"),
    ],
)
def test_streams_that_are_not_the_group_are_refused_as_on_the_host(stream: str, change, message: str) -> None:
    """Found out once the GPU is done, at the latest; what it reads before lies in the tensor's region all the same."""
    object_ = unpack_delta(encode_delta(HEADER, [steps(4, 0.3)[0]]))
    [group] = object_.groups
    contents = {**group.contents, stream: change(bytes(group.contents[stream]))}
    damaged = replace(group, contents=contents)
    builder = GpuStageBuilder(one_model(DEVICE), limit=2**30)
    with pytest.raises(FormatError, match=message):
        builder.add_unpacked(replace(object_, groups=[damaged]))
        builder.finish()
    with pytest.raises(FormatError):
        list(damaged.deltas())


def test_an_object_too_large_to_decode_on_the_gpu_is_left_to_the_host() -> None:
    object_ = unpack_delta(encode_delta(HEADER, steps(4, 0.01)))
    changed = sum(group.coded.changed for group in object_.groups)
    builder = GpuStageBuilder(one_model(DEVICE), limit=20 * changed)
    assert not builder.add_unpacked(object_) and not builder.on_device
    builder.add_deltas({delta.name: [delta] for delta in object_.deltas()})
    assert builder.on_device


def test_a_rehearsal_beside_a_busy_stream() -> None:
    """Its memory is zero when it is read, though the worker's stream does other things first and it held other bits."""
    [like, *_] = one_model(DEVICE).storages
    for _ in range(3):
        before = torch.full((256,), 7, dtype=like.bits.dtype, device=DEVICE)
        del before
        if DEVICE.type == "cuda":
            torch.cuda._sleep(1 << 29)  # some 0.3 s
        rehearse(like, device_of([like]))
