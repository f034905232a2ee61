"""A training run whose versions are LoRA adapters: its base is proven or anchored once, then never touched."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from delta_sync.at_exit import at_exit
from delta_sync.errors import MappingError
from trl_callback.adapter_chain import AdapterChain
from trl_callback.adapter_image import AdapterImage
from trl_callback.chain import Chain
from trl_callback.config import DeltaSyncConfig
from trl_callback.fleet_status import Statuses
from trl_callback.metrics import Metrics
from trl_callback.serving_image import ServingImage
from trl_callback.session import Session, Subject, ask, serving_dtypes
from trl_callback.snapshot import Snapshot
from trl_callback.status_client import ServerStatus

logger = logging.getLogger(__name__)


class FrozenWeights(Snapshot):
    """Weights that training leaves alone: where the model's own memory has their bits, they are not copied."""

    def _own(self, bits: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.unsignedinteger]:
        return bits


class AdapterSession(Session):
    """See Session; MappingError too where model, adapter or server can't do with an adapter alone."""

    def __init__(self, subject: Subject, config: DeltaSyncConfig, status: Statuses | None, metrics: Metrics) -> None:
        self._config, self._metrics = config, metrics
        server = ask(status, config)
        dtypes = serving_dtypes(config, server, subject.compute_dtype)
        lora = server.live[0].lora if server.live else None
        image = self._image = AdapterImage(subject.model, (lora.dtype if lora else None) or dtypes.default)
        for live in server.live:
            check_serves(image, live, live.url)
        base, adapter = FrozenWeights(ServingImage(subject.model, dtypes, merge=False)), Snapshot(image)
        make = partial(AdapterChain, adapter=adapter, settings=image.config)
        self._start(subject, server, base, make, published=adapter)
        at_exit(self._leave)

    def _want_first_anchor(self, chain: Chain, snapshot: Snapshot, live: Sequence[ServerStatus]) -> None:
        """None where an anchor of this very base leads to our first version."""
        if not (isinstance(chain, AdapterChain) and chain.has_anchor()):
            super()._want_first_anchor(chain, snapshot, live)


def check_serves(image: AdapterImage, live: ServerStatus, url: str) -> None:
    """MappingError where the server said that it can't have this adapter."""
    config, lora = image.config, live.lora
    what, flag = f"adapter of rank {config.r}", f"--max-lora-rank {_offered(config.r)}"
    if lora is None:
        raise MappingError(
            what,
            expected="a server that serves LoRA adapters",
            got=f"{url}, which serves none",
            remedy=f'vllm serve MODEL --enable-lora {flag} --delta-sync URI, or set lora="merged"',
        )
    if config.r > lora.max_rank:
        remedy = f"serve with {flag}, or train a smaller r"
        raise MappingError(
            what, expected=f"a rank of at most {lora.max_rank}, as at {url}", got=config.r, remedy=remedy
        )
    for module in sorted({target.rpartition(".")[2] for target in config.target_modules}):
        if module not in lora.modules:
            raise MappingError(
                f"module {module!r} of the adapter",
                expected=f"one of {list(lora.modules)}, as at {url}",
                got="one that it cannot adapt",
                remedy='leave it out of target_modules, or set lora="merged"',
            )


def _offered(rank: int) -> int:
    """The smallest rank that vLLM offers and that is enough."""
    return next((offered for offered in (8, 16, 32, 64, 128, 256, 320, 512) if offered >= rank), rank)
