"""What an encoder made of an image under older weights, with vLLM's own requests, scheduler side and worker side."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from vllm_delta_plugin.cache_salt import ATTRIBUTE, CacheSalt, Salted
from vllm_delta_plugin.compat.engine_core import _salt
from vllm_delta_plugin.compat.pause import EnginePause

IMAGE, TOKENS, BLOCK = "an-image", 8, 4


class Scheduler:
    """Stands in for vLLM's, with its own manager of encoder outputs; a real one needs a model."""

    pause_state = 0
    is_encoder_decoder = False

    def __init__(self) -> None:
        self.encoder_cache_manager = EncoderCacheManager(4 * TOKENS)

    def reset_encoder_cache(self) -> None:
        self.encoder_cache_manager.reset()

    def set_pause_state(self, state: int) -> None:
        self.pause_state = state


class Core:
    """Stands in for EngineCore: what the seams touch, around vLLM's own requests and manager."""

    def __init__(self) -> None:
        self.salt = CacheSalt()
        self.delta_sync = SimpleNamespace(salted=lambda *asked: Salted(self.salt, *asked), serves_adapters=False)
        self.scheduler, self.worker = Scheduler(), {}
        self.model_executor = SimpleNamespace(reset_encoder_cache=self.worker.clear)
        self.running: list[Request] = []
        init_none_hash(hash)
        self.hasher = get_request_block_hasher(BLOCK, lambda parts: repr(parts).encode())

    def pause_scheduler(self) -> None: ...

    def resume_scheduler(self) -> None: ...

    def is_scheduler_paused(self) -> bool:
        return False

    def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        for request in self.running:
            self.scheduler.encoder_cache_manager.free(request)
            request.num_preemptions += 1

    def add(self, name: str, features: list[MultiModalFeatureSpec] | None = None) -> Request:
        asked = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(range(TOKENS)),
            mm_features=features or [image()],
            sampling_params=SamplingParams(max_tokens=4),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        request, _ = _salt(lambda core, it: (Request.from_engine_core_request(it, core.hasher), 0))(self, asked)
        return request

    def encodes(self, request: Request) -> bool:
        """Schedule its image as vLLM does, and have the worker run its encoder; whether it had to."""
        getattr(request, ATTRIBUTE).refresh(request)
        manager = self.scheduler.encoder_cache_manager
        if manager.check_and_update_cache(request, 0):
            return False
        assert manager.can_allocate(request, 0, TOKENS, 0)
        manager.allocate(request, 0)
        for freed in manager.get_freed_mm_hashes():
            self.worker.pop(freed, None)
        self.worker[request.mm_features[0].identifier] = self.salt.generation
        return True

    def computed_by(self, request: Request) -> int:
        """The weights behind the embeddings that its batch reads."""
        return int(self.worker[request.mm_features[0].identifier])


def image() -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", IMAGE, PlaceholderRange(0, TOKENS), IMAGE)


def test_an_image_seen_before_is_encoded_anew_after_a_commit_and_only_then() -> None:
    core = Core()
    first, again = core.add("a"), core.add("b")
    assert (core.encodes(first), core.encodes(again)) == (True, False)
    core.salt.advance()
    later = core.add("c")
    assert core.encodes(later)
    assert core.computed_by(later) == 1
    assert not core.encodes(core.add("d"))


def test_the_processors_cache_still_finds_an_image() -> None:
    assert Core().add("a").mm_features[0].mm_hash == IMAGE


def test_a_request_that_waits_over_a_commit_is_named_and_hashed_anew() -> None:
    core = Core()
    waiting = core.add("a")
    hashes = list(waiting.block_hashes)
    assert core.encodes(core.add("b"))
    core.salt.advance()
    assert core.encodes(waiting)
    assert core.computed_by(waiting) == 1
    assert not set(hashes) & set(waiting.block_hashes)
    assert core.add("c").mm_features[0].identifier == waiting.mm_features[0].identifier


def test_what_a_waiting_request_holds_is_given_back_under_its_old_name() -> None:
    """vLLM looks an image up for a request that it can't take into this batch after all."""
    core = Core()
    before, waiting = core.add("a"), core.add("b")
    assert core.encodes(before)
    assert not core.encodes(waiting)
    core.salt.advance()
    assert core.encodes(waiting)
    manager = core.scheduler.encoder_cache_manager
    for request in (before, waiting):
        manager.free(request)
    assert manager.num_freeable_slots == manager.cache_size


def test_a_request_that_workers_know_keeps_its_names() -> None:
    core = Core()
    running = core.add("a")
    core.encodes(running)
    name = running.mm_features[0].identifier
    core.salt.advance()
    assert running.mm_features[0].identifier == name
    core.scheduler.encoder_cache_manager.free(running)
    running.num_preemptions = 1
    core.encodes(running)
    assert running.mm_features[0].identifier == name
    assert core.add("b").mm_features[0].identifier != name


def test_recompute_encodes_anew_whatever_may_be_kept_of_prompts() -> None:
    core = Core()
    running = core.add("a")
    core.encodes(running)
    core.running.append(running)
    core.salt.advance("all")
    assert not core.encodes(core.add("b")), "the version's policy lets all go on with what is cached"
    core.salt.advance("all")
    main: Any = None
    EnginePause(core, main, main).recompute()
    assert core.encodes(running)
    assert core.computed_by(running) == 2
    assert not core.encodes(core.add("c"))


def test_requests_that_share_features_are_named_each_by_itself() -> None:
    """As those of one ``n`` do where the engine lives in the caller's process."""
    core, shared = Core(), [image()]
    names = {core.add(name, shared).mm_features[0].identifier for name in "ab"}
    assert len(names) == 1
    assert shared[0].identifier == IMAGE
