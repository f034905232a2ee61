"""TRL's generation over a stock vLLM server: no communicator, and a sync that waits instead of pushing."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from delta_sync.errors import DeltaSyncError
from trl_callback.ranks import on_main
from trl_callback.rollout_client import RolloutClient

SYMBOL = "VLLMGeneration"
SOURCE = "trl.generation.vllm_generation"
SERVE = "start `vllm serve MODEL --delta-sync URI` and set vllm_mode='server'"
NEEDED = ("_init_vllm", "sync_weights", "generate")


class Rollouts(Protocol):
    """What generation needs from a callback."""

    generates: bool

    def connect(self, url: str, timeout: float) -> RolloutClient:
        """Rank 0's client of a healthy server."""

    def sync(self) -> None:
        """Return, on all ranks, once the served weights are recent enough."""


def generation_class(rollouts: Rollouts) -> type:
    """A subclass of TRL's VLLMGeneration that takes its weights from the bucket by way of ``rollouts``."""
    base = _upstream()

    class DeltaSyncGeneration(base):  # type: ignore[misc, valid-type]
        """Server-mode generation whose server fetches its own weights."""

        def _init_vllm(self) -> None:
            if self.mode != "server":
                raise DeltaSyncError("vllm_mode", expected="'server'", got=repr(self.mode), remedy=SERVE)
            on_main(self._connect)
            rollouts.generates = True

        def _connect(self) -> None:
            url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
            self.vllm_client = rollouts.connect(url, self.server_timeout)

        def sync_weights(self) -> None:
            """Wait until the server serves weights that are recent enough."""
            rollouts.sync()

    return DeltaSyncGeneration


class GenerationSwap:
    """Puts our class where TRL's trainers look for theirs, for the one trainer that is being built.

    The first construction for ``model`` takes ours and undoes the swap; any other gets TRL's own class.
    """

    def __init__(self, rollouts: Rollouts, model: Any) -> None:
        self._original = _upstream()
        self._model, self._ours = model, generation_class(rollouts)
        self._modules = [
            module
            for name, module in list(sys.modules.items())
            if name.startswith("trl.") and vars(module).get(SYMBOL) is self._original
        ]

    def install(self) -> None:
        """Swap the name in every TRL module that has it."""
        for module in self._modules:
            setattr(module, SYMBOL, self._build)

    def restore(self) -> None:
        """Put TRL's class back wherever ours still stands."""
        for module in self._modules:
            if vars(module).get(SYMBOL) == self._build:
                setattr(module, SYMBOL, self._original)

    def _build(self, *args: Any, **kwargs: Any) -> Any:
        self.restore()
        model = kwargs["model"] if "model" in kwargs else args[0]
        if model is not self._model:
            return self._original(*args, **kwargs)
        return self._ours(*args, **kwargs)


def _upstream() -> Any:
    from trl.generation.vllm_generation import VLLMGeneration

    missing = [name for name in NEEDED if not callable(getattr(VLLMGeneration, name, None))]
    if missing:
        import trl

        raise DeltaSyncError(f"TRL {trl.__version__}'s VLLMGeneration", expected=f"methods {list(NEEDED)}",
                             got=f"no {missing[0]}", remedy="install trl>=1.11")  # fmt: skip
    return VLLMGeneration
