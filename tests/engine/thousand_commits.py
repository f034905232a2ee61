"""An engine that follows many versions, one commit each; writes what the process held after some and after all."""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any


def held() -> dict[str, int]:
    """Resident bytes, open files and threads of this process, the least of two seconds: some are about to end."""
    import psutil

    gc.collect()
    me = psutil.Process()
    seen = []
    for _ in range(20):
        time.sleep(0.1)
        seen.append((me.memory_info().rss, me.num_fds(), me.num_threads()))
    return dict(zip(("rss", "handles", "threads"), map(min, zip(*seen, strict=True)), strict=True))


def main(request: Path, answer: Path) -> None:
    """See module."""
    asked: dict[str, Any] = json.loads(request.read_text())
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from helpers.publish import Publisher
    from vllm import LLM, SamplingParams

    from vllm_delta_plugin import sync

    trainer = Publisher.of_checkpoint(asked["run"], Path(asked["model"]))
    trainer.origin()
    llm = LLM(asked["model"], **asked["llm"])
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
    marks = {}
    for commit in range(1, asked["commits"] + 1):
        version = trainer.step(commit, asked["share"]).version
        trainer.objects.clear()  # the stand-in keeps what it published
        status = sync(llm, version, timeout=60.0)
        if commit % 10 == 0:
            llm.generate([{"prompt_token_ids": [1, 2, 3]}], sampling, use_tqdm=False)
        if commit in asked["marks"]:
            marks[commit] = held()
    result = {"marks": marks, "commits": status["commits"], "state": status["state_digest"]}
    answer.write_text(json.dumps({**result, "published": trainer.ledger.head().state_digest}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
