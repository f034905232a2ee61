"""Makes tests/helpers importable as ``helpers`` from every test folder; an S3 server for those that ask for it."""

from __future__ import annotations

import pytest
from helpers.fault_proxy import FaultProxy
from helpers.moto_server import ENVIRONMENT, moto_server, new_bucket


@pytest.fixture(scope="session")
def moto():
    with moto_server() as url:
        yield url


@pytest.fixture
def proxy(moto, monkeypatch):
    """A fault proxy before moto, named by the environment as users name their endpoint."""
    with FaultProxy(moto) as proxy:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.url}.items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture
def bucket(moto):
    return new_bucket(moto)
