from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.wordle.game import MAX_GUESSES, Game, bracketed_word, closeness, mark
from examples.wordle.words import allowed, answers, draw

WORD = st.text(alphabet="abcde", min_size=5, max_size=5)  # few letters: many duplicates


@pytest.mark.parametrize(
    ("guess", "answer", "marks"),
    [
        ("crane", "crane", "GGGGG"),
        ("speed", "abide", "XXYXY"),  # one e in the answer: only the first e is yellow
        ("speed", "erase", "YXYYX"),  # two e in the answer: both are yellow
        ("eerie", "abide", "XXXYG"),  # the green e uses up the only e
        ("allow", "llama", "YGYXX"),  # green first, then yellow from the left
        ("zzzzz", "crane", "XXXXX"),
    ],
)
def test_marks_of_duplicate_letters(guess, answer, marks):
    assert mark(guess, answer) == marks


@given(WORD, WORD)
def test_green_is_exactly_the_equal_places(guess, answer):
    marks = mark(guess, answer)
    assert [m == "G" for m in marks] == [g == a for g, a in zip(guess, answer, strict=True)]


@given(WORD, WORD)
def test_a_letter_is_coloured_as_often_as_both_words_have_it(guess, answer):
    coloured = Counter(g for g, m in zip(guess, mark(guess, answer), strict=True) if m != "X")
    both = Counter(guess) & Counter(answer)
    assert coloured == both


@given(WORD, WORD)
def test_the_leftmost_of_the_misplaced_letters_are_yellow(guess, answer):
    seen_grey = set()
    for letter, colour in zip(guess, mark(guess, answer), strict=True):
        if colour == "X":
            seen_grey.add(letter)
        elif colour == "Y":
            assert letter not in seen_grey


@given(WORD, WORD)
def test_closeness_is_one_only_for_the_answer(guess, answer):
    value = closeness(mark(guess, answer))
    assert 0.0 <= value <= 1.0
    assert (value == 1.0) == (guess == answer)


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ("I say [CRANE].", "crane"),
        ("[one] then [two]", "one"),
        (" house\n", "house"),
        ("my guess is house", None),
        ("[]", None),
        ("[12345]", None),
    ],
)
def test_where_the_guess_is_found(message, word):
    assert bracketed_word(message) == word


def test_invalid_guesses_are_refused_with_the_reason():
    game = Game("crane", allowed())
    game.guess("house")
    assert "square brackets" in game.refusal(None)
    assert "5 letters" in game.refusal("cranes")
    assert "already" in game.refusal("house")
    assert "word list" in game.refusal("zzzzz")
    assert game.refusal("slate") is None


def test_the_game_ends_with_the_answer_or_the_last_attempt():
    game = Game("crane", allowed())
    game.guess("crane")
    assert game.won and game.done
    lost = Game("crane", allowed(), turns=MAX_GUESSES)
    assert lost.done and not lost.won


def test_the_word_lists_are_sane():
    words = answers()
    assert len(words) > 500 and len(set(words)) == len(words)
    assert len(allowed()) > 2000
    assert all(len(w) == 5 and w.isascii() and w.isalpha() and w.islower() for w in allowed())
    assert allowed() >= set(words)


def test_a_seed_draws_the_same_answer_and_seeds_differ():
    assert draw(7) == draw(7)
    assert len({draw(seed) for seed in range(50)}) > 30
