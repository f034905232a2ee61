"""A snapshot of a model on a GPU: compared there, bucket by bucket, and only changes cross the bus.

The bits last published stay in pinned host memory, 2 bytes a BF16 element, and stream by; or a second copy of them
stays on the GPU (``resident``): so much of its memory saves one pass of them over the bus a capture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch

from delta_sync.manifest import TensorState
from delta_sync.tensor_delta import TensorDelta
from trl_callback.extract import SIGNED, Pair, extractor
from trl_callback.lanes import Lane
from trl_callback.pinned import pinned_copy
from trl_callback.serving_image import ServingImage
from trl_callback.snapshot import Found, Snapshot


class GpuSnapshot(Snapshot):
    """See the module; a capture takes at most ``bucket_bytes`` of device memory beside the model.

    Where the model's own memory does not have the weights (adapters merged), those of the buckets in work come on top.
    """

    def __init__(self, image: ServingImage, bucket_bytes: int, *, resident: bool) -> None:
        self._device = image.device
        self._extract = extractor(self._device, bucket_bytes)
        super().__init__(image)
        where = self._device if resident else torch.device("cpu")
        self._compared = {name: _signed(held.bits).to(where) for name, held in self._held.items()}

    def _own(self, bits: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.unsignedinteger]:
        return pinned_copy(bits)

    def diff(self, image: ServingImage, found: Found | None = None) -> dict[str, TensorDelta]:
        """See Snapshot; ``found`` is told when all tensors are compared."""
        changed = {str(name): delta for name, delta in self._extract(self._pairs(image)).items()}
        if found is not None:
            for delta in changed.values():
                found(delta)
        return changed

    def _pairs(self, image: ServingImage) -> Iterator[Pair]:
        for source, _ in self._matched(image.sources()):
            live = source.tensor.to(self._device).reshape(-1)
            yield Pair(source.name, source.name, source.dtype, source.shape, live, self._compared[source.name])

    def apply(self, deltas: Mapping[str, TensorDelta], states: Mapping[str, TensorState]) -> None:
        """See Snapshot; returns when the GPU's copy has moved too."""
        super().apply(deltas, states)
        lane = Lane(self._device, beside=True)
        with lane.work():
            for name, delta in deltas.items():
                compared = self._compared[name]
                if compared.device.type != "cpu":  # else it is the same memory
                    new = _signed(self._held[name].bits[delta.positions])
                    at = torch.from_numpy(delta.positions).to(self._device)
                    compared[at] = new.to(self._device)
        lane.mark().wait()


def _signed(bits: npt.NDArray[np.unsignedinteger]) -> torch.Tensor:
    return torch.from_numpy(bits.view(f"<i{bits.itemsize}")).view(SIGNED[bits.itemsize])


def snapshot_of(image: ServingImage, snapshot_device: str, bucket_bytes: int) -> Snapshot:
    """The snapshot that suits where the model is; ``snapshot_device`` "cuda" keeps a copy on the model's GPU."""
    if image.device.type != "cuda":
        return Snapshot(image)
    return GpuSnapshot(image, bucket_bytes, resident=snapshot_device == "cuda")
