"""A real `vllm serve` of a model that sees images: what an encoder made of one under older weights is not used."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import plain_torchvision, vision_files
from helpers.families import FAMILIES
from helpers.publish import Publisher
from helpers.server import SMALL, VllmServer

pytestmark = pytest.mark.long
Said = list[tuple[str, float]]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Publisher, VllmServer]]:
    base, run = FAMILIES["Qwen3-VL"].make(tmp_path / "base"), str(tmp_path / "run")
    trainer = Publisher.of_checkpoint(run, base)
    trainer.origin()
    args = ("--delta-sync", run, "--limit-mm-per-prompt", '{"image": 1, "video": 0}')
    environment = plain_torchvision.environment(tmp_path / "torchvision")
    with VllmServer(base, tmp_path / "server.log", args, environment, SMALL) as server:
        server.wait_version(1)
        yield trainer, server


def say(server: VllmServer, content: list[dict[str, Any]]) -> Said:
    """Greedy tokens, each with its log-probability."""
    body = {"model": "tiny", "temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": True}
    answer = server.post("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": content}]})
    return [(token["token"], token["logprob"]) for token in answer["choices"][0]["logprobs"]["content"]]


def words() -> list[dict[str, Any]]:
    return [{"type": "text", "text": "w5 w9 w20"}]


def picture(known_as: str) -> list[dict[str, Any]]:
    """The same picture, which vLLM takes for another one if it is known by another name."""
    data = io.BytesIO()
    vision_files.image().save(data, "PNG")
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    return [{"type": "image_url", "image_url": {"url": url}, "uuid": known_as}, *words()]


def test_an_image_that_is_seen_again_is_seen_by_the_new_weights(served: tuple[Publisher, VllmServer]) -> None:
    trainer, server = served
    text, seen = say(server, words()), say(server, picture("first"))
    assert say(server, picture("first")) == seen

    kept = {name: bits.copy() for name, bits in trainer.weights.items() if ".visual." not in name}
    trainer.change(seed=1, fraction=0.2)
    trainer.weights |= kept  # only what sees changes: nothing else can make answers differ
    server.wait_version(trainer.delta().version)

    assert say(server, words()) == text
    again = say(server, picture("first"))
    assert again == say(server, picture("never seen before"))
    assert again != seen
