"""``delta-sync keygen``: the keys with which a trainer signs and by which replicas know it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from delta_sync.cli.report import AsJson, Report, finish
from delta_sync.signing import generate_signing_key


def keygen(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Where to; PATH.pub is the public key.")],
    as_json: AsJson = False,
) -> None:
    """Make a pair of ed25519 keys: PATH for the trainer alone, PATH.pub for all replicas.

    Exits with 1 if either exists: a key is never overwritten.
    """
    finish(as_json, lambda: _report(path))


def _report(path: Path) -> Report:
    key = generate_signing_key()
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
