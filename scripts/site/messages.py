"""The page of all error messages, read out of the code: what each is about, what it expected and what to do."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("delta_sync", "trl_callback", "vllm_delta_plugin")
HEAD = """# Error messages

Every message that an error of delta-weight-sync can begin with, read out of the code when this page was built. It reads
*about, expected …, got …. Remedy: …*; <var>slanted</var> parts are filled in when it happens. Search for words of yours
that are no names. What the classes mean, and what to do first, is in [Operations](OPERATIONS.md).
"""


@dataclass(frozen=True, order=True)
class Message:
    """One place that makes an error; texts are templates."""

    kind: str
    about: str
    expected: str
    remedy: str


def error_classes() -> dict[str, str]:
    """Every exception class of the packages, and the first of its bases."""
    found = {"DeltaSyncError": "Exception"}
    for tree in _trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.bases and isinstance(node.bases[0], ast.Name):
                base = node.bases[0].id
                if base.endswith(("Error", "Exception")):
                    found[node.name] = base
    return found


def user_errors() -> set[str]:
    """Those that descend from DeltaSyncError: what a user may meet."""
    bases = error_classes()

    def descends(name: str) -> bool:
        return name == "DeltaSyncError" or (name in bases and descends(bases[name]))

    return {name for name in bases if descends(name)}


def messages() -> list[Message]:
    """Each call of such a class that says what it is about, sorted by class and text, once."""
    kinds = user_errors()
    found = set()
    for tree in _trees().values():
        for scope, call in _calls(tree):
            name = call.func.id if isinstance(call.func, ast.Name) else ""
            if name in kinds and call.args:
                named = {k.arg: _text(k.value, scope) for k in call.keywords}
                about, expected = _text(call.args[0], scope), named.get("expected", "")
                found.add(Message(name, about, expected, named.get("remedy", "")))
    return sorted(found)


def page() -> str:
    """The page as Markdown."""
    by_kind = defaultdict(list)
    for message in messages():
        by_kind[message.kind].append(message)
    parts = [HEAD]
    for kind, rows in by_kind.items():
        parts.append(f"\n## {kind}\n\n| about | expected | remedy |\n|---|---|---|\n")
        parts += [f"| {_cell(row.about)} | {_cell(row.expected)} | {_cell(row.remedy)} |\n" for row in rows]
    return "".join(parts)


@cache
def _trees() -> dict[str, ast.Module]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}


def _calls(tree: ast.AST, scope: ast.AST | None = None) -> Iterator[tuple[ast.AST, ast.Call]]:
    for node in ast.iter_child_nodes(tree):
        inside = node if isinstance(node, ast.FunctionDef) else scope
        if isinstance(node, ast.Call):
            yield inside or tree, node
        yield from _calls(node, inside)


def _text(node: ast.expr, scope: ast.AST) -> str:
    """A template of the text; a name that is set once in its function stands for what it is set to."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, scope) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"«{ast.unparse(node.value)}»"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, scope) + _text(node.right, scope)
    if isinstance(node, ast.IfExp):
        return f"{_text(node.body, scope)} / {_text(node.orelse, scope)}"
    if isinstance(node, ast.Name):
        values = _assigned(node.id, scope)
        if len(values) == 1 and not isinstance(values[0], ast.Name):
            return _text(values[0], scope)
    return f"«{ast.unparse(node)}»"


def _assigned(name: str, scope: ast.AST) -> list[ast.expr]:
    found = []
    for node in ast.walk(scope):
        if not isinstance(node, ast.Assign):
            continue
        [target, *_] = node.targets
        if isinstance(target, ast.Name) and target.id == name:
            found.append(node.value)
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = zip(target.elts, node.value.elts, strict=False)
            found += [value for one, value in pairs if isinstance(one, ast.Name) and one.id == name]
    return found


def _cell(text: str) -> str:
    for sign, code in (
        ("&", "&amp;"),
        ("|", "&#124;"),
        ("<", "&lt;"),
        ("*", "\\*"),
        ("`", "\\`"),
        ("[", "\\["),
        ("_", "\\_"),
    ):
        text = text.replace(sign, code)
    return text.replace("«", "<var>").replace("»", "</var>")
