"""Where a model changes: counts of changed elements by layer, read from the heads of delta objects alone."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from delta_sync.cli.run import DAMAGE
from delta_sync.cli.view import Row
from delta_sync.container import parse_json
from delta_sync.delta_header import Entry, from_metadata
from delta_sync.errors import FormatError, StoreError
from delta_sync.limits import Limits
from delta_sync.manifest import ObjectRef
from delta_sync.store.base import Store

COLUMNS = 96  # versions that one map shows at most
ROWS = 160  # layers that one map shows at most
_FIRST_READ = 64 * 1024  # holds the whole head of most objects
_NUMBERED = re.compile(r"(.*?)\.([0-9]+)(?:\.(.*))?")


class HeatMap:
    """Reads heads of delta objects, each once, and keeps changed counts by layer and by kind of tensor.

    Heads are not checked against the objects' hashes, which cover more than is read: they are for looking at.
    """

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store, self._limits = store, limits
        self._changed: dict[str, Counter[str] | None] = {}  # by manifest: tensor -> changed; None if unreadable
        self._elements: dict[str, int] = {}  # of every tensor that ever changed

    def fill(self, rows: Sequence[tuple[Row, Sequence[ObjectRef]]], seconds: float) -> tuple[bool, bool]:
        """Read what is missing of these versions for at most ``seconds``: whether any was read, and is missing."""
        deadline, read = time.monotonic() + seconds, False
        for row, refs in rows:
            if row["manifest"] in self._changed:
                continue
            if read and time.monotonic() >= deadline:
                return True, True
            try:
                self._changed[row["manifest"]] = self._count(refs)
            except DAMAGE:
                self._changed[row["manifest"]] = None
            except StoreError:
                return read, False  # try at the next look
            read = True
        return read, False

    def forget_but(self, manifests: Iterable[str]) -> None:
        """Keep counts of these versions only."""
        wanted = set(manifests)
        self._changed = {manifest: found for manifest, found in self._changed.items() if manifest in wanted}

    def matrix(self, rows: Sequence[Row], by: str) -> dict[str, Any]:
        """Share of elements changed for each layer (or kind of tensor) and version; None where it is not known."""
        group = layer_of if by == "layer" else kind_of
        elements: Counter[str] = Counter()
        for tensor, count in list(self._elements.items()):
            elements[group(tensor)] += count
        names = sorted(elements, key=_natural)
        columns = [self._column(row, group) for row in rows]
        shares = [
            [None if column is None else _round(column[name] / max(1, elements[name])) for column in columns]
            for name in names[:ROWS]
        ]
        return {"names": names[:ROWS], "left_out": max(0, len(names) - ROWS), "share": shares}

    def _column(self, row: Row, group: Any) -> Counter[str] | None:
        counts = self._changed.get(row["manifest"])
        if counts is None or row["kind"] == "origin":
            return None
        found: Counter[str] = Counter()
        for tensor, count in counts.items():
            found[group(tensor)] += count
        return found

    def _count(self, refs: Sequence[ObjectRef]) -> Counter[str]:
        changed: Counter[str] = Counter()
        for ref in refs:
            for entry in read_head(self._store, ref, self._limits):
                changed[entry.name] += entry.count
                self._elements[entry.name] = math.prod(entry.shape)
        return changed


def sample(versions: Sequence[Row]) -> list[Row]:
    """At most COLUMNS + 1 of these versions: every 2^k-th, which stay as the run grows, and the newest."""
    step = stride(len(versions), COLUMNS)
    chosen = [row for row in versions if row["version"] % step == 0]
    return chosen if not versions or chosen[-1:] == [versions[-1]] else [*chosen, versions[-1]]


def stride(count: int, most: int) -> int:
    """The smallest power of 2 by which ``count`` things make at most ``most`` groups."""
    step = 1
    while count > step * most:
        step *= 2
    return step


def read_head(store: Store, ref: ObjectRef, limits: Limits) -> list[Entry]:
    """The tensors that a delta object lists; two small reads at most. FormatError, IntegrityError, NotFoundError."""
    start = store.read_range(ref.key, 0, min(ref.size, _FIRST_READ))
    length, room = int.from_bytes(start[:8], "little"), min(limits.header_bytes, ref.size - 8)
    if len(start) < 8 or length > room:
        raise FormatError(f"head of {ref.key}", expected=f"8 bytes and at most {room} more", got=length)
    text = start[8 : 8 + length]
    if len(text) < length:
        text += store.read_range(ref.key, len(start), length - len(text))
    head = parse_json(text, f"head of {ref.key}")
    metadata = head.get("__metadata__") if isinstance(head, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"head of {ref.key}", expected="__metadata__ of strings", got=type(metadata).__name__)
    _, groups = from_metadata(metadata, limits)
    return [entry for group in groups for entry in group.entries]


def layer_of(tensor: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` -> ``layers.3``; a tensor outside any layer is its own."""
    found = _NUMBERED.fullmatch(tensor)
    name = f"{found[1]}.{found[2]}" if found else tensor.removesuffix(".weight")
    return name.removeprefix("model.")


def kind_of(tensor: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` -> ``mlp.up_proj``; further numbers, as of experts, become ``*``."""
    found = _NUMBERED.fullmatch(tensor)
    name = found[3] if found and found[3] else tensor.removeprefix("model.")
    return re.sub(r"(?<=\.)[0-9]+(?=\.|$)", "*", name).removesuffix(".weight")


def _natural(name: str) -> list[tuple[int, str]]:
    """Numbers by size, that is by length and then digits, before texts."""
    parts = (part.lstrip("0") if part[0] in "0123456789" else part for part in re.split(r"([0-9]+)", name) if part)
    return [(len(part), part) if not part or part[0] in "0123456789" else (1 << 32, part) for part in parts]


def _round(share: float) -> float:
    return float(f"{share:.3g}")
