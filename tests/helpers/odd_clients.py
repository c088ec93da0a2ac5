"""Clients that come, stall, vanish and cancel, on plain sockets; hundreds at once."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias
from urllib.parse import urlsplit

Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter
SECONDS = 120.0  # after which an answer counts as one that never came


async def run_clients(url: str, number: int, at_once: int, seed: int) -> Counter[str]:
    """How each of so many clients ended; what each does is drawn."""
    draws = random.Random(seed)
    plans = [(draws.choice(KINDS), random.Random(f"{seed}:{index}")) for index in range(number)]
    ends: Counter[str] = Counter()
    slots = asyncio.Semaphore(at_once)
    host, port = urlsplit(url).hostname, urlsplit(url).port

    async def one(kind: Kind, rng: random.Random) -> None:
        async with slots:
            reader, writer = await asyncio.open_connection(host, port)
            try:
                ends[await asyncio.wait_for(kind(reader, writer, rng), SECONDS)] += 1
            except (ConnectionError, asyncio.IncompleteReadError):
                ends[f"{kind.__name__}: cut off"] += 1
            finally:
                writer.close()

    await asyncio.gather(*(one(kind, rng) for kind, rng in plans))
    return ends


def request_bytes(rng: random.Random, **fields: Any) -> bytes:
    path = rng.choice(["/v1/chat/completions", "/v1/completions", "/v1/messages"])
    text = "Here are the tools of everybody. " * 8 + f"Count from {rng.randint(1, 30)} to 60."
    body: dict[str, Any] = {"model": "demo", "max_tokens": rng.randint(1, 60), **fields}
    if path == "/v1/completions":
        body["prompt"] = text
    else:
        body["messages"] = [{"role": "user", "content": text}]
    if path != "/v1/messages" and rng.random() < 0.3:
        body["n"] = 2
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


async def reads_a_stream(reader: Reader, writer: Writer, rng: random.Random) -> str:
    writer.write(request_bytes(rng, stream=True))
    answer = await reader.read()
    is_whole = b"[DONE]" in answer or b"message_stop" in answer
    return f"stream: {status_of(answer)}, {'whole' if is_whole else 'cut off'}"


async def reads_an_answer(reader: Reader, writer: Writer, rng: random.Random) -> str:
    writer.write(request_bytes(rng))
    return f"answer: {status_of(await reader.read())}"


async def vanishes(reader: Reader, writer: Writer, rng: random.Random) -> str:
    writer.write(request_bytes(rng, stream=rng.random() < 0.5))
    await writer.drain()
    await asyncio.sleep(rng.choice([0, 0.01, 0.1]))
    # A reset, as when a laptop is closed, rather than a polite end.
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    return "vanished"


async def cancels(reader: Reader, writer: Writer, rng: random.Random) -> str:
    writer.write(request_bytes(rng, stream=True, max_tokens=200))
    for _ in range(rng.randint(1, 12)):
        if not await reader.readline():
            break
    return "cancelled"


async def stalls(reader: Reader, writer: Writer, rng: random.Random) -> str:
    writer.write(request_bytes(rng, stream=True, max_tokens=200))
    await asyncio.sleep(rng.uniform(0.5, 2))
    return "stalled"


async def half_a_head(reader: Reader, writer: Writer, rng: random.Random) -> str:
    whole = request_bytes(rng)
    writer.write(whole[: rng.randint(0, whole.index(b"\r\n\r\n"))])
    await asyncio.sleep(rng.uniform(0, 0.3))
    return "half a head"


async def half_a_body(reader: Reader, writer: Writer, rng: random.Random) -> str:
    whole = request_bytes(rng)
    writer.write(whole[: rng.randint(whole.index(b"\r\n\r\n") + 4, len(whole) - 1)])
    await asyncio.sleep(rng.uniform(0, 0.3))
    return "half a body"


async def asks_nonsense(reader: Reader, writer: Writer, rng: random.Random) -> str:
    writer.write(request_bytes(rng, temperature="hot"))
    return f"nonsense: {status_of(await reader.read())}"


def status_of(answer: bytes) -> str:
    return answer[9:12].decode() or "nothing"


Kind: TypeAlias = Callable[[Reader, Writer, random.Random], Awaitable[str]]
KINDS: tuple[Kind, ...] = (
    reads_a_stream, reads_a_stream, reads_an_answer, vanishes, cancels, stalls, half_a_head,
    half_a_body, asks_nonsense,
)  # fmt: skip
