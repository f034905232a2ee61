"""A small run, and the command line called as a user would."""

from __future__ import annotations

import contextlib
import json
import threading
import time

import pytest
from helpers.long_run import LongRun
from small_run import Run
from typer.testing import CliRunner

from delta_sync.cli.app import app
from delta_sync.cli.dashboard.live import LiveRun
from delta_sync.cli.dashboard.server import DashboardServer
from delta_sync.cli.run import open_ledger
from delta_sync.cli.view import RunView


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


@pytest.fixture
def cli():
    """(exit code, standard output, standard error) of a command line."""

    def call(*words):
        done = CliRunner().invoke(app, [str(word) for word in words])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, done.stdout, done.stderr

    return call


@pytest.fixture
def as_json(cli):
    """(exit code, document) of a command line with --json; its standard output holds nothing else."""

    def call(*words):
        code, out, _ = cli(*words, "--json")
        return code, json.loads(out)

    return call


@pytest.fixture(scope="session")
def long_run(tmp_path_factory):
    """5,000 versions by two trainers, with anchors and folds, and 100 replicas of which some are in trouble."""
    run = LongRun(tmp_path_factory.mktemp("long") / "run", started=time.time() - 36_000)
    for count in (1500, 1500, None, 1500, 500):
        if count is None:
            run.claim()
            continue
        run.grow(count)
        run.attach()
        run.attach(fold_from=run.newest.version - 100)
    newest = run.newest
    for k in range(100):
        run.acknowledge(f"replica-{k:03d}", newest.version, newest.sha256)
    no = {
        "state": "refused",
        "refused_version": newest.version,
        "error_kind": "IntegrityError",
        "error": "not its sums",
    }
    run.acknowledge("replica-042", newest.version - 1, newest.parent, **no)
    return run


@pytest.fixture
def page():
    """Serves a run's page: from a URI to a running server with a look every 50 ms."""
    with contextlib.ExitStack() as open_ones:

        def start(uri, **settings):
            live = open_ones.enter_context(LiveRun(RunView(open_ledger(str(uri)), 20_000), 0.05))
            server = open_ones.enter_context(DashboardServer(live, **settings))
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            open_ones.callback(thread.join, 10)
            open_ones.callback(server.shutdown)
            return server

        yield start
