"""Keeping secrets of a store's URI out of logs, status and acknowledgements."""

from __future__ import annotations

from delta_sync.store.open import redact_uri


def redact_text(text: str, uri: str) -> str:
    """``text`` with every occurrence of ``uri`` redacted."""
    return text.replace(uri, redact_uri(uri)) if uri else text
