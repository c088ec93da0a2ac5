"""What is drawn for a request is mlx-lm's and vLLM's choice, and nobody's business but its own."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from helpers.completions import new_completion
from helpers.fast_lane import mostly_slow
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import sample_utils

from mlx_paged.engine.request import Completion
from mlx_paged.engine.sampling.sampler import SampledToken, SamplingState
from mlx_paged.engine.sampling.sampler import sample as sample_rows
from mlx_paged.errors import ArgumentError
from mlx_paged.options.sampling_params import SamplingParams
from mlx_paged.request import Logprob

VOCAB = 24
INF = float("inf")


def make_request(prompt=(1, 2, 3), output=(), seed=0, index=0, **params) -> Completion:
    completion = new_completion(
        f"r{seed}", prompt, SamplingParams(**params), seed=seed, index=index
    )
    completion.token_ids.extend(output)
    return completion


def make_logits(num_rows=1, vocab=VOCAB, seed=0, scale=2.0) -> mx.array:
    return mx.array(
        np.random.default_rng(seed).normal(0, scale, (num_rows, vocab)).astype(np.float32)
    )


def sample(logits: mx.array, *completions: Completion, rows=None) -> list[SampledToken | Exception]:
    rows = range(len(completions)) if rows is None else rows
    return sample_rows(logits, rows, completions).read()


def sample_alone(row: mx.array, completion: Completion) -> SampledToken | Exception:
    """Of a request like this one that the sampler has never seen."""
    fresh = new_completion(
        completion.request_id,
        completion.token_ids[: completion.num_prompt_tokens],
        completion.request.params,
        seed=completion.request.seed,
        index=completion.index,
    )
    fresh.token_ids.extend(completion.output_token_ids)
    return sample(row[None], fresh)[0]


def adjusted_logits(logits: mx.array, *completions: Completion) -> np.ndarray:
    """What the processors of these requests were given: the logits after bias and penalties."""
    seen = []

    def look(_, row):
        seen.append(np.array(row[0]))
        return row

    for completion in completions:
        object.__setattr__(completion.request.params, "logits_processors", (look,))
    sample(logits, *completions)
    return np.stack(seen)


# Greedy


def test_no_requests_are_no_tokens():
    assert sample(make_logits(0)) == []


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3, 0, 1, 1], [2]])
def test_temperature_zero_takes_the_most_likely_token_of_its_row(dtype, rows):
    logits = make_logits(4).astype(dtype)
    best = np.argmax(np.array(logits.astype(mx.float32)), axis=-1)
    assert len(set(best.tolist())) == 4
    expected = [SampledToken(int(best[row])) for row in rows]
    assert sample(logits, *[make_request() for _ in rows], rows=rows) == expected
    # And so when others in the batch want more than that.
    wanting = make_request(temperature=1.0, logprobs=2, presence_penalty=1.0)
    assert (
        sample(logits, *[make_request() for _ in rows], wanting, rows=[*rows, 0])[:-1] == expected
    )


@mostly_slow("temperature", [1e30, 1e38, 1e308], quick=(2,))
@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}], ids=str)
def test_a_temperature_beyond_all_bounds_still_draws_from_what_the_filters_leave(
    temperature: float, filters: dict
):
    logits = make_logits(1)
    kept = {
        sample_alone(logits[0], make_request(seed=n, temperature=1.0, **filters)).token_id
        for n in range(200)
    }
    drawn = {
        sample_alone(logits[0], make_request(seed=n, temperature=temperature, **filters)).token_id
        for n in range(200)
    }
    assert drawn == kept and len(kept) > 1


def test_a_temperature_next_to_zero_takes_the_most_likely_token():
    for temperature in (1e-5, 1e-38, 1e-45, 5e-324):
        logits = make_logits(8, seed=1)
        results = sample(
            logits, *[make_request(temperature=temperature, seed=seed) for seed in range(8)]
        )
        assert [result.token_id for result in results] == np.argmax(
            np.array(logits), axis=-1
        ).tolist()


# Filters and draws


def mlx_lm_logprobs(
    row: mx.array, monkeypatch, temperature, top_p=0.0, min_p=0.0, top_k=0, **xtc
) -> mx.array:
    """What mlx-lm's own sampler would draw from."""
    drawn_from = []
    with monkeypatch.context() as patch:
        draw = lambda logprobs, temp: drawn_from.append(logprobs * (1 / temp))  # noqa: E731
        patch.setattr(sample_utils, "categorical_sampling", draw)
        sampler = sample_utils.make_sampler(
            temperature, top_p=top_p, min_p=min_p, top_k=top_k, **xtc
        )
        sampler(row[None] - mx.logsumexp(row))
    return drawn_from[0][0]


