"""Scripts that no test runs import modules that exist, and names that those have."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = sorted(path for path in (ROOT / "tests").iterdir() if path.is_dir())
# What scripts put on the path.
PLACES = [ROOT, ROOT / "tests", ROOT / "benchmarks", ROOT / "benchmarks" / "gpu", *TESTS]
ELSEWHERE = {"deepspeed", "mkdocs", "playwright"}  # packages that the tests' environment need not have
SCRIPTS = sorted(path for folder in ("benchmarks", "scripts") for path in (ROOT / folder).rglob("*.py"))


def _local(module: str, beside: Path) -> Path | None:
    """The project's file that an import of ``module`` finds, in a script in this folder."""
    parts = Path(*module.split("."))
    for place in (beside, *PLACES):
        for path in (place / parts.with_suffix(".py"), place / parts / "__init__.py"):
            if path.is_file():
                return path
    return None


def _names(path: Path) -> set[str]:
    """What a module's file binds anywhere, and the modules beside it if it is a package's."""
    found = {other.stem for other in path.parent.iterdir()} if path.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return found


def _missing(path: Path) -> list[str]:
    missing, beside = [], path.parent
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            missing += [alias.name for alias in node.names if not _exists(alias.name, beside)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            if (local := _local(node.module, beside)) is not None:
                names = _names(local)
                missing += [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in names]
            elif not _exists(node.module, beside):
                missing.append(node.module)
    return missing


def _exists(module: str, beside: Path) -> bool:
    top = module.split(".")[0]
    return _local(module, beside) is not None or top in ELSEWHERE or find_spec(top) is not None


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_imports_what_exists(path: Path) -> None:
    assert _missing(path) == []


def test_a_module_or_name_that_is_gone_is_noticed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    lines = ["import json", "from kernel_times import model, gone", "from kernels import x", "import no_such_thing.y"]
    script.write_text("\n".join(lines))
    assert _missing(script) == ["kernel_times.gone", "kernels", "no_such_thing.y"]
