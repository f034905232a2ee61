"""Every token names the weights that made it, so that what a server says of versions can be held against each token.

The model's layers add nothing, and its embedding points one way whatever the token: in version k + 1 that is direction
k, and the head has an output for every direction, other ones in every version. So a token is a pair: the version of
the embedding and that of the head, which lie on different cards where a model is split into stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.open_streams import OpenStreams
from helpers.publish import Publisher, Weights, write_checkpoint
from helpers.server import SMALL, VllmServer
from helpers.tiny_models import build

pytestmark = pytest.mark.long
COMPILED = tuple(option for option in SMALL if option != "--enforce-eager")  # CUDA graphs, on a GPU
ONE = 0x3F80  # bfloat16
FIRST, COUNT = 100, 16  # tokens that name weights begin there; versions
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def name_weights(weights: Weights, k: int) -> None:
    """Make these the bits of the version after ``k`` others."""
    embedding, head = weights[EMBEDDING], weights[HEAD]
    embedding[:], head[:] = 0, 0
    embedding[:, k] = ONE
    for direction in range(COUNT):
        head[FIRST + direction * COUNT + k, direction] = ONE


def named_by(token: int) -> tuple[int, int]:
    """The versions of the embedding and the head that made it."""
    embedding, head = divmod(token - FIRST, COUNT)
    return embedding + 1, head + 1


SPLITS = [(), *(pytest.param((split, "2"), marks=pytest.mark.rare) for split in ("-pp", "-tp"))]


@pytest.fixture(params=SPLITS, ids=lambda split: "".join(split) or "one")
def followed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[VllmServer, Publisher]]:
    base, run = build(tmp_path / "base", "llama"), str(tmp_path / "run")
    trainer = Publisher.of_checkpoint(run, base)
    for name, bits in trainer.weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            bits[:] = 0
    name_weights(trainer.weights, 0)
    write_checkpoint(base, trainer.weights, trainer.dtype)
    trainer.origin()
    args = ("--delta-sync", run, *request.param)
    with VllmServer(base, tmp_path / "server.log", args, base=COMPILED) as server:
        server.wait_version(1)
        yield server, trainer


def test_what_is_said_of_versions_is_true_of_every_token(followed: tuple[VllmServer, Publisher]) -> None:
    server, trainer = followed
    streams = OpenStreams(server, [range(20 + i, 50 + i) for i in range(4)], 1900)
    for k in range(1, COUNT):
        name_weights(trainer.weights, k)
        server.wait_version(trainer.delta().version)
        streams.wait_more()
    assert len(streams.join()) >= COUNT // 2, "most commits fell between two streams"
    wrong = []
    for stream in streams.ended:
        [spans] = stream.usage["delta_sync"]["choices"]
        said = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
        assert len(said) == len(stream.ids)
        for at, (version, token) in enumerate(zip(said, stream.ids, strict=True)):
            if named_by(token) != (version, version):
                wrong.append((at, version, named_by(token)))
    assert wrong == []
