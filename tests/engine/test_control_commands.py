"""delta-sync pin, unpin, rollback and reload against the real routes, which ask replicas over in-memory ranks."""

# ruff: noqa: F811
from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from helpers.publish import Publisher
from helpers.server import free_port
from test_coordinator import Replica, anchor, replica_of, trainer, uri, weights  # noqa: F401
from typer.testing import CliRunner

from delta_sync.cli.app import app as command_line
from vllm_delta_plugin import control_routes
from vllm_delta_plugin.api_key import AdminKey, KeyRing
from vllm_delta_plugin.routes import status, tensors

KEY = "a-very-secret-admin-key"


class Engines:
    """What the routes know of engines: a way to call each, here straight to a replica's coordinator."""

    def __init__(self, *replicas: Replica) -> None:
        self.errored = False
        self.engine_core = SimpleNamespace(
            core_engines=replicas,
            _call_utility_async=self.call,
            call_utility_async=partial(self.call, engine=replicas[0]),
        )

    async def call(self, method: str, *args: Any, engine: Replica) -> Any:
        coordinator = engine.coordinator
        if method == "delta_sync_status":
            return engine.status
        if method == "delta_sync_tensors":
            return await asyncio.wrap_future(coordinator.scan()) if args[0] else coordinator.tensors()
        assert method == "delta_sync_control"
        return await asyncio.wrap_future(coordinator.command(*args[:-1]))


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """The routes of one replica, or of several as one server's engines, on a port of this machine; the URL."""
    servers: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(*replicas: Replica, admin: str | None = KEY, keys: list[str] | None = None) -> str:
        app = FastAPI()
        app.add_api_route("/delta_sync/status", status, methods=["GET"])
        app.add_api_route("/delta_sync/tensors", tensors, methods=["GET"])
        control_routes.attach(app)
        app.state.delta_sync_engine, app.state.delta_sync_keys = Engines(*replicas), KeyRing(keys)
        with pytest.MonkeyPatch.context() as server_environment:  # the command's is another
            server_environment.delenv("DELTA_SYNC_ADMIN_KEY", raising=False)
            app.state.delta_sync_admin = AdminKey(admin)
        port = free_port()
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        servers.append((server, thread))
        deadline = time.monotonic() + 120
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return f"http://127.0.0.1:{port}"

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join(10)


@pytest.fixture
def replica(trainer: Publisher, replica_of: Any) -> Replica:
    """At version 4 of 4."""
    trainer.origin()
    replica = replica_of().start()
    for seed in range(3):
        trainer.step(seed, 0.5)
    replica.wait_version(4)
    return replica


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Any, str]]:
    """(exit code, document or text, standard error), with the admin key in the environment."""
    monkeypatch.setenv("DELTA_SYNC_ADMIN_KEY", KEY)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)

    def call(*words: Any, answer: str | None = None) -> tuple[int, Any, str]:
        done = CliRunner().invoke(command_line, [str(word) for word in words], input=answer)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert KEY not in done.output
        return done.exit_code, json.loads(done.stdout) if "--json" in words else done.stdout, done.stderr

    return call


def only(document: dict[str, Any]) -> dict[str, Any]:
    [row] = document["servers"]
    return row


def test_back_held_and_on_again(replica: Replica, serve: Any, cli: Any, trainer: Publisher) -> None:
    url = serve(replica)
    code, found, _ = cli("rollback", "--server", url, "--version", 2, "--yes", "--json")
    assert (code, found["done"], only(found)["result"]) == (0, 1, "done")
    assert (only(found)["serves"], only(found)["pinned"], only(found)["newest"]) == (2, 2, 4)
    trainer.step(9)
    code, found, _ = cli("pin", "--server", url, "--version", 3, "--json")
    assert (code, only(found)["serves"], only(found)["pinned"]) == (0, 3, 3)
    assert cli("unpin", "--server", url)[0] == 0
    assert replica.wait_version(5)["pinned"] is None
    code, found, _ = cli("pin", "--server", url, "--json")
    assert (code, only(found)["serves"], only(found)["pinned"]) == (0, 5, 5)
    code, found, _ = cli("reload", "--server", url, "--json")
    assert code == 1 and "anchor" in only(found)["error"]  # nothing to compare with
    anchor(trainer, trainer.writer.head)
    code, found, _ = cli("reload", "--server", url, "--json")
    assert (code, only(found)["state"]) == (0, "live")
    assert replica.executor.equal(trainer.weights)


