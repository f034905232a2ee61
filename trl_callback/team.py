"""What the ranks of one training run say to each other, in two process groups of their own, never in the trainer's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

from delta_sync.errors import DeltaSyncError

_REASON_BYTES = 4096


@contextmanager
def _speaking() -> Iterator[None]:
    """What gloo raises when a rank is gone or silent, as an error of ours."""
    try:
        yield
    except RuntimeError as error:
        raise DeltaSyncError(
            f"rank {distributed.get_rank()}", expected="every rank at the same point of training", got=str(error),
            remedy="another rank has ended or hangs: look at its errors",
        ) from error  # fmt: skip


class Team:
    """All ranks of the default process group; every wait here ends after ``limit`` seconds or when a rank is gone.

    One group serves the training threads, which call its methods at the same points of training; the other the
    background threads, of which rank 0's gives orders and the others' answer. Both are gloo: they carry a few bytes,
    must not wait for a GPU, and work beside NCCL. Nothing that travels is unpickled.
    """

    def __init__(self, limit: float) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        span = timedelta(seconds=limit)
        self._training = distributed.new_group(backend="gloo", timeout=span)
        self._background = distributed.new_group(backend="gloo", timeout=span)

    def close(self) -> None:
        """Leave both groups; nobody may be waiting in them."""
        for group in (self._training, self._background):
            with suppress(ValueError, AssertionError, RuntimeError):  # the trainer may have destroyed all groups
                distributed.destroy_process_group(group)

    # The training threads' side: collectives.

    def together(self, work: Callable[[], int | None]) -> list[int]:
        """Run ``work`` on every rank; its numbers by rank. What any rank raises makes all raise, with the reason."""
        number, failure = 0, None
        try:
            number = work() or 0
        except BaseException as error:  # noqa: BLE001 (raised below, once the others know)
            failure = error
        said = self._all([int(failure is not None), number], torch.int64)
        if any(flag for flag, _ in said):
            self._raise_all(failure)
        return [int(number) for _, number in said]

    def decide(self, choose: Callable[[], object]) -> bool:
        """What rank 0's ``choose`` returns, on every rank; what it raises, all raise."""
        return bool(self.together(lambda: int(bool(choose())) if self.rank == 0 else 0)[0])

    def share(self, text: str) -> str:
        """Rank 0's ``text``, on every rank."""
        data = np.frombuffer(text.encode(), np.uint8)
        size = int(self._all([data.size], torch.int64)[0][0])
        buffer = torch.from_numpy(data.copy() if self.rank == 0 else np.empty(size, np.uint8))
        with _speaking():
            distributed.broadcast(buffer, 0, group=self._training)
        return buffer.numpy().tobytes().decode()

    def gather(self, text: str) -> list[str]:
        """Every rank's ``text`` by rank, on rank 0; nothing on the others."""
        if self.rank:
            _send(text.encode(), 0, self._training)
            return []
        return [text, *(_receive(rank, self._training).decode() for rank in range(1, self.size))]

    def _all(self, numbers: Any, kind: torch.dtype) -> list[list[int]]:
        own = torch.tensor(numbers, dtype=kind)
        said = [torch.empty_like(own) for _ in range(self.size)]
        with _speaking():
            distributed.all_gather(said, own, group=self._training)
        return [one.tolist() for one in said]

    def _raise_all(self, own: BaseException | None) -> None:
        reason = f"{type(own).__name__}: {own}".encode()[:_REASON_BYTES] if own is not None else b""
        said = self._all(list(reason.ljust(_REASON_BYTES, b"\0")), torch.uint8)
        if own is not None:
            raise own
        texts = [bytes(one).rstrip(b"\0").decode(errors="ignore") for one in said]
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
        raise DeltaSyncError(
            f"rank {self.rank}", expected="every rank to publish", got=f"a failure on rank {rank}: {text}"
        )

    # The background threads' side: rank 0 orders, the others answer; never two at a time.

    def order(self, order: dict[str, Any]) -> None:
        """Rank 0: tell all others what to do; each will answer."""
        for rank in range(1, self.size):
            _send(json.dumps(order).encode(), rank, self._background)

    def answers(self) -> list[dict[str, Any]]:
        """Rank 0: what the others say, by rank from 1."""
        return [json.loads(_receive(rank, self._background)) for rank in range(1, self.size)]

    def next_order(self) -> dict[str, Any]:
        """The others: rank 0's next order."""
        order: dict[str, Any] = json.loads(_receive(0, self._background))
        return order

    def answer(self, answer: dict[str, Any]) -> None:
        """The others: answer rank 0's order."""
        _send(json.dumps(answer).encode(), 0, self._background)

    def send_bits(self, bits: npt.NDArray[np.unsignedinteger]) -> None:
        """The others: send bits of a size that rank 0 knows."""
        with _speaking():
            distributed.send(torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8)), 0, group=self._background)

    def receive_bits(self, rank: int, bits: npt.NDArray[np.unsignedinteger]) -> None:
        """Rank 0: fill contiguous ``bits`` with what ``rank`` sends."""
        with _speaking():
            distributed.recv(torch.from_numpy(bits.view(np.uint8)), rank, group=self._background)


def _send(data: bytes, rank: int, group: Any) -> None:
    with _speaking():
        distributed.send(torch.tensor([len(data)]), rank, group=group)
        if data:
            distributed.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank, group=group)


def _receive(rank: int, group: Any) -> bytes:
    size = torch.empty(1, dtype=torch.int64)
    with _speaking():
        distributed.recv(size, rank, group=group)
        data = torch.empty(int(size.item()), dtype=torch.uint8)
        if data.numel():
            distributed.recv(data, rank, group=group)
    return data.numpy().tobytes()
