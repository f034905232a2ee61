"""The demo's report: one JSON file, and a picture per quantity."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Picture:
    column: str
    title: str
    unit: str
    scale: float = 1.0


PICTURES = (
    Picture("changed_percent", "Weights that changed per version", "% of all elements"),
    Picture("bytes", "Bytes published per version", "MB", 1e-6),
    Picture("fresh_ms", "From optimizer step to served weights", "s", 1e-3),
    Picture("token_gap_ms", "Longest pause of the open stream at a commit", "ms"),
    Picture("reward", "Mean reward per step", "reward"),
)


def write(folder: Path, facts: dict[str, Any], streams: Sequence[Sequence[float]]) -> Path:
    """Write report.json and the pictures; `facts["versions"]` has a row per version, `streams` token times per stream.

    Returns the path of report.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [_draw(folder, picture, facts["versions"]) for picture in PICTURES]
    drawn.append(_draw_timeline(folder, facts["commits"], streams))
    path = folder / "report.json"
    path.write_text(json.dumps({**facts, "pictures": drawn}, indent=2) + "\n")
    return path


def new_figure(title: str, x: str, y: str) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Any, folder: Path, name: str) -> str:
    from matplotlib import pyplot

    figure.savefig(folder / f"{name}.png", dpi=130)
    pyplot.close(figure)
    return f"{name}.png"


def _draw(folder: Path, picture: Picture, rows: Sequence[dict[str, Any]]) -> str:
    figure, axes = new_figure(picture.title, "version", picture.unit)
    points = [(row["version"], row[picture.column] * picture.scale) for row in rows if row[picture.column] is not None]
    axes.plot(*zip(*points, strict=True) if points else ([], []), marker="o", color="tab:blue")
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return save(figure, folder, picture.column)


def _draw_timeline(
    folder: Path,
    commits: Sequence[dict[str, Any]],
    streams: Sequence[Sequence[float]],
) -> str:
    """Token gaps over time, with a line at every commit: commits that paused the stream would stand under a peak."""
    start = min((times[0] for times in streams if times), default=0.0)
    figure, axes = new_figure("Pauses between tokens of the open stream", "seconds", "ms since the token before")
    for times in streams:
        gaps = [1000 * (b - a) for a, b in pairwise(times)]
        axes.plot([t - start for t in times[1:]], gaps, linewidth=0.7, color="tab:blue")
    for commit in commits:
        axes.axvline(commit["after"] - start, color="tab:orange", linewidth=1, alpha=0.8)
    axes.set_ylim(bottom=0)
    axes.plot([], [], color="tab:orange", label=f"{len(commits)} commits")
    axes.legend(loc="upper right", frameon=False)
    return save(figure, folder, "timeline")
