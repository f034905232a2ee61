"""Which version of the weights sampled which completion, as the servers' answers say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sampled:
    """One choice of one request: its prompt's and its own token ids, and the oldest version that made any of these.

    ``oldest`` is None where it is not known, or where weights were no proven version's.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    oldest: int | None


def sampled_of(answer: Any, choices: Sequence[Mapping[str, Any]], *, oldest: int | None) -> list[Sampled]:
    """What an answer's usage says of its choices; ``oldest`` of a server that says nothing, as it was asked for."""
    spans = _spans(answer, len(choices))
    return [
        Sampled(
            choice.get("prompt_token_ids") or (),
            choice.get("token_ids") or (),
            oldest if spans is None else _oldest(spans[i]),
        )
        for i, choice in enumerate(choices)
    ]


def oldest_versions(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], sampled: Iterable[Sampled]
) -> list[int | None]:
    """For each completion of a batch, over all its turns, the oldest version that made a token of it.

    A turn's request has everything before as its prompt. What can't be assigned (a rollout function may write prompts
    of its own) gets the oldest of the whole batch.
    """
    known = list(sampled)
    whole = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
    covered = [len(prompt) for prompt in prompts]
    found: list[list[int | None]] = [[] for _ in whole]
    for one in sorted(known, key=lambda one: len(one.prompt)):
        for i, tokens in enumerate(whole):
            if _continues(tokens, covered[i], one, first=not found[i]):
                covered[i] = len(one.prompt) + len(one.tokens)
                found[i].append(one.oldest)
                break
    anyone = _least([one.oldest for one in known])
    return [_least(versions) if versions else anyone for versions in found]


def _continues(tokens: Sequence[int], covered: int, one: Sampled, *, first: bool) -> bool:
    """Whether the request's prompt is the sequence so far, and its answer what comes next (both may be cut short)."""
    start = len(one.prompt)
    if start != covered if first else start < covered:
        return False
    kept = tokens[start : start + len(one.tokens)]
    return list(tokens[:start]) == list(one.prompt) and list(kept) == list(one.tokens[: len(kept)])


def _least(versions: Sequence[int | None]) -> int | None:
    return None if not versions or None in versions else min(versions)  # type: ignore[type-var]


def _spans(answer: Any, count: int) -> list[Any] | None:
    try:
        spans = answer["usage"]["delta_sync"]["choices"]
    except (KeyError, TypeError):
        return None
    return spans if isinstance(spans, list) and len(spans) == count else None


def _oldest(spans: Any) -> int | None:
    try:
        versions = [span["version"] for span in spans]
    except (KeyError, TypeError):
        return None
    return min(versions) if versions and all(type(version) is int for version in versions) else None
