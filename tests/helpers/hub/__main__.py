"""``python -m helpers.hub [PORT]``, with tests/ on PYTHONPATH: a Hub to try things on."""

import contextlib
import sys

from helpers.hub.server import serve_forever

with contextlib.suppress(KeyboardInterrupt):
    serve_forever(int(sys.argv[1]) if len(sys.argv) > 1 else 8900)
