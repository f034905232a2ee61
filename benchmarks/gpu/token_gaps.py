"""What clients saw around commits and audits: the times between tokens, from what commit_gap.py has kept.

Usage: python benchmarks/gpu/token_gaps.py TIMES.npz

A gap is the time between two neighbouring tokens of one stream. Left out are those in which some stream's completion
had ended and its next one had not begun: vLLM computes a prompt then, with or without us. *At commit*: of each stream
the longest gap that touches the commit or the 20 ms after it, of all commits: a batch is under way when one begins, and
the next batch waits for it. *Control*: the same at moments 0.35 s after a version was served. *Delay*: how much later a
stream's fifth token from then on comes than at the pace of the 20 after it, at commits and at control moments; the next
steps may make up for a late one. *Staging*: of all streams the longest gap from the manifest's being there until the
commit. *Audited*: the longest gap of each stream all 20 ms while live memory is read, and *between audits*, for as long
or longer after each: streams may have grown by then, and with them steps. Not what follows for who asked for the audit.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

Audit = tuple[float, float, float, float]  # when it began and ended, was answered, and until when nothing happened
Times = Sequence[Sequence[Sequence[float]]]  # of each stream, of each of its completions: when its tokens came
AFTER, CONTROL = 0.02, 0.35  # seconds
_LATE, _PACE = 5, 20  # tokens


class Tokens:
    """Unix times of all streams' tokens."""

    def __init__(self, times: Times) -> None:
        self._times = [[list(completion) for completion in stream if len(completion)] for stream in times]
        turns = [(a[-1], b[0]) for stream in self._times for a, b in pairwise(stream)]
        self._ends, self._begins = np.array(turns).reshape(-1, 2).T

    def comes(self, begin: float, end: float) -> bool:
        """Whether any token came in [begin, end]."""
        return any(bisect_left(t, begin) < bisect_right(t, end) for stream in self._times for t in stream)

    def gaps(self, begin: float, end: float) -> list[float]:
        """All streams' gaps that touch [begin, end], in milliseconds."""
        return [gap for stream in self._times for gap in self._of(stream, begin, end)]

    def longest(self, begin: float, end: float) -> list[float]:
        """Of each stream the longest gap that touches [begin, end], in milliseconds."""
        found = [self._of(stream, begin, end) for stream in self._times]
        return [max(of_stream) for of_stream in found if of_stream]

    def delays(self, at: float) -> list[float]:
        """Of each stream that goes on for long enough, in milliseconds; none where a prompt was computed meanwhile."""
        found = []
        for stream in self._times:
            for times in stream:
                first = bisect_right(times, at) - 1
                later = times[first : first + _LATE + _PACE + 1]
                if first < 0 or len(later) <= _LATE + _PACE or self._turns(later[0], later[_LATE]):
                    continue
                pace = float(np.median(np.diff(later[_LATE:])))
                found.append(1e3 * (later[_LATE] - later[0] - _LATE * pace))
        return found

    def _of(self, stream: list[list[float]], begin: float, end: float) -> list[float]:
        return [
            1e3 * (b - a)
            for times in stream
            for a, b in pairwise(times[max(0, bisect_left(times, begin) - 1) : bisect_right(times, end) + 1])
            if b >= begin and a <= end and not self._turns(a, b)
        ]

    def _turns(self, begin: float, end: float) -> bool:
        """Whether a stream was between two completions at some time in [begin, end]."""
        return bool(((self._ends < end) & (self._begins > begin)).any())


def summary(tokens: Tokens, rows: list[dict[str, Any]], audits: Sequence[Audit]) -> dict[str, Any]:
    """What the clients and the server saw, in milliseconds."""
    first = rows[0]["begin"]
    spans = [(row["commit_begin"], row["commit_end"] + AFTER) for row in rows]
    late = [row["end"] + CONTROL - row["commit_begin"] for row in rows]
    controls = [(begin + by, end + by) for (begin, end), by in zip(spans, late, strict=True)]
    at_commit, control = ([gap for span in each for gap in tokens.longest(*span)] for each in (spans, controls))
    audited = [gap for begin, end, *_ in audits for gap in sampled(tokens, begin, end)]
    between = [gap for *_, told, after in audits for gap in sampled(tokens, told + 0.05, after - 0.05)]
    staging = [tokens.gaps(row["begin"], row["commit_begin"]) for row in rows]
    return {
        "gap_without_versions_ms": spread(tokens.gaps(first - 3, first)),
        "gap_at_control_ms": spread(control),
        "gap_at_commit_ms": spread(at_commit),
        "gap_at_commit_over_control": ratios(at_commit, control),
        "delay_at_control_ms": spread([delay for begin, _ in controls for delay in tokens.delays(begin)]),
        "delay_at_commit_ms": spread([delay for begin, _ in spans for delay in tokens.delays(begin)]),
        "gap_while_audited_ms": spread(audited),
        "gap_between_audits_ms": spread(between),
        "gap_while_audited_over_between": ratios(audited, between),
        "audit_ms": spread([1e3 * (end - begin) for begin, end, *_ in audits]),
        "longest_gap_while_staging_ms": spread([max(gaps) for gaps in staging if gaps]),
        "commit_ms_first": round(rows[0]["commit_ms"], 3),
        "commit_ms": spread([row["commit_ms"] for row in rows]),
        "stage_ms": spread([1e3 * row["stage_seconds"] for row in rows]),
        "published_to_served_ms": spread([1e3 * (row["end"] - row["begin"]) for row in rows]),
    }


def keep(path: Path, rows: list[dict[str, Any]], audits: Sequence[Audit], times: Times) -> None:
    """Write what the summary is made of."""
    tokens = {f"{i}.{j}": np.array(some) for i, stream in enumerate(times) for j, some in enumerate(stream)}
    np.savez_compressed(path, rows=json.dumps(rows), audits=np.array(audits), **tokens)


def kept(path: Path) -> tuple[Tokens, list[dict[str, Any]], Sequence[Audit]]:
    """What ``keep`` wrote."""
    with np.load(path) as found:
        streams: dict[int, list[list[float]]] = {}
        for name in found.files:
            if "." in name:
                streams.setdefault(int(name.split(".")[0]), []).append(found[name].tolist())
        return Tokens(list(streams.values())), json.loads(str(found["rows"])), found["audits"].tolist()


def sampled(tokens: Tokens, begin: float, end: float) -> list[float]:
    """``longest`` all 20 ms from begin to end."""
    return [gap for at in np.arange(begin, end, 0.02) for gap in tokens.longest(at, at)]


def spread(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and largest, rounded."""
    median, p99 = np.percentile(values, [50, 99])
    return {"median": round(float(median), 3), "p99": round(float(p99), 3), "max": round(float(max(values)), 3)}


def ratios(some: list[float], others: list[float]) -> dict[str, float]:
    """Of the medians and of the 99th percentiles."""
    return {name: round(spread(some)[name] / spread(others)[name], 3) for name in ("median", "p99")}


if __name__ == "__main__":
    print(json.dumps(summary(*kept(Path(sys.argv[1])))))
