"""Held-out text of the demo model: facts, items and numbers that it was never trained on."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo_model"))

import evaluate  # type: ignore[import-not-found]


class Question(NamedTuple):
    prompt: list[int]
    answer: list[int]  # with its end mark


# What a document is made of behind its first part, which is facts and a question about one.
_TURNS = (
    "copy, 11-40 items",
    "sequence",
    "count, 4-20 numbers",
    "numbered list, 2-15 lines",
    "arithmetic",
    "n-th word of a list",
)


def documents(
    tokenizer: TokenizerWrapper, num_tokens: int, length: int, seed: int = 1
) -> list[list[int]]:
    """Conversations of about ``length`` tokens each, ``num_tokens`` together at least.

    The first half of each is facts that a question then asks for; copies, counts and sums follow.
    """
    encode = _encoder(tokenizer)
    rng = random.Random(f"held out:{seed}")
    table = evaluate.evaluations(lambda text: len(encode(text)))
    made: list[list[int]] = []
    while sum(map(len, made)) < num_tokens:
        prompt, answer = table[f"recall at {length // 2 // 256 * 256 or 128}, any fact"](rng)
        ids = _with_answer(encode, prompt, answer)
        while len(ids) < length:
            ids += _with_answer(encode, *table[rng.choice(_TURNS)](rng))
        made.append(ids)
    return made


def questions(tokenizer: TokenizerWrapper, name: str, number: int, seed: int = 1) -> list[Question]:
    """Prompts of one of the demo model's evaluations, such as ``"recall at 1000, any fact"``, and
    the only right answer to each.
    """
    encode = _encoder(tokenizer)
    draw = evaluate.evaluations(lambda text: len(encode(text)))[name]
    rng = random.Random(f"held out:{seed}:{name}")
    drawn = [draw(rng) for _ in range(number)]
    end = tokenizer.eos_token_id
    return [Question(encode(prompt), [*encode(answer), end]) for prompt, answer in drawn]


def _encoder(tokenizer: TokenizerWrapper) -> Callable[[str], list[int]]:
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


def _with_answer(encode: Callable[[str], list[int]], prompt: str, answer: str) -> list[int]:
    return encode(f"{prompt}{answer}{evaluate.conversations.IM_END}\n")
