"""What a user of the server feels of another one who asks for too much.

    python -m benchmarks neighbours                              # all of it, some five minutes
    python -m benchmarks neighbours --only texts grammars --seconds 20

User 2 asks for a chat of 3 tokens, again and again, and the time to the first token is taken: alone
first, and then while user 1, a process of its own with another key, sends requests that cost much
and can't be answered, as fast as the server refuses them, for ``--seconds``:

- ``texts``: 8 bodies at once, each a chat of 2 MiB of one letter.
- ``completions``: the same as prompts of ``/v1/completions``, 64 in a body.
- ``counting``: the same for ``/tokenize``.
- ``bad words``: 1,000 of 500 characters.
- ``messages``: 10,000 in a chat, 4 chats at once; and ``more messages``: as many as fit a body.
- ``grammars``: 10 at once, none of them seen before, whose compilation takes seconds; user 2 asks
  for short ones, which were not seen before either.
- ``the same grammar``: one of those, again and again.
- ``slow bodies``: as many large bodies as the server reads at a time, which never end.

Reported are the median and the worst of the times to the first token, in ms, what each is of the
median alone, how often user 2 was refused, and the memory of the server before, at its highest, and
5 seconds after (``--seconds`` if that is less). Each scenario has a fresh server.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from benchmarks.lib.card import (
    COMMAND,
    machine_card,
    make_arg_parser,
    print_card,
    print_json,
    print_table,
)
from benchmarks.serving.serve import served
from mlx_paged import demo_model_path

MIB = 2**20
KEYS = {1: "the-first-users-secret", 2: "the-second-users-secret"}
CHAT = "/v1/chat/completions"
LONG = "a" * 2 * MIB


def chat(**fields: Any) -> bytes:
    messages = [{"role": "user", "content": "Hello"}]
    return json.dumps({"messages": messages, "max_tokens": 3, **fields}).encode()


def grammar_that_takes_long(number: int) -> bytes:
    return chat(guided_json={"multipleOf": 1_000_003 + 2 * number})


def messages(count: int) -> bytes:
    return chat(messages=[{"role": "user", "content": "a"}] * count)


# Of each scenario: requests at once, the path, and the bodies that each sends in turn.
Bodies = Callable[[int], Iterator[bytes]]
SCENARIOS: dict[str, tuple[int, str, Bodies]] = {
    "texts": (8, CHAT, lambda _: itertools.repeat(chat(messages=[user(LONG)]))),
    "completions": (
        8,
        "/v1/completions",
        lambda _: itertools.repeat(json.dumps({"prompt": [LONG[:32768]] * 64}).encode()),
    ),
    "counting": (8, "/tokenize", lambda _: itertools.repeat(json.dumps({"prompt": LONG}).encode())),
    "bad words": (
        2,
        CHAT,
        lambda _: itertools.repeat(chat(bad_words=[f"{n}{'a' * 496}" for n in range(1000)])),
    ),
    "messages": (4, CHAT, lambda _: itertools.repeat(messages(10_000))),
    "more messages": (4, CHAT, lambda _: itertools.repeat(messages(430_000))),
    "grammars": (10, CHAT, lambda n: map(grammar_that_takes_long, itertools.count(n, 10))),
    "the same grammar": (10, CHAT, lambda _: itertools.repeat(grammar_that_takes_long(0))),
}
SLOW = "slow bodies"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def headers(number: int) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[number]}", "Content-Type": "application/json"}


# User 1, in a process of its own


def attack(name: str, url: str, seconds: float) -> None:
    """Send the requests of a scenario; prints a line when they are on their way."""
    end = time.monotonic() + seconds
    if name == SLOW:
        held = [slow_body(url) for _ in range(8)]
        print("begun", flush=True)
        time.sleep(seconds)
        for each in held:
            each.close()
        return
    count, path, bodies = SCENARIOS[name]
    made = [bodies(number) for number in range(count)]
    firsts = [next(each) for each in made]  # before the time counts
    threads = [
        threading.Thread(target=keep_sending, args=(url, path, itertools.chain([first], each), end))
        for first, each in zip(firsts, made, strict=True)
    ]
    for thread in threads:
        thread.start()
    print("begun", flush=True)
    for thread in threads:
        thread.join()


def keep_sending(url: str, path: str, bodies: Iterator[bytes], end: float) -> None:
    address = urlsplit(url)
    for body in bodies:
        connection = HTTPConnection(str(address.hostname), address.port, timeout=300)
        try:
            connection.request("POST", path, body, headers(1))
            connection.getresponse().read()
        except (OSError, HTTPException):
            time.sleep(0.05)
        finally:
            connection.close()
        if time.monotonic() > end:
            return


def slow_body(url: str) -> socket.socket:
    """A request whose body of the largest size is there, but for its end."""
    address = urlsplit(url)
    size = 16 * MIB
    connection = socket.create_connection((address.hostname, address.port))
    head = "".join(f"{name}: {value}\r\n" for name, value in headers(1).items())
    start = f"POST {CHAT} HTTP/1.1\r\nHost: {address.netloc}\r\n{head}"
    with contextlib.suppress(OSError):  # It may be refused before it is whole.
        connection.sendall(f"{start}Content-Length: {size}\r\n\r\n".encode() + b" " * (size - 1))
    return connection


# User 2


def first_token(url: str, number: int, has_grammar: bool) -> float | None:
    """Seconds to the first token of a chat of 3 tokens; ``None`` where it is refused."""
    address = urlsplit(url)
    text = f"Say something about the number {number}."
    # A time stands for a grammar that was not seen before.
    how: dict[str, Any] = {"ignore_eos": True}
    if has_grammar:
        how = {"guided_regex": f"[a-z ]{{20}}{time.time_ns()}"}
    body = json.dumps({"messages": [user(text)], "max_tokens": 3, "stream": True, **how})
    connection = HTTPConnection(str(address.hostname), address.port, timeout=300)
    start = time.perf_counter()
    try:
        connection.request("POST", CHAT, body, headers(2))
        response = connection.getresponse()
        if response.status != 200:
            return None
        response.readline()
        return time.perf_counter() - start
    finally:
        connection.close()


def probes(
    url: str, goes_on: Callable[[int], bool], pause: float, has_grammar: bool
) -> list[float | None]:
    times: list[float | None] = []
    while goes_on(len(times)):
        times.append(first_token(url, len(times), has_grammar))
        time.sleep(pause)
    return times


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """What user 2 feels of a scenario."""
    keys = [flag for number, key in KEYS.items() for flag in ("--api-key", f"user{number} {key}")]
    has_grammar = "grammar" in name
    with served("mlx_paged", demo_model_path(), keys) as (url, watch):
        probes(url, lambda n: n < 5, 0, has_grammar)  # to warm up
        times = probes(url, lambda n: n < args.alone, args.pause, has_grammar)
        alone = [each for each in times if each is not None]
        before = watch.highest = watch.look()
        command = [*COMMAND, "neighbours", "--attack", name, url, str(args.seconds)]
        attacker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert attacker.stdout is not None
            attacker.stdout.readline()
            end = time.monotonic() + args.seconds
            goes_on = lambda n: n == 0 or time.monotonic() < end  # noqa: E731
            beside = probes(url, goes_on, args.pause, has_grammar)
        finally:
            attacker.kill()
            attacker.wait()
        time.sleep(min(5, args.seconds))
        memory = {"before": before, "highest": watch.highest, "after": watch.look()}
    good = [each for each in beside if each is not None]
    median = statistics.median(alone)
    return {
        "scenario": name,
        "alone_ms": {"median": median * 1e3, "worst": max(alone) * 1e3},
        "beside_ms": {
            "median": statistics.median(good) * 1e3 if good else None,
            "worst": max(good) * 1e3 if good else None,
        },
        "ratio_median": statistics.median(good) / median if good else None,
        "ratio_worst": max(good) / median if good else None,
        "num_probes": len(beside),
        "num_refused": len(beside) - len(good),
        "memory_mib": memory,
    }


def print_results(results: list[dict[str, Any]]) -> None:
    header = [
        "user 1 sends", "alone: median, worst ms", "beside: median, worst ms", "ratio", "of worst",
        "asked", "refused", "MiB before, highest, after",
    ]  # fmt: skip
    rows = []
    for result in results:
        alone, beside = result["alone_ms"], result["beside_ms"]
        ratios = (result["ratio_median"], result["ratio_worst"])
        rows.append(
            [
                result["scenario"],
                f"{alone['median']:.0f}, {alone['worst']:.0f}",
                ", ".join(shown(beside[name], ".0f") for name in ("median", "worst")),
                *(shown(ratio, ".1f") for ratio in ratios),
                result["num_probes"],
                result["num_refused"],
                ", ".join(f"{each:,.0f}" for each in result["memory_mib"].values()),
            ]
        )
    print_table(header, rows)


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    names = [*SCENARIOS, SLOW]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=10, help="of each scenario")
    parser.add_argument("--alone", type=int, default=40, help="chats of user 2 alone")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two chats")
    parser.add_argument("--attack", nargs=3, metavar=("NAME", "URL", "SECONDS"), help="user 1")
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    if args.attack:
        name, url, seconds = args.attack
        attack(name, url, float(seconds))
        return
    setting = machine_card() | {"model": "demo", "seconds": args.seconds, "pause": args.pause}
    print_card("Neighbours", setting)
    results = []
    for name in args.only:
        results.append(measure(name, args))
        print(f"{name}: {json.dumps(results[-1])}", file=sys.stderr, flush=True)
    print_results(results)
    print_json("neighbours", setting, results, args.out)


if __name__ == "__main__":
    main()
