"""One budget for K/V blocks, states of running sequences and checkpoints, in engines."""

from __future__ import annotations

import random
from contextlib import nullcontext, suppress
from functools import cache
from typing import Any

import pytest
from helpers.adapted_models import adapted_model, greedy_answer
from helpers.engine_runs import assert_nothing_held, greedy, make_engine, prompt, run
from helpers.fast_lane import mostly_slow
from paged_testing.integrity import check_scheduler
from paged_testing.lazy_metal import lazy_metal

from mlx_paged.engine.engine import Engine
from mlx_paged.errors import ArgumentError, PromptTooLongError
from mlx_paged.ops import StateRow

pytestmark = pytest.mark.filterwarnings("ignore:.*sequences run at once")

BLOCK_SIZE = 8
NUM_QUESTIONS = 16
CHUNKS = {"max_num_batched_tokens": 23, "max_num_mixed_tokens": 11}


def engine_of(name: str, nbytes: int, **options: Any) -> Engine:
    sizes = {"block_size": BLOCK_SIZE, "max_num_seqs": 8, "kv_cache_bytes": nbytes}
    return make_engine(adapted_model(name), **(sizes | CHUNKS | options))


def sizes_of(name: str, **options: Any) -> Any:
    return engine_of(name, 2**24, **options).cache.shared_budget.sizes


def nbytes_of_states(engine: Engine) -> int:
    """All stacks of states that anything refers to, whole, as they are in memory."""
    states = engine.manager.states
    rows: list[StateRow] = [state.content for state in states._states.values()]
    rows += [state.content for state in states._before_drafts.values() if state.content]
    rows += [content for pending in states._pending.values() for _, content in pending]
    rows += [kept.content for kept in states.checkpoints._kept.values()]
    num_states = sum(stack.num_states for stack in {row.stack for row in rows})
    return num_states * engine.cache.config.state_nbytes


