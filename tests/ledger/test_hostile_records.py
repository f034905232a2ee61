"""The small JSON objects, each as somebody with the right to write would make it: refused or left out, nothing else."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
import uuid
from dataclasses import replace

import pytest
from tiny_run import TinyRun

from delta_sync.ack import Ack
from delta_sync.anchor_files import INDEX, iter_anchor_tensors
from delta_sync.errors import ChainError, FormatError, IntegrityError
from delta_sync.ledger import Ledger
from delta_sync.limits import for_model
from delta_sync.manifest import ObjectRef
from delta_sync.plan import Position
from delta_sync.records import read_epoch
from delta_sync.store.keys import HEAD, anchor_folder, anchor_key, epoch_key
from delta_sync.store.memory import MemoryStore

REFUSED = (FormatError, IntegrityError)


@pytest.fixture
def run(tmp_path):
    """Version 1 with an anchor of two shards, version 2, and a replica's word."""
    run = TinyRun(MemoryStore(uuid.uuid4().hex))
    run.anchor(tmp_path / "anchor", run.origin())
    run.delta()
    run.writer.ledger.acknowledge(Ack("east", 2, run.writer.head.sha256, 1, "live", None, None, None, None, 1.5))
    return run


def honest(run, key):
    return json.loads(run.store.get(key, max_bytes=1 << 20))


