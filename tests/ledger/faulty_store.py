"""A store that fails once, at a chosen call, with or without having done what was asked; or lets another act first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from delta_sync import StoreError
from delta_sync.store import Store

# refuse: nothing happens, an error is raised      lose: it happens, an error is raised all the same
# die before: the process ends without doing it    die after: the process ends right after doing it
Fault = Literal["refuse", "lose", "die before", "die after"]
FAULTS: tuple[Fault, ...] = ("refuse", "lose", "die before", "die after")


class Died(BaseException):
    """What kill -9 looks like from inside: nothing after it runs, no handler catches it."""


class FaultyStore(Store):
    def __init__(self, inner: Store) -> None:
        self.inner, self.uri = inner, inner.uri
        self.calls = 0
        self.fault: Fault | Callable[[], object] | None = None
        self.countdown = 0
        self.names: list[str] = []

    def arm(self, countdown: int, fault: Fault | Callable[[], object]) -> None:
        """Fail at the ``countdown``-th call from now (0 is the next), or do something else just before it."""
        self.countdown, self.fault = countdown, fault

    def disarm(self) -> None:
        self.fault = None

    def _call(self, name: str, key: str, act: Callable[[], object]):
        self.calls += 1
        self.names.append(f"{name} {key}")
        if self.fault is None:
            return act()
        self.countdown -= 1
        if self.countdown >= 0:
            return act()
        fault, self.fault = self.fault, None
        if callable(fault):
            fault()
            return act()
        if fault in ("lose", "die after"):
            act()
        if fault in ("refuse", "lose"):
            raise StoreError(f"{name} {key}", expected="success", got=f"an injected fault ({fault})")
        raise Died

    def put(self, key, data):
        return self._call("put", key, lambda: self.inner.put(key, data))

    def create(self, key, data):
        return self._call("create", key, lambda: self.inner.create(key, data))

    def put_file(self, key, path):
        return self._call("put_file", key, lambda: self.inner.put_file(key, path))

    def get(self, key, *, max_bytes):
        return self._call("get", key, lambda: self.inner.get(key, max_bytes=max_bytes))

    def read_range(self, key, start, length):
        return self._call("read_range", key, lambda: self.inner.read_range(key, start, length))

    def info(self, key):
        return self._call("info", key, lambda: self.inner.info(key))

    def list(self, prefix):
        return self._call("list", prefix, lambda: self.inner.list(prefix))

    def delete(self, key):
        return self._call("delete", key, lambda: self.inner.delete(key))
