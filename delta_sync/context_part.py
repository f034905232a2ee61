"""Reading the steps of some tiles alone: where they are follows from how many changes each tile has in each class."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from delta_sync.bitmap import Bits
from delta_sync.codec import Group
from delta_sync.context_model import class_table
from delta_sync.context_streams import Bytes, Words, gather
from delta_sync.context_table import Table
from delta_sync.errors import FormatError, MappingError
from delta_sync.frames import decompress
from delta_sync.steps import ESCAPE, decode_steps

Flags = npt.NDArray[np.bool_]


def part_of_steps(
    group: Group, table: Table, counts: Words, held: Flags, contexts: Bytes, streams: Mapping[str, memoryview]
) -> Bits:
    """ULP steps of the changes, whose ``contexts`` are known, in the tiles that are held.

    counts: changes of each tile and class of positions. MappingError unless classes of steps are made up of those.
    """
    what = f"{group.label} steps"
    if not set(table.step_firsts) <= set(table.firsts):
        raise MappingError(what, expected="classes of steps made up of classes of positions", got="others",
                           remedy="publish with tiles set to the server's tensor-parallel size")  # fmt: skip
    owner = class_table(table.step_firsts)[np.asarray(table.firsts)]
    contents, escapes = [], np.zeros(held.size, np.int64)
    for c, frame in enumerate(table.frames("step", streams)):
        content = np.frombuffer(decompress(frame, f"{group.label} stream step"), np.uint8)
        each = counts[:, owner == c].sum(axis=1).astype(np.int64)
        if content.size != each.sum():
            raise FormatError(f"{what} of class {c}", expected=f"{each.sum()} bytes", got=content.size)
        tile = np.repeat(np.arange(held.size), each)
        escapes += np.bincount(tile[content == ESCAPE], minlength=held.size)
        contents.append(content[held[tile]].tobytes())
    extension = np.frombuffer(decompress(streams["step_ext"], f"{group.label} stream step_ext"), group.dtype.carrier)
    if extension.size != escapes.sum():
        raise FormatError(what, expected=f"{escapes.sum()} step extensions", got=extension.size)
    signs = np.frombuffer(decompress(streams["sign"], f"{group.label} stream sign"), np.uint8)
    bits = np.unpackbits(signs, bitorder="little", count=group.changed)[np.repeat(held, _ints(counts.sum(axis=1)))]
    packed = np.packbits(bits, bitorder="little").tobytes()
    sizes = gather(contexts, contents, table.step_firsts)
    return decode_steps(sizes, extension[np.repeat(held, escapes)].tobytes(), packed, group.dtype, what)


def _ints(values: Words) -> npt.NDArray[np.int64]:
    return values.astype(np.int64)
