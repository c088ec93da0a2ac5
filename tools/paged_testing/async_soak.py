"""Thousands of small requests of every kind through an ``AsyncEngine``, and what they leave in
memory.

What MLX counts comes back to where it was, and so do Python's objects. What native code holds shows
in the C library's own figures: blocks that are in use have leaked, those that are free are kept.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_paged.engine.async_engine import AsyncEngine
from mlx_paged.options.sampling_declarations import StructuredOutputsParams
from mlx_paged.options.sampling_params import RequestOutputKind, SamplingParams

WORDS = [
    *("the", "a", "story", "dog", "cat", "blue", "sun"),
    *("once", "upon", "time", "code", "apple", "pear", "is"),
]
NUM_IN_FLIGHT = 32

# What a request asks for, by a generator of random numbers.
KINDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "token ids": lambda rng: {"detokenize": False},
    "greedy": lambda rng: {},
    "seeded": lambda rng: {"temperature": 1.0, "seed": rng.randrange(2**40)},
    "filters": lambda rng: {
        "temperature": 0.8,
        **rng.choice([{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"xtc_probability": 0.5}]),
    },
    "penalties": lambda rng: {"repetition_penalty": 1.2, "presence_penalty": 0.5},
    "logprobs": lambda rng: {"logprobs": 2, "prompt_logprobs": 1},
    "completions": lambda rng: {"n": 3, "temperature": 1.0},
    "stop texts": lambda rng: {"stop": [rng.choice(WORDS), " and"]},
    "bad words": lambda rng: {"bad_words": rng.sample(WORDS, 2)},
    "bias": lambda rng: {"logit_bias": {rng.randrange(100): 2.0}},
    "grammar": lambda rng: {
        "structured_outputs": StructuredOutputsParams(choice=rng.sample(WORDS, 2))
    },
    "deltas": lambda rng: {"output_kind": RequestOutputKind.DELTA},
    "processor": lambda rng: {"logits_processors": [lambda tokens, logits: logits]},
    "aborted": lambda rng: {"max_tokens": 50},
}


@dataclass(frozen=True)
class MemoryInUse:
    """Bytes of this process, but for the number of objects.

    Attributes:
        resident: as the system counts them.
        malloc: in blocks of the C library that are in use.
        malloc_free: in blocks that it keeps.
        mlx: active, in MLX's arrays.
        num_objects: that Python's garbage collector knows.
    """

    resident: int
    malloc: int
    malloc_free: int
    mlx: int
    num_objects: int


class _MallInfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def memory_in_use() -> MemoryInUse:
    """On Linux with glibc; elsewhere what only these know is 0."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    resident = next((int(line.split()[1]) for line in lines if line.startswith("VmRSS")), 0)
    info = _MallInfo2()
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is not None:
        mallinfo2.restype = _MallInfo2
        info = mallinfo2()
    return MemoryInUse(
        resident * 1024,
        info.uordblks + info.hblkhd,
        info.fordblks,
        mx.get_active_memory(),
        len(gc.get_objects()),
    )


async def run_requests(
    engine: AsyncEngine, first: int, num_requests: int, kinds: tuple[str, ...] = tuple(KINDS)
) -> None:
    """Run the requests with these numbers, some at a time. What one asks for depends on its number
    alone.
    """
    numbers = iter(range(first, first + num_requests))

    async def client() -> None:
        for number in numbers:
            await _run_request(engine, number, kinds)

    await asyncio.gather(*(client() for _ in range(NUM_IN_FLIGHT)))


async def _run_request(engine: AsyncEngine, number: int, kinds: tuple[str, ...]) -> None:
    rng = random.Random(number)
    kind = rng.choice(kinds)
    params = SamplingParams(**({"max_tokens": rng.randint(1, 4)} | KINDS[kind](rng)))
    words = rng.choices(WORDS, k=rng.randint(2, 30))
    prompt: Any = " ".join(words)
    if kind == "token ids":
        prompt = [WORDS.index(word) + 10 for word in words]
    salt = rng.choice([None, None, None, "salt"])
    stream = engine.generate(prompt, params, cache_salt=salt, priority=rng.choice([0, 0, 1]))
    async for _ in stream:
        if kind == "aborted":
            break
    await stream.aclose()
