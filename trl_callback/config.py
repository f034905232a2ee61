"""Everything a user can set, checked when it is set."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from delta_sync.context_codec import CONTEXT_CODEC
from delta_sync.context_table import MOST_PARTS
from delta_sync.delta_file import DEFAULT_CODEC
from delta_sync.dtypes import DTYPES
from delta_sync.errors import DeltaSyncError
from delta_sync.retention import DEFAULT_GRACE
from delta_sync.signing import load_signing_key
from delta_sync.store.open import check_uri, redact_uri, shown_uri
from trl_callback.http import is_http

if TYPE_CHECKING:
    from delta_sync.keys import SigningKey

CODECS = {"gap": DEFAULT_CODEC, "context": CONTEXT_CODEC}
SERVING_DTYPES = tuple(name for name, dtype in DTYPES.items() if dtype.order == "float" and dtype.itemsize >= 2)


@dataclass(frozen=True)
class DeltaSyncConfig:
    """Settings of one publishing trainer; times in seconds, ``max_staleness`` and ``publish_every`` in optimizer steps.

    Raises DeltaSyncError naming the field, what it takes and what it got.
    """

    uri: str = field(repr=False)  # may hold a password, as may server_url
    max_staleness: int = 0  # 0: rollouts come from exactly this step's weights
    rollouts_ahead: Literal[0, 1] = 0  # 1: the next batch is generated while the trainer steps on the current one
    publish_every: int = 1  # optimizer steps between versions nobody is waiting for
    anchor_every: int = 50  # versions between complete checkpoints in the bucket; 0: not by number
    anchor_chain_ratio: float = 1.0  # an anchor too once the deltas since the last have this part of its size; 0: never
    keep_anchors: int | None = None  # newest complete checkpoints that stay, with the versions from there on; None: all
    keep_grace: float = DEFAULT_GRACE  # seconds that what retention lets go stays for who is reading it
    serving_dtype: str | None = None  # None: what the server serves, else the trainer's compute precision
    # One URL or several of servers of one run; None: the trainer's own vllm_server_* arguments.
    server_url: str | Sequence[str] | None = field(default=None, repr=False)
    api_key: str | None = field(default=None, repr=False)  # None: VLLM_API_KEY
    signing_key: str | None = field(default=None, repr=False)  # PEM file or text; None: DELTA_SYNC_SIGNING_KEY, if set
    ack_uri: str | None = field(default=None, repr=False)  # where replicas acknowledge; None: in ``uri``
    run: str | None = None
    writer: str | None = None
    codec: Literal["gap", "context"] = "gap"  # context: fewer bytes, decoded against the bits they change
    lora: Literal["merged", "adapter"] = "merged"  # what is published of a PEFT model: its weights, or its adapter
    tiles: int = 1  # of context-coded tensors along rows and columns: a multiple of the server's ranks
    snapshot_device: Literal["cpu", "cuda"] = "cpu"  # cuda: a copy of it on the model's GPU, for faster captures
    bucket_bytes: int = 512 * 1024**2  # of weights whose changes are one object; a capture's memory on the GPU
    prompt_cache: Literal["all", "new_session", "none"] = "none"
    sync_timeout: float = 600.0  # longest wait for a version to be served
    publish_timeout: float = 600.0  # longest time a store may keep failing before training stops
    flush_timeout: float = 600.0  # longest wait for the last version at the end of training
    request_timeout: float = 30.0  # one small request to the server
    generate_timeout: float = 1800.0  # one batch of completions
    poll_interval: float = 0.05
    fleet_patience: float = 2.0  # wait for a server that lags behind another; then the batch goes on without it
    refusal_grace: float = 2.0  # a refusal standing this long after a remedy gets the next remedy
    parity_every: int = 0  # optimizer steps between looks at how far trainer and server are apart; 0: never
    progress: bool | None = None  # None: only on a terminal

    def __post_init__(self) -> None:
        """Check every field."""
        _require("uri", isinstance(self.uri, str) and bool(self.uri.strip()), "a bucket URI or a folder", self.uri)
        check_uri(self.uri)
        if self.ack_uri is not None:
            _require("ack_uri", isinstance(self.ack_uri, str), "None or a URI", self.ack_uri)
            check_uri(self.ack_uri)
        for name in ("max_staleness", "anchor_every", "parity_every"):
            _require_integer(name, getattr(self, name), least=0)
        _require("rollouts_ahead", self.rollouts_ahead in (0, 1), "0 or 1", self.rollouts_ahead)
        if self.rollouts_ahead:
            _require("max_staleness", self.max_staleness >= 1, "at least 1 with rollouts_ahead=1", self.max_staleness)
        _require_integer("publish_every", self.publish_every, least=1)
        _require_integer("tiles", self.tiles, least=1)
        _require("tiles", self.tiles <= MOST_PARTS, f"at most {MOST_PARTS}", self.tiles)
        if self.keep_anchors is not None:
            _require_integer("keep_anchors", self.keep_anchors, least=1)
        ratio = self.anchor_chain_ratio
        _require("anchor_chain_ratio", _is_number(ratio) and 0 <= ratio < float("inf"), "a number >= 0", ratio)
        for name in TIMES:
            value = getattr(self, name)
            _require(name, _is_number(value) and 0 < value < float("inf"), "seconds, more than 0", value)
        _require("serving_dtype", self.serving_dtype in (None, *SERVING_DTYPES), f"None or one of {SERVING_DTYPES}",
                 self.serving_dtype)  # fmt: skip
        _require("lora", self.lora in ("merged", "adapter"), "'merged' or 'adapter'", self.lora)
        _require("codec", self.codec in CODECS, f"one of {tuple(CODECS)}", self.codec)
        _require("snapshot_device", self.snapshot_device in ("cpu", "cuda"), "'cpu' or 'cuda'", self.snapshot_device)
        _require_integer("bucket_bytes", self.bucket_bytes, least=1)
        policies = ("all", "new_session", "none")
        _require("prompt_cache", self.prompt_cache in policies, f"one of {policies}", self.prompt_cache)
        for name in ("api_key", "signing_key", "run", "writer"):
            value = getattr(self, name)
            got = "another type" if name in ("api_key", "signing_key") else value
            _require(name, value is None or (isinstance(value, str) and bool(value)), "None or a non-empty string", got)
        if self.server_url is not None:
            self._check_servers(self.server_url)

    def _check_servers(self, given: object) -> None:
        urls = [given] if isinstance(given, str) else given
        holds = isinstance(urls, list | tuple) and bool(urls) and all(isinstance(url, str) for url in urls)
        _require("server_url", holds, "None, a URL or a list of URLs", type(given).__name__ if holds else given)
        for url in self.server_urls:
            _require("server_url", is_http(url), "http://HOST[:PORT] or https://HOST[:PORT]", redact_uri(url))
        distinct = len({url.rstrip("/") for url in self.server_urls}) == len(self.server_urls)
        _require("server_url", distinct, "each server once", [redact_uri(url) for url in self.server_urls])

    @classmethod
    def build(cls, uri: str, **settings: Any) -> DeltaSyncConfig:
        """The config for ``uri`` and keyword settings; DeltaSyncError for a name that is not a setting."""
        known = {f.name for f in fields(cls)} - {"uri"}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise DeltaSyncError(
                f"delta-sync setting {unknown[0]!r}", expected=f"one of {sorted(known)}", got="an unknown name"
            )
        return cls(uri, **settings)

    @property
    def shown_uri(self) -> str:
        """The URI, fit to be shown: absolute, without user, password or query."""
        return shown_uri(self.uri)

    @property
    def server_urls(self) -> tuple[str, ...]:
        """The rollout servers that are set; empty: the trainer's own arguments name one."""
        if self.server_url is None:
            return ()
        return (self.server_url,) if isinstance(self.server_url, str) else tuple(self.server_url)

    @property
    def server_key(self) -> str | None:
        """The server's API key: the setting, else the environment's VLLM_API_KEY."""
        return self.api_key or os.environ.get("VLLM_API_KEY") or None

    def load_signing_key(self) -> SigningKey | None:
        """The key that this trainer signs with, None for none; DeltaSyncError where it cannot be read."""
        source = self.signing_key or os.environ.get("DELTA_SYNC_SIGNING_KEY")
        return load_signing_key(source) if source else None


TIMES = (
    "keep_grace",
    "sync_timeout",
    "publish_timeout",
    "flush_timeout",
    "request_timeout",
    "generate_timeout",
    "poll_interval",
    "fleet_patience",
    "refusal_grace",
)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(name: str, holds: bool, expected: str, got: object) -> None:
    if not holds:
        raise DeltaSyncError(f"delta-sync setting {name!r}", expected=expected, got=repr(got))


def _require_integer(name: str, value: object, *, least: int) -> None:
    holds = isinstance(value, int) and not isinstance(value, bool) and value >= least
    _require(name, holds, f"an integer >= {least}", value)
