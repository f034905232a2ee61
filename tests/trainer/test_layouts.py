"""Every way in which ranks may hold a model, published without a trainer around it, and what goes wrong there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts_child import LAYOUTS
from several_ranks import run_ranks

RANKS = min(torch.cuda.device_count(), 3) or 3


@pytest.fixture(scope="module")
def said(tmp_path_factory: Any) -> list[dict[str, str]]:
    """What each rank says of each case; one run, as starting the processes takes longest."""
    folder: Path = tmp_path_factory.mktemp("layouts")
    return [json.loads(line) for line in run_ranks(RANKS, "layouts_child.py", {"folder": str(folder)})]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_published_is_what_gathering_would_give(said: list[dict[str, str]], layout: str) -> None:
    assert [rank[layout] for rank in said] == ["ok"] * RANKS


def test_a_rank_whose_store_fails_for_a_while_loses_nothing(said: list[dict[str, str]]) -> None:
    assert [rank["flaky"] for rank in said] == ["ok"] * RANKS


def test_a_rank_whose_store_stays_down_stops_all_with_its_reason(said: list[dict[str, str]]) -> None:
    assert said[0]["down"].startswith("StoreError: rank 1, ")
    assert all("an injected fault on rank 1" in rank["down"] for rank in said)


def test_a_rank_that_cannot_compare_stops_all_with_its_reason(said: list[dict[str, str]]) -> None:
    assert said[1]["compare"].startswith("ZeroDivisionError")
    others = [rank["compare"] for number, rank in enumerate(said) if number != 1]
    assert all("a failure on rank 1: ZeroDivisionError" in other for other in others)


def test_ranks_whose_parts_are_not_one_model_are_refused_at_the_start(said: list[dict[str, str]]) -> None:
    assert all("MappingError: " in rank["differ"] and "exactly once" in rank["differ"] for rank in said)


def test_the_context_codec_works_for_whole_tensors_and_is_refused_for_shards(said: list[dict[str, str]]) -> None:
    assert all(rank["context"].startswith("MappingError: codec 'context'") for rank in said)
