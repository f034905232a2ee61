"""The page's server, asked as a browser would, and as nobody should."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
import time
from importlib.resources import files
from urllib.parse import urlsplit

import pytest

from delta_sync.cli.dashboard import server as server_module
from delta_sync.store.local import LocalStore


def ask(server, path, host=None, method="GET"):
    """(status, headers, body) of one request with any Host header."""
    place = urlsplit(server.url)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    if host is not False:
        connection.putheader("Host", place.netloc if host is None else host)
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read()


def state(server, last="all"):
    status, _, body = ask(server, f"/api/state?last={last}")
    assert status == 200
    return json.loads(body)


def until(server, holds, seconds=60):
    """The first state that ``holds``."""
    end = time.monotonic() + seconds
    while not holds(found := state(server)):
        assert time.monotonic() < end, f"never came: {json.dumps(found)[:2000]}"
        time.sleep(0.05)
    return found


class Events:
    """One open stream of events, read with a deadline."""

    def __init__(self, server, last="all"):
        place = urlsplit(server.url)
        self._socket = socket.create_connection((place.hostname, place.port), 60)
        self._socket.sendall(f"GET /api/events?last={last} HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
        self._file = self._socket.makefile("rb")
        self.head = self._file.readline()
        while self._file.readline().strip():
            pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()
        self._socket.close()

    def batch(self):
        """What comes up to the next time stamp: part -> document."""
        found = {}
        while True:
            line = self._file.readline().decode().strip()
            if line.startswith("event: "):
                name, data = line[7:], self._file.readline().decode().strip()[6:]
                if name == "now":
                    return found
                found[name] = json.loads(data)


def test_what_the_page_is_given_is_what_the_run_holds(run, page):
    run.acknowledge("east", 6)
    run.acknowledge("west", 4, state="refused", refused_version=5, error_kind="IntegrityError", error="no")
    server = page(run.uri)
    found = until(server, lambda found: found["run"]["complete"] and found["heat"]["layer"]["names"])
    sizes = [sum(ref.size for ref in run.manifests[v].objects) for v in range(1, 7)]
    assert found["versions"]["first"] == found["versions"]["last"] == [1, 2, 3, 4, 5, 6]
    assert found["versions"]["bytes"] == found["versions"]["bytes_max"] == sizes
    assert found["versions"]["changed"][0] is None  # an origin changes nothing
    shares = [run.manifests[v].changed_elements / run.manifests[v].total_elements for v in range(2, 7)]
    assert found["versions"]["changed"][1:] == pytest.approx(shares, rel=1e-3)
    assert found["versions"]["anchors"] == [1, 0, 0, 1, 0, 0]
    assert [row["version"] for row in found["newest"]["rows"]] == [6, 5, 4, 3, 2, 1]
    assert [(row["replica"], row["health"]) for row in found["replicas"]["rows"]] == [
        ("west", "refused"), ("east", "current"),
    ]  # fmt: skip
    assert found["run"]["chain"]["anchor"] == 4
    assert (found["run"]["chain"]["deltas"], found["run"]["chain"]["bytes"]) == (2, sum(sizes[4:]))


def test_a_publish_and_an_acknowledgement_come_by_themselves(run, page):
    server = page(run.uri)
    until(server, lambda found: found["heat"]["layer"]["names"] and None not in found["heat"]["layer"]["share"][0][1:])
    with Events(server) as events:
        assert set(events.batch()) == {"run", "versions", "newest", "replicas", "heat", "commits"}
        run.keep(run.publisher.step(9))
        seen = {}
        while seen.get("versions", {}).get("last", [0])[-1] != 7:
            seen |= events.batch()
        assert "replicas" not in seen  # what did not change is not sent again
        while seen.get("heat", {}).get("layer", {}).get("share", [[None]])[0][-1] is None:
            seen |= events.batch()
        run.acknowledge("east", 7)
        while "replicas" not in seen:
            seen |= events.batch()
        assert seen["replicas"]["rows"][0]["health"] == "current"


def test_rewards_and_times_come_from_manifests_and_acknowledgements(run, page, as_json):
    run.publisher.metrics = {"reward": 0.25, "loss": 1.5}
    run.keep(run.publisher.step(9))
    server = page(run.uri)
    until(server, lambda found: found["run"]["looked"])
    for replica, gap in (("east", 0.005), ("west", 0.009)):
        run.acknowledge(replica, 7, performance={"gap_seconds": gap, "served_seconds": 0.5, "noticed_seconds": 0.1})
    found = until(server, lambda found: found["replicas"]["count"] == 2)
    assert found["versions"]["reward"] == [None] * 6 + [0.25]
    assert found["commits"]["version"] == [7]
    assert (found["commits"]["gap_seconds"], found["commits"]["gap_seconds_max"]) == ([0.007], [0.009])
    listed = as_json("ledger", run.uri)[1]
    assert listed["versions"][-1]["metrics"] == {"reward": 0.25, "loss": 1.5}
    assert listed["replicas"][0]["performance"]["noticed_seconds"] == 0.1


def test_before_the_first_version_and_when_it_comes(tmp_path, page):
    from small_run import Run

    server = page(tmp_path / "run")
    found = until(server, lambda found: found["run"]["looked"])
    assert (found["run"]["newest"], found["run"]["problems"]) == (None, [])
    assert (found["versions"]["first"], found["heat"]["versions"], found["newest"]["rows"]) == ([], [], [])
    Run(tmp_path / "run")
    until(server, lambda found: (found["run"]["newest"] or {}).get("version") == 6)


def test_a_store_that_fails_is_a_problem_on_the_page_until_it_works_again(run, page, tmp_path):
    server = page(run.uri)
    until(server, lambda found: found["run"]["complete"])
    (run.folder / "replicas").symlink_to(tmp_path)  # which a store must not follow
    found = until(server, lambda found: found["run"]["problems"])
    assert "symbolic link" in found["run"]["problems"][0]
    assert found["run"]["newest"]["version"] == 6
    (run.folder / "replicas").unlink()
    until(server, lambda found: not found["run"]["problems"])


def test_five_thousand_versions_and_a_hundred_replicas_stay_small(long_run, page):
    server = page(long_run.folder)
    began = time.monotonic()
    first = ask(server, "/api/state")[2]
    seconds, found = time.monotonic() - began, json.loads(first)
    print(f"first data: {len(first):,} bytes after {seconds:.2f} s, {found['run']['held']:,} versions")
    assert found["run"]["newest"]["version"] == 5000  # whatever else was not read yet
    assert found["replicas"]["count"] == 100
    whole = until(server, lambda found: found["run"]["complete"] and found["heat"]["layer"]["names"], 120)
    assert whole["run"]["held"] == 5000
    versions = whole["versions"]
    assert (versions["first"][0], versions["last"][-1], versions["step"]) == (1, 5000, 32)
    assert len(versions["first"]) <= 240
    assert (sum(versions["anchors"]), sum(versions["folds"])) == (4, 4)
    assert versions["epochs"] == [{"version": 3001, "epoch": 2}]
    assert len(whole["heat"]["versions"]) <= 97
    assert whole["replicas"]["counts"] == {"refused": 1, "current": 99}
    assert whole["replicas"]["rows"][0]["replica"] == "replica-042"
    assert len(ask(server, "/api/state")[2]) < 128 * 1024
    assert state(server, 50)["versions"]["first"] == list(range(4951, 5001))


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1", "[::1]:7788", "192.168.0.7:1"])
def test_names_that_nobody_can_have_rebound(run, page, host):
    assert ask(page(run.uri), "/", host)[0] == 200


@pytest.mark.parametrize(
    "host", [False, "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "[::1", ""]
)
def test_a_name_that_was_rebound_to_this_machine_gets_nothing(run, page, host):
    server = page(run.uri)
    for path in ("/", "/api/state", "/api/events", "/app.js"):
        status, _, body = ask(server, path, host)
        assert (status, b"version" in body) == (421, False)


def test_nothing_but_the_page_is_served_and_nothing_is_written(run, page):
    server = page(run.uri)
    before = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")}
    for path in ("/../server.py", "/%2e%2e/server.py", "//etc/passwd", "/static/app.js", "/api", "/HEAD.json"):
        assert ask(server, path)[0] == 404
    assert ask(server, "/api/state?last=7")[0] == 400
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert ask(server, "/", method=method)[0] == 501
    assert ask(server, "/", method="HEAD")[2] == b""
    until(server, lambda found: found["run"]["complete"])
    assert {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")} == before


def test_every_answer_forbids_what_is_not_ours(run, page):
    server = page(run.uri)
    for path in ("/", "/app.js", "/api/state", "/nothing"):
        headers = ask(server, path)[1]
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy and "http" not in policy
        assert "Access-Control-Allow-Origin" not in headers
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_the_page_needs_no_other_host():
    static = [entry for entry in (files("delta_sync.cli.dashboard") / "static").iterdir() if entry.is_file()]
    assert {"index.html", "app.js", "style.css"} <= {entry.name for entry in static}
    for entry in static:
        text = entry.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.[a-z]|innerHTML|eval\(|style=\"", text), entry.name


def test_pages_beyond_the_most_are_refused_and_a_closed_one_makes_room(run, page, monkeypatch):
    monkeypatch.setattr(server_module, "PAGES", 1)
    server = page(run.uri)
    with Events(server) as first:
        first.batch()
        assert ask(server, "/api/events")[0] == 503
    end = time.monotonic() + 30
    while ask(server, "/api/events", method="HEAD")[0] == 503:
        assert time.monotonic() < end
        run.acknowledge("east", 6, time=time.time())  # what is written to a closed page tells that it is closed
        time.sleep(0.1)


def test_an_ipv6_loopback(run, page):
    try:
        server = page(run.uri, host="::1")
    except OSError as error:
        pytest.skip(f"this machine has no IPv6 loopback: {error}")
    assert server.url.startswith("http://[::1]:")
    assert ask(server, "/")[0] == 200


def test_the_command_serves_until_ctrl_c_and_says_where(run):
    import signal

    command = [sys.executable, "-m", "delta_sync.cli", "ui", run.uri, "--no-browser", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)
    try:
        url = process.stdout.readline().split()[0]
        port = urlsplit(url).port
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/api/state")
        assert json.loads(connection.getresponse().read())["run"]["uri"] == LocalStore(run.folder).uri
        taken = [*command[:-1], str(port)]
        second = subprocess.run(taken, capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 2
        assert "Remedy: another --port" in second.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait(60)
