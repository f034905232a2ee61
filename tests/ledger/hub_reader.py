"""One reader process of test_hub_run.py: ``URI LAST_VERSION LOG`` follows a run up to a version, proving every bit."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path

from tiny_run import follow, states

from delta_sync import DeltaSyncError, state_digest
from delta_sync.ledger import Ledger
from delta_sync.plan import Position
from delta_sync.store import open_store

SECONDS = 240.0


def read(uri: str, last: int, log: Path) -> None:
    store = open_store(uri)
    store.follow()
    ledger, position, bits = Ledger(store), None, None
    followed: list[tuple[int, str]] = []
    again: Counter[str] = Counter()
    end = time.monotonic() + SECONDS
    while position is None or position.version < last:
        assert time.monotonic() < end, f"{position} after {SECONDS} s, tried again {dict(again)}"
        try:
            ledger.wait_newer(position, time.monotonic() + 1.0, poll_seconds=0.05)
            plan = ledger.plan(position, state_digest(states(bits)) if bits else None)
            if plan is None:
                continue
            bits = follow(ledger, plan, bits)  # proves every bit by digest
        except DeltaSyncError as error:  # a replica goes on with what it has and looks again
            again[f"{type(error).__name__} ({error.action})"] += 1
            time.sleep(0.05)
            continue
        position = Position(plan.target.version, plan.target.sha256)
        followed.append((position.version, state_digest(states(bits))))
    log.write_text(json.dumps({"followed": followed, "again": again}))


if __name__ == "__main__":
    read(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
