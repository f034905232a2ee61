"""Both entrypoints refuse a secret that no client could send, in one line that does not show it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from delta_sync.bearer import bearer
from delta_sync.errors import FormatError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docker"))
from guard import Guard, unusable

DOCKER = Path(__file__).resolve().parents[2] / "docker"
WHOLE = {"MODEL": "m", "DELTA_SYNC_URI": "hf://buckets/me/b/run-1", "VLLM_API_KEY": "key", "HF_TOKEN": "hf_token"}


def started(space, env):
    """The entrypoint with a PATH on which there is no vllm: what is not refused fails at the very end."""
    clean = {"PATH": "/nowhere", "PYTHONPATH": os.pathsep.join((str(DOCKER), str(DOCKER.parent))), "HOME": "/tmp"}
    command = [sys.executable, DOCKER / space / "entrypoint.py"]
    return subprocess.run(command, env={**clean, **env}, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("around", ["{}\n", " {}", "{}\r\n", "{}\t", "{}\u00e9"])
@pytest.mark.parametrize(
    ("space", "env", "name"),
    [
        ("vllm-space", WHOLE, "VLLM_API_KEY"),
        ("vllm-space", WHOLE, "HF_TOKEN"),
        ("vllm-space", WHOLE, "DELTA_SYNC_ADMIN_KEY"),
        ("wordle-space", {}, "WORDLE_ENV_TOKEN"),
    ],
)
def test_a_secret_that_no_client_could_send_is_refused(space, env, name, around):
    done = started(space, {**env, name: around.format("s3cret")})
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert f"{space}: {name}: expected printable ASCII on one line" in done.stderr and "Remedy: " in done.stderr
    assert "s3cret" not in done.stdout + done.stderr


def test_what_is_whole_gets_as_far_as_the_server():
    done = started("vllm-space", WHOLE)
    assert done.stdout.startswith("vllm-space: vllm serve m ") and "FileNotFoundError" in done.stderr


@given(st.text(max_size=20))
def test_guard_and_clients_refuse_the_same_keys(key):
    try:
        bearer(key)
        sendable = True
    except FormatError:
        sendable = False
    assert (unusable(key) is None) == sendable


def test_a_guard_refuses_a_key_that_no_client_could_send():
    with pytest.raises(ValueError, match="on one line") as caught:
        Guard(FastAPI(), keys=["good", "s3cret\n"])
    assert "s3cret" not in str(caught.value)
