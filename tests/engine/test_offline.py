"""``LLM(...)`` follows a run too: in-process, where steps or ``sync`` do the work, and with an engine process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fresh
import pytest
from helpers.publish import Publisher
from helpers.tiny_models import build

from delta_sync.errors import MappingError, SyncTimeoutError
from vllm_delta_plugin import sync


@pytest.mark.parametrize("multiprocessing", [False, pytest.param(True, marks=pytest.mark.long)])
def test_an_llm_catches_up_and_answers_with_the_new_weights(tmp_path: Path, multiprocessing: bool) -> None:
    base, run = build(tmp_path / "base", "qwen3_moe"), tmp_path / "run"
    trainer = Publisher.of_checkpoint(str(run), base)
    trainer.origin()
    trainer.step(1, 0.05)
    trainer.anchor(trainer.step(2, 0.05))
    newest = trainer.step(3, 0.05)
    rounds = fresh.ask(
        tmp_path / "ask", base, fresh.following(run, replica="llm"), [range(10, 60)], 8, [None, 4], multiprocessing
    )
    for done in rounds[1:]:
        assert (done["status"]["version"], done["status"]["state_digest"]) == (4, newest.state_digest)
    assert rounds[1]["answers"] == rounds[2]["answers"]
    [expected] = fresh.ask(
        tmp_path / "fresh",
        trainer.save(tmp_path / "v4", base),
        fresh.following(tmp_path / "no-run"),
        [range(10, 60)],
        8,
    )
    [answer], [same] = rounds[2]["answers"], expected["answers"]
    versions = answer.pop("versions")
    same.pop("versions")
    assert answer == same
    if versions is not None:  # vLLM 0.32 shows them
        assert versions == [{"version": "4/1", "start": 0, "end": 8}]
    assert trainer.ledger.acknowledgements()["llm"].version == 4


def llm_answering(status: dict[str, Any] | None) -> Any:
    client = SimpleNamespace(call_utility=lambda *asked: status, resources=SimpleNamespace(engine_dead=False))
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client))


def test_a_version_that_does_not_come_is_an_error_with_the_reason() -> None:
    status = {"reached": False, "wanted_version": 9, "refusal": {"error": "bad hash"}, "last_error": None}
    with pytest.raises(SyncTimeoutError, match=r"version 9.*bad hash"):
        sync(llm_answering(status), 9, timeout=1.0)


def test_an_llm_that_follows_no_run_says_so() -> None:
    with pytest.raises(MappingError, match="worker_extension_cls"):
        sync(llm_answering(None))
