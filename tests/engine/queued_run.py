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
    commits = _watch_commits(live, core)
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
        if published < request["versions"] and published == len(commits) and steps % 50 == 0:
            published += 1
            trainer.step(published, 0.05)
    ordered = [answers[str(number)] for number in range(len(request["prompts"]))]
    Path(answer_file).write_text(
        json.dumps({"answers": ordered, "commits": commits, "status": core.delta_sync_status()}, default=vars)
    )


def _watch_commits(live: Any, core: Any) -> list[dict[str, Any]]:
    """At each commit, how many batches are in flight, and how many tokens of each prompt are computed by then.

    On a CPU a batch in flight is computed already, so its tokens can be counted before the swap.
    """
    found: list[dict[str, Any]] = []
    commit_all = live.commit_all

    def watched(*args: Any) -> Any:
        requests = core.scheduler.requests
        counts = {name: request.num_output_tokens for name, request in requests.items()}
        for future, *_ in core.batch_queue:
            output = future.result()
            for name, tokens in zip(output.req_ids, output.sampled_token_ids):  # noqa: B905
                counts[name] += len(tokens)
        by_prompt = {str(requests[name].prompt_token_ids[0]): count for name, count in counts.items()}
        found.append({"in_flight": len(core.batch_queue), "computed": by_prompt})
        return commit_all(*args)

    live.commit_all = watched
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
