"""A replica that pins keys: what it takes, what it refuses and says, and that old weights go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

from helpers.publish import Publisher
from test_coordinator import Replica, Weights, anchor, other, uri, weights  # noqa: F401  (fixtures)

from delta_sync.keys import SigningKey
from delta_sync.signing import sign
from delta_sync.store.keys import HEAD

KEY, OTHER = SigningKey.generate(), SigningKey.generate()


@pytest.fixture
def trainer(uri: str, weights: Weights) -> Publisher:  # noqa: F811
    return Publisher(uri, weights, key=KEY)


@pytest.fixture
def replica(uri: str, weights: Weights, trainer: Publisher) -> Iterator[Replica]:  # noqa: F811
    """At version 1, pinning the trainer's key."""
    trainer.origin()
    replica = Replica(uri, weights, public_keys=(KEY.public.text,)).start()
    replica.wait_version(1)
    yield replica
    replica.close()


def put_in_place(trainer: Publisher, manifest: Any) -> None:
    """What whoever may write to the bucket, but not sign, can do: another manifest in place of the newest."""
    trainer.ledger.store.put(trainer.writer.head.key, manifest.to_bytes())


def intruding(trainer: Publisher, **changes: Any) -> Any:
    """A manifest in the name of the trainer that follows its newest."""
    head = trainer.writer.head
    following = {"version": head.version + 1, "base_version": head.version, "parent": head.sha256, "kind": "delta"}
    return replace(head, **following, **changes)


def test_signed_versions_are_taken(replica: Replica, trainer: Publisher) -> None:
    for seed in range(3):
        replica.wait_version(trainer.step(seed).version)
    assert replica.executor.equal(trainer.weights)


@pytest.mark.parametrize(
    ("forged", "words"),
    [
        (lambda m: replace(m, signature=None), "got an unsigned one"),
        (lambda m: sign(m, OTHER), f"got one signed with key {OTHER.id}"),
        (lambda m: m, f"a signature of key {KEY.id} that is not this manifest's"),
    ],
    ids=["unsigned", "unknown key", "another record's signature"],
)
def test_what_the_key_did_not_sign_is_refused_and_old_weights_go_on(
    replica: Replica,
    trainer: Publisher,
    weights: Weights,  # noqa: F811
    forged: Any,
    words: str,
) -> None:
    manifest = forged(intruding(trainer, tensors={}))
    trainer.ledger.store.put(manifest.key, manifest.to_bytes())
    status = replica.wait("refusal", lambda s: s["refusal"])
    assert (status["state"], status["version"], status["lag"]) == ("refused", 1, 1)
    assert (status["refusal"]["version"], status["refusal"]["kind"]) == (2, "SignatureError")
    for part in (manifest.key, f"expected a record signed with a pinned key ({KEY.id})", words, "Remedy: "):
        assert part in status["refusal"]["error"]
    assert replica.executor.equal(weights)
    assert replica.wait_ack("refused").error_kind == "SignatureError"
    trainer.ledger.store.delete(manifest.key)
    assert replica.wait_version(trainer.step(1).version)["refusal"] is None
    assert replica.executor.equal(trainer.weights)


def test_a_manifest_whose_signature_was_cut_off_is_healed_by_the_trainer(replica: Replica, trainer: Publisher) -> None:
    replica.wait_version(trainer.step(1).version)
    replica.coordinator.stop()
    manifest = trainer.step(2)
    put_in_place(trainer, replace(manifest, signature=None))
    trainer.ledger.store.delete(HEAD)
    late = Replica(str(trainer.ledger.store.root), trainer.weights, public_keys=(KEY.public.text,)).start()
    try:
        assert late.wait("refusal", lambda s: s["refusal"])["refusal"]["kind"] == "SignatureError"
        trainer.heal(manifest)
        late.wait_version(manifest.version)
    finally:
        late.close()


def test_an_unsigned_anchor_is_no_start(uri: str, weights: Weights, trainer: Publisher) -> None:  # noqa: F811
    manifest = trainer.origin()
    trainer.writer._key = None
    anchor(trainer, manifest)
    replica = Replica(uri, other(weights), public_keys=(KEY.public.text,)).start()
    try:
        status = replica.wait("refusal", lambda s: s["refusal"])
        assert (status["refusal"]["kind"], status["version"]) == ("SignatureError", None)
        assert "anchors/" in status["refusal"]["error"]
        assert replica.executor.equal(other(weights))
        trainer.writer._key = KEY
        anchor(trainer, manifest)
        replica.wait_version(1)
        assert replica.executor.equal(weights)
    finally:
        replica.close()


def test_acknowledgements_go_where_they_are_wanted(uri: str, weights: Weights, tmp_path: Any) -> None:  # noqa: F811
    trainer = Publisher(uri, weights, ack_uri=str(tmp_path / "acks"))
    trainer.origin()
    replica = Replica(uri, weights, acks=str(tmp_path / "acks")).start()
    try:
        replica.wait_version(1)
        replica.wait_ack("live")
        assert trainer.ledger.acknowledgements()["r"].version == 1
        assert not (tmp_path / "run" / "replicas").exists()
    finally:
        replica.close()
