"""From ``s3://``, ``gs://`` and ``az://`` URIs to obstore's clients, with what the environment says about them.

The URI names bucket and prefix only. Endpoint, region and credentials are found where users of those clouds keep them;
this file and ``object.py`` are the only ones that know obstore.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from delta_sync.errors import FormatError, StoreError
from delta_sync.store.keys import check_key

CONNECT_SECONDS = 5.0
FROZEN_SECONDS = 300.0  # how long credentials of a profile are used before botocore is asked again
_ENDPOINTS = {  # in the order in which obstore prefers them
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_OWN_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip
OWN = "DELTA_SYNC_ACK_"  # variables that begin so are for the store of acknowledgements alone
_OWN_SETTINGS = ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE", "REGION", "ENDPOINT_URL")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


def split_uri(uri: str) -> tuple[str, str, str]:
    """(scheme, bucket, prefix without slashes around it); StoreError for anything that is not just that."""
    scheme, _, rest = uri.partition("://")
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.rstrip("/")
    if not _BUCKET.fullmatch(bucket):
        raise _refused(scheme, "something else than a bucket's name", "check its spelling; credentials never go there")
    if bucket.endswith("--x-s3"):
        raise _refused(scheme, "a directory bucket", "use a general purpose bucket, whose listings are in key order")
    if prefix:
        try:
            check_key(prefix)
        except FormatError as error:
            raise _refused(scheme, f"a prefix that is none: {error.expected}", "check the URI's spelling") from None
        if re.search(r"[?#]", prefix):
            raise _refused(scheme, "a query or fragment", "leave it out: settings go into the environment")
    return scheme, bucket, prefix


def check_installed(scheme: str) -> None:
    """StoreError unless the library behind these schemes is there; does not load it."""
    if importlib.util.find_spec("obstore") is None:
        remedy = "pip install 'delta-weight-sync[s3]'"
        raise StoreError(f"store {scheme}://", expected="the package obstore", got="none installed", remedy=remedy)


def connect(uri: str, *, timeout: float, retries: int, retry_seconds: float, own: bool = False) -> Any:
    """obstore's client for a URI: no request lasts longer than ``timeout``, none is begun after ``retry_seconds``.

    ``own``: with the credentials that the environment keeps for acknowledgements, where it has any.
    """
    scheme, bucket, prefix = split_uri(uri)
    check_installed(scheme)
    from obstore.store import AzureStore, GCSStore, S3Store

    options: Any = {
        "allow_http": _endpoint(scheme).startswith("http://"),
        "connect_timeout": timedelta(seconds=min(CONNECT_SECONDS, timeout)),
        "timeout": timedelta(seconds=timeout),
    }
    retry: Any = {
        "max_retries": retries,
        "retry_timeout": timedelta(seconds=retry_seconds),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2},
    }
    common: Any = {"prefix": prefix or None, "client_options": options, "retry_config": retry}
    if scheme == "gs":
        return GCSStore(bucket, **common)
    if scheme == "az":
        return AzureStore(bucket, **common)
    # One DELETE for one object: fewer servers know the bulk request, which would save nothing here.
    s3: Any = {"disable_bulk_delete": True, **((_own() if own else {}) or _profile())}
    options["allow_http"] = str(s3.get("endpoint") or _endpoint(scheme)).startswith("http://")
    return S3Store(bucket, **common, **s3)


def _endpoint(scheme: str) -> str:
    return next((os.environ[name] for name in _ENDPOINTS[scheme] if os.environ.get(name)), "")


def _own() -> dict[str, object]:
    """Keys or a profile named for acknowledgements alone, with their region and endpoint; nothing where there are none.

    Nothing that the environment says of the run's credentials, such as a session's token, is mixed in.
    """
    given = {name: os.environ.get(f"{OWN}AWS_{name}") for name in _OWN_SETTINGS}
    found: dict[str, object] = {}
    if given["ACCESS_KEY_ID"]:
        keys = {
            "access_key_id": given["ACCESS_KEY_ID"],
            "secret_access_key": given["SECRET_ACCESS_KEY"] or "",
            "token": given["SESSION_TOKEN"],
            "expires_at": None,
        }
        found = {"credential_provider": lambda: keys, "skip_signature": False}
    elif given["PROFILE"]:
        found = {**_from_botocore(given["PROFILE"], alone=True), "skip_signature": False}
    else:
        return {}
    more = {"region": given["REGION"], "endpoint": given["ENDPOINT_URL"]}
    return found | {name: value for name, value in more.items() if value}


def _profile() -> dict[str, object]:
    """Credentials, region and endpoint of an AWS profile, where the environment names no credentials itself."""
    if any(os.environ.get(name) for name in _OWN_CREDENTIALS):
        return {}
    named = os.environ.get("AWS_PROFILE")
    files = (os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
             os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config")  # fmt: skip
    if not named and not any(Path(file).expanduser().exists() for file in files):
        return {}
    if importlib.util.find_spec("botocore") is None and not named:
        return {}  # perhaps this machine has a role; botocore would have looked into the files first
    return _from_botocore(named)


def _from_botocore(named: str | None, *, alone: bool = False) -> dict[str, object]:
    """A profile's settings, of which the environment overrides region and endpoint unless the profile counts alone."""
    if importlib.util.find_spec("botocore") is None:
        raise StoreError(
            f"AWS profile {named!r}", expected="the package botocore, which reads profiles", got="none installed",
            remedy="pip install boto3, or export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )  # fmt: skip
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    session = Session(profile=named)
    try:
        credentials, scoped = session.get_credentials(), session.get_scoped_config()
    except BotoCoreError as error:
        got = type(error).__name__
        raise StoreError(
            f"AWS profile {named!r}", expected="credentials", got=got, remedy="check AWS_PROFILE"
        ) from None
    found = {"region": session.get_config_variable("region"), "endpoint": scoped.get("endpoint_url")}
    settings: dict[str, object] = {
        name: value for name, value in found.items() if value and (alone or not _in_environment(name))
    }
    if credentials is not None:
        settings["credential_provider"] = _provider(credentials)
    return settings


def _in_environment(name: str) -> bool:
    return bool(_endpoint("s3")) if name == "endpoint" else bool(os.environ.get("AWS_REGION"))


def _provider(credentials: Any) -> Callable[[], dict[str, object]]:
    def fetch() -> dict[str, object]:
        frozen = credentials.get_frozen_credentials()  # renews them where the profile says how
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=FROZEN_SECONDS),
        }

    return fetch


def _refused(scheme: str, got: str, remedy: str) -> StoreError:
    return StoreError(f"store {scheme}://", expected=f"{scheme}://bucket/prefix", got=got, remedy=remedy)
