"""Which kernels of latent attention a server that follows a run gets on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_delta_plugin.compat.cpu_mla_seam import _choosing
from vllm_delta_plugin.flag import WORKER_EXTENSION

HAS_CHOICE = hasattr(AttentionBackendEnum, "AMX_MLA")  # not before vLLM 0.32
PLAIN = AttentionBackendEnum.CPU_MLA if HAS_CHOICE else None


@pytest.mark.parametrize(
    ("follows", "latent", "asked", "backend"),
    [
        (True, True, None, PLAIN),
        (True, False, None, None),
        (False, True, None, None),
        (True, True, "AMX_MLA", "AMX_MLA"),
    ],
)
def test_weights_that_take_deltas_are_chosen_where_nobody_chose(
    follows: bool, latent: bool, asked: str | None, backend: Any
) -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(worker_extension_cls=WORKER_EXTENSION if follows else ""),
        model_config=SimpleNamespace(use_mla=latent),
        attention_config=SimpleNamespace(backend=asked),
    )
    seen: list[Any] = []
    _choosing(lambda cls, given: seen.append(given.attention_config.backend))(object, config)
    assert seen == [backend], "before vLLM looks"
