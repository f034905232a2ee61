"""What the run showed, and whether that is what it promised."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from examples.wordle import measure
from examples.wordle.read_back import Comparison
from examples.wordle.stream import StreamRecorder
from examples.wordle.watch import StatusWatcher

LEAST_VERSIONS = 8
LEAST_COMMITS_IN_A_STREAM = 2


def facts_of_run(
    args: argparse.Namespace,
    deltas: Sequence[Any],
    rows: Sequence[dict[str, Any]],
    watcher: StatusWatcher,
    stream: StreamRecorder,
    comparison: Comparison,
) -> dict[str, Any]:
    """Everything recorded, as JSON; `deltas` are the manifests of the run's delta versions."""
    # A server that adopts the run's first version (its bits are the same already) commits nothing.
    published = {manifest.version for manifest in deltas}
    commits = [commit for commit in watcher.commits if commit.version in published]
    per_stream = measure.commits_per_stream(commits, stream.streams)
    return {
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "versions": measure.versions_table(deltas, rows, commits, stream.streams),
        "commits": [asdict(commit) for commit in commits],
        "streams": [
            {"tokens": len(s.times), "end": s.end, "commits": n}
            for s, n in zip(stream.streams, per_stream, strict=True)
        ],
        "interruptions": stream.interruptions,
        "token_gaps_ms": [round(gap, 2) for gap in measure.token_gaps(stream.streams)],
        "served": watcher.status,
        "failed_polls": watcher.failed_polls,
        "comparison": comparison.to_dict(),
        "trainer": list(rows),
    }


def summarise(facts: dict[str, Any]) -> dict[str, Any]:
    """The last line of the demo; `failed` names every criterion that does not hold."""
    versions, gaps = facts["versions"], facts["token_gaps_ms"]
    changed = [row["changed"] for row in versions]
    at_commits = [row["token_gap_ms"] for row in versions if row["token_gap_ms"] is not None]
    summary = {
        "versions": len(versions),
        "min_changed_elements": min(changed, default=0),
        "bit_exact": facts["comparison"]["bit_exact"],
        "streams_interrupted": len(facts["interruptions"]),
        "commits_during_streams": sum(stream["commits"] for stream in facts["streams"]),
        "most_commits_in_one_stream": max((stream["commits"] for stream in facts["streams"]), default=0),
        "bytes_per_changed": _round(sum(row["bytes"] for row in versions) / max(1, sum(changed))),
        "max_token_gap_ms": _round(max(gaps, default=None)),
        "median_token_gap_ms": _round(measure.middle(gaps)),
        "max_token_gap_at_commit_ms": _round(max(at_commits, default=None)),
        "median_fresh_ms": _round(measure.middle([row["fresh_ms"] for row in versions if row["fresh_ms"] is not None])),
        "tensors_compared": facts["comparison"]["tensors"],
        "served_version": facts["comparison"]["version"],
        "seconds": _round(facts["seconds"]),
    }
    return {**summary, "failed": _failed(summary, facts)}


def _failed(summary: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    newest = max((row["version"] for row in facts["versions"]), default=None)
    criteria = {
        f"versions >= {LEAST_VERSIONS}": summary["versions"] >= LEAST_VERSIONS,
        "min_changed_elements > 0": summary["min_changed_elements"] > 0,
        "bit_exact": summary["bit_exact"],
        f"served_version is the newest, {newest}": summary["served_version"] == newest is not None,
        "streams_interrupted == 0": summary["streams_interrupted"] == 0,
        f"most_commits_in_one_stream >= {LEAST_COMMITS_IN_A_STREAM}": (
            summary["most_commits_in_one_stream"] >= LEAST_COMMITS_IN_A_STREAM
        ),
        "tokens were streamed": bool(facts["token_gaps_ms"]),
    }
    differing = list(facts["comparison"]["differing"].items())[:3]
    names = [name for name, holds in criteria.items() if not holds]
    return names + [f"tensor {name}: {how}" for name, how in differing]


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
