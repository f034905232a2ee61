"""Anchors are ordinary checkpoints to others, and suspect bytes to us."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tiny_run import SHAPES, TinyRun, attach

from delta_sync import (
    DEFAULT_LIMITS,
    DTYPES,
    AnchorRecord,
    FormatError,
    IntegrityError,
    Limits,
    ObjectRef,
    TensorState,
    dtype,
    model_fingerprint,
    state_digest,
    tensor_key,
)
from delta_sync.anchor_files import INDEX, iter_anchor_tensors, parse_shard, write_anchor_files
from delta_sync.digest import digest
from delta_sync.ledger import Ledger
from delta_sync.store import LocalStore
from delta_sync.store.keys import anchor_folder

BF16 = dtype("BF16")


def tensor(name, kind, *shape, seed=0):
    kind = dtype(kind)
    bits = np.random.default_rng(seed).integers(0, 2 ** (8 * kind.itemsize), int(np.prod(shape)), dtype=kind.carrier)
    return name, kind, shape, bits


def read_all(files):
    """Every tensor's bytes as the safetensors library reads them."""
    found = {}
    for path in files.values():
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as opened:
                assert opened.metadata() == {"format": "pt"}
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    value = opened.get_tensor(name)
                    found[name] = (tuple(value.shape), bytes(value.contiguous().view(-1).view(_torch().uint8).numpy()))
    return found


def _torch():
    import torch

    return torch


@pytest.mark.parametrize("shard_bytes", [1, 100, 10**9])
def test_the_safetensors_library_reads_every_bit(tmp_path, shard_bytes):
    tensors = [tensor(f"layer.{kind}", kind, 3, 5, seed=n) for n, kind in enumerate(DTYPES)]
    tensors += [tensor("empty", "BF16", 0, 4), tensor("scalar", "F32"), tensor("last", "F32", 7)]
    files = write_anchor_files(tmp_path, iter(tensors), shard_bytes=shard_bytes)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)
    found = read_all(files)
    assert found == {name: (shape, bits.tobytes()) for name, _, shape, bits in tensors}


def test_one_shard_has_no_index_and_several_have_one(tmp_path):
    tensors = [tensor(f"t{n}", "BF16", 10, seed=n) for n in range(5)]
    assert list(write_anchor_files(tmp_path / "one", tensors)) == ["model.safetensors"]
    files = write_anchor_files(tmp_path / "many", tensors, shard_bytes=40)
    assert sorted(files) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)] + [INDEX]
    index = json.loads(files[INDEX].read_text())
    assert index["metadata"]["total_size"] == 100
    assert index["weight_map"]["t0"] == index["weight_map"]["t1"] == "model-00001-of-00003.safetensors"
    assert set(index["weight_map"]) == {f"t{n}" for n in range(5)}


def test_a_header_that_fills_up_starts_a_new_shard(tmp_path):
    tensors = [tensor(f"a.rather.long.name.{n:05d}" + "x" * 200, "BF16", 1, seed=n) for n in range(900)]
    files = write_anchor_files(tmp_path, tensors)
    assert len(files) > 2
    assert read_all(files) == {name: (shape, bits.tobytes()) for name, _, shape, bits in tensors}


def test_writing_holds_one_tensor_at_a_time(tmp_path):
    size = 2**20

    def stream():
        for number in range(16):
            yield f"t{number}", BF16, (size,), np.full(size, number, np.uint16)

    tracemalloc.start()
    write_anchor_files(tmp_path, stream(), shard_bytes=8 * size)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * 2 * size


