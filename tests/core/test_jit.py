"""The compiled loops also work where numba can keep no cache, as in a read-only install without a home."""

import subprocess
import sys

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
