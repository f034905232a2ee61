"""A real ``vllm serve --enable-lora`` follows a run whose versions are LoRA adapters; the tests build on each other.

The oracle is vLLM itself: the same adapter, as ``delta-sync materialize`` writes it for PEFT, loaded by name under
vLLM's own API into the same server, has to answer with the same tokens.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers import slow_steps
from helpers.server import VllmServer
from helpers.stream import open_stream
from helpers.tiny_models import build
from typer.testing import CliRunner

from delta_sync.adapter import split_name
from delta_sync.cli.app import app
from delta_sync.keys import SigningKey
from delta_sync.ledger import Ledger
from delta_sync.store.open import open_store
from trl_callback.adapter_session import AdapterSession
from trl_callback.config import DeltaSyncConfig
from trl_callback.http import Server
from trl_callback.metrics import Metrics
from trl_callback.session import Session, Subject
from trl_callback.status_client import StatusClient

peft = pytest.importorskip("peft", reason="PEFT is not installed (extra peft)")
pytestmark = pytest.mark.long
PROMPT = list(range(10, 150))  # longer than a block
KEY = SigningKey.generate()
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]  # parts of packed layers, and whole ones
LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
CONFIG = json.dumps({"replica": "box", "read_back": True, "poll": 0.02})


@dataclass
class World:
    """A checkpoint, a model that is trained over it, and a server that was started with vLLM's own flags and ours."""

    folder: Path
    model: Any
    server: VllmServer
    session: Session | None = None
    trained: int = 0

    @property
    def uri(self) -> str:
        return str(self.folder / "run")

    def config(self, **settings: Any) -> DeltaSyncConfig:
        key = str(self.folder / "run.key")
        return DeltaSyncConfig.build(self.uri, lora="adapter", signing_key=key, sync_timeout=60.0, **settings)

    def status_client(self) -> StatusClient:
        return StatusClient(Server(self.server.url), timeout=30.0)

    def begin(self, kind: type[Session] = AdapterSession) -> None:
        """What the callback does at the start of training, or of a resumed one."""
        if self.session is not None:
            self.session.close()
        subject = Subject(self.model, None, "BF16", self.trained)
        self.session = kind(subject, self.config(), self.status_client(), Metrics())
        self.session.sync(self.trained)

    def step(self) -> None:
        """An optimizer step that changes every part of the adapter, and TRL's sync_weights after it."""
        assert self.session is not None
        self.trained += 1
        torch.manual_seed(self.trained)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        self.session.step_done(self.trained)
        self.session.sync(self.trained)

    def trainers_bits(self) -> dict[str, torch.Tensor]:
        state = peft.get_peft_model_state_dict(self.model)
        return {name: tensor.detach().to(torch.bfloat16) for name, tensor in state.items()}

    def resident(self, name: str) -> torch.Tensor:
        """What the worker computes with."""
        data, headers = self.server.get_bytes(f"/delta_sync/tensors/{name}")
        shape = [int(size) for size in headers["x-shape"].split(",")]
        return torch.frombuffer(bytearray(data), dtype=torch.bfloat16).reshape(shape)

    def tokens(self, model: str = "tiny", prompt: list[int] = PROMPT) -> list[int]:
        answer = self.server.complete(prompt, 12, model=model, return_token_ids=True)
        return list(answer["token_ids"])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("adapter")
    base = build(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    settings = peft.LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM")
    public = str(KEY.save(folder / "run.key"))
    flags = ("--delta-sync", str(folder / "run"), "--delta-sync-public-key", public, "--delta-sync-config", CONFIG)
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with VllmServer(
        base, folder / "server.log", (*LORA, *flags, "--enable-prompt-tokens-details"), env, plugins=[slow_steps]
    ) as server:
        world = World(folder, peft.get_peft_model(model, settings), server)
        try:
            yield world
        finally:
            if world.session is not None:
                world.session.close()


def test_a_new_adapter_adds_nothing_and_needs_no_anchor(world: World) -> None:
    before = world.tokens()
    world.begin()
    status = world.server.status()
    assert (status["state"], status["version"], status["anchors_taken"]) == ("live", 2, 0)
    assert status["lora"]["max_rank"] == 8
    newest = Ledger(open_store(world.uri)).head()
    assert newest is not None and status["adapter"] == newest.objects[0].sha256
    assert world.tokens() == before
    assert Ledger(open_store(world.uri)).anchors() == []


def test_what_is_served_is_what_was_trained(world: World) -> None:
    before = world.tokens()
    world.step()
    scaling = 16 / 8
    for name, trained in world.trainers_bits().items():
        expected = trained * scaling if split_name(name)[1] == "B" else trained  # exact: a power of two
        assert torch.equal(world.resident(name), expected), name
    assert world.tokens() != before, "plain requests get the new adapter"
    assert world.tokens() == theirs(world, "v1")


def theirs(world: World, name: str) -> list[int]:
    """What vLLM answers with the newest version's adapter under its own API."""
    folder = world.folder / name
    result = CliRunner().invoke(app, ["materialize", world.uri, str(folder)])
    assert result.exit_code == 0, result.output
    post(world.server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
    tokens = world.tokens(name)
    post(world.server, "/v1/unload_lora_adapter", {"lora_name": name})
    return tokens


def post(server: VllmServer, path: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        urllib.request.urlopen(request, timeout=60).close()
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from error


def test_no_version_reuses_anothers_cache(world: World) -> None:
    def cached() -> int:
        usage = world.server.complete(PROMPT, 4)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"] or 0)

    cached()
    assert cached() >= 128
    world.step()
    assert cached() == 0
    assert cached() >= 128
    assert world.tokens() == theirs(world, "v2")


def test_requests_in_flight_go_on_and_say_which_tokens_are_whose(world: World) -> None:
    version = int(world.server.status()["version"])
    with world.server.slow_steps():
        stream = open_stream(world.server, PROMPT[:30], 1900)
        stream.wait_tokens(20)
        world.step()
    stream.join()
    spans = stream.usage["delta_sync"]["choices"][0]
    assert (stream.error, stream.tokens) == (None, 1900)
    assert [span["version"] for span in spans] == [version, version + 1]


def test_a_hundred_versions_leave_nothing_behind(world: World) -> None:
    [engine] = [p for p in psutil.Process(world.server.pid).children(recursive=True) if "EngineCore" in p.name()]
    for _ in range(20):  # what allocators keep
        world.step()
    held = engine.memory_info().rss
    for _ in range(100):
        world.step()
    status = world.server.status()
    newest = Ledger(open_store(world.uri)).head()
    assert newest is not None and (status["version"], status["lag"]) == (newest.version, 0)
    size = sum(ref.size for ref in newest.objects)
    grown = engine.memory_info().rss - held
    assert grown < 70 * size, f"{grown} bytes more after a hundred adapters of {size}"
    assert world.tokens() == theirs(world, "hundred")


def test_a_restarted_server_and_a_late_one_serve_the_newest_adapter(world: World) -> None:
    before = world.tokens()
    world.server.stop()
    world.server.start()
    world.server.wait_healthy()
    newest = Ledger(open_store(world.uri)).head()
    assert newest is not None
    world.server.wait_version(newest.version)
    assert world.server.status()["anchors_taken"] == 0, "it loaded the base itself"
    assert world.tokens() == before


def test_a_resumed_trainer_goes_on(world: World) -> None:
    world.begin()
    assert world.server.status()["epoch"] == 2
    world.step()
    assert world.tokens() == theirs(world, "resumed")


def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_served(world: World) -> None:
    from transformers import AutoModelForCausalLM

    assert world.session is not None
    before = world.tokens()
    world.session.close()
    base = AutoModelForCausalLM.from_pretrained(world.folder / "base", dtype=torch.bfloat16)
    wide = peft.get_peft_model(base, peft.LoraConfig(r=16, target_modules=["q_proj"]))
    session = AdapterSession(Subject(wide, None, "BF16", 0), world.config(), None, Metrics())
    try:
        status = world.server.wait_status("a refusal", lambda s: s["refusal"])
        said = status["refusal"]["error"]
        assert status["refusal"]["kind"] == "MappingError"
        assert "rank of at most 8" in said and "got 16" in said and "--max-lora-rank" in said
        assert status["state"] == "refused"
    finally:
        session.close()
    world.begin()
    assert world.tokens() == before


def test_merged_weights_take_over_and_the_adapter_is_gone(world: World) -> None:
    before, taken = world.tokens(), world.server.status()["anchors_taken"]
    world.begin(Session)
    status = world.server.status()
    assert (status["adapter"], status["anchors_taken"]) == (None, taken + 1)
    merged = world.tokens()
    world.begin()
    assert world.server.status()["adapter"] is not None
    assert world.tokens() == before, "and back: the base is anchored anew"
    assert len(merged) == len(before)
