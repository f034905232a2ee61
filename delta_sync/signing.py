"""Ed25519 signatures over the records of a run: made by its trainer, checked by readers that pin public keys.

A signature is a field of the record that it signs, so it appears with the record in one write and the manifest's hash
covers it. What is signed is the record's canonical JSON without that field, behind a prefix that names the kind of
record: what was signed as one thing can never be shown as another.

Every kind of record takes part in the same way: it is a Signable, names itself in ``RECORD``, and has a field
``signature`` that ``read_signature`` reads and ``record_json`` writes.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

from delta_sync.errors import DeltaSyncError, SignatureError
from delta_sync.strict_json import FORMAT_VERSION, HEX16, HEX128, Fields, clip, dumps, loads

if TYPE_CHECKING:
    from delta_sync.keys import PublicKey, SigningKey

FIELD = "signature"


@dataclass(frozen=True)
class Signature:
    """Who signed, by the id of a public key (16 hexadecimal digits), and the 64 bytes in hexadecimal digits."""

    key: str
    value: str


class Signable(ABC):
    """A dataclass that is one record of a run, and may be signed."""

    RECORD: ClassVar[str]  # the kind of record, as the signed message names it
    signature: Signature | None

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Canonical JSON; FormatError if the values are not a valid record."""


Record = TypeVar("Record", bound=Signable)


def read_signature(record: Fields) -> Signature | None:
    """A record's signature, unchecked; None where it has none, FormatError where it is misshapen."""
    if FIELD not in record.value:
        return None
    inner = Fields(record.value[FIELD], f"{record.what}: field '{FIELD}'")
    return Signature(
        inner.text("key", HEX16, "16 lower-case hexadecimal digits"),
        inner.text("value", HEX128, "128 lower-case hexadecimal digits"),
    )


def record_json(record: Signable, **instead: object) -> dict[str, object]:
    """A record's fields as JSON values, ``instead`` in place of those that need another form, and the format's version.

    There is no ``signature`` in it where there is none.
    """
    values = {field.name: getattr(record, field.name) for field in fields(record)} | instead  # type: ignore[arg-type]
    signature = values.pop(FIELD)
    return values | {"format_version": FORMAT_VERSION} | ({FIELD: asdict(signature)} if signature else {})


def sign(record: Record, key: SigningKey | None) -> Record:
    """The record with ``key``'s signature in place of any other, without one where ``key`` is None; FormatError."""
    bare: Record = replace(record, signature=None)  # type: ignore[type-var]
    body = bare.to_bytes()
    if key is None:
        return bare
    value = key.sign(_message(record.RECORD, body))
    return replace(bare, signature=Signature(key.id, value.hex()))  # type: ignore[type-var]


class PublicKeys:
    """The pinned keys of one reader; several at once while keys are being changed."""

    def __init__(self, keys: Iterable[PublicKey]) -> None:
        self._keys = {key.id: key for key in keys}

    @property
    def ids(self) -> tuple[str, ...]:
        """Their ids, in order."""
        return tuple(sorted(self._keys))

    @property
    def texts(self) -> tuple[str, ...]:
        """The keys themselves, as ``PublicKey.load`` reads them."""
        return tuple(key.text for key in self._keys.values())

    def check(self, record: type[Signable], data: bytes, name: str) -> None:
        """SignatureError unless the JSON ``data``, named ``name``, is a ``record`` that one of the keys signed."""
        document = loads(data, name, max_bytes=len(data))
        signature = read_signature(Fields(document, name))
        if signature is None:
            raise self._refused(name, "an unsigned one", "set signing_key in the trainer")
        key = self._keys.get(signature.key)
        if key is None:
            remedy = "pin that key too if it is your trainer's, or let the trainer sign with a pinned one"
            raise self._refused(name, f"one signed with key {signature.key}", remedy)
        body = dumps({field: value for field, value in document.items() if field != FIELD})
        if not key.verifies(bytes.fromhex(signature.value), _message(record.RECORD, body)):
            got = f"a signature of key {signature.key} that is not this {record.RECORD}'s: it was changed, or copied"
            raise self._refused(name, got, "find out who else writes to this bucket; the trainer can put it again")

    def _refused(self, name: str, got: str, remedy: str) -> SignatureError:
        expected = f"a record signed with a pinned key ({', '.join(self.ids)})"
        return SignatureError(clip(name), expected=expected, got=got, remedy=remedy)


def _message(record: str, body: bytes) -> bytes:
    return f"delta-sync/{FORMAT_VERSION}/{record}".encode() + b"\0" + body


def generate_signing_key() -> SigningKey:
    """A new one; DeltaSyncError where the library for it is not installed."""
    _require_library()
    from delta_sync.keys import SigningKey

    return SigningKey.generate()


def load_signing_key(source: str) -> SigningKey:
    """From a PEM text or the path of a file with one; DeltaSyncError, never with the text in it."""
    _require_library()
    from delta_sync.keys import SigningKey

    return SigningKey.load(source)


def load_public_keys(sources: Iterable[str]) -> PublicKeys | None:
    """Keys from texts or paths, each of which may be several with commas between them; None for none at all."""
    parts = [part for source in sources for part in source.split(",") if part.strip()]
    if not parts:
        return None
    _require_library()
    from delta_sync.keys import PublicKey

    return PublicKeys(PublicKey.load(part) for part in parts)


def _require_library() -> None:
    if importlib.util.find_spec("cryptography") is None:
        remedy = "pip install 'delta-weight-sync[sign]'"
        raise DeltaSyncError("signatures", expected="the package cryptography", got="none installed", remedy=remedy)
