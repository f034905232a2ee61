"""Every model family: map traced, sparse update bit-equal to a fresh load, greedy answers equal; docs/COVERAGE.md."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from coverage_table import Table, table
from family_case import Outcome, serve
from helpers.families import FAMILIES, as_served
from helpers.server import free_port
from publishing import Publisher, nudged
from test_refused_settings import BLOCK_FP8, settings

from delta_sync.errors import MappingError
from vllm_delta_plugin.proof import Layout
from vllm_delta_plugin.refusals import check_config

QUICK = ("Llama 4", "DeepSeek-V3")  # rearranged heads; latent attention, a float32 tensor; experts
FLAVOURS = {
    "TP=2": {"tensor_parallel_size": 2},
    "PP=2": {"pipeline_parallel_size": 2},
    "TP=2, EP": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
NO_KERNEL = "vLLM's fp8 kernels for it on a CPU need AMX, or are none"


@pytest.fixture(scope="module")
def cells() -> Iterator[Table]:
    with table() as current:
        yield current


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in FAMILIES])
def test_checkpoints_in_blocks_of_fp8(name: str, tmp_path: Path, cells: Table) -> None:
    """Here by vLLM's own settings for them alone: loading takes a GPU, or a CPU with AMX."""
    family = FAMILIES[name]
    if family.not_on_cpu:
        outcome = Outcome("not run", family.not_on_cpu)
    else:
        model = family.make(tmp_path / "model")
        described = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**described, "quantization_config": BLOCK_FP8}))
        outcome = Outcome("not run", NO_KERNEL)
        try:
            check_config(settings(model))
        except MappingError as error:
            outcome = Outcome("refused", str(error))
    cells.check(name, "fp8, in blocks", outcome)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in FAMILIES])
def test_served_by_one_worker(name: str, tmp_path: Path, cells: Table) -> None:
    family = FAMILIES[name]
    outcome = Outcome("not run", family.not_on_cpu) if family.not_on_cpu else serve(family, tmp_path)
    cells.check(name, "one worker", outcome)


def jobs(names: list[str], options: dict[str, Any], folder: Path) -> tuple[list[list[Any]], dict[str, Publisher]]:
    publishers, out = {}, []
    for name in names:
        old = FAMILIES[name].make(folder / name / "old")
        values = tiny_models.tensors(old)
        new = nudged(values, 0.1, seed=1)
        fresh = tiny_models.rewrite(old, folder / name / "new", new)
        publishers[name] = Publisher(folder / name / "run", as_served(values))
        publishers[name].delta(as_served(new))
        out.append([name, str(old), publishers[name].uri, str(fresh), options])
    return out, publishers


def run_pair(work: list[list[Any]]) -> dict[str, list[dict[str, Any]]]:
    """Both ranks' results by family."""
    port = free_port()
    command = [sys.executable, str(Path(__file__).with_name("rank_pair.py"))]
    ranks = [
        subprocess.Popen([*command, str(rank), str(port), json.dumps(work)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        out = [rank.communicate(timeout=500)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    lines = [json.loads(line) for line in out[0].splitlines() if line.startswith('{"family"')]
    return {line["family"]: line["ranks"] for line in lines}


def judge(ranks: list[dict[str, Any]], publisher: Publisher) -> Outcome:
    """What both ranks' results amount to; AssertionError if they do not add up to what was published."""
    for rank in ranks:
        assert "failed" not in rank, rank
    if reasons := [rank["refused"] for rank in ranks if "refused" in rank]:
        return Outcome("refused", reasons[0])
    if ignored := set(publisher.tensors) - {n for rank in ranks for n in (*rank["tensors"], *rank["aliases"])}:
        return Outcome("refused", f"its loader ignores {sorted(ignored)[0]!r}: deltas of it are refused")
    assert [rank["differing"] for rank in ranks] == [[], []]
    served = {n: (t["dtype"], tuple(t["shape"])) for rank in ranks for n, t in rank["tensors"].items()}
    layout = Layout(served, [rank["regions"] for rank in ranks])  # raises on gaps and overlaps
    published = {n: state.digest for n, state in publisher.origin.tensors.items()}
    assert layout.combine([rank["regions"] for rank in ranks]) == published
    return Outcome("direct")


@pytest.mark.long
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_served_by_two_ranks(flavour: str, tmp_path: Path, cells: Table) -> None:
    names = []
    for name, family in FAMILIES.items():
        if family.not_on_cpu:
            cells.check(name, flavour, Outcome("not run", family.not_on_cpu))
        elif "EP" in flavour and not family.experts:
            cells.check(name, flavour, Outcome("dense"))
        else:
            names.append(name)
    work, publishers = jobs(names, FLAVOURS[flavour], tmp_path)
    results = run_pair(work)
    assert set(results) == set(names)
    wrong = {}
    for name in names:
        try:
            cells.check(name, flavour, judge(results[name], publishers[name]))
        except AssertionError as error:
            wrong[name] = str(error)
    assert not wrong, wrong


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in FAMILIES])
def test_served_as_fp8(name: str, tmp_path: Path, cells: Table) -> None:
    """Rounded by vLLM while it loads, one scale a channel: the one kind for which every CPU has a kernel."""
    family = FAMILIES[name]
    if family.not_on_cpu:
        outcome = Outcome("not run", family.not_on_cpu)
    else:
        try:
            outcome = serve(family, tmp_path, quantization="fp8_per_channel")
        except (ValueError, RuntimeError) as error:
            if not any(word in str(error) for word in ("kernel", "backend", "scaled_fp8_quant() expected at most 0")):
                raise
            outcome = Outcome("not run", NO_KERNEL)
    cells.check(name, "fp8, online", outcome)
