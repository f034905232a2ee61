"""The header that carries an API key: a key that no header can hold is refused without being shown."""

from __future__ import annotations

from delta_sync.errors import FormatError


def bearer(key: str) -> str:
    """The value of ``Authorization`` for ``key``; FormatError, which does not show it, if that is no text of one line.

    HTTP libraries refuse such a key too, with the key in their message.
    """
    if key.isascii() and key.isprintable() and key == key.strip():
        return f"Bearer {key}"
    raise FormatError(
        "API key",
        expected="printable ASCII on one line, without spaces around it",
        got=f"{len(key)} characters, some of them others",
        remedy="look at the file or variable it comes from: a line break at its end is the usual one",
    )