def mlx_lm_probabilities(*args, **params) -> np.ndarray:
    return np.array(mx.softmax(mlx_lm_logprobs(*args, **params))).astype(np.float64)


# Few different numbers, because mlx-lm compiles a kernel for each of them.
FILTERS = {
    "none": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top_p": {"top_p": 0.8},
    "top_p of almost nothing": {"top_p": 1e-4},
    "top_k": {"top_k": 5},
    "top_k 1": {"top_k": 1},
    "min_p": {"min_p": 0.1},
    "min_p 1": {"min_p": 1.0},
    "top_p and top_k": {"top_p": 0.8, "top_k": 4},
    "top_p and min_p": {"top_p": 0.8, "min_p": 0.1},
    "min_p and top_k": {"min_p": 0.1, "top_k": 4},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    "xtc, low": {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    "xtc, high": {"xtc_probability": 1.0, "xtc_threshold": 0.5},
    "xtc and top_k": {"xtc_probability": 1.0, "xtc_threshold": 0.05, "top_k": 4},
    "xtc, special tokens": {
        "xtc_probability": 1.0,
        "xtc_threshold": 0.02,
        "xtc_special_tokens": [3, 17, 20],
        "top_p": 0.9,
        "min_p": 0.02,
    },
    "all": {"top_p": 0.8, "min_p": 0.1, "top_k": 6, "temperature": 0.8},
    "all, and hot": {"top_p": 0.8, "min_p": 0.1, "top_k": 3, "temperature": 4.0},
}


def filtered_logits() -> mx.array:
    """Such that each of the filters above takes something away, and that their order matters."""
    return make_logits(seed=14, scale=1.0)


# What the type of the logits decides, it decides before the first filter.
DRAWS = [
    *((name, mx.float32) for name in FILTERS),
    *((name, mx.bfloat16) for name in ("none", "top_p", "min_p and top_k", "xtc", "all")),
]


# Each filter, and some together, once quickly.
@mostly_slow(
    ("name", "dtype"),
    DRAWS,
    quick=[
        place
        for place, (name, dtype) in enumerate(DRAWS)
        if (name in ("hot", "top_k", "xtc, special tokens", "all, and hot"))
        or (name in ("top_p", "min_p and top_k") and dtype == mx.bfloat16)
    ],
)
def test_draws_have_the_frequencies_of_mlx_lms_sampler(name: str, dtype, monkeypatch):
    params = {"temperature": 1.0} | FILTERS[name]
    logits = filtered_logits().astype(dtype)
    expected = mlx_lm_probabilities(logits[0].astype(mx.float32), monkeypatch, **params)
    num_draws = 3000
    completions = [make_request(seed=seed, **params) for seed in range(num_draws)]
    counts = Counter(
        result.token_id for result in sample(logits, *completions, rows=[0] * num_draws)
    )

    kept = set(np.flatnonzero(expected).tolist())
    likely = {token for token in kept if expected[token] * num_draws > 20}
    assert likely <= set(counts) <= kept
    # Pearson's sum, whose mean is the degrees of freedom and whose variance is twice that.
    observed = np.array([counts[token] for token in likely])
    wanted = np.array([expected[token] for token in likely]) * num_draws
    assert ((observed - wanted) ** 2 / wanted).sum() < len(likely) + 4 * np.sqrt(2 * len(likely))


def test_the_logits_above_tell_the_order_of_the_filters(monkeypatch):
    logprobs = filtered_logits() - mx.logsumexp(filtered_logits())
    for other, params in (
        (sample_utils.apply_top_k, {"top_k": 4}),
        (sample_utils.apply_min_p, {"min_p": 0.1}),
    ):
        right = mlx_lm_probabilities(logprobs[0], monkeypatch, 1.0, top_p=0.8, **params)
        wrong = sample_utils.apply_top_p(other(logprobs, *params.values()), 0.8)
        assert np.flatnonzero(right).tolist() != np.flatnonzero(np.array(wrong[0]) > -INF).tolist()


def test_a_top_p_of_0_or_below_float32_keeps_the_most_likely_token():
    logits = make_logits(scale=0.1)
    completions = [
        make_request(temperature=1.0, top_p=top_p, seed=s)
        for s in range(9)
        for top_p in (0, 1e-40, 5e-324)
    ]
    results = sample(logits, *completions, rows=[0] * 27)
    assert [result.token_id for result in results] == [logits.argmax().item()] * 27


def test_top_k_of_the_whole_vocabulary_and_more_keeps_all():
    logits = make_logits(scale=0.1)
    for seed in range(20):
        plain = sample(logits, make_request(temperature=1.0, seed=seed))
        for top_k in (VOCAB, VOCAB + 1, 10**9):
            assert sample(logits, make_request(temperature=1.0, seed=seed, top_k=top_k)) == plain


@pytest.mark.parametrize("name", FILTERS)
def test_a_draw_is_mlx_lms_with_the_key_of_the_request(name: str, monkeypatch):
    params = {"temperature": 1.0} | FILTERS[name]
    logits = filtered_logits()
    drawn_from = mlx_lm_logprobs(logits[0], monkeypatch, **params)
    for position in range(10):
        completion = make_request(output=[5] * position, seed=position * 31, **params)
        key = mx.array(np.frombuffer(SamplingState(completion, VOCAB).draw_key(position), "<u4"))
        assert (
            sample(logits, completion)[0].token_id
            == mx.random.categorical(drawn_from, key=key).item()
        )


def xtc_coins(completion: Completion, num_positions: int) -> list[bool]:
    """At which positions of its answer XTC is applied to a request."""
    state = SamplingState(completion, VOCAB)
    return [state.xtc_threshold(position) < INF for position in range(num_positions)]


@pytest.mark.parametrize("probability", [0.2, 0.7])
def test_xtc_is_mlx_lms_where_the_coin_of_the_position_says_so(probability: float, monkeypatch):
    logits = filtered_logits()
    xtc = {"xtc_threshold": 0.03, "xtc_special_tokens": [5]}
    params = {"temperature": 1.0, "xtc_probability": probability, **xtc}
    with_xtc = mlx_lm_logprobs(logits[0], monkeypatch, 1.0, xtc_probability=1.0, **xtc)
    without = mlx_lm_logprobs(logits[0], monkeypatch, 1.0)
    assert not mx.array_equal(with_xtc, without)
    completions = [make_request(output=[5] * place, seed=7, **params) for place in range(30)]
    coins = xtc_coins(completions[0], 30)
    assert {True, False} == set(coins)
    tokens = [result.token_id for result in sample(logits, *completions, rows=[0] * 30)]
    for place, (coin, completion) in enumerate(zip(coins, completions, strict=True)):
        key = mx.array(np.frombuffer(SamplingState(completion, VOCAB).draw_key(place), "<u4"))
        drawn_from = with_xtc if coin else without
        assert tokens[place] == mx.random.categorical(drawn_from, key=key).item()


def test_the_coins_of_xtc_fall_as_often_as_asked_and_belong_to_request_and_position():
    for probability in (0.05, 0.5, 0.9):
        params = {"temperature": 1.0, "xtc_probability": probability}
        coins = [
            coin for seed in range(20) for coin in xtc_coins(make_request(seed=seed, **params), 200)
        ]
        deviation = (probability * (1 - probability) / len(coins)) ** 0.5
        assert abs(np.mean(coins) - probability) < 4 * deviation
    half = {"temperature": 1.0, "xtc_probability": 0.5}
    rows = [
        xtc_coins(make_request(seed=s, index=i, **half), 64) for s in range(4) for i in range(4)
    ]
    assert len(set(map(tuple, rows))) == 16 and xtc_coins(make_request(**half), 64) in rows
    assert all(xtc_coins(make_request(temperature=1.0, xtc_probability=1), 100))


def test_xtc_against_its_formula_in_float64():
    logits = make_logits(6, seed=3)
    for row in range(6):
        params = {"temperature": 1.0, "xtc_probability": 1, "xtc_threshold": 0.05}
        completions = [make_request(seed=seed, **params) for seed in range(400)]
        drawn = {result.token_id for result in sample(logits, *completions, rows=[row] * 400)}
        exact = np.exp(np.array(logits[row], np.float64))
        exact /= exact.sum()
        above = np.flatnonzero(exact > 0.05)
        removed = set(above.tolist()) - {int(above[np.argmin(exact[above])])}
        left = {token for token in range(VOCAB) if token not in removed}
        likely = {token for token in left if exact[token] > 0.05 / 2}
        assert removed and likely <= drawn <= left


def test_settings_from_numpy_are_those_of_python():
    params = {
        "temperature": 0.7,
        "top_p": 0.8,
        "min_p": 0.05,
        "top_k": 7,
        "logprobs": 2,
        "repetition_penalty": 1.25,
    }
    params |= {"frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {3: 0.5}}
    kinds = {
        int: np.int64,
        float: np.float64,
        dict: lambda bias: {np.int64(3): np.float64(bias[3])},
    }
    numpys = {name: kinds[type(value)](value) for name, value in params.items()}
    for seed in range(5):
        plain, numpy = (
            make_request(seed=seed, **params),
            make_request(seed=np.int64(seed), **numpys),
        )
        assert sample(make_logits(seed=seed), plain) == sample(make_logits(seed=seed), numpy)


def test_different_seeds_completions_and_positions_draw_differently():
    logits = mx.zeros((1, 100_000))  # so that two draws hardly ever meet
    completions = [
        make_request(output=[7] * position, seed=seed, index=index, temperature=1.0)
        for seed in (0, 1, 256)
        for index in (0, 1, 2)
        for position in (0, 1, 2)
    ]
    results = sample(logits, *completions, rows=[0] * len(completions))
    assert len({result.token_id for result in results}) == len(completions)
    assert sample(logits, *completions, rows=[0] * len(completions)) == results


def test_no_two_seeds_share_a_key_however_large():
    seeds = [0, 1, -1, 127, 128, -128, -129, 255, 256, 2**32, 2**63, 10**5000, -(10**5000)]
    seeds += [
        2**64,
        -(2**64),
        2**64 + 1,
        2**65,
        2**128,
    ]  # whose bytes could be read as an index or a position
    keys = set()
    for seed in seeds:
        for index in (0, 1, 256):
            # The name is not made from the seed: Python refuses to print the longest.
            completion = new_completion(
                "r", [1], SamplingParams(temperature=1.0), seed=seed, index=index
            )
            keys |= {
                SamplingState(completion, VOCAB).draw_key(position) for position in (0, 1, 256)
            }
    assert len(keys) == len(seeds) * 9


# Alone and in company


def some_request(rng: random.Random, seed: int) -> Completion:
    params = {}
    if rng.random() < 0.7:
        params |= {"temperature": rng.choice([0.7, 1.0]), "top_p": rng.choice([1.0, 0.9])}
        params |= {"top_k": rng.choice([0, 3, 12]), "min_p": rng.choice([0.0, 0.05])}
    if rng.random() < 0.4:
        params |= {
            "repetition_penalty": rng.choice([1.0, 1.3]),
            "presence_penalty": rng.choice([0.0, 0.5]),
        }
        params |= {"frequency_penalty": rng.choice([0.0, 0.2])}
    if rng.random() < 0.3:
        params["logit_bias"] = {
            rng.randrange(VOCAB): rng.choice([-INF, -1.0, 3.0]) for _ in range(3)
        }
    if rng.random() < 0.2:
        params["logits_processors"] = [
            lambda _, row: mx.where(mx.arange(VOCAB) % 2 == 0, row, -INF)
        ]
    if rng.random() < 0.4:
        params["logprobs"] = rng.randrange(6)
    if rng.random() < 0.3:
        params["allowed_token_ids"] = rng.sample(range(VOCAB), 16)
    if rng.random() < 0.3:
        params |= {"min_tokens": 4, "stop_token_ids": [rng.randrange(VOCAB), [1, 2]]}
    if rng.random() < 0.3:
        params |= {"xtc_probability": 0.5, "xtc_threshold": rng.choice([0.02, 0.1])}
        params["xtc_special_tokens"] = rng.sample(range(VOCAB), rng.randrange(3))
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]
    output = [rng.randrange(VOCAB) for _ in range(rng.randrange(9))]
    return make_request(prompt, output, seed, rng.randrange(3), **params)


@pytest.mark.parametrize("seed", range(12))
def test_a_request_gets_the_same_alone_as_in_any_company(seed: int):
    rng = random.Random(seed)
    logits = make_logits(8, seed=seed)
    completions = [some_request(rng, number) for number in range(12)]
    rows = [rng.randrange(8) for _ in completions]
    alone = [
        sample_alone(logits[row], completion)
        for row, completion in zip(rows, completions, strict=True)
    ]
    assert not any(isinstance(result, Exception) for result in alone)
    for _ in range(3):  # again in another order, and with some of them
        order = rng.sample(range(12), rng.randrange(5, 13))
        results = sample(logits, *[completions[i] for i in order], rows=[rows[i] for i in order])
        assert results == [alone[i] for i in order]


def test_the_completions_of_one_prompt_share_a_row_and_draw_apart():
    logits = make_logits(2, vocab=100_000, scale=0.1)
    parent = make_request(temperature=1.0, seed=3, n=6)
    completions = [parent, *[parent.fork(index) for index in range(1, 6)]]
    results = sample(logits, *completions, rows=[1] * 6)
    assert len({result.token_id for result in results}) == 6
    assert [sample_alone(logits[1], completion) for completion in completions] == results


# Penalties


def penalised(row: np.ndarray, completion: Completion) -> np.ndarray:
    """vLLM's formulas, token by token in float64."""
    params, row = completion.request.params, row.astype(np.float64)
    for token, bias in params.logit_bias.items():
        row[token] += bias
    for token in set(completion.token_ids):
        row[token] *= 1 / params.repetition_penalty if row[token] > 0 else params.repetition_penalty
    for token, count in Counter(completion.output_token_ids).items():
        row[token] -= params.frequency_penalty * count
        row[token] -= params.presence_penalty
    return row


token_lists = st.lists(st.integers(0, 11), max_size=20)
additive = st.sampled_from([0.0, 0.5, -0.5, 1.75])
penalised_requests = st.builds(
    make_request,
    prompt=token_lists,
    output=token_lists,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 4.0]),
    frequency_penalty=additive,
    presence_penalty=additive,
    logit_bias=st.dictionaries(st.integers(0, 11), st.sampled_from([-6.0, 0.25, 6.0]), max_size=4),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(penalised_requests, min_size=1, max_size=4), st.integers(0, 99))
