"""What a client may ask for by header: a version at least, or exactly one, and how long it will wait."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from delta_sync.errors import FormatError

EXACT = "x-delta-sync-version"
MINIMUM = "x-delta-sync-min-version"
TIMEOUT = "x-delta-sync-timeout"
DEFAULT_TIMEOUT = 30.0  # seconds
_LONGEST = 3600.0


@dataclass(frozen=True)
class VersionWish:
    """Every token must be by ``version``, or by it or a later one unless ``exact``; ``timeout`` in seconds."""

    version: int
    exact: bool
    timeout: float

    @classmethod
    def read(cls, headers: Mapping[str, str]) -> VersionWish | None:
        """The wish in a request's headers, None without one; FormatError names the header."""
        asked = [name for name in (EXACT, MINIMUM) if name in headers]
        if not asked:
            return None
        if len(asked) == 2:
            raise FormatError(f"header {MINIMUM}", expected=f"none beside {EXACT}", got=headers[MINIMUM])
        [name] = asked
        return cls(_version(name, headers[name]), name == EXACT, read_timeout(headers, DEFAULT_TIMEOUT))

    @property
    def header(self) -> str:
        """The header that it came by."""
        return EXACT if self.exact else MINIMUM

    def allows(self, version: int | None) -> bool:
        """Whether a token by this version will do."""
        if version is None:
            return False
        return version == self.version if self.exact else version >= self.version


def read_timeout(headers: Mapping[str, str], default: float) -> float:
    """Seconds from 0 to 3600; FormatError."""
    text = headers.get(TIMEOUT)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _LONGEST:
        raise FormatError(f"header {TIMEOUT}", expected=f"seconds from 0 to {_LONGEST:g}", got=text)
    return seconds


def _version(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise FormatError(f"header {name}", expected="a version number", got=text)
    return int(text)
