"""Manifests and records: what is written reads back, and what is not a valid one is refused by name."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_sync import AnchorRecord, FormatError, Limits, Manifest, ObjectRef, TensorState
from delta_sync.ack import Ack
from delta_sync.records import Epoch, Head

SHA = "ab" * 32
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ORIGIN = Manifest(
    run="run-1", epoch=1, writer="host-1", version=1, kind="origin", base_version=None, parent=None, steps=(0, 0),
    objects=(), tensors={"ü.weight": TensorState("BF16", (2, 3), 2**64 - 1), "b": TensorState("F32", (), 0)},
    state_digest=SHA, model_fingerprint=SHA, changed_elements=0, total_elements=7, codec=None, prompt_cache="all",
    created_at=1234.5,
)  # fmt: skip
DELTA = replace(
    ORIGIN, version=2, kind="delta", base_version=1, parent=ORIGIN.sha256, steps=(1, 3), codec="gap-1",
    objects=(ObjectRef("deltas/x.safetensors", 10, SHA),), changed_elements=7, extra={"note": {"a": [1, 2.5, None]}},
    metrics={"reward": -0.5, "rewards/letters/mean": 0.25, "tokens": 7},
    traceparent=TRACE,
)  # fmt: skip
ANCHOR = AnchorRecord(
    2, 1, DELTA.sha256, SHA, (ObjectRef("anchors/000000000002-000001/model.safetensors", 5, SHA),),
    ORIGIN.tensors, 1234.5,
)  # fmt: skip
ACK = Ack(
    "replica-0",
    2,
    SHA,
    1,
    "refused",
    3,
    "deltas/y",
    "IntegrityError",
    "sha256 of …\nexpected",
    1234.5,
    {"gap_seconds": 0.5},
)
EPOCH = Epoch("run-1", 1, "host-1", 1234.5)
HEAD = Head("run-1", 1, "host-1", 2, SHA)
DOCUMENTS = {"origin": ORIGIN, "delta": DELTA, "anchor": ANCHOR, "ack": ACK, "epoch": EPOCH, "head": HEAD}


def changed(document, **fields) -> bytes:
    """The document's JSON with some fields replaced; a field set to ... is left out."""
    values = json.loads(document.to_bytes()) | fields
    values = {key: value for key, value in values.items() if value is not ...}
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_round_trip(name):
    document = DOCUMENTS[name]
    data = document.to_bytes()
    assert type(document).from_bytes(data) == document
    assert data == json.dumps(json.loads(data), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def test_identity_is_the_hash_of_the_bytes():
    assert DELTA.sha256 == hashlib.sha256(DELTA.to_bytes()).hexdigest()
    assert DELTA.key == "manifests/000000000002-000001-host-1.json"


def test_unknown_keys_are_kept():
    data = changed(DELTA, zukunft=[1, {"a": "ü"}])
    manifest = Manifest.from_bytes(data)
    assert manifest.extra["zukunft"] == [1, {"a": "ü"}]
    assert manifest.to_bytes() == data


@pytest.mark.parametrize("name", ["anchor", "ack", "epoch", "head"])
def test_records_ignore_unknown_keys(name):
    document = DOCUMENTS[name]
    assert type(document).from_bytes(changed(document, zukunft=1)) == document


def test_an_extra_key_must_not_pose_as_a_field():
    with pytest.raises(FormatError, match="extra"):
        replace(DELTA, extra={"version": 7}).to_bytes()


BIG = 2**70
WRONG = {
    "format_version": [2, 0, "1", None, True, ...],
    "run": ["", "a/b", "..", "a" * 65, 5, None, ...],
    "epoch": [0, -1, 10**6, 1.0, True, "1", None, ...],
    "writer": ["", "a b", "-a", "a/../b", 5, ...],
    "version": [0, 3, -2, 10**12, 2.0, True, "2", None, ...],
    "kind": ["base", "", None, 1, "origin", ...],
    "base_version": [None, 2, 0, 3, -1, "1", True, 1.0, ...],
    "parent": [None, "", SHA[:-1], SHA + "a", SHA.upper(), "g" * 64, 1, ...],
    "steps": [[], [1], [1, 2, 3], [3, 1], [-1, 2], [1.0, 2], [True, 2], [0, BIG], {}, None, ...],
    "objects": [None, {}, [1], [[]], "x", ...],
    "tensors": [None, [], "x", {"": {}}, {"a": None}, {"a": []}, {"a\nb": {}}, {"a\0": {}}, {"x" * 1025: {}}, ...],
    "state_digest": [None, "", "zz" * 32, SHA.upper(), 5, ...],
    "model_fingerprint": [None, "ab", 5, ...],
    "changed_elements": [-1, 8, 1.5, None, True, BIG, ...],
    "total_elements": [-1, 6, None, BIG, ...],
    "codec": [5, "", "a b", "x" * 65, ...],
    "prompt_cache": ["some", None, True, ...],
    "created_at": [-1.0, None, "now", 5, True, ...],
    "metrics": [
        None, {}, [], "x", {"a": None}, {"a": True}, {"a": "1"}, {"a": {}}, {"a": BIG}, {"a": [1.0]}, {"": 1.0},
        {"a b": 1.0}, {"a\n": 1.0}, {"x" * 129: 1.0}, {"/a": 1.0}, {f"m{i}": 0.0 for i in range(65)},
    ],
    "traceparent": [
        None, "", 5, [], TRACE + "0", TRACE.upper(), "01" + TRACE[2:], TRACE[:3] + 32 * "0" + TRACE[35:],
        TRACE[:36] + 16 * "0" + TRACE[52:], TRACE + "\n", 10**6 * "0",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_wrong_field_is_named(field, value):
    with pytest.raises(FormatError) as caught:
        Manifest.from_bytes(changed(DELTA, **{field: value}))
    related = {"version": "base_version", "kind": "base_version", "total_elements": "changed_elements"}
    assert field in str(caught.value) or related.get(field, field) in str(caught.value)
    assert caught.value.expected is not None
    assert caught.value.got is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": "../x"}, {"key": "/etc/passwd"}, {"key": 5}, {"key": "a\\b"}, {"key": ...}, {"size": -1},
        {"size": 2**50}, {"size": "5"}, {"size": True}, {"size": ...}, {"sha256": "00"}, {"sha256": None},
    ],
)  # fmt: skip
def test_a_wrong_object_is_refused(wrong):
    good = {"key": "deltas/x", "size": 1, "sha256": SHA}
    bad = {key: value for key, value in (good | wrong).items() if value is not ...}
    with pytest.raises(FormatError):
        Manifest.from_bytes(changed(DELTA, objects=[bad]))


def test_an_object_twice_is_refused():
    ref = {"key": "deltas/x", "size": 1, "sha256": SHA}
    with pytest.raises(FormatError, match="each key once"):
        Manifest.from_bytes(changed(DELTA, objects=[ref, ref]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "F64"}, {"dtype": 5}, {"dtype": ...}, {"shape": [-1]}, {"shape": [2**45]}, {"shape": [2**30, 2**30]},
        {"shape": [True]}, {"shape": [1.0]}, {"shape": [1] * 17}, {"shape": None}, {"digest": 5},
        {"digest": "0" * 15}, {"digest": "0" * 17}, {"digest": "A" * 16}, {"digest": ...},
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_refused(wrong):
    good = {"dtype": "BF16", "shape": [2], "digest": "0" * 16}
    bad = {key: value for key, value in (good | wrong).items() if value is not ...}
    for document in (DELTA, ANCHOR):
        with pytest.raises(FormatError):
            type(document).from_bytes(changed(document, tensors={"a": bad}))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"null", b"[]", b"5", b'"x"', b"{", b"\xff\xfe", b"{}", b'{"a":NaN}', b'{"a":Infinity}',
        b"[" * 100_000, b'{"a":' * 100_000, b"1" * 10_000, b'{"format_version":1,"format_version":1}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [Manifest, AnchorRecord, Ack, Epoch, Head])
def test_what_is_no_document_is_a_format_error(kind, data):
    with pytest.raises(FormatError):
        kind.from_bytes(data)


def test_an_origin_has_neither_base_nor_objects():
    ref = {"key": "deltas/x", "size": 1, "sha256": SHA}
    for wrong in ({"base_version": 1}, {"objects": [ref]}, {"parent": SHA}, {"version": 2}):
        with pytest.raises(FormatError):
            Manifest.from_bytes(changed(ORIGIN, **wrong))


def test_other_spellings_are_refused():
    text = DELTA.to_bytes().decode()
    for other in (
        json.dumps(json.loads(text)),
        text + " ",
        text.replace("1234.5", "1234.50"),
        text.replace("ü", "\\u00fc"),
    ):
        with pytest.raises(FormatError):
            Manifest.from_bytes(other.encode())


def test_a_lone_surrogate_is_refused():
    with pytest.raises(FormatError):
        Manifest.from_bytes(DELTA.to_bytes().replace("ü".encode(), b"\\ud800"))


def test_an_invalid_manifest_is_not_written():
    with pytest.raises(FormatError, match="base_version"):
        replace(DELTA, base_version=7).to_bytes()
    with pytest.raises(FormatError, match="shape"):
        replace(DELTA, tensors={"a": TensorState("BF16", (-1,), 0)}).to_bytes()


def test_caps_hold_before_anything_is_built():
    data = DELTA.to_bytes()
    for limits, what in (
        (Limits(manifest_bytes=len(data) - 1), "size"),
        (Limits(tensors=1), "tensors"),
        (Limits(objects=0), "objects"),
        (Limits(object_bytes=9), "size"),
        (Limits(name_bytes=3), "tensors"),
        (Limits(rank=1), "shape"),
        (Limits(elements=5), "shape"),
    ):
        with pytest.raises(FormatError, match=what):
            Manifest.from_bytes(data, limits=limits)


def test_hostile_values_do_not_fill_the_message():
    with pytest.raises(FormatError) as caught:
        Manifest.from_bytes(changed(DELTA, writer="x" * 10**6))
    assert len(str(caught.value)) < 1000
    with pytest.raises(FormatError) as caught:
        Manifest.from_bytes(changed(DELTA, tensors={"y\n" * 10**5: {}}))
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)


def test_an_anchor_lies_in_its_own_folder():
    ref = {"key": "anchors/000000000003-000001/model.safetensors", "size": 1, "sha256": SHA}
    with pytest.raises(FormatError, match="keys inside"):
        AnchorRecord.from_bytes(changed(ANCHOR, objects=[ref]))


def test_a_long_error_is_cut_when_written():
    data = replace(ACK, error="x" * 10_000).to_bytes()
    assert len(Ack.from_bytes(data).error) == 4000


def test_numbers_beyond_what_a_float_holds_are_refused():
    for number in (b"1e999", b"-1e999", b"NaN", b"Infinity", b"9" * 5000):
        data = DELTA.to_bytes().replace(b'"reward":-0.5', b'"reward":' + number)
        with pytest.raises(FormatError):
            Manifest.from_bytes(data)
    for number in (float("nan"), float("inf")):
        with pytest.raises(FormatError):
            replace(DELTA, metrics={"reward": number}).to_bytes()


def test_what_is_not_known_is_absent():
    fields = json.loads(ORIGIN.to_bytes()).keys() | json.loads(replace(ACK, performance={}).to_bytes()).keys()
    assert not fields & {"metrics", "traceparent", "performance"}


@pytest.mark.parametrize("performance", [None, {}, [], {"a": None}, {"a": True}, {"a\n": 1.0}, {"gap_seconds": "1"}])
def test_an_acknowledgement_has_numbers_or_none(performance):
    with pytest.raises(FormatError, match="performance"):
        Ack.from_bytes(changed(ACK, performance=performance))


@pytest.mark.parametrize("replica", ["", "a/b", "..", "a b", "x" * 129])
def test_a_replica_is_a_name(replica):
    with pytest.raises(FormatError, match="replica"):
        replace(ACK, replica=replica).to_bytes()


@pytest.mark.parametrize("name", DOCUMENTS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_mutated_bytes_raise_format_errors_only(name, data):
    document = DOCUMENTS[name]
    content = bytearray(document.to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "double"])):
            case "flip":
                content[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del content[at : at + data.draw(st.integers(1, 20))]
                content = content or bytearray(b"{}")
            case "insert":
                content[at:at] = data.draw(st.sampled_from([b'"', b"{", b"}", b"-", b"9" * 30, b"e9", b"\\u0000"]))
            case "double":
                content[at:at] = content[at : at + 40]
    try:
        read = type(document).from_bytes(bytes(content))
    except FormatError:
        return
    assert type(document).from_bytes(read.to_bytes()) == read


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("name", DOCUMENTS)
@settings(max_examples=60, deadline=None)
@given(value=JSON, data=st.data())
def test_any_value_in_any_field_is_read_or_refused(name, value, data):
    document = DOCUMENTS[name]
    field = data.draw(st.sampled_from(sorted(json.loads(document.to_bytes()))))
    try:
        read = type(document).from_bytes(changed(document, **{field: value}))
    except FormatError:
        return
    assert type(document).from_bytes(read.to_bytes()) == read
