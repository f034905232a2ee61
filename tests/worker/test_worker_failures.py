"""What must not reach live weights does not, what fails is reported by name, and a live engine takes an anchor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from publishing import Publisher, nudged, small_ones_stepped
from replica import Replica, replica, same

from delta_sync.plan import Plan, Position


@dataclass
class Case:
    """A fresh run whose origin is what the engine serves."""

    live: Replica
    publisher: Publisher
    values: dict[str, torch.Tensor]
    bits: dict[str, np.ndarray]

    def plan(self, **options: Any) -> Plan:
        """From the origin to the newest version."""
        origin = Position(self.publisher.origin.version, self.publisher.origin.sha256)
        plan = self.publisher.ledger.plan(origin, None, **options)
        assert plan is not None
        return plan

    def unchanged(self) -> bool:
        """Whether live weights are those of the origin."""
        return same(self.live.bits(), self.bits)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Replica, Path]]:
    folder = tiny_models.make("qwen3", tmp_path_factory.mktemp("qwen3") / "model")
    with replica(folder) as live:
        yield live, folder


@pytest.fixture
def case(served: tuple[Replica, Path], tmp_path: Path) -> Iterator[Case]:
    live, folder = served
    values, bits = tiny_models.tensors(folder), live.bits()
    yield Case(live, Publisher(tmp_path / "run", values), values, bits)
    for name, parameter in live.model.named_parameters():  # the next test starts from the checkpoint again
        parameter.data.view(torch.int16).copy_(torch.from_numpy(bits[name]))


def failed(case: Case, plan: Plan) -> dict[str, Any]:
    """Stage a plan that must be refused; its error."""
    (reply,) = case.live.stage(plan)
    assert reply["state"] == "failed" and case.unchanged()
    return reply["error"]


def test_corrupted_object_is_refused(case: Case) -> None:
    case.live.attach(case.publisher.uri)
    manifest = case.publisher.delta(nudged(case.values, 0.01, seed=2))
    path = case.publisher.object_path(manifest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    error = failed(case, case.plan())
    assert (error["kind"], error["object"]) == ("IntegrityError", manifest.objects[0].key)
    data[-1] ^= 1
    path.write_bytes(data)
    assert case.live.stage(case.plan())[0]["state"] == "staged"


def test_wrong_content_shows_in_the_parts(case: Case) -> None:
    attached = case.live.attach(case.publisher.uri)
    new = nudged(case.values, 0.01, seed=3)
    lie = {name: value.clone() for name, value in new.items()}
    lie["model.norm.weight"][5] += 1
    manifest = case.publisher.delta(new, claimed=lie)
    (staged,) = case.live.stage(case.plan())
    wrong = []
    for key, before in attached["regions"].items():
        name = key.rsplit("|", 3)[0]
        if (before + staged["parts"].get(key, 0)) % 2**64 != manifest.tensors[name].digest:
            wrong.append(name)
    assert wrong == ["model.norm.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.rotary.inv_freq": torch.zeros(4, dtype=torch.bfloat16)}, "an unknown name"),
        ({"model.norm.weight": torch.zeros(4, 32, dtype=torch.bfloat16)}, "[128] as served"),
        ({"lm_head.weight": torch.zeros(500, 128, dtype=torch.bfloat16)}, "whose memory it shares"),
    ],
)
def test_deltas_that_do_not_fit_are_refused(case: Case, change: dict[str, torch.Tensor], message: str) -> None:
    publisher = Publisher(Path(case.publisher.uri).parent / "other", case.values | change)
    publisher.delta(publisher.tensors | nudged(change, 0.5, seed=4))
    case.publisher = publisher
    case.live.attach(publisher.uri)
    error = failed(case, case.plan())
    assert error["kind"] == "MappingError" and next(iter(change)) in error["error"] and message in error["error"]


def test_tied_head_that_equals_the_embedding_is_accepted(case: Case) -> None:
    with_head = case.values | {"lm_head.weight": case.values["model.embed_tokens.weight"]}
    case.publisher = Publisher(Path(case.publisher.uri).parent / "tied", with_head)
    new = nudged(case.values, 0.01, seed=5)
    case.publisher.delta(new | {"lm_head.weight": new["model.embed_tokens.weight"]})
    assert case.live.attach(case.publisher.uri)["aliases"] == {"lm_head.weight": "model.embed_tokens.weight"}
    (staged,) = case.live.stage(case.plan())
    assert staged["state"] == "staged" and not any(key.startswith("lm_head") for key in staged["parts"])


def test_another_element_type_is_refused(case: Case) -> None:
    class Float16(Publisher):
        dtype = "F16"

    halves = {n: v.view(torch.int16).view(torch.float16) for n, v in case.values.items()}
    case.publisher = Float16(Path(case.publisher.uri).parent / "f16", halves)
    case.publisher.delta(nudged(halves, 0.01, seed=6))
    case.live.attach(case.publisher.uri)
    error = failed(case, case.plan())
    assert error["kind"] == "MappingError" and "BF16" in error["error"] and "F16" in error["error"]


@pytest.mark.parametrize("later_delta", [False, True])
def test_anchor_is_taken_as_a_difference(case: Case, later_delta: bool) -> None:
    case.live.attach(case.publisher.uri)
    new = nudged(case.values, 0.3, seed=7)
    case.publisher.delta(new)
    case.publisher.anchor()
    if later_delta:
        new = nudged(new, 0.01, seed=8)
        case.publisher.delta(new)
    plan = case.plan(prefer_anchor=True)
    assert (plan.start, len(plan.deltas)) == ("anchor", int(later_delta))
    (staged,) = case.live.stage(plan)
    assert staged["state"] == "staged", staged
    changed = sum(int((new[n].view(torch.int16) != v.view(torch.int16)).sum()) for n, v in case.values.items())
    assert staged["changed"] == changed
    case.live.one("commit", plan.target.version)
    assert all(read(case.live, name) == bytes_of(new[name]) for name in new)
    case.live.one("undo", plan.target.version)
    assert case.unchanged()


def test_anchor_above_the_cap_is_loaded_densely(case: Case) -> None:
    case.live.attach(case.publisher.uri, stage_bytes=20_000)
    new = nudged(case.values, 0.3, seed=9)
    manifest = case.publisher.delta(new)
    case.publisher.anchor()
    plan = case.plan(prefer_anchor=True)
    assert failed(case, plan)["kind"] == "StageTooLargeError"
    (loaded,) = case.live.stage(plan, "load_dense")
    assert (loaded["state"], loaded["target"]) == ("loaded", manifest.version), loaded
    sums = {key.rsplit("|", 3)[0]: value for key, value in loaded["regions"].items()}
    assert sums == {n: s.digest for n, s in plan.tensors.items()}
    assert all(read(case.live, name) == bytes_of(new[name]) for name in new)


def test_anchor_without_a_served_tensor_is_refused(case: Case) -> None:
    fewer = {n: v for n, v in case.values.items() if n != "model.norm.weight"}
    case.publisher = Publisher(Path(case.publisher.uri).parent / "fewer", fewer)
    case.publisher.delta(nudged(fewer, 0.01, seed=10))
    case.publisher.anchor()
    case.live.attach(case.publisher.uri)
    error = failed(case, case.plan(prefer_anchor=True))
    assert error["kind"] == "IntegrityError" and "model.norm.weight" in error["error"]


@pytest.mark.parametrize("coded", ["gap", "context"])
@pytest.mark.parametrize("method", ["stage_begin", "load_dense"])
def test_damage_of_an_anchor_is_no_deltas(case: Case, method: str, coded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a delta is decoded against the anchor's bits: that delta is whole."""
    case.live.attach(case.publisher.uri)
    case.publisher.delta(nudged(case.values, 0.3, seed=7))
    case.publisher.anchor()
    monkeypatch.setattr(case.publisher, "context", coded == "context")
    case.publisher.delta(small_ones_stepped(case.publisher.tensors))
    plan = case.plan(prefer_anchor=True)
    assert plan.anchor is not None and len(plan.deltas) == 1
    shard = next(ref.key for ref in plan.anchor.objects if ref.key.endswith(".safetensors"))
    path = Path(case.publisher.uri) / shard
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (reply,) = case.live.stage(plan, method)
    assert (reply["state"], reply["error"]["kind"], reply["error"]["object"]) == ("failed", "IntegrityError", shard)


