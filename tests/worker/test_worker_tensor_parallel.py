"""Two real worker processes, each with its own part of a mixture of experts, stay in step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from publishing import Publisher, nudged, small_ones_stepped
from replica import Replica, replica

from delta_sync.plan import Position
from vllm_delta_plugin.proof import Layout
from vllm_delta_plugin.read_back import assemble

PARALLEL = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One key-value head, so that both ranks hold a copy of it; everything else is split."""
    return tiny_models.make("qwen3_moe", tmp_path_factory.mktemp("tp") / "old", num_key_value_heads=1)


@pytest.fixture(scope="module")
def new(folder: Path) -> dict[str, torch.Tensor]:
    return nudged(tiny_models.tensors(folder), 0.1, seed=1)


@pytest.fixture(scope="module")
def fresh_tokens(folder: Path, new: dict[str, torch.Tensor]) -> list[list[int]]:
    with replica(tiny_models.rewrite(folder, folder.parent / "new", new), **PARALLEL) as fresh:
        return fresh.tokens()


@pytest.fixture(scope="module")
def live(folder: Path, fresh_tokens: list[list[int]]) -> Iterator[Replica]:
    with replica(folder, **PARALLEL) as running:
        yield running


def oks(replies: list[dict[str, Any]]) -> list[bool]:
    return [reply["ok"] for reply in replies]


def test_both_ranks_move_together_or_not_at_all(
    live: Replica, folder: Path, new: dict[str, torch.Tensor], fresh_tokens: list[list[int]], tmp_path: Path
) -> None:
    values = tiny_models.tensors(folder)
    publisher = Publisher(tmp_path / "run", values)
    attached = live.rpc("attach", {"uri": publisher.uri, "fault": {"rank": 1, "at": "commit_half"}})
    assert oks(attached) == [True, True], attached
    served = {n: (t["dtype"], tuple(t["shape"])) for n, t in attached[0]["tensors"].items()}
    layout = Layout(served, [reply["regions"] for reply in attached])  # raises on gaps and overlaps
    before = layout.combine([reply["regions"] for reply in attached])
    assert before == {n: s.digest for n, s in publisher.origin.tensors.items()}
    copies = set(attached[0]["regions"]) & set(attached[1]["regions"])
    assert any(".k_proj." in key for key in copies) and any("norm" in key for key in copies)
    assert not any(".q_proj." in key or ".experts." in key or "embed" in key for key in copies)

    elsewhere = Publisher(tmp_path / "context", values)
    elsewhere.context = True
    elsewhere.delta(small_ones_stepped(values))
    assert oks(live.rpc("attach", {"uri": elsewhere.uri})) == [True, True]
    replies = live.stage(elsewhere.ledger.plan(Position(1, elsewhere.origin.sha256), None))
    assert [reply["state"] for reply in replies] == ["failed", "failed"]
    assert all("tiles" in reply["error"]["error"] for reply in replies), replies
    cache = tmp_path / "cache"
    config = {"uri": publisher.uri, "fault": {"rank": 1, "at": "commit_half"}, "cache": str(cache)}
    assert oks(live.rpc("attach", config)) == [True, True]

    old_tokens = live.tokens()
    manifest = publisher.delta(new)
    plan = publisher.ledger.plan(Position(publisher.origin.version, publisher.origin.sha256), None)
    assert plan is not None
    staged = live.stage(plan)
    assert {path.name for path in cache.iterdir()} == {ref.sha256 for ref in manifest.objects}, "both read it there"
    change = layout.combine([reply["parts"] for reply in staged])
    assert {n: (before[n] + change[n]) % 2**64 for n in change} == {n: s.digest for n, s in manifest.tensors.items()}

    assert oks(live.rpc("commit", manifest.version)) == [True, False], "rank 1 was told to fail"
    assert oks(live.rpc("undo", manifest.version)) == [True, True]
    assert live.tokens() == old_tokens
    live.rpc("audit_begin")
    audit = live.wait("audit_poll", ("running",))
    assert layout.combine([reply["regions"] for reply in audit]) == before

    for step in ("commit", "settle"):
        assert oks(live.rpc(step, manifest.version)) == [True, True]
    assert live.tokens() == fresh_tokens != old_tokens
    for name, value in new.items():
        whole = assemble(name, attached[0]["tensors"][name], live.rpc("read_tensor", name))
        assert whole == value.contiguous().view(torch.int16).numpy().tobytes(), name
