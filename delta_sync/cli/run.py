"""From what the user typed to a run: its ledger, one of its versions, its whole chain."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from delta_sync.cli.timed_store import TimedStore
from delta_sync.errors import ChainError, DeltaSyncError, FormatError, IntegrityError, NotFoundError, StoreError
from delta_sync.ledger import Ledger
from delta_sync.manifest import Manifest
from delta_sync.manifest_reader import ManifestReader
from delta_sync.signing import load_public_keys
from delta_sync.store.keys import MANIFESTS
from delta_sync.store.open import check_uri, open_ack_store

PublicKey = Annotated[
    list[str] | None,
    typer.Option(
        "--public-key",
        metavar="KEY",
        help="Accept only what this key signed: ed25519:… or a file with it. May be given several times.",
    ),
]
DAMAGE = (ChainError, FormatError, IntegrityError, NotFoundError)
_AT_VERSION = re.compile(r"(.+)@([0-9]{1,12})", re.DOTALL)


def split_version(text: str) -> tuple[str, int | None]:
    """``URI@VERSION`` as both, ``URI`` alone with None; a folder that is named so is written with a slash behind it."""
    found = _AT_VERSION.fullmatch(text)
    return (found[1], int(found[2])) if found else (text, None)


def checked_uri(uri: str) -> str:
    """The URI; a misspelt one, or one that needs an extra, is wrong usage."""
    try:
        check_uri(uri)
    except StoreError as error:
        raise typer.BadParameter(str(error)) from None
    return uri


def checked_option(uri: str | None) -> str | None:
    """The same of a URI that need not be given."""
    return None if uri is None else checked_uri(uri)


AckUri = Annotated[
    str | None,
    typer.Option("--ack-uri", metavar="URI", help="Where replicas acknowledge, if elsewhere.", callback=checked_option),
]


def open_ledger(uri: str, keys: Sequence[str] | None = None, ack_uri: str | None = None) -> Ledger:
    """The ledger of the run at a URI, which has been checked, read with pinned ``keys``; StoreError."""
    acks = None if ack_uri is None else TimedStore(ack_uri, opened=open_ack_store)
    return Ledger(TimedStore(uri), keys=load_public_keys(keys or ()), acks=acks)


def newest(ledger: Ledger) -> Manifest:
    """The newest version; ChainError if there is none."""
    head = ledger.head()
    if head is None:
        remedy = "check the URI; a trainer's first publish makes a run"
        raise ChainError(f"run at {ledger.store.uri}", expected="at least one version", got="none", remedy=remedy)
    return head


def version_of(ledger: Ledger, version: int | None) -> Manifest:
    """One version on the newest one's chain, None for the newest; ChainError."""
    head = newest(ledger)
    if version is not None and version > head.version:
        raise ChainError(
            f"version {version} of {ledger.store.uri}", expected=f"at most {head.version}, the newest",
            got="a later one", remedy="`delta-sync ledger` lists what is there",
        )  # fmt: skip
    return head if version is None else ledger.manifest(version)


@dataclass(frozen=True)
class Chain:
    """Versions, oldest first, down to the run's start or to ``end``: why nothing older could be reached.

    ``start``: what is wrong with a newer version, so that these begin below it.
    """

    versions: tuple[Manifest, ...]
    end: DeltaSyncError | None = None
    start: DeltaSyncError | None = None

    @property
    def ends_in_damage(self) -> bool:
        """Older versions are damaged; that they are gone is no damage, as nothing needs them that has an anchor."""
        return self.end is not None and not isinstance(self.end, ChainError)


def read_chain(ledger: Ledger, last: int | None = None) -> Chain:
    """The newest version and those before it, each found by the hash that its child names; at most ``last``."""
    head, start = newest_readable(ledger)
    found = [head or newest(ledger)]
    while last is None or len(found) < last:
        try:
            parent = ledger.parent(found[-1])
        except DAMAGE as error:
            return Chain(tuple(reversed(found)), error, start)
        if parent is None:
            break
        found.append(parent)
    return Chain(tuple(reversed(found)), None, start)


def newest_readable(ledger: Ledger) -> tuple[Manifest | None, DeltaSyncError | None]:
    """The newest version, None before the first; if it is damaged the newest one that can be read, and the damage."""
    try:
        return ledger.head(), None
    except (FormatError, IntegrityError) as error:
        damage = error
    reader = ManifestReader(ledger.store, ledger.limits, ledger.keys)
    for name in reversed(reader.names(MANIFESTS)):
        with contextlib.suppress(*DAMAGE):
            return reader.read(name), damage
    raise damage
