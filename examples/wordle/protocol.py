"""The OpenEnv message shapes that a Wordle needs, field for field those of OpenEnv's TextArena environment.

Written out here because the `openenv` package and vLLM pin `mcp` to versions that exclude each other,
so one virtualenv can't hold both.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class WordleAction(Strict):
    """One move; the guess stands in square brackets inside the message."""

    message: str = Field(max_length=4096)
    metadata: dict[str, Any] = Field(default_factory=dict)


class Message(Strict):
    sender_id: int = -1
    content: str
    category: str = "MESSAGE"


class WordleObservation(Strict):
    """What the player sees: `messages[-1].content` is the whole transcript since reset."""

    prompt: str
    messages: list[Message] = Field(default_factory=list)
    current_player_id: int = 0
    legal_players: list[int] = Field(default_factory=lambda: [0])
    info: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)


class StepResult(Strict):
    """The answer to reset and step."""

    observation: WordleObservation
    reward: float | None = None
    done: bool = False


class WordleState(BaseModel):
    """The session's state; it holds the secret word, so it is for debugging, not for the player."""

    episode_id: str | None = None
    step_count: int = 0
    env_id: str = "Wordle-v0"
    num_players: int = 1
    max_turns: int | None = None
    turn: int = 0
    last_reward: float = 0.0
    last_info: dict[str, Any] = Field(default_factory=dict)
    raw_state: dict[str, Any] = Field(default_factory=dict)


class ResetRequest(BaseModel):
    """Unknown parameters are ignored, as OpenEnv ignores those that an environment doesn't take."""

    seed: int | None = Field(default=None, ge=0)
    episode_id: str | None = Field(default=None, max_length=255)


class StepRequest(BaseModel):
    action: WordleAction


class ResetMessage(Strict):
    type: Literal["reset"]
    data: ResetRequest = Field(default_factory=ResetRequest)


class StepMessage(Strict):
    type: Literal["step"]
    data: WordleAction


class StateMessage(Strict):
    type: Literal["state"]


class CloseMessage(Strict):
    type: Literal["close"]


Incoming = Annotated[ResetMessage | StepMessage | StateMessage | CloseMessage, Field(discriminator="type")]
INCOMING: TypeAdapter[Incoming] = TypeAdapter(Incoming)


class ErrorData(BaseModel):
    """`code` is one of INVALID_JSON, UNKNOWN_TYPE, VALIDATION_ERROR, CAPACITY_REACHED, SESSION_ERROR."""

    model_config = ConfigDict(extra="allow")
    message: str
    code: str


def observation_reply(result: StepResult) -> dict[str, Any]:
    return {"type": "observation", "data": result.model_dump()}


def state_reply(state: WordleState) -> dict[str, Any]:
    return {"type": "state", "data": state.model_dump()}


def error_reply(message: str, code: str, **details: Any) -> dict[str, Any]:
    return {"type": "error", "data": ErrorData(message=message, code=code, **details).model_dump()}
