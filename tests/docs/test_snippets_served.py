"""The documentation's requests and training scripts run against a real `vllm serve` that follows a run."""

from __future__ import annotations

import re
import subprocess
import sys
from urllib.parse import urlsplit

import pytest
import shell_block
import torch
import world as worlds
from blocks import ASKS, TRAINS, of
from helpers.server import QUIET_CPU, VllmServer
from shell_block import Command, commands_of
from tallies import tally

pytestmark = pytest.mark.long
ADMIN = "ADMIN-KEY"
STEPS = 3


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server of a tiny model, at version 8 of a run, and the names that stand for both."""
    pytest.importorskip("vllm")
    from helpers.tiny_models import build

    folder = tmp_path_factory.mktemp("served")
    checkpoint = build(folder / "tiny")
    worlds.make_run(folder / "run", checkpoint)
    server = VllmServer(
        checkpoint, folder / "log", ["--delta-sync", str(folder / "run")], env={"DELTA_SYNC_ADMIN_KEY": ADMIN}
    )
    with server:
        server.wait_version(8)
        names = {"/mnt/run": str(folder / "run"), **dict.fromkeys(worlds.MODELS, str(checkpoint))}
        names |= {name: server.url if "//" in name else urlsplit(server.url).netloc for name in worlds.SERVERS}
        yield server, names


@of("bash", "console", where=lambda b: ASKS.search(b.code))
def test_requests(block, served, tmp_path):
    server, names = served
    code = worlds.World(tmp_path, tmp_path, names).real(block.code)
    commands = commands_of(code) if block.language == "console" else [Command(code, [])]
    env = {"DELTA_SYNC_ADMIN_KEY": ADMIN, **dict.fromkeys(("http_proxy", "HTTP_PROXY"), "")}
    try:
        outcome = shell_block.run(commands, tmp_path, env, recorded=("vllm",))
        shell_block.check(commands, outcome)
        assert "".join(outcome.outputs).strip(), "no answer"
    finally:
        server.headers = {"Authorization": f"Bearer {ADMIN}"}
        server.post("/delta_sync/unpin", {})  # whatever the block pinned
    tally("run", str(block))


@of("python", where=lambda b: TRAINS.search(b.code))
def test_training_scripts(block, served, tmp_path):
    """Some real steps; where the script rolls out on the server, that serves the last of them at the end."""
    server, names = served
    code = re.sub(r"max_steps=\d+", f"max_steps={STEPS}", worlds.World(tmp_path, tmp_path, names).real(block.code))
    assert f"max_steps={STEPS}" in code
    if not torch.cuda.is_available():
        code = code.replace("bf16=True", "bf16=True, use_cpu=True")
    (tmp_path / "snippet.py").write_text(code)
    before = server.status()["version"]
    done = subprocess.run(
        [sys.executable, "snippet.py"], cwd=tmp_path, env=shell_block.environment(QUIET_CPU),
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    if server.url in code:
        server.wait_version(before + STEPS)
    tally("run", str(block))
