"""One real ``vllm serve`` with two API servers and an API key follows a run; the tests build on each other."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import fresh
import pytest
from helpers import live_memory, slow_steps
from helpers.open_streams import OpenStreams
from helpers.otlp import Collector, collector
from helpers.publish import Publisher
from helpers.scrape import parse, scrape
from helpers.server import QUIET_CPU, VllmServer
from helpers.stream import open_stream
from helpers.tiny_models import build

from delta_sync.ack import Ack
from delta_sync.keys import SigningKey
from delta_sync.ledger import Ledger
from delta_sync.store.open import open_store
from vllm_delta_plugin.prometheus import METRICS

PROMPT = list(range(10, 150))  # 140 tokens; blocks are of 128
ARGS = ("--api-key", "first", "second", "--api-server-count", "2", "--enable-prompt-tokens-details")
KEY = SigningKey.generate()
CONFIG = '{"replica": "box", "read_back": true, "audit_commits": 4}'


@dataclass
class World:
    """A checkpoint, a run, its trainer, and a server that was started with the flag alone."""

    folder: Path
    base: Path
    trainer: Publisher
    server: VllmServer
    spans: Collector

    @property
    def run(self) -> Path:
        return self.folder / "run"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("serve")
    base = build(folder / "base")
    run, acks = str(folder / "run"), str(folder / "acks")
    log = folder / "server.log"
    more = ("--delta-sync-public-key", str(KEY.save(folder / "run.key")), "--delta-sync-ack-uri", acks)
    with collector() as spans:
        traced = ("--otlp-traces-endpoint", f"{spans.url}/v1/traces")
        env = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "200"}
        flags = ("--delta-sync", run, "--delta-sync-config", CONFIG, *more, *ARGS, *traced)
        with VllmServer(base, log, flags, env, plugins=[slow_steps, live_memory]) as server:
            server.headers = {"Authorization": "Bearer second"}
            yield World(folder, base, Publisher.of_checkpoint(run, base, key=KEY, ack_uri=acks), server, spans)


def cached(server: VllmServer, prompt: list[int]) -> int:
    usage = server.complete(prompt, 4)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"] or 0)


def test_it_serves_the_checkpoint_before_the_run_exists(world: World) -> None:
    status = world.server.status()
    assert (status["state"], status["version"], status["newest_version"]) == ("waiting", None, None)
    assert (status["replica"], status["serving_dtype"], status["logprobs_mode"]) == (
        "box",
        "BF16",
        "processed_logprobs",
    )
    assert world.server.complete(PROMPT, 4)["text"]


@pytest.mark.parametrize("path", ["status", "ready", "tensors", "tensors/model.norm.weight"])
def test_routes_ask_for_the_key(world: World, path: str) -> None:
    good = world.server.headers
    try:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}):
            world.server.headers = headers
            with pytest.raises(urllib.error.HTTPError) as caught:
                world.server.get_bytes(f"/delta_sync/{path}")
            assert caught.value.code == 401
        world.server.headers = {"Authorization": "Bearer first"}
        assert world.server.get_bytes(f"/delta_sync/{path}")[0]
    finally:
        world.server.headers = good


def test_equal_bits_make_the_first_version_live_without_an_anchor(world: World) -> None:
    manifest = world.trainer.origin()
    status = world.server.wait_version(1)
    assert (status["state_digest"], status["anchors_taken"]) == (manifest.state_digest, 0)
    assert status["model_fingerprint"] == manifest.model_fingerprint


def said(world: World, wanted: Callable[[Ack], bool], timeout: float = 30) -> Ack:
    """What the replica acknowledges in the bucket, which comes a moment after its status says so."""
    deadline = time.monotonic() + timeout
    while not wanted(ack := world.trainer.ledger.acknowledgements()["box"]):
        assert time.monotonic() < deadline, ack
        time.sleep(0.05)
    return ack


def test_streams_go_on_over_three_commits(world: World) -> None:
    with world.server.slow_steps():
        streams = OpenStreams(world.server, [PROMPT[:30], PROMPT[:20]], 1900)
        for seed in range(3):
            version = world.trainer.step(seed, 0.05).version
            world.server.wait_version(version)
    streams.join(crossing=range(1, 4))
    status = world.server.status()
    assert status["commits"] == 3
    numbers = said(world, lambda ack: ack.version == status["version"]).performance
    assert numbers == status["performance"]
    assert {"noticed_seconds", "stage_seconds", "commit_seconds", "served_seconds", "gap_seconds"} < numbers.keys()
    assert numbers["fetched_bytes"] == len(world.trainer.objects[4][0])
    assert 0 < numbers["commit_seconds"] < numbers["served_seconds"] < 30
    assert numbers["commit_seconds"] < numbers["gap_seconds"] < 30


def test_live_bits_read_back_are_the_trainers(world: World) -> None:
    described = world.server.get("/delta_sync/tensors?scan=1")
    assert described["version"] == 4
    assert set(described["tensors"]) == set(world.trainer.weights)
    for name, bits in world.trainer.weights.items():
        data, headers = world.server.get_bytes(f"/delta_sync/tensors/{name}")
        assert data == bits.tobytes(), name
        assert {k.lower(): v for k, v in headers.items()}["x-version"] == "4"


def test_greedy_output_equals_a_fresh_engine_started_from_that_checkpoint(world: World) -> None:
    prompts = [PROMPT, PROMPT[:40], list(range(300, 360))]
    checkpoint = world.trainer.save(world.folder / "v4", world.base)
    llm = fresh.following(world.folder / "no-run")  # follows nothing, but keeps CPU weights plain like the server
    [expected] = fresh.ask(world.folder / "fresh", checkpoint, llm, prompts, 24)
    for prompt, answer in zip(prompts, expected["answers"], strict=True):
        got = world.server.complete(prompt, 24, logprobs=1, return_token_ids=True)
        assert got["token_ids"] == answer["tokens"]
        assert got["logprobs"]["token_logprobs"] == pytest.approx(answer["logprobs"], abs=1e-6)


def test_the_prefix_cache_is_not_reused_across_versions(world: World) -> None:
    prompt = list(range(200, 340))
    assert [cached(world.server, prompt) for _ in range(2)] == [0, 128]
    world.server.wait_version(world.trainer.step(10, 0.05).version)
    assert [cached(world.server, prompt) for _ in range(2)] == [0, 128]


def test_a_salt_of_the_user_still_separates(world: World) -> None:
    prompt = list(range(201, 341))

    def with_salt(salt: str) -> int:
        answer = world.server.post(
            "/v1/completions",
            {"model": "tiny", "prompt": prompt, "max_tokens": 1, "cache_salt": salt},
        )
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0)

    assert [with_salt("a"), with_salt("b"), with_salt("a")] == [0, 0, 128]


def test_a_request_that_waits_at_the_commit_does_not_find_old_blocks(world: World) -> None:
    prompt = list(range(202, 342))
    assert [cached(world.server, prompt) for _ in range(2)] == [0, 128]
    with world.server.slow_steps():
        busy = [open_stream(world.server, [20 + i] * 20, 1900) for i in range(8)]  # all the engine's places
        for stream in busy:
            stream.wait_tokens(2)
        waiting = open_stream(world.server, prompt, 4)
        time.sleep(0.5)
        assert waiting.tokens == 0, "it must wait until after the commit"
        world.server.wait_version(world.trainer.step(11, 0.05).version)
        assert all(stream.finish_reason is None for stream in busy), "they must still hold their places at the commit"
        assert waiting.tokens == 0
    for stream in [*busy, waiting]:
        assert stream.join().error is None
    assert waiting.usage["prompt_tokens_details"]["cached_tokens"] in (0, None)
    assert cached(world.server, prompt) == 128


def test_damaged_memory_makes_it_unready_until_an_anchor_heals_it(world: World) -> None:
    """No number of versions behind makes this server unready: the damage alone does. Requests go on meanwhile."""
    before, newest = world.server.status(), world.trainer.writer.head
    assert newest is not None
    assert (before["max_lag"], world.server.ready()[0]) == (None, 200)
    with world.server.slow_steps():
        stream = open_stream(world.server, PROMPT[:30], 500)
        stream.wait_tokens(5)
        world.server.damage_weights()
        status = world.server.wait_status("poison", lambda s: s["state"] == "poisoned")
        assert (status["version"], status["ready"]) == (None, False)
        said(world, lambda ack: ack.state == "poisoned")
        for _ in range(4):  # of two API servers
            code, told = world.server.ready()
            assert (code, told["ready"], told["state"]) == (503, False, "poisoned")
        found = scrape(world.server)
        assert found["delta_sync_ready"] == 0
        assert found['delta_sync_state{state="poisoned"}'] == 1
        stream.wait_tokens(stream.tokens + 5)
        assert world.server.complete(PROMPT, 4)["usage"]["delta_sync"]["versions"] == [None]
        world.trainer.anchor(newest)
        healed = world.server.wait_version(newest.version)
        assert world.server.ready()[0] == 200
        stream.wait_tokens(stream.tokens + 5)
    assert (healed["state"], healed["state_digest"]) == ("live", before["state_digest"])
    assert (healed["refusal"], healed["anchors_taken"]) == (None, before["anchors_taken"] + 1)
    assert world.server.get("/delta_sync/tensors?scan=1")["state_digest"] == before["state_digest"]
    assert (stream.join().error, stream.tokens) == (None, 500)
    [spans] = stream.usage["delta_sync"]["choices"]
    assert [span["version"] for span in spans] == [newest.version, None, newest.version]


def test_wrong_content_is_refused_while_a_stream_goes_on_and_an_anchor_heals_it(world: World) -> None:
    before = world.server.status()
    stream = open_stream(world.server, PROMPT[:30], 500)
    stream.wait_tokens(5)
    bad = world.trainer.step(12, 0.05, corrupt="content")
    status = world.server.wait_status("refusal", lambda s: s["refusal"])
    assert (status["state"], status["version"], status["lag"]) == ("refused", before["version"], 1)
    assert status["refusal"]["version"] == bad.version
    assert status["state_digest"] == before["state_digest"]
    said(world, lambda ack: ack.refused_version == bad.version)
    world.trainer.anchor(bad)
    status = world.server.wait_version(bad.version)
    assert (status["refusal"], status["anchors_taken"]) == (None, before["anchors_taken"] + 1)
    assert stream.join().error is None
    assert stream.tokens == 500


def test_a_damaged_object_is_refused_and_healed_by_putting_it_again(world: World) -> None:
    world.trainer.change(13, 0.05)
    manifest = world.trainer.delta(corrupt="object")
    status = world.server.wait_status("refusal", lambda s: s["refusal"])
    assert status["refusal"]["object"] == manifest.objects[0].key
    assert status["refusal"]["kind"] == "IntegrityError"
    world.trainer.heal(manifest)
    assert world.server.wait_version(manifest.version)["refusal"] is None


def test_what_the_trainer_did_not_sign_is_refused(world: World) -> None:
    before, head = world.server.status(), world.trainer.writer.head
    assert head is not None
    assert before["pinned_keys"] == [KEY.id]
    following = {"version": head.version + 1, "base_version": head.version, "parent": head.sha256}
    forged = replace(head, **following, objects=(), tensors={}, signature=None)
    world.trainer.ledger.store.put(forged.key, forged.to_bytes())
    status = world.server.wait_status("refusal", lambda s: s["refusal"])
    assert (status["refusal"]["kind"], status["refusal"]["version"]) == ("SignatureError", forged.version)
    assert (status["state"], status["version"]) == ("refused", before["version"])
    assert world.server.complete(PROMPT, 4)["text"]
    said(world, lambda ack: ack.error_kind == "SignatureError")
    assert scrape(world.server)['delta_sync_failures_total{kind="SignatureError"}'] == 1, "each refusal is counted once"
    assert not (world.run / "replicas").exists()
    world.trainer.ledger.store.delete(forged.key)
    assert world.server.wait_version(world.trainer.step(20, 0.05).version)["refusal"] is None


def test_the_audit_ran_in_the_background_and_agreed(world: World) -> None:
    status = world.server.wait_status("an audit", lambda s: s["audit"]["completed"])
    assert status["audit"]["last_ok_version"] is not None
    assert status["state"] == "live"
    assert world.server.ready()[1]["state"] == "live"


def test_every_api_server_shows_the_same_metrics_beside_vllms(world: World) -> None:
    status = world.server.status()
    for _ in range(8):  # of two API servers
        found = scrape(world.server)
        assert found["delta_sync_served_version"] == found["delta_sync_newest_version"] == status["version"]
        assert found["delta_sync_commits_total"] == status["commits"]
        assert found["delta_sync_anchors_total"] == status["anchors_taken"] == 2
        assert found['delta_sync_state{state="live"}'] == found["delta_sync_ready"] == 1
        assert found["delta_sync_lag_versions"] == found["delta_sync_lag_seconds"] == 0
        assert found['delta_sync_failures_total{kind="IntegrityError"}'] >= 2
        assert found["delta_sync_digest_mismatches_total"] >= 2
        assert found['delta_sync_audits_total{result="ok"}'] >= 1
        assert found['delta_sync_audits_total{result="failed"}'] == 1
        assert found["delta_sync_commit_seconds_count"] == found["delta_sync_stage_seconds_count"] == status["commits"]
        assert found["delta_sync_gap_seconds_count"] >= 3, "a stream went on over three commits"
        assert found["delta_sync_fetched_bytes_total"] > len(world.trainer.objects[4][0])
    for accept in ("application/openmetrics-text", "text/plain"):
        headers = {"Accept": accept, "Accept-Encoding": "gzip"}
        request = urllib.request.Request(f"{world.server.url}/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read().decode()
        names = {name for name, _ in parse(text)}
        assert {"vllm:num_requests_running", "delta_sync_lag_versions"} <= names, "no key is asked for, as by vLLM"


def test_the_dashboard_asks_only_for_what_a_server_says(world: World) -> None:
    names = {name for name, _ in parse(world.server.get_bytes("/metrics")[0].decode())}
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana" / "delta-sync.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    asked: set[str] = set()
    for panel in panels:
        for target in panel["targets"]:
            used = set(re.findall(r"delta_sync_\w+", target["expr"]))
            assert used, panel["title"]
            assert used <= names, panel["title"]
            asked |= used
    assert {metric.name + "_bucket" * (metric.kind == "histogram") for metric in METRICS} == asked
    for variable in dashboard["templating"]["list"][1:]:
        assert set(re.findall(r"delta_sync_\w+", variable["definition"])) <= names


def test_killed_and_started_again_it_catches_up_as_far_as_it_can(world: World) -> None:
    world.trainer.step(14, 0.05)
    world.server.kill()
    good, newest = world.trainer.step(15, 0.05), world.trainer.step(16, 0.05, corrupt="object")
    world.server.start()
    world.server.wait_healthy()
    status = world.server.wait_version(good.version)
    assert (status["commits"], status["anchors_taken"], status["state"]) == (1, 1, "refused")
    assert status["state_digest"] == good.state_digest
    assert (status["refusal"]["version"], status["refusal"]["object"]) == (newest.version, newest.objects[0].key)
    found = scrape(world.server)
    assert found["delta_sync_served_version"] == good.version
    assert found['delta_sync_refused_version{kind="IntegrityError"}'] == newest.version
    world.trainer.anchor(newest)
    status = world.server.wait_version(newest.version)
    assert (status["commits"], status["anchors_taken"], status["state"]) == (2, 2, "live")
    assert status["state_digest"] == newest.state_digest
    assert world.server.get("/delta_sync/tensors?scan=1")["state_digest"] == newest.state_digest


def test_the_log_is_quiet(world: World) -> None:
    lines = [line for line in world.server.text().splitlines() if "delta sync" in line]
    assert not [line for line in lines if "ERROR" in line or "unexpected" in line]
    served = [line for line in lines if "serving version" in line]
    assert len(lines) <= len(served) + 20
    assert "Traceback" not in "".join(lines)


def test_a_usable_answer_without_the_dev_mode(world: World) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        world.server.get("/delta_sync/tensors/no.such.tensor")
    assert caught.value.code == 404
    body: Any = caught.value.read()
    assert b"no.such.tensor" in body


TRAINERS = {"delta_sync.publish", *(f"delta_sync.publish.{part}" for part in ("detect", "encode", "upload", "commit"))}
REPLICAS = {"delta_sync.take", *(f"delta_sync.take.{part}" for part in ("notice", "fetch", "stage", "prove", "commit"))}


def test_one_trace_leads_from_an_optimizer_step_to_the_replicas_commit(world: World) -> None:
    """A trainer in a process of its own, which knows of tracing by the environment alone."""
    secret, endpoint = world.folder / "run.key", {"OTEL_EXPORTER_OTLP_ENDPOINT": world.spans.url}
    command = [sys.executable, Path(__file__).with_name("trained_child.py"), world.base, world.run, secret]
    subprocess.run(command, env={**os.environ, **QUIET_CPU, **endpoint}, check=True, timeout=240)
    newest = Ledger(open_store(str(world.run))).head()
    assert newest is not None and newest.traceparent is not None
    assert (newest.kind, newest.epoch) == ("delta", 2)
    assert newest.metrics.keys() >= {"loss", "learning_rate", "grad_norm"}, "of the first step's log"
    world.server.wait_version(newest.version)
    _, trace, publish, _ = newest.traceparent.split("-")
    spans = world.spans.wait(trace, "delta_sync.take")
    assert spans.keys() == TRAINERS | REPLICAS | {"delta_sync.publish.optimizer_step"}
    assert (spans["delta_sync.publish"].id, spans["delta_sync.publish"].parent) == (publish, "")
    assert spans["delta_sync.take"].parent == publish
    for name, span in spans.items():
        assert span.error is None
        assert span.began <= span.ended
        if (root := name.rpartition(".")[0]) in spans:
            assert span.parent == spans[root].id
    pipelined = ("publish.detect", "publish.encode", "publish.upload")
    order = [
        ("publish.optimizer_step",),
        pipelined,
        ("publish.commit",),
        ("take.fetch",),
        ("take.prove",),
        ("take.commit",),
    ]
    ends = [[spans[f"delta_sync.{name}"].ended for name in at_once] for at_once in order]
    assert all(max(before) <= min(after) for before, after in pairwise(ends))
    assert spans["delta_sync.take"].attributes["delta_sync.version"] == newest.version
    assert spans["delta_sync.publish"].attributes["delta_sync.version"] == newest.version
    fetched = spans["delta_sync.take.fetch"].attributes["delta_sync.bytes"]
    assert fetched >= newest.objects[0].size, "more where versions were taken together"
    refused = [span for span in world.spans.spans if span.error == "IntegrityError"]
    assert [span.name for span in refused] == ["delta_sync.take"] * 3, "of the versions that were not what they said"
    ours = [span for span in world.spans.spans if span.name.startswith("delta_sync.")]
    for value in (value for span in ours for value in span.attributes.values()):
        assert str(world.folder) not in str(value), "a URI may hold credentials"
    assert secret.read_bytes()[30:60] not in world.spans.raw
