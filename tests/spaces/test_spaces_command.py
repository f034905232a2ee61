"""`python -m examples.wordle.spaces`: the real huggingface_hub client, over HTTP, on the tests' stand-in for Spaces."""

import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers.hub import TestHub
from helpers.hub.server import READ_TOKEN, WRITE_TOKEN
from helpers.hub.spaces_stand_in import SpaceStandIn
from huggingface_hub import SpaceRuntime

from examples.wordle.space_repo import Upload
from examples.wordle.space_wait import SETTLE, Build

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


def test_the_space_has_the_token_that_this_run_names(hub, spaces):
    """A run without one gives it the account's own, which may do all: it must not stay."""
    assert spaces("--flavor", "cpu").returncode == 0
    space = hub.api.spaces.spaces["tester/wordle-rollouts"]
    assert space.secrets["HF_TOKEN"] == WRITE_TOKEN
    kept = space.secrets["VLLM_API_KEY"]
    assert spaces("--flavor", "cpu", SPACE_HF_TOKEN="hf_less").returncode == 0
    assert space.secrets == {"HF_TOKEN": "hf_less", "VLLM_API_KEY": kept}

    hub.requests.clear()
    assert spaces("--flavor", "cpu", SPACE_HF_TOKEN="hf_less").returncode == 0
    assert not [r for r in hub.requests if r.method == "POST" and r.path.endswith("/secrets")]  # nor a restart
    space.descriptions.clear()  # as of a Space by an older version: nobody knows which token it has
    space.secrets["HF_TOKEN"] = WRITE_TOKEN
    done = spaces("--flavor", "cpu", SPACE_HF_TOKEN="hf_less")
    assert space.secrets["HF_TOKEN"] == "hf_less" and "hf_less" not in done.stdout + done.stderr


def test_a_public_bucket_is_refused(hub, spaces):
    hub.new_bucket("tester/wordle", private=False)
    done = spaces("--flavor", "cpu")
    assert done.returncode == 1 and hub.api.spaces.spaces == {}
    assert "bucket tester/wordle: expected a private one, got a public one" in done.stderr and "--name" in done.stderr
    hub.new_bucket("tester/other", private=True)
    assert spaces("--flavor", "cpu", "--name", "other").returncode == 0


@pytest.mark.parametrize("name", ["env", "rollouts"])
def test_somebody_elses_space_is_neither_replaced_nor_deleted(hub, spaces, name):
    space = SpaceStandIn(f"tester/wordle-{name}", files={"app.py": b"theirs"}, commits=1, stage="RUNNING")
    hub.api.spaces.spaces[space.id] = space
    done = spaces("--flavor", "cpu")
    assert done.returncode == 1 and f"{space.id}: expected no Space, or one with the variable MADE_BY=" in done.stderr
    assert "Remedy: another --name" in done.stderr
    assert space.files == {"app.py": b"theirs"} and space.variables == {} and not space.secrets
    assert list(hub.api.spaces.spaces) == [space.id] and hub.api.buckets == {}

    done = spaces("--teardown", "--yes")
    assert done.returncode == 0 and f"{space.id}: kept" in done.stderr and space.id in hub.api.spaces.spaces


def test_a_first_run_that_was_cut_short_leaves_a_space_that_is_known(hub, spaces):
    hub.faults.add("status", "POST /api/spaces/tester/wordle-env/commit", times=1, status=403)
    assert spaces("--flavor", "cpu").returncode == 1
    assert hub.api.spaces.spaces["tester/wordle-env"].files == {}
    assert spaces("--flavor", "cpu").returncode == 0


