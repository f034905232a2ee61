"""What a user installs is what works: the built wheel, in virtualenvs that hold nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str | Path, **options: object) -> str:
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, check=False, timeout=900, **options)
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)
    return next(folder.glob("delta_weight_sync-*.whl"))


def test_the_wheel_holds_three_packages_and_the_entry_points(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"delta_sync", "trl_callback", "vllm_delta_plugin"}
    assert "[vllm.general_plugins]" in points
    assert "[vllm.endpoint_plugins]" in points
    assert "delta-sync = delta_sync.cli:main" in points


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_trl_extra_trains_where_vllm_is_not_installed(wheel: Path, tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    run(python, "-m", "pip", "install", "-q", f"torch=={torch.__version__}")
    run(python, "-m", "pip", "install", "-q", f"{wheel}[trl]", "pytest", "pytest-timeout", "hypothesis")
    # The tests are copied away from the checkout, so that the packages come from the wheel.
    run("cp", "-r", ROOT / "tests", tmp_path / "tests")
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    where = run(
        python, "-c", "import importlib.util as u, delta_sync; print(u.find_spec('vllm'), delta_sync.__file__)",
        cwd=tmp_path, env=clean,
    )  # fmt: skip
    assert where.startswith("None ")
    assert "site-packages" in where
    tests = [f"tests/trainer/test_{name}.py" for name in ("rollout_client", "snapshot", "publisher", "trainers")]
    out = run(python, "-m", "pytest", "-q", "-m", "not long", "--timeout", "600", *tests, cwd=tmp_path, env=clean)
    assert " passed" in out
    assert "skipped" not in out
