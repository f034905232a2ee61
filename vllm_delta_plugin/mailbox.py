"""Letters between the engines of one group, as JSON in the key-value store that vLLM connects them with."""

from __future__ import annotations

import json
from typing import Any

_PIECE = 1 << 20  # bytes in one value: the store refuses a few MiB
_PREFIX = "delta_sync"
_NOTHING = "\0"  # what no value is


class Mailbox:
    """A letter is written once under its key and can then be read by everyone; safe to use from any thread.

    ``store`` is a torch Store. What its calls raise, RuntimeErrors, means that the engine which serves it is gone.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def post(self, key: str, letter: Any) -> None:
        """Write a letter; plain JSON types only, with string keys."""
        text = json.dumps(letter)
        pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
        for number, piece in enumerate(pieces):
            self._store.set(f"{_PREFIX}/{key}/{number}", piece)
        self._store.set(f"{_PREFIX}/{key}", str(len(pieces)))  # last: who finds it finds all

    def read(self, key: str) -> Any:
        """The letter, or None while there is none, or where it is burnt meanwhile."""
        name = f"{_PREFIX}/{key}"
        count = self._value(name)
        pieces = [self._value(f"{name}/{number}") for number in range(int(count or 0))]
        if count is None or None in pieces:
            return None
        return json.loads(b"".join(piece for piece in pieces if piece is not None))

    def has(self, key: str) -> bool:
        """Whether there is such a letter."""
        return bool(self._store.check([f"{_PREFIX}/{key}"]))

    def burn(self, key: str) -> None:
        """Remove a letter that nobody will read any more, if there is one."""
        name = f"{_PREFIX}/{key}"
        pieces = int(self._value(name) or 0)
        for gone in (name, *(f"{name}/{number}" for number in range(pieces))):
            self._store.delete_key(gone)

    def count(self, key: str, more: int = 0) -> int:
        """A counter after ``more`` is added to it; 0 at first."""
        return int(self._store.add(f"{_PREFIX}/{key}", more))

    def _value(self, name: str) -> bytes | None:
        """What is under a name now: the store's own ``get`` waits for one that is not there, for half an hour.

        A comparison with what no value is changes nothing, and answers with the value or, without one, with that.
        """
        value = bytes(self._store.compare_set(name, _NOTHING, _NOTHING))
        return None if value == _NOTHING.encode() else value
