"""Every model family: map traced, sparse update bit-equal to a fresh load, greedy answers equal; docs/COVERAGE.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from coverage_table import Table, table
from family_case import Outcome, serve
from helpers.families import FAMILIES

RARE = (pytest.mark.long, pytest.mark.rare)
QUICK = ("Llama 4", "DeepSeek-V3")  # rearranged heads; latent attention, a float32 tensor; experts


@pytest.fixture(scope="module")
def cells() -> Iterator[Table]:
    with table() as current:
        yield current


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else RARE) for n in FAMILIES])
def test_served_by_one_worker(name: str, tmp_path: Path, cells: Table) -> None:
    family = FAMILIES[name]
    outcome = Outcome("not run", family.not_on_cpu) if family.not_on_cpu else serve(family, tmp_path)
    cells.check(name, "one worker", outcome)
