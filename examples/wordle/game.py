"""The rules of Wordle, and nothing else: no server, no model, no randomness."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass, field

WORD_LENGTH = 5
MAX_GUESSES = 6

GREEN, YELLOW, GREY = "G", "Y", "X"

RULES = (
    f"You are playing Wordle. A secret {WORD_LENGTH}-letter word has been chosen. "
    f"You have {MAX_GUESSES} attempts to guess it.\n"
    "Write each guess in square brackets, for example [apple].\n"
    "Each letter is answered by G (right letter, right place), Y (right letter, wrong place) "
    "or X (letter not in the word).\n"
    "Enter your guess to begin."
)


def mark(guess: str, answer: str) -> str:
    """Five of G, Y, X; a letter is marked G or Y at most as often as it occurs in the answer."""
    marks = [GREEN if g == a else GREY for g, a in zip(guess, answer, strict=True)]
    left = [a for g, a in zip(guess, answer, strict=True) if g != a]
    for i, letter in enumerate(guess):
        if marks[i] == GREY and letter in left:
            marks[i] = YELLOW
            left.remove(letter)
    return "".join(marks)


def closeness(marks: str) -> float:
    """0.0 to 1.0: a green letter counts one fifth, a yellow one tenth."""
    return (marks.count(GREEN) + 0.5 * marks.count(YELLOW)) / WORD_LENGTH


def bracketed_word(message: str) -> str | None:
    """The first [word] of a message, or a message that is one bare word, in lower case; None if there is none."""
    found = re.search(r"\[\s*([A-Za-z]+)\s*\]", message) or re.fullmatch(r"\s*([A-Za-z]+)\s*", message)
    return found.group(1).lower() if found else None


@dataclass
class Game:
    """One game: guesses that were accepted, with their marks. An invalid guess costs an attempt."""

    answer: str
    allowed: Set[str]
    turns: int = 0
    history: list[tuple[str, str]] = field(default_factory=list)

    @property
    def won(self) -> bool:
        return bool(self.history) and self.history[-1][0] == self.answer

    @property
    def done(self) -> bool:
        return self.won or self.turns >= MAX_GUESSES

    @property
    def left(self) -> int:
        return MAX_GUESSES - self.turns

    def refusal(self, word: str | None) -> str | None:
        """Why this guess is not accepted, or None."""
        if word is None:
            return "Write your guess in square brackets, for example [apple]."
        if len(word) != WORD_LENGTH:
            return f"Your word must be exactly {WORD_LENGTH} letters."
        if any(word == earlier for earlier, _ in self.history):
            return f"You have already guessed '{word}'."
        if word not in self.allowed:
            return f"'{word}' is not in the word list."
        return None

    def guess(self, word: str) -> str:
        """Take an accepted word and return its marks."""
        marks = mark(word, self.answer)
        self.history.append((word, marks))
        return marks
