"""Graded rewards: completions of one group must differ in reward, or there is nothing to learn from them."""

from __future__ import annotations

import re

from examples.wordle.client import Turn
from examples.wordle.game import WORD_LENGTH, closeness

ENDED, ONE_WORD, RIGHT_LENGTH = 0.2, 0.3, 0.5


def first_word(text: str) -> str:
    """The first run of letters, in lower case; "" where there is none."""
    found = re.search(r"[A-Za-z]+", text)
    return found.group().lower() if found else ""


def form(text: str, ended: bool) -> float:
    """0.0 to 1.0 for how much an answer looks like a guess: it ended, it is one word, it is about five letters long."""
    words = re.findall(r"[A-Za-z]+", text)
    off = abs(len(words[0]) - WORD_LENGTH) if words else WORD_LENGTH
    return ENDED * ended + ONE_WORD * (len(words) == 1) + RIGHT_LENGTH * max(0.0, 1.0 - off / 3)


def progress(turns: list[Turn]) -> float:
    """0.0 to 1.0 for a game's best accepted guess: 1.0 is a win, 0.2 any word of the list, and colours add to it."""
    if any(turn.reward == 1.0 for turn in turns):
        return 1.0
    accepted = [turn.marks for turn in turns if turn.marks]
    return max((0.2 + 0.6 * closeness(marks) for marks in accepted), default=0.0)
