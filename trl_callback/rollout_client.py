"""Completions from a stock ``vllm serve``, in the shape TRL's generation asks of its own client."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from delta_sync.errors import DeltaSyncError, FormatError, MappingError, SyncTimeoutError
from trl_callback.fleet import Fleet, Member
from trl_callback.http import ServerUnavailableError
from trl_callback.sampled import Sampled, sampled_of

POLL = 0.5  # seconds between looks at a server that is still starting
TOKEN_ID = "token_id:"
MIN_VERSION, VERSION_TIMEOUT = "x-delta-sync-min-version", "x-delta-sync-timeout"  # request headers of the server
LONGEST_WISH = 3600.0  # seconds that a server lets a request wait for its version
Positions = list[list[list[Any]]]  # [completions, tokens, alternatives]


class RolloutClient:
    """Stands where TRL's VLLMClient does, over routes that need no development mode, in front of one or more servers.

    ``logprobs_mode`` asks the servers how they compute log-probabilities; ``recovered`` is called after a server was
    away and must return only once enough of them serve the right weights again. Tokens of weights older than
    ``min_version``, if that is set, are never accepted. ``sampled`` is told of every completion.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        request_timeout: float,
        generate_timeout: float,
        logprobs_mode: Callable[[], str | None],
        recovered: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._request_timeout, self._generate_timeout = request_timeout, generate_timeout
        self._logprobs_mode, self.recovered = logprobs_mode, recovered
        self.base_url = fleet.shown
        self.min_version: int | None = None
        self.sampled: Callable[[list[Sampled]], None] = ignore

    def connect(self, timeout: float) -> None:
        """Wait until one server is healthy and learn its model's name; SyncTimeoutError after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            troubles = [self._greet(member) for member in self._fleet.members]
            if None in troubles:
                return
            if time.monotonic() >= deadline:
                raise SyncTimeoutError(
                    f"rollout server {self.base_url}",
                    expected=f"healthy within {timeout:g} s",
                    got="; ".join(map(str, troubles)),
                    remedy="start it with `vllm serve MODEL --delta-sync URI`, or raise vllm_server_timeout",
                ) from troubles[0]
            time.sleep(min(POLL, max(0.0, deadline - time.monotonic())))

    def _greet(self, member: Member) -> ServerUnavailableError | None:
        """Learn the model's name; what is wrong where that can't be done now."""
        try:
            member.server.check("/health", timeout=self._request_timeout)
            self._model_of(member)
        except ServerUnavailableError as error:
            member.serves = False
            return error
        member.serves = True
        return None

    def _model_of(self, member: Member) -> str:
        if not member.model:
            member.model = _first_model(member.server.get("/v1/models", timeout=self._request_timeout))
        return member.model

    def get_server_info(self) -> dict[str, Any]:
        """The one setting TRL reads from a server's configuration: its log-probability mode."""
        return {"model_config": {"logprobs_mode": self._logprobs_mode()}}

    def generate(
        self,
        prompts: Sequence[Sequence[int]] | Sequence[str],
        features: Sequence[Any] | None = None,
        n: int = 1,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Complete every prompt ``n`` times.

        Returns prompt_ids ``[prompts][tokens]``, completion_ids ``[prompts*n][tokens]``, and logprobs with
        logprob_token_ids ``[prompts*n][tokens][alternatives]`` (None where logprobs is None), most probable first.
        """
        if features is not None:
            raise MappingError(
                "image prompts",
                expected="token ids only",
                got="image features",
                remedy="delta-sync serves text rollouts; train image models on text prompts",
            )
        sampling: dict[str, Any] = {
            "n": n,
            "repetition_penalty": repetition_penalty,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
        }
        if structured_outputs_regex is not None:
            sampling["structured_outputs"] = {"regex": structured_outputs_regex}
        sampling |= generation_kwargs or {}
        choices = self._complete(prompts, sampling | {"return_token_ids": True, "return_tokens_as_token_ids": True})
        return read_choices(choices, prompts=len(prompts), n=sampling["n"])

    def _complete(self, prompts: Sequence[Any], body: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices for all prompts, in their order, whichever server they come from."""
        deadline = time.monotonic() + self._generate_timeout
        parts = self._fleet.parts(len(prompts))
        answers: dict[int, list[dict[str, Any]]] = {}

        def ask(member: Member, part: range) -> None:
            answers[part.start] = self._ask(member, prompts[part.start : part.stop], body)

        while (error := self._fleet.work_off(parts, ask)) is not None and parts:
            if time.monotonic() >= deadline:
                raise SyncTimeoutError(
                    f"completions from {self.base_url}",
                    expected=f"an answer within {self._generate_timeout:g} s",
                    got=str(error),
                    remedy="look at the server's log, or raise generate_timeout",
                ) from error
            time.sleep(min(POLL, max(0.0, deadline - time.monotonic())))
            self.recovered()
        choices = [choice for start in sorted(answers) for choice in answers[start]]
        return [{**choice, "index": index} for index, choice in enumerate(choices)]

    def _ask(self, member: Member, prompts: Sequence[Any], body: dict[str, Any]) -> list[dict[str, Any]]:
        headers = {}
        if self.min_version is not None:
            patience = min(self._request_timeout, LONGEST_WISH)
            headers = {MIN_VERSION: str(self.min_version), VERSION_TIMEOUT: f"{patience:g}"}
        asked = {"model": self._model_of(member), "prompt": prompts, **body}
        answer = member.server.post("/v1/completions", asked, timeout=self._generate_timeout, headers=headers)
        choices = _choices(answer)
        self.sampled(sampled_of(answer, choices, oldest=self.min_version))
        return choices


def ignore(sampled: list[Sampled]) -> None:
    """Nobody wants to know."""


def read_choices(choices: list[dict[str, Any]], *, prompts: int, n: int) -> dict[str, Any]:
    """The server's choices, prompt-major, as TRL's client returns them; FormatError if any is missing."""
    if len(choices) != prompts * n:
        raise FormatError("completions", expected=f"{prompts} prompts x {n} choices", got=f"{len(choices)} choices")
    try:
        choices = sorted(choices, key=lambda choice: int(choice["index"]))
        prompt_ids = [list(choice["prompt_token_ids"]) for choice in choices[::n]]
        completion_ids = [list(choice["token_ids"]) for choice in choices]
        logprobs, token_ids = _logprobs([choice["logprobs"] for choice in choices])
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            "completions",
            expected="token ids and log-probabilities in every choice",
            got=repr(error),
            remedy="use a vLLM whose /v1/completions knows return_token_ids",
        ) from error
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": logprobs,
        "logprob_token_ids": token_ids,
    }


