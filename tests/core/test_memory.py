"""Hostile files do not make a reader allocate: tried under an address-space limit, in a process of its own."""

import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from forge import delta_object, frame, framed, group, metadata, row

from delta_sync import FormatError, decode_delta

MiB = 1024**2
SCRIPT = """
import pathlib, resource, sys
from delta_sync import FormatError, decode_delta
decode_delta(pathlib.Path(sys.argv[1]).read_bytes())
pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
room = pages * resource.getpagesize() + 256 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (room, room))
for path in sys.argv[2:]:
    try:
        decode_delta(pathlib.Path(path).read_bytes())
    except FormatError as error:
        print("refused", error)
    else:
        print("read")
"""


def objects() -> dict[str, bytes]:
    """An honest one, then ones that promise gigabytes in a few bytes."""
    streams = {"0.gap": b"\0\1\2", "0.step": b"\0\0\1", "0.step_ext": b"", "0.sign": b"\2"}
    bomb = frame(bytes(1024 * MiB))
    window = b"\x28\xb5\x2f\xfd\x80\xa8\3\0\0\0\x19\0\0\0\0\1"  # 3 bytes of content in a window of 2 GiB
    promise = b"\x28\xb5\x2f\xfd\xe0" + (2**32).to_bytes(8, "little") + bytes(2**17)
    many = metadata(group(row(shape=(2**40,), count=2**32)))
    return {
        "honest": delta_object(streams=framed(streams)),
        "bomb": delta_object(streams=framed(streams, step=bomb)),
        "window": delta_object(streams=framed(streams, step=window)),
        "promise": delta_object(many, framed(streams, gap=promise, step=promise)),
        "count": delta_object(many, framed(streams)),
        "nesting": delta_object(metadata(groups="[" * MiB + "]" * MiB)),
    }


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_within_an_address_space_limit(tmp_path):
    paths = [tmp_path / name for name in objects()]
    for path, data in zip(paths, objects().values(), strict=True):
        path.write_bytes(data)
    command = [sys.executable, "-c", SCRIPT, *map(str, [paths[0], *paths])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = dict(zip(objects(), done.stdout.splitlines(), strict=True))
    assert said.pop("honest") == said.pop("window") == "read"
    assert all(line.startswith("refused") for line in said.values()), said


@pytest.mark.parametrize("unit", ["[],", "{},", '["w",[1],1],', '"",', "1.5,", "[[],[]],"])
def test_a_header_costs_a_small_multiple_of_its_length(unit):
    inner = (unit * (MiB // len(unit)))[:-1]
    data = delta_object(metadata(groups=f"[{inner}]"))
    tracemalloc.start()
    with pytest.raises(FormatError):
        decode_delta(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 * len(data)
