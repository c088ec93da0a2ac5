"""All logits of transformers' Qwen3 on small random models; the files are made by
tests/golden/make_qwen3_logits.py.
"""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from helpers.fast_lane import mostly_slow
from helpers.qwen3_helpers import (
    CACHES,
    all_logits,
    chunks,
    float32_tolerance,
    load_model,
    make_cache,
    max_error,
)
from mlx_lm.utils import load_model as load_model_as_mlx_lm

from mlx_paged.cache import Sequences

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3"
CASES = sorted(folder.name for folder in GOLDEN.iterdir())

FEEDS = {
    "whole": lambda tokens: [tokens],
    "in chunks": lambda tokens: chunks(
        tokens, 1, 7, 16, 9
    ),  # ends at 1, 8, 24, 33: within blocks and on their edges
    "token by token": lambda tokens: [[token] for token in tokens],
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    folder = GOLDEN / request.param
    golden = mx.load(str(folder / "golden.safetensors"))
    model = load_model(folder)
    token_ids, logits = golden["token_ids"].tolist(), np.array(golden["logits"])
    tolerance = float32_tolerance(model.args, len(token_ids), logits)
    if mx.default_device() != mx.Device(mx.cpu):
        # A GPU's kernels take a fast sine and shortened products: there mlx-lm's own error is the
        # yardstick.
        theirs = load_model_as_mlx_lm(folder)[0](golden["token_ids"][None])[0]
        tolerance += 2 * max_error(np.array(theirs), logits)
    return model, token_ids, logits, tolerance


def test_the_golden_cases_cover_what_qwen3_may_be():
    configs = {name: json.loads((GOLDEN / name / "config.json").read_text()) for name in CASES}
    heads = {(c["num_attention_heads"], c["num_key_value_heads"]) for c in configs.values()}
    assert {q // kv for q, kv in heads} == {1, 2, 3}
    assert any(kv == 1 for _, kv in heads)
    assert {
        c["head_dim"] * c["num_attention_heads"] == c["hidden_size"] for c in configs.values()
    } == {True, False}
    assert {c["tie_word_embeddings"] for c in configs.values()} == {True, False}
    nested = {c["rope_parameters"]["rope_type"] for c in configs.values() if "rope_parameters" in c}
    assert nested == {"default", "linear", "llama3", "yarn"}
    top_level = [c["rope_scaling"] or {} for c in configs.values() if "rope_theta" in c]
    assert {scaling.get("rope_type", scaling.get("type")) for scaling in top_level} == {
        None,
        "linear",
        "yarn",
    }


@mostly_slow("feed", FEEDS, quick=(1,))
@pytest.mark.parametrize("kind", CACHES)
def test_all_logits_are_those_of_transformers(case, kind, feed):
    model, token_ids, expected, tolerance = case
    steps = [{"seq": piece} for piece in FEEDS[feed](token_ids)]
    logits = all_logits(model, Sequences(make_cache(model, kind)), steps)["seq"]
    assert max_error(logits, expected) <= tolerance


@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_the_block_size_changes_no_logit(case, block_size):
    model, token_ids, expected, tolerance = case
    steps = [{"seq": piece} for piece in FEEDS["in chunks"](token_ids)]
    logits = all_logits(model, Sequences(make_cache(model, "paged", block_size)), steps)["seq"]
    assert max_error(logits, expected) <= tolerance
