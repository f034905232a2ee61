"""What real runs change a step, and what that costs in each layout: GRPO and SFT over rates, masters and decay.

Usage: python benchmarks/gpu/trace_matrix.py --device cuda --out /tmp/matrix [--pieces FOLDER] [--seconds 440]
       python benchmarks/gpu/trace_matrix.py --table benchmarks/traces.csv [--steps 20 199] [--columns ours "of TRL"]

TRL's own trainers on SmolLM2-135M, several runs beside each other on one card. A run that takes too long is cut, and
said to be. Writes rows.csv, table.md, rows.jsonl (the same while it goes on) and fixtures.tar (first rows of a few
tensors, as in tests/traces). ``--pieces`` is a folder with the weights' GGUF file as ``split`` cut it, by default the
installed package's is taken. Without a card: --device cpu --run-steps 2 --keep 0 1 --only sft,3e-06 --workers 1.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import multiprocessing
import os
import shutil
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from codec_speed import check, entropy  # noqa: E402
from traces import cut, file_name, save  # noqa: E402
from whole_layouts import GapValue16  # noqa: E402

from delta_sync import DeltaHeader  # noqa: E402
from delta_sync.context_file import encode_against  # noqa: E402
from delta_sync.peer_layouts import (  # noqa: E402
    Gap,
    GapValue,
    GapXor,
    IndexValue,
    WholeXor,
    changed_elements,
)

if TYPE_CHECKING:
    from real_deltas import Change, Recipe

QUIET = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
RATES = (1e-6, 3e-6, 1e-5)
DECAY = 0.1
GRPO = {"batch": 16, "group": 8, "tokens": 24}
SFT = {"batch": 16, "length": 128}
LAYOUTS = {
    "gap": Gap(),
    "trl": IndexValue(),
    "trl_gap": GapValue16(),
    "grail": GapValue(),
    "nemo_rl": GapXor(),
    "xor_zstd": WholeXor(),
}
TILES = (2, 4, 8)  # parts along rows and along columns
COLUMNS = {
    "changed %": "changed_percent",
    "ours": "ours",
    "bound": "bound",
    "over bound": "over_bound",
    "of TRL": "of_trl",
    "of NeMo-RL": "of_nemo_rl",
    "our gap codec": "gap",
    "TRL": "trl",
    "NeMo-RL": "nemo_rl",
    "XOR-zstd": "xor_zstd",
    **{f"ours, {parts} x {parts} tiles": f"tiles_{parts}" for parts in TILES},
}
ROWS, ENOUGH, LAST = 32, 15, 12  # of a fixture's tensors; seconds without which no run starts, and for its last step


def recipes(only: Sequence[str]) -> list[Recipe]:
    """The matrix, slow runs first: of those named, the ones with every part of one of ``only``."""
    from real_deltas import Recipe

    grpo = [Recipe(lr, 0.0, "grpo") for lr in RATES]
    grpo += [Recipe(3e-6, 0.0, "grpo", "bfloat16"), Recipe(3e-6, DECAY, "grpo")]
    kinds = [("float32", 0.0), ("bfloat16", 0.0), ("float32", DECAY), ("bfloat16", DECAY)]
    sft = [Recipe(lr, decay, "sft", masters) for masters, decay in kinds for lr in RATES]
    return [r for r in grpo + sft if not only or any(all(p in title(r) for p in o.split(",")) for o in only)]


def title(recipe: Recipe) -> str:
    """A run's name in tables."""
    decay = f" decay {recipe.weight_decay:g}" if recipe.weight_decay else ""
    return f"{recipe.objective} lr {recipe.lr:g} {recipe.masters}{decay}"


def measure(step: Sequence[Change]) -> dict[str, Any]:
    """Share of changed elements and bytes of each, in all layouts with their headers, and the conditional entropy."""
    elements = sum(c.old.size for c in step)
    changes = [changed_elements(c.name, c.shape, c.old, c.new) for c in step]
    changes = [c for c in changes if c.positions.size]
    changed = sum(c.positions.size for c in changes)
    row: dict[str, Any] = {"changed": changed, "changed_percent": round(100 * changed / elements, 5)}
    if not changed:
        return row
    touched = [c for c in step if (c.old != c.new).any()]
    header, data, _ = encode_against(DeltaHeader("benchmark", 2, 1, ""), [c.whole for c in changes])
    check(data, touched)
    sizes = {"ours": len(data)}
    for parts in TILES:
        tiled = encode_against(header, [c.whole for c in changes], (parts, parts))[1]
        sizes[f"tiles_{parts}"] = len(tiled)
    sizes |= {name: len(layout.encode(changes)) for name, layout in LAYOUTS.items()}
    figures = {name: size / changed for name, size in sizes.items()}
    figures["bound"] = entropy(touched)["given_old_exponent"]
    for name, other in (("over_bound", "bound"), ("of_trl", "trl"), ("of_nemo_rl", "nemo_rl")):
        figures[name] = figures["ours"] / figures[other]
    return row | {"codec": header.codec} | {name: round(figure, 4) for name, figure in figures.items()}


def work(jobs: Any, options: argparse.Namespace, end: float) -> None:
    """Run recipe after recipe until none is left or the time is over."""
    with (options.out / "stderr.txt").open("a") as quiet:
        os.dup2(quiet.fileno(), 2)
    import torch

    torch.set_num_threads(options.threads)
    while recipe := jobs.get():
        try:
            one(recipe, options, end)
        except Exception:  # noqa: BLE001 - the other runs go on
            print(f"[{title(recipe)}] failed:\n{traceback.format_exc()[-2000:]}", flush=True)