def _logprobs(of_choices: list[dict[str, Any] | None]) -> tuple[Positions | None, Positions | None]:
    if not of_choices or of_choices[0] is None:
        return None, None
    values: Positions = []
    ids: Positions = []
    for choice in of_choices:
        if choice is None:
            raise ValueError("log-probabilities missing from one choice")
        tops = choice["top_logprobs"] or [None] * len(choice["tokens"])
        rows = [_alternatives(*row) for row in zip(choice["tokens"], choice["token_logprobs"], tops, strict=True)]
        values.append([[value for _, value in row] for row in rows])
        ids.append([[token for token, _ in row] for row in rows])
    return values, ids


def _alternatives(token: str, logprob: float | None, tops: dict[str, float | None] | None) -> list[tuple[int, Any]]:
    """(token id, log-probability or None for NaN), most probable first, the sampled token always among them."""
    merged = {token: logprob, **(tops or {})}
    known = {_token_id(name): None if value is None or math.isnan(value) else value for name, value in merged.items()}
    return sorted(known.items(), key=lambda item: -math.inf if item[1] is None else item[1], reverse=True)


def _token_id(token: str) -> int:
    if not token.startswith(TOKEN_ID):
        raise ValueError(f"token {token!r} is not a token id")
    return int(token.removeprefix(TOKEN_ID))


def _choices(answer: object) -> list[dict[str, Any]]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list):
        raise FormatError("completions", expected="a list of choices", got=type(choices).__name__)
    try:
        return sorted(choices, key=lambda choice: int(choice["index"]))
    except (KeyError, TypeError, ValueError):
        raise FormatError("completions", expected="an index in every choice", got="none in one") from None


def _first_model(answer: object) -> str:
    try:
        return str(answer["data"][0]["id"])  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        raise DeltaSyncError("/v1/models", expected="at least one served model", got="none") from None
