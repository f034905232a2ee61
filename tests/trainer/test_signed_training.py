"""A trainer that signs, and servers that pin keys: agreed at the start, or an error at once, never a wait in vain."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import pytest
import tiny
from stand_in_replica import StandInReplica
from test_waiting import Loop, looping, settle

from delta_sync.errors import DeltaSyncError, SignatureError
from delta_sync.keys import SigningKey
from delta_sync.ledger import Ledger
from delta_sync.signing import PublicKeys
from delta_sync.store.open import open_store
from trl_callback.config import DeltaSyncConfig

KEY, OTHER = SigningKey.generate(), SigningKey.generate()
PINNED = {"keys": PublicKeys([KEY.public])}


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    KEY.save(tmp_path / "run.key")
    return str(tmp_path / "run.key")


def test_a_signed_run_is_served_and_healed(key_file: str) -> None:
    with looping(replica=PINNED, signing_key=key_file) as loop:
        for _ in range(2):
            loop.sync()
            loop.check()
            loop.train()
        head = Ledger(open_store(loop.config.uri), keys=PINNED["keys"]).head()
        assert head is not None and head.signature is not None


def test_the_key_may_come_from_the_environment(key_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in (key_file, Path(key_file).read_text()):
        monkeypatch.setenv("DELTA_SYNC_SIGNING_KEY", source)
        with looping(replica=PINNED) as loop:
            loop.sync()
            loop.check()


@pytest.mark.parametrize("signs", [False, True])
def test_a_server_that_pins_other_keys_is_an_error_at_the_start(signs: bool, tmp_path: Path) -> None:
    OTHER.save(tmp_path / "other.key")
    key = {"signing_key": str(tmp_path / "other.key")} if signs else {}
    start = time.monotonic()
    with pytest.raises(SignatureError) as error, looping(replica=PINNED, **key):
        pass
    got = f"one of key {OTHER.id}" if signs else "none"
    assert f"expected a signature of a key that is pinned there ({KEY.id}), got {got}." in str(error.value)
    assert "--delta-sync-public-key" in str(error.value)
    assert time.monotonic() - start < 10


def test_a_server_that_comes_back_with_other_keys_ends_the_wait_at_once(key_file: str) -> None:
    with looping(replica=PINNED, signing_key=key_file) as loop:
        loop.sync()
        loop.train()
        loop.replica.ledger = Ledger(open_store(loop.config.uri), keys=PublicKeys([OTHER.public]))
        with pytest.raises(SignatureError, match="a key that is pinned there"):
            loop.sync()


def test_where_only_the_bucket_tells_of_it_the_wait_ends_too() -> None:
    """A proxy hides the status: the trainer learns from the acknowledgement that its versions are not trusted."""
    with looping(replica={"acknowledges": True}) as loop:
        loop.sync()
        loop.replica.hide_status()
        loop.replica.ledger = Ledger(open_store(loop.config.uri), keys=PINNED["keys"])
        loop.train()
        with pytest.raises(SignatureError, match="to be trusted by replica stand-in"):
            loop.sync()


def test_acknowledgements_are_read_where_the_setting_says() -> None:
    acks = f"memory://{uuid.uuid4().hex}"
    with looping(replica={"acknowledges": True, "ack_uri": acks}, ack_uri=acks) as loop:
        loop.sync()
        loop.replica.hide_status()
        loop.train()
        loop.sync()
        loop.check()
        assert Ledger(open_store(loop.config.uri)).acknowledgements() == {}


def test_a_trainer_with_another_key_goes_on_with_an_anchor(key_file: str, tmp_path: Path) -> None:
    """Rotation: servers that pin only the new key can start from what the new trainer left."""
    OTHER.save(tmp_path / "new.key")
    uri, model = f"memory://{uuid.uuid4().hex}", tiny.llama()
    both = PublicKeys([KEY.public, OTHER.public])
    with StandInReplica(uri, model, keys=both).running() as replica:
        loop = Loop(uri, replica, model, signing_key=key_file)
        loop.train()
        loop.sync()
        loop.session.close()
        second = Loop(uri, replica, model, signing_key=str(tmp_path / "new.key"))
        second.sync()
        second.check()
        settle(lambda: [ref.version for ref in Ledger(open_store(uri)).anchors()] == [3])
        second.session.close()
    strict = Ledger(open_store(uri), keys=PublicKeys([OTHER.public]))
    plan = strict.plan(None, None)
    assert plan is not None and plan.anchor is not None and plan.anchor.version == 3


def test_a_key_that_cannot_be_read_is_an_error_before_anything_is_claimed(tmp_path: Path) -> None:
    with pytest.raises(DeltaSyncError, match="delta-sync keygen"), looping(signing_key=str(tmp_path / "none")):
        pass


def test_the_key_is_never_shown(key_file: str) -> None:
    text = Path(key_file).read_text()
    config = DeltaSyncConfig.build("memory://x", signing_key=text)
    assert "PRIVATE" not in repr(config) and key_file not in repr(config)
    with pytest.raises(DeltaSyncError) as error:
        DeltaSyncConfig.build("memory://x", signing_key=text.encode())
    assert text[40:60] not in str(error.value)
