"""The trainer behind an event: transformers passes a callback its model, its optimizer, but not the trainer."""

from __future__ import annotations

import inspect

from transformers import Trainer, TrainerCallback


def enclosing_trainer(callback: TrainerCallback) -> Trainer | None:
    """The trainer that is calling ``callback`` right now, found in the call stack; None if there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer) and callback in candidate.callback_handler.callbacks:
            return candidate
        frame = frame.f_back
    return None