def test_penalties_are_vllms_formulas(completions: list[Completion], seed: int):
    logits = make_logits(len(completions), vocab=12, seed=seed)
    logits = mx.where(mx.abs(logits) < 0.3, 0.0, logits)
    expected = np.stack(
        [
            penalised(row, completion)
            for row, completion in zip(np.array(logits), completions, strict=True)
        ]
    )
    # Five roundings in float32 of numbers below 100.
    np.testing.assert_allclose(
        adjusted_logits(logits, *completions), expected, rtol=0, atol=5 * 100 * 2**-24
    )


def test_penalties_change_the_token_and_only_that_requests():
    logits = mx.array([[5.0, 4.9, 4.5, 1.0]] * 6)
    completions = [
        make_request([3]),
        make_request([0], repetition_penalty=1.1),  # of prompt and answer
        make_request([0], presence_penalty=3.0),  # of the answer only
        make_request([3], [0, 1], presence_penalty=1.0),
        make_request([3], [0, 0, 1], frequency_penalty=0.3),
        make_request([3], logit_bias={0: -0.2}),
    ]
    assert [result.token_id for result in sample(logits, *completions)] == [0, 1, 0, 2, 1, 1]


def test_a_sampled_request_is_drawn_from_its_penalised_logits():
    logits = mx.zeros((1, 4))
    completions = [
        make_request([0], [1], temperature=1.0, presence_penalty=50.0, seed=seed)
        for seed in range(60)
    ]
    assert {result.token_id for result in sample(logits, *completions, rows=[0] * 60)} == {0, 2, 3}


