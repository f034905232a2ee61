"""The protocol over real sockets, message by message."""

import json

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from examples.wordle.client import websocket_url
from examples.wordle.env_server import create_app
from examples.wordle.words import draw


@pytest.fixture
def session(wordle_url):
    with connect(websocket_url(wordle_url), proxy=None) as socket:

        def ask(message):
            socket.send(message if isinstance(message, str | bytes) else json.dumps(message))
            return json.loads(socket.recv(timeout=10))

        yield ask


def test_http_routes(wordle_url):
    assert httpx.get(f"{wordle_url}/health").json() == {"status": "healthy"}
    assert httpx.get(f"{wordle_url}/metadata").json()["name"] == "Wordle"
    schema = httpx.get(f"{wordle_url}/schema").json()
    assert schema["action"]["required"] == ["message"]
    assert {"observation", "state"} <= schema.keys()
    reset = httpx.post(f"{wordle_url}/reset", json={"seed": 3}).json()
    assert reset["done"] is False and reset["reward"] == 0.0 and "Wordle" in reset["observation"]["prompt"]
    assert httpx.post(f"{wordle_url}/reset").status_code == 200  # a body is optional
    step = httpx.post(f"{wordle_url}/step", json={"action": {"message": "[crane]"}}).json()
    assert "C R A N E" in step["observation"]["messages"][-1]["content"]
    assert httpx.get(f"{wordle_url}/state").json() == {"episode_id": None, "step_count": 0}
    assert httpx.post(f"{wordle_url}/step", json={"action": {"word": "crane"}}).status_code == 422


def test_a_game_over_the_websocket(session):
    answer = draw(11)
    first = session({"type": "reset", "data": {"seed": 11, "episode_id": "e1"}})
    assert first["type"] == "observation" and first["data"]["done"] is False
    wrong = session({"type": "step", "data": {"message": "[zzzzz]"}})["data"]
    assert wrong["reward"] == 0.0 and "not in the word list" in wrong["observation"]["messages"][-1]["content"]
    state = session({"type": "state"})
    assert state["type"] == "state" and state["data"]["step_count"] == 1 and state["data"]["episode_id"] == "e1"
    won = session({"type": "step", "data": {"message": f"[{answer}]"}})["data"]
    assert won["reward"] == 1.0 and won["done"] is True
    assert won["observation"]["info"]["reward_signals"]["wordle.correct"] == 1.0
    again = session({"type": "step", "data": {"message": "[house]"}})["data"]
    assert again == {**won, "observation": again["observation"]} and again["done"]
    assert session({"type": "state"})["data"]["step_count"] == 2


def test_a_lost_game_pays_how_close_the_last_accepted_guess_was(session):
    answer = draw(11)
    near = answer[::-1]
    session({"type": "reset", "data": {"seed": 11}})
    guesses = ["[slate]", "[toolong]", "no brackets here", "[slate]", "[qqqqq]", f"[{near}]"]
    turns = [session({"type": "step", "data": {"message": guess}})["data"] for guess in guesses]
    assert [t["done"] for t in turns] == [False] * 5 + [True]
    assert 0.0 <= turns[-1]["reward"] < 1.0
    assert answer in turns[-1]["observation"]["messages"][-1]["content"]
    assert turns[3]["observation"]["info"]["reward_signals"]["wordle.repetitions"] == 0.0


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{not json", "INVALID_JSON"),
        (b"\xff\xfe", "INVALID_JSON"),
        ("[" * 100_000, "INVALID_JSON"),
        ('{"type": "step", "data": {"message": "\\ud800"}}', "INVALID_JSON"),
        ({"type": "dance"}, "UNKNOWN_TYPE"),
        ({}, "UNKNOWN_TYPE"),
        ([1], "VALIDATION_ERROR"),
        ({"type": "step", "data": {}}, "VALIDATION_ERROR"),
        ({"type": "step", "data": {"message": 5}}, "VALIDATION_ERROR"),
        ({"type": "step", "data": {"message": "x" * 5000}}, "VALIDATION_ERROR"),
        ({"type": "reset", "data": {"seed": -1}}, "VALIDATION_ERROR"),
    ],
)
def test_bad_messages_are_answered_and_the_session_goes_on(session, message, code):
    answer = session(message)
    assert answer["type"] == "error" and answer["data"]["code"] == code and answer["data"]["message"]
    assert session({"type": "reset", "data": {"unknown": 1}})["type"] == "observation"


def test_close_ends_the_session(wordle_url):
    with connect(websocket_url(wordle_url), proxy=None) as socket:
        socket.send(json.dumps({"type": "close"}))
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=10)


def test_sessions_do_not_see_each_other(wordle_url):
    url = websocket_url(wordle_url)
    with connect(url, proxy=None) as one, connect(url, proxy=None) as two:
        for socket, seed in ((one, 1), (two, 2)):
            socket.send(json.dumps({"type": "reset", "data": {"seed": seed}}))
            socket.recv(timeout=10)
        one.send(json.dumps({"type": "step", "data": {"message": f"[{draw(1)}]"}}))
        assert json.loads(one.recv(timeout=10))["data"]["done"]
        two.send(json.dumps({"type": "state"}))
        assert json.loads(two.recv(timeout=10))["data"]["step_count"] == 0


def test_a_limit_of_no_sessions_is_refused():
    with pytest.raises(ValueError, match="MAX_CONCURRENT_ENVS"):
        create_app(0)
