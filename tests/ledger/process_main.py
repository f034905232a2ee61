"""The processes of test_processes.py: ``write FOLDER LOG`` until killed, ``read FOLDER LOG STOP`` until told so."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from tiny_run import attach, changed, commit_delta, commit_origin, first_bits, follow, states

from delta_sync import ChainError, state_digest
from delta_sync.ledger import Ledger
from delta_sync.plan import Position
from delta_sync.store import LocalStore
from delta_sync.writer import Writer


def write(folder: str, log: str) -> None:
    with Path(log).open("a") as promises, tempfile.TemporaryDirectory() as scratch:

        def promise(manifest):
            print(manifest.version, manifest.sha256, file=promises, flush=True)
            return manifest

        writer = Writer.open(Ledger(LocalStore(folder)))
        bits = first_bits(seed=writer.epoch)
        origin = promise(commit_origin(writer, bits))
        attach(writer, origin, bits, Path(scratch))
        for number in range(10**6):
            after = changed(bits, number)
            promise(commit_delta(writer, bits, after, number))
            bits = after


def read(folder: str, log: str, stop: str) -> None:
    ledger = Ledger(LocalStore(folder))
    position: Position | None = None
    bits, followed, waits = None, [], 0
    while True:
        last = Path(stop).exists()  # looked at first, so that the last round sees everything
        ledger.wait_newer(position, time.monotonic() + 0.2, poll_seconds=0.002)
        live = state_digest(states(bits)) if bits else None
        try:
            plan = ledger.plan(position, live)
        except ChainError as error:  # a writer was killed before its anchor: the next one attaches another
            assert "attach an anchor" in str(error)
            waits += 1
            time.sleep(0.01)
            continue
        if plan is not None:
            bits = follow(ledger, plan, bits)  # proves every bit by digest
            position = plan.position
            followed.append((plan.target.epoch, plan.target.version, position.manifest, plan.start))
        if last:
            break
    Path(log).write_text(json.dumps({"followed": followed, "waits": waits}))


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](*sys.argv[2:])
