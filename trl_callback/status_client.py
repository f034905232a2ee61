"""What the rollout server says about the weights it serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from delta_sync.errors import FormatError, NotFoundError
from delta_sync.manifest import TensorState
from trl_callback.healing import Refusal
from trl_callback.http import Server

STATUS = "/delta_sync/status"
TENSORS = "/delta_sync/tensors"


@dataclass(frozen=True)
class ServedLora:
    """What a LoRA adapter must be like: largest rank, element type, last parts of modules' names."""

    max_rank: int
    dtype: str | None
    modules: tuple[str, ...]


@dataclass(frozen=True)
class ServerStatus:
    """One reading of the status route."""

    replica: str
    state: str
    version: int | None
    epoch: int | None
    manifest: str | None
    state_digest: str | None
    model_fingerprint: str | None
    serving_dtype: str | None
    logprobs_mode: str | None
    refusal: Refusal | None
    last_error: str | None
    newest_version: int | None
    uri: str | None = None
    codecs: tuple[str, ...] = ()
    ranks: int | None = None
    pinned_keys: tuple[str, ...] = ()  # ids of the public keys of which one must have signed what it takes
    pinned: int | None = None  # the version its operator holds it at
    lora: ServedLora | None = None  # None: it serves no LoRA adapters
    url: str = ""  # fit to be shown


class StatusClient:
    """Reads /delta_sync/status and /delta_sync/tensors of one server.

    Raises what Server raises; NotFoundError says that the server runs without --delta-sync.
    """

    def __init__(self, server: Server, *, timeout: float) -> None:
        self._server, self._timeout = server, timeout

    @property
    def url(self) -> str:
        """The server's URL, fit to be shown."""
        return self._server.url.shown

    def status(self) -> ServerStatus:
        """Read the status route once."""
        try:
            return replace(parse_status(self._server.get(STATUS, timeout=self._timeout)), url=self.url)
        except NotFoundError:
            raise NotFoundError(
                f"{self.url}{STATUS}",
                expected="delta-sync's status route",
                got="HTTP 404",
                remedy="start the server with `vllm serve MODEL --delta-sync URI`, and let proxies pass /delta_sync/",
            ) from None

    def statuses(self) -> list[ServerStatus]:
        """The one server's status, as a fleet has several."""
        return [self.status()]

    def admit(self, serves: Callable[[ServerStatus], bool]) -> None:
        """Whether it serves or not, there is no other to ask."""

    def tensors(self) -> dict[str, TensorState]:
        """Name -> element type, shape and digest of every tensor the server serves."""
        body = _object(self._server.get(TENSORS, timeout=self._timeout), TENSORS)
        listed = _object(body.get("tensors"), f"{TENSORS} tensors")
        return {name: _tensor(name, entry) for name, entry in listed.items()}


def parse_status(body: object) -> ServerStatus:
    """Read a status document; FormatError names the field that has the wrong type."""
    fields = _object(body, STATUS)
    error = None if fields.get("last_error") is None else _object(fields["last_error"], f"{STATUS} last_error")
    return ServerStatus(
        replica=_field(fields, "replica", str) or "",
        state=_field(fields, "state", str) or "unknown",
        version=_field(fields, "version", int),
        epoch=_field(fields, "epoch", int),
        manifest=_field(fields, "manifest", str),
        state_digest=_field(fields, "state_digest", str),
        model_fingerprint=_field(fields, "model_fingerprint", str),
        serving_dtype=_field(fields, "serving_dtype", str),
        logprobs_mode=_field(fields, "logprobs_mode", str),
        refusal=_refusal(fields),
        last_error=None if error is None else _message(error),
        newest_version=_field(fields, "newest_version", int),
        uri=_field(fields, "uri", str),
        codecs=_texts(fields, "codecs"),
        ranks=_field(fields, "ranks", int),
        pinned_keys=_texts(fields, "pinned_keys"),
        pinned=_field(fields, "pinned", int),
        lora=_lora(fields),
    )


def _lora(fields: Mapping[str, Any]) -> ServedLora | None:
    if fields.get("lora") is None:
        return None
    lora = _object(fields["lora"], f"{STATUS} lora")
    return ServedLora(_field(lora, "max_rank", int) or 0, _field(lora, "dtype", str), _texts(lora, "modules"))


def _refusal(fields: Mapping[str, Any]) -> Refusal | None:
    if fields.get("refusal") is None:
        return None
    refusal = _object(fields["refusal"], f"{STATUS} refusal")
    version = _field(refusal, "version", int)
    if version is None:
        raise FormatError(f"{STATUS} refusal", expected="a version", got="none")
    return Refusal(
        _field(fields, "replica", str) or "",
        version,
        _field(refusal, "kind", str),
        _message(refusal),
        served=_field(fields, "version", int),
        attempts=_field(fields, "refusals", int),
        stage_seconds=_field(fields, "stage_seconds_last", int | float) or 0.0,
    )


def _tensor(name: str, entry: object) -> TensorState:
    fields = _object(entry, f"{TENSORS} {name}")
    digest = _field(fields, "digest", str | int)
    dtype, shape = _field(fields, "dtype", str), _field(fields, "shape", list)
    if dtype is None or digest is None or shape is None or not all(type(n) is int for n in shape):
        raise FormatError(f"{TENSORS} {name}", expected="dtype, shape and digest", got=sorted(fields))
    try:
        value = int(digest, 16) if isinstance(digest, str) else digest
    except ValueError:
        value = -1
    if not 0 <= value < 1 << 64 or any(n < 0 for n in shape):
        raise FormatError(f"{TENSORS} {name}", expected="a digest of 64 bits, sizes from 0", got=(digest, shape))
    return TensorState(dtype, tuple(shape), value)


def _texts(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    return tuple(str(text) for text in _field(fields, name, list) or ())


def _message(fields: Mapping[str, Any]) -> str:
    return ": ".join(str(fields[key]) for key in ("kind", "error") if fields.get(key)) or "no reason given"


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(what, expected="a JSON object", got=type(value).__name__)
    return value


def _field(fields: Mapping[str, Any], name: str, kind: Any) -> Any:
    value = fields.get(name)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise FormatError(f"server status field {name!r}", expected=kind, got=type(value).__name__)
    return value
