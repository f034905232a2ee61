"""The reward of a training run over its steps, as a picture; also while it is still running.

python -m examples.wordle.plot runs/wordle       # reads metrics.jsonl, writes reward.png beside it
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from examples.wordle.report import new_figure, save

WINDOW = 20  # steps; single ones are a handful of games, and jump


def read_rewards(metrics: Path) -> tuple[list[int], list[float]]:
    """Steps and mean rewards of a metrics.jsonl; a last line that is still being written is left out."""
    lines = metrics.read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    points = [(row["step"], row["reward"]) for row in rows if "reward" in row]
    return [step for step, _ in points], [reward for _, reward in points]


def smooth(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Each value's mean with up to ``window`` - 1 before it."""
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def draw(folder: Path) -> Path:
    """Write reward.png of the run in ``folder``."""
    steps, rewards = read_rewards(folder / "metrics.jsonl")
    figure, axes = new_figure("Mean reward per step", "optimizer step", "reward")
    axes.plot(steps, rewards, linewidth=0.7, alpha=0.5, color="tab:blue", label="a step")
    axes.plot(steps, smooth(rewards), linewidth=2, color="tab:orange", label=f"mean of {WINDOW}")
    axes.legend(loc="lower right", frameon=False)
    return folder / save(figure, folder, "reward")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the trainer's --output")
    folder = parser.parse_args().run
    if not (folder / "metrics.jsonl").is_file():
        raise SystemExit(f"{folder}: expected metrics.jsonl of a run, got none. Remedy: the trainer's --output")
    print(draw(folder))


if __name__ == "__main__":
    main()