def test_penalties_after_many_steps_are_those_of_a_request_seen_for_the_first_time():
    params = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.4}
    completion = make_request([3, 3, 9], temperature=1.0, seed=5, **params)
    for step in range(40):
        logits = make_logits(seed=step)
        fresh = make_request(
            [3, 3, 9], completion.output_token_ids, temperature=1.0, seed=5, **params
        )
        assert (
            adjusted_logits(logits, completion).tolist() == adjusted_logits(logits, fresh).tolist()
        )
        if (
            step % 7 != 3
        ):  # in some steps it does not take part, and in some it takes several tokens at once
            completion.token_ids.append(sample(logits, completion)[0].token_id)
        if step % 11 == 5:
            completion.token_ids.extend([3, 20, 3])


def test_a_token_is_read_once_however_long_the_context():
    class CountedList(list):
        num_reads = 0

        def __getitem__(self, item):
            CountedList.num_reads += (
                len(range(*item.indices(len(self)))) if isinstance(item, slice) else 1
            )
            return super().__getitem__(item)

        def __iter__(self):
            CountedList.num_reads += len(self)
            return super().__iter__()

    prompt = np.random.default_rng(0).integers(0, VOCAB, 5000).tolist()
    for penalty, expected in (
        ("repetition_penalty", 5009),
        ("presence_penalty", 9),
    ):  # which leaves the prompt alone
        completion = make_request(prompt, **{penalty: 1.1})
        completion.token_ids = CountedList(completion.token_ids)
        CountedList.num_reads = 0
        for _ in range(10):
            completion.token_ids.append(sample(make_logits(), completion)[0].token_id)
        assert CountedList.num_reads == expected


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 1e300},
        {"presence_penalty": -1e300},
        {"frequency_penalty": 1e300, "presence_penalty": -1e300},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300},
    ],
    ids=str,
)
def test_penalties_beyond_float32_stay_numbers(params):
    logits = mx.concatenate([make_logits(2, seed=1), -make_logits(2, seed=1), mx.zeros((1, VOCAB))])
    assert np.isfinite(
        adjusted_logits(logits, *[make_request([1], [5, 5], **params) for _ in range(5)])
    ).all()


