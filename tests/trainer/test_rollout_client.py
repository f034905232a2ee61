"""The rollout client against a real HTTP server: TRL's shapes, the key on every request, no wait without an end."""

from __future__ import annotations

import json
import math
import socket
import threading
import time

import pytest
from stand_in_server import StandInServer, serving

from delta_sync.errors import DeltaSyncError, FormatError, MappingError, NotFoundError, SyncTimeoutError
from trl_callback.fleet import Fleet
from trl_callback.http import Server, ServerUnavailableError
from trl_callback.rollout_client import RolloutClient, read_choices
from trl_callback.status_client import StatusClient, parse_status

MODEL = (200, {"data": [{"id": "tiny"}]})


def completions(body: dict) -> tuple[int, dict]:
    """vLLM's shape: prompt-major choices, tokens named by id."""
    choices = []
    for prompt in body["prompt"]:
        for k in range(body["n"]):
            tokens = [10 + k, 20 + k]
            choices.append(
                {
                    "index": len(choices),
                    "prompt_token_ids": prompt,
                    "token_ids": tokens,
                    "logprobs": None
                    if body["logprobs"] is None
                    else {
                        "tokens": [f"token_id:{t}" for t in tokens],
                        "token_logprobs": [-0.5, -2.0],
                        "top_logprobs": [
                            {f"token_id:{t}": lp, **({"token_id:7": -1.0} if body["logprobs"] else {})}
                            for t, lp in zip(tokens, (-0.5, -2.0), strict=True)
                        ],
                    },
                }
            )
    return 200, {"choices": choices}


def client_of(server: StandInServer, *, key: str | None = None, timeout: float = 5.0, recovered=lambda: None):
    return RolloutClient(
        Fleet([Server(server.url, key)]),
        request_timeout=timeout,
        generate_timeout=timeout,
        logprobs_mode=lambda: "processed_logprobs",
        recovered=recovered,
    )


@pytest.fixture
def server():
    with serving(StandInServer()) as running:
        running.routes |= {
            "GET /health": lambda _: (200, b""),
            "GET /v1/models": lambda _: MODEL,
            "POST /v1/completions": completions,
        }
        yield running


def test_completions_have_the_shape_trl_expects(server: StandInServer) -> None:
    client = client_of(server)
    client.connect(1)
    out = client.generate([[1, 2], [3]], n=2, max_tokens=5, temperature=0.7, logprobs=0)
    assert out == {
        "prompt_ids": [[1, 2], [3]],
        "completion_ids": [[10, 20], [11, 21]] * 2,
        "logprobs": [[[-0.5], [-2.0]]] * 4,
        "logprob_token_ids": [[[10], [20]], [[11], [21]]] * 2,
    }
    body = server.requests[-1][2]
    assert body["model"] == "tiny" and body["prompt"] == [[1, 2], [3]]
    assert body["return_token_ids"] is True and body["return_tokens_as_token_ids"] is True
    assert (body["n"], body["max_tokens"], body["temperature"], body["logprobs"]) == (2, 5, 0.7, 0)
    assert "structured_outputs" not in body


def test_alternatives_are_ranked_and_hold_the_sampled_token(server: StandInServer) -> None:
    out = client_of(server).generate([[1]], n=1, logprobs=1)
    assert out["logprobs"] == [[[-0.5, -1.0], [-1.0, -2.0]]]
    assert out["logprob_token_ids"] == [[[10, 7], [7, 20]]]


def test_same_answer_as_trls_own_parser(server: StandInServer) -> None:
    from trl.generation.vllm_client import parse_logprobs

    _, answer = completions({"prompt": [[1], [2]], "n": 3, "logprobs": 1})
    ours = read_choices(answer["choices"], prompts=2, n=3)
    theirs = parse_logprobs([choice["logprobs"] for choice in answer["choices"]])
    assert (ours["logprobs"], ours["logprob_token_ids"]) == theirs


def test_extra_arguments_reach_the_server(server: StandInServer) -> None:
    client = client_of(server)
    out = client.generate([[1]], structured_outputs_regex="a+", generation_kwargs={"seed": 3, "n": 2}, logprobs=None)
    body = server.requests[-1][2]
    assert body["structured_outputs"] == {"regex": "a+"} and body["seed"] == 3
    assert len(out["completion_ids"]) == 2 and out["logprobs"] is None


def test_not_a_number_becomes_none() -> None:
    tops = {"token_id:1": math.nan, "token_id:2": -1.0}
    choice = {"index": 0, "prompt_token_ids": [1], "token_ids": [1],
              "logprobs": {"tokens": ["token_id:1"], "token_logprobs": [math.nan], "top_logprobs": [tops]}}  # fmt: skip
    assert read_choices([choice], prompts=1, n=1)["logprobs"] == [[[-1.0, None]]]


def test_missing_choices_and_missing_fields_are_errors(server: StandInServer) -> None:
    _, answer = completions({"prompt": [[1]], "n": 2, "logprobs": 0})
    with pytest.raises(FormatError, match="1 prompts x 3 choices"):
        read_choices(answer["choices"], prompts=1, n=3)
    del answer["choices"][1]["token_ids"]
    with pytest.raises(FormatError, match="return_token_ids"):
        read_choices(answer["choices"], prompts=1, n=2)
    with pytest.raises(MappingError, match="image"):
        client_of(server).generate([[1]], features=[{}])


