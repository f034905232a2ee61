"""Writes the signed records: ``python make.py FOLDER`` refuses one that exists: golden files are never replaced.

Records of the golden runs (``golden-2``: of the one with a training log's numbers), signed with a key that is no
secret: its seed is the bytes 0 to 31.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from delta_sync.keys import SigningKey
from delta_sync.manifest import AnchorRecord, Manifest
from delta_sync.records import Epoch, Head
from delta_sync.signing import sign

RUNS = Path(__file__).parent.parent / "ledger"
FIRST = {
    "manifest": (Manifest, "manifests/000000000002-000001-trainer-a.json"),  # with keys that no table names
    "anchor": (AnchorRecord, "anchors/000000000001-000001/anchor.json"),
    "epoch": (Epoch, "epochs/000002.json"),
    "head": (Head, "HEAD.json"),
}
RECORDS = {
    "golden-1": ("golden-1", FIRST),
    "golden-2": ("golden-3", {"manifest": (Manifest, "manifests/000000000002-000001-trainer-a.json")}),
}


def make(folder: Path) -> None:
    key = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
    run, records = RECORDS[folder.name]
    for name, (record, path) in records.items():
        data = (RUNS / run / "run" / path).read_bytes()
        (folder / f"{name}.json").write_bytes(sign(record.from_bytes(data), key).to_bytes())
    (folder / "key.pub").write_text(f"{key.public.text}\n")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True)
    make(target)
