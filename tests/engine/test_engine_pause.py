"""How the engine is stopped for new weights, with vLLM's own scheduler and EngineCore's own pauses."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.tiny_models import build

pytest.importorskip("vllm")

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_delta_plugin.compat.pause import EnginePause
from vllm_delta_plugin.main_thread import MainThread, Stopped

BLOCK, BLOCKS = 16, 9  # one of them is vLLM's null block
PROMPT = 32
ENGINE_IDLE = 10.0  # seconds within which all has to happen


class Core(EngineCoreProc):
    """vLLM's engine with its loop, pauses and scheduler; a stand-in for the model gives a token a step."""

    def __init__(self, config: VllmConfig) -> None:
        self.vllm_config, self.is_alive = config, True
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=False,
        )
        self.engines_running, self.batch_queue, self._idle_state_callbacks = False, None, []
        self.input_queue, self.aborts_queue = queue.Queue(), queue.Queue()
        self.process_input_queue_block = True
        self.model_executor = SimpleNamespace(collective_rpc=lambda *args, **more: [], is_sleeping=False)
        self.stop, self.may_step, self.steps = threading.Event(), threading.Event(), 0
        self.main = MainThread(self.stop, lambda: self.input_queue.put((None, None)))
        self.pause = EnginePause(self, self.main, self.stop)

    def is_running(self) -> bool:
        return not self.stop.is_set()

    def _handle_client_request(self, *request: Any) -> None:
        self.main.pump()

    def loop(self) -> None:
        try:
            while not self.stop.is_set():
                self._process_input_queue()
                self.main.pump()
                if self.may_step.wait(0.005):
                    self.step_once()
        finally:  # whoever waits for this thread waits no longer
            self.stop.set()

    def step_once(self) -> None:
        batch = self.scheduler.schedule()
        names = list(batch.num_scheduled_tokens)
        self.steps += bool(names)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[7] for _ in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        self.scheduler.update_from_output(batch, output)
        time.sleep(0.001)

    def ask(self, name: str, tokens: int) -> Request:
        """A request that is added on the engine's thread."""
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        request = Request(name, list(range(PROMPT)), sampling, None, arrival_time=time.time())
        self.main.run(lambda: self.scheduler.add_request(request))
        return request


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    model = ModelConfig(model=str(build(tmp_path_factory.mktemp("model"))), max_model_len=128, skip_tokenizer_init=True)
    scheduling = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=256, max_model_len=128, is_encoder_decoder=False
    )
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=False)
    cache.num_gpu_blocks = BLOCKS
    return VllmConfig(model_config=model, scheduler_config=scheduling, cache_config=cache)


@pytest.fixture
def core(config: VllmConfig) -> Iterator[Core]:
    core = Core(config)
    thread = in_background(core.loop)
    yield core
    core.stop.set()
    core.may_step.set()
    core.input_queue.put((None, None))
    thread.join(ENGINE_IDLE)
    assert not thread.is_alive()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + ENGINE_IDLE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def in_background(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_requests_stand_still_while_the_engine_is_paused_and_go_on_then(core: Core) -> None:
    core.may_step.set()
    request = core.ask("a", 90)
    until(lambda: request.num_output_tokens > 2)
    core.pause.begin()
    before = request.num_output_tokens
    time.sleep(0.05)
    assert request.num_output_tokens == before < 90
    core.pause.end()
    until(request.is_finished)


def test_a_pause_of_somebody_else_under_which_requests_run_is_none(core: Core) -> None:
    """``/pause?mode=wait``: who asked for it is told of its end when it has come, and finds the state it set."""
    core.may_step.set()
    request = core.ask("a", 90)
    until(lambda: request.num_output_tokens > 2)
    drained = core.main.run(lambda: core.pause_scheduler("wait", False))
    core.pause.begin()
    before, steps = request.num_output_tokens, core.steps
    time.sleep(0.05)
    assert (request.num_output_tokens, core.steps) == (before, steps)
    assert before < 90
    assert not drained.done()
    core.pause.end()
    assert core.scheduler.pause_state == PauseState.PAUSED_NEW
    drained.result(ENGINE_IDLE)
    assert request.is_finished()


def test_a_pause_of_somebody_else_that_stops_all_stays_as_it_is(core: Core) -> None:
    core.may_step.set()
    core.main.run(lambda: core.pause_scheduler("keep", False))
    for drain in (False, True):
        core.pause.begin(drain)
        core.pause.end()
        assert core.scheduler.pause_state == PauseState.PAUSED_ALL


def test_what_others_set_during_our_pause_takes_effect_after_it(core: Core) -> None:
    """A load in place has half of the weights written meanwhile."""
    core.may_step.set()
    request = core.ask("a", 90)
    until(lambda: request.num_output_tokens > 2)
    core.main.run(lambda: core.pause_scheduler("wait", False))
    core.pause.begin()
    before = request.num_output_tokens
    core.main.run(core.resume_scheduler)
    time.sleep(0.05)
    assert request.num_output_tokens == before < 90
    core.pause.end()
    assert core.scheduler.pause_state == PauseState.UNPAUSED
    until(request.is_finished)
    core.pause.begin()
    core.main.run(lambda: core.pause_scheduler("keep", False))
    core.pause.end()
    assert core.scheduler.pause_state == PauseState.PAUSED_ALL


def test_a_drain_waits_for_requests_that_were_preempted_before_it_and_while_it_lasts(core: Core) -> None:
    """Each of them fits alone; vLLM takes one that it preempted back only where nothing is paused."""
    requests = [core.ask(name, 90) for name in "abc"]
    core.may_step.set()
    until(lambda: any(request.num_preemptions and request.num_output_tokens for request in requests))
    began = [request for request in requests if request.num_output_tokens]
    core.pause.begin(drain=True)
    assert all(request.is_finished() for request in began)
    assert all(request.is_finished() or not request.num_output_tokens for request in requests)
    assert core.scheduler.pause_state == PauseState.PAUSED_NEW
    core.pause.end()
    until(lambda: all(request.is_finished() for request in requests))


def test_a_drain_ends_with_the_engine(core: Core) -> None:
    requests = [core.ask(name, 90) for name in "abc"]
    core.may_step.set()
    until(lambda: any(request.num_preemptions and request.num_output_tokens for request in requests))
    core.may_step.clear()
    caught: list[BaseException] = []

    def drain() -> None:
        try:
            core.pause.begin(drain=True)
        except Stopped as error:
            caught.append(error)

    thread = in_background(drain)
    core.stop.set()
    thread.join(ENGINE_IDLE)
    assert caught
