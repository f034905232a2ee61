"""The seams: wrapped once, kept in kind, and named loudly when this vLLM does not have them."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from argparse import Namespace
from typing import Any

import pytest

from vllm_delta_plugin.compat.seam import SeamError, require, require_fields, wrap


class Owner:
    def plain(self, x: int) -> int:
        return x + 1

    @staticmethod
    def static(x: int) -> int:
        return x + 1

    @classmethod
    def of_class(cls, x: int) -> tuple[type, int]:
        return cls, x + 1


class Child(Owner):
    pass


def doubled(original: Any) -> Any:
    def wrapper(*args: Any) -> Any:
        result = original(*args)
        return result * 2 if isinstance(result, int) else (*result, "wrapped")

    return wrapper


def test_wrapping_keeps_the_kind_and_happens_once() -> None:
    for name in ("plain", "static", "of_class"):
        for _ in range(2):
            wrap(Owner, name, doubled)
    assert Owner().plain(1) == 4
    assert Owner.static(1) == Owner().static(1) == 4
    assert Child.of_class(1) == (Child, 2, "wrapped")


def test_a_missing_seam_is_named_with_the_vllm_version() -> None:
    with pytest.raises(SeamError, match=r"Owner\.gone.*vLLM"):
        require(Owner, "plain", "gone")
    with pytest.raises(SeamError, match=r"Owner\.gone"):
        wrap(Owner, "gone", doubled)

    @dataclasses.dataclass
    class Options:
        known: int = 0

    require_fields(Options, "known")
    with pytest.raises(SeamError, match="gone"):
        require_fields(Options, "gone")


def test_a_missing_seam_is_named_by_its_class_where_an_object_lacks_it_and_by_its_module() -> None:
    with pytest.raises(SeamError, match=rf"vLLM seam {__name__}\.Owner\.gone, "):
        require(Owner(), "gone")
    with pytest.raises(SeamError, match=r"vLLM seam dataclasses\.gone, "):
        require(dataclasses, "gone")


def test_importing_and_registering_the_plugin_loads_no_heavy_package() -> None:
    """vLLM registers plugins in every process, also where neither torch nor an engine is wanted."""
    code = (
        "import sys, vllm_delta_plugin\n"
        "heavy = {'torch', 'vllm', 'numba', 'fastapi', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_seam_exists_in_this_vllm() -> None:
    pytest.importorskip("vllm")
    import vllm.engine.arg_utils
    import vllm.v1.engine.core as core

    from vllm_delta_plugin import register

    register()
    register()
    for name in ("status", "tensors", "read_tensor", "wait", "control", "enter", "hint", "pump"):
        assert hasattr(core.EngineCore, f"delta_sync_{name}")
    wrapped = core.EngineCore.preprocess_add_request
    assert not hasattr(wrapped.__wrapped__, "__wrapped__"), "wrapped twice"
    assert vllm.engine.arg_utils.EngineArgs.from_cli_args.__func__.__wrapped__


def test_the_api_servers_seams_exist_too_and_are_named_when_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.v1.engine.output_processor import OutputProcessor

    from vllm_delta_plugin.compat import outputs, usage

    for _ in range(2):
        outputs.install()
        usage.install()
    assert not hasattr(OutputProcessor.process_outputs.__wrapped__, "__wrapped__"), "wrapped twice"
    monkeypatch.setattr(usage, "_HOMES", ("vllm.no.such.module", "vllm.outputs"))
    with pytest.raises(SeamError, match="UsageInfo"):
        usage.install()


def test_a_key_that_vllm_renamed_is_not_taken_for_none() -> None:
    pytest.importorskip("vllm")
    from vllm_delta_plugin.routes import DeltaSyncEndpoints

    for name in ("api_key", "additional_config"):
        args = Namespace(api_key=["a key"], additional_config={}, delta_sync_admin_key=None)
        delattr(args, name)
        with pytest.raises(SeamError, match=rf"argparse\.Namespace\.{name}, "):
            asyncio.run(DeltaSyncEndpoints().init_state(None, Namespace(), args))


def test_a_client_that_does_not_say_how_many_engines_it_has_is_named_at_start() -> None:
    pytest.importorskip("vllm")
    from vllm_delta_plugin.routes import DeltaSyncEndpoints

    core = Namespace(core_engines=["one"], call_utility_async=None)
    args = Namespace(api_key=None, additional_config={}, delta_sync_admin_key=None)
    asyncio.run(DeltaSyncEndpoints().init_state(Namespace(engine_core=core), Namespace(), args))
    del core.core_engines
    with pytest.raises(SeamError, match="core_engines"):
        asyncio.run(DeltaSyncEndpoints().init_state(Namespace(engine_core=core), Namespace(), args))


def test_a_kernel_that_fp8_holds_elsewhere_is_named() -> None:
    pytest.importorskip("vllm")
    import torch

    from vllm_delta_plugin.compat import fp8_seam

    for method in fp8_seam._methods():
        bare = object.__new__(method)
        if hasattr(method, fp8_seam._KERNEL):
            with pytest.raises(SeamError, match=rf"{method.__name__}\.moe_quant_config"):
                fp8_seam.derived(torch.nn.Module(), bare)
        else:
            with pytest.raises(SeamError, match=rf"{method.__name__}\.fp8_linear"):
                fp8_seam._why_not(bare)


def test_the_seams_of_fp8_and_of_engines_that_share_experts_exist_too() -> None:
    """By name: what they do is tested where vLLM has kernels for it, which CPU builds before 0.32 have not."""
    pytest.importorskip("vllm")
    from vllm.config import ParallelConfig

    from vllm_delta_plugin.compat import fp8_seam, lockstep

    expected = {name for kinds in (fp8_seam._METHODS, fp8_seam._EXPERTS) for names in kinds.values() for name in names}
    assert {method.__name__ for method in fp8_seam._methods()} == expected
    lockstep.install()
    assert hasattr(ParallelConfig.sync_dp_state, "__wrapped__")