def test_teardown_leaves_what_else_is_in_the_bucket(hub, spaces):
    assert spaces("--flavor", "cpu").returncode == 0
    files = hub.api.buckets["tester/wordle"].files
    for path in ("run-1/a", "run-1/b/c", "run-10/a", "thesis.pdf"):
        hub.api.buckets["tester/wordle"].put(path, 0, "0" * 64, 0.0)
    done = spaces("--teardown", "--yes")
    assert done.returncode == 0 and set(files) == {"run-10/a", "thesis.pdf"}
    assert "2 objects of run-1 are gone; the bucket is kept, as it holds run-10, thesis.pdf too" in done.stderr
    assert hub.api.spaces.spaces == {}

    del files["thesis.pdf"]
    assert spaces("--teardown", "--yes", "--run", "run-10").returncode == 0 and hub.api.buckets == {}


@pytest.mark.parametrize("before", ["RUNNING", "BUILD_ERROR"])
def test_a_build_is_not_judged_by_the_one_before_it(hub, spaces, before):
    assert spaces("--flavor", "cpu").returncode == 0
    space = hub.api.spaces.spaces["tester/wordle-rollouts"]
    space.stage, space.log = before, "the old log"
    space.files["source/delta_sync/removed_since.py"] = b"old"
    hub.api.spaces.lag, hub.api.spaces.building = 2.5, 2.5  # the old stage is seen, and so is the building
    done = spaces("--flavor", "cpu")
    assert done.returncode == 0, done.stderr
    assert space.built == space.head == f"{2:040d}"
    assert "the old log" not in done.stderr


def told(*stages, fresh=True, age=0.0):
    """Of each (stage, commit that runs) in a row: whether it counts for commit "new", uploaded ``age`` seconds ago."""
    build = Build(Upload("new", fresh, at=time.monotonic() - age))
    return [build.judges(SpaceRuntime({"stage": stage, **({"sha": sha} if sha else {})})) for stage, sha in stages]


def test_what_counts_of_what_the_hub_says():
    assert told(("RUNNING", "new")) == [True]
    after = told(("RUNNING_BUILDING", "old"), ("RUNNING", "old"), ("RUNNING_APP_STARTING", "old"), ("RUNNING", "new"))
    assert after[1::2] == [False, True]
    assert told(("RUNNING", "old"), age=SETTLE) == [False]  # never, however long it stays
    for sha in ("old", None):  # a failed build serves nothing that could be named
        assert told(("BUILD_ERROR", sha), ("BUILDING", sha), ("BUILD_ERROR", sha))[::2] == [False, True]
        assert told(("BUILD_ERROR", sha), age=SETTLE) == [True]
    # no commit at all, or one that was running before the settings changed
    for sha, fresh in ((None, True), ("new", False)):
        assert told(("RUNNING", sha), ("APP_STARTING", sha), ("RUNNING", sha), fresh=fresh)[::2] == [False, True]
        assert told(("RUNNING", sha), fresh=fresh, age=SETTLE) == [True]


def test_a_restart_by_a_new_setting_is_waited_for(hub, spaces):
    """The commit stays the same, so its number does not tell the old server from the new one."""
    assert spaces("--flavor", "cpu").returncode == 0
    space, served = hub.api.spaces.spaces["tester/wordle-rollouts"], []
    build = hub.api.spaces.build
    hub.api.spaces.build = lambda space: (served.append(space.variables["MODEL"]), build(space))[1]
    hub.api.spaces.lag, hub.api.spaces.building = 2.5, 2.5
    assert spaces("--flavor", "cpu", "--model", "other/model").returncode == 0
    assert served == ["other/model"] and space.commits == 1


def test_an_older_build_that_stays_is_named_at_the_deadline(hub, spaces):
    assert spaces("--flavor", "cpu").returncode == 0
    space = hub.api.spaces.spaces["tester/wordle-rollouts"]
    space.files["source/delta_sync/removed_since.py"] = b"old"
    hub.api.spaces.lag = 30.0
    done = spaces("--flavor", "cpu", "--timeout", "3")
    assert done.returncode == 1 and "expected RUNNING in time, got RUNNING of the build before" in done.stderr


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
    hub.faults.add("drop", "GET /api/spaces/tester/wordle-env$", times=1, skip=1)
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
