"""From what the user typed to a run: its ledger, one of its versions, its whole chain."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from delta_sync.checkpoint import is_checkpoint
from delta_sync.cli.report import printable, warn
from delta_sync.cli.timed_store import TimedStore
from delta_sync.errors import ChainError, DeltaSyncError, FormatError, IntegrityError, NotFoundError, StoreError
from delta_sync.ledger import Ledger
from delta_sync.manifest import Manifest
from delta_sync.manifest_reader import ManifestReader
from delta_sync.signing import PublicKeys, load_public_keys, load_signing_key
from delta_sync.store.keys import MANIFESTS
from delta_sync.store.local import LocalStore
from delta_sync.store.open import check_uri, open_ack_store, redact_uri

if TYPE_CHECKING:
    from delta_sync.keys import SigningKey

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


def local_path(text: str) -> Path | None:
    """What is there on this machine under that name, if anything."""
    try:
        path = Path(text)
        return path if path.exists() else None
    except (OSError, ValueError):  # a text that no path can be
        return None


def checked_uri(uri: str) -> str:
    """The URI; a misspelt one, a file, or one that needs an extra is wrong usage."""
    if (path := local_path(uri)) and path.is_file():
        raise typer.BadParameter(f"{printable(uri)}: expected a run's folder or bucket, got a file")
    try:
        check_uri(uri)
    except StoreError as error:
        raise typer.BadParameter(printable(error)) from None
    return uri


def checked_run(uri: str) -> str:
    """The same where a whole run is meant: one version of it is wrong usage."""
    run, version = split_version(uri)
    if version is not None and local_path(uri) is None:
        run = printable(redact_uri(run))
        raise typer.BadParameter(
            f"expected a whole run, got version {version} of one. Remedy: name {run}; inspect, materialize, apply, "
            f"parity and bench take a version (a folder or bucket that is named so is written {run}@{version}/)"
        )
    return checked_uri(uri)


def checked_option(uri: str | None) -> str | None:
    """The same of a URI that need not be given."""
    return None if uri is None else checked_run(uri)


AckUri = Annotated[
    str | None,
    typer.Option("--ack-uri", metavar="URI", help="Where replicas acknowledge, if elsewhere.", callback=checked_option),
]


def open_ledger(
    uri: str, keys: Sequence[str] | None = None, ack_uri: str | None = None, *, patience: float = math.inf
) -> Ledger:
    """The ledger of the run at a URI, which has been checked, read with pinned ``keys``; StoreError."""
    acks = None if ack_uri is None else TimedStore(ack_uri, opened=open_ack_store)
    return Ledger(TimedStore(uri, patience=patience), keys=read_public_keys(keys), acks=acks)


def read_public_keys(sources: Sequence[str] | None) -> PublicKeys | None:
    """The keys that --public-key names; what is none is wrong usage."""
    try:
        return load_public_keys(sources or ())
    except DeltaSyncError as error:
        raise typer.BadParameter(printable(error), param_hint="--public-key") from None


def read_signing_key(source: str | None) -> SigningKey | None:
    """The key that --signing-key names; what is none is wrong usage."""
    try:
        return load_signing_key(source) if source else None
    except DeltaSyncError as error:
        raise typer.BadParameter(printable(error), param_hint="--signing-key") from None


def newest(ledger: Ledger) -> Manifest:
    """The newest version; ChainError if there is none."""
    head = ledger.head()
    if head is None:
        got, remedy = _instead(ledger)
        raise ChainError(f"run at {ledger.store.uri}", expected="at least one version", got=got, remedy=remedy)
    return head


def _instead(ledger: Ledger) -> tuple[str, str]:
    """What is there in place of a run, and what to do."""
    inner = ledger.store.inner if isinstance(ledger.store, TimedStore) else ledger.store
    if isinstance(inner, LocalStore) and is_checkpoint(inner.root):
        return "a checkpoint's folder", "name the URI that trainer and servers were given"
    got = "no such folder" if isinstance(inner, LocalStore) and not inner.root.exists() else "none"
    return got, "check the URI; a trainer's first publish makes a run"


def version_of(ledger: Ledger, version: int | None) -> Manifest:
    """One version on the newest one's chain, None for the newest; ChainError, or what is wrong with that.

    An older one is found below a newest version that is damaged too, as replicas find it; standard error is told.
    """
    try:
        head = newest(ledger)
    except (FormatError, IntegrityError) as damage:
        older = None if version is None else ledger.newest_below(version + 1)
        if older is None or older.version != version:
            raise
        warn(f"a newer version is damaged: {damage}")
        return older
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


def read_chain(ledger: Ledger) -> Chain:
    """The newest version that can be read and those before it, each found by the hash that its child names."""
    head, start = newest_readable(ledger, StoreError)
    found = [head or newest(ledger)]
    while True:
        try:
            parent = ledger.parent(found[-1])
        except (*DAMAGE, StoreError) as error:
            return Chain(tuple(reversed(found)), error, start)
        if parent is None:
            break
        found.append(parent)
    return Chain(tuple(reversed(found)), None, start)


def newest_readable(ledger: Ledger, *also: type[DeltaSyncError]) -> tuple[Manifest | None, DeltaSyncError | None]:
    """The newest version, None before the first; if it is damaged the newest one that can be read, and the damage.

    ``also``: errors that count as damage here.
    """
    damaging: tuple[type[DeltaSyncError], ...] = (FormatError, IntegrityError, *also)
    try:
        return ledger.head(), None
    except damaging as error:
        damage = error
    reader = ManifestReader(ledger.store, ledger.limits, ledger.keys)
    for name in reversed(reader.names(MANIFESTS)):
        with contextlib.suppress(*DAMAGE, *also):
            return reader.read(name), damage
    raise damage
