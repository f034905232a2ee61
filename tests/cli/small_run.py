"""One small run in a local folder, as a trainer would leave it: six versions, two anchors, three replicas."""

from __future__ import annotations

import numpy as np
from helpers.publish import Publisher

from delta_sync.ack import Ack

SHAPES = {"embed.weight": (96, 64), "layer.weight": (64, 64), "norm.weight": (64,)}


class Run:
    """Where a run lies, its publisher, manifests by version, and every version's bits."""

    def __init__(self, folder, key=None):
        self.folder, self.uri = folder, str(folder)
        rng = np.random.default_rng(7)
        # normal numbers around 0.02, as weights have
        weights = {
            name: (rng.normal(0, 0.02, shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            for name, shape in SHAPES.items()
        }
        self.publisher = Publisher(self.uri, weights, key=key)
        self.manifests, self.bits = {}, {}
        self.keep(self.publisher.origin(anchor=True))
        for seed in range(3):
            self.keep(self.publisher.step(seed))
        self.publisher.anchor(self.manifests[4])
        for seed in range(3, 5):
            self.keep(self.publisher.step(seed))

    def keep(self, manifest):
        self.manifests[manifest.version] = manifest
        self.bits[manifest.version] = {name: bits.tobytes() for name, bits in self.publisher.weights.items()}

    def acknowledge(self, replica, version, **said):
        manifest = self.manifests[version]
        nothing = dict.fromkeys(("refused_version", "refused_object", "error_kind", "error"))
        about = {"state": "live", "time": 1.8e9} | nothing | said
        self.publisher.ledger.acknowledge(Ack(replica, version, manifest.sha256, manifest.epoch, **about))

    def damage(self, key):
        """One flipped bit in the middle of an object's second half, where it is data and not header."""
        path = self.folder / key
        data = bytearray(path.read_bytes())
        data[len(data) * 3 // 4] ^= 1
        path.write_bytes(data)
