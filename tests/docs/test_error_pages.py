"""No error, state or refusal that a user may meet is missing from the pages that explain them."""

from __future__ import annotations

import ast
import re
import sys
from typing import get_args

from blocks import ROOT

from delta_sync import errors
from delta_sync.ack import State

sys.path.append(str(ROOT / "scripts" / "site"))
import messages

OPERATIONS = (ROOT / "docs" / "OPERATIONS.md").read_text()
SERVING = (ROOT / "docs" / "SERVING.md").read_text()


def first_cells(text: str) -> set[str]:
    """What is in backquotes in the first column of a page's tables."""
    return set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))


def test_every_error_class_is_explained():
    classes = messages.user_errors()
    assert {name for name in vars(errors) if name.endswith("Error")} - {"TimeoutError"} <= classes
    assert classes <= first_cells(OPERATIONS), classes - first_cells(OPERATIONS)


def test_no_class_is_explained_that_is_gone():
    named = {cell for cell in first_cells(OPERATIONS) if cell[0].isupper() and cell.isidentifier()}
    assert named <= messages.user_errors()


def test_every_state_of_a_replica_is_explained():
    assert {*get_args(State), "waiting"} <= first_cells(OPERATIONS)


def test_every_reason_of_an_answer_is_explained():
    tree = ast.parse((ROOT / "vllm_delta_plugin" / "version_gate.py").read_text())
    reasons = {
        node.args[1].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "refuse"
        and isinstance(node.args[1], ast.Constant)
    }
    reasons |= {
        node.value.elts[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Return)
        and isinstance(node.value, ast.Tuple)
        and isinstance(node.value.elts[0], ast.Constant)
    } - {None}
    assert len(reasons) >= 8
    explained = set(re.findall(r"^\| \d{3} \| `(\w+)` \|", SERVING, re.MULTILINE))
    assert reasons == explained


def test_the_page_of_messages_has_every_raise():
    """Counted apart from the page's own walk: each ``raise Class(`` of ours that names what it is about."""
    kinds = "|".join(messages.user_errors())
    raised = 0
    for package in messages.PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            raised += len(re.findall(rf"raise (?:{kinds})\(\s*f?\"", path.read_text()))
    page = messages.page()
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| about")]
    assert raised > 100
    assert len(messages.messages()) == len(rows) >= raised * 0.9  # some are written alike in two places
    assert "create-only writes in <var>self.uri</var>" in page
