from __future__ import annotations

import sys
import threading
import time

import pytest
from helpers.moto_server import ENVIRONMENT, new_bucket

from delta_sync.errors import StoreError
from delta_sync.store import LocalStore, MemoryStore
from delta_sync.store.open import open_store


def results(document):
    return {check["name"]: check["result"] for check in document["checks"]}


def test_a_good_folder(run, as_json):
    before = sorted(run.folder.rglob("*"))
    code, found = as_json("doctor", run.uri)
    assert code == 0
    assert {name for name, result in results(found).items() if result != "ok"} == {"watch"}
    assert {"credentials", "clock"} <= set(results(found))
    assert sorted(run.folder.rglob("*")) == before


def test_a_folder_that_is_not_there_is_not_left_there(tmp_path, as_json):
    code, found = as_json("doctor", tmp_path / "new")
    assert (code, results(found)["run"]) == (0, "n/a")
    assert list(tmp_path.iterdir()) == []


def test_read_only_writes_nothing(run, as_json, monkeypatch):
    for name in ("put", "create", "put_file", "delete"):
        monkeypatch.setattr(LocalStore, name, None)
    code, found = as_json("doctor", run.uri, "--read-only")
    assert code == 0
    assert results(found)["small reads"] == "ok"
    assert "create-only" not in results(found)


def test_a_store_whose_create_only_is_none_and_that_forgets(monkeypatch, as_json):
    monkeypatch.setattr(MemoryStore, "create", MemoryStore.put)
    monkeypatch.setattr(MemoryStore, "list", lambda self, prefix: iter(()))
    code, found = as_json("doctor", "memory://doctor")
    assert code == 1
    assert (results(found)["create-only"], results(found)["listing"]) == ("fail", "fail")


def test_a_store_that_hangs_ends_at_the_deadline(run, as_json, monkeypatch):
    monkeypatch.setattr(LocalStore, "list", lambda self, prefix: threading.Event().wait(60))
    code, found = as_json("doctor", run.uri, "--timeout", 1)
    assert (code, len(found["checks"])) == (3, 1)
    assert "no answer in 1 s" in found["checks"][0]["found"]


def test_a_full_store_says_so_and_is_cleaned_up(run, as_json, monkeypatch):
    put = LocalStore.put

    def full(self, key, data):
        if len(data) > 1024:
            raise StoreError(f"write {key}", got="no space", remedy="free space")
        put(self, key, data)

    monkeypatch.setattr(LocalStore, "put", full)
    code, found = as_json("doctor", run.uri)
    assert (code, results(found)["bandwidth up"], results(found)["clean-up"]) == (1, "fail", "ok")
    assert not (run.folder / "doctor").exists()


@pytest.fixture
def s3(moto, monkeypatch):
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": moto}.items():
        monkeypatch.setenv(name, value)
    return f"s3://{new_bucket(moto)}/run"


def test_an_object_store(s3, as_json):
    code, found = as_json("doctor", s3)
    assert code == 0
    assert {"fail", "warn"}.isdisjoint(results(found).values())
    assert (results(found)["create-only"], results(found)["clock"]) == ("ok", "ok")
    assert list(open_store(s3).list("doctor/")) == []


def test_a_hub_bucket_where_a_second_trainer_is_only_detected(hub_bucket, as_json):
    code, found = as_json("doctor", f"hf://buckets/{hub_bucket}/run")
    assert code == 0
    assert {name for name, result in results(found).items() if result not in ("ok", "n/a")} == {"create-only"}
    assert (results(found)["watch"], results(found)["clock"]) == ("ok", "ok")
    assert list(open_store(f"hf://buckets/{hub_bucket}/run").list("doctor/")) == []


def test_a_hub_without_its_event_feed(hub, hub_bucket, as_json, monkeypatch):
    monkeypatch.setattr(sys.modules["delta_sync.cli.doctor"], "WATCH_SECONDS", 0.5)
    hub.api.serves_events = False
    code, found = as_json("doctor", f"hf://buckets/{hub_bucket}/run")
    assert (code, results(found)["watch"]) == (0, "warn")


def test_a_token_that_may_not_write(hub_bucket, as_json, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_test_read")
    code, found = as_json("doctor", f"hf://buckets/{hub_bucket}/run")
    assert (code, results(found)["credentials"], "small writes" in results(found)) == (1, "fail", False)
    code, found = as_json("doctor", f"hf://buckets/{hub_bucket}/run", "--read-only")
    assert code == 0


def test_a_clock_that_is_wrong(run, as_json, monkeypatch):
    monkeypatch.setattr(LocalStore, "written_at", lambda self, key: time.time() + 60)
    code, found = as_json("doctor", run.uri)
    assert (code, results(found)["clock"]) == (0, "warn")
    assert "+60 s" in next(check["found"] for check in found["checks"] if check["name"] == "clock")


def test_a_bucket_that_is_not_there(s3, as_json):
    code, found = as_json("doctor", s3.replace("/run", "-no/run"))
    assert (code, results(found)) == (3, {"reach": "fail"})
    assert "create the bucket" in found["checks"][0]["advice"]
