"""The server that test_serve_versions.py and test_serve_control.py share: each start takes half a minute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving_world import World, serve

ARGS = ("--api-key", "first", "--api-server-count", "2")
SETTINGS = ("--delta-sync-transition", "recompute", "--delta-sync-max-lag", "1", "--delta-sync-admin-key", "adm1n-key")


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two API servers, running requests recomputed at a commit, and two versions to begin with."""
    with serve(tmp_path_factory.mktemp("serving"), (*ARGS, *SETTINGS)) as world:
        world.trainer.origin()
        world.step(1)
        yield world
