"""Keeping secrets out of logs and status."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit


def redact_uri(uri: str) -> str:
    """The same URI without user, password, query and fragment."""
    parts = urlsplit(uri)
    if not parts.scheme or len(parts.scheme) == 1:  # a bare path, maybe with a drive letter
        return uri
    host = parts.netloc.rpartition("@")[2]
    netloc = f"***@{host}" if host != parts.netloc else host
    return urlunsplit((parts.scheme, netloc, parts.path, "***" if parts.query else "", ""))


def redact_text(text: str, uri: str) -> str:
    """``text`` with every occurrence of ``uri`` redacted."""
    return text.replace(uri, redact_uri(uri)) if uri else text
