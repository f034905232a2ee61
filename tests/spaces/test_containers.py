"""Both images in a root, a network and a user of their own: built step by step, started, asked, refused."""

import contextlib
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.container import Container, why_not
from helpers.tiny_models import build

from examples.wordle.space_files import ROOT, stage_environment, stage_rollouts

pytestmark = [  # rare: a CI that is itself a container need not let one mount and make networks
    pytest.mark.long,
    pytest.mark.rare,
    pytest.mark.skipif(why_not() is not None, reason=f"a container {why_not()}"),
]
KEY = "a-key-of-this-test"

GAME = f"""
from examples.wordle.client import WordleClient, WordleServerError
with WordleClient("http://127.0.0.1:7860", token="{KEY}") as game:
    game.reset(seed=5)
    print(game.guess("crane").marks)
try:
    WordleClient("http://127.0.0.1:7860", token="wrong").reset()
except WordleServerError as error:
    print(error.code)
"""


@pytest.fixture(scope="module")
def wordle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wordle")
    with Container(folder, stage_environment(folder / "context")) as container:
        yield container


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollouts")
    model = build(folder / "model")
    subprocess.run(["chmod", "-R", "a+rX", model], check=True)  # transformers writes weights for their owner alone
    context = stage_rollouts(folder / "context", cpu=True)
    with Container(folder, context, binds={"/models/tiny": model}) as container:
        container.forbid_writing("/home/user")
        yield container


def refusal(container, **env):
    done = subprocess.run(container.command(env), capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 1 and done.stdout == "" and len(done.stderr.splitlines()) == 1, done
    return done.stderr


@contextlib.contextmanager
def running(container, log, seconds, **env):
    """The entrypoint, healthy; ended by SIGTERM, which must reach the server."""
    with log.open("wb") as out:
        process = subprocess.Popen(container.command(env), stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + seconds
    while status(container, "/health") != 200:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.5)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            subprocess.run(["kill", "-9", f"-{process.pid}"], check=False, capture_output=True)
        process.wait(120)


def inside(container, *words):
    """The output of a command of this machine in the container's network."""
    command = ["nsenter", "--target", str(container.pid), "--net", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, cwd=ROOT).stdout.strip()


def status(container, path, key=None, body=None):
    script = f"""
import urllib.request as u, urllib.error
headers = {{"Authorization": "Bearer {key}"}} if {key!r} else {{}}
headers["Content-Type"] = "application/json"
try:
    print(u.urlopen(u.Request("http://127.0.0.1:7860{path}", {body!r}, headers), timeout=50).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError:
    print(0)
"""
    return int(inside(container, sys.executable, "-c", script) or 0)


def test_the_environment_plays_for_those_with_its_key(wordle, tmp_path):
    assert "WORDLE_ENV_TOKEN" in refusal(wordle)
    wordle.forbid_writing("/home/user")
    with running(wordle, tmp_path / "log", 200, WORDLE_ENV_TOKEN=KEY) as process:
        [uid] = re.findall(r"Uid:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
        assert uid == "1000"
        assert KEY not in Path(f"/proc/{process.pid}/cmdline").read_text()
        assert status(wordle, "/metadata") == 401 and status(wordle, "/metadata", KEY) == 200
        assert inside(wordle, sys.executable, "-c", GAME).splitlines()[-1] == "REFUSED"
        assert re.fullmatch("[GYX]{5}", inside(wordle, sys.executable, "-c", GAME).splitlines()[0])
        assert inside(wordle, "ip", "-o", "-4", "addr").split()[3] == "127.0.0.1/8"  # and no other
    assert process.returncode in (0, -signal.SIGTERM), (tmp_path / "log").read_text()  # uvicorn ends by the signal


ONLY_REQUIREMENTS = """
import importlib.metadata as m, re, sys
from packaging.requirements import Requirement
plain = lambda name: re.sub("[-_.]+", "-", name).lower()
todo, named = open("/opt/space/requirements.txt").read().splitlines(), set()
while todo:
    need = Requirement(todo.pop())
    if plain(need.name) not in named and (not need.marker or need.marker.evaluate({"extra": ""})):
        named.add(plain(need.name))
        todo += m.requires(need.name) or []
others = {top for top, owners in m.packages_distributions().items() if not named & set(map(plain, owners))}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in others:
            raise ModuleNotFoundError(f"{name} is not among the requirements", name=name)
for name in [name for name in sys.modules if name.split(".")[0] in others]:
    del sys.modules[name]
sys.meta_path.insert(0, Absent())
import guard, uvicorn.protocols.websockets.auto
from examples.wordle.env_server import create_app
assert uvicorn.protocols.websockets.auto.AutoWebSocketsProtocol and create_app(2)
print("complete", len(named), "absent", len(others) > 100)
"""


def test_the_environment_needs_no_more_than_its_requirements(wordle):
    command = wordle.command({}, ["python3", "-c", ONLY_REQUIREMENTS])
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert re.fullmatch(r"complete \d+ absent True", done.stdout.strip()), done


def test_the_rollouts_refuse_what_would_be_unsafe_or_not_work(rollouts):
    whole = {"MODEL": "/models/tiny", "DELTA_SYNC_URI": "/tmp/run", "VLLM_API_KEY": KEY}
    for name in whole:
        said = refusal(rollouts, **{**whole, name: " "})
        assert f"expected in the environment, got nothing: {name} (" in said and KEY not in said
    assert "HF_TOKEN" in refusal(rollouts, **{**whole, "DELTA_SYNC_URI": "hf://buckets/me/run"})
    assert "VLLM_SERVER_DEV_MODE" in refusal(rollouts, **whole, VLLM_SERVER_DEV_MODE="1")
    installed = [
        "python3",
        "-c",
        "import delta_sync, importlib.metadata as m; m.version('delta-weight-sync'); print(delta_sync)",
    ]
    done = subprocess.run(rollouts.command({}, installed), capture_output=True, text=True, check=True)
    assert "site-packages" in done.stdout  # RUN pip install did it: the checkout is not in there


def test_the_rollouts_serve_from_a_read_only_home_without_a_network(rollouts, tmp_path):
    small = "--enforce-eager --max-model-len 512 --max-num-seqs 2"
    threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    env = {"MODEL": "/models/tiny", "DELTA_SYNC_URI": "/tmp/run", "VLLM_API_KEY": KEY, "SERVE_ARGS": small, **threads}
    with running(rollouts, tmp_path / "log", 400, **env) as process:
        open_without = {
            p: status(rollouts, p) for p in ("/", "/health", "/v1/models", "/delta_sync/status", "/metrics")
        }
        assert open_without == {"/": 200, "/health": 200, "/v1/models": 401, "/delta_sync/status": 401, "/metrics": 401}
        ask = b'{"model": "/models/tiny", "prompt": "w5 w6", "max_tokens": 3}'
        assert status(rollouts, "/invocations", body=ask) == 401
        assert status(rollouts, "/v1/completions", KEY, ask) == status(rollouts, "/invocations", KEY, ask) == 200
        assert status(rollouts, "/delta_sync/status", KEY) == 200
        assert KEY not in Path(f"/proc/{process.pid}/cmdline").read_text()
    assert KEY not in (tmp_path / "log").read_text()
