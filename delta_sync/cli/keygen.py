"""``delta-sync keygen``: the keys with which a trainer signs and by which replicas know it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from delta_sync.cli.report import AsJson, Report, finish
from delta_sync.errors import DeltaSyncError
from delta_sync.signing import generate_signing_key

if TYPE_CHECKING:
    from delta_sync.keys import SigningKey


def keygen(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Where to; PATH.pub is the public key.")],
    as_json: AsJson = False,
) -> None:
    """Make a pair of ed25519 keys: PATH for the trainer alone, PATH.pub for all replicas.

    Neither may exist yet: a key is never overwritten.
    """
    for taken in (path, path.with_name(f"{path.name}.pub")):
        if os.path.lexists(taken):
            raise typer.BadParameter(f"{taken} exists: name a file that does not", param_hint="PATH")
    try:
        key = generate_signing_key()
    except DeltaSyncError as error:  # the library for it is not installed
        raise typer.BadParameter(str(error), param_hint="keygen") from None
    finish(as_json, lambda: _report(path, key))


def _report(path: Path, key: SigningKey) -> Report:
    public = key.save(path)
    document: dict[str, object] = {
        "id": key.id,
        "signing_key": str(path),
        "public_key": str(public),
        "text": key.public.text,
    }
    return Report(
        document,
        [
            f"key {key.id}",
            f"trainer:  signing_key={str(path)!r}, or DELTA_SYNC_SIGNING_KEY={path}; show it to nobody",
            f"replicas: --delta-sync-public-key {key.public.text} (or the file {public})",
        ],
    )
