"""From a URI to a store."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit, urlunsplit

from delta_sync.errors import StoreError
from delta_sync.store.base import Store
from delta_sync.store.local import LocalStore
from delta_sync.store.memory import MemoryStore

_EXTRAS = {"hf": "hub", "s3": "s3", "gs": "s3", "az": "s3"}


def open_store(uri: str) -> Store:
    """The store behind a path, ``file:///path`` or ``memory://name``; StoreError if there is none of that kind."""
    scheme, colon, rest = uri.partition("://")
    if not colon and uri:
        return LocalStore(uri)
    if scheme == "file" and rest.startswith("/"):
        return LocalStore(unquote(rest))
    if scheme == "memory" and rest:
        return MemoryStore(rest)
    if scheme in _EXTRAS:
        raise StoreError(
            f"store {redact_uri(uri)}", expected="a path, file:// or memory://", got=f"{scheme}://",
            remedy=f"it will come with delta-weight-sync[{_EXTRAS[scheme]}], which is not built yet: use a folder",
        )  # fmt: skip
    raise StoreError(
        f"store {redact_uri(uri)!r}", expected="a path, file:///path or memory://name",
        got=scheme or "nothing", remedy="check the URI's spelling",
    )  # fmt: skip


def redact_uri(uri: str) -> str:
    """The URI without user, password, query and fragment, fit for logs and status pages."""
    if "://" not in uri:
        return uri
    parts = urlsplit(uri)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
