"""Heads that draft from the hidden rows of the model's steps, on further layers of its blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers.disk_tiers import tiered
from helpers.drafting import eager_drafts
from helpers.engine_runs import CONFIG, answer, greedy, make_engine, prompt, replays_of, sampled
from helpers.model_zoo import config_of, make_from_config
from helpers.workloads import Run, Workload, assert_all_same_but_aborts, assert_same
from mlx.nn import Identity, Module
from mlx.utils import tree_flatten
from paged_testing.pure_metal import pure_metal

from mlx_paged import StructuredOutputsParams
from mlx_paged.cache import KVCacheConfig, PagedKVCache, Sequences
from mlx_paged.engine import compiled_decode
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.request import Completion
from mlx_paged.engine.speculation import draft_model, head_drafter
from mlx_paged.errors import ArgumentError
from mlx_paged.models import qwen3
from mlx_paged.models.language_model import HiddenRows, LanguageModel, model_type_of
from mlx_paged.models.mlx_lm import check_model
from mlx_paged.models.mlx_lm.draft_head import LAYOUTS, DraftHead, text_model

KINDS = [
    "qwen3",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v3",
]
OTHERS = ["step3p5", "mimo", "mimo_v2_flash", "ernie4_5_moe", "longcat_flash", "nemotron_h"]

# What the families' sources say, apart from the table of layouts.
OF_ROWS_BEFORE_THE_LAST_NORM = {"step3p5", "mimo", "mimo_v2_flash"}
CARRYING_ROWS_BEFORE_THE_END_NORM = OF_ROWS_BEFORE_THE_LAST_NORM | {"ernie4_5_moe"}
HIDDEN_ROW_FIRST = {"mimo"}
WITH_THE_LAST_NORM_AT_THE_END = {"ernie4_5_moe"}
WINDOWS = {"step3p5": 8, "mimo_v2_flash": 8}


@cache
def pair(kind: str, **changes: int) -> tuple[LanguageModel, DraftHead]:
    """A small model and a head for it, both with random weights."""
    mx.random.seed(7)
    model: Module
    if kind == "qwen3":
        model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG | {"head_dim": 32}))
        mx.eval(model.parameters())
    else:
        config = config_of(kind) | changes
        if kind == "step3p5":
            config["layer_types"].append("sliding_attention")  # of the head
        model = make_from_config(config)
    checked = check_model(model)
    head = DraftHead(checked, LAYOUTS[model_type_of(checked)])
    mx.eval(head.parameters())
    return checked, head


class FirstDrafts:
    """The logits of the first draft of each round, and the tokens that they follow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seen: list[tuple[list[int], np.ndarray]] = []
        draw = draft_model.draw_drafts

        def recording(
            logits: mx.array, completions: Sequence[Completion], number: int, *readers: Any
        ) -> mx.array:
            if number == 0:
                rows = np.array(logits.astype(mx.float32))
                self.seen += [
                    (list(each.token_ids), row)
                    for each, row in zip(completions, rows, strict=False)
                ]
            return draw(logits, completions, number, *readers)

        monkeypatch.setattr(draft_model, "draw_drafts", recording)


def of_whole_text(model: LanguageModel, head: DraftHead, token_ids: Sequence[int]) -> np.ndarray:
    """The head's logits after each of these tokens, ``[num_tokens, vocab_size]``: mlx-lm's own
    model and layer on all tokens at once, without a cache.
    """
    kind, decoder, tokens = model_type_of(model), decoder_of(model), mx.array(token_ids)
    name = "norm_f" if "norm_f" in decoder else "norm"
    norm = decoder[name]
    if kind in OF_ROWS_BEFORE_THE_LAST_NORM:
        decoder[name] = Identity()
    hidden = decoder(tokens[None])[0]
    decoder[name] = norm
    hidden = mx.concatenate([mx.zeros_like(hidden[:1]), hidden[:-1]])
    logits, _ = of_pairs(model, head, tokens, hidden)
    return np.array(logits.astype(mx.float32))


def of_pairs(
    model: LanguageModel, head: DraftHead, tokens: mx.array, hidden: mx.array
) -> tuple[mx.array, mx.array]:
    """The head's logits after each of these tokens with its hidden row, and the rows for the next
    drafts.
    """
    kind, text, decoder = model_type_of(model), text_model(model), decoder_of(model)
    embed = decoder["embeddings" if "embeddings" in decoder else "embed_tokens"]
    both = [head.embedding_norm(embed(tokens)), head.hidden_norm(hidden)]
    if kind in HIDDEN_ROW_FIRST:
        both.reverse()
    distance = mx.arange(len(tokens))[:, None] - mx.arange(len(tokens))
    mask = (distance >= 0) & (distance < WINDOWS.get(kind, len(tokens)))
    x = head.projection(mx.concatenate(both, axis=-1))
    rows = head.layer(x[None], mask=mask, cache=None)[0]
    normed = (decoder["norm"] if kind in WITH_THE_LAST_NORM_AT_THE_END else head.end_norm)(rows)
    logits = text.lm_head(normed) if "lm_head" in text else embed.as_linear(normed)
    return logits, rows if kind in CARRYING_ROWS_BEFORE_THE_END_NORM else normed


