"""A run as rows: its versions and its replicas, kept up to date with few reads however long the run is."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

from delta_sync.ack import Ack
from delta_sync.cli.run import DAMAGE, newest_readable
from delta_sync.errors import ChainError, DeltaSyncError
from delta_sync.ledger import AnchorRef, Ledger
from delta_sync.manifest import Manifest, ObjectRef
from delta_sync.manifest_reader import ManifestReader
from delta_sync.store.keys import manifest_prefix

Row = dict[str, Any]
MOST_NEW = 1000  # a view that is further behind than this begins again at the newest version
TROUBLE = ("refused", "poisoned", "astray")


class RunView:
    """``versions`` (oldest first, at most ``last``) and ``replicas`` (by name) of a run, as of the last refresh.

    Rows hold only what JSON can. ``complete``: whether versions reach down to the run's start, to ``last`` or to
    ``chain_end``, which says why nothing older could be read. ``damaged_newest``: what is wrong with a newer version,
    so that these begin below it. Versions that are deleted while a view is open stay in it.
    """

    def __init__(self, ledger: Ledger, last: int | None = None, *, relist_seconds: float = 5.0) -> None:
        self.ledger, self._last, self._relist_seconds = ledger, last, relist_seconds
        self.versions: list[Row] = []
        self.replicas: list[Row] = []
        self.run: str | None = None
        self.chain_end: DeltaSyncError | None = None
        self.damaged_newest: DeltaSyncError | None = None
        self._oldest: Manifest | None = None  # whose parent is to be read next
        self._objects: dict[str, tuple[ObjectRef, ...]] = {}  # by sha256 of the manifest
        self._anchored: set[AnchorRef] = set()
        self._anchors: dict[AnchorRef, Row] = {}  # what is known of those that are whole
        self._folds: dict[AnchorRef, list[int]] = {}
        self._made_at: dict[int, float | None] = {}  # when older versions were made that a replica lacks
        self._listed = -math.inf

    def refresh(self, seconds: float = math.inf) -> None:
        """Read what is new, then older versions for at most ``seconds``.

        StoreError, and ChainError where no version is the newest; rows are then those of before, or newer ones. A row
        that changes is replaced, never altered, so that whoever kept it can tell.
        """
        deadline = time.monotonic() + seconds
        head, self.damaged_newest = newest_readable(self.ledger)
        if head is not None and not self._is_newest(head):
            self._take_new(head)
            self._listed = -math.inf
        if time.monotonic() - self._listed >= self._relist_seconds:
            self._list_attached()
        while self._oldest is not None and time.monotonic() < deadline:
            self._take_older(self._oldest)
        self._mark_attached()
        self.replicas = [self._replica(ack) for _, ack in sorted(self.ledger.acknowledgements().items())]

    @property
    def newest(self) -> Row | None:
        """The newest version's row, None before the first."""
        return self.versions[-1] if self.versions else None

    @property
    def complete(self) -> bool:
        """Whether all versions that this view is to hold have been read."""
        return self._oldest is None

    @property
    def damaged(self) -> bool:
        """Whether a manifest or an anchor's record is damaged; that old ones are gone is no damage."""
        ended = self.chain_end is not None and not isinstance(self.chain_end, ChainError)
        return ended or bool(self.damaged_newest) or any("error" in (row["anchor"] or {}) for row in self.versions)

    @property
    def troubled(self) -> bool:
        """Whether a replica refused a version or found its memory poisoned."""
        return any(row["state"] != "live" for row in self.replicas)

    def objects(self, row: Row) -> tuple[ObjectRef, ...]:
        """What a version's delta consists of."""
        return self._objects[row["manifest"]]

    def version(self, number: int) -> Row | None:
        """One version's row, None if this view does not hold it."""
        place = number - self.versions[0]["version"] if self.versions else -1
        return self.versions[place] if 0 <= place < len(self.versions) else None

    # --- versions

    def _take_new(self, head: Manifest) -> None:
        """Go down from the newest version to one that is known; versions of a branch left behind go away."""
        found, manifest = list[Manifest](), head
        while not self._knows(manifest):
            found.append(manifest)
            below = not self.versions or manifest.version <= self.versions[0]["version"]
            try:
                parent = None if below or len(found) > MOST_NEW else self.ledger.parent(manifest)
            except DAMAGE:
                parent = None  # _take_older meets it again, and keeps it
            if parent is None:
                self._begin(head)
                return
            manifest = parent
        del self.versions[manifest.version - self.versions[0]["version"] + 1 :]
        self.versions += [self._row(manifest) for manifest in reversed(found)]
        self._trim()

    def _begin(self, head: Manifest) -> None:
        self._objects.clear()
        self.run, self.versions, self._oldest, self.chain_end = head.run, [self._row(head)], head, None
        self._trim()

    def _take_older(self, oldest: Manifest) -> None:
        try:
            self._oldest = self.ledger.parent(oldest)
        except DAMAGE as error:
            self._oldest, self.chain_end = None, error
        if self._oldest is not None:
            self.versions.insert(0, self._row(self._oldest))
            self._trim()

    def _trim(self) -> None:
        if self._last is not None and len(self.versions) >= self._last:
            for row in self.versions[: -self._last]:
                self._objects.pop(row["manifest"], None)
            del self.versions[: -self._last]
            self._oldest = None

    def _is_newest(self, manifest: Manifest) -> bool:
        newest = self.newest
        return newest is not None and newest["manifest"] == manifest.sha256

    def _knows(self, manifest: Manifest) -> bool:
        row = self.version(manifest.version)
        return row is not None and row["manifest"] == manifest.sha256

    def _row(self, manifest: Manifest) -> Row:
        self._objects[manifest.sha256] = () if manifest.kind == "adapter" else manifest.objects  # those are no deltas
        return {
            "version": manifest.version,
            "epoch": manifest.epoch,
            "writer": manifest.writer,
            "kind": manifest.kind,
            "steps": list(manifest.steps),
            "created_at": manifest.created_at,
            "changed_elements": manifest.changed_elements,
            "total_elements": manifest.total_elements,
            "objects": len(manifest.objects),
            "bytes": sum(ref.size for ref in manifest.objects),
            "codec": manifest.codec,
            "manifest": manifest.sha256,
            "parent": manifest.parent,
            "signed_by": manifest.signature.key if manifest.signature else None,
            "metrics": dict(manifest.metrics),
            "anchor": None,
            "folds": [],  # the versions that folds to this one begin at
        }

    # --- anchors and folds

    def _list_attached(self) -> None:
        self._anchored = set(self.ledger.anchors())
        self._folds = {}
        for fold in self.ledger.folds():
            self._folds.setdefault(AnchorRef(fold.version, fold.epoch), []).append(fold.base_version)
        self._listed = time.monotonic()

    def _mark_attached(self) -> None:
        for at, row in enumerate(self.versions):
            place = AnchorRef(row["version"], row["epoch"])
            marks = {
                "anchor": self._anchor(place, row) if place in self._anchored else None,
                "folds": self._folds.get(place, []),
            }
            if any(row[name] != value for name, value in marks.items()):
                self.versions[at] = row | marks

    def _anchor(self, place: AnchorRef, row: Row) -> Row | None:
        if place in self._anchors:
            return self._anchors[place]
        try:
            record = self.ledger.anchor(self.ledger.manifest(place.version, row["manifest"]))
        except DAMAGE as error:
            return {"error": str(error)}
        if record is None:
            return None
        total = sum(ref.size for ref in record.objects)
        self._anchors[place] = {"files": len(record.objects), "bytes": total, "created_at": record.created_at}
        return self._anchors[place]

    # --- replicas

    def _replica(self, ack: Ack) -> Row:
        newest = self.newest
        lag = None if ack.version is None or newest is None else max(0, newest["version"] - ack.version)
        row: Row = {
            "replica": ack.replica,
            "state": ack.state,
            "version": ack.version,
            "epoch": ack.epoch,
            "lag": lag,
            # when the first version was made that it lacks
            "behind_since": self._made(ack.version + 1) if lag and ack.version is not None else None,
            "on_chain": self._on_chain(ack),
            "time": ack.time,
            "refused_version": ack.refused_version,
            "refused_object": ack.refused_object,
            "error_kind": ack.error_kind,
            "error": ack.error,
            "performance": dict(ack.performance),
        }
        return row | {"health": _health(row)}

    def _made(self, version: int) -> float | None:
        """When a version was made; one that this view does not hold is read, once, and None if it is gone."""
        if (row := self.version(version)) is not None:
            return float(row["created_at"])
        if version not in self._made_at:
            reader, found = ManifestReader(self.ledger.store, self.ledger.limits, self.ledger.keys), list[float]()
            for name in reader.names(manifest_prefix(version)):
                with contextlib.suppress(*DAMAGE):
                    found.append(reader.read(name).created_at)
            self._made_at[version] = min(found, default=None)
        return self._made_at[version]

    def _on_chain(self, ack: Ack) -> bool | None:
        """Whether a replica serves one of these versions; None where it serves none, or one that they do not reach."""
        newest = self.newest
        if ack.version is None or newest is None or ack.version < self.versions[0]["version"]:
            return None
        if ack.version > newest["version"] and (ack.epoch or 0) >= newest["epoch"]:
            return None  # made since this view looked
        row = self.version(ack.version)
        return row is not None and row["manifest"] == ack.manifest


def _health(row: Row) -> str:
    """One word for what somebody who looks after replicas should know first."""
    if row["state"] != "live":
        return str(row["state"])
    if row["on_chain"] is False:
        return "astray"
    if row["version"] is None:
        return "starting"
    return "behind" if row["lag"] else "current"