@pytest.mark.parametrize(
    "bad",
    [
        ("a", BF16, (3,), np.zeros(4, np.uint16)),
        ("a", BF16, (3,), np.zeros(3, np.uint32)),
        ("a", BF16, (2, 2), np.zeros((2, 2), np.uint16)),
        ("__metadata__", BF16, (1,), np.zeros(1, np.uint16)),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, bad):
    with pytest.raises(FormatError):
        write_anchor_files(tmp_path, [bad])


def test_twice_the_same_name_and_none_at_all(tmp_path):
    with pytest.raises(FormatError, match="each name once"):
        write_anchor_files(tmp_path, [tensor("a", "BF16", 1)] * 2)
    with pytest.raises(FormatError, match="at least one tensor"):
        write_anchor_files(tmp_path, [])


# --- reading


@pytest.fixture
def anchored(store, tmp_path):
    run = TinyRun(store)
    run.origin()
    attach(run.writer, run.writer.head, run.now, tmp_path / "files", shard_bytes=10)
    return run, Ledger(store), Ledger(store).anchor(run.writer.head)


def test_reading_gives_every_tensor_once(anchored):
    run, ledger, record = anchored
    found = list(iter_anchor_tensors(ledger, record))
    assert sorted(name for name, *_ in found) == sorted(SHAPES)
    for name, kind, shape, bits in found:
        assert (kind, shape) == (BF16, SHAPES[name])
        assert np.array_equal(bits, run.now[name])
        with pytest.raises(ValueError, match="read-only"):
            bits[0] = 0


def test_only_the_wanted_and_only_their_shards(anchored, monkeypatch):
    _, ledger, record = anchored
    read = []
    real = Ledger.read_object
    monkeypatch.setattr(Ledger, "read_object", lambda self, ref: (read.append(ref.key), real(self, ref))[1])
    assert [name for name, *_ in iter_anchor_tensors(ledger, record, ["norm.weight"])] == ["norm.weight"]
    assert [key.rpartition("/")[2] for key in read] == [INDEX, "model-00003-of-00003.safetensors"]
    assert list(iter_anchor_tensors(ledger, record, [])) == []
    with pytest.raises(IntegrityError, match="unheard"):
        list(iter_anchor_tensors(ledger, record, ["unheard.of"]))


def test_nothing_of_a_damaged_shard_is_handed_on(anchored):
    run, ledger, record = anchored
    for ref in record.objects:
        if not ref.key.endswith(".safetensors"):
            continue
        good = run.store.get(ref.key, max_bytes=ref.size)
        run.store.put(ref.key, good[:-1] + bytes([good[-1] ^ 1]))
        handed = []
        with pytest.raises(IntegrityError, match="sha256"):
            handed.extend(iter_anchor_tensors(ledger, record))
        inside = {name for name, *_ in parse_shard(good, ref.key, DEFAULT_LIMITS)}
        assert not inside & {name for name, *_ in handed}
        run.store.put(ref.key, good)


def test_config_and_tokenizer_are_never_read(anchored):
    run, ledger, record = anchored
    config = next(ref.key for ref in record.objects if ref.key.endswith("config.json"))
    run.store.delete(config)
    assert len(list(iter_anchor_tensors(ledger, record))) == len(SHAPES)


def test_shards_that_contradict_the_record(anchored):
    _, ledger, record = anchored
    state = record.tensors["norm.weight"]
    for tensors, what in (
        ({**record.tensors, "another": state}, "another"),
        ({**record.tensors, "norm.weight": replace(state, shape=(2, 2))}, "norm.weight"),
        ({**record.tensors, "norm.weight": replace(state, dtype="F16")}, "norm.weight"),
        ({name: state for name, state in record.tensors.items() if name != "norm.weight"}, "norm.weight"),
    ):
        bad = replace(record, tensors=tensors, objects=tuple(r for r in record.objects if not r.key.endswith(INDEX)))
        with pytest.raises(IntegrityError, match=what):
            list(iter_anchor_tensors(ledger, bad))


@pytest.mark.parametrize("index", [b"{", b"[]", b"{}", b'{"weight_map":[]}', b'{"weight_map":{"norm.weight":5}}'])
def test_a_bad_index(anchored, index):
    run, ledger, record = anchored
    key = next(ref.key for ref in record.objects if ref.key.endswith(INDEX))
    run.store.put(key, index)
    ref = ObjectRef(key, len(index), hashlib.sha256(index).hexdigest())
    bad = replace(record, objects=tuple(ref if r.key == key else r for r in record.objects))
    with pytest.raises((FormatError, IntegrityError)):
        list(iter_anchor_tensors(ledger, bad))


def test_reading_holds_one_shard_at_a_time(tmp_path):
    size = 2**19
    tensors = [tensor(f"t{n:02d}", "BF16", size, seed=n) for n in range(12)]
    files = write_anchor_files(tmp_path / "files", tensors, shard_bytes=2 * size)
    store = LocalStore(tmp_path / "run")
    refs = []
    for name, path in files.items():
        key = anchor_folder(1, 1) + name
        store.put_file(key, path)
        refs.append(ObjectRef(key, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()))
    states = {name: TensorState(kind.name, shape, 0) for name, kind, shape, _ in tensors}
    record = AnchorRecord(1, 1, "0" * 64, "0" * 64, tuple(refs), states, 0.0)
    tracemalloc.start()
    count = 0
    for found in iter_anchor_tensors(Ledger(store), record):
        count += 1
        del found
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == len(tensors)
    assert peak < 1.5 * 2 * size  # of 12 shards


def shard(header: object, body: bytes = b"\0\0") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(dtype="BF16", shape=(1,), offsets=(0, 2)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\0" * 7, b"\xff" * 8, b"\xff" * 16, shard([]), shard(b"{"), shard(b'{"a":1,"a":1}'), shard({"a": 1}),
        shard({"a": {}}), shard({"a": entry("F64")}), shard({"a": entry(5)}), shard({"a": entry(shape=(2,))}),
        shard({"a": entry(shape=(-1,))}), shard({"a": entry(shape=(1.0,))}), shard({"a": entry(shape=(True,))}),
        shard({"a": entry(shape=(2**62, 2**62))}), shard({"a": entry(offsets=(0, 4), shape=(2,))}),
        shard({"a": entry(offsets=(2, 4))}), shard({"a": entry(offsets=(2, 0))}), shard({"a": entry(offsets=(0,))}),
        shard({"a": entry(), "b": entry()}), shard({"a": entry()}, b"\0\0\0"), shard({"a": entry()}, b""), shard({}),
    ],
)  # fmt: skip
def test_hostile_shards_are_format_errors(data):
    with pytest.raises(FormatError):
        list(parse_shard(data, "a shard", DEFAULT_LIMITS))


def test_a_header_is_capped(tmp_path):
    data = write_anchor_files(tmp_path, [tensor("a", "BF16", 1)])["model.safetensors"].read_bytes()
    with pytest.raises(FormatError, match="header"):
        list(parse_shard(data, "a shard", Limits(header_bytes=1000)))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_mutated_shards_raise_format_errors_only(data):
    content = bytearray(shard({"a": entry(), "b": entry(offsets=(2, 6), shape=(2, 1))}, bytes(6)))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FormatError):
        list(parse_shard(bytes(content), "a shard", DEFAULT_LIMITS))


