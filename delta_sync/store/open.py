"""From a URI to a store."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from urllib.parse import unquote

from delta_sync.errors import StoreError
from delta_sync.store.base import Store
from delta_sync.store.hub_uri import EXPECTED as HUB_EXPECTED
from delta_sync.store.hub_uri import HubPlace, parse_hub_place
from delta_sync.store.local import LocalStore
from delta_sync.store.memory import MemoryStore
from delta_sync.store.object_client import OWN, check_installed, split_uri

OBJECT_STORES = ("s3", "gs", "az")
EXPECTED = f"a path, file:///path, s3://, gs:// or az:// with bucket/prefix, {HUB_EXPECTED} or memory://name"
_TOKEN = re.compile(r"hf_[A-Za-z0-9]{20,}")  # of the Hub, wherever somebody put it
_WITH_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+:/*)(.*)", re.DOTALL)


def open_store(uri: str) -> Store:
    """The store behind a path or a URI; StoreError if there is none of that kind."""
    return _open(uri, own=False)


def open_ack_store(uri: str) -> Store:
    """A store of acknowledgements, opened with the credentials that ``DELTA_SYNC_ACK_…`` gives it alone, if any.

    These are ``DELTA_SYNC_ACK_HF_TOKEN``, and ``DELTA_SYNC_ACK_AWS_…`` for keys, profile, region and endpoint.
    """
    return _open(uri, own=True)


def _open(uri: str, *, own: bool) -> Store:
    check_uri(uri)
    scheme, _, rest = uri.partition("://")
    if scheme in OBJECT_STORES:
        from delta_sync.store.object import ObjectStore  # loads obstore, which is an extra

        return ObjectStore(uri, own=own)
    if scheme == "memory":
        return MemoryStore(rest)
    if scheme == "hf":
        return _open_hub(uri, rest, own=own)
    return LocalStore(unquote(rest) if scheme == "file" else uri)


def check_uri(uri: str) -> None:
    """StoreError, at once and without touching anything, unless ``uri`` names a store that can be opened."""
    scheme, colon, rest = uri.partition("://")
    if not colon and _WITH_SCHEME.match(uri):
        raise _refused(uri, "a scheme without //", "check the URI's spelling; a folder of that name is ./NAME")
    if scheme in OBJECT_STORES and colon:
        split_uri(uri)
        check_installed(scheme)
        return
    if scheme == "hf" and colon:
        _hub_place(uri, rest)
        if any(importlib.util.find_spec(name) is None for name in ("huggingface_hub", "hf_xet")):
            raise _no_hub(uri, "none installed")
        return
    known = (scheme == "file" and rest.startswith("/")) or (scheme == "memory" and rest) if colon else uri.strip()
    if not known:
        raise _refused(uri, scheme or "nothing", "check the URI's spelling")


def _hub_place(uri: str, rest: str) -> HubPlace:
    place = parse_hub_place(rest)
    if place is None:
        raise _refused(uri, "no bucket's name", "`hf buckets create ORG/NAME` makes a bucket", HUB_EXPECTED)
    return place


def _open_hub(uri: str, rest: str, *, own: bool) -> Store:
    try:
        from delta_sync.store.hub import HubStore
    except ImportError as error:
        raise _no_hub(uri, str(error)) from error
    return HubStore(_hub_place(uri, rest), token_from=f"{OWN}HF_TOKEN" if own else None)


def _no_hub(uri: str, got: str) -> StoreError:
    return _refused(uri, got, "pip install 'delta-weight-sync[hub]'", "the packages huggingface_hub and hf_xet")


def _refused(uri: str, got: str, remedy: str, expected: str = EXPECTED) -> StoreError:
    return StoreError(f"store {redact_uri(uri)!r}", expected=expected, got=got, remedy=remedy)


def shown_uri(uri: str) -> str:
    """What logs and status pages show: a path as an absolute file:// URI, anything else redacted."""
    scheme, colon, rest = uri.partition("://")
    if colon and scheme != "file":
        return redact_uri(uri)
    return f"file://{Path(unquote(rest) if colon else uri).absolute()}"


def redact_uri(uri: str) -> str:
    """The URI without user, password, token, query and fragment, fit for logs and status pages."""
    found = _WITH_SCHEME.fullmatch(uri)
    if found is None:
        return uri
    scheme, rest = found.groups()
    user, at, after = rest.rpartition("@")  # the last: a password that was not quoted may hold any sign
    if at and (":" in user or "/" not in user):
        rest = after
    return scheme + _TOKEN.sub("hf_…", re.split(r"[?#]", rest, maxsplit=1)[0])