def decoder_of(model: LanguageModel) -> Module:
    text = text_model(model)
    decoder: Module = text["backbone" if "backbone" in text else "model"]
    return decoder


def check(drafts: FirstDrafts, models: tuple[LanguageModel, DraftHead], at_least: int) -> None:
    model, head = models
    assert len(drafts.seen) >= at_least
    text: list[int] = []
    for token_ids, logits in sorted(drafts.seen, key=itemgetter(0), reverse=True):
        if text[: len(token_ids)] != token_ids:
            text, expected = token_ids, of_whole_text(model, head, token_ids)
        np.testing.assert_allclose(logits, expected[len(token_ids) - 1], rtol=1e-3, atol=1e-3)
    drafts.seen.clear()


def workload(kind: str) -> Workload:
    return Workload(41, 16, pair(kind)[0].args.vocab_size)


@cache
def without_a_head(kind: str) -> Run:
    return workload(kind).run(pair(kind)[0], run_ahead=False)


@pytest.mark.parametrize(
    ("kind", "is_ahead"),
    [
        *itertools.product(KINDS, (False, True)),
        *((kind, False) for kind in ("step3p5", "ernie4_5_moe", "longcat_flash", "nemotron_h")),
    ],
)
def test_answers_are_those_without_a_head(
    kind: str, is_ahead: bool, monkeypatch: pytest.MonkeyPatch
):
    """Chunks, prefix hits, forks, preemption, swapping, penalties and draws, in one workload. No
    hidden row and no K/V of the head is missing, whatever has happened to a request.
    """
    model, head = pair(kind)
    drafts = FirstDrafts(monkeypatch)
    drafting = workload(kind).run(
        model, draft_model=head, speculation=eager_drafts, run_ahead=is_ahead
    )
    assert_all_same_but_aborts(drafting, without_a_head(kind))
    stats = drafting.engine.stats()
    assert 0 < stats.spec_decoding.num_accepted_tokens < stats.spec_decoding.num_draft_tokens
    if kind != "qwen3":  # This package's own, whose layers have no class of mlx-lm's.
        check(drafts, (model, head), 21)


@pytest.mark.parametrize("kind", [*KINDS[1:], *OTHERS])
def test_a_second_draft_is_of_the_row_that_the_first_one_gives(kind: str):
    model, head = pair(kind)
    sequences = Sequences(PagedKVCache(KVCacheConfig(tuple(head.layer_specs))))
    tokens, hidden = mx.array(prompt(12)), mx.random.normal((12, head.hidden_size))
    for number in range(2):
        new = slice(11, 12) if number else slice(0, 11)
        with sequences.step({"a": len(tokens[new])}, [1]):
            logits, row = head.draft(tokens[new], hidden[new], sequences.cache.layers)
            mx.eval(logits, row, sequences.cache.arrays)
        expected, carried = of_pairs(model, head, tokens[: 11 + number], hidden[: 11 + number])
        assert mx.allclose(logits[0], expected[-1], rtol=1e-3, atol=1e-3)
        assert mx.allclose(row[0], carried[-1], rtol=1e-3, atol=1e-3)
        hidden[11] = carried[-1]


def test_a_head_keeps_to_grammars(demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch):
    """Its first draft is that of the whole text also after a step whose drafts were forced."""
    tokenizer = demo[1]
    model, head = pair("glm4_moe", vocab_size=len(tokenizer))
    drafts = FirstDrafts(monkeypatch)
    words = StructuredOutputsParams(regex="(name: [a-z]{1,9}, [0-9]{2}. ){30}")
    params = sampled(2, 50, structured_outputs=words, n=2)
    engines = make_engine(model, tokenizer), make_engine(model, tokenizer, draft_model=head)
    engines[1].scheduler.speculation = eager_drafts(engines[1])
    plain, drafting = (answer(engine, "Once upon a time", params) for engine in engines)
    assert_same(drafting, plain)
    assert engines[1].stats().spec_decoding.num_accepted_tokens > 20
    check(drafts, (model, head), 5)


# Where K/V come from


