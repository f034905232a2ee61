"""docs/COVERAGE.md: written from the tests' own outcomes, and compared with them ever after."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from family_case import Outcome
from helpers.families import FAMILIES

DOC = Path(__file__).parents[2] / "docs" / "COVERAGE.md"
WRITING = os.environ.get("DELTA_SYNC_WRITE_COVERAGE") == "1"
_ON_GPU = ("one worker, GPU", "fp8, online, GPU", "fp8, in blocks, GPU")
COLUMNS = ("one worker", "TP=2", "TP=2, EP", "PP=2", "fp8, online", "fp8, in blocks", *_ON_GPU)
_BEGIN, _END = "<!-- coverage:begin, written by `make coverage-table` -->", "<!-- coverage:end -->"


@dataclass
class Table:
    """Outcomes by family and column."""

    cells: dict[tuple[str, str], Outcome] = field(default_factory=dict)

    def check(self, family: str, column: str, outcome: Outcome) -> None:
        """Compare with what the document says; while it is being written, note what it must say."""
        if WRITING:
            self.cells[family, column] = outcome
            return
        wanted = read().cells.get((family, column), Outcome("direct"))
        assert outcome == wanted, f"{family}, {column}: fix it, or run `make coverage-table`"

    def markdown(self) -> str:
        """The table, and the reasons of cells that have one, numbered."""
        columns = [column for column in COLUMNS if any(column == measured for _, measured in self.cells)]
        outcomes = (self.cells.get((family, column)) for family in FAMILIES for column in columns)
        reasons = list(dict.fromkeys(outcome.reason for outcome in outcomes if outcome and outcome.reason))
        lines = ["| family | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for family in FAMILIES:
            found = (self.cells.get((family, column)) for column in columns)
            lines.append(" | ".join([f"| {family}", *(_cell(outcome, reasons) for outcome in found)]) + " |")
        return "\n".join([*lines, "", *(f"* [{number}] {reason}" for number, reason in enumerate(reasons, 1))])


def _cell(outcome: Outcome | None, reasons: list[str]) -> str:
    if outcome is None:
        return "-"
    return outcome.cell + (f" [{reasons.index(outcome.reason) + 1}]" if outcome.reason else "")


def read() -> Table:
    """The committed table."""
    body = DOC.read_text().split(_BEGIN)[1].split(_END)[0]
    reasons = dict(re.findall(r"^\* \[(\d+)\] (.*)$", body, re.M))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line[:1] == "|"]
    table = Table()
    for family, *cells in rows[2:]:
        for column, cell in zip(rows[0][1:], cells, strict=True):
            word, _, number = cell.partition(" [")
            if word != "-":
                table.cells[family, column] = Outcome(word, reasons[number.rstrip("]")] if number else "")
    return table


@contextmanager
def table() -> Iterator[Table]:
    """The table of one test run; if that was asked for, what was measured replaces the document's cells at the end."""
    current = Table()
    yield current
    if WRITING:
        whole = Table(read().cells | current.cells)
        head, rest = DOC.read_text().split(_BEGIN)
        DOC.write_text(f"{head}{_BEGIN}\n\n{whole.markdown()}\n\n{_END}{rest.split(_END)[1]}")
