"""Read JSON that may be hostile, write JSON that is canonical."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar, cast

from delta_sync.container import parse_json
from delta_sync.errors import FormatError

T = TypeVar("T")
FORMAT_VERSION = 1
HEX128 = re.compile(r"[0-9a-f]{128}")
HEX64 = re.compile(r"[0-9a-f]{64}")
HEX16 = re.compile(r"[0-9a-f]{16}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NUMBER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
NUMBERS = 64
MAX_EXACT = 2**53 - 1  # what every JSON reader holds exactly


def dumps(value: Mapping[str, object]) -> bytes:
    """Canonical JSON: sorted keys, no spaces, UTF-8, no NaN; FormatError if ``value`` has no such form."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8")
    except (ValueError, TypeError, RecursionError) as error:
        raise FormatError("JSON document", expected="plain JSON values in valid Unicode", got=clip(error)) from None


def loads(data: bytes, what: str, *, max_bytes: int) -> dict[str, object]:
    """Parse one JSON object of at most ``max_bytes`` bytes; FormatError on duplicate keys, NaN or anything else."""
    if len(data) > max_bytes:
        raise FormatError(f"size of {what}", expected=f"at most {max_bytes} bytes", got=len(data))
    value = parse_json(data, what)
    if not isinstance(value, dict):
        raise FormatError(what, expected="a JSON object", got=type(value).__name__)
    return value


def clip(value: object, length: int = 120) -> str:
    """Show a value in an error message without letting a hostile one fill the log."""
    text = value if isinstance(value, str) else repr(value) if not isinstance(value, Exception) else str(value)
    text = ascii(text)[1:-1] if not text.isprintable() else text
    return text if len(text) <= length else f"{text[:length]}... ({len(text)} characters)"


class Fields:
    """Typed access to one JSON object; every failure is a FormatError that names the field."""

    def __init__(self, value: object, what: str) -> None:
        self.what = what
        if not isinstance(value, dict):
            raise FormatError(what, expected="a JSON object", got=type(value).__name__)
        self.value: dict[str, object] = value

    def fail(self, name: str, expected: str, got: object, remedy: str = "") -> NoReturn:
        """Raise the FormatError for one field."""
        raise FormatError(f"{self.what}: field {clip(name)!r}", expected=expected, got=clip(got), remedy=remedy)

    def get(self, name: str) -> object:
        """The raw value of a field that must be present."""
        if name not in self.value:
            self.fail(name, "a value", "nothing")
        return self.value[name]

    def integer(self, name: str, low: int, high: int) -> int:
        """An integer in ``[low, high]``; booleans are not integers."""
        value = self.get(name)
        if type(value) is not int or not low <= value <= high:
            self.fail(name, f"an integer in [{low}, {high}]", value)
        return value

    def number(self, name: str) -> float:
        """A finite number that is not negative, written with a fraction or an exponent."""
        value = self.get(name)
        if type(value) is not float or not math.isfinite(value) or value < 0:
            self.fail(name, "a finite floating-point number, at least 0.0", value)
        return value

    def text(self, name: str, pattern: re.Pattern[str], expected: str) -> str:
        """A string that matches a pattern as a whole."""
        value = self.get(name)
        if type(value) is not str or not pattern.fullmatch(value):
            self.fail(name, expected, value)
        return value

    def sha256(self, name: str) -> str:
        """64 lower-case hexadecimal digits."""
        return self.text(name, HEX64, "64 lower-case hexadecimal digits")

    def name(self, name: str) -> str:
        """A run, writer or codec name: at most 64 of ``A-Z a-z 0-9 . _ -``, the first a letter or digit."""
        return self.text(name, NAME, "1 to 64 of A-Z a-z 0-9 . _ -, the first a letter or digit")

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        """One of a few strings."""
        value = self.get(name)
        if type(value) is not str or value not in allowed:
            self.fail(name, f"one of {list(allowed)}", value)
        return value

    def array(self, name: str, limit: int) -> list[object]:
        """A list of at most ``limit`` values."""
        value = self.get(name)
        if not isinstance(value, list) or len(value) > limit:
            got = f"{len(value)} values" if isinstance(value, list) else type(value).__name__
            self.fail(name, f"a list of at most {limit} values", got)
        return value

    def object(self, name: str, limit: int) -> dict[str, object]:
        """A JSON object of at most ``limit`` keys."""
        value = self.get(name)
        if not isinstance(value, dict) or len(value) > limit:
            got = f"{len(value)} keys" if isinstance(value, dict) else type(value).__name__
            self.fail(name, f"an object of at most {limit} keys", got)
        return value

    def numbers(self, name: str) -> dict[str, float]:
        """Named numbers: 1 to 64 of them, finite, integers of at most 2**53 - 1; {} where the field is absent."""
        if name not in self.value:
            return {}
        found = {}
        for key, value in self.object(name, NUMBERS).items():
            if not NUMBER_NAME.fullmatch(key):
                self.fail(name, "names of 1 to 128 of A-Z a-z 0-9 . _ - /, the first a letter or digit", key)
            if type(value) not in (int, float) or not abs(number := cast(float, value)) < math.inf:
                self.fail(name, f"a finite number for {clip(key)!r}", value)
            if type(value) is int and abs(value) > MAX_EXACT:
                self.fail(name, f"integers of at most {MAX_EXACT}", value)
            found[key] = number
        if not found:
            self.fail(name, "at least one number, or no such field", "none")
        return found

    def optional(self, name: str, read: Callable[[str], T]) -> T | None:
        """``None`` where the field is null, else what ``read`` makes of it."""
        return None if self.get(name) is None else read(name)

    def check_version(self) -> None:
        """FormatError unless ``format_version`` is one that this code reads."""
        value = self.get("format_version")
        if type(value) is not int or value != FORMAT_VERSION:
            remedy = "install the delta-weight-sync release that the other side uses"
            self.fail("format_version", str(FORMAT_VERSION), value, remedy)