@pytest.mark.parametrize("kind", ["glm4_moe", "qwen3_5"])
def test_after_a_restart_drafts_begin_with_the_row_before_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, head = pair(kind)
    drafts = FirstDrafts(monkeypatch)
    tokens = prompt(70)
    for num_read in (0, 64):
        with tiered(model, tmp_path, draft_model=head) as engine:
            engine.scheduler.speculation = eager_drafts(engine)
            assert answer(engine, tokens, greedy(20)).num_read_tokens == num_read
        check(drafts, (model, head), 3)


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_a_snapshot_holds_what_the_head_needs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, head = pair(kind)
    drafts = FirstDrafts(monkeypatch)
    tokens = prompt(70)
    first, second = (make_engine(model, draft_model=head) for _ in range(2))
    for engine in (first, second):
        engine.scheduler.speculation = eager_drafts(engine)
    whole = answer(first, tokens, greedy(20))
    first.save_snapshot(tmp_path / "a", [*tokens, *whole.outputs[0].token_ids])
    second.load_snapshot(tmp_path / "a")
    drafts.seen.clear()
    again = answer(second, tokens, greedy(20))
    assert again.num_cached_tokens == 64
    assert again.outputs[0].token_ids == whole.outputs[0].token_ids
    check(drafts, (model, head), 5)


def test_replayed_decodes_give_their_hidden_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled_decode, "NUM_BUILT_FIRST", 0)
    model, head = pair("qwen3")
    drafts = FirstDrafts(monkeypatch)

    def drafted(engine: Engine) -> tuple[list[int], list[tuple[list[int], np.ndarray]]]:
        engine.scheduler.speculation = eager_drafts(engine, 2)
        drafts.seen.clear()
        return answer(engine, prompt(30), greedy(40)).outputs[0].token_ids, list(drafts.seen)

    built = drafted(make_engine(model, draft_model=head))
    with pure_metal():
        engine = make_engine(model, draft_model=head)
        replays = replays_of(engine)
        replayed = drafted(engine)
    assert sum(replays) >= 3
    assert replayed[0] == built[0]
    # Which steps have drafts depends on whether steps run ahead.
    expected = {len(token_ids): logits for token_ids, logits in built[1]}
    both = [(expected[len(ids)], logits) for ids, logits in replayed[1] if len(ids) in expected]
    assert len(both) >= 3
    for ours, theirs in both:
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)


def test_its_layer_and_its_rows_count_in_the_budget():
    model, head = pair("glm4_moe")
    alone = make_engine(model, kv_cache_bytes="1M").cache.config
    both = make_engine(model, kv_cache_bytes="1M", draft_model=head).cache.config
    size, block_size = head.hidden_size, both.block_size
    of_layer = head.layer_specs[0].nbytes_per_token * block_size
    assert both.nbytes_per_block == alone.nbytes_per_block + of_layer + size * 4
    assert both.nbytes <= 2**20 and both.num_blocks < alone.num_blocks


# What is refused, and what is noticed


def test_what_a_head_can_not_draft_for_is_refused_by_name():
    model, head = pair("glm4_moe")
    other, _ = pair("qwen3_5")
    with pytest.raises(ArgumentError, match="draft_model is a head of another model"):
        make_engine(other, draft_model=head)
    with pytest.raises(ArgumentError, match="draft_model needs kv='paged'"):
        make_engine(model, draft_model=head, kv="basic")
    with pytest.raises(ArgumentError, match="window can't be combined with draft_model"):
        make_engine(model, draft_model=head, window=64)


def test_a_head_that_does_not_fit_is_noticed_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(head_drafter, "NUM_COUNTED", 20)
    model, head = pair("glm4_moe")
    engine = make_engine(model, draft_model=head)
    engine.scheduler.speculation = eager_drafts(engine, 2)
    with pytest.warns(UserWarning, match="of the first 20 drafts of the head") as caught:
        for seed in range(3):
            answer(engine, prompt(20, seed), greedy(40))
    assert len(caught) == 1


def add_one_to_norms(head: DraftHead, _: pytest.MonkeyPatch) -> None:
    norms = [(name, each + 1) for name, each in tree_flatten(head.parameters()) if each.ndim == 1]
    head.load_weights(norms, strict=False)


def take_rows_before_the_last_norm(_: DraftHead, monkeypatch: pytest.MonkeyPatch) -> None:
    take = HiddenRows.take
    monkeypatch.setattr(HiddenRows, "take", lambda self, x, normed: take(self, normed, x))


@pytest.mark.parametrize("plant", [add_one_to_norms, take_rows_before_the_last_norm])
def test_a_fault_that_acceptance_hardly_shows_changes_logits(
    plant: Callable[[DraftHead, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    """Of a trained head with such a fault, as many drafts are accepted: it is seen here."""
    model, head = pair("qwen3_5")
    wrong = DraftHead(model, head.layout)
    wrong.load_weights(tree_flatten(head.parameters()))
    plant(wrong, monkeypatch)
    drafts = FirstDrafts(monkeypatch)
    engine = make_engine(model, draft_model=wrong)
    engine.scheduler.speculation = eager_drafts(engine)
    answer(engine, prompt(30), greedy(30))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(drafts, (model, head), 3)
