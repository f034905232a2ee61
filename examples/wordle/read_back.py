"""Is what the server holds, bit for bit, what the trainer ended with?"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass
class Comparison:
    """How many tensors and elements were read from the server process, and which differ from the checkpoint's."""

    version: int | None = None
    tensors: int = 0
    elements: int = 0
    differing: dict[str, str] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        return self.tensors > 0 and not self.differing

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bit_exact": self.exact}


def compare(url: str, checkpoint: Path, api_key: str | None = None) -> Comparison:
    """Read every tensor out of the server and compare it with the checkpoint, cast to the type that the server holds.

    `checkpoint` is a folder of safetensors with the trainer's own (float32) weights. Raises httpx.HTTPError.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    result = Comparison()
    with httpx.Client(timeout=600, trust_env=False, headers=headers, base_url=url) as client:
        listing = _get(client, "/delta_sync/tensors").json()
        result.version = listing["version"]
        ours = _checkpoint_tensors(checkpoint)
        for name in sorted(set(ours) ^ set(listing["tensors"])):
            result.differing[name] = f"only the {'trainer' if name in ours else 'server'} has it"
        for name in sorted(set(ours) & set(listing["tensors"])):
            _compare_one(client, name, ours[name], result)
    return result


def _compare_one(client: httpx.Client, name: str, file: Path, result: Comparison) -> None:
    import torch
    from safetensors import safe_open

    served = _get(client, f"/delta_sync/tensors/{quote(name)}")
    dtype, shape = served.headers["X-Dtype"], tuple(map(int, filter(None, served.headers["X-Shape"].split(","))))
    with safe_open(file, "pt") as tensors:
        trained = tensors.get_tensor(name)
    bits = trained.to(getattr(torch, TORCH_NAMES[dtype])).flatten().view(torch.uint8).numpy().tobytes()
    result.tensors += 1
    result.elements += trained.numel()
    if tuple(trained.shape) != shape:
        result.differing[name] = f"shape {tuple(trained.shape)} at the trainer, {shape} at the server"
    elif bits != served.content:
        result.differing[name] = f"{_differing_bytes(bits, served.content)} of {len(bits)} bytes"
    if int(served.headers["X-Version"]) != result.version:
        result.differing[name] = f"version {served.headers['X-Version']} while version {result.version} was compared"


def _differing_bytes(one: bytes, two: bytes) -> int:
    import numpy as np

    if len(one) != len(two):
        return max(len(one), len(two))
    return int((np.frombuffer(one, np.uint8) != np.frombuffer(two, np.uint8)).sum())


def _checkpoint_tensors(folder: Path) -> dict[str, Path]:
    from safetensors import safe_open

    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as tensors:
            found.update(dict.fromkeys(tensors.keys(), path))
    if not found:
        raise FileNotFoundError(f"{folder}: expected safetensors with the trainer's weights, got none")
    return found


def _get(client: httpx.Client, path: str) -> httpx.Response:
    response = client.get(path)
    response.raise_for_status()
    return response
