"""Numbers out of what was recorded: streams, commits, manifests. Pure functions, unix seconds in, milliseconds out."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from examples.wordle.stream import Stream
from examples.wordle.watch import Commit


def token_gaps(streams: Sequence[Stream]) -> list[float]:
    """Milliseconds between neighbouring tokens of one stream, over all streams."""
    return [1000 * (b - a) for stream in streams for a, b in pairwise(stream.times)]


def gap_at(commit: Commit, streams: Sequence[Stream]) -> float | None:
    """The longest token gap (ms) that touches the time in which the commit fell; None if no stream spans it."""
    for stream in streams:
        times = stream.times
        if not spans(stream, commit):
            continue
        first, last = bisect_right(times, commit.before) - 1, bisect_left(times, commit.after)
        pairs = zip(times[first:last], times[first + 1 : last + 1], strict=True)
        return max((1000 * (b - a) for a, b in pairs), default=0.0)
    return None


def spans(stream: Stream, commit: Commit) -> bool:
    """Whether the stream brought tokens both before and after the commit."""
    return bool(stream.times) and stream.times[0] <= commit.before and stream.times[-1] >= commit.after


def commits_per_stream(commits: Sequence[Commit], streams: Sequence[Stream]) -> list[int]:
    return [sum(spans(stream, commit) for commit in commits) for stream in streams]


def fresh_after(version: int, stepped_at: float, commits: Sequence[Commit]) -> float | None:
    """Milliseconds from the end of the optimizer step until this version, or a newer one, was seen served."""
    served = [commit.after for commit in commits if commit.version >= version]
    return 1000 * (min(served) - stepped_at) if served and stepped_at else None


def middle(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def versions_table(
    manifests: Sequence[Any], rows: Sequence[dict[str, Any]], commits: Sequence[Commit], streams: Sequence[Stream]
) -> list[dict[str, Any]]:
    """One row per delta manifest, in version order, joined with the trainer's log row of its last step."""
    by_step = {row["step"]: row for row in rows if "loss" in row}
    by_version = {commit.version: commit for commit in commits}
    table = []
    for manifest in sorted(manifests, key=lambda m: m.version):
        row = by_step.get(manifest.steps[1], {})
        commit = by_version.get(manifest.version)
        size = sum(ref.size for ref in manifest.objects)
        table.append(
            {
                "version": manifest.version,
                "step": manifest.steps[1],
                "changed": manifest.changed_elements,
                "changed_percent": 100 * manifest.changed_elements / manifest.total_elements,
                "bytes": size,
                "bytes_per_changed": size / manifest.changed_elements if manifest.changed_elements else None,
                "fresh_ms": fresh_after(manifest.version, row.get("stepped_at", 0.0), commits),
                "token_gap_ms": gap_at(commit, streams) if commit else None,
                "reward": row.get("reward"),
                "reward_std": row.get("reward_std"),
                "step_time_s": row.get("step_time"),
            }
        )
    return table
