"""The commit: all ranks or none, inside one call on the engine's thread, so between two scheduler iterations.

Of engines that share experts all ranks of all engines or none: they agree before the call ends (``expert_group.py``).

No request can be stepped between a rank's swap and the check of all ranks' replies: the engine's thread
schedules nothing until this call returns, batches already handed to the workers run before the swap
(each worker takes its calls in order), and an undo happens inside the same call. So there is nothing
to abort and retry after a rollback: no token was ever computed with weights of a half-committed version.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from delta_sync.manifest import PromptCache
from vllm_delta_plugin.cache_salt import CacheSalt
from vllm_delta_plugin.group import PeerError
from vllm_delta_plugin.main_thread import EngineBroken
from vllm_delta_plugin.ranks import RankError, Ranks, first_failure


class RolledBack(RankError):
    """A rank failed to commit; every rank is back on the old version."""

    action = "retry"

    @classmethod
    def of(cls, error: RankError) -> RolledBack:
        """The same error, told as a rollback."""
        told = cls(error.rank, error.kind, error.message, error.object_key)
        told.args = error.args
        return told


@dataclass(frozen=True)
class Committed:
    """Unix time of the swap, and milliseconds the engine's thread was busy with it.

    ``unsettled``: what failed once the weights were live, if anything: freeing a rank's undo buffer, or making running
    requests prefill anew.
    """

    at: float
    milliseconds: float
    unsettled: Exception | None = None


def commit_all(
    ranks: Ranks, salt: CacheSalt, version: int, keep: PromptCache, agree: Callable[[bool], int | None]
) -> Committed:
    """Swap the staged bits in on every rank; must run on the engine's thread. ``keep``: which cached prompts remain.

    ``agree``: told whether that worked here, it answers with an engine where it did not (see Group.agree).
    RolledBack if a rank failed and all were undone; EngineBroken if one could not be undone.
    """
    started = time.perf_counter()
    replies = ranks.ask("commit", version)
    failed = first_failure(replies)
    if (elsewhere := agree(failed is None)) is not None and failed is None:
        failed = PeerError(elsewhere, "RolledBack", f"could not commit version {version}: its own status says why")
    salt.advance(keep if failed is None else "none")  # also after a rollback: a generation is never reused
    if failed is not None:
        _undo(ranks, version, failed)
        raise RolledBack.of(failed)
    unsettled = first_failure(ranks.ask("settle", version))
    return Committed(time.time(), (time.perf_counter() - started) * 1e3, unsettled)


def _undo(ranks: Ranks, version: int, cause: RankError) -> None:
    error = first_failure(ranks.ask("undo", version))
    if error is not None:
        raise EngineBroken(
            f"delta sync: version {version} failed to commit ({cause}) and could not be undone ({error}); "
            "ranks may hold different weights, so this engine ends. Restart it: it catches up by itself."
        )
