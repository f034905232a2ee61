"""A TCP proxy that is a slow, distant link: shared bandwidth each way, and a delay.

Usage: python benchmarks/shaped_link.py --to 127.0.0.1:5000 --mbit 1000 --rtt-ms 50

Prints its port and serves until its standard input ends. What TCP itself does on such a link is left out: slow start
and loss, which favours whoever sends much at once, and the handshake, as the tests' S3 server ends every connection
after one answer, where real ones are kept. Python moves a few hundred megabytes a second at most: faster links are
bound by this process, as ``rate`` in the end-to-end table shows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

CHUNK = 1 << 17
_AHEAD = 0.25  # seconds of traffic that the link holds


class Line:
    """One direction, shared by all connections."""

    def __init__(self, bytes_a_second: float, delay: float) -> None:
        self._rate, self._delay, self._free = bytes_a_second, delay, 0.0

    async def send(self, size: int) -> float:
        """When ``size`` bytes that are sent now arrive; returns once there is room for more."""
        now = time.monotonic()
        self._free = max(self._free, now) + size / self._rate
        if self._free - now > _AHEAD:
            await asyncio.sleep(self._free - now - _AHEAD)
        return self._free + self._delay


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: Line) -> None:
    """Carry one connection's bytes one way until its end."""
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            at, data = await queue.get()
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            if not data:
                with contextlib.suppress(OSError):
                    writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    delivering = asyncio.create_task(deliver())
    with contextlib.suppress(OSError):
        while True:
            data = await reader.read(CHUNK)
            await queue.put((await line.send(len(data)), data))
            if not data:
                break
        await delivering
    delivering.cancel()


async def serve(host: str, port: int, mbit: float, rtt: float) -> None:
    """Forward connections until standard input ends."""
    up, down = (Line(mbit * 125_000, rtt / 2) for _ in range(2))

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, port)
        try:
            await asyncio.gather(pump(reader, back, up), pump(there, writer, down))
        finally:
            for end in (writer, back):
                end.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=CHUNK)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@contextlib.contextmanager
def link(to: str, mbit: float, rtt_ms: float) -> Iterator[str]:
    """``host:port`` of a link to ``to``, in a process of its own."""
    command = [sys.executable, str(Path(__file__)), "--to", to, "--mbit", str(mbit), "--rtt-ms", str(rtt_ms)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        if process.stdout is None or process.stdin is None:
            raise RuntimeError("pipes that were asked for are missing")
        try:
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()
            process.kill()


def main() -> None:
    """One link."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--to", required=True)
    parser.add_argument("--mbit", type=float, required=True)
    parser.add_argument("--rtt-ms", type=float, default=50.0)
    args = parser.parse_args()
    host, port = args.to.rsplit(":", 1)
    asyncio.run(serve(host, int(port), args.mbit, args.rtt_ms / 1e3))


if __name__ == "__main__":
    main()
