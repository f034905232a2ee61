import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.wordle.client import Turn
from examples.wordle.rewards import first_word, form, progress

# What SmolLM2-135M wrote to the two-shot prompt: eight answers of one group.
ANSWERS = ["house", "Apple!", "a guess word", "I'm thinking", "yellowstone", "", "stone\n\nstone", "The word is"]


def turn(marks=None, reward=0.0):
    return Turn(feedback="", marks=marks, reward=reward, done=reward == 1.0)


def test_a_perfect_answer_gets_all_of_it():
    assert form("crane", ended=True) == pytest.approx(1.0)
    assert form(" Crane.", ended=True) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("text", "ended", "value"),
    [
        ("crane", False, 0.8),
        ("cranes", True, 0.2 + 0.3 + 0.5 * 2 / 3),
        ("crane slate", True, 0.7),
        ("", True, 0.2),
        ("", False, 0.0),
        ("extraordinary", True, 0.5),
    ],
)
def test_graded_form(text, ended, value):
    assert form(text, ended) == pytest.approx(value)


@given(st.text(), st.booleans())
def test_form_is_bounded_and_ending_never_costs(text, ended):
    assert 0.0 <= form(text, ended) <= 1.0
    assert form(text, True) >= form(text, False)


def test_rewards_vary_within_a_group():
    rewards = [form(text, ended=i % 2 == 0) for i, text in enumerate(ANSWERS)]
    assert statistics.pstdev(rewards) > 0.1
    assert len(set(rewards)) >= 5


def test_progress_orders_games():
    lost, valid = progress([turn(), turn()]), progress([turn("XXXXX")])
    near, won = progress([turn("XXXXX"), turn("GGYXX")]), progress([turn("XXXXX"), turn("GGGGG", 1.0)])
    assert 0.0 == lost < valid < near < won == 1.0
    assert progress([turn(None, 1.0)]) == 1.0  # TextArena tells of a win without marks


def test_first_word():
    assert first_word('"Crane", he said') == "crane"
    assert first_word("123 !") == ""