@pytest.mark.filterwarnings("error")
def test_a_bias_beyond_float32_forces_a_token_and_bans_one():
    logits = make_logits(scale=0.1)
    force = {9: 1e300}
    forced = [
        make_request(logit_bias=force, temperature=t, seed=seed)
        for t in (0.0, 1.0)
        for seed in range(30)
    ]
    assert {result.token_id for result in sample(logits, *forced, rows=[0] * 60)} == {9}
    for infinite in (1e300, INF):
        ban = dict.fromkeys(range(1, 23), -infinite)
        banned = [make_request(logit_bias=ban, temperature=2.0, seed=seed) for seed in range(30)]
        assert {result.token_id for result in sample(logits, *banned, rows=[0] * 30)} == {0, 23}


def test_tokens_of_infinite_logits_share_the_probability():
    force = lambda _, row: mx.where(mx.arange(VOCAB) % 10 == 3, INF, row).astype(mx.bfloat16)  # noqa: E731
    completions = [
        make_request(logits_processors=[force], temperature=1.0, seed=seed, **params)
        for seed in range(30)
        for params in ({}, {"top_p": 0.99}, {"min_p": 0.5}, {"top_k": 3})
    ]
    results = sample(make_logits(), *completions, rows=[0] * len(completions))
    assert [{result.token_id for result in results[kind::4]} for kind in range(4)] == [
        {3, 13, 23}
    ] * 4


