"""OpenTelemetry spans, where it is installed and configured; else nothing is made and nothing imported.

Configured means as everywhere: ``OTEL_EXPORTER_OTLP_ENDPOINT`` or ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` is set, or the
program has set a tracer provider (``vllm serve --otlp-traces-endpoint`` does), which is then used. Attributes are
names and numbers of versions, never a URI or an error's text.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}
_NAME = "delta_sync"
SPANS = {  # every span there is; those after a dot are parts of the one before it
    "delta_sync.publish": "trainer: from an optimizer step to the durable version that covers it",
    "delta_sync.publish.optimizer_step": "the optimizer's own step",
    "delta_sync.publish.detect": "comparing the model with what was published last, on the training thread",
    "delta_sync.publish.encode": "coding the changes; with several ranks also their uploads",
    "delta_sync.publish.upload": "putting the objects",
    "delta_sync.publish.commit": "creating the manifest, which makes the version visible",
    "delta_sync.take": "replica: from seeing a version to serving it",
    "delta_sync.take.notice": "from the manifest's creation until the replica saw it; two clocks",
    "delta_sync.take.fetch": "from the first request to the last object, on any rank; decoding goes on meanwhile",
    "delta_sync.take.stage": "all ranks fetching, decoding and staging in the background",
    "delta_sync.take.prove": "comparing what would be served with the manifest's digests",
    "delta_sync.take.commit": "the engine's thread held by the swap",
}
_lock = threading.Lock()
_provider: Any = None  # our own; None where the program's is used, or none
_failed = False


class Span:
    """A span that may be begun in one thread and ended in another; does nothing where ``inner`` is None."""

    def __init__(self, tracer: Any = None, inner: Any = None) -> None:
        self._tracer, self._inner = tracer, inner

    @property
    def traceparent(self) -> str | None:
        """W3C trace context of this span, for the other side to go on from; None where nothing is traced."""
        if self._inner is None:
            return None
        context = self._inner.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def child(self, name: str, began: float, ended: float, **attributes: Any) -> None:
        """Add one that is over; times in unix seconds, None attributes are left out."""
        if self._inner is not None:
            from opentelemetry import trace

            around = trace.set_span_in_context(self._inner)
            child = self._tracer.start_span(name, around, attributes=_known(attributes), start_time=_ns(began))
            child.end(_ns(max(began, ended)))

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make ``span`` in this thread add to this one."""
        if self._inner is None:
            yield
            return
        from opentelemetry import trace

        with trace.use_span(self._inner, record_exception=False, set_status_on_exception=False):
            yield

    def end(self, ended: float | None = None, *, error: str | None = None, **attributes: Any) -> None:
        """It is over; ``error`` is the kind of what went wrong. A second end changes nothing."""
        if self._inner is None:
            return
        self._inner.set_attributes(_known(attributes | {"error.type": error}))
        if error is not None:
            from opentelemetry.trace import StatusCode

            self._inner.set_status(StatusCode.ERROR, error)
        self._inner.end(None if ended is None else _ns(ended))


OFF = Span()


def begin(name: str, *, began: float | None = None, parent: str | None = None, **attributes: Any) -> Span:
    """A span of its own trace, or of that of ``parent``, a W3C traceparent; ``OFF`` where nothing is traced."""
    tracer = _tracer()
    if tracer is None:
        return OFF
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    around = TraceContextTextMapPropagator().extract({"traceparent": parent} if parent else {}, Context())
    start = _ns(time.time() if began is None else began)
    return Span(tracer, tracer.start_span(name, around, attributes=_known(attributes), start_time=start))


@contextlib.contextmanager
def span(name: str, **attributes: Any) -> Iterator[None]:
    """What goes on inside, as a part of the span that is current in this thread; nothing where none is."""
    if "opentelemetry.trace" not in sys.modules or (tracer := _tracer()) is None:
        yield
        return
    from opentelemetry import trace

    if not trace.get_current_span().get_span_context().is_valid:
        yield
        return
    inner = tracer.start_span(name, attributes=_known(attributes))
    try:
        yield
    except BaseException as error:
        Span(tracer, inner).end(error=type(error).__name__)
        raise
    inner.end()


def flush(seconds: float) -> None:
    """Send what was made so far, for at most about ``seconds``."""
    if _provider is not None:
        _provider.force_flush(int(seconds * 1000))


def _tracer() -> Any:
    """The tracer to use, None where nothing is configured."""
    asked = any(os.environ.get(name) for name in ENDPOINTS) or "opentelemetry.sdk.trace" in sys.modules
    if not asked or _failed or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        provider = _programs_provider() or _own_provider()
    except (ImportError, ValueError) as error:
        _give_up(error)
        return None
    return None if provider is None else provider.get_tracer(_NAME)


def _programs_provider() -> Any:
    if "opentelemetry.sdk.trace" not in sys.modules:
        return None
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    provider = trace.get_tracer_provider()
    return provider if isinstance(provider, TracerProvider) else None


def _own_provider() -> Any:
    """One that sends to the endpoint in the environment, made once; the program's own setup is left alone."""
    global _provider
    with _lock:
        if _provider is None and any(os.environ.get(name) for name in ENDPOINTS):
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "delta-sync"}
            provider = TracerProvider(resource=Resource.create(named))
            provider.add_span_processor(BatchSpanProcessor(_exporter()))
            _provider = provider
        return _provider


def _exporter() -> Any:
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), "http/protobuf")
    if protocol not in _EXPORTERS:
        raise ValueError(f"{_PROTOCOLS[0]}: expected one of {list(_EXPORTERS)}, got {protocol}")
    return importlib.import_module(_EXPORTERS[protocol]).OTLPSpanExporter()


def _give_up(error: Exception) -> None:
    global _failed
    with _lock:
        if not _failed:
            log.warning("no spans are made: %s. Remedy: pip install 'delta-weight-sync[otel]'", error)
        _failed = True


def _known(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name if "." in name else f"{_NAME}.{name}": value for name, value in attributes.items() if value is not None
    }


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
