"""The GPU's kernels: compiled on a GPU, else in Triton's interpreter over host memory.

In a process of its own, as Triton decides once, when it is imported, whether it interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_give_the_bits_and_sums_of_the_host_loops() -> None:
    cases = Path(__file__).with_name("gpu_kernel_cases.py")
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(command, env={**os.environ, **interpret}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:]


def test_weights_in_host_memory_need_no_triton() -> None:
    """CPU builds of PyTorch come without it: nothing imports the kernels before a GPU is there."""
    code = "import sys; sys.modules['triton'] = None; import vllm_delta_plugin.stage, vllm_delta_plugin.rehearsal"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
