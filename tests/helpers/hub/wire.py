"""What a request and an answer are, between the HTTP glue and the two protocols."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Request:
    """One HTTP request, read whole."""

    method: str
    path: str  # without the query, still percent-encoded
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    base: str  # http://host:port that the client reached us at

    @property
    def line(self) -> str:
        return f"{self.method} {self.path}"

    def json(self) -> Any:
        return json.loads(self.body or b"{}")


@dataclass
class Answer:
    """One HTTP answer; ``stream`` instead of ``body`` for one without an end."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    stream: Iterator[bytes] | None = None


def as_json(value: object, status: int = 200, **headers: str) -> Answer:
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    return Answer(status, json.dumps(value).encode(), {"Content-Type": "application/json", **named})


def refusal(status: int, code: str, message: str) -> Answer:
    return as_json({"error": message}, status, X_Error_Code=code, X_Error_Message=message)
