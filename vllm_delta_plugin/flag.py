"""What ``--delta-sync URI`` means: the worker extension, the config, the plugin list and the logprobs default."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from delta_sync.errors import FormatError
from delta_sync.signing import load_public_keys
from delta_sync.store.open import check_uri
from vllm_delta_plugin.api_key import ADMIN_KEY, Secret
from vllm_delta_plugin.config import ADDITIONAL_CONFIG, CHOICES, ENVIRONMENT, ReplicaConfig, parse_json

WORKER_EXTENSION = "vllm_delta_plugin.worker_extension.DeltaSyncWorkerExtension"
PLUGIN = "delta_sync"
_FLAGS = {
    "delta_sync": "uri",
    "delta_sync_public_key": "public_keys",
    "delta_sync_ack_uri": "ack_uri",
    "delta_sync_cache": "cache",
    "delta_sync_transition": "transition",
    "delta_sync_max_lag": "max_lag",
}
_ENDPOINTS = "vllm.endpoint_plugins"


def add_arguments(parser: Any) -> None:
    """Add our flags; the logprobs default becomes None so that "not set by the user" can be told."""
    group = parser.add_argument_group("delta-sync", "Sparse, bit-exact weight sync from a trainer's bucket.")
    group.add_argument(
        "--delta-sync",
        metavar="URI",
        default=None,
        help="Follow the training run in this store: a folder, file://, or another store URI. "
        "Makes processed_logprobs the default of --logprobs-mode.",
    )
    group.add_argument(
        "--delta-sync-public-key",
        metavar="KEY",
        action="append",
        default=None,
        help="Take only what this key signed: ed25519:… or the path of a file with it. May be given several times.",
    )
    group.add_argument(
        "--delta-sync-ack-uri",
        metavar="URI",
        default=None,
        help="Acknowledge in this store instead of the run's, which then need not be writable.",
    )
    group.add_argument(
        "--delta-sync-config",
        metavar="JSON",
        default=None,
        help='More settings as a JSON object, for example \'{"replica": "a", "read_back": true}\'.',
    )
    group.add_argument(
        "--delta-sync-transition",
        choices=CHOICES["transition"],
        default=None,
        help="What becomes of requests that run when weights change (default: async).",
    )
    group.add_argument(
        "--delta-sync-max-lag",
        type=int,
        metavar="VERSIONS",
        default=None,
        help="GET /delta_sync/ready says 503 while the replica is further behind than this.",
    )
    group.add_argument(
        "--delta-sync-admin-key",
        type=Secret,
        metavar="KEY",
        default=None,
        help="Turns POST /delta_sync/{pin,unpin,rollback,reload} on for whoever knows the key. "
        f"Better set {ADMIN_KEY}: a command line can be read by every user of the machine.",
    )
    group.add_argument(
        "--delta-sync-cache",
        metavar="DIR",
        default=None,
        help="Download each object once for all ranks and engines of this machine that name this folder.",
    )
    parser.set_defaults(logprobs_mode=None)


def apply_flag(args: Namespace, default_logprobs_mode: str) -> None:
    """Turn the parsed flags into engine arguments and environment; calling it again changes nothing."""
    config = _config_from(args)
    if config is not None:
        _set_worker_extension(args)
        _refuse_ray(args)
        os.environ[ENVIRONMENT] = config.to_json()
    additional = getattr(args, "additional_config", None)
    follows = config is not None or (isinstance(additional, dict) and ADDITIONAL_CONFIG in additional)
    if follows:
        extend_plugins()
    if hasattr(args, "logprobs_mode") and args.logprobs_mode is None:
        args.logprobs_mode = "processed_logprobs" if follows else default_logprobs_mode


def extend_plugins() -> None:
    """Name our plugin in VLLM_PLUGINS (its routes load only if named), keeping every plugin that was active before."""
    active = os.environ.get("VLLM_PLUGINS")
    names = active.split(",") if active is not None else _active_by_default()
    if PLUGIN not in names:
        names = [*names, PLUGIN]
    os.environ["VLLM_PLUGINS"] = ",".join(names)


def _active_by_default() -> list[str]:
    # Without VLLM_PLUGINS vLLM loads every group except the endpoint plugins.
    groups = [g for g in metadata.entry_points().groups if g.startswith("vllm.") and g != _ENDPOINTS]
    return sorted({point.name for group in groups for point in metadata.entry_points(group=group)})


def _config_from(args: Namespace) -> ReplicaConfig | None:
    more = getattr(args, "delta_sync_config", None)
    if more is None and all(getattr(args, flag, None) is None for flag in _FLAGS):
        return None
    values = parse_json(more, "--delta-sync-config") if more else {}
    if not isinstance(values, dict):
        raise FormatError("--delta-sync-config", expected="a JSON object", got=type(values).__name__)
    for flag, name in _FLAGS.items():
        given = getattr(args, flag, None)
        if given is None:
            continue
        if values.get(name, given) != given:
            what = f"--delta-sync-config {name!r}"
            raise FormatError(what, expected=f"the same as --{flag.replace('_', '-')}", got="another")
        values[name] = given
        if "uri" not in values:  # the first flag
            raise FormatError(f"--{flag.replace('_', '-')}", expected="--delta-sync beside it", got="none")
    config = ReplicaConfig.from_mapping(values)
    return _checked(config)  # before an engine is started for it


def _checked(config: ReplicaConfig) -> ReplicaConfig:
    """The config with keys read from their files and an absolute cache: the engine's processes may be elsewhere."""
    check_uri(config.uri)
    if config.ack_uri is not None:
        check_uri(config.ack_uri)
    keys = load_public_keys(config.public_keys)
    cache = None if config.cache is None else str(Path(config.cache).absolute())
    return replace(config, public_keys=keys.texts if keys else (), cache=cache)


def _set_worker_extension(args: Namespace) -> None:
    current = getattr(args, "worker_extension_cls", "") or WORKER_EXTENSION
    if current != WORKER_EXTENSION:
        raise FormatError(
            "--worker-extension-cls with --delta-sync",
            expected="none, vLLM takes only one",
            got=current,
            remedy=f"derive that class from {WORKER_EXTENSION} and use --additional-config instead of --delta-sync",
        )
    args.worker_extension_cls = WORKER_EXTENSION


def _refuse_ray(args: Namespace) -> None:
    """Ray's actors get VLLM_… of this environment and not ours: the engines would follow nothing, and not say so."""
    if (got := getattr(args, "data_parallel_backend", "mp")) == "ray":
        raise FormatError(
            "--data-parallel-backend with --delta-sync", expected="mp", got=got, remedy="use --data-parallel-backend mp"
        )
