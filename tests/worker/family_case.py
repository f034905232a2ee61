"""One model family served by one worker: a sparse update must leave exactly what a fresh engine would load."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fp8_checkpoint
import numpy as np
import pytest
import tiny_models
import torch
from helpers import vision_files
from helpers.families import Family, as_served
from publishing import Publisher, nudged
from replica import PROMPTS, Replica, replica

from delta_sync.plan import Position
from vllm_delta_plugin.compat.load_seam import weight_map
from vllm_delta_plugin.proof import Layout

SMALL: dict[str, Any] = {
    "enable_prefix_caching": False,
    "kv_cache_memory_bytes": 64 << 20,
    "num_gpu_blocks_override": 64,
    "max_num_batched_tokens": 128,
}
NOT_LOADED = "vLLM itself left out tensors of the checkpoint"


@dataclass(frozen=True)
class Outcome:
    """What became of a model, and why.

    "direct" (deltas go straight into its weights), "rearranged" (so they do, to where vLLM put them after loading),
    "requantised" (what is served is made of them anew), "refused" or "not run".
    """

    cell: str
    reason: str = ""


@contextmanager
def quick_start() -> Iterator[None]:
    """Let vLLM look at model classes in this process, not in a new one (some 10 s) for each."""
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # it would win over kv_cache_memory_bytes
        patch.setattr(registry, "_run_in_subprocess", lambda function: function())
        yield


def everything(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Bytes of all tensors that modules hold, registered or not, without help from the map under test."""
    found = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    for prefix, module in model.named_modules():
        loose = {n: v for n, v in vars(module).items() if isinstance(v, torch.Tensor) and n != "kv_cache"}
        found |= {f"{prefix}.{name}": value for name, value in loose.items()}
    return {name: raw(tensor) for name, tensor in found.items()}


def raw(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's bytes, row-major."""
    copy = torch.atleast_1d(tensor.detach()).cpu().clone(memory_format=torch.contiguous_format)
    return copy.view(torch.uint8).numpy()


def differing(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> list[str]:
    """Names whose bytes are not the same in both."""
    return [n for n in one.keys() | other.keys() if n not in one or not np.array_equal(one[n], other.get(n))]


def answers(engine: Replica, count: int = 8, sees: bool = False) -> list[list[tuple[int, float]]]:
    """Greedy continuations with each token's log-probability, which moves even where the tokens do not.

    Where the model ``sees``, of an image too; what the encoder made of it is forgotten, as an engine's commit does.
    """
    from vllm import SamplingParams

    prompts: list[dict[str, Any]] = [{"prompt_token_ids": p} for p in PROMPTS]
    if sees:
        engine.llm.llm_engine.reset_encoder_cache()
        prompts += [{"prompt_token_ids": vision_files.PROMPT, "multi_modal_data": {"image": vision_files.image()}}]
    sampling = SamplingParams(max_tokens=count, temperature=0, logprobs=0, detokenize=False, ignore_eos=True)
    outputs = engine.llm.generate(prompts, sampling, use_tqdm=False)
    texts = [output.outputs[0] for output in outputs]
    return [[(t, p[t].logprob) for t, p in zip(x.token_ids, x.logprobs, strict=True)] for x in texts]


def update(live: Replica, publisher: Publisher, new: dict[str, torch.Tensor]) -> str | None:
    """Publish, stage and commit ``new``; why it is refused, if it is."""
    manifest = publisher.delta(new)
    plan = publisher.ledger.plan(Position(publisher.origin.version, publisher.origin.sha256), None)
    assert plan is not None
    (staged,) = live.stage(plan)
    if staged["state"] == "failed":
        return str(staged["error"]["error"])
    assert (staged["state"], staged["changed"]) == ("staged", manifest.changed_elements), staged
    live.one("commit", manifest.version)
    live.one("settle", manifest.version)
    return None


def digests(attached: dict[str, Any]) -> dict[str, int]:
    """Every tensor's digest, as a replica describes it."""
    described = {n: (t["dtype"], tuple(t["shape"])) for n, t in attached["tensors"].items()}
    return Layout(described, [attached["regions"]]).combine([attached["regions"]])


def check_loaded(attached: dict[str, Any], publisher: Publisher) -> None:
    """RuntimeError unless what vLLM loaded has the digests of the run's origin."""
    published = publisher.origin.tensors
    if wrong := [name for name, digest in digests(attached).items() if digest != published[name].digest]:
        raise RuntimeError(f"{NOT_LOADED}: {sorted(wrong)}")


def serve(family: Family, folder: Path, blocks: bool = False, wide: bool = False, **more: Any) -> Outcome:
    """Serve the family, with ``more`` options, update, compare with a fresh engine; AssertionError if they differ.

    ``blocks``: as a checkpoint in blocks of fp8. RuntimeError if vLLM loaded something else than the checkpoint.
    """
    plain = family.make(folder / "plain", wide=wide or blocks)
    stored, write = (fp8_checkpoint.in_blocks, fp8_checkpoint.write) if blocks else (dict, tiny_models.rewrite)
    values = tiny_models.tensors(plain)
    values, new = stored(values), stored(nudged(values, 0.1, seed=1))
    old = write(plain, folder / "old", values)
    options: dict[str, Any] = {**SMALL, **family.serve, **more}
    say = partial(answers, sees=family.vision is not None)
    with quick_start(), replica(write(plain, folder / "new", new), **options) as fresh:
        fresh_answers, expected = say(fresh), everything(fresh.model)  # rotary tables change type when first used
    with quick_start(), replica(old, **options) as live:
        publisher = Publisher(folder / "run", as_served(values))
        (attached,) = live.rpc("attach", {"uri": publisher.uri})
        if not attached["ok"]:
            return Outcome("refused", attached["error"]["error"])
        old_answers = say(live)
        if refused := update(live, publisher, as_served(new)):
            assert say(live) == old_answers
            return Outcome("refused", refused)
        check_loaded(attached, publisher)
        wrong = differing(everything(live.model), expected)
        assert not wrong, wrong
        assert say(live) == fresh_answers != old_answers
        weights = weight_map(live.model)
        found = "rearranged" if weights.rearranged else "requantised" if weights.requantised else "direct"
        del live, weights
    gc.collect()
    return Outcome(found)
