"""Ed25519 keys: made, kept in files, read from files or texts.

The only file that knows ``cryptography``, which is an extra: ``signing.load_…`` import it when keys are used.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import os
import stat
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from delta_sync.errors import DeltaSyncError
from delta_sync.strict_json import clip

SCHEME = "ed25519:"
PEM = "-----BEGIN "
KEY_FILE_BYTES = 16 * 1024
log = logging.getLogger(__name__)


class PublicKey:
    """What readers pin; ``text`` is ``ed25519:`` and the key's 32 bytes in base64."""

    def __init__(self, key: Ed25519PublicKey) -> None:
        raw = key.public_bytes_raw()
        self._key = key
        self.id = hashlib.sha256(raw).hexdigest()[:16]
        self.text = SCHEME + base64.b64encode(raw).decode()

    def __repr__(self) -> str:
        return f"PublicKey({self.id})"

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Whether this key's owner signed ``message``."""
        try:
            self._key.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    @classmethod
    def load(cls, source: str) -> PublicKey:
        """From ``ed25519:…``, a PEM text, or the path of a file with either; DeltaSyncError says what is wrong."""
        text = source.strip()
        if not text.startswith((SCHEME, PEM)):
            text = _read(Path(text), "public key").strip()
        if text.startswith(PEM):
            return cls(_public_from_pem(text))
        try:
            raw = base64.b64decode(text.removeprefix(SCHEME), validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        if not text.startswith(SCHEME) or len(raw) != 32:
            raise _bad("public key", f"{SCHEME} and 44 characters of base64, or PEM", "something else")
        return cls(Ed25519PublicKey.from_public_bytes(raw))


class SigningKey:
    """A trainer's secret; shows nothing but its id."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = PublicKey(key.public_key())

    def __repr__(self) -> str:
        return f"SigningKey({self.id})"

    def __reduce__(self) -> str:
        raise TypeError("a signing key is not pickled: load it where it is used")

    @property
    def id(self) -> str:
        """The first 16 hexadecimal digits of sha256 over the public key's 32 bytes."""
        return self.public.id

    def sign(self, message: bytes) -> bytes:
        """64 bytes."""
        return self._key.sign(message)

    @classmethod
    def generate(cls) -> SigningKey:
        """A new one."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, source: str) -> SigningKey:
        """From a PEM text (PKCS8, without a password) or the path of a file with one; DeltaSyncError, never the text.

        Warns of a file that others than its owner can read.
        """
        if source.lstrip().startswith(PEM):
            return cls(_private_from_pem(source))
        path = Path(source).expanduser()
        text = _read(path, "signing key")
        if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            log.warning("signing key %s can be read by others than its owner. Remedy: chmod 600", path)
        return cls(_private_from_pem(text))

    def save(self, path: Path) -> Path:
        """Write the key (mode 0600) and beside it ``.pub``, whose path is returned; FileExistsError if one exists."""
        pem = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        public = path.with_name(path.name + ".pub")
        _create(public, f"{self.public.text}\n".encode(), 0o644)
        try:
            _create(path, pem, 0o600)
        except OSError:
            public.unlink()
            raise
        return public


def _create(path: Path, data: bytes, mode: int) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
    except OSError as error:
        path.unlink()  # half a key is none, and would be in the way of the next try
        raise OSError(error.errno, error.strerror, str(path)) from None


def _read(path: Path, what: str) -> str:
    try:
        with path.expanduser().open("rb") as file:
            return file.read(KEY_FILE_BYTES).decode("ascii", "replace")
    except (OSError, ValueError) as error:  # ValueError: a path that no path can be
        reason = error.strerror if isinstance(error, OSError) else "no path"
        raise _bad(what, "the path of a file that can be read, or a key's text", reason) from None


def _private_from_pem(text: str) -> Ed25519PrivateKey:
    expected = "an ed25519 key in PEM (PKCS8), without a password"
    try:
        found = serialization.load_pem_private_key(text.strip().encode(), None)
    except TypeError:
        raise _bad("signing key", expected, "one with a password") from None
    except (ValueError, UnsupportedAlgorithm):
        raise _bad("signing key", expected, "none that can be read") from None
    if not isinstance(found, Ed25519PrivateKey):
        raise _bad("signing key", expected, type(found).__name__)
    return found


def _public_from_pem(text: str) -> Ed25519PublicKey:
    try:
        found = serialization.load_pem_public_key(text.strip().encode())
    except (ValueError, UnsupportedAlgorithm):
        raise _bad("public key", "an ed25519 key", "none that can be read") from None
    if not isinstance(found, Ed25519PublicKey):
        raise _bad("public key", "an ed25519 key", type(found).__name__)
    return found


def _bad(what: str, expected: str, got: object) -> DeltaSyncError:
    remedy = "`delta-sync keygen PATH` makes a pair of keys"
    return DeltaSyncError(what, expected=expected, got=clip(got), remedy=remedy)
