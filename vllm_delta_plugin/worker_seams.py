"""Everything that must be hooked in a worker process before it loads a model."""

from __future__ import annotations


def install() -> None:
    """Install the load seam, and on CPU the seams that keep weights plain; SeamError names what vLLM lacks."""
    from vllm.platforms import current_platform

    from vllm_delta_plugin.compat import cpu_conv_seam, cpu_gemm_seam, cpu_moe_seam, fp8_seam, load_seam

    load_seam.install()
    fp8_seam.install()
    if current_platform.is_cpu():
        cpu_conv_seam.install()
        cpu_gemm_seam.install()
        cpu_moe_seam.install()
