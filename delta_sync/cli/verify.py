"""``delta-sync verify``: a whole run, checked as suspiciously as any replica would, and all damage named at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from delta_sync.adapter import read_adapter
from delta_sync.anchor_files import AnchorShards, Tensor
from delta_sync.checkpoint import Checkpoint
from delta_sync.cli.report import FINE, PROBLEM, UNREACHABLE, AsJson, Report, Table, exit_code_of, finish, many, size
from delta_sync.cli.run import DAMAGE, Chain, PublicKey, checked_run, open_ledger, read_chain
from delta_sync.cli.weights import Deltas, Weights, as_version, no_version, read_delta
from delta_sync.errors import ChainError, DeltaSyncError, IntegrityError, SignatureError, StoreError
from delta_sync.ledger import AnchorRef, FoldRef, Ledger
from delta_sync.manifest import AnchorRecord, Manifest
from delta_sync.records import read_epoch
from delta_sync.store.keys import anchor_key, epoch_key, fold_key

PATIENCE = 120.0  # seconds of nothing but failures after which the store is not asked any more
SHOWN = 20  # things that could not be read; --json has all of them
_FAILED = (*DAMAGE, StoreError)
HEAL = "a running trainer puts it again once a replica refuses it; else start one on this run: it attaches an anchor"
NEW_ANCHOR = "attach a new anchor; until then late replicas start from an older one, if there is any"
NO_FOLD = "delete it: readers take the deltas instead; delta-sync compact makes it anew"
CLAIM = "restart the trainer: it claims a new epoch"
GONE = "restart the trainer on this URI: it begins a new chain, with an anchor where servers need one"


def verify(
    uri: Annotated[str, typer.Argument(metavar="URI", callback=checked_run, help="The run's folder or bucket.")],
    base: Annotated[
        Path | None,
        typer.Option(metavar="CKPT", help="Weights of a version, such as the model that the run began with."),
    ] = None,
    public_key: PublicKey = None,
    as_json: AsJson = False,
) -> None:
    """Check every manifest, object and anchor of a run, and prove versions by applying them.

    Versions are applied to an anchor's weights, and where there is none yet to CKPT's.
    With --public-key manifests, anchors and claims of epochs must be signed. Reads everything and holds one model and
    one file in memory. Exits with 1 if anything is damaged, else with 3 if something could not be read.
    """

    def report() -> Report:
        start = None if base is None else Checkpoint(base)
        return _report(Verification(open_ledger(uri, public_key, patience=PATIENCE), start))

    finish(as_json, report)


@dataclass(frozen=True)
class Damage:
    """What is wrong with one object, and what to do."""

    version: int
    object: str
    problem: str
    remedy: str


@dataclass
class Verification:
    """One walk over a run, oldest version first, that goes on after damage and what could not be read."""

    ledger: Ledger
    base: Checkpoint | None = None
    damage: list[Damage] = field(default_factory=list)
    unread: list[Damage] = field(default_factory=list)
    proven: list[int] = field(default_factory=list)
    folds: int = 0
    objects: int = 0
    bytes: int = 0
    weights: Weights | None = None
    _base_digest: str = ""

    def run(self) -> Chain:
        """Check all that the newest version's chain names; ChainError if no version of it has the base's weights."""
        chain = read_chain(self.ledger)
        if self.base is not None:
            found = as_version(self.base, chain.versions)
            if found is None:
                raise no_version(self.base, "of this run")
            self.base, first = found
            self._base_digest = next(m.state_digest for m in chain.versions if m.version == first.version)
        anchored = set(self.ledger.anchors())
        oldest, newest = chain.versions[0], chain.versions[-1]
        if chain.start is not None:
            self._note(newest.version, "newest manifest or HEAD.json", chain.start, HEAL)
        if chain.end is not None and (chain.ends_in_damage or not self._reachable(chain, anchored)):
            self._note(oldest.version - 1, f"manifest of version {oldest.version - 1}", chain.end, GONE)
        folds = self.ledger.folds()
        for manifest in chain.versions:
            self._check(manifest, AnchorRef(manifest.version, manifest.epoch) in anchored)
            for ref in folds:
                if (ref.version, ref.epoch) == (manifest.version, manifest.epoch):
                    self._fold(manifest, ref)
        for epoch in sorted({manifest.epoch for manifest in chain.versions}):
            self._claim(epoch, next(m.version for m in chain.versions if m.epoch == epoch))
        return chain

    def _claim(self, epoch: int, version: int) -> None:
        try:
            read_epoch(self.ledger.store, epoch, self.ledger.keys)
        except _FAILED as error:
            self._note(version, epoch_key(epoch), error, CLAIM)

    def _reachable(self, chain: Chain, anchored: set[AnchorRef]) -> bool:
        """Whether what is left of a chain is of use: it begins with an origin, or has an anchor."""
        starts = (AnchorRef(manifest.version, manifest.epoch) in anchored for manifest in chain.versions)
        return chain.versions[0].kind == "origin" or any(starts)

    def _check(self, manifest: Manifest, anchored: bool) -> None:
        if manifest.kind == "adapter":
            self._adapter(manifest)
            self._advance(manifest, [])
        else:
            self._advance(manifest, [self._object(manifest, number) for number in range(len(manifest.objects))])
        if self.base is not None and self.weights is None and manifest.state_digest == self._base_digest:
            self.weights = Weights(self.base)
        if anchored:
            self._anchor(manifest)
        if self.weights is not None:
            self.proven.append(manifest.version)

    def _object(self, manifest: Manifest, number: int) -> Deltas | None:
        ref = manifest.objects[number]
        self.objects += 1
        try:
            *_, deltas = read_delta(self.ledger, manifest, ref, self.weights)
        except ChainError:  # its hash is right; what it decodes to depends on weights that are not known here
            self.bytes += ref.size
            return None
        except _FAILED as error:
            self._note(manifest.version, ref.key, error, HEAL)
            return None
        self.bytes += ref.size
        return deltas

    def _adapter(self, manifest: Manifest) -> None:
        """An adapter is whole: its object proves its tensors, and the weights below it prove themselves."""
        [ref] = manifest.objects
        self.objects += 1
        try:
            read_adapter(self.ledger, manifest)
        except _FAILED as error:
            self._note(manifest.version, ref.key, error, HEAL)
        else:
            self.bytes += ref.size

    def _advance(self, manifest: Manifest, objects: list[Deltas | None]) -> None:
        """Move the weights on; they are lost, until an anchor, behind damage and at an origin of other bits."""
        good = [deltas for deltas in objects if deltas is not None]
        weights, self.weights = self.weights, None
        if weights is None or len(good) != len(objects):
            return
        try:
            weights.advance(manifest, good)
        except DAMAGE as error:
            if manifest.kind != "origin":
                remedy = "its content is not what was published: attach an anchor to a later version"
                self._note(manifest.version, manifest.key, error, remedy)
            return
        self.weights = weights

    def _fold(self, manifest: Manifest, ref: FoldRef) -> None:
        """A fold's record and objects, and its tensors' states where the weights are known; readers prove the rest."""
        key = fold_key(ref.version, ref.epoch, ref.base_version)
        try:
            record = self.ledger.fold(manifest, ref.base_version)
            if record is None:  # removed since it was listed
                return
            self.folds += 1
            known = {} if self.weights is None else self.weights.states
            wrong = [name for name, state in record.tensors.items() if known.get(name, state) != state]
            if wrong:
                raise IntegrityError(key, expected="tensors with the version's digests", got=f"others: {wrong[:3]}")
        except _FAILED as error:
            self._note(manifest.version, key, error, NO_FOLD)
            return
        for obj in record.objects:
            self.objects += 1
            try:
                read_delta(self.ledger, record, obj)
            except _FAILED as error:
                self._note(manifest.version, obj.key, error, NO_FOLD)
            else:
                self.bytes += obj.size

    def _anchor(self, manifest: Manifest) -> None:
        key = anchor_key(manifest.version, manifest.epoch)
        try:
            record = self.ledger.anchor(manifest)
        except _FAILED as error:
            self._note(manifest.version, key, error, NEW_ANCHOR)
            return
        if record is None:  # removed since it was listed
            return
        weights = Weights(self._anchor_tensors(manifest, record), keep=self.weights is None)
        missing = sorted(record.tensors.keys() - weights.states.keys())
        wrong = [name for name, state in weights.states.items() if record.tensors.get(name) != state]
        folder = key.removesuffix("anchor.json")
        whole = not any(found.object.startswith(folder) for found in (*self.damage, *self.unread))
        try:
            if missing and whole:
                raise IntegrityError(key, expected=f"tensors {missing[:3]}", got="shards without them")
            if wrong:
                raise IntegrityError(key, expected="tensors with the record's digests", got=f"others: {wrong[:3]}")
            if whole:
                weights.prove(manifest)
        except IntegrityError as error:
            self._note(manifest.version, key, error, NEW_ANCHOR)
            return
        if whole and self.weights is None:
            self.weights = weights

    def _anchor_tensors(self, manifest: Manifest, record: AnchorRecord) -> Iterator[Tensor]:
        """The tensors of every file that is as recorded, one file in memory at a time; the other files are noted."""
        shards = AnchorShards(self.ledger, record)
        for ref in sorted(record.objects, key=lambda ref: ref in shards.refs):  # the index before what it is about
            self.objects += 1
            try:
                if ref in shards.refs:
                    yield from shards.tensors(ref)
                elif ref == shards.index:
                    shards.read_index()
                else:
                    self.ledger.read_object(ref)
            except _FAILED as error:
                self._note(manifest.version, ref.key, error, NEW_ANCHOR)
            else:
                self.bytes += ref.size

    def _note(self, version: int, key: str, error: DeltaSyncError, remedy: str) -> None:
        what = re.sub(rf" (of object|object|of|in) {re.escape(key)}", "", error.what)  # the key is beside it
        problem = str(type(error)(what, expected=error.expected, got=error.got))  # and our remedy knows more,
        if isinstance(error, SignatureError) and remedy != NO_FOLD:  # but not of keys
            remedy = error.remedy
        if exit_code_of(error) == UNREACHABLE:
            self.unread.append(Damage(version, key, problem, error.remedy or "see what delta-sync doctor says"))
        else:
            self.damage.append(Damage(version, key, problem, remedy))


def _report(verification: Verification) -> Report:
    chain = verification.run()
    first, newest = chain.versions[0].version, chain.versions[-1]
    count, proven = len(chain.versions), len(verification.proven)
    document: dict[str, object] = {
        "uri": verification.ledger.store.uri,
        "run": newest.run,
        "oldest": first,
        "newest": newest.version,
        "chain_end": str(chain.end) if chain.end else None,
        "versions": count,
        "objects": verification.objects,
        "folds": verification.folds,
        "bytes": verification.bytes,
        "proven": verification.proven,
        "proven_from": verification.proven[0] if proven else None,
        "signed_by": list(verification.ledger.keys.ids) if verification.ledger.keys else None,
        "damage": [vars(damage) for damage in verification.damage],
        "unread": [vars(unread) for unread in verification.unread],
    }
    parts: list[Table | str] = [
        f"run {newest.run} at {verification.ledger.store.uri}: versions {first} to {newest.version}",
        f"{many(count, 'manifest')} and {many(verification.objects, 'object')} read, "
        f"{size(verification.bytes)} as promised",
        f"{proven} of {many(count, 'version')} proven by applying deltas to {_starts(verification)} weights"
        + (f", from version {verification.proven[0]} on" if proven else ""),
    ]
    if chain.end is not None and not chain.ends_in_damage:
        parts.append(f"what was before version {first} is gone")
    if verification.ledger.keys is not None:
        parts.append(f"signatures checked against {', '.join(verification.ledger.keys.ids)}")
    if proven < count:
        parts.append(f"{_why_unproven(verification)}: only their hashes were checked")
    code = PROBLEM if verification.damage else UNREACHABLE if verification.unread else FINE
    return Report(document, [*parts, *_found(verification)], code)


def _why_unproven(verification: Verification) -> str:
    """Of the versions that were not proven; a young run has no anchor yet, and nothing is wrong with it."""
    if verification.damage or verification.unread:
        return "the others have damage below them, or no anchor"
    return "the others have no anchor (complete weights) below them, which --base CKPT can stand in for"


def _starts(verification: Verification) -> str:
    return "an anchor's" if verification.base is None else f"an anchor's or {verification.base.path}'s"


def _found(verification: Verification) -> list[Table | str]:
    """What is wrong, as tables."""
    parts: list[Table | str] = []
    for title, found, most in (
        ("damage", verification.damage, len(verification.damage)),
        ("could not be read", verification.unread, SHOWN),
    ):
        rows = [[each.version, each.object, each.problem, each.remedy] for each in found[:most]]
        if rows:
            parts.append(Table(title, (">version", "object", "problem", "what to do"), rows))
        if len(found) > most:
            parts.append(f"and {len(found) - most:,} more: --json names all")
    return parts or ["no damage found"]
