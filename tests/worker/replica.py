"""An in-process vLLM engine with the worker extension, and the ranks' answers put together."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.machine import LLM_ARGS

from delta_sync.plan import Plan

PROMPTS = [[1, 5, 9, 20, 33], [1, 400, 7], [1, 44, 45, 46, 47, 48, 49, 50]]
EXTENSION = "vllm_delta_plugin.worker_extension.DeltaSyncWorkerExtension"


class Replica:
    """Talks to the worker extension as the engine does."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Every rank's reply."""
        return self.llm.collective_rpc(f"delta_sync_{method}", args=args)

    def one(self, method: str, *args: Any) -> dict[str, Any]:
        """The only rank's reply, which must be ok."""
        (reply,) = self.rpc(method, *args)
        assert reply["ok"], reply["error"]
        return reply

    def attach(self, uri: str, **config: Any) -> dict[str, Any]:
        """Attach rank 0 and return its reply."""
        return self.one("attach", {"uri": uri, **config})

    def stage(self, plan: Plan, method: str = "stage_begin", *, seconds: float = 60) -> list[dict[str, Any]]:
        """Stage a plan on all ranks and wait for the last answers."""
        for reply in self.rpc(method, plan):
            assert reply["ok"], reply["error"]
        return self.wait("stage_poll", ("staging", "loading"), seconds)

    def wait(self, method: str, busy: Sequence[str], seconds: float = 60) -> list[dict[str, Any]]:
        """Poll until no rank is busy."""
        deadline = time.monotonic() + seconds
        while True:
            replies = self.rpc(method)
            if not any(reply.get("state") in busy for reply in replies):
                return replies
            assert time.monotonic() < deadline, replies
            time.sleep(0.005)

    def tokens(self, count: int = 12) -> list[list[int]]:
        """Greedy continuations of a few prompts; no prefix is reused."""
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        sampling = SamplingParams(max_tokens=count, temperature=0, detokenize=False, ignore_eos=True)
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    @property
    def model(self) -> torch.nn.Module:
        """The model of the one in-process worker."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.get_model()

    def bits(self) -> dict[str, np.ndarray]:
        """All parameters' raw bits, by vLLM's own names, without help from the map under test."""
        return {n: p.data.cpu().contiguous().view(torch.int16).numpy().copy() for n, p in self.model.named_parameters()}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """Whether two models' bits are equal."""
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


@contextmanager
def replica(checkpoint: Path, **options: Any) -> Iterator[Replica]:
    """A running engine over ``checkpoint``; torn down at the end, or where it refuses to start: the next is alone."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    from vllm_delta_plugin.compat import kernel_scan

    kernel_scan.install()  # what the plugin's register() does in a real process
    settings = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "worker_extension_cls": EXTENSION,
        "seed": 0,
        **LLM_ARGS,
    }
    try:
        llm = LLM(str(checkpoint), **(settings | options))
        try:
            yield Replica(llm)
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
    finally:
        cleanup_dist_env_and_memory()
