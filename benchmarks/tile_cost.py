"""What it costs in bytes that a reader can decode its part alone: the context codec over tensors cut into tiles.

Run: python benchmarks/tile_cost.py [--trace FILES] [--model 135M] [--density 0.006]

Bytes of a changed element with 1 x 1, 2 x 2, 4 x 4 and 8 x 8 tiles: of files that traces.py wrote, and of synthetic
weights of a model's shapes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from scaling import MODELS, TYPICAL, model
from traces import load
from whole_layouts import BF16, Step

from delta_sync import DeltaHeader
from delta_sync.context_codec import CONTEXT_CODEC
from delta_sync.context_file import Change, encode_against

PARTS = (1, 2, 4, 8)


def costs(step: Step) -> dict[int, float | None]:
    """Bytes of a changed element for each number of parts; None where a codec that needs no base takes fewer."""
    changes = [Change(c.name, BF16, c.shape, c.old, c.new) for c in step]
    changed = sum(int((c.old != c.new).sum()) for c in step)
    found: dict[int, float | None] = {}
    for parts in PARTS:
        header, data, _ = encode_against(DeltaHeader("benchmark", 2, 1, ""), changes, (parts, parts))
        found[parts] = round(len(data) / changed, 4) if header.codec == CONTEXT_CODEC else None
    return found


def steps(traces: list[Path], name: str, density: float) -> Iterator[tuple[str, Step]]:
    for path in traces:
        yield path.stem, load(path)[0]
    yield f"synthetic {name}, {density:.2%}", model(name, density)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, nargs="*", default=[])
    parser.add_argument("--model", choices=MODELS, default="135M")
    parser.add_argument("--density", type=float, default=TYPICAL)
    options = parser.parse_args()
    print(f"| step |{''.join(f' {parts} x {parts} |' for parts in PARTS)}\n|---{'|---' * len(PARTS)}|")
    rows = {}
    for name, step in steps(options.trace, options.model, options.density):
        rows[name] = costs(step)
        cells = (str(figure or "gap codec") for figure in rows[name].values())
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(json.dumps({"benchmark": "tile_cost", "bytes_per_changed": rows}))


if __name__ == "__main__":
    main()
