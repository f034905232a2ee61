"""For TRL's AsyncGRPOTrainer: its weights reach the servers by way of the bucket, not by NCCL."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

from delta_sync.errors import MappingError
from trl_callback.halves import replace_attribute
from trl_callback.ranks import many_ranks

if TYPE_CHECKING:
    from trl_callback.callback import DeltaSyncCallback

PARAMETER = "weight_transfer"


class DeltaSyncWeightTransfer:
    """What ``AsyncGRPOTrainer(weight_transfer=…)`` takes; made by ``DeltaSyncCallback.weight_transfer()``.

    The trainer counts its policy's version up after ``resume``, so ``resume`` returns once the servers serve weights
    that are at most ``max_staleness`` optimizer steps old. The servers never pause.
    """

    def __init__(self, callback: DeltaSyncCallback) -> None:
        self._callback = callback
        self._unmerged = ExitStack()

    def init_weight_transfer(self) -> None:
        """The callback is there already: its own begin of training comes first."""

    def pause(self) -> None:
        """Keep TRL from merging adapters for what it sends; the servers' requests run through a commit."""
        self._unmerged.close()
        if self._callback.model is not None:  # else ``resume`` says what is missing
            self._unmerged = leave_unmerged(self._callback.model)

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Take what TRL streams, which may need all ranks, and leave it: the callback compares the model itself."""
        for _ in iterator:
            pass

    def resume(self) -> None:
        """Return once the servers serve these weights; SyncTimeoutError after ``sync_timeout``."""
        self._unmerged.close()
        self._callback.sync()

    def destroy(self) -> None:
        """The callback ends with training; a sync that failed leaves nothing behind."""
        self._unmerged.close()


def leave_unmerged(model: nn.Module) -> ExitStack:
    """Have PEFT's ``merge_adapter`` and ``unmerge_adapter`` of ``model`` do nothing, up to the latter or until closed.

    What TRL sends is not used, and merging and taking back is not exact: it would change weights that are trained on.
    """
    shadows = ExitStack()
    for module in model.modules():  # PeftModel has them from its tuner, whatever it is wrapped in
        if hasattr(type(module), "unmerge_adapter"):
            shadows.callback(replace_attribute(module, "merge_adapter", lambda *_, **__: None))
            shadows.callback(replace_attribute(module, "unmerge_adapter", shadows.close))  # also after a failed send
    return shadows


def check_one_process() -> None:
    """MappingError, on every rank alike: TRL calls a ``weight_transfer`` on rank 0 only."""
    if many_ranks():
        raise MappingError(
            "AsyncGRPOTrainer with delta-sync's weight_transfer",
            expected="one training process",
            got="several",
            remedy="train in one process, or with GRPOTrainer",
        )


def check_takes_transfer() -> None:
    """MappingError where the installed TRL has no trainer that takes a ``weight_transfer``."""
    import trl

    try:
        trainer = import_module("trl.experimental.async_grpo").AsyncGRPOTrainer
    except (ImportError, AttributeError) as error:
        trouble = f"TRL {trl.__version__}, in which it can't be imported ({error})"
    else:
        if PARAMETER in inspect.signature(trainer.__init__).parameters:
            return
        trouble = f"TRL {trl.__version__}, whose trainer has no such parameter"
    raise MappingError(
        "weight_transfer()",
        expected=f"an AsyncGRPOTrainer that takes {PARAMETER}=…",
        got=trouble,
        remedy="install a TRL from 1.11 to 1.17, or train with GRPOTrainer and rollouts_ahead=1",
    )
