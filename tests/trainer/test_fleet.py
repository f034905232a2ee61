"""Several rollout servers: work is shared out, a dead or lagging one is left out and taken back, nothing is lost."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpo
import pytest
import tiny
from stand_in_replica import StandInReplica
from stand_in_server import StandInServer, serving
from transformers import TrainerCallback

from delta_sync.errors import DeltaSyncError, SyncTimeoutError
from trl_callback import DeltaSyncCallback
from trl_callback.config import DeltaSyncConfig
from trl_callback.fleet import Fleet
from trl_callback.fleet_status import FleetStatus
from trl_callback.http import CutError, Server, ServerUnavailableError
from trl_callback.lines import open_lines
from trl_callback.rollout_client import RolloutClient
from trl_callback.sampled import Sampled, oldest_versions


def echo(body: dict[str, Any], *, pause: float = 0.0) -> tuple[int, dict[str, Any]]:
    """Each choice is the prompt's first token and its number, so that a test sees whose answer it is."""
    time.sleep(pause)
    pairs = [(prompt, k) for prompt in body["prompt"] for k in range(body["n"])]
    return 200, {
        "choices": [
            {"index": i, "prompt_token_ids": prompt, "token_ids": [prompt[0], k], "logprobs": None}
            for i, (prompt, k) in enumerate(pairs)
        ]
    }


def routes(pause: float = 0.0) -> dict[str, Any]:
    return {
        "GET /health": lambda _: (200, b""),
        "GET /v1/models": lambda _: (200, {"data": [{"id": "tiny"}]}),
        "POST /v1/completions": lambda body: echo(body, pause=pause),
    }


@pytest.fixture
def two() -> Iterator[list[StandInServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving(StandInServer(routes()))) for _ in range(2)]


def client_of(servers: list[StandInServer], *, timeout: float = 10, recovered: Any = lambda: None) -> RolloutClient:
    return RolloutClient(
        Fleet([Server(server.url) for server in servers]),
        request_timeout=5,
        generate_timeout=timeout,
        logprobs_mode=lambda: "processed_logprobs",
        recovered=recovered,
    )


def completed(server: StandInServer) -> int:
    """Prompts that it was asked to complete."""
    return sum(len(body["prompt"]) for name, _, body in server.requests if name == "POST /v1/completions")


PROMPTS = [[100 + i] for i in range(24)]
WHOLE = [[100 + i, k] for i in range(24) for k in range(2)]


def test_a_batch_is_shared_out_and_put_together_in_order(two: list[StandInServer]) -> None:
    out = client_of(two).generate(PROMPTS, n=2, logprobs=None)
    assert out["completion_ids"] == WHOLE and out["prompt_ids"] == PROMPTS
    assert all(completed(server) > 0 for server in two) and sum(map(completed, two)) == 24


def test_a_slow_server_gets_less(two: list[StandInServer]) -> None:
    two[0].routes |= routes(pause=0.6)
    two[1].routes |= routes(pause=0.02)
    assert client_of(two).generate(PROMPTS, n=2, logprobs=None)["completion_ids"] == WHOLE
    assert completed(two[0]) < completed(two[1]) / 2


def test_one_server_gets_its_batch_as_one_request(two: list[StandInServer]) -> None:
    assert client_of(two[:1]).generate(PROMPTS, n=2, logprobs=None)["completion_ids"] == WHOLE
    assert completed(two[0]) == 24 and [name for name, *_ in two[0].requests].count("POST /v1/completions") == 1


def test_a_server_that_dies_has_its_part_done_by_the_others(two: list[StandInServer]) -> None:
    deaths: list[float] = []

    def die(_: Any) -> tuple[int, Any]:
        deaths.append(time.monotonic())
        return 503, {"error": {"message": "shutting down"}}

    two[0].routes["POST /v1/completions"] = die
    waited: list[float] = []
    client = client_of(two, recovered=lambda: waited.append(time.monotonic()))
    assert client.generate(PROMPTS, n=2, logprobs=None)["completion_ids"] == WHOLE
    assert 1 <= len(deaths) <= 2 and completed(two[1]) == 24
    asked = len(two[0].requests)
    assert client.generate(PROMPTS, n=2, logprobs=None)["completion_ids"] == WHOLE
    assert len(two[0].requests) == asked, "left out until a look at its status lets it in"


