"""Greedy words are mlx-lm's, token for token, on both caches, alone and in a batch.

A random model may come to two words that are all but equally likely; which of them wins is then
rounding's choice, and equal ids would be luck. So each prompt's seed was picked so that the two
best logits always lie further apart than rounding can push them (``2 * float32_tolerance``), and
the fixture proves it: then every id has to be the same.
"""

import mlx.core as mx
import numpy as np
import pytest
from helpers.fast_lane import mostly_slow
from helpers.qwen3_helpers import (
    CACHES,
    CONFIG,
    float32_tolerance,
    load_model,
    make_cache,
    random_mlx_lm_model,
    save_folder,
)
from mlx_lm.generate import generate_step as generate_step_of_mlx_lm
from mlx_lm.utils import load_model as load_model_as_mlx_lm

from mlx_paged.cache import Sequences
from mlx_paged.generation import generate_step
from mlx_paged.models.run_step import run_step

VOCAB_SIZE = 32
MAX_TOKENS = 200
PROMPT_SEEDS = {1: 1, 15: 3, 16: 4, 17: 3, 500: 4}  # prompt length -> the seed with clear margins
PROMPTS = {
    length: np.random.default_rng(100 * length + seed).integers(0, VOCAB_SIZE, length).tolist()
    for length, seed in PROMPT_SEEDS.items()
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = {**CONFIG, "vocab_size": VOCAB_SIZE}
    return save_folder(tmp_path_factory.mktemp("greedy"), random_mlx_lm_model(config), config)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def expected(folder):
    """What mlx-lm generates, ``{prompt length: ids}``, with margins that no rounding reaches."""
    theirs = load_model_as_mlx_lm(folder)[0]
    expected = {}
    for length, prompt in PROMPTS.items():
        steps = list(generate_step_of_mlx_lm(mx.array(prompt), theirs, max_tokens=MAX_TOKENS))
        ids = [token for token, _ in steps]
        logprobs = np.stack([np.array(row) for _, row in steps])
        second, best = np.sort(logprobs, axis=-1)[:, -2:].T
        assert (best - second).min() > 2 * float32_tolerance(
            theirs.args, length + MAX_TOKENS, logprobs
        ), f"the prompt of {length} tokens has a near tie: choose another seed in PROMPT_SEEDS"
        # Not a loop that would hide a wrong cache: many words, in ever new company.
        assert len(set(ids)) >= 10
        assert len(set(zip(ids, ids[1:], ids[2:], strict=False))) >= 40
        expected[length] = ids
    return expected


CASES = [
    *((length, MAX_TOKENS, {"kv": kind}) for kind in CACHES for length in PROMPTS),
    *(
        (length, 20, {"kv": kind, "prefill_step_size": size})
        for kind in CACHES
        for size, length in ((1, 17), (7, 17), (7, 500), (100, 17), (100, 500))
    ),
    *((17, 100, {"block_size": size}) for size in (8, 32, 64)),
]


@mostly_slow(("length", "max_tokens", "options"), CASES, ids=str, quick=(7, *range(9, len(CASES))))
def test_greedy_words_are_those_of_mlx_lm_in_any_chunks_and_blocks(
    model, expected, length, max_tokens, options
):
    steps = generate_step(PROMPTS[length], model, max_tokens=max_tokens, **options)
    assert [token for token, _ in steps] == expected[length][:max_tokens]


@pytest.mark.parametrize("kind", CACHES)
def test_sequences_that_come_and_go_do_not_disturb_each_other(model, expected, kind):
    # Each starts some steps after the last, its prompt beside the others' decodes, and is freed
    # when it has 40 words, so that later ones are written where earlier ones lay. Every third step
    # leaves the even lengths out.
    seqs = Sequences(make_cache(model, kind))
    start_at = {16: 0, 500: 7, 1: 20, 17: 45, 15: 60}
    words = {length: [] for length in start_at}
    for now in range(200):
        batch = {
            length: words[length][-1:] or PROMPTS[length]
            for length, start in start_at.items()
            if start <= now and len(words[length]) < 40 and (now % 3 or length % 2)
        }
        if not batch:
            continue
        tokens = mx.argmax(run_step(model, seqs, batch), axis=-1).tolist()
        for length, token in zip(batch, tokens, strict=True):
            words[length].append(token)
            if len(words[length]) == 40:
                seqs.free(length)
    assert words == {length: expected[length][:40] for length in start_at}
    assert list(seqs) == []
