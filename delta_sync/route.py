"""The cheapest way over deltas, and folds of several, from one version of a chain to a later one."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_sync.errors import FormatError, IntegrityError
from delta_sync.manifest import FoldRecord, Manifest
from delta_sync.plan import Step

if TYPE_CHECKING:
    from delta_sync.ledger import FoldRef, Ledger

log = logging.getLogger(__name__)


class Folds:
    """A run's folds: listed when first asked for, read one version at a time; with ``use`` false there are none."""

    def __init__(self, ledger: Ledger, *, use: bool) -> None:
        self._ledger = ledger
        self._refs: dict[tuple[int, int], list[FoldRef]] | None = None if use else {}

    def leading_to(self, manifest: Manifest) -> list[FoldRecord]:
        """Those that lead to a version; one that is damaged is as good as none, as nothing depends on it."""
        if self._refs is None:
            self._refs = defaultdict(list)
            for ref in self._ledger.folds():
                self._refs[ref.version, ref.epoch].append(ref)
        found = []
        for ref in self._refs.get((manifest.version, manifest.epoch), ()):
            try:
                record = self._ledger.fold(manifest, ref.base_version)
            except (FormatError, IntegrityError) as error:
                log.warning("left out the fold from version %d to %d: %s", ref.base_version, ref.version, error)
                continue
            if record is not None:
                found.append(record)
        return found


@dataclass(frozen=True)
class _Reached:
    cost: tuple[int, int]  # bytes, objects
    step: Step | None = None
    base: str = ""


def route(folds: Folds, start: str, walked: Sequence[Manifest]) -> list[Step] | None:
    """Steps from the version whose manifest has sha256 ``start`` to the last of ``walked``, None if there is no way.

    ``walked``: neighbours on one chain, oldest first, through which deltas lead. ``start`` is the first of them,
    or older: what lies between may be gone.
    """
    best = {start: _Reached((0, 0))}
    among = {manifest.sha256 for manifest in walked}
    ahead = [manifest for manifest in walked if manifest.sha256 != start]
    for manifest in ahead:
        steps: list[tuple[str, Step]] = []
        if manifest.parent and (manifest.kind != "origin" or manifest.parent in among):
            steps.append((manifest.parent, manifest))
        if len(ahead) > 1 or manifest.parent not in best:
            steps += ((record.base_manifest, record) for record in folds.leading_to(manifest))
        ways = [_Reached(_plus(best[base].cost, step), step, base) for base, step in steps if base in best]
        if ways:
            best[manifest.sha256] = min(ways, key=lambda way: way.cost)
    return _back(best, walked[-1].sha256)


def _plus(cost: tuple[int, int], step: Step) -> tuple[int, int]:
    passed = isinstance(step, Manifest) and step.kind == "adapter"  # of adapters only the target's is read
    objects = () if passed else step.objects
    return cost[0] + sum(ref.size for ref in objects), cost[1] + len(objects)


def _back(best: dict[str, _Reached], end: str) -> list[Step] | None:
    if end not in best:
        return None
    steps: list[Step] = []
    reached = best[end]
    while reached.step is not None:
        steps.append(reached.step)
        reached = best[reached.base]
    return steps[::-1]
