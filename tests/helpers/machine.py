"""What an engine is asked for on a machine with GPUs, where the tests' engines share a card; nothing on a CPU."""

from __future__ import annotations

from typing import Any

import torch

# No multicast between cards, no kernels that FlashInfer compiles for minutes at the first batch; the cache's size is
# said, as vLLM can measure what is left for it only where nobody else frees memory of the card meanwhile.
CACHE = 2 << 30
ON_GPU: dict[str, Any] = {
    "gpu_memory_utilization": 0.12,
    "kv_cache_memory_bytes": CACHE,
    "disable_custom_all_reduce": True,
    "moe_backend": "triton",
    "gdn_prefill_backend": "triton",
}
LLM_ARGS: dict[str, Any] = ON_GPU if torch.cuda.is_available() else {}
_SERVED = ("--gpu-memory-utilization", "0.12", "--kv-cache-memory-bytes", str(CACHE))
_KERNELS = ("--disable-custom-all-reduce", "--moe-backend", "triton", "--gdn-prefill-backend", "triton")
SERVE_ARGS = (*_SERVED, *_KERNELS) if LLM_ARGS else ()
