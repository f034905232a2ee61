"""Seam: engines that share experts step together, and meet in a collective every few steps (vLLM 0.26 to 0.32).

Data-parallel engines of a mixture of experts exchange tokens in every layer, so that their n-th forward passes are
one. ``DPEngineCoreProc`` counts them, and at the same counts on all engines calls ``ParallelConfig.sync_dp_state``.
What runs right after that runs between the same two forward passes everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from delta_sync.errors import MappingError
from vllm_delta_plugin.compat.seam import require, wrap
from vllm_delta_plugin.compat.settings_seam import setting

_meetings: dict[int, Callable[[], None]] = {}  # id of a process group -> what to do when its engines meet


def install() -> None:
    """Wrap the place at which engines meet; SeamError if this vLLM has none."""
    from vllm.config import ParallelConfig

    wrap(ParallelConfig, "sync_dp_state", _then_meet)


def shares_experts(vllm_config: Any) -> bool:
    """Whether several engines serve one mixture of experts, each with a part of it."""
    return bool(setting(vllm_config, "parallel_config.data_parallel_size") > 1 and vllm_config.model_config.is_moe)


class Lockstep:
    """One engine's place in such a group. Everything but ``store`` is for the engine's own thread."""

    def __init__(self, core: Any) -> None:
        require(core, "dp_group", "dp_store", "has_coordinator", "engines_running", "current_wave", "step_counter")
        self._core = core
        self.engine, self.engines = int(core.dp_rank), int(core.dp_size)
        self.store: Any = core.dp_store  # a torch Store, served by engine 0's process

    def meet_at(self, function: Callable[[], None]) -> None:
        """From now on call ``function`` on the engine's thread at every meeting; all engines must do so."""
        install()
        _meetings[id(self._core.dp_group)] = function

    def highest(self, values: Sequence[int]) -> list[int]:
        """The highest of all engines' values, each by itself; a collective, allowed at a meeting only.

        RuntimeError if an engine is gone.
        """
        import torch

        numbers = torch.tensor(list(values), dtype=torch.int64)
        torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX, group=self._core.dp_group)
        return [int(number) for number in numbers]

    @property
    def step(self) -> tuple[int, int]:
        """Number of the busy period and of the forward pass in it: the same on all engines at a meeting."""
        return int(self._core.current_wave), int(self._core.step_counter)

    def wake(self) -> None:
        """Make an idle group run a forward pass without requests, so that it meets; for engine 0.

        The way in which a request that came for an ended busy period starts the next. Engine 0 is the one that reports
        the end of each, on the same socket and so in order: no start is taken for one of a period that has not ended.
        """
        from vllm.v1.engine import EngineCoreOutputs

        core = self._core
        if core.engines_running or core.is_scheduler_paused():
            return
        core.engines_running = True
        core.output_queue.put_nowait((-1, EngineCoreOutputs(start_wave=core.current_wave)))


def refuse_unsupported(core: Any, vllm_config: Any, transition: str) -> None:
    """MappingError for what engines that share experts can't do together."""
    for what, got, remedy in (
        ("transition 'sync' of engines that share experts", transition == "sync", "use async or recompute"),
        (
            "LoRA adapters on engines that share experts",
            vllm_config.lora_config is not None,
            "publish merged weights",
        ),
        ("elastic expert parallelism", setting(vllm_config, "parallel_config.enable_elastic_ep"), "serve without it"),
        (
            "engines that share experts behind several API servers, each with its own",
            setting(vllm_config, "parallel_config.data_parallel_external_lb")
            or setting(vllm_config, "parallel_config.data_parallel_hybrid_lb"),
            "let one vllm serve spread the requests",
        ),
        ("engines that share experts without vLLM's own coordinator", not core.has_coordinator, "use vllm serve"),
        ("engines that share experts on a CPU", _cannot_exchange(), "serve it with tensor parallelism"),
    ):
        if got:
            raise MappingError(what, expected="off", got="on", remedy=remedy)


def _cannot_exchange() -> bool:
    """vLLM's CPU communicator inherits the exchange of tokens from a base class that only raises (0.32)."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    return CpuCommunicator.all_gatherv is DeviceCommunicatorBase.all_gatherv


def _then_meet(original: Callable[..., Any]) -> Callable[..., Any]:
    def sync_dp_state(dp_group: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(dp_group, *args, **kwargs)
        if (meet := _meetings.get(id(dp_group))) is not None:
            meet()
        return result

    return sync_dp_state
