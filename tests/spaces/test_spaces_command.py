"""`python -m examples.wordle.spaces`: the real huggingface_hub client, over HTTP, on the tests' stand-in for Spaces."""

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers.hub import TestHub
from helpers.hub.server import READ_TOKEN, WRITE_TOKEN

ROOT = Path(__file__).resolve().parents[2]


class Keyed(BaseHTTPRequestHandler):
    """A Space's app as far as it is asked: /health is open, the rest wants the Space's key."""

    def do_GET(self):
        ok = self.path == "/health" or self.headers.get("Authorization") in self.server.keys
        self.send_response(200 if ok else 401)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    app = ThreadingHTTPServer(("127.0.0.1", 0), Keyed)
    app.keys = set()
    threading.Thread(target=app.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    with TestHub() as hub:

        def build(space):
            keys = [space.secrets.get(name) for name in ("VLLM_API_KEY", "WORDLE_ENV_TOKEN")]
            app.keys |= {f"Bearer {key}" for key in keys if key}
            space.host = f"http://127.0.0.1:{app.server_port}"
            return "RUNNING"

        hub.api.spaces.build = build
        yield hub
    app.shutdown()
    app.server_close()


@pytest.fixture
def spaces(hub, tmp_path):
    """Run the command; its keys and its idea of who is logged in are the test's own."""

    def run(*words, token=WRITE_TOKEN, **more):
        clean = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy") and not k.startswith("HF_")}
        env = {**clean, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT), **more}
        env |= {"HF_TOKEN": token} if token else {}
        command = [sys.executable, "-m", "examples.wordle.spaces", "--keys", str(tmp_path / "keys.env"), *words]
        return subprocess.run(
            command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
        )

    return run


def test_from_nothing_to_a_training_command_and_back(hub, spaces, tmp_path):
    done = spaces()
    assert done.returncode == 0, done.stderr
    env, rollouts = (hub.api.spaces.spaces[f"tester/wordle-{name}"] for name in ("env", "rollouts"))
    assert hub.api.buckets["tester/wordle"].private
    assert rollouts.hardware == "l4x1" and rollouts.sleep_time == 3600 and env.hardware == "cpu-basic"
    assert rollouts.variables["DELTA_SYNC_URI"] == "hf://buckets/tester/wordle/run-1"
    assert rollouts.variables["MODEL"] == "Qwen/Qwen3-1.7B"
    assert set(rollouts.secrets) == {"VLLM_API_KEY", "HF_TOKEN"} and set(env.secrets) == {"WORDLE_ENV_TOKEN"}
    assert {"Dockerfile", "README.md", "entrypoint.py", "guard.py", "source/pyproject.toml"} <= set(rollouts.files)
    assert "source/examples/wordle/data/answers.txt" in env.files
    assert not [path for path in [*rollouts.files, *env.files] if "__pycache__" in path]

    [command] = done.stdout.splitlines()
    assert (
        f"--vllm {rollouts.host} --env {env.host}" in command and "--bucket hf://buckets/tester/wordle/run-1" in command
    )
    keys = (tmp_path / "keys.env").read_text()
    assert f"export VLLM_API_KEY={rollouts.secrets['VLLM_API_KEY']}\n" in keys
    assert (tmp_path / "keys.env").stat().st_mode & 0o077 == 0
    said = done.stdout + done.stderr
    assert not [secret for secret in [*rollouts.secrets.values(), *env.secrets.values()] if secret in said]

    before = (rollouts.commits, env.commits, dict(rollouts.secrets), len(hub.requests))
    again = spaces()
    assert again.returncode == 0 and again.stdout == done.stdout
    assert (rollouts.commits, env.commits) == (1, 1), "each commit is built"
    assert (rollouts.commits, env.commits, dict(rollouts.secrets)) == before[:3]  # nothing that would restart a Space
    changes = [
        r.path for r in hub.requests[before[3] :] if r.method == "POST" and r.path.endswith(("secrets", "hardware"))
    ]
    assert changes == []

    refused = spaces("--teardown")
    assert refused.returncode == 2 and "nothing was deleted" in refused.stderr and len(hub.api.spaces.spaces) == 2
    assert spaces("--teardown", "--yes", "--dry-run").returncode == 0 and len(hub.api.spaces.spaces) == 2
    assert spaces("--teardown", "--yes").returncode == 0
    assert hub.api.spaces.spaces == {} and hub.api.buckets == {} and not (tmp_path / "keys.env").exists()
    assert spaces("--teardown", "--yes").returncode == 0  # twice is fine


