"""`proa serve demo` behind a relay that writes down what it answers, one file per connection, in the directory given.

recording_engine.py PORT DIRECTORY
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: Path | None) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            if record is not None:
                with record.open("ab") as file:
                    file.write(data)
            writer.write(data)
            await writer.drain()
    writer.close()


async def main(port: int, directory: Path) -> int:
    behind = free_port()
    numbers = itertools.count()
    command = [sys.executable, "-m", "proa.cli.main", "serve", "demo", "--port", str(behind)]
    engine = await asyncio.create_subprocess_exec(*command)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, engine.terminate)

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_engine = await asyncio.open_connection("127.0.0.1", behind)
        except ConnectionError:
            writer.close()
            return
        record = directory / f"{next(numbers)}.answer"
        await asyncio.gather(pump(reader, to_engine[1], None), pump(to_engine[0], writer, record))

    async with await asyncio.start_server(connection, "127.0.0.1", port):
        return await engine.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2]))))
