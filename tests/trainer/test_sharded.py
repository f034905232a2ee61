"""Real trainers over two and three processes: what is published is what gathering all weights would have given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import bucket
import pytest
import tiny
import torch
from several_ranks import FSDP2, ZERO, run_ranks, zero
from stand_in_replica import StandInReplica

from delta_sync.ledger import AnchorRef, Ledger
from delta_sync.store.open import open_store


def train(folder: Path, ranks: int, *, environment: dict[str, str] | None = None, **said: Any) -> str:
    """Train in ``folder``; the bucket's URI, every version of it proven to be the gathered weights of its step."""
    uri = str(folder / "bucket")
    said = {"folder": str(folder), "uri": uri, "steps": 3, **said}
    assert run_ranks(ranks, "sharded_child.py", said, environment) == [
        f"rank {rank} trained {said['steps']}" for rank in range(ranks)
    ]
    started_there = bool(said.get("url"))  # a server that held these weights already needs no anchor
    assert check_every_version(folder, uri, from_start=started_there)[-1] == said["steps"]
    return uri


def check_every_version(folder: Path, uri: str, *, from_start: bool) -> list[int]:
    """The last step of each version, once its bits are proven those of ``folder/step-N.pt``."""
    steps = []
    start = bucket.tensors(torch.load(folder / "step-0.pt", weights_only=True)) if from_start else []
    for manifest, bits in bucket.versions(uri, start):
        expected = torch.load(folder / f"step-{manifest.steps[1]}.pt", weights_only=True)
        assert bits == bucket.cast_bytes(expected), f"version {manifest.version} of step {manifest.steps[1]}"
        steps.append(manifest.steps[1])
    return steps


def layers(name: str) -> dict[str, str]:
    return {**FSDP2, "FSDP_TRANSFORMER_CLS_TO_WRAP": name}


LLAMA = layers("LlamaDecoderLayer")


def roll_out(folder: Path, ranks: int, **said: Any) -> StandInReplica:
    """GRPO against a replica that follows the bucket; every version it went to and its final bits are proven."""
    replica = StandInReplica(str(folder / "bucket"), tiny.llama())
    with replica.running():
        train(folder, ranks, url=replica.url, **said)
    final = torch.load(folder / f"step-{said['steps']}.pt", weights_only=True)
    assert {name: bits.tobytes() for name, bits in replica.live.items()} == bucket.cast_bytes(final)
    assert replica.anchors_taken == 0 and replica.refusals == 0
    assert len(replica.served) >= said["steps"]  # on-policy: every step's weights were rolled out from
    return replica


@pytest.mark.long
def test_grpo_over_fsdp2_rolls_out_from_the_weights_just_trained(tmp_path: Path) -> None:
    roll_out(tmp_path, 2, environment=LLAMA, steps=3)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("environment", [{}, LLAMA], ids=["ddp", "fsdp2"])
def test_twenty_grpo_steps(tmp_path: Path, ranks: int, environment: dict[str, str]) -> None:
    roll_out(tmp_path, ranks, environment=environment, steps=20)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_twenty_grpo_steps_over_zero3(tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("deepspeed")
    settings = {"serving_dtype": "BF16"}
    roll_out(tmp_path, ranks, environment=ZERO, steps=20, arguments=zero(3, bf16=False), settings=settings)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_fsdp2_publishes_shards_of_unequal_size(tmp_path: Path, ranks: int) -> None:
    """32 rows over 3 ranks are 11, 11 and 10; none of them ever sees another's. The anchor is the ranks' too."""
    uri = train(tmp_path, ranks, environment=LLAMA)
    assert {len(m.objects) for m in bucket.chain(uri)[1:]} == {ranks}


def test_after_a_reset_all_ranks_begin_a_chain(tmp_path: Path) -> None:
    """Its origin is what was published last, with complete weights; what was on its way comes after it, coded anew."""
    uri = train(tmp_path, 2, environment=LLAMA, steps=4, reset_after=2)
    versions = bucket.chain(uri)
    assert [m.version for m in versions] == list(range(1, len(versions) + 1))
    assert {m.epoch for m in versions} == {1, 3}, "the second is the reset's own"
    origin = next(m for m in versions if m.epoch == 3)
    assert origin.kind == "origin" and origin.steps[1] <= 4
    assert AnchorRef(origin.version, 3) in Ledger(open_store(uri)).anchors()
    assert {len(m.objects) for m in versions if m.version > origin.version} == {2}


@pytest.mark.long
def test_fsdp2_publishes_experts_under_their_checkpoint_names(tmp_path: Path) -> None:
    """Four experts in one tensor, sharded over three ranks, are twelve tensors of the checkpoint."""
    train(tmp_path, 3, environment=layers("Qwen3MoeDecoderLayer"), model="qwen3_moe")


@pytest.mark.long
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 2), (3, 2), (3, 3)])
def test_deepspeed_publishes_what_the_forward_computes_with(tmp_path: Path, stage: int, ranks: int, bf16: bool) -> None:
    """With bf16 the trained copies are bfloat16 and the float32 masters the optimizer's; without, they are cast."""
    pytest.importorskip("deepspeed")
    settings = {"serving_dtype": "BF16"}
    train(tmp_path, ranks, environment=ZERO, arguments=zero(stage, bf16=bf16), settings=settings)


@pytest.mark.long
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.rare), "fsdp2"])
def test_the_memory_benchmark_publishes_equal_versions(strategy: str) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "sharded_memory.py"
    sizes = ["--steps", "20", "--hidden", "256", "--layers", "4"]
    done = subprocess.run(
        [sys.executable, str(script), "--strategy", strategy, *sizes],
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    said = json.loads(done.stdout.strip().splitlines()[-1])
    first, _ = said["rows"]
    assert (first["equal"], first["versions"]) == (20, 20)


@pytest.mark.long
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.rare), "fsdp2", "zero3"])
def test_the_grpo_benchmark_serves_what_gathering_gives(strategy: str) -> None:
    """Its exit says so: of every version the plugin's live bits, by a hash that knows nothing of our digests."""
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    script = Path(__file__).parents[2] / "benchmarks" / "sharded_grpo.py"
    sizes = ["--ranks", "3", "--steps", "3", "--hidden", "64", "--layers", "2", "--vocab", "500"]
    done = subprocess.run(
        [sys.executable, str(script), "--strategy", strategy, *sizes],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "with the bits that were gathered: 4 of 4" in done.stdout
