"""A small run, and the command line called as a user would."""

from __future__ import annotations

import json

import pytest
from small_run import Run
from typer.testing import CliRunner

from delta_sync.cli.app import app


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
