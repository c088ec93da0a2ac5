"""Every architecture of mlx-lm's, tiny and random, in an engine: its tokens and their
log-probabilities are those of mlx-lm, and it runs in the way that ``docs/guide/models.md`` says.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping

import mlx.core as mx
import mlx_lm
import pytest
from helpers.model_zoo import ARCHITECTURES, config_of, make
from helpers.model_zoo.answers import answers_of
from helpers.model_zoo.models import METAL_KERNELS
from helpers.model_zoo.page import Row, rows_on_page, run, version_on_page, with_clear_answers
from mlx.nn import Module
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged import Engine
from mlx_paged.core.sequence_states import SequenceState, SequenceStates
from mlx_paged.models.mlx_lm import trial
from mlx_paged.models.mlx_lm.packed import PackedModel
from mlx_paged.options.engine_options import EngineOptions

ROWS = rows_on_page()

# Of all kinds.
IN_THE_FAST_LANE = {"deepseek_v3", "gpt_bigcode", "mamba2", "phi3", "plamo3"}
# Of these, mlx-lm's own logits depend on where a prompt is cut.
CUTS_MATTER = {"phi3small", "plamo3"}
# mlx-lm 0.32.2 can't run these on more than one token and a cache.
BROKEN = {"olmo"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in IN_THE_FAST_LANE else pytest.mark.slow)
        for name in ARCHITECTURES
    ],
)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(architecture: str, request: pytest.FixtureRequest) -> Module:
    if architecture in METAL_KERNELS:
        request.getfixturevalue("compiler")  # skips where the emulator can't compile them
    return make(architecture)


def test_tokens_are_those_of_mlx_lm_and_the_page_says_how_it_runs(architecture: str, model: Module):
    found = _without_numbers(run(architecture, model))
    assert found == _without_numbers(ROWS[architecture]), "write the page again"


@pytest.mark.slow
def test_a_state_of_too_few_tokens_shows_in_log_probabilities_where_it_changes_no_token(
    monkeypatch: pytest.MonkeyPatch,
):
    """A planted fault: once, a step goes on from the state before the one before."""
    config = config_of("rwkv7")
    model, expected = with_clear_answers(config)
    num_puts: Counter[Hashable] = Counter()

    def put(states: SequenceStates, newest: Mapping[Hashable, SequenceState]) -> None:
        for seq, state in newest.items():
            num_puts[seq] += 1
            before = states._states[seq] if num_puts[seq] == 7 else state
            states._states[seq] = SequenceState(state.num_tokens, before.content)

    monkeypatch.setattr(SequenceStates, "put", put)
    options: EngineOptions = {"block_size": 8, "max_num_batched_tokens": 7, "max_num_seqs": 4}
    found = answers_of(Engine(PackedModel(model, config), kv_cache_bytes="60blocks", **options))
    assert found.tokens == expected.tokens
    with pytest.raises(AssertionError, match="planted: log-probabilities differ"):
        expected.check(found, "planted")


def _without_numbers(row: Row) -> str:
    """Errors differ in their last digits from machine to machine."""
    return re.sub(r"\d+(\.\d+)?", "N", str(row))


def test_a_tiny_model_is_the_same_in_chunks_and_feels_its_first_token(
    architecture: str, model: Module
):
    tokens = mx.random.randint(0, 256, (1, 30), key=mx.random.key(1))
    others = mx.concatenate([(tokens[:, :1] + 1) % 256, tokens[:, 1:]], axis=1)
    if architecture in BROKEN:
        with pytest.raises(ValueError, match="inplace addition"):
            _logits(model, tokens, [30])
        return
    expected, of_others = (_logits(model, ids, [30]) for ids in (tokens, others))
    spread = mx.std(expected)
    in_chunks = mx.abs(_logits(model, tokens, [11, 1, 1, 11, 6]) - expected).max() / spread
    assert (in_chunks.item() < 1e-4) == (architecture not in CUTS_MATTER)
    assert mx.abs(of_others - expected)[-1].max() > 1e-3 * spread


def _logits(model, tokens: mx.array, chunks: list[int]) -> mx.array:
    """``[num_tokens, vocab_size]``; 0 for tokens that the model never allows."""
    cache, parts, start = make_prompt_cache(model), [], 0
    for size in chunks:
        parts.append(model(tokens[:, start : start + size], cache=cache)[0].astype(mx.float32))
        start += size
    logits = mx.concatenate(parts)
    return mx.where(mx.isneginf(logits), 0, logits)


def test_the_page_has_every_architecture():
    if mlx_lm.__version__ != version_on_page():
        pytest.skip(f"the page is about mlx-lm {version_on_page()}, this is {mlx_lm.__version__}")
    assert list(ROWS) == ARCHITECTURES and len(ROWS) > 120


def test_the_table_of_the_package_is_that_of_the_page():
    assert (version_on_page(),) == trial.MLX_LM_VERSIONS
    for way, names in trial.ARCHITECTURES.items():
        assert names.split() == [name for name, row in ROWS.items() if row.way.startswith(way)]
