"""One rank of several that publish models laid out in every supported way, without a trainer: argv is {"folder": …}."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bucket
import tiny
import torch
from gathered import checkpoint, gathered
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from delta_sync.errors import DeltaSyncError, StoreError
from trl_callback.config import DeltaSyncConfig
from trl_callback.metrics import Metrics
from trl_callback.session import Subject
from trl_callback.team_session import TeamSession

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def shard(model: torch.nn.Module, **settings: Any) -> torch.nn.Module:
    """As accelerate does it: every layer, then the rest."""
    if "mesh" not in settings:
        settings["mesh"] = init_device_mesh(DEVICE, (distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    return model


def whole_model(model: torch.nn.Module) -> torch.nn.Module:
    """In one piece."""
    return fully_shard(model, mesh=init_device_mesh(DEVICE, (distributed.get_world_size(),)))


def columns(parameter: torch.nn.Parameter) -> Shard | None:
    """Matrices and stacks of experts along their second axis, where FSDP2 can: it must divide evenly."""
    divides = parameter.dim() > 1 and parameter.shape[1] % distributed.get_world_size() == 0
    return Shard(1) if divides else None


def ignoring(build: Callable[[], Any]) -> Any:
    model = build()
    ignored = {model.model.norm.weight, model.model.layers[0].mlp.down_proj.weight}
    return shard(model, ignored_params=ignored)


def evaluated(build: Callable[[], Any]) -> Any:
    """The root's weights stay gathered after a forward pass without a backward pass."""
    model = shard(build())
    with torch.no_grad():
        model(torch.arange(4, 12, device=DEVICE)[None])
    assert not isinstance(model.model.norm.weight, DTensor)
    return model


