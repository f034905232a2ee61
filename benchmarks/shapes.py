"""True shapes of models whose weights are not at hand."""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden": 128, "layers": 2, "middle": 256, "q": 128, "kv": 64, "vocab": 2048, "tied": True},
    "smollm2-135m": {
        "hidden": 576, "layers": 30, "middle": 1536, "q": 576, "kv": 192, "vocab": 49152, "tied": True,
    },
    "qwen3-0.6b": {
        "hidden": 1024, "layers": 28, "middle": 3072, "q": 2048, "kv": 1024, "vocab": 151936, "tied": True,
    },
    "qwen3-8b": {
        "hidden": 4096, "layers": 36, "middle": 12288, "q": 4096, "kv": 1024, "vocab": 151936, "tied": False,
    },
}  # fmt: skip


def tensors_of(shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's tensors."""
    hidden, middle, q, kv = (shape[key] for key in ("hidden", "middle", "q", "kv"))
    found: dict[str, tuple[int, ...]] = {"embed": (shape["vocab"], hidden)}
    for layer in range(shape["layers"]):
        found |= {
            f"{layer}.q": (q, hidden), f"{layer}.k": (kv, hidden), f"{layer}.v": (kv, hidden),
            f"{layer}.o": (hidden, q), f"{layer}.gate": (middle, hidden), f"{layer}.up": (middle, hidden),
            f"{layer}.down": (hidden, middle), f"{layer}.norm1": (hidden,), f"{layer}.norm2": (hidden,),
        }  # fmt: skip
    found["norm"] = (hidden,)
    if not shape["tied"]:
        found["head"] = (shape["vocab"], hidden)
    return found
