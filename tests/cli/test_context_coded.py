"""A version coded against the old bits: proven and materialized like any other, its object not looked into alone."""

from __future__ import annotations

from delta_sync.context_codec import CONTEXT_CODEC
from delta_sync.context_file import Change, encode_against
from delta_sync.delta_file import DeltaHeader


def publish_context_coded(publisher):
    """Small elements go up by one step, as an optimizer moves them most."""
    before = publisher.published
    for bits in publisher.weights.values():
        bits[(bits >> 7 & 0xFF) < 120] += 1
    states = publisher.states()
    changes = [Change(n, publisher.dtype(n), w.shape, before[n], w) for n, w in publisher.weights.items()]
    head = publisher.writer.head
    header, data, deltas = encode_against(
        DeltaHeader(publisher.writer.run, head.version + 1, head.version, ""), changes
    )
    assert header.codec == CONTEXT_CODEC
    touched = {delta.name: states[delta.name] for delta in deltas}
    return publisher._commit("delta", states, touched, [data], sum(d.changed for d in deltas), CONTEXT_CODEC)


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
