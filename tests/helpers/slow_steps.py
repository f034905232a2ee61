"""An engine whose steps last as long as a test needs, as a vLLM plugin: its streams end when the test lets them.

Without it a stream is as long as the machine is slow, and what has to happen while one is open is a race that a fast
machine loses: 1,900 tokens of a tiny model, the most that fit, take it two seconds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

WHILE = "SLOW_STEPS_WHILE"
SECONDS = 0.02  # 1,900 tokens: 38 s


def install() -> None:
    """Begin every step later while the file that ``SLOW_STEPS_WHILE`` names is there; called by vLLM."""
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler: Any = Scheduler
    schedule, slow = scheduler.schedule, Path(os.environ[WHILE])

    def later(self: Any, *args: Any, **more: Any) -> Any:
        if slow.exists():
            time.sleep(SECONDS)
        return schedule(self, *args, **more)

    scheduler.schedule = later
