"""How often drafts of the demo model's head are right, on questions it was not trained on; and that
a head or an engine with one fault falls below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from helpers.engine_runs import greedy, load_demo, make_engine, run
from mlx.utils import tree_flatten

from benchmarks.lib.held_out import Question, questions
from mlx_paged.cache import KVCacheConfig, PagedKVCache, Sequences
from mlx_paged.engine.request import Completion
from mlx_paged.engine.speculation.head_drafter import HeadDrafter
from mlx_paged.engine.speculation.speculation import Speculation
from mlx_paged.loading import load_draft_model
from mlx_paged.models.language_model import taking_hidden_rows
from mlx_paged.models.mlx_lm.draft_head import DraftHead

TASKS = (
    "copy, 1-10 items",
    "copy, 11-40 items",
    "sequence",
    "count, 4-20 numbers",
    "numbered list, 2-15 lines",
    "arithmetic",
    "says that it does not know",
    "one fact and its question",
    "recall at 128, any fact",
)
LEAST_RIGHT = 0.70  # of first drafts, where each token of the right answer is given
LEAST_ACCEPTED = 0.6  # of first drafts, at temperature 0
LEAST_TOKENS = 2.0  # per step with drafts
NUM_DRAFTS = 3


@cache
def model_and_questions() -> tuple[Any, Any, list[Question]]:
    model, tokenizer = load_demo()
    return model, tokenizer, [each for task in TASKS for each in questions(tokenizer, task, 2)]


def load_head() -> DraftHead:
    model, tokenizer, _ = model_and_questions()
    head = load_draft_model("auto", tokenizer, model)
    assert isinstance(head, DraftHead)
    return head


def share_right(head: DraftHead, rows_late: int = 0, fills_prompt: bool = True) -> float:
    """The share of an answer's tokens, after its first, for which the first draft is the model's
    own choice when it is given all tokens before.

    Args:
        rows_late: by how many tokens each pair's hidden row is too old.
        fills_prompt: whether the head computes K/V of the prompt.
    """
    model, _, asked = model_and_questions()
    right = []
    for question in asked:
        layers = PagedKVCache(KVCacheConfig((*model.layer_specs, *head.layer_specs)))
        sequences = Sequences(layers)
        before = mx.zeros((1 + rows_late, head.hidden_size))
        for tokens in (question.prompt, question.answer):
            size, ids = len(tokens), mx.array(tokens)
            with sequences.step({"a": size}, [size]), taking_hidden_rows(True) as hidden:
                wanted = model(ids, layers.layers[:-1]).argmax(-1)
                assert hidden is not None and hidden.rows is not None
                rows = mx.concatenate([before, hidden.rows])
                before = rows[size:]
                if fills_prompt or tokens is question.answer:
                    drafts = head.draft(ids, rows[:size], layers.layers[-1:])[0].argmax(-1)
        right.append((drafts == wanted)[:-1])
    return mx.concatenate(right).mean().item()


@dataclass(frozen=True)
class Always(Speculation):
    num_draft_tokens: int = NUM_DRAFTS

    def num_drafts(self, completions: Sequence[Completion], *_: Any) -> Sequence[int]:
        return [self.num_draft_tokens] * len(completions)


def in_rounds(head: DraftHead) -> tuple[float, float]:
    """The share of first drafts that an engine accepts at temperature 0, and the tokens of a step
    with drafts.
    """
    model, tokenizer, asked = model_and_questions()
    engine = make_engine(model, tokenizer, draft_model=head, kv_cache_bytes="400blocks")
    drafter = engine.runner.draft_model
    assert drafter is not None
    engine.scheduler.speculation = Always(drafter)
    for number, question in enumerate(asked):
        engine.add_request(str(number), question.prompt, greedy(30))
    run(engine)
    drafts = engine.stats().spec_decoding
    return drafts.acceptance_rate_per_pos[0], drafts.mean_acceptance_length


def test_the_head_is_found_beside_the_weights_and_drafts_well():
    head = load_head()
    assert share_right(head) >= LEAST_RIGHT
    accepted, num_tokens = in_rounds(head)
    assert accepted >= LEAST_ACCEPTED
    assert num_tokens >= LEAST_TOKENS


def swap_halves(head: DraftHead, _: pytest.MonkeyPatch) -> None:
    halves = mx.split(head.projection.weight, 2, axis=-1)
    head.projection.weight = mx.concatenate(halves[::-1], axis=-1)


def subtract_one_from_norms(head: DraftHead, _: pytest.MonkeyPatch) -> None:
    norms = [(name, each - 1) for name, each in tree_flatten(head.parameters()) if each.ndim == 1]
    head.load_weights(norms, strict=False)


def keep_rows_of_the_token_before(_: DraftHead, monkeypatch: pytest.MonkeyPatch) -> None:
    follow = HeadDrafter.follow

    def following(self: Any, batch: Any, tokens: mx.array, hidden: mx.array, *more: Any) -> None:
        follow(self, batch, tokens, mx.concatenate([hidden[:1], hidden[:-1]]), *more)

    monkeypatch.setattr(HeadDrafter, "follow", following)


def leave_out_prompts(_: DraftHead, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = HeadDrafter._compute

    def computing(self: Any, runs: Any, tokens: mx.array, rows: mx.array, *shares: Any) -> Any:
        if any(each.num_logit_rows for each in runs):
            return compute(self, runs, tokens, rows, *shares)
        return rows, None

    monkeypatch.setattr(HeadDrafter, "_compute", computing)


FAULTS: dict[Callable[[DraftHead, pytest.MonkeyPatch], None], dict[str, Any]] = {
    swap_halves: {},
    subtract_one_from_norms: {},
    keep_rows_of_the_token_before: {"rows_late": 1},
    leave_out_prompts: {"fills_prompt": False},
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_one_fault_falls_below_each_bar(
    plant: Callable[[DraftHead, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    head = load_head()
    plant(head, monkeypatch)
    assert share_right(head, **FAULTS[plant]) < LEAST_RIGHT
    accepted, num_tokens = in_rounds(head)
    assert accepted < LEAST_ACCEPTED
    assert num_tokens < LEAST_TOKENS
