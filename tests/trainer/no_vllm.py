"""Importing this first hides vLLM from the process, as on a trainer's box; it also spares ten seconds of imports."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

_find_spec = importlib.util.find_spec


class _Absent:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "vllm":
            raise ModuleNotFoundError("No module named 'vllm'", name="vllm")


def _find(name: str, package: str | None = None) -> Any:
    return None if name.partition(".")[0] == "vllm" else _find_spec(name, package)


sys.meta_path.insert(0, _Absent())  # type: ignore[arg-type]
importlib.util.find_spec = _find
