import socket
import threading
import time

import pytest
import uvicorn
from fastapi import FastAPI, WebSocket

from examples.wordle.client import WordleClient, WordleServerError, websocket_url
from examples.wordle.env_server import create_app
from examples.wordle.words import draw


def test_a_game(wordle_url):
    with WordleClient(wordle_url) as wordle:
        assert "Wordle" in wordle.reset(seed=11).feedback
        wrong = wordle.guess("crane")
        assert len(wrong.marks) == 5 and not wrong.done and wrong.feedback.startswith("[GAME] [crane]")
        assert "Enter your guess" not in wrong.feedback  # only what is new
        invalid = wordle.guess("zzzzz")
        assert invalid.marks is None
        won = wordle.guess(f"[{draw(11)}]")
        assert (won.marks, won.reward, won.done) == ("GGGGG", 1.0, True)
        assert won.signals["wordle.greens"] == 1.0


def test_a_full_server_is_waited_for(serve):
    url = serve(create_app(max_sessions=1))
    first, second = WordleClient(url), WordleClient(url, slot_timeout=20)
    first.reset()
    timer = threading.Timer(0.6, first.close)
    started = time.monotonic()
    timer.start()
    assert not second.reset().done
    assert time.monotonic() - started > 0.5
    second.close()


def test_a_server_that_accepts_and_closes_cannot_be_reached():
    """As the proxy before an environment does that restarts."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        asked = []

        def close_all():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                asked.append(1)
                connection.close()

        threading.Thread(target=close_all, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(WordleServerError, match="no connection"):
            WordleClient(url, wake_timeout=0.6).reset()
        assert len(asked) > 1, "it is waited for"


def test_a_server_that_stays_full_is_an_error_after_the_deadline(serve):
    url = serve(create_app(max_sessions=1))
    with WordleClient(url) as first:
        first.reset()
        with pytest.raises(WordleServerError, match="at capacity") as caught:
            WordleClient(url, slot_timeout=0.5).reset()
    assert caught.value.code == "CAPACITY_REACHED"


def test_reset_reconnects_after_the_session_was_cut(wordle_url):
    with WordleClient(wordle_url) as wordle:
        wordle.reset()
        wordle._socket.close()
        with pytest.raises(WordleServerError, match="closed"):
            wordle.guess("crane")
        assert not wordle.reset().done


def test_nobody_there():
    with pytest.raises(WordleServerError, match="no connection"):
        WordleClient("http://127.0.0.1:9", timeout=2).reset()


def test_a_server_that_gets_up_in_time_is_waited_for(serve):
    with socket.socket() as late:
        late.bind(("127.0.0.1", 0))  # nobody listens: connections are refused
        port = late.getsockname()[1]
        with pytest.raises(WordleServerError) as caught:
            WordleClient(f"http://127.0.0.1:{port}", wake_timeout=0.6).reset()
        assert caught.value.code == "UNREACHABLE"
    server = uvicorn.Server(uvicorn.Config(create_app(1), port=port, log_level="error"))
    threading.Timer(1.0, server.run).start()
    with WordleClient(f"http://127.0.0.1:{port}", wake_timeout=30) as wordle:
        assert not wordle.reset().done
    server.should_exit = True


def test_a_game_goes_on_after_its_server_was_restarted():
    def start(port):
        server = uvicorn.Server(uvicorn.Config(create_app(2), port=port, log_level="error"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        return server, thread

    def stop(server, thread):
        server.force_exit = server.should_exit = True
        thread.join(10)

    first = start(0)
    port = first[0].servers[0].sockets[0].getsockname()[1]
    with WordleClient(f"http://127.0.0.1:{port}", wake_timeout=20) as wordle:
        wordle.reset(seed=11)
        before = wordle.guess("crane")
        stop(*first)
        second = start(port)
        assert wordle.guess(draw(11)).reward == 1.0  # two guesses in one game, on two servers
        wordle.reset(seed=11)
        assert wordle.guess("crane") == before
        wordle.reset()
        stop(*second)
        third = start(port)
        with pytest.raises(WordleServerError):  # without a seed it would be another game
            wordle.guess("crane")
        stop(*third)


def test_a_silent_server_is_given_up_on(serve):
    app = FastAPI()

    @app.websocket("/ws")
    async def silent(socket: WebSocket):
        await socket.accept()
        while True:
            await socket.receive_text()

    with pytest.raises(WordleServerError, match=r"no answer within 2\.?0? s"):
        WordleClient(serve(app), timeout=2.0).reset()


def test_the_token_is_sent_and_a_textarena_transcript_is_understood(serve):
    app = FastAPI()
    seen = []

    @app.websocket("/ws")
    async def textarena(socket: WebSocket):
        seen.append(socket.headers.get("authorization"))
        await socket.accept()
        text = "\n[GAME] You are Playing Wordle.\nFeedback for each letter will be given"
        while True:
            await socket.receive_text()
            message = {"sender_id": -1, "content": text, "category": "MESSAGE"}
            await socket.send_json({"type": "observation", "data": {"observation": {"messages": [message]}}})
            text += "\n[GAME] [crane]\n[GAME] You submitted [crane].\nFeedback:\nC R A N E\nX Y X X G\nYou have 5"

    with WordleClient(serve(app), token="secret-token") as wordle:
        assert wordle.reset().marks is None
        turn = wordle.guess("crane")
    assert turn.marks == "XYXXG" and turn.feedback.startswith("[GAME] [crane]") and turn.reward == 0.0
    assert seen == ["Bearer secret-token"]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://a:1", "ws://a:1/ws"),
        ("https://me-wordle.hf.space/", "wss://me-wordle.hf.space/ws"),
        ("wss://a/b/ws", "wss://a/b/ws"),
    ],
)
def test_websocket_url(url, expected):
    assert websocket_url(url) == expected


def test_a_url_that_is_none_is_refused():
    with pytest.raises(ValueError, match="environment URL"):
        websocket_url("localhost:8000")
