"""What a bucket holds may be hostile: the terminal, a document and the page take no harm, and say the rest."""

from __future__ import annotations

import json
import logging
import socket
import struct
import time
import urllib.request

import pytest

from delta_sync.cli.dashboard.heat import HeatMap
from delta_sync.cli.report import age
from delta_sync.cli.run import open_ledger

STEERING = "\ud800\x9b2J\x1b]0;title\x07\u202e<script>alert(1)</script>\x7f\r\n"
LARGEST = 1.7976931348623157e308


def raw_acknowledgement(run, replica, **said):
    run.acknowledge(replica, 6)
    path = run.folder / "replicas" / f"{replica}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))


def no_constant(name):
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize("command", [["ledger"], ["watch", "--for", "0"]])
def test_documents_are_json_in_ascii_whatever_a_replica_says(run, cli, command):
    raw_acknowledgement(run, "evil", state="refused", refused_version=6, error=STEERING)
    code, out, _ = cli(*command, run.uri, "--json")
    assert code == 1
    assert out.isascii()
    assert "\x1b" not in out
    said = json.loads(out) if command == ["ledger"] else {"replicas": [json.loads(out.splitlines()[-1])]}
    assert said["replicas"][0]["error"] == STEERING


def test_numbers_that_are_no_times_keep_the_table_narrow(run, cli):
    raw_acknowledgement(run, "late", time=LARGEST, performance={"stage_seconds": LARGEST, "served_seconds": -LARGEST})
    code, out, _ = cli("ledger", run.uri)
    assert code == 0
    assert max(map(len, out.splitlines()[1:])) < 140  # the first has the folder's name
    assert age(-LARGEST).endswith("d")


def test_an_unreadable_acknowledgement_is_named_and_told_once(run, caplog):
    (run.folder / "replicas").mkdir(exist_ok=True)
    (run.folder / "replicas" / "half.json").write_bytes(b"{")
    (run.folder / "replicas" / "a\x1b[31m.json").write_bytes(b"{}")
    ledger = open_ledger(run.uri)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert ledger.acknowledgements() == {}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert any(line.startswith("left out acknowledgement replicas/half.json: ") for line in said)
    assert all(line.isprintable() for line in said)


def test_the_page_gets_json_whatever_the_numbers_are(run, page):
    run.publisher.metrics = {"reward": LARGEST}
    run.keep(run.publisher.step(9))
    for replica in ("a", "b"):
        raw_acknowledgement(run, replica, performance={"gap_seconds": LARGEST, "served_seconds": -LARGEST})
    server = page(run.uri)
    with urllib.request.urlopen(f"{server.url}api/state", timeout=30) as answer:
        state = json.loads(answer.read(), parse_constant=no_constant)
    assert state["versions"]["reward"][-1] == 1e300
    assert state["commits"]["served_seconds"] == [-1e300]


def test_layers_of_any_name_have_an_order(run):
    heat = HeatMap(open_ledger(run.uri).store, open_ledger(run.uri).limits)
    names = ["layers.10.w", "layers.9.w", "layers.²", "layers.٣", "layers." + "7" * 5000, "007", "embed"]
    heat._elements = dict.fromkeys(names, 1)
    assert heat.matrix([], "layer")["names"][:4] == ["007", "embed", "layers.9", "layers.10"]


def test_pages_that_go_away_leave_no_word_in_the_terminal(run, page, capfd):
    server = page(run.uri)
    address = server.server_address[:2]
    for path in ("/", "/api/state", "/api/events") * 5:
        with socket.create_connection(address, timeout=30) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    with socket.create_connection(address, timeout=30) as client:
        client.sendall(b"GET http://[/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 400 " in client.makefile("rb").readline()
    time.sleep(0.5)
    assert capfd.readouterr() == ("", "")