# Log-probabilities


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_logprobs_are_of_the_models_own_logits_with_the_rank_among_all_tokens(k: int, dtype):
    logits = make_logits(6, vocab=60, seed=k).astype(dtype)
    params = {
        "logprobs": k,
        "temperature": 9.0,
        "top_k": 40,
        "presence_penalty": 2.0,
        "logit_bias": {7: 2.0},
    }
    completions = [make_request(output=[7, 8], seed=seed, **params) for seed in range(6)]
    # Others that want fewer, more and none must not change that.
    others = [make_request(logprobs=3), make_request(), make_request(logprobs=20)]
    results = sample(logits, *completions, *others, rows=[*range(6), 0, 0, 0])[:6]
    assert any(result.logprobs[result.token_id].rank > k for result in results)
    for row, result in zip(
        np.array(logits.astype(mx.float32)).astype(np.float64), results, strict=True
    ):
        exact = row - np.log(np.exp(row).sum())
        tokens, reported = list(result.logprobs), list(result.logprobs.values())
        np.testing.assert_allclose([r.logprob for r in reported], exact[tokens], rtol=0, atol=1e-5)
        np.testing.assert_allclose(
            [r.logprob for r in reported[:k]], np.sort(exact)[::-1][:k], rtol=0, atol=1e-5
        )
        assert [r.rank for r in reported[:k]] == list(range(1, k + 1))
        assert len(reported) == k + (result.token_id not in tokens[:k])
        if result.token_id not in tokens[:k]:
            assert (
                tokens[k] == result.token_id
                and reported[k].rank == 1 + (exact > exact[result.token_id]).sum()
            )


def test_logprobs_stand_in_the_order_of_rank_and_the_sampled_token_last():
    row = mx.log(mx.array([[0.1, 0.4, 0.2, 0.3]]))
    (result,) = sample(row, make_request([1], logprobs=2, logit_bias={0: 9.0}))
    assert [
        (token, entry.rank, round(float(np.exp(entry.logprob)), 5))
        for token, entry in result.logprobs.items()
    ] == [(1, 1, 0.4), (3, 2, 0.3), (0, 4, 0.1)]
    assert result.token_id == 0 and all(
        entry.decoded_token is None for entry in result.logprobs.values()
    )