def as_json(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def with_value(field, text):
    """The record with one field's JSON replaced by text that json.dumps would not write."""
    return lambda document: as_json(document | {field: "@"}).replace(b'"@"', text.encode())


def with_key_twice(document):
    field = sorted(document)[0]
    return b"{" + as_json({field: document[field]})[1:-1] + b"," + as_json(document)[1:]


# What may be wrong with any of them; ``epoch`` and ``time``-like fields are in all but the index.
ANYWHERE = {
    "too large": lambda document: as_json(document) + b" " * (2 << 20),
    "zip bomb in place of JSON": lambda document: b"\x1f\x8b\x08" + bytes(1000),
    "zstd frame in place of JSON": lambda document: b"\x28\xb5\x2f\xfd" + bytes(1000),
    "pickle": lambda document: b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "nothing": lambda document: b"",
    "a list": lambda document: b"[]",
    "bottomless": lambda document: b'{"a":' + b"[" * 50_000,
    "not UTF-8": lambda document: as_json(document)[:-1] + b',"\xff":1}',
    "cut short": lambda document: as_json(document)[:-1],
    "key twice": with_key_twice,
    "NaN": with_value("epoch", "NaN"),
    "infinite": with_value("epoch", "1e999"),
    "endless number": with_value("epoch", "1" * 5000),
    "negative": with_value("epoch", "-1"),
    "fraction": with_value("epoch", "1.5"),
    "text for a number": with_value("epoch", '"1"'),
    "another format version": with_value("format_version", "2"),
    "surrogate": with_value("epoch", '"\\ud800"'),
}


def refused_head(run):
    with pytest.raises(REFUSED):
        Ledger(run.store, for_model(3)).head()


def ignored_hint(run):
    assert Ledger(run.store, for_model(3)).head() == run.writer.head


def refused_epoch(run):
    with pytest.raises(REFUSED):
        read_epoch(run.store, 1)


def refused_anchor(run):
    ledger = Ledger(run.store, for_model(3))
    with pytest.raises(REFUSED):
        ledger.anchor(ledger.manifest(1))
    with pytest.raises((*REFUSED, ChainError)):
        ledger.plan(None, None)


def left_out(run):
    assert Ledger(run.store, for_model(3)).acknowledgements() == {}


RECORDS = {
    "manifest": (lambda run: run.writer.head.key, refused_head),
    "HEAD": (lambda run: HEAD, ignored_hint),
    "epoch": (lambda run: epoch_key(1), refused_epoch),
    "anchor": (lambda run: anchor_key(1, 1), refused_anchor),
    "acknowledgement": (lambda run: "replicas/east.json", left_out),
}


@pytest.mark.parametrize("lie", ANYWHERE)
@pytest.mark.parametrize("record", RECORDS)
def test_a_lie_is_refused_or_left_out_at_bounded_cost(run, record, lie):
    key_of, check = RECORDS[record]
    data = ANYWHERE[lie](honest(run, key_of(run)))
    run.store.put(key_of(run), data)
    if record == "manifest":
        run.store.delete(HEAD)  # which would give the lie away by its hash
    tracemalloc.start()
    check(run)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


ESCAPES = ["../outside", "/etc/passwd", "..", "a/../../b", "a//b", "a\\..\\b", "a\0b", "a\nb", "\ud800", "x" * 2000]


@pytest.mark.parametrize("name", ESCAPES)
def test_no_name_leads_out_of_the_store(run, name):
    store = run.store
    folder = anchor_folder(1, 1)
    record = honest(run, anchor_key(1, 1))
    for key in (name, folder + name):
        store.put(anchor_key(1, 1), as_json(record | {"objects": [record["objects"][0] | {"key": key}]}))
        refused_anchor(run)
    head = honest(run, run.writer.head.key)
    store.put(run.writer.head.key, as_json(head | {"objects": [head["objects"][0] | {"key": name}]}))
    store.delete(HEAD)
    refused_head(run)
    store.put(run.writer.head.key, as_json(head | {"writer": name}))
    refused_head(run)
    store.put(epoch_key(1), as_json(honest(run, epoch_key(1)) | {"writer": name}))
    refused_epoch(run)
    store.put("replicas/east.json", as_json(honest(run, "replicas/east.json") | {"replica": name}))
    left_out(run)


def test_a_hint_that_leads_out_is_none(run):
    hint = honest(run, HEAD)
    for name in ESCAPES:
        run.store.put(HEAD, as_json(hint | {"writer": name}))
        ignored_hint(run)


def test_an_acknowledgement_in_another_replicas_name_is_left_out(run):
    run.store.put("replicas/west.json", run.store.get("replicas/east.json", max_bytes=9999))
    assert list(Ledger(run.store).acknowledgements()) == ["east"]


def test_a_record_of_another_place_is_refused(run, tmp_path):
    """The key says version and epoch, and so must the record: else a true one could be shown as another."""
    head = run.writer.head
    run.anchor(tmp_path / "second", head)
    run.store.put(anchor_key(1, 1), run.store.get(anchor_key(2, 1), max_bytes=9999))
    ledger = Ledger(run.store)
    with pytest.raises(IntegrityError, match="version"):
        ledger.anchor(ledger.manifest(1))
    run.store.put(epoch_key(7), run.store.get(epoch_key(1), max_bytes=9999))
    with pytest.raises(IntegrityError, match="key of epochs/000007"):
        read_epoch(run.store, 7)
    run.store.put(head.key, Ledger(run.store).manifest(1).to_bytes())
    run.store.delete(HEAD)
    refused_head(run)


@pytest.mark.parametrize("count", ["NaN", "-1", "1e3", "3.0", '"3"', "true", "null", "1e999", "9" * 400])
@pytest.mark.parametrize("field", ["changed_elements", "total_elements", "version", "size"])
def test_a_count_that_is_none_is_refused(run, field, count):
    head = honest(run, run.writer.head.key)
    if field == "size":
        data = as_json(head | {"objects": [head["objects"][0] | {"size": "@"}]}).replace(b'"@"', count.encode())
    else:
        data = with_value(field, count)(head)
    run.store.put(run.writer.head.key, data)
    run.store.delete(HEAD)
    refused_head(run)


INDEXES = [
    b"", b"[]", b"NaN", b"{", b'{"weight_map":[]}', b'{"weight_map":NaN}', b'{"weight_map":{"a":1,"a":1}}',
    b'{"weight_map":' + b"[" * 50_000, b"\x80\x04cos\nsystem\n(S'true'\ntR.", b"\x28\xb5\x2f\xfd" + bytes(100),
    b'{"weight_map":{"norm.weight":"../../../outside","layer.weight":"/etc/passwd"}}',
    b'{"weight_map":{"norm.weight":[]}}',
]  # fmt: skip


@pytest.mark.parametrize("index", INDEXES, ids=range(len(INDEXES)))
def test_an_anchors_index_that_lies_leads_nowhere(run, tmp_path, index):
    ledger = Ledger(run.store)
    record = ledger.anchor(ledger.manifest(1))
    key = anchor_folder(1, 1) + INDEX
    run.store.put(key, index)
    refs = (*record.objects, ObjectRef(key, len(index), hashlib.sha256(index).hexdigest()))
    with pytest.raises(REFUSED):
        list(iter_anchor_tensors(ledger, replace(record, objects=refs)))


def test_a_chain_in_a_circle_is_no_chain(run):
    """Parents go down by one version each, so a manifest cannot be its own ancestor."""
    head = run.writer.head
    forged = replace(head, version=3, base_version=2, parent=head.parent)
    run.store.put(forged.key, forged.to_bytes())
    run.store.delete(HEAD)
    with pytest.raises((*REFUSED, ChainError)):
        Ledger(run.store).plan(Position(9, "0" * 64), None)
