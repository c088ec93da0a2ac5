"""The whole model on the Metal kernels: text of the bundled model, token for token that of the
plain-MLX operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import mlx.core as mx
import pytest
from helpers.write_rules import slots_of_the_step
from metal_emulator import Checks
from paged_testing.emulated_metal import emulated_metal

from mlx_paged import load, make_kv_cache
from mlx_paged.cache import Sequences
from mlx_paged.loading import demo_model_path
from mlx_paged.models.run_step import run_step

NUM_TOKENS = 64


@pytest.fixture(scope="module")
def demo():
    return load(demo_model_path())


def greedy_in_a_ragged_batch(
    model, prompts: Sequence[Sequence[int]], backend: str, num_tokens: int = NUM_TOKENS
) -> tuple[list[list[int]], Sequences]:
    """Greedy ids of each prompt; the prompts come in one after the other, so that decodes run
    beside prefills.
    """
    cache = make_kv_cache(model, "paged", kv_cache_bytes="400blocks", backend=backend)
    seqs = Sequences(cache)
    ids: list[list[int]] = [[] for _ in prompts]
    waiting = list(enumerate(prompts))
    while waiting or any(len(got) < num_tokens for got in ids):
        batch = {seq: [got[-1]] for seq, got in enumerate(ids) if 0 < len(got) < num_tokens}
        if waiting:
            seq, prompt = waiting.pop(0)
            batch[seq] = prompt
        tokens = mx.argmax(run_step(model, seqs, batch), axis=-1).tolist()
        for seq, token in zip(batch, tokens, strict=True):
            ids[seq].append(token)
    return ids, seqs


def prompts_of(tokenizer) -> list[list[int]]:
    facts = " ".join(
        f"The code of {name} is {code}."
        for code, name in enumerate(["apple", "pear", "plum", "fig", "lime"], 4821)
    )
    texts = ["Count from 20 to 60.", f"{facts} What is the code of plum?", "a"]
    prompts = [tokenizer.encode(text) for text in texts]
    long = (prompts[1] * 12)[:300]
    return [*prompts, long, prompts[0][:7]]


@pytest.mark.slow
def test_a_ragged_batch_gets_the_tokens_of_the_reference_on_metal_kernels(demo, compiler):
    model, tokenizer = demo
    prompts = prompts_of(tokenizer)
    assert max(map(len, prompts)) > 256 > 8 > min(map(len, prompts)), "all kernels have work"
    num_tokens = 24  # enough for every kernel, and for decodes of several blocks
    expected, _ = greedy_in_a_ragged_batch(model, prompts, "reference", num_tokens)
    with emulated_metal(Checks.quick(writable=slots_of_the_step)) as trace:
        got, seqs = greedy_in_a_ragged_batch(model, prompts, "metal", num_tokens)
    assert got == expected
    assert seqs.cache.backend.name == "metal"
    kernels = Counter(call.kernel.removeprefix("mlx_paged_") for call in trace)
    assert set(kernels) == {
        "reshape_and_cache",
        "paged_attention",
        "merge_partitions",
    }
    num_steps = num_tokens + len(prompts) - 1
    assert kernels["paged_attention"] >= (num_steps - 1) * len(model.layers)


def test_a_fork_and_a_turn_with_history_get_the_tokens_of_the_reference_on_metal_kernels(
    demo, compiler
):
    model, tokenizer = demo
    prompt = tokenizer.encode("The code of apple is 4821. What is the code of apple?")

    def talk(backend: str) -> list[int]:
        cache = make_kv_cache(model, "paged", kv_cache_bytes="60blocks", backend=backend)
        seqs = Sequences(cache)
        tokens = []

        def run(batch) -> None:
            tokens.append(mx.argmax(run_step(model, seqs, batch), axis=-1).tolist())

        run({"a": prompt})
        seqs.fork("a", "b")  # shares a partly filled block, which the next step copies
        run({"a": prompt[:3], "b": [7]})
        run({"a": prompt, "b": prompt[:9], "c": prompt[:2]})
        seqs.trim("a", len(prompt))
        run({"a": prompt[:8], "b": [9], "c": [4]})
        return tokens

    expected = talk("reference")
    with emulated_metal(Checks.quick(writable=slots_of_the_step)) as trace:
        assert talk("metal") == expected
    kernels = {call.kernel.removeprefix("mlx_paged_") for call in trace}
    assert kernels == {
        "reshape_and_cache",
        "paged_attention",
        "gather_blocks",
        "copy_blocks",
    }
