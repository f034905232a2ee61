"""Things that go wrong on purpose: which requests, how often, and in what way."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from helpers.hub.wire import Answer, Request

Kind = Literal["status", "delay", "drop", "drop after", "stall", "flip", "stale", "fail some"]


@dataclass
class Fault:
    """One rule: ``times`` (None: always) and with probability ``rate``, where ``where`` is found in "METHOD /path",
    not counting the first ``skip`` such requests.

    ``status`` answers with it, ``headers`` and ``text``; ``delay`` waits ``seconds``, ``stall`` does so and answers
    nothing; ``drop`` closes the connection, ``drop after`` does so once the request was carried out; ``flip`` changes
    a bit of the answer; ``stale`` lists what there was ``seconds`` ago; ``fail some`` fails the paths that match
    ``text`` in a batch. ``call`` is called at the moment of a drop.
    """

    kind: Kind
    where: str
    times: int | None = None
    rate: float = 1.0
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 1.0
    text: str = ""
    skip: int = 0
    call: Callable[[], object] | None = None


class Faults:
    """The rules in force, and how often each kind was met; every choice comes from ``seed``."""

    def __init__(self, seed: int = 0) -> None:
        self._rules: list[Fault] = []
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.met: dict[str, int] = {}

    def add(self, kind: Kind, where: str = "", **more: object) -> Fault:
        fault = Fault(kind, where, **more)  # type: ignore[arg-type]
        with self._lock:
            self._rules.append(fault)
        return fault

    def clear(self) -> None:
        with self._lock:
            self._rules.clear()
            self.met.clear()

    def pick(self, request: Request) -> Fault | None:
        """The first rule that this request meets, if chance will have it."""
        with self._lock:
            for fault in self._rules:
                if fault.times == 0 or not re.search(fault.where, request.line):
                    continue
                if self._random.random() >= fault.rate:
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                if fault.times is not None:
                    fault.times -= 1
                name = f"{fault.kind} {fault.status}" if fault.kind == "status" else fault.kind
                self.met[name] = self.met.get(name, 0) + 1
                return fault
        return None


def flipped(answer: Answer) -> Answer:
    """The same answer with one bit of its last byte changed."""
    if answer.body:
        answer.body = answer.body[:-1] + bytes([answer.body[-1] ^ 1])
    return answer