def test_the_key_goes_with_every_request_and_into_no_message(server: StandInServer, tmp_path, monkeypatch) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login a password b\n")
    monkeypatch.setenv("NETRC", str(netrc))
    server.api_key = "s3cret"
    client = client_of(server, key="s3cret")
    client.connect(1)
    client.generate([[1]])
    assert {headers.get("Authorization") for _, headers, _ in server.requests} == {"Bearer s3cret"}
    with pytest.raises(DeltaSyncError, match=r"/v1/models.*401.*VLLM_API_KEY") as caught:
        client_of(server, key="wr0ng").connect(1)
    assert "wr0ng" not in str(caught.value)


def test_a_password_in_the_url_is_not_shown() -> None:
    server = Server("http://me:hunter2@127.0.0.1:9/prefix/")
    with pytest.raises(ServerUnavailableError) as caught:
        server.get("/health", timeout=1)
    assert "hunter2" not in str(caught.value) and "http://127.0.0.1:9/prefix/health" in str(caught.value)
    assert caught.value.__cause__ is None


def test_connecting_to_nobody_ends_at_the_deadline() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        nobody = StandInServer(url=f"http://127.0.0.1:{held.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(SyncTimeoutError, match=r"connection refused.*vllm serve"):
            client_of(nobody).connect(0.3)
        assert time.monotonic() - start < 5


def test_a_server_that_never_answers_ends_at_the_deadline() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        stalled = StandInServer(url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(SyncTimeoutError, match=r"within 0.5 s"):
            client_of(stalled, timeout=0.5).generate([[1]])


def test_a_server_that_was_away_is_caught_up_before_the_next_try(server: StandInServer) -> None:
    order: list[str] = []

    def flaky(body: dict) -> tuple[int, object]:
        order.append("asked")
        return completions(body) if len(order) > 2 else (503, {"error": {"message": "loading"}})

    server.routes["POST /v1/completions"] = flaky
    out = client_of(server, recovered=lambda: order.append("caught up")).generate([[1]])
    assert order == ["asked", "caught up", "asked"] and out["completion_ids"] == [[10, 20]]


def test_a_request_the_server_rejects_is_not_repeated(server: StandInServer) -> None:
    server.routes["POST /v1/completions"] = lambda _: (400, {"error": {"message": "max_tokens is too large"}})
    with pytest.raises(DeltaSyncError, match="400: max_tokens is too large"):
        client_of(server).generate([[1]])
    assert [name for name, _, _ in server.requests] == ["GET /v1/models", "POST /v1/completions"]


def test_answers_that_are_not_json_are_format_errors(server: StandInServer) -> None:
    server.routes["GET /v1/models"] = lambda _: (200, b"nonsense")
    with pytest.raises(FormatError, match=r"expected JSON.*nonsense"):
        client_of(server).connect(1)


def test_a_page_of_a_proxy_before_a_sleeping_server_is_waited_out(server: StandInServer) -> None:
    real, pages = server.routes["POST /v1/completions"], [b"<!DOCTYPE html>", b"\n <html>starting</html>"]
    server.routes["POST /v1/completions"] = lambda body: (200, pages.pop()) if pages else real(body)
    assert client_of(server).generate([[1]])["completion_ids"]
    assert pages == []
    server.routes["GET /v1/models"] = lambda _: (200, b"<html>asleep</html>")
    with pytest.raises(SyncTimeoutError, match=r"healthy within 1 s.*a web page: <html>asleep"):
        client_of(server).connect(1)


def test_status_is_read_and_its_types_are_checked(server: StandInServer) -> None:
    status = StatusClient(Server(server.url), timeout=2)
    with pytest.raises(NotFoundError, match="--delta-sync"):
        status.status()
    document = {
        "state": "refused", "version": 4, "epoch": 1, "manifest": "ab", "state_digest": "cd", "logprobs_mode": "raw",
        "refusal": {"version": 5, "manifest": "ef", "kind": "IntegrityError", "error": "sha256"}, "refusals": 2,
        "a_later_field": [],
    }  # fmt: skip
    server.routes["GET /delta_sync/status"] = lambda _: (200, document)
    seen = status.status()
    assert (seen.version, seen.epoch, seen.logprobs_mode) == (4, 1, "raw")
    assert seen.refusal is not None and (seen.refusal.version, seen.refusal.attempts) == (5, 2)
    for field, wrong in {"version": "4", "epoch": 1.5, "manifest": 3, "refusal": [], "last_error": "x"}.items():
        with pytest.raises(FormatError, match=field):
            parse_status({**document, field: wrong})
    server.routes["GET /delta_sync/tensors"] = lambda _: (
        200, {"tensors": {"w": {"dtype": "BF16", "shape": [2, 3], "digest": "00000000000000ff"}}}
    )  # fmt: skip
    (state,) = status.tensors().values()
    assert (state.dtype, state.shape, state.digest) == ("BF16", (2, 3), 255)


def test_requests_run_side_by_side(server: StandInServer) -> None:
    """A status read is answered while a long completion runs: the session is shared by two threads."""
    release = threading.Event()
    server.routes["POST /v1/completions"] = lambda body: release.wait(5) and completions(body)
    http = Server(server.url)
    worker = threading.Thread(
        target=lambda: http.post("/v1/completions", {"prompt": [[1]], "n": 1, "logprobs": 0}, timeout=5)
    )
    worker.start()
    assert http.get("/v1/models", timeout=2) == json.loads(json.dumps(MODEL[1]))
    release.set()
    worker.join(5)
    assert not worker.is_alive()


def test_two_threads_may_find_that_what_hung_has_ended(server: StandInServer) -> None:
    """The second one comes by while the first looks."""
    address = Server(server.url)

    class Ended(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            super().join(timeout)
            address._stuck = None

    stuck = address._stuck = Ended(target=lambda: None)
    stuck.start()
    address.check("/health", timeout=5)
