"""Run as a process: an in-process LLM that keeps two batches in flight while versions are published and committed.

Usage: queued_run.py REQUEST.json ANSWER.json; the request holds model, run, llm (keyword arguments), prompts, tokens
and versions (how many to publish). CPU builds of vLLM never schedule ahead by themselves, so the engine is told to:
its own batch queue then does what async scheduling and pipelining make it do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))


def main(request_file: str, answer_file: str) -> None:
    request = json.loads(Path(request_file).read_text())
    from helpers.publish import Publisher
    from vllm import LLM, SamplingParams
    from vllm.config import VllmConfig

    from vllm_delta_plugin import live, sync

    VllmConfig.max_concurrent_batches = property(lambda self: 2)  # type: ignore[assignment, misc]
    base = Path(request["model"])
    trainer = Publisher.of_checkpoint(request["run"], base)
    trainer.origin()
    llm = LLM(request["model"], **request["llm"])
    sync(llm, 1)
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    in_flight = _watch_commits(live, core)
    sampling = SamplingParams(temperature=0, max_tokens=request["tokens"], ignore_eos=True)
    for number, prompt in enumerate(request["prompts"]):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    answers: dict[str, Any] = {}
    published = steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                [done] = output.outputs
                answers[output.request_id] = {"tokens": list(done.token_ids), "versions": done.weight_versions}
        steps += 1
        if published < request["versions"] and published == len(in_flight) and steps % 50 == 0:
            published += 1
            version = trainer.step(published, 0.05).version
            trainer.save(base.parent / f"v{version}", base)
    ordered = [answers[str(number)] for number in range(len(request["prompts"]))]
    Path(answer_file).write_text(
        json.dumps({"answers": ordered, "in_flight": in_flight, "status": core.delta_sync_status()}, default=vars)
    )


def _watch_commits(live: Any, core: Any) -> list[int]:
    """How many batches are in flight at each commit."""
    found: list[int] = []
    commit_all = live.commit_all

    def watched(*args: Any) -> Any:
        found.append(len(core.batch_queue))
        return commit_all(*args)

    live.commit_all = watched
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
