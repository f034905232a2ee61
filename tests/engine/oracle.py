"""Run as a process: greedy tokens and logprobs of prompts by an in-process LLM, which may follow a run first.

Usage: oracle.py REQUEST.json ANSWER.json; the request holds model, llm (keyword arguments), prompts, tokens and,
optionally, sync: a list of versions to wait for, each followed by another round of the same prompts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(request_file: str, answer_file: str) -> None:
    request = json.loads(Path(request_file).read_text())
    from vllm import LLM, SamplingParams

    llm = LLM(request["model"], **request["llm"])
    sampling = SamplingParams(temperature=0, max_tokens=request["tokens"], ignore_eos=True, logprobs=1)

    def answers() -> list[dict[str, Any]]:
        prompts = [{"prompt_token_ids": p} for p in request["prompts"]]
        outputs = [o.outputs[0] for o in llm.generate(prompts, sampling, use_tqdm=False)]
        return [
            {
                "tokens": list(o.token_ids),
                "logprobs": [e[t].logprob for e, t in zip(o.logprobs, o.token_ids)],  # noqa: B905
                "versions": getattr(o, "weight_versions", None),
            }
            for o in outputs
        ]

    rounds = [{"status": None, "answers": answers()}]
    for version in request.get("sync", []):
        from vllm_delta_plugin import sync

        status = sync(llm, version, timeout=60)
        rounds.append({"status": status, "answers": answers()})
    Path(answer_file).write_text(json.dumps(rounds, default=vars))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
