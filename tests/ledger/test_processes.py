"""Real processes on one folder: a writer that is killed -9 and restarted, and readers that never see it half done."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

from delta_sync.ledger import Ledger
from delta_sync.store import LocalStore

MAIN = Path(__file__).parent / "process_main.py"
KILLS = 4


def start(*arguments):
    return subprocess.Popen([sys.executable, str(MAIN), *map(str, arguments)], stderr=subprocess.PIPE, text=True)


def wait_for_commits(wanted, promises, writer):
    deadline = time.monotonic() + 120
    while len(lines(promises)) < wanted:
        assert writer.poll() is None, f"the writer ended with {writer.returncode}: {writer.stderr.read()}"
        assert time.monotonic() < deadline, "no commit within 120 s"
        time.sleep(0.005)


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


def test_readers_follow_a_writer_that_is_killed_and_restarted(tmp_path):
    run, promises, stop = tmp_path / "run", tmp_path / "promises", tmp_path / "stop"
    logs = [tmp_path / f"reader-{number}.json" for number in range(3)]
    random_source = random.Random(7)
    processes = [start("read", run, log, stop) for log in logs]
    try:
        for kill in range(KILLS + 1):
            # killed at some commit, its anchor's perhaps; the last one gets as far as its first delta
            wanted = len(lines(promises)) + random_source.randint(2 if kill == KILLS else 1, 6)
            writer = start("write", run, promises)
            processes.append(writer)
            wait_for_commits(wanted, promises, writer)
            writer.kill()
            writer.wait(10)
        stop.touch()
        for reader in processes[:3]:
            _, errors = reader.communicate(timeout=120)
            assert reader.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
            process.stderr.close()
    check(run, promises, logs)


def check(run, promises, logs):
    ledger = Ledger(LocalStore(run))
    head = ledger.head()
    chain = {manifest.sha256: manifest for manifest in [head, *ledger.ancestors(head, 1)]}
    assert sorted(manifest.version for manifest in chain.values()) == list(range(1, head.version + 1))
    assert head.epoch == KILLS + 1
    promised = [line.split()[1] for line in lines(promises) if len(line.split()) == 2 and len(line.split()[1]) == 64]
    assert len(promised) > KILLS + 1
    assert not set(promised) - chain.keys(), "a committed version was lost"
    for log in logs:
        followed = json.loads(log.read_text())["followed"]
        places = [(epoch, version) for epoch, version, _, _ in followed]
        assert places == sorted(set(places)), "a reader went back"
        assert {sha256 for _, _, sha256, _ in followed} <= chain.keys(), "a reader took a version that is none"
        assert followed[-1][2] == head.sha256
        assert len({epoch for epoch, _ in places}) > 1
        assert {"anchor", "position"} <= {start for _, _, _, start in followed}
