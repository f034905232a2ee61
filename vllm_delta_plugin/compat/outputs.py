"""Seam: the API server's output processor, where requests leave for the engine and their tokens come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_delta_plugin.compat.seam import require, wrap
from vllm_delta_plugin.request_versions import CURRENT, Choice
from vllm_delta_plugin.weights_label import LABEL, SESSION, WeightsLabel

_CHOICE = "delta_sync_choice"


def install() -> None:
    """Wrap both ways once; SeamError if one is gone."""
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.output_processor import OutputProcessor

    require(EngineCoreOutput, "new_token_ids", "trace_headers")
    wrap(OutputProcessor, "add_request", _remembering)
    wrap(OutputProcessor, "process_outputs", _noting)


def _remembering(original: Callable[..., Any]) -> Callable[..., Any]:
    """Runs in the HTTP request's own context, unlike the other."""

    def add_request(
        self: Any, request: Any, prompt: Any, parent_req: Any = None, request_index: int = 0, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(self, request, prompt, parent_req, request_index, *args, **kwargs)
        versions = CURRENT.get()
        if versions is not None:
            if versions.session:
                request.trace_headers = {**(request.trace_headers or {}), SESSION: versions.session}
            source = parent_req if parent_req is not None else request
            setattr(
                self.request_states[request.request_id],
                _CHOICE,
                versions.choice(source.request_id, request_index),
            )
        return result

    return add_request


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_outputs(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        states = self.request_states  # a finished request leaves it while this runs
        noted = [(output, getattr(states.get(output.request_id), _CHOICE, None)) for output in outputs]
        result = original(self, outputs, *args, **kwargs)
        for output, choice in noted:  # now, since a stop string may have cut tokens off
            if choice is not None:
                _note(choice, output)
        return result

    return process_outputs


def _note(choice: Choice, output: Any) -> None:
    label = (output.trace_headers or {}).get(LABEL)
    if label is not None and output.new_token_ids:
        choice.add(WeightsLabel.decode(label), len(output.new_token_ids))
