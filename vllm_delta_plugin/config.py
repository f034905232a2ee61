"""What a replica needs to know: where the run is, and how to behave."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from delta_sync.errors import FormatError
from delta_sync.store.open import redact_uri

ENVIRONMENT = "DELTA_SYNC_CONFIG"
ADDITIONAL_CONFIG = "delta_sync"
CHOICES = {"transition": ("async", "recompute", "sync")}


@dataclass(frozen=True)
class ReplicaConfig:
    """Settings of one replica; times in seconds.

    uri: the run's store. replica: name in acknowledgements (default: host and a random suffix).
    public_keys: only what one of these signed is taken; key texts or paths of files. acknowledge: write what is served
    to the bucket, or to ack_uri, so that uri need not be writable. read_back: let clients read raw weights over HTTP.
    poll: shortest time between two looks at the store. retry: longest time between two tries after a refusal.
    stage_timeout: longest time one version may take to stage. stage_bytes: most memory it may take on a rank (default:
    a share of what is free); an anchor that needs more is loaded in place while the engine is paused.
    cache: a folder that the engines of one machine share, so that each object is downloaded once; cache_gib: most that
    is kept there.
    audit_commits, audit_period: a full scan of live memory finishes once per so many commits, or after so long.
    transition: what becomes of requests that run when weights change: "async" (they go on with the cache they have),
    "recompute" (they go on over a cache made anew) or "sync" (they end before it, new ones wait).
    max_lag: versions that the replica may be behind the newest and still call itself ready (default: any number).
    fault: faults to inject, for tests only; passed to the workers as it is.
    """

    uri: str
    replica: str | None = None
    public_keys: Sequence[str] = ()
    acknowledge: bool = True
    ack_uri: str | None = None
    read_back: bool = False
    poll: float = 0.1
    retry: float = 5.0
    stage_timeout: float = 1800.0
    stage_bytes: int | None = None
    cache: str | None = None
    cache_gib: float = 64.0
    audit_commits: int = 32
    audit_period: float = 600.0
    transition: str = "async"
    max_lag: int | None = None
    fault: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        values = {**dataclasses.asdict(self), "uri": redact_uri(self.uri)}
        values["ack_uri"] = self.ack_uri and redact_uri(self.ack_uri)
        return f"ReplicaConfig({', '.join(f'{k}={v!r}' for k, v in values.items())})"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, as sent to the workers."""
        return {**dataclasses.asdict(self), "public_keys": list(self.public_keys), "fault": dict(self.fault)}

    def to_json(self) -> str:
        """The same as one line of JSON, as put into the environment."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_mapping(cls, values: object) -> ReplicaConfig:
        """Check names and types; FormatError names the setting, what was expected and what was got."""
        if not isinstance(values, Mapping):
            raise FormatError("delta_sync config", expected="a JSON object", got=type(values).__name__)
        known = {f.name: f for f in dataclasses.fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise FormatError(f"delta_sync config {name!r}", expected=f"one of {sorted(known)}", got="unknown name")
            _check(name, str(known[name].type), value)
        if not values.get("uri"):
            raise FormatError("delta_sync config 'uri'", expected="the run's store", got="nothing")
        settings: dict[str, Any] = dict(values)
        return cls(**settings | {"public_keys": tuple(settings.get("public_keys", ()))})

    @classmethod
    def from_json(cls, text: str) -> ReplicaConfig:
        """Parse one JSON object; FormatError."""
        return cls.from_mapping(parse_json(text, "delta_sync config"))


def parse_json(text: str, what: str) -> Any:
    """JSON or FormatError naming ``what``; the text is not echoed, it may hold secrets."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise FormatError(what, expected="JSON", got=str(error)) from None


def find_config(additional_config: object, environ: Mapping[str, str] = os.environ) -> ReplicaConfig | None:
    """The config in ``additional_config["delta_sync"]``, else the one --delta-sync left in the environment."""
    if isinstance(additional_config, Mapping) and additional_config.get(ADDITIONAL_CONFIG) is not None:
        return ReplicaConfig.from_mapping(additional_config[ADDITIONAL_CONFIG])
    text = environ.get(ENVIRONMENT)
    return ReplicaConfig.from_json(text) if text else None


def _check(name: str, annotation: str, value: object) -> None:
    expected: Any = {
        "str": str,
        "str | None": (str, type(None)),
        "bool": bool,
        "int": int,
        "int | None": (int, type(None)),
        "float": (int, float),
        "Mapping[str, Any]": Mapping,
        "Sequence[str]": (list, tuple),
    }[annotation]
    if value not in (choices := CHOICES.get(name, (value,))):
        raise FormatError(f"delta_sync config {name!r}", expected=f"one of {choices}", got=repr(value))
    is_bool = isinstance(value, bool)
    texts = not isinstance(value, list | tuple) or all(isinstance(item, str) for item in value)
    if not texts or not isinstance(value, expected) or (is_bool and annotation != "bool"):
        raise FormatError(f"delta_sync config {name!r}", expected=annotation, got=repr(value))
    if isinstance(value, int | float) and not is_bool and not value > 0:
        raise FormatError(f"delta_sync config {name!r}", expected="a positive number", got=repr(value))
