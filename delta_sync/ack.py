"""What a replica says about itself in the bucket."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, cast

from delta_sync.store.keys import MAX_EPOCH, MAX_VERSION, replica_key
from delta_sync.strict_json import FORMAT_VERSION, Fields, dumps, loads

ACK_BYTES = 64 * 1024
ERROR_CHARACTERS = 4000
_REPLICA = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TEXT = re.compile(rf"(?s).{{0,{ERROR_CHARACTERS}}}")
State = Literal["live", "refused", "poisoned"]


@dataclass(frozen=True)
class Ack:
    """``replicas/{replica}.json``, replaced by the replica whenever it changes.

    ``version``, ``manifest`` (sha256 hex) and ``epoch`` say what it serves; all three are None before its first commit.
    ``state``: "live", "refused" (serves an older version, would not take ``refused_version``) or "poisoned" (its
    memory failed the audit). ``error`` is cut to 4000 characters. ``time`` is in unix seconds.

    ``performance`` is about the last commit, each number present only where it is known: ``noticed_seconds`` (from the
    manifest's ``created_at`` until the replica saw it), ``stage_seconds``, ``commit_seconds`` (of the engine's thread),
    ``served_seconds`` (from ``created_at`` until committed), ``gap_seconds`` (the longest time between two outputs of
    the engine around the commit) and ``fetched_bytes``.
    """

    replica: str
    version: int | None
    manifest: str | None
    epoch: int | None
    state: State
    refused_version: int | None
    refused_object: str | None
    error_kind: str | None
    error: str | None
    time: float
    performance: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Where the acknowledgement lies."""
        return replica_key(self.replica)

    def to_bytes(self) -> bytes:
        """Canonical JSON; FormatError if the values are not a valid acknowledgement."""
        error = None if self.error is None else self.error[:ERROR_CHARACTERS]
        values = asdict(self) | {"format_version": FORMAT_VERSION, "error": error}
        if not self.performance:
            del values["performance"]
        data = dumps(values)
        Ack.from_bytes(data)
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Ack:
        """Parse and validate, ignoring unknown keys; FormatError."""
        fields = Fields(loads(data, "acknowledgement", max_bytes=ACK_BYTES), "acknowledgement")
        fields.check_version()

        def version(name: str) -> int:
            return fields.integer(name, 1, MAX_VERSION)

        def text(name: str) -> str:
            return fields.text(name, _TEXT, f"text of at most {ERROR_CHARACTERS} characters")

        return cls(
            replica=fields.text("replica", _REPLICA, "1 to 128 of A-Z a-z 0-9 . _ -, the first a letter or digit"),
            version=fields.optional("version", version),
            manifest=fields.optional("manifest", fields.sha256),
            epoch=fields.optional("epoch", lambda name: fields.integer(name, 1, MAX_EPOCH)),
            state=cast(State, fields.choice("state", ("live", "refused", "poisoned"))),
            refused_version=fields.optional("refused_version", version),
            refused_object=fields.optional("refused_object", text),
            error_kind=fields.optional("error_kind", text),
            error=fields.optional("error", text),
            time=fields.number("time"),
            performance=fields.numbers("performance"),
        )
