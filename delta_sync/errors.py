"""One error tree, grouped by what the handler does."""

from __future__ import annotations


class DeltaSyncError(Exception):
    """Base of every error raised here; its message names object, expected, got and remedy."""

    action = "fail"

    def __init__(self, what: str, *, expected: object = None, got: object = None, remedy: str = "") -> None:
        self.what, self.expected, self.got, self.remedy = what, expected, got, remedy
        parts = [what]
        if expected is not None:
            parts.append(f"expected {expected}")
        if got is not None:
            parts.append(f"got {got}")
        message = ", ".join(parts)
        super().__init__(f"{message}. Remedy: {remedy}" if remedy else message)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.expected, self.got, self.remedy))


def _rebuild(kind: type[DeltaSyncError], what: str, expected: object, got: object, remedy: str) -> DeltaSyncError:
    return kind(what, expected=expected, got=got, remedy=remedy)


class FormatError(DeltaSyncError):
    """The bytes are not what the format allows: reject them."""

    action = "reject"


class SignatureError(FormatError):
    """A record that none of the pinned keys signed: reject it, whatever else is right about it."""


class IntegrityError(DeltaSyncError):
    """Size, hash or digest differ from what the manifest promises: fetch again, then re-anchor."""

    action = "refetch"


class ChainError(DeltaSyncError):
    """No unbroken chain leads from the live version to the wanted one: take an anchor."""

    action = "re-anchor"


class ConflictError(DeltaSyncError):
    """Somebody else wrote what only one writer may write: a second publisher is active."""

    action = "stop"


class ResetError(ConflictError):
    """An operator had the chain forgotten: whoever has all the weights goes on with an origin in a new epoch."""

    action = "begin again"


class StoreError(DeltaSyncError):
    """The store did not do what was asked: try again later."""

    action = "retry"


class NotFoundError(StoreError):
    """The store has no object under this key."""


class MappingError(DeltaSyncError):
    """The model's layout is not one that deltas can be written into exactly: unsupported."""

    action = "unsupported"


class SyncTimeoutError(DeltaSyncError, TimeoutError):
    """A wait reached its deadline."""

    action = "retry"
