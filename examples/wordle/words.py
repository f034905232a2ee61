"""The word lists: what may be the answer, and what else may be guessed."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

DATA = Path(__file__).parent / "data"


def _read(name: str) -> tuple[str, ...]:
    return tuple((DATA / name).read_text(encoding="ascii").split())


@cache
def answers() -> tuple[str, ...]:
    """Common five-letter words, sorted; one of them is drawn per game."""
    return _read("answers.txt")


@cache
def allowed() -> frozenset[str]:
    """Every word a guess may be: the answers and the rarer words of guesses.txt."""
    return frozenset(answers()) | frozenset(_read("guesses.txt"))


def draw(seed: int | None = None) -> str:
    """An answer; the same one for the same seed, a random one for None."""
    return random.Random(seed).choice(answers())
