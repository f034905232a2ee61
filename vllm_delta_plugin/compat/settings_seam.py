"""Seam: vLLM's settings that decide whether deltas can be served (vLLM 0.26 to 0.32).

None is read with a default: one that vLLM renamed would look like one that is off.
"""

from __future__ import annotations

from typing import Any

from vllm_delta_plugin.compat.seam import require, vllm_version

_ABSENT = {"parallel_config.enable_fault_tolerance": ("0.26.",)}  # setting -> the releases that are known without it


def setting(config: Any, path: str) -> Any:
    """The value at a dotted path of a config, None in a release known not to have it; SeamError if it is gone."""
    place = config
    for name in path.split("."):
        if not hasattr(place, name) and vllm_version().startswith(_ABSENT.get(path, ())):
            return None
        require(place, name)
        place = getattr(place, name)
    return place
