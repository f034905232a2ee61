"""--delta-sync through vLLM's own parser: what it sets, what it leaves alone, what it refuses."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from delta_sync.errors import DeltaSyncError, FormatError, StoreError
from delta_sync.keys import SigningKey
from vllm_delta_plugin import register
from vllm_delta_plugin.config import ENVIRONMENT, ReplicaConfig, find_config
from vllm_delta_plugin.flag import WORKER_EXTENSION

ADDITIONAL = '{"delta_sync": {"uri": "runs/b"}}'


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for name in ("VLLM_PLUGINS", ENVIRONMENT):
        monkeypatch.setenv(name, "")  # so that what the flag sets is undone after the test
        monkeypatch.delenv(name)


def parse(*argv: str) -> tuple[Namespace, EngineArgs]:
    register()
    register()  # twice, as vLLM does
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", str(Path(__file__).parent), *argv])
    return args, AsyncEngineArgs.from_cli_args(args)


def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    import os

    return dict(os.environ)


def test_the_flag_alone_sets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = parse("--delta-sync", "runs/a")
    assert engine.worker_extension_cls == WORKER_EXTENSION
    assert engine.logprobs_mode == "processed_logprobs"
    assert not engine.additional_config  # the run's URI must not enter vLLM's compile-cache key
    config = find_config(engine.additional_config, environment(monkeypatch))
    assert config == ReplicaConfig(uri="runs/a")
    assert "delta_sync" in environment(monkeypatch)["VLLM_PLUGINS"].split(",")


def test_pinned_keys_are_read_when_the_flag_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, two, three = (SigningKey.generate() for _ in range(3))
    public = one.save(tmp_path / "run.key")
    both = f"{two.public.text},{three.public.text}"
    _, engine = parse("--delta-sync", "runs/a", "--delta-sync-public-key", str(public), "--delta-sync-public-key", both,
                      "--delta-sync-ack-uri", "runs/acks")  # fmt: skip
    public.unlink()  # the engine's process may be another user's, or elsewhere
    config = find_config(engine.additional_config, environment(monkeypatch))
    assert config is not None
    assert config.public_keys == (one.public.text, two.public.text, three.public.text)
    assert config.ack_uri == "runs/acks"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--delta-sync-public-key", "ed25519:nonsense"), "public key, expected ed25519: and 44 characters"),
        (("--delta-sync-public-key", "/no/such/file"), "public key, expected the path of a file"),
        (("--delta-sync-config", '{"public_keys": "ed25519:x"}'), "'public_keys'"),
        (("--delta-sync-config", '{"public_keys": [1]}'), "'public_keys'"),
        (("--delta-sync-config", '{"ack_uri": "a"}', "--delta-sync-ack-uri", "b"), "the same as --delta-sync-ack-uri"),
        (("--delta-sync-ack-uri", "s4://bucket"), "expected a path"),
    ],
)
def test_keys_and_places_that_are_none_are_refused_before_an_engine_starts(more: tuple[str, ...], words: str) -> None:
    with pytest.raises(DeltaSyncError, match=words):
        parse("--delta-sync", "runs/a", *more)


def test_without_the_flag_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = parse()
    assert engine.worker_extension_cls == ""
    assert engine.logprobs_mode == "raw_logprobs"
    assert "VLLM_PLUGINS" not in environment(monkeypatch)
    assert find_config(engine.additional_config, environment(monkeypatch)) is None


def test_a_logprobs_mode_set_by_the_user_stays() -> None:
    _, engine = parse("--delta-sync", "runs/a", "--logprobs-mode", "raw_logprobs")
    assert engine.logprobs_mode == "raw_logprobs"


def test_plugins_that_were_active_stay_active(monkeypatch: pytest.MonkeyPatch) -> None:
    parse("--delta-sync", "runs/a")
    by_default = set(environment(monkeypatch)["VLLM_PLUGINS"].split(","))
    assert {
        "lora_filesystem_resolver",
        "lora_hf_hub_resolver",
    } <= by_default  # vLLM's own, loaded when nothing is named

    monkeypatch.setenv("VLLM_PLUGINS", "other,delta_sync")
    parse("--delta-sync", "runs/a")
    assert environment(monkeypatch)["VLLM_PLUGINS"] == "other,delta_sync"

    monkeypatch.setenv("VLLM_PLUGINS", "other")
    parse("--delta-sync", "runs/a")
    assert environment(monkeypatch)["VLLM_PLUGINS"] == "other,delta_sync"


def test_the_unpatched_spelling_gets_routes_and_logprobs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = parse("--worker-extension-cls", WORKER_EXTENSION, "--additional-config", ADDITIONAL)
    assert find_config(engine.additional_config, environment(monkeypatch)) == ReplicaConfig(uri="runs/b")
    assert engine.logprobs_mode == "processed_logprobs"
    assert "delta_sync" in environment(monkeypatch)["VLLM_PLUGINS"].split(",")
    assert ENVIRONMENT not in environment(monkeypatch)


def test_applying_parsed_arguments_again_changes_nothing() -> None:
    args, first = parse("--delta-sync", "runs/a")
    assert AsyncEngineArgs.from_cli_args(args) == first


def test_more_settings_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    parse("--delta-sync", "runs/a", "--delta-sync-config", '{"replica": "r1", "read_back": true, "poll": 1}')
    config = find_config(None, environment(monkeypatch))
    assert config == ReplicaConfig(uri="runs/a", replica="r1", read_back=True, poll=1)


def test_a_cache_for_all_ranks_and_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    parse("--delta-sync", "runs/a", "--delta-sync-cache", "here", "--delta-sync-config", '{"cache_gib": 8}')
    config = find_config(None, environment(monkeypatch))
    assert config == ReplicaConfig(uri="runs/a", cache=str(tmp_path / "here"), cache_gib=8)
    with pytest.raises(FormatError, match="--delta-sync-cache"):
        parse("--delta-sync-cache", "here")


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ('{"replicas": "r1"}', "replicas"),
        ('{"read_back": "yes"}', "read_back"),
        ('{"poll": 0}', "poll"),
        ('{"poll": true}', "poll"),
        ('{"uri": "runs/other"}', "uri"),
        ("[1]", "--delta-sync-config"),
        ("{", "--delta-sync-config"),
    ],
)
def test_a_wrong_setting_is_named(more: str, names: str) -> None:
    with pytest.raises(FormatError, match=names):
        parse("--delta-sync", "runs/a", "--delta-sync-config", more)


def test_another_worker_extension_is_refused() -> None:
    with pytest.raises(FormatError, match=r"my\.Extension"):
        parse("--delta-sync", "runs/a", "--worker-extension-cls", "my.Extension")


def test_engines_that_the_environment_does_not_reach_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FormatError, match=r"--data-parallel-backend.*got ray.*use --data-parallel-backend mp"):
        parse("--delta-sync", "runs/a", "--data-parallel-backend", "ray")
    assert ENVIRONMENT not in environment(monkeypatch)
    parse("--delta-sync", "runs/a", "--data-parallel-backend", "mp")


def test_the_config_never_shows_secrets() -> None:
    config = ReplicaConfig(uri="https://user:secret@host/run?token=secret#secret")
    assert "secret" not in repr(config)
    assert "host/run" in repr(config)
    assert json.loads(config.to_json())["uri"] == config.uri


@pytest.mark.parametrize("uri", ["gopher://host/run", "hf:/me/run", "https://host/run"])
def test_a_uri_that_names_no_store_is_refused_before_an_engine_starts(uri: str) -> None:
    with pytest.raises(StoreError, match="expected a path"):
        parse("--delta-sync", uri)


def test_settings_with_a_flag_of_their_own_join_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--delta-sync-transition", "recompute", "--delta-sync-max-lag", "3")
    _, engine = parse("--delta-sync", "runs/a", "--delta-sync-config", '{"replica": "x"}', *flags)
    config = find_config(engine.additional_config, environment(monkeypatch))
    assert config == ReplicaConfig(uri="runs/a", replica="x", transition="recompute", max_lag=3)
    with pytest.raises(FormatError, match="--delta-sync-max-lag"):
        parse("--delta-sync-max-lag", "3")
    with pytest.raises(FormatError, match=r"transition.*async.*maybe"):
        parse("--delta-sync", "runs/a", "--delta-sync-config", '{"transition": "maybe"}')


def test_the_admin_key_shows_itself_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    args, _ = parse("--delta-sync", "runs/a", "--delta-sync-admin-key", "s3cret")
    assert args.delta_sync_admin_key == "s3cret"
    assert "s3cret" not in repr(args)
    assert "s3cret" not in str(environment(monkeypatch)), "workers need not know it"
