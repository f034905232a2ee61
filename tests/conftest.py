"""Makes tests/helpers importable as ``helpers`` from every test folder; lends an S3 server and a Hub to a run's tests.

hf_xet keeps one cache for each process, which must not outlive the server it was filled from: hence one Hub.
"""

from __future__ import annotations

import signal
import sys
import uuid
from importlib.metadata import version
from pathlib import Path

import pytest
from helpers.fault_proxy import FaultProxy
from helpers.moto_server import ENVIRONMENT, moto_server, new_bucket

from delta_sync.codec import codec_names

# A shell's background jobs ignore Ctrl-C, and so would the processes that tests send it to.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind():
    """Which files share a process is the run's choice: one that leaves something in it fails, not a later one."""
    folder, codecs = Path.cwd(), codec_names()
    yield
    assert (Path.cwd(), codec_names()) == (folder, codecs)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("torch's default process group: expected destroyed at the end of a test file, got one left")


@pytest.fixture(scope="session")
def moto():
    with moto_server() as url:
        yield url


@pytest.fixture
def proxy(moto, monkeypatch):
    """A fault proxy before moto, named by the environment as users name their endpoint."""
    with FaultProxy(moto) as proxy:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.url}.items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture
def bucket(moto):
    return new_bucket(moto)


@pytest.fixture(scope="session")
def running_hub(tmp_path_factory):
    if version("huggingface_hub").split(".")[0] == "1":
        pytest.skip("huggingface_hub 1.x, as the oldest supported vLLM takes it: the hub extra needs 2.4")
    from helpers.hub import TestHub

    home = tmp_path_factory.mktemp("hf-home")
    with pytest.MonkeyPatch.context() as patch, TestHub() as hub:
        patch.setenv("HF_HOME", str(home))
        patch.setenv("HF_XET_CACHE", str(home / "xet"))
        patch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield hub


@pytest.fixture
def hub(running_hub, monkeypatch):
    """The Hub without faults, as HF_ENDPOINT and HF_TOKEN name it."""
    monkeypatch.setenv("HF_ENDPOINT", running_hub.url)
    monkeypatch.setenv("HF_TOKEN", "hf_test_write")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # set for whole processes by what other tests import
    running_hub.reset()
    yield running_hub
    running_hub.reset()


@pytest.fixture
def hub_bucket(hub):
    """The id of an empty bucket of its own."""
    return hub.new_bucket(f"org/{uuid.uuid4().hex[:12]}")
