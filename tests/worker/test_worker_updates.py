"""A sparse update of a live engine leaves it exactly as a fresh engine started from the updated checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from publishing import Publisher, nudged, small_ones_stepped, states
from replica import Replica, replica, same

from delta_sync.plan import Position


@dataclass
class Case:
    """One model family: a live engine at version 1, an update, and what a fresh engine makes of the update."""

    live: Replica
    publisher: Publisher
    new: dict[str, torch.Tensor]
    fresh_bits: dict[str, np.ndarray]
    fresh_tokens: list[list[int]]


@pytest.fixture(scope="module", params=tiny_models.KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp(request.param)
    old = tiny_models.make(request.param, folder / "old")
    values = tiny_models.tensors(old)
    new = nudged(values, 0.1, seed=1)
    with replica(tiny_models.rewrite(old, folder / "new", new)) as fresh:
        fresh_bits, fresh_tokens = fresh.bits(), fresh.tokens()
    with replica(old) as live:
        yield Case(live, Publisher(folder / "run", values), new, fresh_bits, fresh_tokens)


def combined(regions: dict[str, int]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for key, value in regions.items():
        name = key.rsplit("|", 3)[0]
        sums[name] = (sums.get(name, 0) + value) % 2**64
    return sums


def test_update_undo_and_settle(case: Case) -> None:
    live, publisher = case.live, case.publisher
    attached = live.attach(publisher.uri)
    assert {n: (t["dtype"], tuple(t["shape"])) for n, t in attached["tensors"].items()} == {
        n: (s.dtype, s.shape) for n, s in publisher.origin.tensors.items()
    }
    before = combined(attached["regions"])
    assert before == {n: s.digest for n, s in publisher.origin.tensors.items()}
    old_bits, old_tokens = live.bits(), live.tokens()
    assert old_tokens != case.fresh_tokens

    manifest = publisher.delta(case.new)
    plan = publisher.ledger.plan(Position(publisher.origin.version, publisher.origin.sha256), None)
    assert plan is not None
    (staged,) = live.stage(plan)
    assert (staged["state"], staged["target"]) == ("staged", manifest.version)
    assert staged["changed"] == manifest.changed_elements
    change = combined(staged["parts"])
    assert {n: (before[n] + change[n]) % 2**64 for n in change} == {n: s.digest for n, s in manifest.tensors.items()}
    assert same(live.bits(), old_bits), "staging must not touch live weights"

    live.one("commit", manifest.version)
    assert same(live.bits(), case.fresh_bits)
    assert live.tokens() == case.fresh_tokens

    live.one("undo", manifest.version)
    assert same(live.bits(), old_bits)
    assert live.tokens() == old_tokens

    live.one("commit", manifest.version)
    assert live.one("settle", manifest.version)["version"] == manifest.version
    assert same(live.bits(), case.fresh_bits)
    begun = time.time()
    live.one("audit_begin")
    (audit,) = live.wait("audit_poll", ("running",))
    assert audit["state"] == "done" and begun < audit["began"] < audit["ended"] < time.time()
    assert combined(audit["regions"]) == {n: (before[n] + change[n]) % 2**64 for n in before}


def test_read_back(case: Case, tmp_path: Path) -> None:
    live, served = case.live, case.new if same(case.live.bits(), case.fresh_bits) else case.publisher.tensors
    live.attach(str(tmp_path))
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"):
        (data,) = live.one("read_tensor", name)["regions"].values()
        assert data == served[name].view(torch.int16).numpy().tobytes()


@pytest.mark.parametrize("start", ["position", "anchor"])
def test_chains_of_context_coded_deltas(case: Case, tmp_path: Path, start: str) -> None:
    """Each decodes only against the bits before it: those live, or an anchor's, with the deltas so far applied."""
    live, served = case.live, case.new if same(case.live.bits(), case.fresh_bits) else case.publisher.tensors
    publisher = Publisher(tmp_path / "run", served)
    publisher.context = True
    live.attach(publisher.uri)
    origin = Position(publisher.origin.version, publisher.origin.sha256)
    if start == "anchor":
        publisher.tensors = nudged(served, 0.2, seed=5)
        publisher = Publisher(tmp_path / "elsewhere", publisher.tensors)
        publisher.context = True
        publisher.anchor()
        live.attach(publisher.uri)
    for _ in range(2):
        manifest = publisher.delta(small_ones_stepped(publisher.tensors))
    plan = publisher.ledger.plan(origin if start == "position" else None, None)
    assert plan is not None and plan.start == start and len(plan.deltas) == 2
    (staged,) = live.stage(plan)
    assert staged["state"] == "staged", staged
    live.one("commit", manifest.version)
    live.one("settle", manifest.version)
    found = combined(live.attach(publisher.uri)["regions"])
    assert found == {n: s.digest for n, s in states(publisher.tensors).items()}
    restore = Publisher(tmp_path / "back", publisher.tensors)
    restore.delta(served)
    live.attach(restore.uri)
    (staged,) = live.stage(restore.ledger.plan(Position(restore.origin.version, restore.origin.sha256), None))
    live.one("commit", staged["target"])
    live.one("settle", staged["target"])


def test_versions_whose_objects_each_hold_a_part_of_every_tensor(case: Case, tmp_path: Path) -> None:
    """What a sharded trainer publishes: three objects a version, with positions that interleave. There and back."""
    live, served = case.live, case.new if same(case.live.bits(), case.fresh_bits) else case.publisher.tensors
    publisher = Publisher(tmp_path / "run", served)
    publisher.ranks = 3
    live.attach(publisher.uri)
    position = Position(publisher.origin.version, publisher.origin.sha256)
    for tensors in (nudged(served, 0.1, seed=7), served):
        manifest = publisher.delta(tensors)
        plan = publisher.ledger.plan(position, None)
        assert plan is not None and len(manifest.objects) == 3
        (staged,) = live.stage(plan)
        assert (staged["state"], staged["changed"]) == ("staged", manifest.changed_elements), staged
        live.one("commit", manifest.version)
        live.one("settle", manifest.version)
        found = combined(live.attach(publisher.uri)["regions"])
        assert found == {n: s.digest for n, s in states(tensors).items()}
        position = plan.position
