"""What numba keeps of compiled loops: nothing depends on it, and an upgrade leaves none of it in use."""

import errno
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numba.core.caching import IndexDataCacheFile

from delta_sync import jit

LOOPS = """
from delta_sync.jit import compiled

@compiled
def more(x):
    return x + 1
"""
SCRIPT = """
from numba.core import caching

def no_writable_folder(self):
    raise OSError("read-only file system")

caching._CacheLocator.ensure_cache_path = no_writable_folder
import numpy as np
from delta_sync import DTYPES, diff
delta = diff("w", DTYPES["BF16"], (3,), np.array([1, 2, 3], np.uint16), np.array([1, 4, 3], np.uint16))
print(delta.positions.tolist(), delta.values.tolist())
"""


def test_import_and_use_without_a_writable_cache():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[1] [2]"), done.stderr


def load(folder: Path) -> Callable[[int], int]:
    """The function as a new process would have it."""
    path = folder / "loops.py"
    if not path.exists():
        path.write_text(LOOPS)
    spec = importlib.util.spec_from_file_location("loops", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[int], int] = module.more
    return found


def test_a_full_disk_costs_the_cache_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(IndexDataCacheFile, "_open_for_write", full)
    assert load(tmp_path)(1) == 2


@pytest.mark.parametrize("kind", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize("left", [0, 20])
def test_what_a_power_cut_left_of_a_cache_is_no_reason_to_fail(tmp_path: Path, kind: str, left: int) -> None:
    assert load(tmp_path)(1) == 2
    [path] = tmp_path.rglob(kind)
    path.write_bytes(path.read_bytes()[:left])
    assert load(tmp_path)(1) == 2


def test_what_was_kept_is_used_until_any_file_with_loops_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept() -> bool:
        more: Any = load(tmp_path)
        assert more(1) == 2
        return bool(more.stats.cache_hits)

    assert [kept(), kept()] == [False, True]
    monkeypatch.setattr(jit, "_sources", lambda: "those of another release")
    assert [kept(), kept()] == [False, True]
