"""Extraction on a GPU: compiled there, else in Triton's interpreter over host memory.

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
def test_extraction_finds_what_the_host_finds() -> None:
    cases = Path(__file__).with_name("extract_cases.py")
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(command, env={**os.environ, **interpret}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:]