def test_tokens_that_are_equally_likely_are_reported_in_the_order_of_their_ids():
    (result,) = sample(mx.zeros((1, 4)), make_request(logprobs=4))
    assert result == SampledToken(
        0, {token: Logprob(-float(np.log(np.float32(4))), token + 1) for token in range(4)}
    )


def test_more_logprobs_than_the_vocabulary_are_all_of_it():
    (result,) = sample(mx.array([[1.0, 3.0, 2.0]]), make_request([1], logprobs=20))
    assert [(token, entry.rank) for token, entry in result.logprobs.items()] == [
        (1, 1),
        (2, 2),
        (0, 3),
    ]


# Processors


def test_a_processor_sees_the_tokens_so_far_and_decides_last():
    seen = []

    def only_17(tokens, logits):
        seen.append((tokens.tolist(), logits.shape))
        return mx.where(mx.arange(VOCAB) == 17, 0.0, -INF)[None]

    completions = [
        make_request(
            [4, 5],
            [6],
            logits_processors=[only_17],
            temperature=t,
            logit_bias={17: -40.0},
            logprobs=0,
        )
        for t in (0.0, 1.0)
    ]
    results = sample(make_logits(2), *completions)
    assert [result.token_id for result in results] == [17, 17] and seen == [
        ([4, 5, 6], (1, VOCAB))
    ] * 2
    # The log-probabilities stay the model's own.
    logits = make_logits(2)
    expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))[:, 17]
    np.testing.assert_allclose(
        [result.logprobs[17].logprob for result in results], expected, rtol=1e-6
    )


def test_processors_run_in_their_order_and_may_answer_in_another_float_type():
    add = lambda _, logits: (logits + 1.0).astype(mx.bfloat16)  # noqa: E731
    ban_all_but_2 = lambda _, logits: mx.where(mx.arange(3) == 2, logits, -1e9)  # noqa: E731
    double = lambda _, logits: logits * 2.0  # noqa: E731
    completion = make_request(
        [1], logits_processors=[add, double, ban_all_but_2], logit_bias={0: 0.5}
    )
    other = make_request([1], logits_processors=[double, add], temperature=1.0)
    assert [
        r.token_id
        for r in sample(mx.array([[5.0, 1.0, 2.0], [9.0, 500.0, 1.0]]), completion, other)
    ] == [2, 1]
    # (x + 1) * 2 against x * 2 + 1
    assert adjusted_after([add, double]) == [8.0] and adjusted_after([double, add]) == [7.0]


def adjusted_after(processors) -> list[float]:
    seen = []
    look = lambda _, logits: seen.append(logits.item()) or logits  # noqa: E731
    sample(mx.array([[3.0]]), make_request([0], logits_processors=[*processors, look]))
    return seen


def test_a_processor_that_writes_into_its_logits_changes_no_other_row():
    def overwrite(_, logits):
        logits[:] = -INF
        logits[:, 3] = 0.0
        return logits

    logits = make_logits(2)
    before = np.array(logits)
    bystanders = [make_request(), make_request(temperature=1.0, seed=4), make_request(logprobs=3)]
    expected = [
        sample_alone(logits[row], completion)
        for row, completion in zip([0, 1, 0], bystanders, strict=True)
    ]
    writer = make_request(logits_processors=[overwrite])
    results = sample(logits, writer, *bystanders, rows=[0, 0, 1, 0])
    assert results == [SampledToken(3), *expected]
    assert sample(logits, writer, bystanders[1])[0] == SampledToken(3)  # where no row is copied
    assert np.array_equal(np.array(logits), before)


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {2: 5.0, 9: -3.0}},
        {"repetition_penalty": 1.7},
        {"presence_penalty": 2.0, "presence_context_size": 3},
        {"frequency_penalty": 1.1},
        {
            "logit_bias": {4: 1.0},
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.4,
            "presence_penalty": 0.2,
        },
    ],
    ids=str,
)
def test_mlx_lms_own_processors_do_here_what_they_do_there(params):
    logits = make_logits(2, seed=3)
    tokens = [3, 4, 4, 9, 2]
    expected = logits[1:]
    for processor in sample_utils.make_logits_processors(**params):
        expected = processor(mx.array(tokens), expected)
    assert not np.array_equal(np.array(expected), np.array(logits[1:]))

    seen = []
    look = lambda _, row: seen.append(np.array(row)) or row  # noqa: E731
    completion = make_request(
        tokens, logits_processors=[*sample_utils.make_logits_processors(**params), look]
    )
    results = sample(logits, make_request(), completion)
    assert np.array_equal(seen[0], np.array(expected))
    assert [result.token_id for result in results] == [
        logits[0].argmax().item(),
        expected[0].argmax().item(),
    ]


