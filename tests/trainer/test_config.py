"""Settings are checked when they are set, and keys are never shown."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios

import pytest

from delta_sync.errors import DeltaSyncError
from trl_callback import DeltaSyncCallback
from trl_callback.config import TIMES, DeltaSyncConfig


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_staleness", -1),
        ("max_staleness", True),
        ("max_staleness", 1.5),
        ("publish_every", 0),
        ("anchor_every", -2),
        *(("keep_anchors", value) for value in (0, -1, 1.5, True, "2")),
        *(("anchor_chain_ratio", value) for value in (-0.5, float("inf"), float("nan"), "1", True)),
        ("serving_dtype", "bfloat16"),
        ("prompt_cache", "some"),
        ("server_url", "localhost:8000"),
        ("run", ""),
        *((name, value) for name in TIMES for value in (0, -1.0, float("inf"), float("nan"), "1")),
    ],
)
def test_a_bad_value_is_named(field: str, value: object) -> None:
    with pytest.raises(DeltaSyncError, match=f"'{field}'.*expected.*got"):
        DeltaSyncConfig.build("memory://x", **{field: value})


def test_an_unknown_setting_and_an_empty_uri_are_named() -> None:
    with pytest.raises(DeltaSyncError, match=r"max_stalenes'.*max_staleness"):
        DeltaSyncCallback("memory://x", max_stalenes=1)
    with pytest.raises(DeltaSyncError, match="'uri'"):
        DeltaSyncCallback(" ")


def test_the_key_comes_from_the_setting_or_the_environment_and_is_never_shown(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "from-env")
    assert DeltaSyncConfig("memory://x").server_key == "from-env"
    config = DeltaSyncConfig("memory://x", api_key="s3cret")
    assert config.server_key == "s3cret"
    assert "s3cret" not in repr(config) + str(config)
    monkeypatch.delenv("VLLM_API_KEY")
    assert DeltaSyncConfig("memory://x").server_key is None
    with pytest.raises(DeltaSyncError) as caught:
        DeltaSyncConfig("memory://x", api_key=12345)  # type: ignore[arg-type]
    assert "12345" not in str(caught.value)


def bar_output(*, terminal: bool, shown: bool | None) -> str:
    """What the bar writes to standard error in a child whose standard error is a terminal, or a pipe."""
    code = (
        "from trl_callback.progress import byte_bar\n"
        f"with byte_bar('anchor', 2048, shown={shown}) as advance: advance(2048)\n"
    )
    reader, writer = pty.openpty() if terminal else os.pipe()
    if terminal:
        termios.tcsetwinsize(writer, (24, 80))
    try:
        subprocess.run([sys.executable, "-c", code], stderr=writer, check=True, timeout=60)
        os.write(writer, b"\n")
        return os.read(reader, 65536).decode()
    finally:
        os.close(reader)
        os.close(writer)


def test_the_progress_bar_is_for_terminals_only() -> None:
    assert "anchor" in bar_output(terminal=True, shown=None)
    assert bar_output(terminal=False, shown=None).strip() == ""
    assert "anchor" in bar_output(terminal=False, shown=True)
