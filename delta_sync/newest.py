"""Which version is the newest: from one listing, or by walking forward from one that is known."""

from __future__ import annotations

import math
from concurrent.futures import Future

from delta_sync.errors import ChainError
from delta_sync.manifest import Manifest
from delta_sync.manifest_reader import ManifestReader
from delta_sync.records import Head, read_epoch
from delta_sync.store.keys import MANIFESTS, ManifestName, manifest_key


def next_of(reader: ManifestReader, manifest: Manifest) -> Manifest | None:
    """The version after a manifest's, in its epoch."""
    return reader.at(manifest_key(manifest.version + 1, manifest.epoch, manifest.writer))


def walk_forward(
    reader: ManifestReader,
    seen: Manifest,
    hint: Head | None,
    following: Future[Manifest | None] | None = None,
    *,
    to_the_end: bool = True,
) -> Manifest | None:
    """Follow one epoch's versions from ``seen``; a hint within that epoch saves probing one by one.

    ``following``: what comes after ``seen``, where that was asked for already. ``to_the_end``: look for one more after
    each that is found, a round trip. None if a version does not continue the one before: then one of the two was
    damaged when it was read.
    """
    newest = seen
    if hint and hint.version > seen.version and _branch(hint) == _branch(seen):
        newest = reader.at(hint.key, hint.manifest) or seen
        if newest is not seen and not to_the_end:
            return newest
    after = following.result() if following is not None and newest is seen else next_of(reader, newest)
    while after is not None:
        if after.parent != newest.sha256:
            return None
        newest, after = after, next_of(reader, after) if to_the_end else None
    return newest


def newest_listed(reader: ManifestReader, below: float = math.inf) -> Manifest | None:
    """The highest version (under ``below``) of the highest epoch whose first manifest continues the run, if any."""
    names = [name for name in reader.names(MANIFESTS) if name.version < below]
    passed: list[ManifestName] = []
    for epoch in sorted({name.epoch for name in names}, reverse=True):
        branch = _of_claimant(reader, [name for name in names if name.epoch == epoch])
        if _is_attached(reader, branch[0], names):
            if lost := [name.key for name in passed if name.version > branch[-1].version]:
                raise _detached(lost)
            return reader.read(branch[-1])
        passed.append(branch[-1])
    if passed:
        raise _detached([name.key for name in passed])
    return None


def _branch(place: Manifest | Head) -> tuple[str, int, str]:
    return place.run, place.epoch, place.writer


def _of_claimant(reader: ManifestReader, branch: list[ManifestName]) -> list[ManifestName]:
    """The manifests of the one writer that holds their epoch; a store without create-only writes may have more."""
    writers = sorted({name.writer for name in branch})
    if len(writers) == 1:
        return branch
    epoch = branch[0].epoch
    holder = read_epoch(reader.store, epoch, reader.keys).writer
    if holder not in writers:
        raise ChainError(
            f"epoch {epoch}", expected=f"manifests of {holder}, who claimed it", got=f"those of {writers}",
            remedy="stop all publishers but one and start that one again: it takes a new epoch",
        )  # fmt: skip
    return [name for name in branch if name.writer == holder]


def _is_attached(reader: ManifestReader, first: ManifestName, names: list[ManifestName]) -> bool:
    """Whether an epoch's first manifest continues one that the store has, or whose version was pruned."""
    below = [name for name in names if name.version == first.version - 1 and name.epoch < first.epoch]
    if not below:
        return True
    parent = reader.read(first).parent
    return any(reader.hash(name) == parent for name in below)


def _detached(keys: list[str]) -> ChainError:
    return ChainError(
        f"manifests {keys}", expected="parents that the store has", got="parents that it does not have",
        remedy="look for a second publisher, or restore the missing manifests, or start the trainer again: "
        "it takes a new epoch and attaches an anchor",
    )  # fmt: skip
