from __future__ import annotations

import pytest

from delta_sync import StoreError
from delta_sync.store import LocalStore, MemoryStore, open_store, redact_uri


def test_a_path_and_a_file_uri_are_the_same_folder(tmp_path):
    open_store(str(tmp_path / "my run")).put("a", b"1")
    store = open_store(f"file://{tmp_path}/my%20run")
    assert isinstance(store, LocalStore)
    assert store.get("a", max_bytes=1) == b"1"


def test_a_relative_path_and_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_store("runs/one").root == tmp_path / "runs/one"
    assert open_store("~/runs").root == tmp_path / "home/runs"


def test_memory_stores_of_one_name_are_one():
    open_store("memory://shared").put("a", b"1")
    store = open_store("memory://shared")
    assert isinstance(store, MemoryStore)
    assert store.get("a", max_bytes=1) == b"1"
    store.clear()


@pytest.mark.parametrize("uri", ["s3://bucket/run", "gs://bucket", "az://bucket"])
def test_stores_to_come_name_their_extra(uri):
    with pytest.raises(StoreError, match=r"delta-weight-sync\[s3\]"):
        open_store(uri)


@pytest.mark.parametrize(
    "uri", ["", "ftp://x", "file://host/path", "memory://", "https://x", "s3:/bucket/run", "hf:me/run"]
)
def test_other_uris_are_refused(uri):
    with pytest.raises(StoreError):
        open_store(uri)


SECRETS = {
    "s3://user:secret@bucket/run?token=secret#secret": "s3://bucket/run",
    "s3://secret@bucket/run": "s3://bucket/run",
    "s3:/user:secret@bucket": "s3:/bucket",
    "s3://user:sec/ret@bucket/run": "s3://bucket/run",
    "s3://user:sec?ret#@secret@bucket/run": "s3://bucket/run",
    "http://user:secret@gpu:8000": "http://gpu:8000",
}


@pytest.mark.parametrize("uri", SECRETS)
def test_errors_and_logs_carry_no_secrets(uri):
    assert redact_uri(uri) == SECRETS[uri]
    with pytest.raises(StoreError) as caught:
        open_store(uri)
    assert "sec" not in str(caught.value) and "ret" not in str(caught.value)


@pytest.mark.parametrize("uri", ["/a/b@c:d", "runs/one:two@x", "hf://buckets/me/run@main", "C:/runs"])
def test_what_holds_no_secret_is_shown_whole(uri):
    assert redact_uri(uri) == uri
