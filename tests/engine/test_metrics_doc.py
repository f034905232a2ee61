"""The tables of docs/METRICS.md are those of the code. ``python tests/engine/test_metrics_doc.py`` writes them anew."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from delta_sync.tracing import SPANS
from trl_callback.metrics import MEANING, PREFIX
from vllm_delta_plugin.measures import KINDS
from vllm_delta_plugin.prometheus import METRICS

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs" / "METRICS.md"
PACKAGES = ("delta_sync", "trl_callback", "vllm_delta_plugin")


def calls(*packages: str) -> Iterator[ast.Call]:
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield from (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def prometheus_table() -> list[str]:
    rows = ["| metric | kind | more labels | meaning |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return rows


def trainer_table() -> list[str]:
    return ["| number | meaning |", "|---|---|", *(f"| `{PREFIX}{name}` | {text} |" for name, text in MEANING.items())]


def spans_table() -> list[str]:
    return ["| span | what it lasts for |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in SPANS.items())]


SECTIONS = {"prometheus": prometheus_table, "trainer": trainer_table, "spans": spans_table}


def rendered(text: str, name: str) -> str:
    pattern = rf"(<!-- {name}: [^>]*-->\n).*?(<!-- end -->)"
    body = "\n".join(SECTIONS[name]())
    new, count = re.subn(pattern, lambda found: f"{found[1]}\n{body}\n\n{found[2]}", text, flags=re.S)
    assert count == 1, f"section {name} of {DOC}"
    return new


@pytest.mark.parametrize("name", SECTIONS)
def test_the_tables_are_fresh(name: str) -> None:
    text = DOC.read_text()
    assert text == rendered(text, name), "run: python tests/engine/test_metrics_doc.py"


def test_every_number_that_a_trainer_records_has_a_meaning() -> None:
    recorded = {word.arg for call in calls("trl_callback") if name_of(call) == "record" for word in call.keywords}
    assert recorded == MEANING.keys()


def test_every_span_that_is_made_has_a_meaning() -> None:
    makers = {"begin", "span", "child"}
    first = [call.args[0] for call in calls(*PACKAGES) if name_of(call) in makers and call.args]
    made = {arg.value for arg in first if isinstance(arg, ast.Constant) and str(arg.value).startswith("delta_sync.")}
    assert made == SPANS.keys()


def test_every_kind_of_failure_is_named() -> None:
    text = DOC.read_text()
    assert [kind for kind in KINDS if f"`{kind}`" not in text] == []


def write() -> None:
    for name in SECTIONS:
        DOC.write_text(rendered(DOC.read_text(), name))


if __name__ == "__main__":
    write()
