"""Writers in processes of their own, on a bucket: ``start(publish, …)`` returns at once, the process may be killed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from tiny_run import attach, changed, commit_delta, commit_origin, first_bits, follow, states

from delta_sync import ConflictError, DeltaSyncError, state_digest
from delta_sync.ledger import Ledger
from delta_sync.store import open_store
from delta_sync.store.object import ObjectStore
from delta_sync.writer import Writer

# A server that forks: each child starts with everything imported, and no thread of the client's was ever started in it.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["object_writer"])


def barrier(parties: int):
    """One that processes share."""
    return _FORKS.Barrier(parties)


def start(target: Callable[..., object], environment: Mapping[str, str], *arguments: object):
    process = _FORKS.Process(target=_child, args=(target, dict(environment), arguments), daemon=True)
    process.start()
    return process


def _child(target: Callable[..., object], environment: Mapping[str, str], arguments: tuple[object, ...]) -> None:
    os.environ.update(environment)
    try:
        target(*arguments)
    except ConflictError as error:
        print(error, file=sys.stderr)
        sys.exit(17)


def publish(uri: str, deltas: int, log: str | None = None, go: object = None) -> None:
    """Claim an epoch, commit an origin, attach an anchor, commit deltas; ``log`` gets what commit() promised."""
    with tempfile.TemporaryDirectory() as scratch:
        writer = Writer.open(Ledger(open_store(uri)))
        if go is not None:
            go.wait(60)
        bits = first_bits(seed=writer.epoch)
        origin = commit_origin(writer, bits)
        _promise(log, origin)
        attach(writer, origin, bits, Path(scratch))
        for number in range(deltas):
            after = changed(bits, number)
            _promise(log, commit_delta(writer, bits, after, number))
            bits = after


def contend(uri: str, deltas: int, log: str, together, opened) -> None:
    """Claim an epoch in the same instant as another process, and publish once both have, or one was refused."""
    store = open_store(uri)
    together.wait(60)
    writer = Writer.open(Ledger(store))
    with contextlib.suppress(threading.BrokenBarrierError):
        opened.wait(5)
    with tempfile.TemporaryDirectory() as scratch:
        bits = first_bits(seed=1)
        origin = commit_origin(writer, bits)
        _promise(log, origin)
        attach(writer, origin, bits, Path(scratch))
        for number in range(deltas):
            after = changed(bits, number)
            _promise(log, commit_delta(writer, bits, after, number))
            bits = after


def _promise(log: str | None, manifest) -> None:
    if log:
        with Path(log).open("a") as file:
            print(manifest.version, manifest.sha256, file=file, flush=True)


def replicate(uri: str, log: str, versions: int, seconds: float) -> None:
    """Follow a run to version ``versions``, proving each one; ``log`` gets what was followed and what went wrong."""
    os.nice(5)  # there are many, and whoever else is on the same cores has deadlines
    ledger, deadline = Ledger(ObjectStore(uri, timeout=20)), time.monotonic() + seconds
    position, bits, followed, errors, slowest = None, None, [], Counter(), 0.0
    while position is None or position.version < versions:
        assert time.monotonic() < deadline, "not there in time"
        started = time.monotonic()
        try:
            plan = ledger.plan(position, state_digest(states(bits)) if bits else None)
            if plan is not None:
                bits, position = follow(ledger, plan, bits), plan.position
                followed.append((plan.start, [manifest.version for manifest in plan.deltas], position.version))
        except DeltaSyncError as error:  # what a replica does: note it and look again
            errors[f"{type(error).__name__}: {error.action}"] += 1
        slowest = max(slowest, time.monotonic() - started)
        time.sleep(0.05)
    facts = {"followed": followed, "errors": errors, "slowest": slowest, "state": state_digest(states(bits))}
    Path(log).write_text(json.dumps(facts))