class Watch:
    """After each step the budget holds, by its own count and by the arrays that are there."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.most_running = self.most_checkpoints = 0
        self.sizes: set[int] = set()

    def __call__(self) -> None:
        engine, budget = self.engine, self.engine.cache.shared_budget
        assert budget.nbytes_used <= budget.sizes.budget
        assert engine.cache.nbytes_held + nbytes_of_states(engine) <= budget.sizes.budget
        assert engine.cache.pool.num_usable_blocks <= budget.max_num_blocks()
        self.most_running = max(self.most_running, len(engine.scheduler.running))
        self.most_checkpoints = max(self.most_checkpoints, engine.stats().num_checkpoints)
        self.sizes.add(engine.cache.pool.num_usable_blocks)


@pytest.mark.parametrize("num_seqs", [1, 2, 5])
def test_as_many_sequences_run_as_the_budget_holds_with_their_states(num_seqs: int):
    sizes = sizes_of("falcon_h1")
    # 20 tokens each: three blocks.
    nbytes = num_seqs * (sizes.sequence + 3 * sizes.block) + sizes.block
    engine = engine_of("falcon_h1", nbytes, watermark=0.0)
    watch = Watch(engine)
    for number in range(8):
        engine.add_request(str(number), prompt(12, number), greedy(8))
    found = run(engine, watch)
    assert watch.most_running == num_seqs
    for number in range(8):
        expected = greedy_answer("falcon_h1", prompt(12, number), 8)
        assert found[str(number)].outputs[0].token_ids == expected


def test_the_least_budget_runs_one_sequence_and_less_is_refused_with_the_sum():
    sizes = sizes_of("falcon_h1")
    least = sizes.sequence + 2 * sizes.block
    with pytest.raises(ArgumentError) as error:
        engine_of("falcon_h1", least - 1)
    for number in (2 * sizes.block, sizes.sequence, least):
        assert f"{number}" in str(error.value)
    engine = engine_of("falcon_h1", least)
    engine.add_request("a", prompt(5), greedy(3))
    expected = greedy_answer("falcon_h1", prompt(5), 3)
    assert run(engine, Watch(engine))["a"].outputs[0].token_ids == expected


def test_a_prompt_may_take_all_that_one_sequence_leaves_and_no_more():
    sizes = sizes_of("falcon_h1")
    engine = engine_of("falcon_h1", sizes.sequence + 9 * sizes.block)
    engine.add_request("short", prompt(30, 1), greedy(2))
    run(engine, Watch(engine))
    assert engine.stats().num_checkpoints > 0
    tokens = prompt(8 * BLOCK_SIZE, 2)
    engine.add_request("all", tokens, greedy(1))
    expected = greedy_answer("falcon_h1", tokens, 1)
    assert run(engine, Watch(engine))["all"].outputs[0].token_ids == expected
    with pytest.raises(PromptTooLongError, match=f"needs 9 blocks of {BLOCK_SIZE}"):
        engine.add_request("more", prompt(8 * BLOCK_SIZE + 1, 2), greedy(1))


def test_a_prompt_whose_beginning_fills_the_pool_fits_into_what_the_budget_has_left():
    """The blocks that it finds are free, and not free for its other tokens."""
    sizes = sizes_of("falcon_h1")
    engine = engine_of("falcon_h1", sizes.sequence + 12 * sizes.block)
    shared = prompt(33, 1)
    engine.add_request("first", shared, greedy(2))
    run(engine)
    assert engine.cache.pool.num_usable_blocks < 7
    tokens = [*shared[:32], *prompt(22, 2)]
    engine.add_request("second", tokens, greedy(2))
    output = run(engine, Watch(engine))["second"]
    assert output.error is None and output.num_cached_tokens == 32
    assert output.outputs[0].token_ids == greedy_answer("falcon_h1", tokens, 2)


def test_completions_whose_states_do_not_fit_are_refused_with_the_sum():
    sizes = sizes_of("falcon_h1")
    engine = engine_of("falcon_h1", 2 * sizes.sequence + 6 * sizes.block)
    with pytest.raises(ArgumentError, match="4 completions of one prompt of 20 tokens don't fit"):
        engine.add_request("a", prompt(20), greedy(3, n=4))
    engine.add_request("a", prompt(20), greedy(3, n=2))
    expected = greedy_answer("falcon_h1", prompt(20), 3)
    outputs = run(engine, Watch(engine))["a"].outputs
    assert [each.token_ids for each in outputs] == [expected] * 2


def test_slabs_that_cached_kv_have_filled_shrink_for_the_states_of_more_sequences():
    engine = engine_of("falcon_h1", 8 * sizes_of("falcon_h1").sequence)
    sizes, watch = engine.cache.shared_budget.sizes, Watch(engine)
    for number in range(30):  # one after the other
        engine.add_request("alone", prompt(60, number), greedy(3))
        run(engine, watch)
    grown = engine.cache.pool.num_usable_blocks
    assert grown > sizes.max_num_blocks(4)
    tokens = prompt(60, 29)
    asked = {str(number): [*tokens, *prompt(9, number)] for number in range(4)}
    for name, each in asked.items():
        engine.add_request(name, each, greedy(12))
    found = run(engine, watch)
    assert engine.cache.pool.num_usable_blocks < grown and watch.most_running == 4
    for name, each in asked.items():
        assert found[name].outputs[0].token_ids == greedy_answer("falcon_h1", each, 12)
    # What was used last was still there.
    assert found["0"].num_cached_tokens == 56


# Each model meets each way to step, and both seeds.
@mostly_slow(
    ("name", "way", "seed"),
    [
        (name, way, (i + j) % 2)
        for i, name in enumerate(["falcon_h1", "qwen3_next", "mamba2"])
        for j, way in enumerate(["waiting", "ahead", "drafts", "swap"])
    ],
    quick=(0, 1),
)
def test_random_requests_of_tiny_budgets_have_the_tokens_of_mlx_lm(name: str, way: str, seed: int):
    """Prompts that share beginnings, come at any time, and are preempted and aborted."""
    options: dict[str, Any] = {
        "ahead": {"run_ahead": True},
        "drafts": {"num_draft_tokens": 3},
        "swap": {"swap_bytes": "30blocks"},
    }.get(way, {})
    num_preemptions = 0
    # Budgets for a sequence or two, and for several.
    for share in ((1.3, 3.7), (2.2, 6.0))[seed]:
        with lazy_metal(computes=True) if way == "ahead" else nullcontext():
            sizes = sizes_of(name, **options)
            num_kv_blocks = 40 if name == "mamba2" else 12
            nbytes = int(share * sizes.sequence) + num_kv_blocks * sizes.block
            engine = engine_of(name, nbytes, watermark=0.0, **options)
            answer_at_random(engine, name, seed)
        num_preemptions += engine.scheduler.num_preemptions
    assert num_preemptions > 0 or name == "mamba2", "which has no K/V that run out"


def answer_at_random(engine: Engine, name: str, seed: int) -> None:
    draw, watch = random.Random(seed), Watch(engine)
    asked: dict[str, tuple[list[int], int]] = {}
    coming = list(enumerate(questions(name, seed)))
    while coming or engine.has_unfinished_requests():
        for _ in range(draw.choice([0, 0, 1, 3])):
            if coming:
                number, (tokens, length) = coming.pop(0)
                asked[str(number)] = tokens, length
                engine.add_request(str(number), tokens, greedy(length))
        if draw.random() < 0.05 and asked:
            aborted = draw.choice(list(asked))
            engine.abort(aborted)
            asked.pop(aborted)
        for output in engine.step():
            if output.finished and output.request_id in asked:
                tokens, length = asked.pop(output.request_id)
                assert output.error is None
                assert output.outputs[0].token_ids == greedy_answer(name, tokens, length)
                assert output.outputs[0].finish_reason == "length"
        check_scheduler(engine.scheduler)
        watch()
    assert not asked
    assert_nothing_held(engine)


@cache
def questions(name: str, seed: int) -> list[tuple[list[int], int]]:
    """Prompts that share beginnings, and the length of an answer without a near tie, in which
    rounding would decide.
    """
    draw, found = random.Random(seed), []
    shared = [prompt(length, 50 + length) for length in (17, 34, 48)]
    while len(found) < NUM_QUESTIONS:
        begin = draw.choice([*shared, []])
        new = prompt(3 + len(found), draw.randrange(2**20))
        question = [*begin[: draw.randint(0, len(begin))], *new], draw.randint(1, 24)
        with suppress(AssertionError):
            greedy_answer(name, *question)
            found.append(question)
    return found


@pytest.mark.parametrize("run_ahead", [False, True])
def test_another_user_gets_the_states_of_one_of_many_sequences(run_ahead: bool):
    """Where states take the budget, the user with most of them makes way, once."""
    sizes = sizes_of("falcon_h1", run_ahead=run_ahead)
    nbytes = 4 * sizes.sequence + 13 * sizes.block
    engine = engine_of("falcon_h1", nbytes, watermark=0.0, run_ahead=run_ahead)
    watch, prompts = Watch(engine), {}
    for number in range(8):
        prompts[f"ann {number}"] = prompt(12, number)
        engine.add_request(f"ann {number}", prompts[f"ann {number}"], greedy(40), user="ann")
    for _ in range(6):
        engine.step()
        watch()
    num_preemptions = engine.scheduler.num_preemptions
    assert len(engine.scheduler.running) == watch.most_running == 4
    prompts["bob"] = prompt(12, 9)
    engine.add_request("bob", prompts["bob"], greedy(3), user="bob")
    num_steps, found = 0, {}
    while "bob" not in found:
        num_steps += 1
        assert num_steps < 20
        found |= {each.request_id: each for each in engine.step() if each.finished}
        watch()
    # One makes way. Its state is out of memory after the step in flight.
    assert engine.scheduler.num_preemptions <= num_preemptions + 1 and num_steps <= 8
    found |= run(engine, watch)
    for name, tokens in prompts.items():
        expected = greedy_answer("falcon_h1", tokens, 3 if name == "bob" else 40)
        assert found[name].outputs[0].token_ids == expected
