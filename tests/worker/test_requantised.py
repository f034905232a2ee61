"""Replicas that serve fp8: deltas change what the checkpoint holds, and what a fresh load makes of that is served.

On a CPU only online fp8 per channel runs, with AMX blocks too; all kinds run on a GPU (tests/gpu/run.sh).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fp8_checkpoint
import numpy as np
import pytest
import tiny_models
import torch
from family_case import SMALL, answers, differing, digests, everything, quick_start
from helpers.families import FAMILIES
from publishing import Publisher, nudged
from replica import Replica, replica

from delta_sync.errors import IntegrityError
from delta_sync.plan import Plan, Position
from vllm_delta_plugin.compat.load_seam import weight_map
from vllm_delta_plugin.proof import Layout, prove

Values = Mapping[str, torch.Tensor]
DIMENSIONS = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # every part a multiple of 128
QWEN3 = partial(tiny_models.make, "qwen3", **DIMENSIONS)
LATENT, PROJECTION = partial(FAMILIES["DeepSeek-V3"].make, wide=True), "model.layers.1.self_attn.kv_b_proj"
SCANS = 8  # after which every module was looked at


@dataclass(frozen=True)
class Kind:
    """How weights come to be fp8: engine options, or a checkpoint that is."""

    options: dict[str, Any]
    stored: Callable[[Values], dict[str, torch.Tensor]] = dict
    write: Callable[[Path, Path, Values], Path] = tiny_models.rewrite
    make: Callable[[Path], Path] = QWEN3
    damaged: str = "model.layers.1.self_attn.o_proj"  # a module of which a bit is flipped


KINDS = {
    "per channel": Kind({"quantization": "fp8_per_channel"}),
    "per tensor": Kind({"quantization": "fp8"}),
    "per block": Kind({"quantization": "fp8_per_block"}),
    "experts, per tensor": Kind({"quantization": "fp8"}, make=partial(tiny_models.make, "qwen3_moe", **DIMENSIONS)),
    "checkpoint in blocks": Kind({}, fp8_checkpoint.in_blocks, fp8_checkpoint.write),
    "latent attention, per block": Kind({"quantization": "fp8_per_block"}, make=LATENT, damaged=PROJECTION),
    "latent attention in blocks": Kind({}, fp8_checkpoint.in_blocks, fp8_checkpoint.write, LATENT, PROJECTION),
}
NO_KERNEL = "vLLM has no kernel for it on this CPU"
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_KERNEL)
IN_BLOCKS = pytest.mark.skipif(not (torch.cuda.is_available() or torch.cpu._is_amx_tile_supported()), reason=NO_KERNEL)
RARE = () if torch.cuda.is_available() else (pytest.mark.long, pytest.mark.rare)
RUN = {
    "per channel": (),
    "per block": (IN_BLOCKS, *RARE),
    "checkpoint in blocks": IN_BLOCKS,
    "latent attention, per block": (IN_BLOCKS, *RARE),
    "latent attention in blocks": (IN_BLOCKS, *RARE),
}


@dataclass
class Case:
    """A live replica at the origin of its run, and what fresh engines serve of the versions to come."""

    kind: Kind
    live: Replica
    publisher: Publisher
    attached: dict[str, Any]
    versions: list[dict[str, torch.Tensor]]
    fresh: list[dict[str, np.ndarray]]
    answers: list[list[list[tuple[int, float]]]]

    def begin(self, folder: Path, version: int = 0) -> None:
        """A new run whose origin is ``version``, which is served."""
        self.publisher = Publisher(folder / "to", self.publisher.tensors)
        self.live.attach(self.publisher.uri)
        if self.publisher.delta(self.versions[version]).changed_elements:
            self.commit(self.plan())
        self.publisher = Publisher(folder / "run", self.versions[version])
        self.attached = self.live.attach(self.publisher.uri)

    def plan(self) -> Plan:
        """From the origin to the newest version."""
        origin = self.publisher.origin
        plan = self.publisher.ledger.plan(Position(origin.version, origin.sha256), None)
        assert plan is not None
        return plan

    def commit(self, plan: Plan | None) -> None:
        assert plan is not None
        (staged,) = self.live.stage(plan)
        assert staged["state"] == "staged", staged
        self.live.one("commit", staged["target"])
        self.live.one("settle", staged["target"])

    def serves(self, version: int) -> bool:
        """Bits of all tensors, and the answers."""
        wrong = differing(everything(self.live.model), self.fresh[version])
        assert not wrong, wrong
        assert answers(self.live) == self.answers[version]
        return True


@pytest.fixture(scope="module", params=[pytest.param(k, marks=RUN.get(k, ON_GPU)) for k in KINDS])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp("fp8")
    plain = kind.make(folder / "plain")
    steps = [tiny_models.tensors(plain)]
    steps += [nudged(steps[0], 0.1, seed=1)]
    steps += [nudged(steps[1], 0.001, seed=2)]
    versions = [kind.stored(step) for step in steps]
    options = {**SMALL, **kind.options}
    fresh, said = [], []
    for number, values in enumerate(versions[:0:-1]):
        with quick_start(), replica(kind.write(plain, folder / f"fresh-{number}", values), **options) as engine:
            said.insert(0, answers(engine))
            fresh.insert(0, everything(engine.model))
        del engine
        gc.collect()
    with quick_start(), replica(kind.write(plain, folder / "old", versions[0]), **options) as live:
        publisher = Publisher(folder / "run", versions[0])
        attached = live.attach(publisher.uri)
        said.insert(0, answers(live))
        fresh.insert(0, everything(live.model))
        yield Case(kind, live, publisher, attached, versions, fresh, said)


def test_versions_are_served_as_a_fresh_load_serves_them(case: Case, tmp_path: Path) -> None:
    case.begin(tmp_path)
    assert case.serves(0)
    case.publisher.delta(case.versions[1])
    case.commit(case.plan())
    assert case.serves(1)
    assert case.answers[0] != case.answers[1] != case.answers[2]
    case.begin(tmp_path / "second", 1)
    manifest = case.publisher.delta(case.versions[2])
    (staged,) = case.live.stage(case.plan())
    assert (staged["state"], staged["changed"]) == ("staged", manifest.changed_elements)
    assert case.serves(1), "staging must not touch what is served"
    case.live.one("commit", manifest.version)
    assert case.serves(2)
    case.live.one("undo", manifest.version)
    assert case.serves(1)
    case.live.one("commit", manifest.version)
    case.live.one("settle", manifest.version)
    assert case.serves(2)


def test_a_rollback_by_deltas_serves_the_version_before_again(case: Case, tmp_path: Path) -> None:
    case.begin(tmp_path)
    for version in (1, 2):
        case.publisher.delta(case.versions[version])
    forward, origin = case.plan(), case.publisher.origin
    case.commit(forward)
    assert case.serves(2)
    case.commit(Plan(origin, "back", None, forward.deltas, {n: origin.tensors[n] for n in forward.tensors}))
    case.publisher.tensors = dict(case.versions[0])
    assert case.serves(0)
    assert case.live.attach(case.publisher.uri)["regions"] == case.attached["regions"], "the shadow went back too"


def test_a_wrong_digest_is_refused_with_nothing_touched(case: Case, tmp_path: Path) -> None:
    case.begin(tmp_path)
    name = "model.layers.0.self_attn.o_proj.weight"
    lied = case.versions[1] | {name: case.versions[2][name]}
    manifest = case.publisher.delta(case.versions[1], claimed=lied)
    case.publisher.tensors = dict(case.versions[0])
    plan = case.plan()
    (staged,) = case.live.stage(plan)
    described = {n: (t["dtype"], tuple(t["shape"])) for n, t in case.attached["tensors"].items()}
    regions = [case.attached["regions"]]
    with pytest.raises(IntegrityError, match=f"staged tensor '{name}'"):
        prove(Layout(described, regions), regions, [staged["parts"]], plan.tensors, manifest.state_digest)
    case.live.one("stage_drop")
    assert case.serves(0)
    assert case.live.attach(case.publisher.uri)["regions"] == case.attached["regions"]


@pytest.mark.parametrize("dense", [False, True])
def test_an_anchor_is_taken(case: Case, tmp_path: Path, dense: bool) -> None:
    """Staged like a delta, or written in place while the engine is paused."""
    case.begin(tmp_path)
    case.publisher = publisher = Publisher(tmp_path / "anchored", case.versions[1])
    publisher.anchor()
    case.live.attach(publisher.uri)
    plan = publisher.ledger.plan(None, None)
    assert plan is not None and plan.start == "anchor"
    if dense:
        (loaded,) = case.live.stage(plan, "load_dense")
        assert loaded["state"] == "loaded", loaded
    else:
        case.commit(plan)
    assert case.serves(1)
    assert digests(case.live.attach(publisher.uri)) == {n: s.digest for n, s in publisher.origin.tensors.items()}


def test_what_is_served_is_scanned_and_made_anew(case: Case, tmp_path: Path) -> None:
    case.begin(tmp_path)
    weights = weight_map(case.live.model)
    if not weights.requantised:
        pytest.skip("served as it is stored: the digests are those of what is served")
    assert audited(case.live) == {None}
    made = next(module.made for module in weights.requantised.modules if module.name == case.kind.damaged)
    names = [name for name in made if name.endswith(".W_UK_T")] or list(made)
    box = made[names[0]]
    weights.storages[box.storage].bits[box.offset] ^= 1
    assert audited(case.live) == {None, case.kind.damaged}
    origin = case.publisher.origin
    (staged,) = case.live.stage(Plan(origin, "live", None, (), {}))
    assert (staged["state"], staged["changed"], staged["parts"]) == ("staged", 0, {})
    case.live.one("commit", origin.version)
    case.live.one("settle", origin.version)
    assert case.serves(0)
    assert audited(case.live) == {None}


def audited(live: Replica) -> set[str | None]:
    """Which modules so many scans found damaged that every one was looked at; None for a scan that found none."""
    found = set()
    for _ in range(SCANS):
        live.one("audit_begin")
        (reply,) = live.wait("audit_poll", ("running",))
        assert reply["state"] == "done", reply
        found.add(reply["damaged"])
    return found


def test_what_is_proven_are_the_elements_of_the_checkpoint(case: Case, tmp_path: Path) -> None:
    """So a trainer that never heard of fp8 can check them; they take two bytes a parameter at most."""
    case.begin(tmp_path)
    published = case.publisher.origin.tensors
    found = {n: (t["dtype"], tuple(t["shape"])) for n, t in case.attached["tensors"].items()}
    assert found == {n: (s.dtype, s.shape) for n, s in published.items()}
    assert digests(case.attached) == {n: s.digest for n, s in published.items()}
    assert case.attached["shadow_bytes"] <= 2 * sum(math.prod(shape) for _, shape in found.values())


def with_scales_of_torchs_default_type_too(layer: Any) -> None:
    layer.other_scale = torch.nn.Parameter(layer.weight_scale.to(torch.get_default_dtype()), requires_grad=False)


def once_only(layer: Any) -> None:
    if torch.get_default_dtype() == torch.float32:
        raise ValueError("it is too late")


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (with_scales_of_torchs_default_type_too, "that vLLM makes of module 'model.layers.0.self_attn.qkv_proj'"),
        (once_only, "module 'model.layers.0.self_attn.qkv_proj', expected processed once more, got ValueError: it is"),
    ],
)
def test_what_would_be_made_otherwise_than_while_loading_is_refused_at_the_start(
    more: Callable[[Any], None], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While vLLM loads, torch's default type is the model's; when a version is staged it is not."""
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod as Method

    original = Method.process_weights_after_loading

    def process(self: Any, layer: Any) -> None:
        original(self, layer)
        more(layer)

    monkeypatch.setattr(Method, "process_weights_after_loading", process)
    model = tiny_models.make("qwen3", tmp_path / "plain", **DIMENSIONS)
    with quick_start(), replica(model, **SMALL, quantization="fp8_per_channel") as live:
        (reply,) = live.rpc("attach", {"uri": str(tmp_path)})
    assert not reply["ok"]
    assert said in reply["error"]["error"]
