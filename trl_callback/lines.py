"""Everything it takes to talk to the rollout servers, made once for the trainer and once for what runs ahead."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trl_callback.config import DeltaSyncConfig
from trl_callback.fleet import Fleet
from trl_callback.fleet_status import FleetStatus
from trl_callback.http import Server
from trl_callback.rollout_client import RolloutClient

WANTED_MODE = "processed_logprobs"  # what TRL's importance-sampling correction needs


@dataclass(frozen=True)
class Lines:
    """Connections to one fleet: its members, what they serve, and completions from them."""

    fleet: Fleet
    status: FleetStatus
    client: RolloutClient

    def generation(self, trainers: Any) -> Any:
        """The trainer's generation object, over these lines."""
        own = copy.copy(trainers)
        own.vllm_client = self.client
        return own


def open_lines(urls: Sequence[str], config: DeltaSyncConfig, recovered: Callable[[], None]) -> Lines:
    """Lines to the servers at ``urls``; ``recovered`` returns once enough of them serve the right weights again."""
    fleet = Fleet([Server(url, config.server_key) for url in urls])
    status = FleetStatus(
        fleet, timeout=config.request_timeout, patience=config.fleet_patience, poll=config.poll_interval
    )
    client = RolloutClient(
        fleet,
        request_timeout=config.request_timeout,
        generate_timeout=config.generate_timeout,
        logprobs_mode=lambda: _mode(status),
        recovered=recovered,
    )
    return Lines(fleet, status, client)


def _mode(status: FleetStatus) -> str | None:
    """The mode of all servers, or of the first that has another than TRL wants."""
    modes = [one.logprobs_mode for one in status.statuses()]
    return next((mode for mode in modes if mode != WANTED_MODE), WANTED_MODE)
