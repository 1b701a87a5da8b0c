"""A relay on the loopback that passes bytes on after a while, as a long line does."""

from __future__ import annotations

import asyncio
import threading
import time
from queue import Queue


def relayed(to: int, seconds: float) -> int:
    """A port of the loopback behind which another one is, so many seconds away there and back; in a thread."""
    ready: Queue[int] = Queue()
    threading.Thread(target=lambda: asyncio.run(_serve(to, seconds / 2, ready)), daemon=True).start()
    return ready.get()


async def _serve(to: int, seconds: float, ready: Queue[int]) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", to)
            await asyncio.gather(_late(reader, far_writer, seconds), _late(far_reader, writer, seconds))
        except OSError:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    ready.put(server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def _late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    """Pass on what comes, each piece so many seconds later, however many are on their way."""
    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def take() -> None:
        data = b"-"
        while data:
            data = await reader.read(1 << 20)
            pieces.put_nowait((time.monotonic() + seconds, data))

    taking = asyncio.create_task(take())
    while True:
        due, data = await pieces.get()
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        if not data:
            break
        writer.write(data)
        await writer.drain()
    writer.close()
    await taking
