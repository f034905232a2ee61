"""A version coded against the old bits: proven and materialized like any other, its object not looked into alone."""

from __future__ import annotations

from delta_sync.context_codec import CONTEXT_CODEC
from delta_sync.context_file import Change, encode_against
from delta_sync.delta_file import DEFAULT_CODEC, DeltaHeader


def publish_context_coded(publisher, dealt_out=lambda changes: [changes], codecs=(CONTEXT_CODEC,)):
    """Small elements go up by one step, as an optimizer moves them most; an object for each part ``dealt_out``."""
    before = publisher.published
    for bits in publisher.weights.values():
        bits[(bits >> 7 & 0xFF) < 120] += 1
    states = publisher.states()
    changes = [Change(n, publisher.dtype(n), w.shape, before[n], w) for n, w in publisher.weights.items()]
    head = publisher.writer.head
    header = DeltaHeader(publisher.writer.run, head.version + 1, head.version, "")
    coded = [encode_against(header, part) for part in dealt_out(changes)]
    assert [header.codec for header, *_ in coded] == [*codecs]
    deltas = [delta for *_, found in coded for delta in found]
    touched, objects = {delta.name: states[delta.name] for delta in deltas}, [data for _, data, _ in coded]
    return publisher._commit("delta", states, touched, objects, sum(d.changed for d in deltas), CONTEXT_CODEC)


def test_it_is_proven_materialized_and_looked_into_against_its_base(run, as_json, cli, tmp_path):
    manifest = publish_context_coded(run.publisher)
    code, found = as_json("verify", run.uri)
    assert (code, found["damage"]) == (0, [])
    assert manifest.version in found["proven"]
    code, found = as_json("materialize", run.uri, tmp_path / "out")
    assert (code, found["version"]) == (0, manifest.version)
    code, found = as_json("inspect", run.uri)
    assert (code, found["changed_elements"]) == (0, manifest.changed_elements)
    assert [(s["from"], s["to"], s["up"] + s["down"]) for s in found["steps"]] == [(1, 1, manifest.changed_elements)]
    path = run.folder / manifest.objects[0].key
    code, _, err = cli("inspect", path)
    assert code == 1 and "the bits that it changes" in err
    as_json("materialize", f"{run.uri}@{manifest.version - 1}", tmp_path / "base")
    code, found = as_json("inspect", path, "--base", tmp_path / "base")
    assert (code, found["changed_elements"]) == (0, manifest.changed_elements)


def test_an_object_that_is_smaller_in_another_codec_is_as_good(run, as_json, tmp_path):
    """A trainer decides for each object, and the manifest names the codec that asks most: replicas take both."""
    codecs = (CONTEXT_CODEC, CONTEXT_CODEC, DEFAULT_CODEC)  # of the last tensor only 64 elements
    manifest = publish_context_coded(run.publisher, lambda changes: [[change] for change in changes], codecs)
    code, found = as_json("verify", run.uri)
    assert (code, found["damage"]) == (0, [])
    assert manifest.version in found["proven"]
    code, found = as_json("inspect", run.uri)
    assert (code, found["changed_elements"]) == (0, manifest.changed_elements)
    assert [each["codec"] for each in found["objects"]] == [*codecs]
    code, found = as_json("materialize", run.uri, tmp_path / "out")
    assert (code, found["version"]) == (0, manifest.version)
