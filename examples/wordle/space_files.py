"""What goes into the two Spaces' repositories: their folder under docker/, the guard, and the code under source/."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ("pyproject.toml", "README.md", "LICENSE", "delta_sync", "trl_callback", "vllm_delta_plugin")
ENVIRONMENT = (
    "examples/__init__.py",
    *(f"examples/wordle/{name}.py" for name in ("__init__", "env_server", "game", "protocol", "session", "words")),
    "examples/wordle/data",
)
CPU_IMAGE = "vllm/vllm-openai-cpu:v0.32.0-x86_64"
NOT_CODE = shutil.ignore_patterns("__pycache__", ".*")


def stage_rollouts(folder: Path, *, cpu: bool) -> Path:
    """Fill ``folder`` with the repository of the vLLM Space; ``cpu`` chooses the base image without CUDA."""
    _stage(folder, "vllm-space", PACKAGE)
    if cpu:
        # Spaces pass variables as build arguments; written into the file, what is built does not hang on a setting.
        dockerfile = folder / "Dockerfile"
        lines = dockerfile.read_text().splitlines(keepends=True)
        lines = [f"ARG VLLM_IMAGE={CPU_IMAGE}\n" if line.startswith("ARG VLLM_IMAGE=") else line for line in lines]
        dockerfile.write_text("".join(lines))
    return folder


def stage_environment(folder: Path) -> Path:
    """Fill ``folder`` with the repository of the Wordle Space."""
    _stage(folder, "wordle-space", ENVIRONMENT)
    return folder


def _stage(folder: Path, space: str, code: tuple[str, ...]) -> None:
    shutil.copytree(ROOT / "docker" / space, folder, ignore=NOT_CODE, dirs_exist_ok=True)
    shutil.copy(ROOT / "docker" / "guard.py", folder)
    for name in code:
        origin, target = ROOT / name, folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if origin.is_dir():
            shutil.copytree(origin, target, ignore=NOT_CODE)
        else:
            shutil.copy(origin, target)
