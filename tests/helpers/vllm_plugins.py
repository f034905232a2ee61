"""Modules of the tests as vLLM plugins: an installed distribution that only the servers that are given it see."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType


def environment(folder: Path, *modules: ModuleType) -> dict[str, str]:
    """Write the distribution into ``folder``; the environment in which vLLM calls each module's ``install`` in every
    process."""
    info = folder / "plugins_of_tests-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins_of_tests\nVersion: 1\n")
    lines = ["[vllm.general_plugins]"]
    for module in modules:
        name = module.__name__.rpartition(".")[2]
        assert module.__file__ is not None
        (folder / f"{name}.py").write_text(Path(module.__file__).read_text())
        lines.append(f"{name} = {name}:install")
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    here = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": str(folder) + (os.pathsep + here if here else "")}
