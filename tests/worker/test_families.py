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
import torch
from coverage_table import check
from family_case import NOT_LOADED, Outcome, serve
from family_process import Case, apart
from helpers.families import FAMILIES, Family, as_served
from helpers.server import free_port
from publishing import Publisher, nudged

from vllm_delta_plugin.proof import Layout

QUICK = ("Llama 4", "DeepSeek-V3")  # rearranged heads; latent attention, a float32 tensor; experts
AS_FP8 = ("Qwen3", "Llama 3", "Gemma 3", "Phi-3", "Phi-2", "Qwen3.5")  # tied, untied, fused by the checkpoint, refused
ON_GPU = torch.cuda.is_available()
ALONE, FP8, BLOCKS = (f"{c}, GPU" if ON_GPU else c for c in ("one worker", "fp8, online", "fp8, in blocks"))
NO_KERNEL = "vLLM has no fp8 kernel for it on a " + ("GPU" if ON_GPU else "CPU")
BLOCKS_RUN = pytest.mark.skipif(not (ON_GPU or torch.cpu._is_amx_tile_supported()), reason=NO_KERNEL)
SELDOM = () if ON_GPU else (pytest.mark.long, pytest.mark.rare)
LACKS = {  # why vLLM could not serve it here, by its own words or torch's
    "Invalid type of HuggingFace config": "this vLLM serves its text model together with the part that sees only",
    NOT_LOADED: "this vLLM's loader leaves its experts out, and serves whatever the memory held",
    "kernel": NO_KERNEL,
    "backend": NO_KERNEL,
    "scaled_fp8_quant() expected at most 0": NO_KERNEL,
    "does not support apply_router_weight_on_input": NO_KERNEL,
    "expected scalar type Float but found BFloat16": NO_KERNEL,  # a CPU's fp8 products in blocks take float32 biases
}
FLAVOURS = {
    "TP=2": {"tensor_parallel_size": 2},
    "PP=2": {"pipeline_parallel_size": 2},
    "TP=2, EP": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}


@pytest.fixture(scope="module")
def with_torchvision() -> Iterator[Case]:
    with apart() as there:
        yield there


@pytest.fixture
def measure(request: pytest.FixtureRequest) -> Case:
    """Serve: here, or where the family needs torchvision in the process that can import it."""

    def measured(family: Family, folder: Path, **options: Any) -> Outcome:
        ask = request.getfixturevalue("with_torchvision") if family.torchvision else serve
        return ask(family, folder, **options)

    return measured


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in FAMILIES])
def test_served_by_one_worker(name: str, tmp_path: Path, measure: Case) -> None:
    check(name, ALONE, where_it_runs(measure, FAMILIES[name], tmp_path))


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
        out = [rank.communicate(timeout=590)[0] for rank in ranks]
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
def test_served_by_two_ranks(flavour: str, tmp_path: Path) -> None:
    names = []
    for name, family in FAMILIES.items():
        if "EP" in flavour and not family.experts:
            check(name, flavour, Outcome("dense"))
        else:
            names.append(name)
    work, publishers = jobs(names, FLAVOURS[flavour], tmp_path)
    results = run_pair(work)
    assert set(results) == set(names)
    wrong = {}
    for name in names:
        try:
            check(name, flavour, judge(results[name], publishers[name]))
        except AssertionError as error:
            wrong[name] = str(error)
    assert not wrong, wrong


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long if n in AS_FP8 else SELDOM) for n in FAMILIES])
def test_served_as_fp8(name: str, tmp_path: Path, measure: Case) -> None:
    """Rounded by vLLM while it loads, one scale a channel: the one kind for which every CPU has a kernel."""
    options = {"quantization": "fp8_per_channel", "wide": ON_GPU}
    check(name, FP8, where_it_runs(measure, FAMILIES[name], tmp_path, **options))


@BLOCKS_RUN
@pytest.mark.parametrize("name", [pytest.param(name, marks=SELDOM) for name in FAMILIES])
def test_checkpoints_in_blocks_of_fp8(name: str, tmp_path: Path, measure: Case) -> None:
    """Their deltas are of the bytes and the scales; wider models, since a block is 128 by 128."""
    check(name, BLOCKS, where_it_runs(measure, FAMILIES[name], tmp_path, blocks=True))


def where_it_runs(measure: Case, family: Family, folder: Path, **options: Any) -> Outcome:
    """What becomes of the model, "not run" where vLLM itself cannot serve it here."""
    try:
        return measure(family, folder, **options)
    except (ValueError, RuntimeError, TypeError) as error:
        why = next((why for words, why in LACKS.items() if words in str(error)), None)
        if why is None:
            raise
        return Outcome("not run", why)
