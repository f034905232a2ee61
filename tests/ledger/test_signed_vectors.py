"""Records that an earlier release signed must stay valid, by our code and by the specification alone."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from delta_sync.errors import SignatureError
from delta_sync.keys import SigningKey
from delta_sync.manifest import AnchorRecord, Manifest
from delta_sync.records import Epoch, Head
from delta_sync.signing import load_public_keys, sign

VECTORS = Path(__file__).parent.parent / "vectors"
GOLDEN = VECTORS / "signed" / "golden-1"
MEASURED = VECTORS / "signed" / "golden-2"
RECORDS = {"manifest": Manifest, "anchor": AnchorRecord, "epoch": Epoch, "head": Head}
FILES = [(GOLDEN, name) for name in RECORDS] + [(MEASURED, "manifest")]

sys.path.insert(0, str(VECTORS))
from independent_signature import verifies  # noqa: E402


@pytest.mark.parametrize(("folder", "name"), FILES)
def test_a_signed_record_reads_writes_and_signs_the_same_bytes(folder, name):
    data = (folder / f"{name}.json").read_bytes()
    record = RECORDS[name].from_bytes(data)
    assert record.to_bytes() == data
    assert sign(record, SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))) == record
    load_public_keys([str(folder / "key.pub")]).check(RECORDS[name], data, name)


@pytest.mark.parametrize(("folder", "name"), FILES)
def test_the_signature_follows_from_the_specification(folder, name):
    public = base64.b64decode((folder / "key.pub").read_text().removeprefix("ed25519:"))
    document = json.loads((folder / f"{name}.json").read_bytes())
    signature = document.pop("signature")
    assert signature["key"] == hashlib.sha256(public).hexdigest()[:16]
    body = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    message = f"delta-sync/1/{name}".encode() + b"\0" + body
    assert verifies(public, message, bytes.fromhex(signature["value"]))
    assert not verifies(public, message + b" ", bytes.fromhex(signature["value"]))


def test_a_signed_vector_of_one_kind_is_none_of_another():
    keys = load_public_keys([str(GOLDEN / "key.pub")])
    for name in RECORDS:
        for other, record in RECORDS.items():
            if other != name:
                with pytest.raises(SignatureError):
                    keys.check(record, (GOLDEN / f"{name}.json").read_bytes(), name)


@pytest.mark.parametrize("change", [{"metrics": {"reward": 1.0}}, {"metrics": ...}, {"traceparent": ...}])
def test_the_signature_covers_the_numbers_and_the_trace(change):
    document = json.loads((MEASURED / "manifest.json").read_bytes()) | change
    document = {field: value for field, value in document.items() if value is not ...}
    data = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert Manifest.from_bytes(data).to_bytes() == data
    with pytest.raises(SignatureError, match="changed"):
        load_public_keys([str(MEASURED / "key.pub")]).check(Manifest, data, "manifest")
