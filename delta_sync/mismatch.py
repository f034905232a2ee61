"""How far two sides' log-probabilities of the same tokens are apart: trainer and server, or any other two."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Mismatch:
    """Over ``tokens`` tokens: k3 (an estimate of KL in nats, never negative), and differences of log-probabilities.

    ``k3_mean`` estimates KL(server || trainer) where the server sampled the tokens. ``top1`` is the share of places
    where both sides find the same token most probable, None where that is not known.
    """

    tokens: int
    k3_mean: float
    k3_max: float
    difference_mean: float
    difference_max: float
    top1: float | None = None

    def to_dict(self) -> dict[str, float | int | None]:
        """Plain values."""
        return asdict(self)


def mismatch(trainer: Floats, server: Floats, same_top1: npt.NDArray[np.bool_] | None = None) -> Mismatch | None:
    """Compare log-probabilities ``[n]`` of the same tokens; None if no place has a finite one on both sides."""
    known = np.isfinite(trainer) & np.isfinite(server)
    if not known.any():
        return None
    ratio = trainer[known].astype(np.float64) - server[known].astype(np.float64)
    k3 = np.expm1(ratio) - ratio
    apart = np.abs(ratio)
    top1 = None if same_top1 is None else float(same_top1.mean())
    return Mismatch(int(known.sum()), float(k3.mean()), float(k3.max()), float(apart.mean()), float(apart.max()), top1)
