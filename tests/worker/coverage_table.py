"""docs/COVERAGE.md: written from the tests' own outcomes, and compared with them ever after."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from family_case import Outcome
from helpers.families import FAMILIES

DOC = Path(__file__).parents[2] / "docs" / "COVERAGE.md"
WRITING = os.environ.get("DELTA_SYNC_WRITE_COVERAGE") == "1"
_ON_GPU = ("one worker, GPU", "fp8, online, GPU", "fp8, in blocks, GPU")
COLUMNS = ("one worker", "TP=2", "TP=2, EP", "PP=2", "fp8, online", "fp8, in blocks", *_ON_GPU)
_BEGIN, _END = "<!-- coverage:begin, written by `make coverage-table` -->", "<!-- coverage:end -->"

Cells = dict[tuple[str, str], Outcome]  # by family and column


def check(family: str, column: str, outcome: Outcome) -> None:
    """Compare with what the document says, or write it there at once if that was asked for."""
    if WRITING:
        write(DOC, {(family, column): outcome})
        return
    wanted = read(DOC.read_text()).get((family, column), Outcome("direct"))
    assert outcome == wanted, f"{family}, {column}: fix it, or run `make coverage-table`"


def read(text: str) -> Cells:
    """The document's cells."""
    body = text.split(_BEGIN)[1].split(_END)[0]
    reasons = dict(re.findall(r"^\* \[(\d+)\] (.*)$", body, re.M))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line[:1] == "|"]
    cells: Cells = {}
    for family, *found in rows[2:]:
        for column, cell in zip(rows[0][1:], found, strict=True):
            word, _, number = cell.partition(" [")
            if word != "-":
                cells[family, column] = Outcome(word, reasons[number.rstrip("]")] if number else "")
    return cells


def write(document: Path, measured: Cells) -> None:
    """Replace cells of the document, beside other processes that do the same."""
    with document.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = file.read()
        head, rest = text.split(_BEGIN)
        file.seek(0)
        file.write(f"{head}{_BEGIN}\n\n{markdown(read(text) | measured)}\n\n{_END}{rest.split(_END)[1]}")
        file.truncate()


def markdown(cells: Cells) -> str:
    """The table, and the reasons of cells that have one, numbered."""
    columns = [column for column in COLUMNS if any(column == measured for _, measured in cells)]
    outcomes = (cells.get((family, column)) for family in FAMILIES for column in columns)
    reasons = list(dict.fromkeys(outcome.reason for outcome in outcomes if outcome and outcome.reason))
    lines = ["| family | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for family in FAMILIES:
        found = (cells.get((family, column)) for column in columns)
        lines.append(" | ".join([f"| {family}", *(_cell(outcome, reasons) for outcome in found)]) + " |")
    return "\n".join([*lines, "", *(f"* [{number}] {reason}" for number, reason in enumerate(reasons, 1))])


def _cell(outcome: Outcome | None, reasons: list[str]) -> str:
    if outcome is None:
        return "-"
    return outcome.cell + (f" [{reasons.index(outcome.reason) + 1}]" if outcome.reason else "")