# Failures


def broken_row() -> mx.array:
    """An array that fails when it is evaluated: the thread that left it lazy is over."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(lambda: mx.ones((1, VOCAB)) + 1).result()


def raises(_, logits):
    raise RuntimeError("a user's own mistake")


def breaks_its_row_and_raises(_, logits):
    logits[:] = broken_row()
    raise RuntimeError("a user's own mistake")


FAILURES = {
    "raises": ([raises], RuntimeError, "a user's own mistake"),
    "drops the row": (
        [lambda _, row: row[0]],
        ValueError,
        r"must return floats of shape \(1, 24\), got .*float32.* \(24,\)",
    ),
    "another vocabulary": ([lambda _, row: row[:, :5]], ValueError, r"got .*\(1, 5\)"),
    "another row": ([lambda _, row: mx.concatenate([row, row])], ValueError, r"got .*\(2, 24\)"),
    "none": ([lambda *_: None], ValueError, "got NoneType"),
    "numpy": ([lambda _, row: np.array(row)], ValueError, "got ndarray"),
    "whole numbers": ([lambda _, row: row.astype(mx.int32)], ValueError, "got .*int32"),
    "in the middle": (
        [lambda *_: None, lambda _, row: mx.zeros((1, VOCAB))],
        ValueError,
        "got NoneType",
    ),
    "all banned": ([lambda _, row: mx.full(row.shape, -INF)], ValueError, "allow no token"),
    "all nan": ([lambda _, row: row * float("nan")], ValueError, "allow no token"),
    "fails when it is evaluated": ([lambda *_: broken_row()], RuntimeError, "There is no Stream"),
    "breaks its row": ([breaks_its_row_and_raises], RuntimeError, "a user's own mistake"),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", FAILURES)
def test_a_processor_that_fails_fails_its_request_and_no_other(name: str, temperature: float):
    processors, error_type, message = FAILURES[name]
    logits = make_logits(3)
    fine = [
        make_request(seed=1),
        make_request(seed=2, temperature=1.0, logprobs=2),
        make_request(seed=3, logits_processors=[lambda _, row: -row]),
        make_request(seed=4, logit_bias={3: 4.0}, temperature=temperature, repetition_penalty=1.1),
    ]
    rows = [0, 1, 2, 1]
    expected = [
        sample_alone(logits[row], completion) for row, completion in zip(rows, fine, strict=True)
    ]
    failing = make_request(
        logits_processors=processors, temperature=temperature, logprobs=1, presence_penalty=1.0
    )
    results = sample(logits, *fine[:2], failing, *fine[2:], rows=[0, 1, 1, 2, 1])
    error = results.pop(2)
    assert results == expected
    with pytest.raises(error_type, match=message):
        raise error


def test_the_error_of_a_processor_names_it():
    def forgets_to_return(_, logits):
        logits[:, 0] = 1.0

    (error,) = sample(make_logits(), make_request(logits_processors=[forgets_to_return]))
    assert str(error) == (
        "[sampler] logits processor forgets_to_return must return floats of shape (1, 24), "
        "got NoneType"
    )


def test_an_error_of_the_model_is_not_the_failure_of_a_processor():
    with pytest.raises(RuntimeError, match="There is no Stream"):
        sample(broken_row(), make_request(logits_processors=[lambda _, row: row]))


def test_an_interrupt_in_a_processor_is_not_its_failure():
    def interrupted(_, logits):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(make_logits(), make_request(logits_processors=[interrupted]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_that_bans_every_token_fails_its_request_and_no_other(temperature: float):
    logits = make_logits(2)
    ban = dict.fromkeys(range(VOCAB), -INF)
    error, result = sample(
        logits, make_request(logit_bias=ban, temperature=temperature), make_request()
    )
    assert isinstance(error, ArgumentError) and error.argument == "logit_bias"
    assert "logit_bias allows no token" in str(error)
    assert result == SampledToken(logits[1].argmax().item())
    # The first thing that went wrong is what is told.
    error, _ = sample(
        logits, make_request(logit_bias=ban, logits_processors=[raises]), make_request()
    )
    assert str(error) == "a user's own mistake"
