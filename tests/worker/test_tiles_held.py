"""Which tiles a rank's regions hold, against a mask of their elements."""

import numpy as np
import pytest

from delta_sync.context_model import tiles
from vllm_delta_plugin.regions import holds, make_region

ROWS, COLUMNS = 8, 6
PARTS = {
    "first rows": ((4, COLUMNS), 0, (COLUMNS, 1)),
    "last rows": ((4, COLUMNS), 4 * COLUMNS, (COLUMNS, 1)),
    "right columns": ((ROWS, 3), 3, (COLUMNS, 1)),
    "rows that no part ends at": ((3, COLUMNS), COLUMNS, (COLUMNS, 1)),
    "transposed columns": ((3, ROWS), 0, (1, COLUMNS)),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("grid", [(2, 2), (4, 2), (8, 6), (1, 1)])
def test_a_tile_is_held_where_all_its_elements_are(name, grid):
    shape, offset, strides = PARTS[name]
    region = make_region("w", 0, shape, offset, strides, 0, (shape[1], 1))
    mine = {offset + i * strides[0] + j * strides[1] for i in range(shape[0]) for j in range(shape[1])}
    for tile in tiles((ROWS, COLUMNS), grid):
        places = [tile.start + row * tile.stride + np.arange(tile.length) for row in range(tile.rows)]
        assert holds(region, COLUMNS, tile) == (set(np.concatenate(places).tolist()) <= mine)
