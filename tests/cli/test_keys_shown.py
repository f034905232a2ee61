"""A key that no header can hold, as one with the line break of the file it came from, is refused and never shown."""

from __future__ import annotations

import pytest

from delta_sync.bearer import bearer
from delta_sync.cli.server import ask
from delta_sync.errors import FormatError
from examples.wordle.wake import NotAwake, wait_until_awake
from trl_callback.http import Server

KEYS = ["s3cret\n", "s3cret\r\n", " s3cret", "s3cretä", "s3\x00cret"]
NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize("key", KEYS)
def test_whoever_would_send_it_says_so_without_it(key: str) -> None:
    for send, error in (
        (lambda: ask("GET", NOWHERE, "/health", key, 1.0), FormatError),
        (lambda: Server(NOWHERE, key), FormatError),
        (lambda: wait_until_awake(NOWHERE, key, 1.0, probe="/"), NotAwake),
    ):
        with pytest.raises(error, match="API key, expected printable ASCII") as caught:
            send()
        assert "s3" not in str(caught.value).replace("ASCII", "")


def test_a_good_one_is_sent() -> None:
    assert bearer("s3cret") == "Bearer s3cret"


def test_what_cannot_be_sent_is_an_answer_without_its_text() -> None:
    answer = ask("GET", "http://a..b", "/health", "s3cret", 1.0)
    assert answer.code is None
    assert answer.error is not None and "s3cret" not in answer.error


def test_an_address_without_a_scheme_is_not_waited_for() -> None:
    with pytest.raises(NotAwake, match="expected http://HOST"):
        wait_until_awake("localhost:8001", None, 60.0, probe="/")
