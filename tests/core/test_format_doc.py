"""The numbers in docs/FORMAT.md are those of the code. ``python tests/core/test_format_doc.py`` writes them anew."""

import re
from pathlib import Path

import numpy as np
import pytest

from delta_sync import DTYPES, Limits, apply, decode_delta, tensor_key
from delta_sync.bitmap import to_ordinal
from delta_sync.digest import digest

ROOT = Path(__file__).parent.parent.parent
DOC = ROOT / "docs" / "FORMAT.md"
TINY = ROOT / "tests" / "vectors" / "delta" / "golden-1" / "tiny.safetensors"
OLD = np.array([0x3F80, 0x0000, 0xC000, 0x4040, 0x3F80, 0x3F80], np.uint16)
NEW = np.array([0x3F81, 0x8000, 0xC000, 0x4040, 0x4000, 0x3F80], np.uint16)


def rendered_digests() -> str:
    rows = ["| name | dtype | bits at positions 0, 1, … | key | digest |", "|---|---|---|---|---|"]
    cases = [("w", "BF16", OLD), ("w", "BF16", NEW), ("größe", "F32", np.array([1, 2**32 - 1], np.uint32))]
    cases += [("", "U8", np.array([255], np.uint8)), ("empty", "F16", np.empty(0, np.uint16))]
    for name, dtype, bits in cases:
        values = ", ".join(f"{int(b):0{2 * bits.itemsize}x}" for b in bits) or "none"
        key = tensor_key(name)
        rows.append(f"| `{name}` | {dtype} | {values} | `{key:016x}` | `{digest(bits, key):016x}` |")
    return "\n".join(rows)


def hex_lines(data: bytes, start: int) -> list[str]:
    lines = []
    for at in range(0, len(data), 16):
        part = data[at : at + 16]
        text = "".join(chr(b) if 32 <= b < 127 else "." for b in part)
        lines.append(f"{start + at:04x}  {part.hex(' '):<47}  {text}")
    return lines


def rendered_example() -> str:
    data = TINY.read_bytes()
    length = int.from_bytes(data[:8], "little")
    body = 8 + length
    before, after = (", ".join(f"{int(b):04x}" for b in bits) for bits in (OLD, NEW))
    lines = [
        f"`BF16` tensor `w` of shape [2, 3], before: {before};",
        f"after: {after}. Three elements changed: position 0 by +1 (1.0 to its",
        "neighbour), position 1 by -1 (+0 to -0), position 4 by +128 (1.0 to 2.0).",
        f"The whole object, {len(data)} bytes (`tests/vectors/delta/golden-1/tiny.safetensors`):",
        "",
        "```text",
        f"header length {length}:",
        *hex_lines(data[:8], 0),
        "header:",
        *hex_lines(data[8:body], 8),
    ]
    contents = {"gap": "gaps 0, 0, 2", "step": "sizes 0, 0, 127", "step_ext": "", "sign": "signs +, -, +"}
    for name, start, end in streams(data, body):
        frame, meaning = data[start:end], contents[name]
        what = "magic, descriptor, content size, raw block header (3 bytes), content: " + meaning
        lines += [f"stream 0.{name}: {what if frame else 'no content, no bytes'}", *hex_lines(frame, start)]
    return "\n".join([*lines, "```"])


def streams(data: bytes, body: int) -> list[tuple[str, int, int]]:
    pattern = r'"0\.(\w+)":\{"dtype":"U8","shape":\[\d+\],"data_offsets":\[(\d+),(\d+)\]\}'
    found = re.findall(pattern, data[8:body].decode())
    return [(name, body + int(start), body + int(end)) for name, start, end in found]


SECTIONS = {"digests": rendered_digests, "example": rendered_example}


def with_section(text: str, name: str, content: str) -> str:
    pattern = rf"(<!-- {name}: [^>]*-->\n).*?(<!-- end -->)"
    new, count = re.subn(pattern, lambda found: f"{found[1]}\n{content}\n\n{found[2]}", text, flags=re.S)
    assert count == 1, f"section {name} of {DOC}"
    return new


@pytest.mark.parametrize("name", SECTIONS)
def test_generated_sections_are_fresh(name):
    text = DOC.read_text()
    assert text == with_section(text, name, SECTIONS[name]()), "run: python tests/core/test_format_doc.py"


def test_the_example_means_what_it_says():
    header, (delta,) = decode_delta(TINY.read_bytes())
    assert (delta.name, delta.dtype.name, delta.shape, header.base_version) == ("w", "BF16", (2, 3), 1)
    assert delta.positions.tolist() == [0, 1, 4]
    assert delta.values.tolist() == [1, 0xFFFF, 128]
    bits = OLD.copy()
    apply(delta, bits)
    assert bits.tolist() == NEW.tolist()


def test_ordinals_in_the_text():
    text = DOC.read_text().replace("\n", " ")
    pairs = re.findall(r"0x([0-9A-F]{4}) \([^)]*\) -> 0x([0-9A-F]{4})", text)
    assert len(pairs) == 5
    for bits, ordinal in pairs:
        value = np.array([int(bits, 16)], np.uint16)
        assert int(to_ordinal(value, DTYPES["BF16"])[0]) == int(ordinal, 16)


def test_caps_and_dtypes_in_the_text():
    text, limits = DOC.read_text(), Limits()
    for dtype in DTYPES.values():
        row = next(line for line in text.splitlines() if line.startswith("| `") and f"`{dtype.name}`" in line)
        assert row.endswith(f"| {8 * dtype.itemsize} | {dtype.order} |")
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text, flags=re.M))
    assert rows["manifest or other JSON object"] == f"{limits.manifest_bytes >> 20} MiB"
    assert rows["safetensors header (parsing one may take 32 times its length)"] == f"{limits.header_bytes >> 20} MiB"
    assert rows["delta object"] == f"{limits.object_bytes >> 30} GiB"
    assert rows["decoded positions and values of an object, and any one stream"] == f"{limits.decoded_bytes >> 30} GiB"
    assert (limits.tensors, limits.objects, limits.chain) == (10**6, 10**5, 10**5)
    assert (limits.name_bytes, limits.rank, limits.elements) == (1024, 16, 2**44)


def write() -> None:
    text = DOC.read_text()
    for name, render in SECTIONS.items():
        text = with_section(text, name, render())
    DOC.write_text(text)


if __name__ == "__main__":
    write()
