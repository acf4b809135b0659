"""Delay all that a container's processes say to others, and what they are answered: `delay.py SECONDS`.

For kernels without `tc netem`. Runs as root in the container's network: connections of everybody else that leave it
are led here, and on to where they were meant for. Ends at SIGTERM, and those connections with it.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import struct
import subprocess
import sys

PORT = 15001
_ORIGINAL_DST = 80
_LEAD_HERE = (
    *("OUTPUT", "-t", "nat", "-p", "tcp", "!", "-d", "127.0.0.0/8", "-m", "owner", "!", "--uid-owner", "0"),
    *("-j", "REDIRECT", "--to-ports", str(PORT)),
)


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    """Each piece so late, in order; the end too."""
    loop = asyncio.get_running_loop()
    late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def write() -> None:
        while True:
            due, data = await late.get()
            await asyncio.sleep(due - loop.time())
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(write())
        while data := await reader.read(65536):
            late.put_nowait((loop.time() + seconds, data))
        late.put_nowait((loop.time() + seconds, b""))


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    """One connection, to its end."""
    meant = writer.get_extra_info("socket").getsockopt(socket.SOL_IP, _ORIGINAL_DST, 16)
    port, address = struct.unpack("!2xH4s8x", meant)
    try:
        there, back = await asyncio.open_connection(socket.inet_ntoa(address), port)
    except OSError:
        writer.transport.abort()  # refused there: reset here
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pass_on(reader, back, seconds))
            tasks.create_task(pass_on(there, writer, seconds))
    except* OSError:
        pass
    finally:
        writer.transport.abort()
        back.transport.abort()


async def serve_until_asked(listener: socket.socket, seconds: float) -> None:
    """Until SIGTERM."""
    server = await asyncio.start_server(lambda *pair: serve(*pair, seconds), sock=listener)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await ended.wait()
    server.close()


def main() -> None:
    """Lead them here as long as this runs."""
    listener = socket.create_server(("", PORT))
    subprocess.run(["iptables", "-A", *_LEAD_HERE], check=True)
    try:
        asyncio.run(serve_until_asked(listener, float(sys.argv[1])))
    finally:
        subprocess.run(["iptables", "-D", *_LEAD_HERE], check=True)


if __name__ == "__main__":
    main()