def test_a_whole_fleet_that_is_away_is_waited_for_and_named(two: list[StandInServer]) -> None:
    for server in two:
        server.routes["POST /v1/completions"] = lambda _: (503, {"error": {"message": "loading"}})
    with pytest.raises(SyncTimeoutError, match=r"completions from http.*, http.*loading"):
        client_of(two, timeout=1).generate(PROMPTS, logprobs=None)
    calls: list[int] = []

    def come_back() -> None:
        calls.append(1)
        for server in two:
            server.routes |= routes()

    out = client_of(two, recovered=come_back).generate(PROMPTS, n=2, logprobs=None)
    assert out["completion_ids"] == WHOLE and len(calls) == 1


def test_a_request_that_one_rejects_ends_the_batch(two: list[StandInServer]) -> None:
    two[1].routes["POST /v1/completions"] = lambda _: (400, {"error": {"message": "max_tokens is too large"}})
    with pytest.raises(DeltaSyncError, match="max_tokens is too large"):
        client_of(two).generate(PROMPTS, logprobs=None)


def test_one_of_two_is_enough_to_begin(two: list[StandInServer]) -> None:
    two[0].routes.clear()
    two[0].routes["GET /health"] = lambda _: (503, b"")
    client = client_of(two)
    client.connect(1)
    assert client.generate(PROMPTS, n=2, logprobs=None)["completion_ids"] == WHOLE
    assert completed(two[0]) == 0


def test_what_is_cut_ends_at_once_on_both_sides(two: list[StandInServer]) -> None:
    gone, held = threading.Event(), threading.Event()
    two[0].routes["POST /v1/completions"] = lambda body: held.wait(20) and echo(body)
    fleet = Fleet([Server(two[0].url)])
    client = client_of(two[:1])
    client._fleet = fleet
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            client.generate(PROMPTS, logprobs=None)
        except BaseException as error:  # noqa: BLE001
            caught.append(error)
        gone.set()

    threading.Thread(target=ask, daemon=True).start()
    while not completed(two[0]):
        time.sleep(0.01)
    fleet.cut()
    assert gone.wait(3) and isinstance(caught[0], CutError)
    with pytest.raises(CutError):
        client.generate(PROMPTS, logprobs=None)
    held.set()


def test_statuses_of_a_fleet_are_those_of_who_answers(two: list[StandInServer]) -> None:
    fleet = Fleet([Server(server.url) for server in two])
    status = FleetStatus(fleet, timeout=5, patience=0.3, poll=0.02)
    two[1].routes["GET /delta_sync/status"] = lambda _: (200, {"replica": "b", "state": "live", "version": 3})
    assert [one.replica for one in status.statuses()] == ["b"]
    two[0].routes["GET /delta_sync/status"] = lambda _: (200, {"replica": "a", "state": "live", "version": 2})
    settle(lambda: [one.replica for one in status.statuses()] == ["a", "b"])
    status.admit(lambda one: one.version == 3)
    assert [member.serves for member in fleet.members] == [False, True]
    status.admit(lambda one: True)
    assert [member.serves for member in fleet.members] == [True, True]
    for server in two:
        server.routes["GET /delta_sync/status"] = lambda _: (503, {"error": "x"})
    with pytest.raises(ServerUnavailableError):
        settle(lambda: not status.statuses())


def test_a_server_that_hangs_holds_nobody_up(two: list[StandInServer]) -> None:
    release = threading.Event()
    two[0].routes["GET /delta_sync/status"] = lambda _: (release.wait(20), {"replica": "a"}) and (503, {})
    two[1].routes["GET /delta_sync/status"] = lambda _: (200, {"replica": "b", "state": "live", "version": 3})
    status = FleetStatus(Fleet([Server(server.url) for server in two]), timeout=0.5, patience=0.3, poll=0.02)
    status.statuses()
    start = time.monotonic()
    for _ in range(3):
        assert [one.replica for one in status.statuses()] == ["b"]
    assert time.monotonic() - start < 2
    release.set()


