"""On the bundled demo model: basic, paged and mlx-lm's own generate give the same tokens, alone and
in a batch.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import pytest
from helpers.fast_lane import mostly_slow
from mlx_lm.generate import generate_step as mlx_lm_generate_step
from mlx_lm.utils import load_model

from mlx_paged import LLM, SamplingParams, demo_model_path, load, make_kv_cache
from mlx_paged.cache import Sequences
from mlx_paged.generation import generate_step
from mlx_paged.models.run_step import run_step

MAX_TOKENS = 120
LENGTHS = (1, 15, 16, 17, 500)


@cache
def demo():
    return load(demo_model_path())


@cache
def prompt(num_tokens: int) -> tuple[int, ...]:
    """A real conversation, cut to a length: the last tokens of many facts and a task with a long
    answer.
    """
    _, tokenizer = demo()
    facts = " ".join(
        f"The code of {word} is {n * 37 % 10000}."
        for n, word in enumerate(["apple", "stone", "river"] * 40)
    )
    messages = [{"role": "user", "content": f"{facts} Count from 5 to 150."}]
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert len(tokens) >= num_tokens
    return tuple(tokens[-num_tokens:])


@cache
def expected(num_tokens: int) -> tuple[int, ...]:
    """mlx-lm's own greedy tokens; it goes on past an end of turn, and so do we."""
    theirs, _ = load_model(demo_model_path())
    steps = mlx_lm_generate_step(mx.array(prompt(num_tokens)), theirs, max_tokens=MAX_TOKENS)
    return tuple(int(token) for token, _ in steps)


@mostly_slow("num_tokens", LENGTHS, quick=(0, 2))
@pytest.mark.parametrize("kind", ["basic", "paged"])
def test_greedy_tokens_are_those_of_mlx_lm(kind: str, num_tokens: int):
    model, _ = demo()
    got = tuple(
        token
        for token, _ in generate_step(prompt(num_tokens), model, max_tokens=MAX_TOKENS, kv=kind)
    )
    assert len(got) == MAX_TOKENS
    assert got == expected(num_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_greedy_tokens_do_not_depend_on_the_block_size(block_size: int):
    model, _ = demo()
    got = generate_step(prompt(500), model, max_tokens=MAX_TOKENS, block_size=block_size)
    assert tuple(token for token, _ in got) == expected(500)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["basic", "paged"])
def test_a_batch_of_different_lengths_gives_the_tokens_of_each_alone(kind: str):
    model, _ = demo()
    seqs = Sequences(make_kv_cache(model, kind, kv_cache_bytes="200blocks"))
    batch = {n: list(prompt(n)) for n in LENGTHS}
    got: dict[int, list[int]] = {n: [] for n in LENGTHS}
    for _ in range(MAX_TOKENS):
        sampled = mx.argmax(run_step(model, seqs, batch), axis=-1).tolist()
        for n, token in zip(LENGTHS, sampled, strict=True):
            got[n].append(token)
        batch = {n: [got[n][-1]] for n in LENGTHS}
    assert {n: tuple(tokens) for n, tokens in got.items()} == {n: expected(n) for n in LENGTHS}


@pytest.mark.parametrize("kind", ["basic", "paged"])
def test_reused_turns_give_the_tokens_of_a_fresh_cache(kind: str):
    model, tokenizer = demo()
    llm = LLM(model, tokenizer, kv=kind, kv_cache_bytes="200blocks")
    params = SamplingParams(max_tokens=24)
    messages: list[dict[str, str]] = []
    for number, text in enumerate(
        (
            "My name is Tom.",
            "The code of apple is 4821.",
            "What is my name?",
            "What is the code of apple?",
        )
    ):
        messages.append({"role": "user", "content": text})
        (warm,) = llm.chat(messages, params)
        (cold,) = LLM(model, tokenizer, kv_cache_bytes="200blocks").chat(messages, params)
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
        assert (warm.num_cached_tokens > 0) == (number > 0)
        messages.append({"role": "assistant", "content": warm.outputs[0].text})
