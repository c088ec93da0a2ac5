"""Agent sessions against an OpenAI-compatible server: the client of ``serve.py``, in a process of
its own. Prints one JSON line.

    python -m benchmarks serve_client --url http://127.0.0.1:8000 --sessions 4

Each session is a conversation of some turns. All sessions begin with the same long system prompt,
as agents with the same tools do, or each with its own (``--own-prefix``); each turn sends the whole
history and adds a little. Sessions run at once, the turns of one follow one another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = [
    "read", "write", "list", "search", "open", "close", "move", "copy", "test", "build", "run",
    "fix", "plan", "check", "note", "file",
]  # fmt: skip


@dataclass
class Turn:
    """What one request took, in seconds from its start."""

    session: int
    number: int
    first_token: float | None = None
    end: float = 0.0
    num_pieces: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    text: str = ""
    error: str | None = None


@dataclass
class Session:
    """A conversation, and what its turns took."""

    number: int
    messages: list[dict[str, str]]
    turns: list[Turn] = field(default_factory=list)


def system_prompt(num_words: int, seed: int = 0) -> str:
    """Made-up tools."""
    draws = random.Random(seed)
    return "Tools: " + " ".join(
        f"{draws.choice(WORDS)}{draws.randint(10, 99)}" for _ in range(num_words)
    )


def addition(session: int, turn: int, num_words: int) -> str:
    """What the user says in a turn: another text in every session and turn."""
    draws = random.Random(f"{session}:{turn}")
    return " ".join(f"{draws.choice(WORDS)} {draws.randint(100, 999)}" for _ in range(num_words))


async def ask(client: httpx.AsyncClient, session: Session, body: dict[str, Any]) -> Turn:
    """Stream one answer."""
    turn = Turn(session.number, len(session.turns))
    start = time.perf_counter()
    request = {
        **body,
        "messages": session.messages,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with client.stream("POST", "/v1/chat/completions", json=request) as response:
            if response.status_code != 200:
                turn.error = f"{response.status_code} {(await response.aread())[:200]!r}"
                return turn
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    read_chunk(json.loads(line[6:]), turn, start)
    except httpx.HTTPError as error:
        turn.error = f"{type(error).__name__}: {error}"
    turn.end = time.perf_counter() - start
    if turn.error is None and turn.first_token is None:
        turn.error = "no answer"
    return turn


def read_chunk(chunk: dict[str, Any], turn: Turn, start: float) -> None:
    if "error" in chunk:
        turn.error = str(chunk["error"])[:200]
    for choice in chunk.get("choices") or ():
        piece = choice.get("delta", {}).get("content")
        if piece:
            turn.first_token = turn.first_token or time.perf_counter() - start
            turn.text += piece
            turn.num_pieces += 1
    usage = chunk.get("usage")
    if usage:
        turn.prompt_tokens = usage["prompt_tokens"]
        turn.answer_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        turn.cached_tokens = details.get("cached_tokens") or 0


async def run(args: argparse.Namespace) -> dict[str, Any]:
    prompts = [
        system_prompt(args.prefix_words, number if args.own_prefix else 0)
        for number in range(args.sessions)
    ]
    sessions = [
        Session(number, [{"role": "system", "content": prompt}])
        for number, prompt in enumerate(prompts)
    ]
    # The end of sequence is banned, so that answers have one length whoever serves.
    body = {
        "model": args.served_model,
        "max_tokens": args.max_tokens,
        "temperature": 0,
        "logit_bias": {str(token): -100 for token in args.banned},
    }
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=args.url, timeout=args.timeout, limits=limits) as client:
        start = time.perf_counter()
        await asyncio.gather(*(converse(client, session, body, args) for session in sessions))
        seconds = time.perf_counter() - start
    turns = [turn for session in sessions for turn in session.turns]
    return {"seconds": seconds, "turns": [vars(turn) for turn in turns]}


async def converse(
    client: httpx.AsyncClient, session: Session, body: dict[str, Any], args: argparse.Namespace
) -> None:
    for number in range(args.turns):
        text = addition(session.number, number, args.turn_words)
        session.messages.append({"role": "user", "content": text})
        turn = await ask(client, session, body)
        session.turns.append(turn)
        session.messages.append({"role": "assistant", "content": turn.text})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--served-model", default="default_model")
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--prefix-words", type=int, default=550)
    parser.add_argument("--own-prefix", action="store_true", help="another one in each session")
    parser.add_argument("--turn-words", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--banned", type=int, nargs="*", default=[])
    parser.add_argument("--timeout", type=float, default=300)
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