def test_a_rollback_asks(replica: Replica, serve: Any, cli: Any) -> None:
    url = serve(replica)
    code, _, err = cli("rollback", "--server", url, "--version", 2, answer="n\n")
    assert code == 1 and "Take 1 server back to version 2?" in err
    assert replica.status["version"] == 4
    assert cli("rollback", "--server", url, "--version", 2, answer="y\n")[0] == 0
    assert replica.status["version"] == 2


@pytest.mark.parametrize("action", [["rollback", "--version", 2], ["pin"], ["unpin"], ["reload"]])
def test_a_dry_run_changes_nothing(
    replica: Replica, serve: Any, cli: Any, trainer: Publisher, action: list[Any]
) -> None:
    url = serve(replica)
    anchor(trainer, trainer.writer.head)
    same = ("version", "pinned", "state_digest", "commits", "anchors_taken", "acknowledged_version")
    before = {name: replica.status.get(name) for name in same}
    code, found, _ = cli(*action, "--server", url, "--dry-run", "--json")
    assert (code, found["done"], only(found)["result"], only(found)["serves"]) == (0, 0, f"would {action[0]}", 4)
    assert {name: replica.status.get(name) for name in same} == before
    assert replica.executor.equal(trainer.weights)


def test_a_dry_run_finds_what_the_order_would_be_refused_for(
    replica: Replica, serve: Any, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, off, other = serve(replica), serve(replica, admin=None), serve(replica, admin="another")
    code, found, _ = cli("pin", "--server", good, "--server", off, "--server", other, "--dry-run", "--json")
    assert (code, [(row["result"], row["http_status"]) for row in found["servers"]]) == (
        1, [("would pin", 200), ("failed", 404), ("failed", 401)],
    )  # fmt: skip
    assert "control is off" in found["servers"][1]["error"]
    for words, reason in (
        (["rollback", "--version", 77], "77"),
        (["pin", "--version", 3], "use rollback"),
        (["pin", "--version", 99], "99"),
        (["reload"], "anchor"),
    ):
        code, found, _ = cli(*words, "--server", good, "--dry-run", "--json")
        assert (code, only(found)["http_status"]) == (1, 409) and reason in only(found)["error"], words
        words += ["--yes"] if words[0] == "rollback" else []
        assert cli(*words, "--server", good, "--json")[1]["servers"][0]["error"] == only(found)["error"]
    code, found, _ = cli("pin", "--server", f"http://127.0.0.1:{free_port()}", "--dry-run", "--json")
    assert (code, only(found)["result"]) == (3, "failed")
    monkeypatch.delenv("DELTA_SYNC_ADMIN_KEY")
    monkeypatch.setenv("VLLM_API_KEY", "some")
    assert cli("pin", "--server", good, "--dry-run")[0] == 2  # as the order itself


def test_each_server_is_reported_when_some_fail(replica: Replica, serve: Any, cli: Any) -> None:
    good, off, other = serve(replica), serve(replica, admin=None), serve(replica, admin="another")
    words = ("pin", "--server", good, "--server", off, "--server", other)
    code, found, _ = cli(*words, "--json")
    assert (code, found["done"], found["failed"]) == (1, 1, 2)
    assert [(row["server"], row["result"], row["http_status"]) for row in found["servers"]] == [
        (good, "done", 200), (off, "failed", 404), (other, "failed", 401),
    ]  # fmt: skip
    assert "control is off" in found["servers"][1]["error"]
    nobody = f"http://127.0.0.1:{free_port()}"
    code, out, _ = cli(*words, "--server", nobody)
    assert code == 3
    assert "connection refused" in next(line for line in out.splitlines() if line.startswith(nobody))


def test_what_a_replica_cannot_do_is_said(replica: Replica, serve: Any, cli: Any) -> None:
    url = serve(replica)
    code, found, _ = cli("rollback", "--server", url, "--version", 77, "--yes", "--json")
    assert (code, only(found)["http_status"], only(found)["serves"]) == (1, 409, 4)
    assert "77" in only(found)["error"]


@pytest.mark.parametrize("action", ["rollback", "pin"])
@pytest.mark.parametrize("version", [0, -1])
def test_there_is_no_version_before_the_first(
    replica: Replica, serve: Any, cli: Any, action: str, version: int
) -> None:
    url = serve(replica)
    for method in ("GET", "POST"):
        path = f"{url}/delta_sync/{action}?version={version}"
        request = urllib.request.Request(path, method=method, headers={"Authorization": f"Bearer {KEY}"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        with refused.value as answer:
            assert (answer.code, "takes a version from 1 on" in answer.read().decode()) == (400, True)
    assert replica.coordinator.command(action, version, 10).result(20)["code"] == 409
    assert cli(action, "--server", url, "--version", version)[0] == 2
    assert (replica.status["version"], replica.status["pinned"]) == (4, None)


def test_wrong_usage(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def code(*words: Any) -> int:
        done = CliRunner().invoke(command_line, [str(word) for word in words])
        assert "pass" not in done.output.replace("password", "")
        return done.exit_code

    assert code("pin", "--server", "not-a-url") == 2
    assert code("pin", "--server", "http://me:pass@host:8000") == 2
    assert code("pin") == 2
    assert code("rollback", "--server", "http://127.0.0.1:1", "--version", 2, "--json") == 2  # nobody can be asked
    monkeypatch.delenv("DELTA_SYNC_ADMIN_KEY")
    assert code("pin", "--server", "http://127.0.0.1:1") == 2


def test_the_key_is_not_sent_on_to_another_place(cli: Any) -> None:
    seen: list[str] = []

    class Redirects(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(self.path)
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Redirects)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code, found, _ = cli("pin", "--server", f"http://127.0.0.1:{server.server_port}", "--json")
    server.shutdown()
    assert (code, only(found)["http_status"], seen) == (1, 302, ["/delta_sync/pin"])


def test_as_a_process_the_key_is_in_no_argument_and_no_output(replica: Replica, serve: Any) -> None:
    url = serve(replica)
    words = [sys.executable, "-m", "delta_sync.cli", "pin", "--server", url]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "DELTA_SYNC_ADMIN_KEY": KEY}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert KEY not in done.stdout and "pin" in done.stdout
    assert replica.status["pinned"] == 4


def got(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.loads(answer.read())


@pytest.fixture
def two(trainer: Publisher, replica: Replica, replica_of: Any) -> tuple[Replica, Replica]:
    """Two engines of one server, at version 4 of 4."""
    second = replica_of().start()
    second.wait_version(4)
    return replica, second


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_scan_of_several_engines_is_of_all(two: tuple[Replica, Replica], serve: Any, guilty: int) -> None:
    """One that finds other bits than were proven is the one whose tensors are shown."""
    url = serve(*two)
    found = got(f"{url}/delta_sync/tensors")
    assert (found["version"], [engine["version"] for engine in found["engines"]]) == (4, [4, 4])
    for rank in two[guilty].executor.ranks:
        rank.live["norm"][0] ^= 1
    found = got(f"{url}/delta_sync/tensors?scan=1")
    assert (found["engine"], found["version"]) == (guilty, None)
    assert [engine["version"] for engine in found["engines"]] == [4 if at != guilty else None for at in (0, 1)]
    assert len({engine["state_digest"] for engine in found["engines"]}) == 2
    status = got(f"{url}/delta_sync/status")
    assert (status["state"], [engine["state"] == "poisoned" for engine in status["engines"]]) == (
        "poisoned", [at == guilty for at in (0, 1)],
    )  # fmt: skip


def test_engines_that_serve_different_versions_are_pinned_at_one(
    two: tuple[Replica, Replica], serve: Any, cli: Any
) -> None:
    assert two[0].coordinator.command("rollback", 2, 10).result(20)["ok"]
    code, found, _ = cli("pin", "--server", serve(*two), "--json")
    assert (code, only(found)["serves"], only(found)["pinned"]) == (0, 4, 4)
    assert [replica.status["pinned"] for replica in two] == [4, 4]
    assert two[0].executor.equal(two[1].executor.ranks[0].live)


@pytest.mark.parametrize("dry_run", [False, True])
def test_what_one_engine_cannot_do_none_does(two: tuple[Replica, Replica], serve: Any, cli: Any, dry_run: bool) -> None:
    assert two[1].coordinator.command("rollback", 2, 10).result(20)["ok"]
    words = ["rollback", "--server", serve(*two), "--version", 3, "--yes", "--json"]
    code, found, _ = cli(*words, *(["--dry-run"] if dry_run else []))
    assert (code, only(found)["http_status"]) == (1, 409)
    assert "engine 1: rollback, expected version 2 or an older one" in only(found)["error"]
    assert "nothing was done" in only(found)["error"]
    assert [replica.status["version"] for replica in two] == [4, 2]


def test_what_one_engine_fails_at_half_way_is_said_with_who_did_it(
    two: tuple[Replica, Replica], serve: Any, cli: Any
) -> None:
    two[1].executor.ranks[0].fail = {"commit"}
    code, found, _ = cli("rollback", "--server", serve(*two), "--version", 3, "--yes", "--json")
    assert (code, only(found)["http_status"]) == (1, 409)
    assert "engine 1: rank 0: commit fails" in only(found)["error"]
    assert "done on engine 0" in only(found)["error"]
    assert [replica.status["version"] for replica in two] == [3, 4]