def test_a_dry_run_changes_nothing(hub, spaces, tmp_path):
    done = spaces("--dry-run", "--flavor", "cpu")
    assert done.returncode == 0 and "tester/wordle-rollouts  (cpu-basic, free; HuggingFaceTB" in done.stderr
    assert hub.api.spaces.spaces == {} and hub.api.buckets == {} and not (tmp_path / "keys.env").exists()


def test_a_changed_setting_and_a_changed_file_arrive(hub, spaces):
    assert spaces("--flavor", "cpu").returncode == 0
    space = hub.api.spaces.spaces["tester/wordle-rollouts"]
    assert b"ARG VLLM_IMAGE=vllm/vllm-openai-cpu:" in space.files["Dockerfile"]
    space.files["source/delta_sync/removed_since.py"] = b"old"
    secrets = dict(space.secrets)
    assert spaces("--flavor", "gpu", "--hardware", "a10g-small", "--new-keys").returncode == 0
    assert b"ARG VLLM_IMAGE=vllm/vllm-openai:" in space.files["Dockerfile"]
    assert "source/delta_sync/removed_since.py" not in space.files
    assert space.hardware == "a10g-small" and space.variables["MODEL"] == "Qwen/Qwen3-1.7B"
    assert space.secrets["VLLM_API_KEY"] != secrets["VLLM_API_KEY"]


def test_a_space_that_sleeps_is_woken_and_one_that_fails_shows_its_log(hub, spaces):
    assert spaces("--flavor", "cpu").returncode == 0
    space = hub.api.spaces.spaces["tester/wordle-rollouts"]
    space.stage = "PAUSED"
    assert spaces("--flavor", "cpu").returncode == 0 and space.restarts == 1

    def fails(space):
        raise RuntimeError("no space left on device")

    hub.api.spaces.build = fails
    done = spaces("--flavor", "cpu", "--model", "other/model")
    assert done.returncode == 1 and "BUILD_ERROR" in done.stderr and "no space left on device" in done.stderr


def test_a_network_that_fails_while_it_waits_is_said_once_and_outlived(hub, spaces):
    runtime = "GET /api/spaces/tester/wordle-{}/runtime"  # each Space's settings ask once, before any waiting
    hub.faults.add("drop", runtime.format("env"), times=2, skip=1)
    hub.faults.add("status", runtime.format("rollouts"), times=2, skip=1, status=503)
    hub.faults.add("drop", "GET /api/spaces/tester/wordle-env$", times=1)
    done = spaces("--flavor", "cpu")
    assert done.returncode == 0, done.stderr
    assert hub.faults.met["drop"] >= 3 and hub.faults.met["status 503"] == 2
    said = [line for line in done.stderr.splitlines() if "asking again" in line]
    assert said and len(said) == len(set(said))

    hub.faults.add("status", runtime.format("env"), status=503, skip=1)
    done = spaces("--flavor", "cpu", "--timeout", "3")
    assert done.returncode == 1 and "503" in done.stderr and "Traceback" not in done.stderr


def test_what_never_gets_up_meets_the_deadline(hub, spaces):
    hub.api.spaces.build = lambda space: "APP_STARTING"
    done = spaces("--flavor", "cpu", "--timeout", "1")
    assert done.returncode == 1 and "expected RUNNING in time, got APP_STARTING" in done.stderr


@pytest.mark.parametrize(
    ("token", "words", "said"),
    [
        (READ_TOKEN, (), "403"),
        ("", (), "hf auth login"),
        (WRITE_TOKEN, ("--hardware", "l4x1"), "a payment method"),
    ],
)
def test_what_the_account_may_not_do_is_said_with_a_remedy(hub, spaces, tmp_path, token, words, said):
    hub.api.spaces.paid = False
    done = spaces(*words, token=token)
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "keys.env").exists()  # the next run makes keys anew, and sets them in both Spaces


@pytest.mark.parametrize(
    ("words", "more", "said"),
    [
        ([], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "is the network up, and HF_ENDPOINT right?"),
        (["--keys", "/dev/null/keys.env"], {}, "name another with --keys"),
    ],
)
def test_a_hub_out_of_reach_or_a_file_that_cannot_be_is_one_line(spaces, words, more, said):
    done = spaces(*words, **more)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert WRITE_TOKEN not in done.stderr
