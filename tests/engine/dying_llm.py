"""Run by test_dead_engine.py: an ``LLM`` whose engine process is killed while ``sync`` waits for a version."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from vllm import LLM

from vllm_delta_plugin import sync


def main(request: Path) -> dict[str, Any]:
    content = json.loads(request.read_text())
    llm = LLM(content["model"], **content["llm"])
    [engine] = [p for p in psutil.Process().children(recursive=True) if "EngineCore" in p.name()]
    killer = threading.Timer(2.0, engine.kill)
    killer.start()
    begin = time.monotonic()
    try:
        sync(llm, 9, timeout=600.0)
    except Exception as error:  # noqa: BLE001 - whichever it is, the test wants its name
        return {"error": type(error).__name__, "seconds": time.monotonic() - begin - 2.0}
    return {"error": None, "seconds": 0.0}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(Path(sys.argv[1]))))
