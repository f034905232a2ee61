"""Claims of epochs: a writer's, before it publishes, and an operator's, by which the run's chain is forgotten.

A reset is a claim by which no version is published. Nothing is deleted and no reader is moved. A trainer that is at
work meets it at its next commit, as it would another trainer's, and goes on in an epoch of its own; so does one that
starts. Either way the next version is an origin, which needs nothing before it, and gets complete weights.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from delta_sync.errors import (
    ChainError,
    ConflictError,
    FormatError,
    IntegrityError,
    NotFoundError,
    SignatureError,
    StoreError,
)
from delta_sync.records import RECORD_BYTES, Epoch
from delta_sync.signing import sign
from delta_sync.store.base import Store

if TYPE_CHECKING:
    from delta_sync.keys import SigningKey
    from delta_sync.ledger import Ledger

CLAIM_ATTEMPTS = 100


def default_writer() -> str:
    """A name for this process that no other has: host, process id and a random part."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()).strip("-")[:30] or "host"
    return f"{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def claim_epoch(ledger: Ledger, run: str | None, writer: str, key: SigningKey | None, *, reset: bool = False) -> Epoch:
    """Create the claim of the first free epoch; ConflictError if the store holds another run than ``run``."""
    for _ in range(CLAIM_ATTEMPTS):
        epochs = ledger.epochs()
        kept = _kept_run(ledger, epochs)
        if run is not None and kept not in (None, run):
            raise ConflictError("run", expected=run, got=f"{kept} in that store", remedy="use another folder or run")
        name, epoch = kept or run or uuid.uuid4().hex, max(epochs, default=0) + 1
        claim = sign(Epoch(name, epoch, writer, time.time(), reset), key)
        Epoch.from_bytes(claim.to_bytes())  # FormatError for a name that no key can carry
        if create_or_read(ledger.store, claim.key, claim.to_bytes(), RECORD_BYTES) is None:
            return claim
    got = f"{CLAIM_ATTEMPTS} numbers taken by others"
    raise ConflictError("claim of an epoch", expected="a free number", got=got, remedy="stop the other publishers")


def reset_pending(ledger: Ledger, after: int, before: int) -> bool:
    """Whether one of the epochs between two, both exclusive, is a reset's."""
    return any(_is_reset(ledger, epoch) for epoch in range(after + 1, before))


def claim_reset(ledger: Ledger, key: SigningKey | None = None) -> Epoch:
    """Claim the next epoch for a reset; ChainError if there is no run, SignatureError as ``check_reset_key``.

    StoreError; ConflictError.
    """
    newest = newest_claim(ledger)
    check_reset_key(ledger, newest, key)
    return claim_epoch(ledger, newest.run, f"reset-{default_writer()}"[:64], key, reset=True)


def check_reset_key(ledger: Ledger, newest: Epoch, key: SigningKey | None) -> None:
    """SignatureError if a run whose newest claim is signed would be reset by a key that signed no claim of it."""
    if newest.signature is None or (key is not None and key.id in _signers(ledger)):
        return
    raise SignatureError(
        f"reset of run {newest.run}", expected=f"a signature, as by key {newest.signature.key} before",
        got="none" if key is None else f"key {key.id}, which signed no epoch of this run",
        remedy="give the trainer's key with --signing-key: readers that pin keys refuse the claim else",
    )  # fmt: skip


def newest_claim(ledger: Ledger) -> Epoch:
    """The claim of the newest epoch that can be read; ChainError if there is none."""
    damage: FormatError | IntegrityError | None = None
    for epoch in reversed(ledger.epochs()):
        try:
            return ledger.epoch(epoch)
        except (FormatError, IntegrityError) as error:
            damage = error
    if damage is not None:
        raise damage
    remedy = "check the URI; a trainer's first publish makes a run"
    raise ChainError(f"run at {ledger.store.uri}", expected="at least one epoch", got="none", remedy=remedy)


def _is_reset(ledger: Ledger, epoch: int) -> bool:
    try:
        return ledger.epoch(epoch).reset
    except (FormatError, IntegrityError, NotFoundError):  # somebody's; whoever asks begins with an origin anyway
        return False


def _signers(ledger: Ledger) -> set[str]:
    """Ids of the keys that signed claims, as far as these can be read."""
    found = set()
    for epoch in ledger.epochs():
        with contextlib.suppress(FormatError, IntegrityError, NotFoundError):
            claim = ledger.epoch(epoch)
            found |= {claim.signature.key} if claim.signature else set()
    return found


def _kept_run(ledger: Ledger, epochs: Sequence[int]) -> str | None:
    """The run's name, by the newest claim that can be read; None in an empty store, FormatError if none can."""
    damage: FormatError | IntegrityError | None = None
    for epoch in reversed(epochs):
        try:
            return ledger.epoch(epoch).run
        except (FormatError, IntegrityError) as error:
            damage = error
    if damage is not None:
        raise damage
    return None


def create_or_read(store: Store, key: str, data: bytes, max_bytes: int) -> bytes | None:
    """None if the object under ``key`` is now ``data``, else what it is; reads back where the answer is unclear."""
    try:
        store.create(key, data)
    except (ConflictError, StoreError) as error:
        try:
            existing = store.get(key, max_bytes=max_bytes)
        except NotFoundError:
            raise _as_store_error(key, error) from error
        return None if existing == data else existing
    return None


def _as_store_error(key: str, error: ConflictError | StoreError) -> StoreError:
    if isinstance(error, StoreError):
        return error
    return StoreError(f"object {key}", expected="the object that is said to exist", got="none", remedy="try again")
