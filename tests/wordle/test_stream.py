"""The recorder against a small server that speaks vLLM's stream format, well and badly."""

import asyncio
import json
import time

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from examples.wordle.stream import StreamRecorder


def completions(behave):
    """An app whose n-th completion is `behave(n)`: texts, (text, finish_reason) pairs, dicts and errors."""
    app = FastAPI()
    app.state.bodies, app.state.keys = [], []

    @app.post("/v1/completions")
    async def complete(request: Request):
        app.state.bodies.append(await request.json())
        app.state.keys.append(request.headers.get("authorization"))
        script = behave(len(app.state.bodies) - 1)
        if script is None:
            return JSONResponse({"error": "no model"}, status_code=404)

        async def body():
            for item in script:
                await asyncio.sleep(0.01)
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, bytes):
                    yield item
                    continue
                if isinstance(item, dict):
                    yield f"data: {json.dumps(item)}\n\n"
                    continue
                text, reason = item if isinstance(item, tuple) else (item, None)
                event = {"choices": [{"text": text, "finish_reason": reason}]}
                yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n"  # as vLLM does
            yield "data: [DONE]\n\n"

        return StreamingResponse(body(), media_type="text/event-stream")

    return app


def record(url, until, **more):
    """Until ``until`` is true of the recorder, within two minutes."""
    deadline = time.monotonic() + 120
    with StreamRecorder(url, "m", "Once", 50, **more) as recorder:
        while not until(recorder):
            assert time.monotonic() < deadline, (recorder.streams, recorder.interruptions)
            time.sleep(0.01)
    return recorder


def interrupted(recorder):
    return recorder.interruptions


def test_tokens_are_timed_and_finished_streams_restart(serve):
    app = completions(lambda n: ["a", "b", "", ("c", "length")])
    recorder = record(serve(app), lambda recorder: len(recorder.streams) >= 4, api_key="k")
    assert len(recorder.streams) >= 3 and not recorder.interruptions
    whole = [stream for stream in recorder.streams if stream.end == "length"]
    assert whole and all(len(stream.times) == 3 for stream in whole)  # the chunk without text carries no token
    assert all(b > a for stream in whole for a, b in zip(stream.times, stream.times[1:], strict=False))
    assert recorder.tokens == sum(len(stream.times) for stream in recorder.streams)
    assert app.state.bodies[0] == {"model": "m", "prompt": "Once", "max_tokens": 50, "ignore_eos": True, "stream": True}
    assert app.state.keys[0] == "Bearer k"


def test_what_is_no_event_is_an_interruption_and_the_next_stream_begins(serve):
    app = completions(lambda n: ["x", b"data: {not json\n\n"] if n == 0 else ["x", ("y", "length")])
    recorder = record(serve(app), lambda recorder: len(recorder.streams) >= 3)
    assert len(recorder.interruptions) == 1 and "JSONDecodeError" in recorder.interruptions[0]


def test_characters_that_unicode_ends_lines_with_end_no_event(serve):
    app = completions(lambda n: ["a\u2028", "\x85\x1c", "\u2029", ("é", "length")])
    recorder = record(serve(app), lambda recorder: len(recorder.streams) >= 3)
    assert not recorder.interruptions and len(recorder.streams[0].times) == 4


def test_our_own_stop_is_no_interruption(serve):
    recorder = record(serve(completions(lambda n: ["x"] * 10_000)), lambda recorder: recorder.tokens > 5)
    assert [stream.end for stream in recorder.streams] == ["cut"]
    assert not recorder.interruptions and recorder.tokens > 5


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (["a", "b"], "no finish reason after 2 tokens"),
        (["a", ("b", "abort")], "abort finish reason"),
        (["a", {"error": {"message": "engine died"}}], "engine died"),
        (["a", RuntimeError("server bug")], "RemoteProtocolError"),
        (None, "HTTP 404"),
    ],
)
def test_interruptions_are_counted_and_told(serve, script, why):
    recorder = record(serve(completions(lambda n: script if n == 0 else ["x"] * 10_000)), interrupted)
    assert len(recorder.interruptions) == 1 and why in recorder.interruptions[0]
    assert recorder.streams[0].end not in ("", "length", "stop", "cut")


def test_nobody_there_is_an_interruption():
    recorder = record("http://127.0.0.1:9", interrupted)
    assert "ConnectError" in recorder.interruptions[0]
