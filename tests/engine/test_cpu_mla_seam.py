"""Which kernels of latent attention a server that follows a run gets on a CPU."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_delta_plugin.compat import cpu_mla_seam
from vllm_delta_plugin.compat.cpu_mla_seam import _choosing
from vllm_delta_plugin.compat.seam import SeamError
from vllm_delta_plugin.flag import WORKER_EXTENSION

PLAIN = SimpleNamespace(name="CPU_MLA")


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
    follows: bool, latent: bool, asked: str | None, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_mla_seam, "_plain", lambda: PLAIN)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(worker_extension_cls=WORKER_EXTENSION if follows else ""),
        model_config=SimpleNamespace(use_mla=latent),
        attention_config=SimpleNamespace(backend=asked),
    )
    seen: list[Any] = []
    _choosing(lambda cls, given: seen.append(given.attention_config.backend))(object, config)
    assert seen == [backend], "before vLLM looks"


def test_a_model_that_does_not_say_whether_it_is_one_is_named() -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(worker_extension_cls=WORKER_EXTENSION), model_config=SimpleNamespace()
    )
    with pytest.raises(SeamError, match=r"\.use_mla, expected there"):
        _choosing(lambda cls, given: None)(object, config)


def test_a_vllm_that_knows_both_is_told_which_one() -> None:
    """There is a choice since vLLM 0.32."""
    wanted = None
    if find_spec("vllm.v1.attention.backends.registry") is not None:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        wanted = getattr(AttentionBackendEnum, "CPU_MLA", None) if hasattr(AttentionBackendEnum, "AMX_MLA") else None
    assert cpu_mla_seam._plain() == wanted