def one(recipe: Recipe, options: argparse.Namespace, end: float) -> None:
    """One run; each kept step's row is appended to rows.jsonl as soon as it is there."""
    import real_runs

    limit = options.grpo_seconds if recipe.objective == "grpo" else options.sft_seconds
    seconds = min(limit, end - time.monotonic() - LAST)
    if seconds < ENOUGH:
        print(f"[{title(recipe)}] not begun: no time left", flush=True)
        return
    sizes = (GRPO if recipe.objective == "grpo" else SFT) | (options.sizes or {})
    setup = real_runs.Setup(options.device, **sizes, text=options.text, gguf=options.gguf, seconds=seconds)
    made = {**dataclasses.asdict(recipe), "compute": real_runs.compute_type(recipe, setup)}
    began = time.monotonic()

    def keep(index: int, step: list[Change]) -> None:
        at = time.monotonic() - began
        row = {**made, "step": index, **measure(step)}
        with (options.out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        if index in options.fixtures:
            more = {"model": "SmolLM2-135M", **sizes, "text": options.text, "rows": ROWS}
            path = options.cuts / file_name(recipe, index)
            save(path, cut(step, ROWS), {**more, **row}, options.cuts / "start.npz")
        said = ", ".join(f"{key} {row.get(key)}" for key in ("changed_percent", "ours", "bound"))
        print(f"[{title(recipe)}] step {index} after {at:.0f} s: {said}", flush=True)

    done = real_runs.run(recipe, options.run_steps, keep, setup, options.keep)
    cut_ = "" if done == options.run_steps else f", CUT: {options.run_steps} were wanted"
    print(f"[{title(recipe)}] {done} steps in {time.monotonic() - began:.0f} s{cut_}", flush=True)


def run_all(options: argparse.Namespace) -> None:
    """All runs, so many beside each other, none beyond ``options.seconds``."""
    end = time.monotonic() + options.seconds
    todo = recipes(options.only)
    context = multiprocessing.get_context("spawn")
    jobs = context.Queue()
    for job in [*todo, *[None] * options.workers]:
        jobs.put(job)
    workers = [context.Process(target=work, args=(jobs, options, end), daemon=True) for _ in range(options.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0.0, end - time.monotonic()))
        if worker.is_alive():
            print("a worker was stopped: out of time", flush=True)
            worker.kill()
    lines = (options.out / "rows.jsonl").read_text().splitlines()
    order = {title(recipe): k for k, recipe in enumerate(todo)}
    rows = sorted(map(json.loads, lines), key=lambda row: (order[_title_of(row)], row["step"]))
    fields = dict.fromkeys(key for row in rows for key in row)
    with (options.out / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)
    with tarfile.open(options.out / "fixtures.tar", "w") as tar:
        tar.add(options.cuts, "traces")
    text = table(options.out / "rows.csv")
    (options.out / "table.md").write_text(text)
    print(text)


def _title_of(row: dict[str, Any]) -> str:
    from real_deltas import Recipe

    return title(Recipe(float(row["lr"]), float(row["weight_decay"]), row["objective"], row["masters"]))


def table(path: Path, steps: Sequence[int] = (), columns: Sequence[str] = tuple(COLUMNS)) -> str:
    """rows.csv as a table in Markdown, of all or some steps and columns; bytes are those of a changed element."""
    head = ("run", "step", *columns)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if not steps or int(row["step"]) in steps:
                found = [row.get(COLUMNS[column]) for column in columns]
                cells = [f"{float(figure):.3f}" if figure else "" for figure in found]
                lines.append(f"| {' | '.join([_title_of(row), row['step'], *cells])} |")
    return "\n".join(lines) + "\n"


def join(folder: Path, into: Path) -> Path:
    """The GGUF file whose pieces ``split`` left in a folder."""
    pieces = sorted(folder.glob("*.gguf.*"))
    path = into / "smollm2.gguf"
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece.read_bytes())
    print(f"weights: {len(pieces)} pieces, {path.stat().st_size} bytes", flush=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pieces", type=Path)
    parser.add_argument("--seconds", type=float, default=440, help="for everything")
    parser.add_argument("--grpo-seconds", type=float, default=400, help="for one GRPO run")
    parser.add_argument("--sft-seconds", type=float, default=150, help="for one SFT run")
    parser.add_argument("--run-steps", type=int, default=200)
    parser.add_argument("--keep", type=int, nargs="+", default=[1, 5, 20, 59, 100, 199], help="steps, from 0")
    parser.add_argument("--fixtures", type=int, nargs="*", default=[20, 199], help="steps whose first rows are kept")
    parser.add_argument("--workers", type=int, default=10, help="runs beside each other")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each run")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of runs, as 'grpo,3e-06,float32'")
    parser.add_argument("--text", choices=("license", "python"), default="python")
    parser.add_argument("--sizes", type=json.loads, help='of batches, as \'{"batch": 4, "group": 4}\'')
    parser.add_argument("--table", type=Path, help="print an earlier run's table")
    parser.add_argument("--steps", type=int, nargs="*", default=[], help="of --table")
    parser.add_argument("--columns", nargs="*", default=list(COLUMNS), choices=COLUMNS, help="of --table")
    options = parser.parse_args()
    if options.table:
        print(table(options.table, options.steps, options.columns))
        return
    if not options.out:
        parser.error("--out is needed")
    os.environ |= QUIET | {"DELTA_SYNC_THREADS": "1"}  # for the workers too, which import what heeds them
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "rows.jsonl").write_text("")
    with tempfile.TemporaryDirectory() as home:
        options.gguf = join(options.pieces, Path(home)) if options.pieces else None
        options.cuts = Path(home) / "traces"
        options.cuts.mkdir()
        shutil.copy(ROOT / "tests" / "traces" / "start.npz", options.cuts)
        run_all(options)


if __name__ == "__main__":
    main()
