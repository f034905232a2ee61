from __future__ import annotations

import pytest
from helpers.long_run import LongRun
from helpers.publish import Publisher

from delta_sync.ack import Ack
from delta_sync.cli import view as view_module
from delta_sync.cli.run_tables import replicas_table
from delta_sync.cli.view import RunView
from delta_sync.errors import IntegrityError, StoreError
from delta_sync.ledger import Ledger
from delta_sync.store.local import LocalStore


class CountingStore(LocalStore):
    reads = 0

    def get(self, key, *, max_bytes):
        self.reads += 1
        return super().get(key, max_bytes=max_bytes)


@pytest.fixture
def view(run):
    return RunView(Ledger(CountingStore(run.folder)), relist_seconds=0)


def numbers(view):
    return [row["version"] for row in view.versions]


def test_a_refresh_takes_what_is_new_and_reads_nothing_again(run, view):
    view.refresh()
    assert (numbers(view), view.complete, view.run) == ([1, 2, 3, 4, 5, 6], True, run.manifests[6].run)
    view.ledger.store.reads, before = 0, list(view.versions)
    view.refresh()
    assert all(row is kept for row, kept in zip(view.versions, before, strict=True))
    assert view.ledger.store.reads <= 3  # HEAD, the next version's key
    run.keep(run.publisher.step(9))
    view.refresh()
    assert numbers(view) == [1, 2, 3, 4, 5, 6, 7]
    assert view.ledger.store.reads <= 12
    assert view.objects(view.newest) == run.manifests[7].objects


def test_an_anchor_and_a_fold_that_come_later(run, view, as_json):
    view.refresh()
    assert [row["version"] for row in view.versions if row["anchor"]] == [1, 4]
    assert as_json("compact", run.uri, "--from", 2, "--to", 5)[0] == 0
    run.publisher.anchor(run.manifests[6])
    view.refresh()
    assert view.version(5)["folds"] == [2]
    assert view.version(6)["anchor"]["files"] == 1


def test_older_versions_are_read_within_a_budget_of_time(tmp_path):
    run = LongRun(tmp_path, started=1.8e9)
    run.grow(40)
    view = RunView(Ledger(LocalStore(tmp_path)))
    view.refresh(seconds=0)
    assert (numbers(view), view.complete) == ([40], False)
    while not view.complete:
        view.refresh(seconds=0.002)
    assert numbers(view) == list(range(1, 41))


def test_at_most_the_last(run):
    view = RunView(Ledger(LocalStore(run.folder)), last=2)
    view.refresh()
    assert (numbers(view), view.complete) == ([5, 6], True)
    run.keep(run.publisher.step(9))
    view.refresh()
    assert numbers(view) == [6, 7]


def test_a_branch_that_is_left_behind_goes_away(run, view):
    """A trainer that claimed before another one's last commit continues without it."""
    view.refresh()
    other = Publisher(run.uri, run.publisher.weights)
    (run.folder / run.manifests[6].key).unlink()  # never visible to the new epoch
    other.writer._base = type(other.writer._base)(5, run.manifests[5].sha256)
    taken = other.origin()
    assert (taken.version, taken.epoch) == (6, 2)
    view.refresh()
    assert numbers(view) == [1, 2, 3, 4, 5, 6]
    assert (view.newest["epoch"], view.newest["manifest"]) == (2, taken.sha256)


def test_a_view_that_is_far_behind_begins_at_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr(view_module, "MOST_NEW", 5)
    run = LongRun(tmp_path, started=1.8e9)
    run.grow(3)
    view = RunView(Ledger(LocalStore(tmp_path)))
    view.refresh()
    run.grow(20)
    view.refresh()
    assert numbers(view) == list(range(1, 24))


def test_damage_ends_the_versions_and_is_told(run, view):
    run.damage(run.manifests[2].key)
    view.refresh()
    assert (numbers(view), view.damaged) == ([3, 4, 5, 6], True)
    assert isinstance(view.chain_end, IntegrityError)


def test_a_damaged_newest_version_is_told_and_those_below_it_stay(run, view):
    view.refresh()
    run.damage(run.manifests[6].key)
    fresh = RunView(Ledger(LocalStore(run.folder)))
    fresh.refresh()
    assert (numbers(fresh), fresh.damaged) == ([1, 2, 3, 4, 5], True)
    assert "manifest" in str(fresh.damaged_newest)


def test_health_in_one_word(run, view):
    run.acknowledge("a", 6)
    run.acknowledge("b", 4)
    run.acknowledge("c", 4, state="refused", refused_version=5, error="no")
    run.acknowledge("d", 4, state="poisoned")
    write = run.publisher.ledger.acknowledge
    write(Ack("e", 5, "0" * 64, 1, "live", None, None, None, None, 1.8e9))
    write(Ack("f", None, None, None, "live", None, None, None, None, 1.8e9))
    write(Ack("g", 7, "0" * 64, 1, "live", None, None, None, None, 1.8e9))  # newer than this look at the run
    view.refresh()
    health = {row["replica"]: row["health"] for row in view.replicas}
    assert health == {
        "a": "current", "b": "behind", "c": "refused", "d": "poisoned", "e": "astray", "f": "starting", "g": "current",
    }  # fmt: skip
    behind = {row["replica"]: row["behind_since"] for row in view.replicas}
    assert behind["b"] == run.manifests[5].created_at
    assert behind["a"] is None


def test_times_are_columns_where_a_replica_tells_them(run, view):
    run.acknowledge("a", 6)
    view.refresh()
    assert "served" not in " ".join(replicas_table(view.replicas, 0).columns)
    told = [view.replicas[0] | {"performance": {"served_seconds": 0.34, "gap_seconds": 0.0075}}]
    table = replicas_table(told, 0)
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert (cells[">served"], cells[">gap"], cells[">staged"]) == ("340ms", "7.5ms", "-")


def test_a_store_that_fails_leaves_the_rows_of_before(run, view, tmp_path):
    view.refresh()
    (run.folder / "replicas").symlink_to(tmp_path)  # which a store must not follow
    with pytest.raises(StoreError):
        view.refresh()
    assert numbers(view) == [1, 2, 3, 4, 5, 6]
