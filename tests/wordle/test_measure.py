import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from examples.wordle import measure, report
from examples.wordle.stream import Stream
from examples.wordle.summary import summarise
from examples.wordle.watch import Commit

STREAM = Stream(times=[10.0, 10.1, 10.2, 10.5, 10.6], end="length")
LATER = Stream(times=[11.0, 11.1], end="cut")


@dataclass
class Manifest:
    version: int
    steps: tuple[int, int]
    changed_elements: int
    total_elements: int
    objects: tuple


def manifest(version, changed=100, size=250):
    return Manifest(version, (version, version), changed, 1000, (SimpleNamespace(size=size),))


def test_gaps_do_not_cross_streams():
    assert measure.token_gaps([STREAM, LATER]) == pytest.approx([100, 100, 300, 100, 100])
    assert measure.token_gaps([Stream(), Stream(times=[1.0])]) == []


@pytest.mark.parametrize(
    ("before", "after", "gap"),
    [
        (10.3, 10.4, 300),  # inside the long gap
        (10.15, 10.3, 300),  # touches two gaps: the longer one counts
        (10.05, 10.08, 100),
        (10.55, 10.7, None),  # no token after it
        (9.0, 10.05, None),  # no token before it
        (10.7, 10.9, None),  # between two streams
    ],
)
def test_the_gap_at_a_commit(before, after, gap):
    found = measure.gap_at(Commit(1, before, after), [STREAM, LATER])
    assert found == (None if gap is None else pytest.approx(gap))


def test_commits_per_stream():
    commits = [Commit(1, 10.05, 10.08), Commit(2, 10.3, 10.4), Commit(3, 10.7, 10.9), Commit(4, 11.02, 11.05)]
    assert measure.commits_per_stream(commits, [STREAM, LATER]) == [2, 1]


def test_fresh_weights_may_come_with_a_newer_version():
    commits = [Commit(1, 4.9, 5.0), Commit(3, 6.9, 7.0)]
    assert measure.fresh_after(2, 6.0, commits) == pytest.approx(1000)
    assert measure.fresh_after(4, 6.0, commits) is None
    assert measure.fresh_after(1, 0.0, commits) is None


def test_the_table_joins_by_version_and_step():
    rows = [{"step": 1, "loss": 0.1, "reward": 0.5, "stepped_at": 10.0}, {"step": 2, "train_runtime": 1.0}]
    table = measure.versions_table([manifest(2), manifest(1)], rows, [Commit(1, 10.3, 10.4)], [STREAM])
    assert [row["version"] for row in table] == [1, 2]
    first, second = table
    assert (first["changed_percent"], first["bytes_per_changed"], first["reward"]) == (10.0, 2.5, 0.5)
    assert first["fresh_ms"] == pytest.approx(400) and first["token_gap_ms"] == pytest.approx(300)
    assert second["reward"] is None and second["fresh_ms"] is None and second["token_gap_ms"] is None


def facts(versions=8, changed=100, differing=None, interruptions=(), commits=(2, 6), served=None):
    table = measure.versions_table([manifest(v, changed) for v in range(1, versions + 1)], [], [], [])
    comparison = {"bit_exact": not differing, "tensors": 3, "version": served or versions, "differing": differing or {}}
    return {
        "versions": table,
        "comparison": comparison,
        "interruptions": list(interruptions),
        "streams": [{"commits": n} for n in commits],
        "token_gaps_ms": [10.0, 30.0, 20.0],
        "commits": [{"version": 1, "before": 10.3, "after": 10.4}],
        "seconds": 1.0,
    }


def test_a_good_run_has_no_failures():
    summary = summarise(facts())
    assert summary["failed"] == []
    assert (summary["versions"], summary["min_changed_elements"], summary["bit_exact"]) == (8, 100, True)
    assert (summary["max_token_gap_ms"], summary["median_token_gap_ms"]) == (30.0, 20.0)
    assert (summary["commits_during_streams"], summary["bytes_per_changed"]) == (8, 2.5)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"versions": 7}, "versions >= 8"),
        ({"changed": 0}, "min_changed_elements > 0"),
        ({"differing": {"w": "3 of 8 bytes"}}, "bit_exact"),
        ({"differing": {"w": "3 of 8 bytes"}}, "tensor w: 3 of 8 bytes"),
        ({"interruptions": ["x"]}, "streams_interrupted == 0"),
        ({"commits": (1, 1, 1)}, "most_commits_in_one_stream >= 2"),
        ({"served": 7}, "served_version is the newest, 8"),
    ],
)
def test_every_criterion_can_fail(broken, named):
    assert named in summarise(facts(**broken))["failed"]


def test_nothing_recorded_fails_and_does_not_crash():
    empty = {**facts(versions=0, commits=()), "token_gaps_ms": []}
    failed = summarise(empty)["failed"]
    assert "versions >= 8" in failed and "tokens were streamed" in failed
    assert any(name.startswith("served_version") for name in failed)


def test_the_report_has_a_picture_per_quantity(tmp_path):
    path = report.write(tmp_path / "r", facts(), [STREAM.times, LATER.times, []])
    written = json.loads(path.read_text())
    assert len(written["versions"]) == 8
    names = {f"{picture.column}.png" for picture in report.PICTURES} | {"timeline.png"}
    assert set(written["pictures"]) == names
    for name in names:
        data = (path.parent / name).read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 5000
