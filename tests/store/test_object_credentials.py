"""Credentials, region and endpoint come from where users of S3 keep them, and show up nowhere."""

from __future__ import annotations

import importlib.util

import pytest
from helpers.fault_proxy import Fault

from delta_sync import StoreError
from delta_sync.store import open_store
from delta_sync.store.object import ObjectStore

OWN = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL")


@pytest.fixture
def profiles(proxy, monkeypatch, tmp_path):
    """Two profiles in files, and nothing in the environment but where these are."""
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = DEFAULTKEY\naws_secret_access_key = hush\n"
        "[other]\naws_access_key_id = OTHERKEY\naws_secret_access_key = hush\naws_session_token = TOKEN\n"
    )
    (tmp_path / "config").write_text(
        f"[default]\nregion = eu-north-1\nendpoint_url = {proxy.url}\n"
        f"[profile other]\nregion = ap-south-1\nendpoint_url = {proxy.url}\n"
    )
    for name in (*OWN, "AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def signed_by(proxy, bucket):
    """The headers of the last request of a store that was opened and used."""
    proxy.requests.clear()
    open_store(f"s3://{bucket}/run").put("a", b"1")
    headers = {name.lower(): value for name, value in proxy.requests[-1].headers.items()}
    return headers["authorization"], headers.get("x-amz-security-token")


def test_keys_of_the_environment(proxy, bucket, monkeypatch):
    assert "Credential=test/" in signed_by(proxy, bucket)[0]
    monkeypatch.setenv("AWS_SESSION_TOKEN", "TOKEN")
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    authorization, token = signed_by(proxy, bucket)
    assert "/eu-west-3/" in authorization
    assert token == "TOKEN"


def test_the_endpoint_of_s3_goes_before_that_of_all_services(proxy, bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
    assert signed_by(proxy, bucket)


def test_profiles(profiles, proxy, bucket, monkeypatch):
    authorization, token = signed_by(proxy, bucket)
    assert "Credential=DEFAULTKEY/" in authorization
    assert "/eu-north-1/" in authorization
    assert token is None
    monkeypatch.setenv("AWS_PROFILE", "other")
    authorization, token = signed_by(proxy, bucket)
    assert "Credential=OTHERKEY/" in authorization
    assert "/ap-south-1/" in authorization
    assert token == "TOKEN"


def test_the_environment_goes_before_profiles(profiles, proxy, bucket, monkeypatch):
    monkeypatch.setenv("AWS_REGION", "sa-east-1")
    assert "/sa-east-1/" in signed_by(proxy, bucket)[0]
    for name, value in {
        "AWS_ACCESS_KEY_ID": "ENVKEY",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_ENDPOINT_URL": proxy.url,
    }.items():
        monkeypatch.setenv(name, value)
    assert "Credential=ENVKEY/" in signed_by(proxy, bucket)[0]


def test_a_profile_that_does_not_exist(profiles, bucket, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StoreError, match="check AWS_PROFILE"):
        open_store(f"s3://{bucket}/run")


def test_a_profile_without_the_package_that_reads_it(profiles, bucket, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "other")
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "botocore" else find(name))
    with pytest.raises(StoreError, match="pip install boto3"):
        open_store(f"s3://{bucket}/run")


def test_no_credentials_at_all(proxy, bucket, monkeypatch, tmp_path):
    for name in OWN[:2]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")  # as on any machine without a role
    with pytest.raises(StoreError):
        ObjectStore(f"s3://{bucket}/run", retries=0).get("a", max_bytes=1)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")  # a public bucket
    open_store(f"s3://{bucket}/run").put("a", b"1")


def test_a_signed_query_is_not_shown(proxy, monkeypatch):
    for name, value in {
        "AZURE_STORAGE_ACCOUNT_NAME": "me",
        "AZURE_STORAGE_SAS_TOKEN": "sv=2024&sig=hush",
        "AZURE_STORAGE_ENDPOINT": proxy.url,
    }.items():
        monkeypatch.setenv(name, value)
    proxy.rule = lambda request: Fault(status=403, message="no")
    store = ObjectStore("az://container/run", retries=0)
    for call in (lambda: store.get("a", max_bytes=1), lambda: store.put("a", b""), lambda: list(store.list(""))):
        with pytest.raises(StoreError, match="403") as caught:
            call()
        assert "hush" not in str(caught.value)
    assert all("sig=hush" in request.path for request in proxy.requests)  # it was sent, so it could have been shown
    proxy.rule = lambda request: Fault(drop=True)
    with pytest.raises(StoreError) as caught:
        store.get("a", max_bytes=1)
    assert "hush" not in str(caught.value)
