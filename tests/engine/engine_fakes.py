"""Two in-memory ranks that keep the worker extension's contract over numpy arrays, with failures on demand.

Tensor "w" is split by columns over the ranks, "norm" is held by both. For tests of the engine side only:
the real extension is tested by its own tests and through real servers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from delta_sync.delta import apply
from delta_sync.delta_file import decode_delta
from delta_sync.digest import digest_region, tensor_key
from delta_sync.errors import DeltaSyncError
from delta_sync.ledger import Ledger
from delta_sync.plan import Plan
from vllm_delta_plugin.chain import undone
from vllm_delta_plugin.proof import MASK, Region

ROWS, COLUMNS = 4, 6
ANSWER = "answer: "  # what a line of an engine's process begins with: vLLM 0.27 writes its log to stdout too
SHAPES = {"w": (ROWS, COLUMNS), "norm": (COLUMNS,)}
KEYS = [
    {"w": f"w|0|({COLUMNS}, 1)|({ROWS}, 3)", "norm": f"norm|0|(1,)|({COLUMNS},)"},
    {"w": f"w|3|({COLUMNS}, 1)|({ROWS}, 3)", "norm": f"norm|0|(1,)|({COLUMNS},)"},
]
Weights = dict[str, np.ndarray[Any, Any]]


def region_sum(bits: np.ndarray[Any, Any], key: str) -> int:
    """A region's digest, read out of the whole tensor."""
    region = Region.parse(key)
    at = (region.offset, region.strides)
    return digest_region(bits.ravel(), *at, *at, region.shape, tensor_key(region.tensor))


class Injected(Exception):
    """A failure that a test asked for."""


