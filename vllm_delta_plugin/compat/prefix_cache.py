"""Seam: KVCacheManager's prefix-cache look-up, where a request waiting since before a commit gets new block hashes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_delta_plugin.cache_salt import ATTRIBUTE, Salted
from vllm_delta_plugin.compat.seam import require, wrap


def install() -> None:
    """Wrap the look-ups once; SeamError if the first or Request's hashing is gone."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    require(Request, "update_block_hashes")
    wrap(KVCacheManager, "get_computed_blocks", _refreshing)
    if hasattr(KVCacheManager, "get_computed_blocks_for_connector"):  # vLLM 0.26 asks get_computed_blocks for both
        wrap(KVCacheManager, "get_computed_blocks_for_connector", _refreshing)


def _refreshing(original: Callable[..., Any]) -> Callable[..., Any]:
    def look_up(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        salted: Salted | None = getattr(request, ATTRIBUTE, None)
        if salted is not None:
            salted.refresh(request)
        return original(self, request, *args, **kwargs)

    return look_up
