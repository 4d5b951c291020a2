"""A bare HTTP/1.1 client for tests: one request, one connection, nothing retried, nothing hidden."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Answer:
    """Status, headers in lower case, body."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """One kept-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, address: str) -> Client:
        parts = urlsplit(address)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port))

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> None:
        lines = [f"{method} {path} HTTP/1.1", "Host: test", f"Content-Length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    async def head(self) -> tuple[int, dict[str, str]]:
        raw = await self.reader.readuntil(b"\r\n\r\n")
        lines = raw.decode("latin-1").split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:] if line)}
        return int(lines[0].split(" ")[1]), headers

    async def answer(self, *, timeout: float = 10.0) -> Answer:
        async with asyncio.timeout(timeout):
            status, headers = await self.head()
            body = b""
            if "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            elif headers.get("transfer-encoding") == "chunked":
                while size := int((await self.reader.readline()).split(b";")[0], 16):
                    body += await self.reader.readexactly(size)
                    await self.reader.readexactly(2)
                await self.reader.readline()
            return Answer(status, headers, body)

    def close(self) -> None:
        self.writer.close()


async def fetch(
    address: str, method: str, path: str, body: bytes = b"", *, timeout: float = 10.0, **headers: str
) -> Answer:
    """One request on a connection of its own. Header names are written with underscores: ``X_Session_ID="a"``."""
    client = await Client.open(address)
    try:
        client.send(method, path, body, **headers)
        return await client.answer(timeout=timeout)
    finally:
        client.close()
