"""The test Hub is good enough for the clients that people use, none of them changed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from huggingface_hub import HfApi, HfFileSystem
from huggingface_hub.errors import BucketBatchError, BucketNotFoundError, EntryNotFoundError, HfHubHTTPError

CONTENTS = {"a/small.txt": b"hello", "a/large.bin": os.urandom(3_000_000), "a/same.bin": b"ab" * 500_000, "empty": b""}


@pytest.fixture
def api(hub):
    return HfApi(endpoint=hub.url, token="hf_test_write")


def upload(api, hub_bucket):
    api.batch_bucket_files(hub_bucket, add=[(data, path) for path, data in CONTENTS.items()])


def test_hf_api_round_trip(api, hub, tmp_path):
    assert api.create_bucket("org/made").url == api.create_bucket("org/made", exist_ok=True).url
    upload(api, "org/made")
    api.download_bucket_files("org/made", [(p, str(tmp_path / p)) for p in CONTENTS], raise_on_missing_files=True)
    assert {path: (tmp_path / path).read_bytes() for path in CONTENTS} == CONTENTS
    listed = {file.path: file.size for file in api.list_bucket_tree("org/made", recursive=True)}
    assert listed == {path: len(data) for path, data in CONTENTS.items()}
    api.batch_bucket_files("org/made", delete=["a/small.txt"])
    assert api.bucket_info("org/made").total_files == 3
    with pytest.raises(EntryNotFoundError):
        api.download_bucket_files("org/made", [("no", str(tmp_path / "no"))], raise_on_missing_files=True)
    with pytest.raises(BucketNotFoundError):
        api.bucket_info("org/nothing")


def test_listings_have_pages(api, hub_bucket):
    api.batch_bucket_files(hub_bucket, add=[(b"%d" % n, f"many/{n:03d}") for n in range(250)])
    assert [file.path for file in api.list_bucket_tree(hub_bucket, "many", recursive=True)] == [
        f"many/{n:03d}" for n in range(250)
    ]


def test_hf_file_system_round_trip(api, hub, hub_bucket):
    upload(api, hub_bucket)
    files = HfFileSystem(endpoint=hub.url, token="hf_test_write", skip_instance_cache=True)
    assert files.cat(f"buckets/{hub_bucket}/a/large.bin") == CONTENTS["a/large.bin"]
    with files.open(f"buckets/{hub_bucket}/new/file", "wb") as file:
        file.write(b"by fsspec")
    assert files.cat(f"buckets/{hub_bucket}/new/file") == b"by fsspec"
    assert sorted(files.ls(f"buckets/{hub_bucket}", detail=False)) == [
        f"buckets/{hub_bucket}/{n}" for n in ("a", "empty", "new")
    ]
    with files.open(f"buckets/{hub_bucket}/a/large.bin", "rb") as file:
        file.seek(1_000_000)
        assert file.read(1000) == CONTENTS["a/large.bin"][1_000_000:1_001_000]


def test_hf_command_round_trip(hub, hub_bucket, tmp_path):
    env = {**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1"}

    def hf(*args: str) -> str:
        command = [sys.executable, "-m", "huggingface_hub.cli.hf", "buckets", *args]
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=60).stdout

    (tmp_path / "here").write_bytes(CONTENTS["a/large.bin"])
    hf("cp", str(tmp_path / "here"), f"hf://buckets/{hub_bucket}/there")
    assert "there" in hf("ls", f"hf://buckets/{hub_bucket}", "-R")
    hf("cp", f"hf://buckets/{hub_bucket}/there", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == CONTENTS["a/large.bin"]


def test_rights(hub, hub_bucket):
    with pytest.raises(ConnectionError, match="403"):  # hf_xet asks for the upload token, and says it so
        HfApi(endpoint=hub.url, token="hf_test_read").batch_bucket_files(hub_bucket, add=[(b"x", "x")])
    with pytest.raises(HfHubHTTPError, match="401"):
        HfApi(endpoint=hub.url, token="hf_wrong").bucket_info(hub_bucket)


def test_a_partial_failure_is_reported_as_the_hub_does(api, hub, hub_bucket):
    hub.faults.add("fail some", "POST .*/batch", text="bad")
    with pytest.raises(BucketBatchError) as caught:
        api.batch_bucket_files(hub_bucket, add=[(b"1", "good"), (b"2", "bad")])
    assert [failure["path"] for failure in caught.value.failures] == ["bad"]
    assert [file.path for file in api.list_bucket_tree(hub_bucket)] == ["good"]


def test_the_client_does_not_notice_a_flipped_byte(api, hub, hub_bucket, tmp_path):
    """Why everything that is read is hashed by us."""
    upload(api, hub_bucket)
    hub.faults.add("flip", "GET /cas/xorbs")
    api.download_bucket_files(hub_bucket, [("a/large.bin", str(tmp_path / "got"))])
    got = (tmp_path / "got").read_bytes()
    assert len(got) == len(CONTENTS["a/large.bin"])
    assert got != CONTENTS["a/large.bin"]
