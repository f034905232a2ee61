"""Where objects are kept: the contract, and the stores that keep it."""

from delta_sync.store.base import ObjectInfo, Store
from delta_sync.store.local import LocalStore
from delta_sync.store.memory import MemoryStore
from delta_sync.store.open import open_store, redact_uri

__all__ = ["LocalStore", "MemoryStore", "ObjectInfo", "Store", "open_store", "redact_uri"]