# --- others


def test_transformers_loads_an_anchor_folder(tmp_path):
    """A local store's anchor folder is a model folder: what transformers reads is what was published, bit by bit."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    bits = {name: value.view(torch.uint16).numpy().ravel() for name, value in weights.items()}
    shapes = {name: tuple(value.shape) for name, value in weights.items()}

    run = TinyRun(LocalStore(tmp_path / "run"))
    every = {name: TensorState("BF16", shapes[name], digest(bits[name], tensor_key(name))) for name in bits}
    manifest = run.writer.commit(
        "origin", (0, 0), every, state_digest(every), model_fingerprint(every), [],
        changed=0, total=sum(value.size for value in bits.values()), codec=None, prompt_cache="all",
    )  # fmt: skip
    files = write_anchor_files(
        tmp_path / "files", ((name, BF16, shapes[name], bits[name]) for name in bits), shard_bytes=8000
    )
    config.architectures = ["LlamaForCausalLM"]
    files = {**files, "config.json": config.to_json_string().encode()}
    record = run.writer.attach_anchor(manifest, files, every)
    folder = tmp_path / "run" / record.objects[0].key.rpartition("/")[0]
    assert len(list(folder.glob("*.safetensors"))) > 2

    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    for name, value in loaded.state_dict().items():
        assert torch.equal(value.view(torch.uint16), model.state_dict()[name].view(torch.uint16)), name
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
