"""The table of exit codes in docs/CLI.md, for every command: each of its codes is met here, or where ELSEWHERE says."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.child import child
from helpers.publish import Publisher
from helpers.server import free_port
from typer.main import get_command

from delta_sync.cli.app import app

TESTS = Path(__file__).resolve().parents[1]
KEY = "DELTA_SYNC_ADMIN_KEY"
CONTROL = ("pin", "unpin", "rollback", "reload")
ELSEWHERE = {
    **{(command, code): "engine/test_control_commands.py" for command in CONTROL for code in (0, 1)},
    ("parity", 0): "engine/test_cli_against_serve.py",
    ("parity", 1): "engine/test_cli_against_serve.py",
    ("parity", 2): "cli/test_parity.py",
    ("parity", 3): "cli/test_parity.py",
}
NEVER = {("ui", 1), ("ui", 3), ("diff", 3), ("keygen", 3)}  # ui shows trouble on its page; the others ask no store


@pytest.fixture
def places(run, tmp_path, cli):
    """Names for what the cases below are about."""
    run.acknowledge("late", 5, state="refused", refused_version=6, error_kind="IntegrityError", error="not its sums")
    names = {"run": run.uri, "here": str(tmp_path), "closed": f"http://127.0.0.1:{free_port()}"}
    names["ok"] = str(shutil.copytree(run.folder, tmp_path / "ok"))
    shutil.rmtree(tmp_path / "ok" / "replicas")
    names["damaged"] = str(shutil.copytree(tmp_path / "ok", tmp_path / "damaged"))
    next((tmp_path / "damaged" / "deltas").glob("000000000003-*")).write_bytes(b"no delta")
    names["empty"] = str(tmp_path / "empty")
    (tmp_path / "away").mkdir()  # a store that answers nothing: it follows no links
    for name in ("HEAD.json", "manifests", "epochs", "anchors", "folds", "deltas", "replicas"):
        (tmp_path / "away" / name).symlink_to(tmp_path / "ok" / name)
    names["away"] = str(tmp_path / "away")
    for version in (2, 3):
        names[f"ckpt{version}"] = str(tmp_path / f"ckpt-{version}")
        assert cli("materialize", f"{run.uri}@{version}", names[f"ckpt{version}"])[0] == 0
    names["text"] = str(tmp_path / "notes.txt")
    Path(names["text"]).write_text("no delta, and no key either")
    other = Publisher(str(tmp_path / "other"), run.publisher.weights)
    other.origin()
    names["other"] = str(tmp_path / "other")
    return names


PLAIN = {("ui", 2), ("gc", 1)}  # the page is no document; with --json nobody is asked
CASES = {
    ("ledger", 0): "{ok}",
    ("ledger", 1): "{run}",  # a replica refuses
    ("ledger", 2): "{run}@3",
    ("ledger", 3): "{away}",
    ("watch", 0): "{ok} --for 0",
    ("watch", 1): "{run} --for 0",
    ("watch", 2): "{ok} --for 0 --public-key {here}/missing.pub",
    ("watch", 3): "{away} --for 0",
    ("ui", 2): "{text}",
    ("inspect", 0): "{ckpt2}",
    ("inspect", 1): "{text}",
    ("inspect", 2): "s4://bucket/run",
    ("inspect", 3): "{away}@3",
    ("diff", 0): "{ckpt2} {ckpt3}",
    ("diff", 1): "{ckpt2} {here}/missing",
    ("diff", 2): "{ckpt2} {ckpt3} --out {text}",
    ("verify", 0): "{ok}",
    ("verify", 1): "{damaged}",
    ("verify", 2): "{ok} --public-key {text}",
    ("verify", 3): "{away}",
    ("materialize", 0): "{ok}@5 {here}/a-version",
    ("materialize", 1): "{ok}@99 {here}/made",
    ("materialize", 2): "{ok} {ckpt2}",
    ("materialize", 3): "{away} {here}/made",
    ("apply", 0): "{ckpt2} {ok}@3 {here}/applied",
    ("apply", 1): "{ckpt2} {ok}@4 {here}/made",
    ("apply", 2): "{ckpt2} {ok} {here}/made",
    ("apply", 3): "{ckpt2} {away}@3 {here}/made",
    **{(command, 2): "--server nowhere" for command in CONTROL},
    **{(command, 3): "--server {closed}" for command in CONTROL},
    ("rollback", 3): "--server {closed} --version 2 --yes",
    ("reset", 0): "{ok} --dry-run",
    ("reset", 1): "{empty} --yes",
    ("reset", 2): "{ok} --signing-key {here}/missing.key --yes",
    ("reset", 3): "{away} --yes",
    ("compact", 0): "{ok} --from 1",
    ("compact", 1): "{ok} --from 5",
    ("compact", 2): "{ok} --signing-key {text}",
    ("compact", 3): "{away}",
    ("gc", 0): "{ok} --keep 1 --dry-run",
    ("gc", 1): "{ok} --keep 1 --grace 0",  # nobody says yes
    ("gc", 2): "{ok} --keep 1 --json",
    ("gc", 3): "{away} --keep 1 --dry-run",
    ("mirror", 0): "{ok} {here}/copy --once --cache {here}/cache",
    ("mirror", 1): "{ok} {other} --once --cache {here}/cache",
    ("mirror", 2): "{ok} {here}/copy --public-key {text} --dry-run",
    ("mirror", 3): "{away} {here}/copy --dry-run",
    ("doctor", 0): "{ok} --read-only",
    ("doctor", 1): "{unwritable}",
    ("doctor", 2): "{ok}@1",
    ("doctor", 3): "{away}",
    ("keygen", 0): "{here}/new.key",
    ("keygen", 1): "{here}/missing/new.key",
    ("keygen", 2): "{text}",
    ("bench", 0): "{ckpt2} {ckpt3} --repeats 1",
    ("bench", 1): "{ckpt2} {ckpt2} --repeats 1",
    ("bench", 2): "{text}",
    ("bench", 3): "{away}@3",
}


def test_every_command_has_every_code_tested():
    wanted = {(command, code) for command in get_command(app).commands for code in range(4)} - NEVER
    assert wanted == CASES.keys() | ELSEWHERE.keys() | {("ui", 0)}
    for (command, _), file in ELSEWHERE.items():
        assert f'"{command}"' in (TESTS / file).read_text()


def test_the_codes_of_every_command(places, cli, monkeypatch, tmp_path):
    monkeypatch.setenv(KEY, "some")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "unwritable").mkdir()
    (tmp_path / "unwritable" / "doctor").symlink_to(tmp_path)
    wrong = []
    places["unwritable"] = str(tmp_path / "unwritable")
    for (command, code), words in CASES.items():
        document = [] if code == 0 or (command, code) in PLAIN else ["--json"]
        got, out, err = cli(command, *words.format(**places).split(), *document)
        if got != code:
            wrong.append((command, words, got, err))
        elif document:  # nothing else, also where there is nothing to report
            found = json.loads(out.splitlines()[-1] if command == "watch" else out)
            kind = found["error"]["kind"] if found.keys() == {"error"} else None
            assert (kind == "UsageError") == (code == 2), (command, words)
    assert not wrong


def test_the_page_ends_with_0_on_ctrl_c(run):
    words = [sys.executable, "-m", "delta_sync.cli", "ui", run.uri, "--no-browser", "--port", "0"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    with child(words, env=env, stdout=subprocess.PIPE, text=True) as page:
        assert "shows" in page.stdout.readline()
        page.send_signal(signal.SIGINT)
        assert page.wait(60) == 0


def test_a_store_without_its_library_is_wrong_usage(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "hf_xet", None)
    uri = "hf://buckets/me/run"
    for words in (["ledger", uri], ["watch", uri, "--for", 0], ["materialize", uri, "out"], ["doctor", uri]):
        code, _, err = cli(*words)
        assert code == 2 and "huggingface_hub and hf_xet" in " ".join(err.replace("│", " ").split())


def test_a_key_without_its_library_is_wrong_usage(run, cli, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for words in (["keygen", tmp_path / "key"], ["verify", run.uri, "--public-key", "ed25519:x"]):
        code, _, err = cli(*words)
        assert code == 2
        assert "delta-weight-sync[sign]" in err.replace("\n", "").replace("│ ", "")
