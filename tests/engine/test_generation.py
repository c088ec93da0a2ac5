"""generate_step: mlx-lm's tokens from both caches, alone and in a batch, and clear ends and refusals."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from engine_helpers import tiny_models
from mlx_lm.generate import generate_step as mlx_lm_generate_step

from mlx_paged import ModelRunner, Session, make_kv_cache, make_sampler
from mlx_paged.engine.session import PromptTooLongError
from mlx_paged.generation import generate_step
from mlx_paged.models import qwen3


def prompt(num_tokens: int) -> list[int]:
    return np.random.default_rng(num_tokens).integers(0, 61, num_tokens).tolist()


def test_logprobs_are_those_of_mlx_lm(session: Session):
    ours, theirs = tiny_models()
    expected = list(mlx_lm_generate_step(mx.array(prompt(20)), theirs, max_tokens=30))
    got = list(generate_step(prompt(20), ours, max_tokens=30, session=session))
    assert [t for t, _ in got] == [int(t) for t, _ in expected]
    for (_, mine), (_, other) in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.array(mine), np.array(other), rtol=0, atol=1e-5)


def test_sampled_tokens_are_those_of_mlx_lm_with_the_same_seed(session: Session):
    from mlx_lm.sample_utils import make_sampler as mlx_lm_make_sampler

    ours, theirs = tiny_models()
    settings = {"temp": 0.9, "top_p": 0.9, "min_p": 0.02, "top_k": 20}
    # mlx-lm samples one token ahead, so the streams of random numbers meet only at the first token of each run.
    for seed in range(10):
        mx.random.seed(seed)
        (first, _), *_ = mlx_lm_generate_step(
            mx.array(prompt(20)), theirs, max_tokens=1, sampler=mlx_lm_make_sampler(**settings)
        )
        mx.random.seed(seed)
        ((token, _),) = generate_step(prompt(20), ours, max_tokens=1, sampler=make_sampler(**settings), session=session)
        assert token == first


def test_logits_processors_see_all_tokens_and_change_the_choice(model: qwen3.Model):
    seen: list[list[int]] = []

    def forbid_repeats(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        logits[:, tokens] = -mx.inf
        return logits

    got = [t for t, _ in generate_step(prompt(5), model, max_tokens=20, logits_processors=[forbid_repeats])]
    assert len({*prompt(5), *got}) == len(set(prompt(5))) + 20
    assert seen == [prompt(5) + got[:n] for n in range(20)]


def test_generation_ends_when_the_budget_is_full_and_says_so_by_its_length(model: qwen3.Model):
    for kind in ("basic", "paged"):
        got = list(generate_step(prompt(20), model, max_tokens=-1, kv=kind, kv_cache_bytes="2blocks"))
        # 32 slots hold the prompt and 12 tokens; the 13th is sampled and needs no K/V.
        assert len(got) == 13


def test_a_prompt_that_fills_the_budget_exactly_still_gets_one_token(model: qwen3.Model):
    assert len(list(generate_step(prompt(32), model, kv_cache_bytes="2blocks"))) == 1
    with pytest.raises(PromptTooLongError):
        next(generate_step(prompt(33), model, kv_cache_bytes="2blocks"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [61]}, "token id 61 is outside the model's vocabulary of 61"),
        ({"prompt": [-1]}, "token id -1 is outside"),
        ({"max_tokens": 0}, "max_tokens must be positive, or -1"),
        ({"max_tokens": -2}, "max_tokens must be positive, or -1"),
        ({"kv": "ring"}, "unknown cache mode 'ring'; supported: basic, paged"),
        ({"block_size": 12}, r"block_size must be one of \(8, 16, 32, 64\), got 12"),
        ({"kv_cache_bytes": "much"}, "can't read 'much'"),
        ({"kv_cache_bytes": 100}, "a budget of 100 bytes holds no block"),
        ({"backend": "vulkan"}, "unknown backend 'vulkan'; choose one of auto, reference, metal"),
        ({"prefill_step_size": 0}, "prefill_step_size must be at least 1"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_by_name(model: qwen3.Model, arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        list(generate_step(**({"prompt": [1, 2], "model": model} | arguments)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temp": -0.1}, "temp must be at least 0"),
        ({"temp": float("nan")}, "temp must be at least 0"),
        ({"top_p": 1.1}, r"top_p must be within 0\.\.1"),
        ({"min_p": -1}, r"min_p must be within 0\.\.1"),
        ({"top_k": -3}, "top_k must be at least 0"),
        ({"min_tokens_to_keep": 0}, "min_tokens_to_keep must be at least 1"),
    ],
    ids=str,
)
def test_a_sampler_refuses_values_out_of_range(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_sampler(**settings)


def test_top_k_and_min_p_and_top_p_only_draw_from_what_they_keep():
    logprobs = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]]))
    for settings, kept in (
        ({"top_k": 2}, {0, 1}),
        ({"min_p": 0.25}, {0, 1, 2}),
        ({"top_p": 0.7}, {0, 1}),
        ({"temp": 0.0}, {0}),
    ):
        sampler = make_sampler(**({"temp": 1.0} | settings))
        assert {sampler(logprobs).item() for _ in range(200)} == kept


@pytest.mark.parametrize("kind", ["basic", "paged"])
def test_a_ragged_batch_decodes_the_tokens_of_each_sequence_alone(model: qwen3.Model, kind: str):
    lengths = (1, 15, 16, 17, 100)
    alone = {n: [t for t, _ in generate_step(prompt(n), model, max_tokens=60)] for n in lengths}
    runner = ModelRunner(model, make_kv_cache(model, kind, kv_cache_bytes="200blocks"))
    batch = {n: prompt(n) for n in lengths}
    together: dict[int, list[int]] = {n: [] for n in lengths}
    for step in range(60):
        sampled = runner.run(batch, head=lambda logits: mx.argmax(logits, axis=-1)).tolist()
        for n, token in zip(batch, sampled, strict=True):
            together[n].append(token)
        # Sequences leave one after the other; 17 comes back in the middle of the run, as a prompt among decodes.
        batch = {n: [together[n][-1]] for n in batch if step < n + 20}
        if step == 30 and 17 in together and 17 in runner.cache.seqs:
            runner.cache.free(17)
            batch[17] = prompt(17) + together[17]
    for n in lengths:
        assert together[n] == alone[n][: len(together[n])] and len(together[n]) > 20
