"""What goes along with requests and outputs between API server and engine: a session's name, the weights' version."""

from __future__ import annotations

from dataclasses import dataclass

SESSION = "x-session-id"  # the HTTP header, and the key under which it goes along to the engine
LABEL = "x-delta-sync-version"  # the key under which an output carries its label


@dataclass(frozen=True)
class WeightsLabel:
    """Which version of which epoch; both None for weights that are no proven version's."""

    version: int | None = None
    epoch: int | None = None

    def encode(self) -> str:
        """``version/epoch``, or nothing."""
        return "" if self.version is None else f"{self.version}/{self.epoch}"

    @classmethod
    def decode(cls, text: str) -> WeightsLabel:
        """What ``encode`` wrote."""
        version, slash, epoch = text.partition("/")
        return cls(int(version), int(epoch)) if slash else cls()
