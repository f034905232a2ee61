"""What an object store's client says, as our errors with what to do about it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from delta_sync.errors import DeltaSyncError, NotFoundError, StoreError

CHARACTERS = 300
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist")
_ANSWER = re.compile(r"<Code>(.*?)</Code>\s*(?:<Message>(.*?)</Message>)?", re.DOTALL)
_STATUS = re.compile(r"status code: (\d{3}[A-Za-z ]*)")
_USER = re.compile(r"://[^/\s@]*@")
_QUERY = re.compile(r"\?[^\s\"')>]*")  # an Azure SAS token is a query

_CREDENTIALS = "check the credentials in this process's environment, see docs/STORES.md"
# The first line whose words are in the client's message tells the user what to do.
_REMEDIES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("RequestTimeTooSkewed", "RequestExpired"), "set this machine's clock: it differs from the server's"),
    (("ExpiredToken", "TokenRefreshRequired"), "renew the session token, which has expired"),
    (("SignatureDoesNotMatch", "InvalidAccessKeyId", "AuthenticationFailed", "401 Unauthorized"), _CREDENTIALS),
    (("169.254.169.254", "metadata.google.internal", "redential"), f"{_CREDENTIALS}; none were found"),
    (
        ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraint", "redirect without LOCATION"),
        "set AWS_REGION to the bucket's region",
    ),
    (
        ("QuotaExceeded", "StorageFull", "507 Insufficient", "EntityTooLarge"),
        "free space or raise the quota, then try again",
    ),
    (("403 Forbidden", "AccessDenied"), "let these credentials list and read the bucket and, on a trainer, write it"),
    (("SlowDown", "429 Too Many", "503 Service"), "try again later: the server asks for fewer requests"),
    (("BadScheme",), "use https://, or say http:// in the endpoint's variable"),
    (("ertificate",), "trust the server's certificate on this machine"),
    (("TimedOut", "operation timed out"), "try again; if it stays, look at the network and the server"),
    (("invalid path",), "remove that object: it is none of ours, and its key stands in the way of listings"),
    (("kind: Connect",), "check the endpoint's variable and the network"),
)


@contextlib.contextmanager
def explained(doing: str) -> Iterator[None]:
    """Raise what the client raises as StoreError or NotFoundError; without a cause, which could show secrets."""
    try:
        yield
    except DeltaSyncError:
        raise
    except Exception as error:  # noqa: BLE001 - the client also raises built-in errors; all become ours
        raise as_ours(doing, error) from None


def as_ours(doing: str, error: Exception) -> StoreError:
    """The error to raise instead of the client's."""
    message = str(error)
    if any(word in message for word in _NO_BUCKET):
        remedy = "create the bucket, or check its name, the endpoint and the region"
        return StoreError(doing, expected="a bucket", got="none of that name", remedy=remedy)
    if isinstance(error, FileNotFoundError):
        return NotFoundError(doing, expected="an object", got="none")
    found = (remedy for words, remedy in _REMEDIES if any(word in message for word in words))
    return StoreError(
        doing,
        expected="success",
        got=_reason(message),
        remedy=next(found, "try again; if it stays, look at the server"),
    )


def _reason(message: str) -> str:
    """The server's own code and words if it gave any, else the client's first lines, without users and queries."""
    status, answer = _STATUS.search(message), _ANSWER.search(message)
    if answer:
        text = f"{status[1].strip() + ' ' if status else ''}{answer[1]}: {answer[2] or ''}".rstrip(": ")
    else:
        text = message.split("Debug source")[0]
        if "TimedOut" in message:
            text += " (timed out)"
    return _QUERY.sub("", _USER.sub("://", " ".join(text.split())))[:CHARACTERS]
