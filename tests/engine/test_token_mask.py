"""Masks: what can't be drawn is not drawn, by vLLM's rules, and a request's mask is its own."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest
from helpers.completions import new_completion

from mlx_paged.engine.request import Completion, TokenRules
from mlx_paged.engine.sampling.sampler import SampledToken
from mlx_paged.engine.sampling.sampler import sample as sample_rows
from mlx_paged.engine.sampling.sampling_state import TokenMask, mask_tokens, needs_mask
from mlx_paged.options.sampling_params import SamplingParams

VOCAB = 24
INF = float("inf")


def make_request(output=(), *, eos=(), bad_words=(), **params) -> Completion:
    rules = TokenRules(frozenset(eos), tuple(bad_words))
    params = {"bad_words": ["x"] if bad_words else ()} | params
    completion = new_completion("r", [1, 2, 3], SamplingParams(**params), token_rules=rules)
    completion.token_ids.extend(output)
    return completion


def masked(completion: Completion) -> set[int]:
    """The tokens that a request can't draw."""
    logits = mask_tokens(mx.zeros((1, VOCAB)), [completion], [TokenMask(completion, VOCAB)])
    return set(np.flatnonzero(np.array(logits[0]) == -INF).tolist())


def expected_mask(completion: Completion) -> set[int]:
    """vLLM's definition, token by token."""
    params, rules, answer = (
        completion.request.params,
        completion.request.token_rules,
        completion.output_token_ids,
    )
    banned = set()
    for token in range(VOCAB):
        after = (*answer, token)
        ends_with = [word for word in rules.bad_words if after[-len(word) :] == word]
        is_early = len(answer) < params.min_tokens
        stops = {each for each in params.stop_token_ids if isinstance(each, int)}
        if is_early and any(after[-len(each) :] == each for each in params.stop_sequences):
            ends_with.append(after)
        if (
            ends_with
            or (is_early and token in stops | rules.eos_token_ids)
            or (params.allowed_token_ids is not None and token not in params.allowed_token_ids)
        ):
            banned.add(token)
    return banned


def some_masked_request(rng: random.Random) -> Completion:
    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(4) for _ in range(rng.randint(low, high)))

    params = {}
    if rng.random() < 0.5:
        params["allowed_token_ids"] = rng.sample(range(VOCAB), rng.randint(1, VOCAB))
    if rng.random() < 0.5:
        params["min_tokens"] = rng.randint(1, 6)
    if rng.random() < 0.7:
        params["stop_token_ids"] = [rng.randrange(VOCAB), tokens(2, 3), tokens(2, 4)]
    bad_words = {tokens(1, 3) for _ in range(rng.randint(0, 3))}
    eos = rng.sample(range(VOCAB), rng.randint(0, 2))
    return make_request(tokens(0, 8), eos=eos, bad_words=bad_words, **params)


@pytest.mark.parametrize("seed", range(150))
def test_the_mask_is_vllms_definition(seed: int):
    completion = some_masked_request(random.Random(seed))
    assert masked(completion) == expected_mask(completion)
    if not needs_mask(completion):
        assert masked(completion) == set()


def test_a_mask_goes_with_the_answer():
    completion = make_request(
        eos=[7], bad_words=[(5,), (8, 9)], min_tokens=3, stop_token_ids=[[1, 2]]
    )
    mask = TokenMask(completion, VOCAB)
    banned = [set(mask.banned(completion))]
    for token in (8, 1, 8, 1):
        completion.token_ids.append(token)
        banned.append(set(mask.banned(completion)))
    assert banned == [{5, 7}, {5, 7, 9}, {5, 7, 2}, {5, 9}, {5}]


def test_a_batch_of_masks_is_each_mask_alone():
    rng = random.Random(3)
    for _ in range(40):
        completions = [some_masked_request(rng) for _ in range(rng.randint(1, 5))]
        masks = [TokenMask(each, VOCAB) if needs_mask(each) else None for each in completions]
        logits = np.random.default_rng(0).normal(size=(len(completions), VOCAB)).astype(np.float32)
        got = np.array(mask_tokens(mx.array(logits), completions, masks))
        for row, completion in enumerate(completions):
            hidden = sorted(expected_mask(completion)) if needs_mask(completion) else []
            expected = logits[row].copy()
            expected[hidden] = -INF
            assert (got[row] == expected).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_hold_with_bias_penalties_and_filters_and_leave_the_logprobs_alone(
    temperature: float,
):
    logits = mx.array(np.random.default_rng(1).normal(size=(1, VOCAB)).astype(np.float32))
    plain = sample_rows(logits, [0], [make_request(logprobs=3)]).read()[0]
    for options in (
        {"logit_bias": {5: 1e300, 6: 100.0}},
        {"repetition_penalty": 2.0, "presence_penalty": -5.0},
        {"top_k": 3, "top_p": 0.9, "min_p": 0.1},
        {"xtc_probability": 1.0, "xtc_threshold": 0.01},
    ):
        params = {"temperature": temperature, "logprobs": 3} | options
        for seed in range(8):
            completion = make_request(
                [5, 6], allowed_token_ids=[2, 4, 5], bad_words=[(5,)], **params
            )
            completion.request.seed = seed
            (token,) = sample_rows(logits, [0], [completion]).read()
            assert token.token_id in (2, 4)
            top = [each.logprob for each in list(token.logprobs.values())[:3]]
            assert top == [each.logprob for each in list(plain.logprobs.values())[:3]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_leaves_no_token_fails_its_request_alone(temperature: float):
    logits = mx.array(np.random.default_rng(1).normal(size=(3, VOCAB)).astype(np.float32))
    fine = make_request(allowed_token_ids=[4], temperature=temperature)
    stuck = make_request([8], allowed_token_ids=[9], bad_words=[(8, 9)], temperature=temperature)
    plain = make_request()
    first, error, last = sample_rows(logits, [0, 1, 2], [fine, stuck, plain]).read()
    assert first == SampledToken(4) and last == SampledToken(int(logits[2].argmax().item()))
    assert isinstance(error, ValueError) and "allow no token" in str(error)
    assert "allowed_token_ids and bad_words" in str(error)


def test_own_samplers_and_processors_see_the_mask():
    seen = []

    def look(row: mx.array) -> mx.array:
        seen.append(set(np.flatnonzero(np.array(row[0]) == -INF).tolist()))
        return mx.argmax(row, axis=-1)

    def check(_: mx.array, row: mx.array) -> mx.array:
        look(row)
        return row

    logits = mx.zeros((1, VOCAB))
    completion = make_request(bad_words=[(3,)], sampler=look, logits_processors=[check])
    sample_rows(logits, [0], [completion]).read()
    assert seen == [{3}, {3}]


def test_requests_without_masks_make_none():
    completion = make_request(stop_token_ids=[1, [2, 3]], max_tokens=5)
    sample_rows(mx.zeros((1, VOCAB)), [0], [completion]).read()
    assert completion.sampling_state.mask is None and completion.sampling_state.is_plain
