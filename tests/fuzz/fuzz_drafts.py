"""Requests of every kind, with drafts by the demo model's head: the answers are those without."""

from __future__ import annotations

import random
from functools import cache, partial
from typing import Any

from fuzzing import Case
from helpers.drafting import eager_drafts
from helpers.engine_runs import load_demo
from helpers.workloads import Ask, Workload, assert_all_same_but_aborts

from benchmarks.lib.held_out import questions
from mlx_paged import StructuredOutputsParams
from mlx_paged.loading import load_draft_model

NUM_REQUESTS = 10  # of a case
LONGEST = 110  # tokens of a prompt, of which the smallest pools hold more
# Of whose questions the model knows the answers, so that drafts are accepted.
TASKS = (
    "copy, 1-10 items",
    "sequence",
    "count, 4-20 numbers",
    "arithmetic",
    "recall at 64, any fact",
)
STRUCTURES = ({"regex": "[0-9 ]{4,40}"}, {"regex": "[a-z ]+"}, {"choice": ["The code", "I do"]})
# Of log-probabilities: logits of the demo model are up to 25, where float32's unit of rounding is
# 2e-6, and sums are taken in another order where a step has other rows.
ATOL = 1e-4
# What a structure can't be combined with, or leaves without a token: which of a request's
# completions is the first to fail depends on the steps.
APART = {"allowed_token_ids", "logit_bias", "logits_processors", "min_tokens", "sampler"}
APART.add("stop_token_ids")


@cache
def models() -> tuple[Any, Any, Any, list[list[int]]]:
    """The demo model, its tokenizer, its head, and prompts."""
    model, tokenizer = load_demo()
    head = load_draft_model("auto", tokenizer, model)
    prompts = [each.prompt for task in TASKS for each in questions(tokenizer, task, 12)]
    return model, tokenizer, head, prompts


def drafts_case(rng: random.Random) -> Case:
    model, _, _, prompts = models()
    workload = Workload(rng.randrange(2**32), NUM_REQUESTS, model.args.vocab_size)
    for ask in workload.asks.values():
        if rng.random() < 0.7:
            _ask_for_text(rng, ask, rng.choice(prompts)[-LONGEST:])
    num_drafts, is_ahead = rng.randint(1, 7), rng.random() < 0.5
    title = f"{workload.seed}: {workload.options}, {num_drafts} drafts, ahead: {is_ahead}"
    return Case(title, partial(compare, workload, num_drafts, is_ahead))


def _ask_for_text(rng: random.Random, ask: Ask, prompt: list[int]) -> None:
    ask.tokens = prompt
    if rng.random() < 0.2:
        ask.params["stop"] = rng.choice([["7"], ["an", "5 "], [" the"]])
    if rng.random() < 0.2 and not APART & ask.params.keys():
        structure = StructuredOutputsParams(**rng.choice(STRUCTURES))
        ask.params["structured_outputs"] = structure


def compare(workload: Workload, num_drafts: int, is_ahead: bool) -> None:
    model, tokenizer, head, _ = models()

    plain = workload.run(model, tokenizer, run_ahead=False)
    drafting = workload.run(
        model,
        tokenizer,
        draft_model=head,
        speculation=partial(eager_drafts, num_draft_tokens=num_drafts),
        run_ahead=is_ahead,
    )
    assert_all_same_but_aborts(drafting, plain, ATOL)
    assert drafting.engine.stats().spec_decoding.num_accepted_tokens > 0
