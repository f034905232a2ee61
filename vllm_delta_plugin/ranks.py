"""Calling the worker extension on every rank and judging the replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from delta_sync.errors import DeltaSyncError, StoreError, SyncTimeoutError
from vllm_delta_plugin.main_thread import EngineBroken

Reply = Mapping[str, Any]


class RankError(DeltaSyncError):
    """A rank reported an error: ``kind`` is the error's class on that rank, ``object_key`` the object it was about."""

    action = "refetch"

    def __init__(self, rank: int, kind: str, message: str, object_key: str | None = None) -> None:
        super().__init__(f"rank {rank}: {message}")
        self.rank, self.kind, self.message, self.object_key = rank, kind, message, object_key

    def __reduce__(self) -> tuple[object, ...]:
        return (RankError, (self.rank, self.kind, self.message, self.object_key))


def is_transient(error: DeltaSyncError) -> bool:
    """Whether an error, here or on a rank, says nothing about the version, so that the same may work later."""
    kinds = (StoreError, SyncTimeoutError)
    return isinstance(error, kinds) or kind_of(error) in {kind.__name__ for kind in kinds}


def kind_of(error: BaseException) -> str:
    """The class of an error, here or on the rank that reported it."""
    return error.kind if isinstance(error, RankError) else type(error).__name__


class Ranks:
    """All workers of one engine; every method must be called on the engine's main thread."""

    def __init__(self, collective_rpc: Callable[..., Sequence[Reply]]) -> None:
        self._collective_rpc = collective_rpc

    def ask(self, method: str, *args: Any) -> list[Reply]:
        """Every rank's reply to ``delta_sync_{method}``, in rank order, failed or not.

        The extension's methods do not raise, so if this does, a worker is gone or too late: replies may be out of step
        for good and ranks may hold different weights, so the engine must end.
        """
        try:
            replies = list(self._collective_rpc(f"delta_sync_{method}", args=args))
        except Exception as error:
            raise EngineBroken(f"delta sync: no answer of all workers to {method}: {error!r}") from error
        for rank, reply in enumerate(replies):
            if not isinstance(reply, Mapping) or "ok" not in reply:
                raise EngineBroken(f"delta sync: rank {rank} answered {method} with {type(reply).__name__}")
        return replies

    def tell(self, method: str, *args: Any) -> list[Reply]:
        """Like ``ask``; RankError of the first rank that failed."""
        replies = self.ask(method, *args)
        if (error := first_failure(replies)) is not None:
            raise error
        return replies


def place(vllm_config: Any, rank: int) -> tuple[int, int]:
    """A worker's number among all that share one model's weights, and how many those are, over several engines perhaps.

    Data-parallel engines of a dense model share none: vLLM tells each of them that it is the only one.
    """
    parallel = vllm_config.parallel_config
    engines = parallel.data_parallel_size if vllm_config.model_config.is_moe else 1
    engine = parallel.data_parallel_rank if engines > 1 else 0
    return engine * parallel.world_size + rank, engines * parallel.world_size


def failure(rank: int, reply: Reply) -> RankError | None:
    """The error a reply carries, if any."""
    if reply["ok"]:
        return None
    error = reply.get("error") or {}
    message = str(error.get("error") or error.get("message") or "no reason given")
    return RankError(rank, str(error.get("kind", "Error")), message, error.get("object"))


def first_failure(replies: Sequence[Reply]) -> RankError | None:
    """The failure of the lowest rank that failed, if any did."""
    return next((e for rank, reply in enumerate(replies) if (e := failure(rank, reply)) is not None), None)
