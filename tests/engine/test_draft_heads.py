"""Heads that draft from the hidden rows of the model's steps, on further layers of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from helpers.drafting import EagerSpeculation
from helpers.engine_runs import CONFIG
from helpers.model_zoo import make
from helpers.workloads import Workload, assert_all_same_but_aborts
from mlx.nn import Module

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.request import Completion
from mlx_paged.engine.speculation import head_drafter
from mlx_paged.engine.speculation.speculation import Speculation
from mlx_paged.models import qwen3
from mlx_paged.models.language_model import LanguageModel, model_type_of
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


@cache
def pair(kind: str) -> tuple[LanguageModel, DraftHead]:
    """A small model and a head for it, both with random weights."""
    mx.random.seed(7)
    model: Module
    if kind == "qwen3":
        model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG | {"head_dim": 32}))
        mx.eval(model.parameters())
    else:
        model = make(kind)
    checked = check_model(model)
    head = DraftHead(checked, LAYOUTS[model_type_of(checked)])
    mx.eval(head.parameters())
    return checked, head


def eager(engine: Engine) -> Speculation:
    assert engine.runner.draft_model is not None
    return EagerSpeculation(engine.runner.draft_model, 5)


class FirstDrafts:
    """The logits of the first draft of each round, and the tokens that they follow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seen: list[tuple[list[int], np.ndarray]] = []
        draw = head_drafter.draw_drafts

        def recording(logits: mx.array, completions: Sequence[Completion], number: int) -> mx.array:
            if number == 0:
                rows = np.array(logits.astype(mx.float32))
                self.seen += [
                    (list(each.token_ids), row)
                    for each, row in zip(completions, rows, strict=False)
                ]
            return draw(logits, completions, number)

        monkeypatch.setattr(head_drafter, "draw_drafts", recording)


def of_whole_text(model: LanguageModel, head: DraftHead, token_ids: Sequence[int]) -> np.ndarray:
    """The head's logits after these tokens: mlx-lm's own model and layer on all tokens at once,
    without a cache.
    """
    text, tokens = text_model(model), mx.array(token_ids)
    hidden = text.model(tokens[None])[0]
    hidden = mx.concatenate([mx.zeros_like(hidden[:1]), hidden[:-1]])
    both = head.embedding_norm(text.model.embed_tokens(tokens)), head.hidden_norm(hidden)
    causal = mx.tril(mx.ones((len(tokens), len(tokens)), dtype=mx.bool_))
    x = head.projection(mx.concatenate(both, axis=-1))
    row = head.end_norm(head.layer(x[None], mask=causal, cache=None)[0, -1])
    is_tied = "lm_head" not in text
    logits = text.model.embed_tokens.as_linear(row) if is_tied else text.lm_head(row)
    return np.array(logits.astype(mx.float32))


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_without_a_head(kind: str, is_ahead: bool):
    """Chunks, prefix hits, forks, preemption, swapping, penalties and draws, in one workload."""
    model, head = pair(kind)
    workload = Workload(40 + is_ahead, 20, model.args.vocab_size)
    plain = workload.run(model, run_ahead=False)
    drafting = workload.run(model, draft_model=head, speculation=eager, run_ahead=is_ahead)
    assert_all_same_but_aborts(drafting, plain)
    stats = drafting.engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_drafted_tokens


@pytest.mark.parametrize("seed", [40, 41, 42])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_each_first_draft_is_that_of_the_whole_text(
    kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
):
    """So no hidden row and no K/V is missing, whatever has happened to the request."""
    model, head = pair(kind)
    drafts = FirstDrafts(monkeypatch)
    workload = Workload(seed, 20, model.args.vocab_size)
    workload.run(model, draft_model=head, speculation=eager, run_ahead=bool(seed % 2))
    assert len(drafts.seen) > 20
    for token_ids, logits in drafts.seen:
        expected = of_whole_text(model, head, token_ids)
        np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)
