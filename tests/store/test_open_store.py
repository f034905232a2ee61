from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from delta_sync import StoreError
from delta_sync.store import LocalStore, MemoryStore, open_store, redact_uri
from delta_sync.store.open import check_uri


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


def test_the_hub_names_its_extra_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "delta_sync.store.hub", None)
    with pytest.raises(StoreError, match=r"delta-weight-sync\[hub\]"):
        open_store("hf://buckets/me/run")
    monkeypatch.setitem(sys.modules, "hf_xet", None)
    with pytest.raises(StoreError, match=r"delta-weight-sync\[hub\]"):
        check_uri("hf://buckets/me/run")


OBJECT_STORES = ["s3://bucket/run", "gs://bucket", "az://container/a/b"]


@pytest.mark.parametrize("uri", OBJECT_STORES)
def test_object_stores_name_their_extra_where_it_is_not_installed(uri, monkeypatch):
    check_uri(uri)
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "obstore" else find(name))
    for refuses in (check_uri, open_store):
        with pytest.raises(StoreError, match=r"delta-weight-sync\[s3\]"):
            refuses(uri)


def test_checking_a_uri_does_not_load_the_library():
    code = f"import sys; from delta_sync.store.open import check_uri; [check_uri(u) for u in {OBJECT_STORES}]"
    code += "; assert not {'obstore', 'botocore'} & sys.modules.keys(), 'loaded'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://",
        "s3:///run",
        "s3://b/../x",
        "s3://bucket//run",
        "s3://bucket/a?x",
        "s3://bucket/a#x",
        "s3://mine--usw2-az1--x-s3/run",
    ],
)
def test_a_uri_that_is_no_bucket_and_prefix_is_refused_before_anything_is_asked(uri):
    with pytest.raises(StoreError, match="Remedy"):
        check_uri(uri)


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
    "hf://buckets/hf_secret56789012345678901@org/name": "hf://buckets/hf_…@org/name",
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
