"""One player's session: a game, its transcript and its reward signals, as OpenEnv observations."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from examples.wordle.game import RULES, WORD_LENGTH, Game, bracketed_word, closeness
from examples.wordle.protocol import Message, StepResult, WordleAction, WordleObservation, WordleState
from examples.wordle.words import allowed, draw


class Session:
    """Reset as often as liked; a step after the end repeats the last observation with done set."""

    def __init__(self) -> None:
        self.state = WordleState()
        self._start(seed=None, episode_id=None)

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> StepResult:
        self._start(seed, episode_id or str(uuid4()))
        return self._result(prompt=RULES, reward=0.0, signals={})

    def step(self, action: WordleAction) -> StepResult:
        if self.game.done:
            return self._result(self.state.env_id, self.state.last_reward, self.state.last_info)
        word = bracketed_word(action.message)
        repeats = self._seen.get(word or "", 0)
        refusal = self.game.refusal(word)
        self.game.turns += 1
        self._say(action.message)
        if refusal is None and word is not None:
            self._accept(word)
        else:
            self._say(f"You attempted an invalid move. Reason: {refusal} You have {self.game.left} guesses left.")
        if word:
            self._seen[word] = repeats + 1
        reward = self._reward()
        return self._result(self.state.env_id, reward, self._signals(refusal is None, repeats, reward))

    def _start(self, seed: int | None, episode_id: str | None) -> None:
        self.game = Game(draw(seed), allowed())
        self.state = WordleState(episode_id=episode_id)
        self._seen: dict[str, int] = {}
        self._transcript = f"[GAME] {RULES}"

    def _accept(self, word: str) -> None:
        marks = self.game.guess(word)
        if self.game.won:
            self._say(f"Congratulations! You guessed the word correctly!\nFeedback:\n{_rows(word, marks)}")
        else:
            self._say(
                f"You submitted [{word}].\nFeedback:\n{_rows(word, marks)}\nYou have {self.game.left} guesses left."
            )

    def _reward(self) -> float:
        """0 while the game runs; at its end 1 for a win, else how close the last accepted guess came."""
        if not self.game.done:
            return 0.0
        if not self.game.won:
            self._say(f"No guesses are left. The secret word was: {self.game.answer}.")
        return closeness(self.game.history[-1][1]) if self.game.history else 0.0

    def _signals(self, accepted: bool, repeats: int, reward: float) -> dict[str, Any]:
        marks = self.game.history[-1][1] if accepted else ""
        return {
            "reward_signals": {
                "wordle.greens": marks.count("G") / WORD_LENGTH,
                "wordle.yellows": marks.count("Y") / WORD_LENGTH,
                "wordle.repetitions": 1.0 - repeats,
                "wordle.correct": reward,
            }
        }

    def _result(self, prompt: str, reward: float, signals: dict[str, Any]) -> StepResult:
        turn = self.game.turns
        self.state.step_count = self.state.turn = turn
        self.state.last_reward, self.state.last_info = reward, signals
        self.state.raw_state = {"game_state": {"secret_word": self.game.answer, "guess_history": self.game.history}}
        observation = WordleObservation(
            prompt=prompt,
            messages=[Message(content=self._transcript)],
            info=signals,
            metadata={"env_id": self.state.env_id, "turn": turn, **signals},
        )
        return StepResult(observation=observation, reward=reward, done=self.game.done)

    def _say(self, line: str) -> None:
        self._transcript += f"\n[GAME] {line}"


def _rows(word: str, marks: str) -> str:
    return f"{' '.join(word.upper())}\n{' '.join(marks)}"