@dataclass
class Rank:
    """One rank; it keeps whole tensors and looks only at its regions."""

    index: int
    ledger: Ledger
    live: Weights
    staged: Weights | None = None
    target: int | None = None
    error: dict[str, Any] | None = None
    committed: bool = False
    loading: bool = False
    too_small: bool = False
    skew: int = 0  # added to the staged "norm" sum: a wrong proof
    fail: set[str] = field(default_factory=set)
    damaged: str | None = None  # a module that is served otherwise than made of its weights, until all are made anew
    unequal: str | None = None  # a region of which the rank has several copies that differ
    anew: bool = False  # whether what is staged does that
    adapter: str | None = None  # sha256 of the object that is loaded
    next_adapter: str | None = None
    lora: ClassVar[dict[str, Any] | None] = None  # as an engine without --enable-lora

    def call(self, method: str, args: tuple[Any, ...]) -> dict[str, Any]:
        """What the extension does: catch everything, answer a dictionary."""
        try:
            if method in self.fail:
                raise Injected(f"{method} fails")
            return {"ok": True, "error": None} | getattr(self, method)(*args)
        except Exception as error:  # noqa: BLE001  # as the real extension does
            return {"ok": False, "error": describe(error)}

    def sums(self, weights: Weights) -> dict[str, int]:
        return {key: region_sum(weights[name], key) for name, key in KEYS[self.index].items()}

    def attach(self, config: dict[str, Any]) -> dict[str, Any]:
        tensors = {name: {"dtype": "BF16", "shape": list(shape)} for name, shape in SHAPES.items()}
        return {"tensors": tensors, "regions": self.sums(self.live), "lora": self.lora}

    def stage_begin(self, plan: Plan) -> dict[str, Any]:
        self.loading = False
        self.staged, self.error, self.target = None, None, plan.target.version
        self.anew = plan.start in ("live", "anchor")
        self.next_adapter = plan.target.objects[0].sha256 if plan.target.kind == "adapter" else None
        try:
            if "stage" in self.fail:
                raise Injected("stage fails")
            self.staged = self.read(plan)
            if self.too_small and plan.anchor is not None:
                self.staged, self.error = None, {"kind": "StageTooLargeError", "error": "too large"}
        except DeltaSyncError as error:
            self.error = describe(error, self.key)
        except Injected as error:
            self.error = describe(error)
        return {}

    def read(self, plan: Any) -> Weights:
        self.key = None
        bits = {name: value.copy() for name, value in self.live.items()}
        if plan.anchor is not None:
            ref = plan.anchor.objects[0]
            self.key = ref.key
            data = np.frombuffer(self.ledger.read_object(ref), "<u2")
            bits = {"w": data[: ROWS * COLUMNS].reshape(SHAPES["w"]).copy(), "norm": data[ROWS * COLUMNS :].copy()}
        for manifest in reversed(plan.deltas) if plan.start == "back" else plan.deltas:
            for ref in manifest.objects:
                self.key = ref.key
                deltas = {delta.name: [delta] for delta in decode_delta(self.ledger.read_object(ref))[1]}
                for [delta] in (undone(deltas) if plan.start == "back" else deltas).values():
                    apply(delta, bits[delta.name].reshape(-1))
        return bits

    def load_dense(self, plan: Plan) -> dict[str, Any]:
        self.loading = True
        self.error = None
        self.live["w"][:] = 0  # half way through, nothing is what it was
        try:
            self.live = self.read(plan)
        except DeltaSyncError as error:
            self.error = describe(error, self.key)
        return {}

    def stage_poll(self) -> dict[str, Any]:
        if self.loading and self.error is None:
            return {"state": "loaded", "regions": self.sums(self.live)}
        if self.error is not None:
            return {"state": "failed", "error": self.error}
        if self.staged is None:
            return {"state": "idle"}
        before, after = self.sums(self.live), self.sums(self.staged)
        parts = {key: (after[key] - before[key]) & MASK for key in after if after[key] != before[key]}
        if self.skew:
            parts[KEYS[self.index]["norm"]] = (parts.get(KEYS[self.index]["norm"], 0) + self.skew) & MASK
        return {"state": "staged", "target": self.target, "parts": parts, "changed": len(parts)}

    def stage_drop(self) -> dict[str, Any]:
        self.staged = self.error = None
        return {}

    def commit(self, version: int) -> dict[str, Any]:
        if self.staged is None or self.target != version:
            raise Injected("nothing staged")
        self.live, self.staged, self.committed = self.staged, self.live, True
        self.damaged = None if self.anew else self.damaged
        self.adapter, self.next_adapter = self.next_adapter, self.adapter
        return {}

    def undo(self, version: int) -> dict[str, Any]:
        if self.committed and self.staged is not None:
            self.live, self.staged, self.committed = self.staged, self.live, False
            self.adapter, self.next_adapter = self.next_adapter, self.adapter
        return {}

    def settle(self, version: int) -> dict[str, Any]:
        self.staged, self.committed = None, False
        return {}

    def audit_begin(self, again: bool) -> dict[str, Any]:
        return {"state": "running"}

    def audit_poll(self) -> dict[str, Any]:
        found = {"regions": self.sums(self.live), "damaged": self.damaged, "unequal": self.unequal}
        return {"state": "done", **found, "began": 100.0 + self.index, "ended": 200.0 + self.index}


def describe(error: Exception, key: str | None = None) -> dict[str, Any]:
    return {"kind": type(error).__name__, "error": str(error), "object": key}


class Executor:
    """collective_rpc over the ranks; ``before`` may look at or change things before any call."""

    def __init__(self, ledger: Ledger, weights: Weights) -> None:
        self.ranks = [Rank(i, ledger, {n: v.copy() for n, v in weights.items()}) for i in range(2)]
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda method: None

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
        name = method.removeprefix("delta_sync_")
        self.calls.append(name)
        self.before(name)
        return [rank.call(name, args) for rank in self.ranks]

    def equal(self, weights: Weights) -> bool:
        """True if every rank serves exactly these bits."""
        return all(np.array_equal(rank.live[name], weights[name]) for rank in self.ranks for name in weights)
