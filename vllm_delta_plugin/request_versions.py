"""Which versions produced the tokens of one HTTP request, noted as the tokens arrive in the API server."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from vllm_delta_plugin.version_wish import VersionWish
from vllm_delta_plugin.weights_label import WeightsLabel

CURRENT: ContextVar[RequestVersions | None] = ContextVar("delta_sync_request", default=None)


@dataclass
class Span:
    """Tokens ``start`` (inclusive) to ``end`` (exclusive) of one choice are by these weights."""

    weights: WeightsLabel
    start: int
    end: int


class Choice:
    """One sequence of tokens of a request."""

    def __init__(self, request: RequestVersions) -> None:
        self._request = request
        self.spans: list[Span] = []

    def add(self, weights: WeightsLabel, tokens: int) -> None:
        """``tokens`` more tokens arrived, all by these weights."""
        start = self.spans[-1].end if self.spans else 0
        if not self.spans or self.spans[-1].weights != weights:
            self.spans.append(Span(weights, start, start))
        self.spans[-1].end += tokens
        self._request.saw(weights)


class RequestVersions:
    """Every choice's spans; ``spoiled`` is set by the first token that is not by a version the client asked for."""

    def __init__(self, wish: VersionWish | None = None, session: str | None = None) -> None:
        self.wish, self.session = wish, session
        self.spoiled = asyncio.Event()
        self._prompts: dict[str, int] = {}
        self._choices: dict[tuple[int, int], Choice] = {}
        self._ends: tuple[WeightsLabel, WeightsLabel] | None = None

    def choice(self, prompt: str, index: int) -> Choice:
        """Choice ``index`` of the prompt with this id in the engine; prompts count in the order of their arrival."""
        number = self._prompts.setdefault(prompt, len(self._prompts))
        return self._choices.setdefault((number, index), Choice(self))

    def saw(self, weights: WeightsLabel) -> None:
        """A token by these weights arrived."""
        first = self._ends[0] if self._ends else weights
        self._ends = first, weights
        if self.wish is None:
            return
        # Two epochs may have a version of the same number, each with weights of its own.
        if not self.wish.allows(weights.version) or (self.wish.exact and weights != first):
            self.spoiled.set()

    @property
    def header(self) -> str | None:
        """``7``, or ``7..9`` if first and last token differ; "none" for weights without a version; None before any."""
        if self._ends is None:
            return None
        first, last = ("none" if end.version is None else str(end.version) for end in self._ends)
        return first if self._ends[0] == self._ends[1] else f"{first}..{last}"

    def to_usage(self) -> dict[str, Any] | None:
        """The usage field: all versions in rising order, and the spans of each choice; None before any token."""
        if self._ends is None:
            return None
        choices = [self._choices[key].spans for key in sorted(self._choices)]
        found = {span.weights.version for spans in choices for span in spans}
        return {
            "versions": sorted(found, key=lambda version: -1 if version is None else version),
            "choices": [[_plain(span) for span in spans] for spans in choices],
        }


def _plain(span: Span) -> dict[str, int | None]:
    return {"version": span.weights.version, "epoch": span.weights.epoch, "start": span.start, "end": span.end}