@pytest.mark.parametrize("point", ["commit", "commit_half"])
def test_failed_commit_leaves_the_old_bits(case: Case, point: str) -> None:
    case.live.attach(case.publisher.uri, fault={"rank": 0, "at": point})
    version = case.publisher.delta(nudged(case.values, 0.1, seed=11)).version
    case.live.stage(case.plan())
    (reply,) = case.live.rpc("commit", version)
    assert not reply["ok"] and reply["error"]["kind"] == "InjectedFault" and case.unchanged()
    assert case.live.one("undo", version)["state"] == "unchanged"
    assert case.unchanged()
    case.live.one("commit", version)
    assert not case.unchanged()
    case.live.one("undo", version)
    assert case.unchanged()


def test_moves_out_of_order_are_refused(case: Case) -> None:
    case.live.attach(case.publisher.uri)
    version = case.publisher.delta(nudged(case.values, 0.01, seed=12)).version
    assert case.live.rpc("commit", version)[0]["error"]["kind"] == "ConflictError"
    assert case.live.stage(case.plan())[0]["state"] == "staged"
    assert case.live.rpc("commit", version + 1)[0]["error"]["kind"] == "ConflictError"
    assert case.live.rpc("settle", version)[0]["error"]["kind"] == "ConflictError"
    case.live.one("commit", version)
    for method, args in (("commit", (version,)), ("stage_drop", ())):
        assert case.live.rpc(method, *args)[0]["error"]["kind"] == "ConflictError"
    case.live.one("settle", version)
    assert case.live.rpc("settle", version)[0]["error"]["kind"] == "ConflictError"
    assert case.live.one("undo", version)["state"] == "unchanged", "a settled version stays"


def test_dropped_staging_leaves_nothing(case: Case) -> None:
    case.live.attach(case.publisher.uri)
    version = case.publisher.delta(nudged(case.values, 0.01, seed=13)).version
    case.live.stage(case.plan())
    case.live.one("stage_drop")
    assert case.live.one("stage_poll")["state"] == "idle"
    assert not case.live.rpc("commit", version)[0]["ok"]


def test_methods_answer_before_attach_and_after_bad_input(case: Case, tmp_path: Path) -> None:
    worker = case.live.llm.llm_engine.model_executor.driver_worker.worker
    worker._delta_sync_rank = None
    assert "attach" in case.live.rpc("stage_poll")[0]["error"]["error"]
    assert not case.live.rpc("attach", {"uri": "gopher://x"})[0]["ok"]
    case.live.attach(str(tmp_path / "empty"))
    assert case.live.rpc("read_tensor", "no.such")[0]["error"]["kind"] == "MappingError"


def read(live: Replica, name: str) -> bytes:
    (data,) = live.one("read_tensor", name)["regions"].values()
    return data


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.int16).numpy().tobytes()
