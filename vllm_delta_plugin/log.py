"""The plugin's logger: a child of vLLM's, so that lines look and go like vLLM's own."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.delta_sync")