def test_versions_of_turns_are_put_together() -> None:
    prompts = [[1, 2], [1, 2], [3]]
    completions = [[5, 6, 0, 7], [5, 6], [9, 9, 9]]
    first = [Sampled([1, 2], [5, 6], 4), Sampled([1, 2], [5, 6], 5), Sampled([3], [9, 9, 9, 9], 6)]
    second = [Sampled([1, 2, 5, 6, 0], [7, 8], 3)]  # cut short by the trainer
    assert oldest_versions(prompts, completions, [*second, *first]) == [3, 5, 6]
    assert oldest_versions(prompts, completions, first[:1]) == [4, 4, 4]
    assert oldest_versions(prompts, completions, [*first, Sampled([1, 2, 5, 6, 0], [7], None)]) == [None, 5, 6]
    assert oldest_versions(prompts, completions, []) == [None] * 3


class Trouble(TrainerCallback):
    """One of two replicas lags at step 1 and has caught up at step 3."""

    def __init__(self, replica: StandInReplica, other: StandInReplica, away: bool) -> None:
        self.replica, self.other, self.away, self.counts = replica, other, away, dict[int, int]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.counts[state.global_step] = len(self.replica.generated_at)
        server = self.replica.server
        if state.global_step == 1:
            self.replica.paused.set()
            if self.away:
                self.kept, server.routes = server.routes, {}
                for route in self.kept:
                    server.routes[route] = lambda _: (503, {})
        if state.global_step == 3:
            if self.away:
                server.routes = self.kept
            self.replica.paused.clear()
            settle(lambda: self.replica.position == self.other.position)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("away", [False, True])
def test_training_goes_on_without_a_server_and_takes_it_back(tmp_path: Any, ahead: int, away: bool) -> None:
    uri = f"memory://{uuid.uuid4().hex}"
    model = tiny.llama()
    with StandInReplica(uri, model).running() as good, StandInReplica(uri, model).running() as bad:
        sync = DeltaSyncCallback(
            uri, server_url=[good.url, bad.url], sync_timeout=120, fleet_patience=0.5,
            rollouts_ahead=ahead, max_staleness=ahead,
        )  # fmt: skip
        trouble = Trouble(bad, good, away)
        held = [grpo.AheadFirst(sync)] if ahead else []
        trainer = grpo.grpo_trainer(
            tmp_path, model=model, url=None, use_vllm=True, callbacks=[trouble, sync, *held], max_steps=7,
            per_device_train_batch_size=16,
        )  # fmt: skip
        trainer.train()
        settle(lambda: good.position == bad.position)
        sync.close()
    counts = trouble.counts
    assert counts[1] > 0, "both take part at first"
    assert counts[3] <= counts[1] + 4 * ahead, "what was asked of it before it lagged"
    assert counts[7] > counts[4], "and it is taken back"
    if ahead:
        assert set(sync.rollouts.staleness) == {0, 1}
    else:
        assert set(good.generated_at) >= {1, 2, 3, 4}


def test_one_server_with_other_weights_gets_complete_ones(tmp_path: Any) -> None:
    uri = f"memory://{uuid.uuid4().hex}"
    with (
        StandInReplica(uri, tiny.llama()).running() as good,
        StandInReplica(uri, tiny.llama(seed=4)).running() as other,
    ):
        sync = DeltaSyncCallback(uri, server_url=[good.url, other.url], sync_timeout=120)
        trainer = grpo.grpo_trainer(
            tmp_path, model=tiny.llama(), url=None, use_vllm=True, callbacks=[sync], max_steps=1
        )
        trainer.train()
        sync.sync()
        settle(lambda: good.position == other.position)
        sync.close()
        assert other.anchors_taken == 1, "one server's bits were not ours: complete weights were written for it"


def settle(done: Any, timeout: float = 20) -> None:
    deadline = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.02)


@pytest.mark.parametrize("given", [[], ["http://a", 3], ["http://a", "a:1"], ["http://a:1", "http://a:1/"], 4])
def test_urls_are_checked(given: Any) -> None:
    with pytest.raises(DeltaSyncError, match="server_url"):
        DeltaSyncConfig.build("memory://x", server_url=given)


def test_urls_with_passwords_are_not_shown() -> None:
    config = DeltaSyncConfig.build("memory://x", server_url=["http://me:secret@a:1", "http://b:2"])
    assert "secret" not in repr(config) and len(config.server_urls) == 2
    lines = open_lines(config.server_urls, config, lambda: None)
    assert lines.status.url == "http://a:1, http://b:2" == lines.client.base_url
