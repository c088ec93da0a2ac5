"""Scores that are capped, ``cap * tanh(score / cap)`` (Gemma 2), in plain MLX."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import pytest
from helpers.backends import DECODING, GATHERING, REFERENCE
from helpers.cache_helpers import KINDS
from helpers.numpy_attention import (
    DTYPES,
    assert_matches_formula,
    before_the_step,
    make_problem,
    to_float64,
)
from mlx_lm.models import gemma2

from mlx_paged.cache import KVCacheConfig, LayerSpec, Sequences
from mlx_paged.ops import AttentionParams, prefill

# Scores are up to 15 here, so that a cap of 5 cuts most of each and one of 50 bends them.
SCALE = 0.5


@pytest.mark.parametrize("backend", [DECODING, GATHERING, REFERENCE], ids=["decode", "gather", "-"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("softcap", "window", "sinks"), [(5.0, None, False), (50.0, 25, True)])
def test_capped_scores_match_the_formula(backend, dtype, softcap, window, sinks):
    problem = make_problem(
        [12, 300, 40, 17],
        [12, 30, 1, 2],
        group=3,
        dtype=dtype,
        scale=SCALE,
        softcap=softcap,
        window=window,
        sinks=sinks,
    )
    assert_matches_formula(backend.attend(*problem.args), problem)


@pytest.mark.parametrize("window", [None, 40])
def test_a_run_that_is_computed_in_pieces_matches_the_formula(window, monkeypatch):
    monkeypatch.setattr(prefill, "CAPPED_QUERIES", 16)
    problem = make_problem([100, 33], [50, 33], scale=SCALE, softcap=5.0, window=window, sinks=True)
    assert_matches_formula(GATHERING.attend(*problem.args), problem)


def test_new_rows_are_capped_as_stored_ones():
    problem = make_problem([12, 300], [12, 1], scale=SCALE, softcap=5.0)
    kv, k, v = before_the_step(problem)
    out = REFERENCE.update_and_attend(problem.q, k, v, kv, *problem.args[2:])
    assert_matches_formula(out, problem)


def test_a_high_cap_changes_nothing_and_a_low_one_makes_all_keys_alike():
    problem = make_problem([40], 1)
    params = problem.params
    plain, high, low = (
        to_float64(REFERENCE.attend(*problem.args[:3], replace(params, softcap=softcap)))
        for softcap in (None, 1e6, 1e-6)
    )
    assert abs(plain - high).max() < 1e-5
    _, _, values = problem.dense[0]
    mean = to_float64(values).mean(axis=0).repeat(2, axis=0)
    assert abs(low[0] - mean).max() < 1e-5


@pytest.mark.parametrize("backend", [DECODING, GATHERING], ids=["decode", "gather"])
def test_attention_is_that_of_gemma_2_in_mlx_lm(backend):
    cap, width, context_len, query_len = 5.0, 32, 30, 4
    problem = make_problem([context_len], query_len, head_dim=width, scale=SCALE, softcap=cap)
    q, k, v = problem.dense[0]
    args = gemma2.ModelArgs("gemma2", width, 1, 8, 4, width, 1e-6, 8, 2)
    args.query_pre_attn_scalar, args.attn_logit_softcapping = SCALE**-2, cap
    layer = gemma2.Attention(args)

    # mlx-lm's layer with nothing but attention in it: the projections hand out what they are given.
    def heads_last(rows: mx.array) -> mx.array:
        return rows.reshape(1, rows.shape[0], -1)

    layer.q_proj, layer.k_proj, layer.v_proj = (
        lambda _, rows=rows: heads_last(rows) for rows in (q, k[-query_len:], v[-query_len:])
    )
    layer.o_proj, layer.rope = (lambda out: out), (lambda x, offset: x)
    cache = SimpleNamespace(
        offset=0,
        update_and_fetch=lambda *_: tuple(rows.swapaxes(0, 1)[None] for rows in (k, v)),
    )
    positions = mx.arange(context_len)
    mask = positions[-query_len:, None] >= positions
    expected = layer(mx.zeros((1, query_len, width)), mask, cache).reshape(query_len, 4, width)
    out = backend.attend(*problem.args)
    assert mx.allclose(out, expected, rtol=0, atol=1e-5).item()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("reads_again", [False, True], ids=["written", "shared"])
def test_a_layer_of_a_cache_caps_its_scores(kind, reads_again):
    problem = make_problem([20, 33], [3, 33], scale=SCALE, softcap=5.0)
    spec = LayerSpec(2, 64, 64, softcap=5.0, format=problem.kv.format)
    seqs = Sequences(kind(KVCacheConfig((spec,), 16, num_blocks=9)))
    _, k, v = problem.dense[0]
    seqs.append("0", k[None, :17], v[None, :17])
    _, new_k, new_v = before_the_step(problem)
    with seqs.step({"0": 3, "1": 33}):
        (layer,) = seqs.cache.layers
        if reads_again:
            layer.update(new_k, new_v)
            out = layer.attend(problem.q, scale=SCALE)
        else:
            out = layer.update_and_attend(problem.q, new_k, new_v, scale=SCALE)
        mx.eval(out, seqs.cache.arrays)
    assert_matches_formula(out, problem)


@pytest.mark.parametrize("softcap", [0.0, -50.0, float("inf"), float("nan")])
def test_a_cap_that_is_not_above_zero_is_refused_by_name(softcap):
    problem = make_problem([17], 1)
    params = AttentionParams(1.0, softcap=softcap)
    with pytest.raises(ValueError, match=rf"\[attend\] softcap: .* positive .*got {softcap}"):
        REFERENCE.attend(*problem.args[:3], params)


@pytest.mark.parametrize("softcap", [0, -50.0, True, "50", float("nan")], ids=repr)
def test_a_layer_whose_cap_is_no_positive_number_is_refused(softcap):
    with pytest.raises(ValueError, match=r"\[kv cache\] softcap must be a positive number"):
        LayerSpec(2, 64, 64, softcap=softcap)
