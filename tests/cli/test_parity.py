"""What parity says before it can compare anything; comparing is tests/engine/test_cli_against_serve.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.server import free_port

from delta_sync.cli import parity
from delta_sync.errors import FormatError

ADAPTERS = Path(__file__).parents[1] / "vectors" / "ledger" / "golden-4" / "run"
HERE = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def call(run, code="", url="http://127.0.0.1:1"):
    program = f"{code}\nfrom delta_sync.cli import main\nmain()"
    words = [sys.executable, "-c", program, "parity", run.uri, "--server", url]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, env={**HERE, "COLUMNS": "200"})


def test_without_the_extra_it_says_how_to_get_it(run):
    done = call(run, "import sys; sys.modules['torch'] = None")
    assert done.returncode == 2 and done.stdout == ""
    assert "parity needs torch: pip install 'delta-weight-sync[trl]'" in done.stderr


def test_a_server_that_is_away_is_unreachable(run):
    done = call(run, url=f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 3
    assert "connection refused" in done.stderr


def test_prompts_are_lines_that_hold_something(tmp_path):
    file = tmp_path / "prompts"
    file.write_text("one\n\n  \ntwo\n")
    assert parity._prompts(["zero"], file) == ["zero", "one", "two"]
    file.write_bytes(b"caf\xe9")
    with pytest.raises(FormatError, match="expected UTF-8 text"):
        parity._prompts([], file)


def test_a_model_that_cannot_be_computed_with_is_one_clear_error(tmp_path):
    def fail(*_):
        raise AssertionError("Torch not compiled with CUDA enabled")

    with pytest.raises(FormatError, match=r"model on cuda, .*not compiled with CUDA.*--device"):
        parity._scored(SimpleNamespace(score=fail), tmp_path, [], "float32", "cuda")


def test_a_version_that_is_an_adapter_is_not_compared_with_its_base():
    with (
        pytest.raises(FormatError, match="got a LoRA adapter"),
        parity._checkpoint(str(ADAPTERS), {"version": 4}, None),
    ):
        pass