def replicated_and_sharded(build: Callable[[], Any]) -> Any:
    mesh = init_device_mesh(DEVICE, (distributed.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    return shard(build(), mesh=mesh)


def half() -> Any:
    return tiny.llama(tied=False).to(torch.bfloat16)


def frozen() -> Any:
    model = tiny.llama()
    model.model.layers[0].requires_grad_(False)
    return model


def resized() -> Any:
    model = tiny.llama()
    model.resize_token_embeddings(tiny.VOCAB + 5)
    return model


LAYOUTS: dict[str, tuple[Callable[[], Any], Callable[[Callable[[], Any]], Any]]] = {
    "plain": (tiny.llama, lambda build: build().to(DEVICE)),
    "plain experts": (tiny.mixtral, lambda build: build().to(DEVICE)),
    "rows": (tiny.llama, lambda build: shard(build())),
    "columns": (tiny.llama, lambda build: shard(build(), shard_placement_fn=columns)),
    "experts": (tiny.mixtral, lambda build: shard(build())),
    "experts by columns": (tiny.qwen3_moe, lambda build: shard(build(), shard_placement_fn=columns)),
    "vision and language": (tiny.llava, lambda build: whole_model(build())),
    "ignored": (tiny.llama, ignoring),
    "gathered root": (tiny.llama, evaluated),
    "copies of shards": (tiny.llama, replicated_and_sharded),
    "mixed precision": (tiny.llama, lambda b: shard(b(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))),
    "offloaded": (tiny.llama, lambda build: shard(build(), offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "pure bfloat16, untied": (half, lambda build: shard(build())),
    "frozen layer": (frozen, lambda build: shard(build())),
    "resized vocabulary": (resized, lambda build: shard(build())),
}


def nudge(model: torch.nn.Module, step: int) -> None:
    """Change every trained shard; copies of the same shard or weight get the same noise."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if not parameter.requires_grad:
                continue
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            seed = 1000 * step + number
            noise = torch.randn(local.shape, generator=torch.Generator().manual_seed(seed))
            local.mul_(1 + 1e-3 * noise.to(local.device, local.dtype))


class Run:
    """A session of one layout; ``check`` compares the newest version with the gathered weights."""

    def __init__(self, name: str, folder: Path, **settings: Any) -> None:
        self.build, lay_out = LAYOUTS[name]
        self.model = lay_out(self.build)
        self.uri = str(folder / name.replace(" ", "-"))
        config = DeltaSyncConfig.build(self.uri, serving_dtype="BF16", **settings)
        self.session = TeamSession(Subject(self.model, None, "BF16", 0), config, None, Metrics())
        self.step = 0

    def train(self) -> None:
        self.step += 1
        nudge(self.model, self.step)
        self.session.step_done(self.step)

    def check(self, name: str) -> None:
        self.session.finish(self.step)
        weights = gathered(self.model)
        if distributed.get_rank() == 0:
            found = bucket.materialise(self.uri)
            expected = bucket.cast_bytes(checkpoint(self.build, weights))
            assert found.keys() == expected.keys(), (name, found.keys() ^ expected.keys())
            wrong = [tensor for tensor in expected if found[tensor] != expected[tensor]]
            assert not wrong, (name, wrong)
            newest = bucket.newest(self.uri)
            assert newest.steps[1] == self.step and newest.version > 1, (name, newest.steps)
            (config,) = Path(self.uri).glob("anchors/*/config.json")
            assert json.loads(config.read_text())["architectures"] == [type(self.build()).__name__]
        self.session.close()


def publish(name: str, folder: Path) -> str:
    run = Run(name, folder)
    for _ in range(3):
        run.train()
    run.check(name)
    return "ok"


def store_fails_for_a_while(folder: Path) -> str:
    """Rank 1's store refuses twice: what it encoded is put again, and nothing is lost or doubled."""
    run = Run("rows", folder / "flaky", publish_timeout=30)
    break_store(run, times=2)
    run.train()
    run.check("flaky")
    return "ok"


def store_stays_down(folder: Path) -> str:
    run = Run("rows", folder / "down", publish_timeout=0.5)
    break_store(run, times=10**6)
    run.train()
    try:
        run.session.finish(1)
    except DeltaSyncError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        run.session.close()
    return "no error"


def break_store(run: Run, times: int) -> None:
    if distributed.get_rank() != 1:
        return
    part, put = run.session._part, run.session._part._put
    left = [times]

    def failing(*args: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise StoreError("deltas/…", expected="a write", got="an injected fault on rank 1")
        put(*args)

    part._put = failing  # type: ignore[method-assign]


def one_rank_cannot_compare(folder: Path) -> str:
    run = Run("rows", folder / "compare")
    if distributed.get_rank() == 1:
        run.session._part.snapshot.diff = lambda image: 1 / 0  # type: ignore[method-assign]
    try:
        run.train()
    except (DeltaSyncError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        run.session.close()
    return "no error"


def layouts_differ(folder: Path) -> str:
    """One rank's model has a layer more: the parts don't make one model, and all ranks say so at the start."""
    config = DeltaSyncConfig.build(str(folder / "differ"))
    model = tiny.llama(layers=2 + distributed.get_rank() % 2)
    try:
        TeamSession(Subject(model, None, "BF16", 0), config, None, Metrics())
    except DeltaSyncError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def context_codec(folder: Path) -> str:
    """Works where ranks hold whole tensors, is refused by name for shards."""
    run = Run("plain", folder / "context", codec="context")
    run.train()
    run.check("context")
    try:
        Run("rows", folder / "refused", codec="context")
    except DeltaSyncError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


CASES = {
    **{name: lambda folder, name=name: publish(name, folder) for name in LAYOUTS},
    "flaky": store_fails_for_a_while,
    "down": store_stays_down,
    "compare": one_rank_cannot_compare,
    "differ": layouts_differ,
    "context": context_codec,
}


def main() -> None:
    folder = Path(json.loads(sys.argv[1])["folder"])
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    said = {}
    for name, case in CASES.items():
        print(f"{time.strftime('%X')} {name}", file=sys.stderr, flush=True)  # what to look at if it hangs
        said[name] = case(folder)
    print(json.dumps(said), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
