"""What the page shows, computed: points that stay where they are, counts by layer, commits remembered."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from test_context_coded import publish_context_coded

from delta_sync.cli.dashboard.heat import COLUMNS, HeatMap, kind_of, layer_of, read_head, sample, stride
from delta_sync.cli.dashboard.summary import POINTS, Look, sections
from delta_sync.cli.dashboard.times import CommitTimes
from delta_sync.cli.view import RunView
from delta_sync.delta_file import decode_delta
from delta_sync.errors import FormatError, StoreError
from delta_sync.ledger import Ledger
from delta_sync.limits import DEFAULT_LIMITS
from delta_sync.manifest import ObjectRef
from delta_sync.store.local import LocalStore


def version(number, *, epoch=1, reward=None, **said):
    """A row as RunView makes them."""
    metrics = {} if reward is None else {"reward": reward}
    return {
        "version": number, "epoch": epoch, "kind": "delta" if number > 1 else "origin", "steps": [number, number],
        "created_at": 1.8e9 + number, "changed_elements": number % 7, "total_elements": 100, "bytes": number,
        "codec": None, "manifest": f"{number:064x}", "parent": None, "signed_by": None, "anchor": None, "folds": [],
        "metrics": metrics,
    } | said  # fmt: skip


def replica(name, number, **performance):
    return {"replica": name, "version": number, "performance": performance, "health": "current", "lag": 0,
            "error": None, "refused_object": None}  # fmt: skip


def parts(versions, replicas=(), window="all", times=None):
    heat = HeatMap(LocalStore("/nonexistent"), DEFAULT_LIMITS)
    look = Look("file:///run", "run", tuple(versions), tuple(replicas), True, True)
    return sections(look, window, heat, times or CommitTimes())


def test_points_stay_where_they_are_as_a_run_grows():
    before = parts([version(k) for k in range(1, 5001)])["versions"]
    after = parts([version(k) for k in range(1, 5031)])["versions"]
    assert len(before["first"]) <= POINTS
    whole = len(before["first"]) - 1  # the last one may still get versions
    for name in ("first", "last", "bytes", "bytes_max", "changed"):
        assert after[name][:whole] == before[name][:whole]
    assert before["bytes"][1] == pytest.approx(sum(range(32, 64)) / 32, rel=1e-3)
    assert before["bytes_max"][1] == 63


def test_a_window_shows_the_newest_one_by_one():
    found = parts([version(k) for k in range(1, 5001)], window="200")["versions"]
    assert (found["step"], found["first"]) == (1, list(range(4801, 5001)))


def test_epochs_anchors_folds_and_reward():
    rows = [version(k, reward=k / 2) for k in range(1, 4)] + [version(4, epoch=3), version(5, epoch=3)]
    rows[1] |= {"anchor": {"files": 1, "bytes": 1000, "created_at": 1.0}}
    rows[4] |= {"folds": [1, 2], "anchor": {"error": "damaged"}}
    found = parts(rows)
    assert found["versions"]["epochs"] == [{"version": 4, "epoch": 3}]
    assert (found["versions"]["anchors"], found["versions"]["folds"]) == ([0, 1, 0, 0, 1], [0, 0, 0, 0, 2])
    assert found["versions"]["reward"] == [0.5, 1.0, 1.5, None, None]
    # a damaged anchor helps nobody to join
    assert found["run"]["chain"] == {"anchor": 2, "anchor_bytes": 1000, "deltas": 3, "bytes": 12}


def test_of_adapters_a_server_that_starts_fetches_the_newest_alone():
    anchor = {"files": 1, "bytes": 1000, "created_at": 1.0}
    rows = [version(1, anchor=anchor), version(2), *(version(k, kind="adapter") for k in (3, 4, 5))]
    chain = {"anchor": 1, "anchor_bytes": 1000, "deltas": 1}
    assert parts(rows)["run"]["chain"] == chain | {"bytes": 2 + 5}
    assert parts([*rows, version(6)])["run"]["chain"] == chain | {"deltas": 2, "bytes": 2 + 6}  # which ends the adapter
    assert parts([version(1), version(2, kind="adapter", anchor=anchor)])["run"]["chain"]["bytes"] == 2


def test_replicas_in_need_come_first_and_texts_are_cut():
    rows = [replica(f"r{k}", 1) for k in range(3)]
    rows[1] |= {"health": "behind", "lag": 4}
    rows[2] |= {"health": "poisoned", "error": "x" * 4000}
    found = parts([version(1)], rows)["replicas"]
    assert [row["replica"] for row in found["rows"]] == ["r2", "r1", "r0"]
    assert found["counts"] == {"poisoned": 1, "behind": 1, "current": 1}
    assert len(found["rows"][0]["error"]) == 600


def test_commits_are_remembered_once_each_and_told_by_version():
    times = CommitTimes()
    times.take([replica("a", 2, gap_seconds=0.01, served_seconds=1.0), replica("b", 2, gap_seconds=0.03)])
    times.take([replica("a", 2, gap_seconds=0.01, served_seconds=1.0), replica("b", 3, gap_seconds=0.02)])
    times.take([replica("a", None), replica("b", 3, gap_seconds=0.02), replica("c", 3)])
    found = parts([version(k) for k in range(1, 5)], times=times)["commits"]
    assert found["version"] == [2, 3]
    assert (found["gap_seconds"], found["gap_seconds_max"]) == ([0.02, 0.02], [0.03, 0.02])
    assert found["served_seconds"] == [1.0, None]


@pytest.mark.parametrize("count", [0, 1, COLUMNS, COLUMNS + 1, 5000])
def test_columns_of_the_map_are_few_and_hold_the_newest(count):
    rows = [version(k) for k in range(1, count + 1)]
    found = sample(rows)
    assert len(found) <= COLUMNS + 1
    assert found[-1:] == rows[-1:]
    assert {row["version"] % stride(count, COLUMNS) for row in found[:-1]} <= {0}


@pytest.mark.parametrize(
    ("tensor", "layer", "kind"),
    [
        ("model.layers.3.mlp.up_proj.weight", "layers.3", "mlp.up_proj"),
        ("model.layers.13.mlp.experts.7.w1.weight", "layers.13", "mlp.experts.*.w1"),
        ("transformer.h.0.ln_1.bias", "transformer.h.0", "ln_1.bias"),
        ("model.embed_tokens.weight", "embed_tokens", "embed_tokens"),
        ("lm_head.weight", "lm_head", "lm_head"),
        ("blocks.4", "blocks.4", "blocks.*"),
        ("3", "3", "3"),
    ],
)
def test_a_tensors_layer_and_kind(tensor, layer, kind):
    assert (layer_of(tensor), kind_of(tensor)) == (layer, kind)


def test_counts_are_those_of_the_deltas_and_the_bits_are_not_read(run):
    store = LocalStore(run.folder)
    view = RunView(Ledger(store))
    view.refresh()
    heat = HeatMap(store, DEFAULT_LIMITS)
    heat.fill([(row, view.objects(row)) for row in view.versions], 60)
    found = heat.matrix(view.versions, "layer")
    assert found["names"] == ["embed", "layer", "norm"]
    assert [row[0] for row in found["share"]] == [None] * 3  # an origin changes nothing
    data = store.get(run.manifests[6].objects[0].key, max_bytes=2**20)
    changed = {delta.name: (delta.changed, math.prod(delta.shape)) for delta in decode_delta(data)[1]}
    for name, row in zip(found["names"], found["share"], strict=True):
        count, size = changed[f"{name}.weight"]
        assert row[5] == pytest.approx(count / size, rel=5e-3)


def test_context_coded_objects_have_heads_too(run):
    manifest = publish_context_coded(run.publisher)
    found = Counter()
    for ref in manifest.objects:
        for entry in read_head(LocalStore(run.folder), ref, DEFAULT_LIMITS):
            found[entry.name] += entry.count
    assert sum(found.values()) == manifest.changed_elements


def test_a_long_head_takes_a_second_read(run, monkeypatch):
    ref = run.manifests[6].objects[0]
    whole = read_head(LocalStore(run.folder), ref, DEFAULT_LIMITS)
    monkeypatch.setattr("delta_sync.cli.dashboard.heat._FIRST_READ", 100)
    assert read_head(LocalStore(run.folder), ref, DEFAULT_LIMITS) == whole


@pytest.mark.parametrize(
    "data", [b"", b"\x08", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", b"\x02" + bytes(7) + b"{}"]
)
def test_an_object_that_is_none_is_a_column_that_is_not_known(tmp_path, data):
    store = LocalStore(tmp_path)
    store.put("deltas/bad", data)
    ref = ObjectRef("deltas/bad", len(data), "0" * 64)
    with pytest.raises(FormatError):
        read_head(store, ref, DEFAULT_LIMITS)
    heat = HeatMap(store, DEFAULT_LIMITS)
    gone = ObjectRef("deltas/gone", 9, "0" * 64)
    assert heat.fill([(version(2), [ref]), (version(3), [gone])], 60) == (True, False)
    assert heat.fill([(version(2), [ref])], 60) == (False, False)  # not asked again


def test_a_store_that_fails_is_asked_again(tmp_path, run):
    store = LocalStore(run.folder)
    heat = HeatMap(store, DEFAULT_LIMITS)
    manifest = run.manifests[6]
    row, deltas = version(6, manifest=manifest.sha256), run.folder / "deltas"
    deltas.rename(tmp_path / "away")
    deltas.symlink_to(tmp_path / "away")  # which a store must not follow
    assert heat.fill([(row, manifest.objects)], 60) == (False, False)
    with pytest.raises(StoreError):
        read_head(store, manifest.objects[0], DEFAULT_LIMITS)
    deltas.unlink()
    (tmp_path / "away").rename(deltas)
    assert heat.fill([(row, manifest.objects)], 60) == (True, False)
    assert heat.matrix([row], "layer")["share"][0][0] > 0


def test_heads_are_read_within_a_budget_one_at_least(run):
    heat = HeatMap(LocalStore(run.folder), DEFAULT_LIMITS)
    rows = [(version(k, manifest=m.sha256), m.objects) for k, m in run.manifests.items()]
    for _ in rows[1:]:
        assert heat.fill(rows, 0) == (True, True)
    assert heat.fill(rows, 0) == (True, False)
