"""Drafts of models with recurrent layers: a sequence falls back to its state before a step with
drafts unless all of them are accepted, and no token, log-probability or end of an answer changes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from helpers.adapted_models import WIDE, adapted_model, greedy_answer
from helpers.adapted_models import config_of as adapted_config_of
from helpers.disk_tiers import tier_stats, tiered
from helpers.drafting import EagerSpeculation, RandomDrafter, eager_drafts, eager_speculation, knows
from helpers.engine_runs import (
    CONFIG,
    VOCAB_SIZE,
    answer,
    ask,
    ask_alone,
    assert_nothing_held,
    greedy,
    livelier_model,
    load_demo,
    make_engine,
    prompt,
    run,
    sampled,
)
from helpers.model_zoo import config_of, make, make_from_config
from helpers.workloads import Workload, assert_all_same_but_aborts
from paged_testing.lazy_metal import lazy_metal

from mlx_paged import StructuredOutputsParams
from mlx_paged.cache.step_states import forget_before
from mlx_paged.core import SequenceState, SequenceStates
from mlx_paged.engine.request import Completion
from mlx_paged.engine.speculation import draft_model
from mlx_paged.engine.speculation.speculation import MAX_RUN, Drafter
from mlx_paged.engine.speculation.step_costs import cost_of
from mlx_paged.errors import ArgumentError
from mlx_paged.models.kv_cache import make_kv_cache
from mlx_paged.models.mlx_lm import adapt
from mlx_paged.models.mlx_lm.packed import PackedModel
from mlx_paged.ops import StateStack, StepState

ARCHITECTURES = (
    "qwen3_5",
    "nemotron_h",
    "granitemoehybrid",
    "lfm2",
    "falcon_h1",
    "kimi_linear",
    "jamba",
)


# Random requests of every kind


@pytest.mark.slow
@pytest.mark.parametrize(("number", "architecture"), enumerate(ARCHITECTURES))
def test_requests_of_every_kind_get_the_same_as_without(number: int, architecture: str):
    """Sampled, with penalties and processors, n > 1, stops, log-probabilities; they join and leave,
    come in chunks, are preempted, swapped and computed again from checkpoints.
    """
    model = adapt(make(architecture), config_of(architecture))
    workload = Workload(30, 20, VOCAB_SIZE)
    plain = workload.run(model, run_ahead=False)
    speculation = eager_speculation(model.args.vocab_size, knows(plain.answers), number)
    drafting = workload.run(model, speculation=speculation, run_ahead=number % 2 == 0)
    assert_all_same_but_aborts(drafting, plain)
    stats = drafting.engine.stats()
    drafts = stats.spec_decoding
    assert 100 <= drafts.num_accepted_tokens < drafts.num_draft_tokens, stats
    assert stats.num_preemptions >= 1 and stats.num_checkpoints >= 5, stats


def test_requests_of_some_kinds_get_the_same_as_without():
    model = adapted_model("lfm2")
    workload = Workload(31, 8, VOCAB_SIZE)
    plain = workload.run(model, run_ahead=False)
    speculation = eager_speculation(VOCAB_SIZE, knows(plain.answers))
    drafting = workload.run(model, speculation=speculation, run_ahead=True)
    assert_all_same_but_aborts(drafting, plain)
    assert drafting.engine.stats().spec_decoding.num_accepted_tokens > 0


def plant_a_state_that_stays(patch: pytest.MonkeyPatch) -> None:
    """The state of drafts that were not accepted is kept, as that of the tokens before them."""
    trim = SequenceStates.trim

    def kept(states: SequenceStates, seq: Any, num_tokens: int) -> int:
        newest = states._states[seq]
        num_kept = trim(states, seq, num_tokens)
        states._states[seq] = SequenceState(num_kept, newest.content)
        return num_kept

    patch.setattr(SequenceStates, "trim", kept)


def plant_tokens_that_are_not_repeated(patch: pytest.MonkeyPatch) -> None:
    """A sequence goes on from the state before a step, without the tokens of that."""
    trim = SequenceStates.trim

    def skipped(states: SequenceStates, seq: Any, num_tokens: int) -> int:
        trim(states, seq, num_tokens)
        states._states[seq] = SequenceState(num_tokens, states._states[seq].content)
        return num_tokens

    patch.setattr(SequenceStates, "trim", skipped)


@pytest.mark.parametrize("plant", [plant_a_state_that_stays, plant_tokens_that_are_not_repeated])
def test_a_planted_fault_changes_tokens(plant: Any, monkeypatch: pytest.MonkeyPatch):
    model = adapted_model("lfm2")
    workload = Workload(31, 8, VOCAB_SIZE)
    plain = workload.run(model, run_ahead=False)
    plant(monkeypatch)
    speculation = eager_speculation(VOCAB_SIZE, knows(plain.answers))
    with pytest.raises(AssertionError):
        assert_all_same_but_aborts(workload.run(model, speculation=speculation), plain)


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["8", "K:8,V:4"])
@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next"])
def test_quantised_kv_gets_the_same_as_without(name: str, kv_format: str):
    model = adapted_model(name)
    workload = Workload(301, 15, VOCAB_SIZE)
    plain = workload.run(model, run_ahead=False, kv_format=kv_format)
    speculation = eager_speculation(VOCAB_SIZE, knows(plain.answers))
    drafting = workload.run(model, speculation=speculation, kv_format=kv_format)
    assert_all_same_but_aborts(drafting, plain)
    assert drafting.engine.stats().spec_decoding.num_accepted_tokens > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["falcon_h1", "mamba2"])
def test_kernels_verify_runs_behind_replayed_decodes(name: str):
    """mamba2 keeps no K/V."""
    model = adapted_model(name)
    workload = Workload(50, 15, VOCAB_SIZE)
    plain = workload.run(model, run_ahead=False)
    with lazy_metal(computes=True):
        drafting = workload.run(
            model, speculation=eager_speculation(VOCAB_SIZE, knows(plain.answers))
        )
    assert drafting.engine.cache.backend.name == "metal"
    assert_all_same_but_aborts(drafting, plain)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
def test_a_draft_model_makes_drafts_for_a_model_with_states(ahead: bool):
    model, draft_model = adapted_model("falcon_h1"), livelier_model(CONFIG)

    workload = Workload(43, 15, VOCAB_SIZE)
    plain = workload.run(model, run_ahead=False)
    drafting = workload.run(
        model, draft_model=draft_model, speculation=eager_drafts, run_ahead=ahead
    )
    assert_all_same_but_aborts(drafting, plain)
    stats = drafting.engine.stats()
    assert 0 < stats.spec_decoding.num_accepted_tokens < stats.spec_decoding.num_draft_tokens


@pytest.mark.parametrize("name", ["falcon_h1", "mamba2", "qwen3_next"])
def test_a_recurrent_model_that_makes_its_own_drafts_is_always_right(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    """Its states are those of the known tokens after chunks, forks and prefix hits, and after
    drafts that were rejected: the third of each round is spoiled.
    """
    draw = draft_model.draw_drafts

    def spoiling(logits: mx.array, completions: Any, number: int, *readers: Any) -> mx.array:
        tokens = draw(logits, completions, number, *readers)
        return (tokens + 1) % VOCAB_SIZE if number == 2 else tokens

    monkeypatch.setattr(draft_model, "draw_drafts", spoiling)
    model = adapted_model(name)
    engine = make_engine(
        model, draft_model=model, max_num_seqs=4, max_num_batched_tokens=24, block_size=8
    )
    engine.scheduler.speculation = eager_drafts(engine)
    asks = {
        "first": (prompt(50), sampled(3, 30, n=2)),
        "the same": (prompt(50), greedy(30)),
        "longer": ([*prompt(50), *prompt(20, 1)], greedy(30)),
    }
    for request_id, (tokens, params) in asks.items():
        engine.add_request(request_id, tokens, params)
        engine.add_request(f"beside {request_id}", prompt(9, 7), greedy(12))
        output = run(engine)[request_id]
        plain = ask(make_engine(model), {request_id: (tokens, params)})
        assert output.outputs[0].token_ids == plain[request_id]
    assert engine.stats().num_hit_tokens >= 96
    drafts = engine.stats().spec_decoding
    first, second, third = drafts.num_accepted_tokens_per_pos[:3]
    assert (first, second) == drafts.num_draft_tokens_per_pos[:2] and third == 0 < second


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_a_recurrent_draft_model_gets_the_same_as_without(name: str, ahead: bool):
    model = adapted_model(name)
    config = adapted_config_of(name)
    other = PackedModel(make_from_config(config, seed=1), config)
    workload = Workload(43, 15, VOCAB_SIZE)

    plain = workload.run(model, run_ahead=False)
    drafting = workload.run(model, draft_model=other, speculation=eager_drafts, run_ahead=ahead)
    assert_all_same_but_aborts(drafting, plain)
    assert drafting.engine.stats().spec_decoding.num_draft_tokens > 100


@pytest.mark.parametrize("name", ["falcon_h1", "mamba2"])
def test_a_cache_beside_a_draft_model_knows_the_states_of_the_model(name: str):
    model, draft_model = adapted_model(name), livelier_model(CONFIG)
    config = make_kv_cache(model, draft_model=draft_model).config
    assert config.state_nbytes == model.state_nbytes > 0
    assert config.state_layout == model.state_layout
    assert config.keeps_kv  # a model without K/V has those of the draft model beside it


def test_checkpoints_beside_a_draft_model_are_counted_and_saved_as_states(tmp_path: Path):
    model, tokens = adapted_model("falcon_h1"), prompt(42)
    options = {"draft_model": livelier_model(CONFIG), "block_size": 8}
    with tiered(model, tmp_path, **options) as engine:
        answer(engine, tokens, greedy(4))
        stats = engine.stats()
        assert stats.nbytes_checkpoints == stats.num_checkpoints * model.state_nbytes > 0
    with tiered(model, tmp_path, **options) as engine:
        output = answer(engine, tokens, greedy(4))
        assert output.num_cached_tokens == 40 and tier_stats(engine).num_read_states == 1


@pytest.mark.parametrize("name", ["falcon_h1", "mamba2"])
def test_a_snapshot_saved_beside_a_draft_model_is_loaded_with_its_state(name: str, tmp_path: Path):
    model, tokens = adapted_model(name), prompt(50)
    options = {"draft_model": livelier_model(CONFIG), "block_size": 8}
    old, new = (make_engine(model, **options) for _ in range(2))
    told = [*tokens, *answer(old, tokens, greedy(12)).outputs[0].token_ids]
    num_saved = old.save_snapshot(tmp_path / "a", told)
    assert num_saved >= 48 and new.load_snapshot(tmp_path / "a") == told[:num_saved]
    more = [*told, *prompt(9, 4)]
    output = answer(new, more, greedy(12))
    assert output.num_cached_tokens == num_saved
    assert output.outputs[0].token_ids == greedy_answer(name, more, 12)


@pytest.mark.slow
def test_structured_answers_are_the_same_as_without():
    _, tokenizer = load_demo()
    config = adapted_config_of("lfm2") | {"vocab_size": len(tokenizer)}
    model = PackedModel(make_from_config(config), config)
    regex = StructuredOutputsParams(regex="([a-z]{2,6} ){4,9}[0-9]{3}")
    found: list[dict[Any, list[int]]] = []
    for has_drafts in (False, True):
        engine = make_engine(model, tokenizer, kv_cache_bytes="14blocks", swap_bytes=0)
        if has_drafts:
            engine.scheduler.speculation = eager_speculation(len(tokenizer), knows(found[0]))
        for number in range(6):
            params = sampled(number, 60, structured_outputs=regex, n=1 + number % 2)
            engine.add_request(str(number), f"The code of apple {number}", params)
        outputs = run(engine)
        completions = {
            (name, each.index): each for name, out in outputs.items() for each in out.outputs
        }
        found.append({name: completion.token_ids for name, completion in completions.items()})
        assert {completion.finish_reason for completion in completions.values()} == {"stop"}
        assert_nothing_held(engine)
    assert found[0] == found[1]
    assert engine.stats().spec_decoding.num_accepted_tokens > 20


# What the engine keeps of a run


@pytest.mark.parametrize(("size", "rare"), [(8, "fell back to the end of a block"), (16, "folded")])
def test_computed_tokens_and_named_blocks_end_where_the_state_is(size: int, rare: str):
    """A run that completes a block has drafts, too: if they are rejected, the sequence falls back
    to the end of the block, at which others may go on.
    """
    model = adapted_model("falcon_h1")
    asks = {str(number): (prompt(9 + number, number), greedy(40)) for number in range(3)}
    answers = {(name, 0): ask_alone(model, *ask) for name, ask in asks.items()}
    engine = make_engine(model, block_size=size, run_ahead=False)
    engine.scheduler.speculation = eager_speculation(VOCAB_SIZE, knows(answers), seed=1)
    for name, (tokens, params) in asks.items():
        engine.add_request(name, tokens, params)
    manager, events, launch = engine.manager, Counter[str](), engine.runner.launch
    states = manager.states
    assert states is not None

    def noted(batch: Any, awaited: Any) -> Any:
        for part in batch.scheduled:
            num_run = part.num_new_tokens - len(part.draft_token_ids)
            if part.draft_token_ids:
                # An assertion would fail the step, which is then run again without drafts.
                events["too long"] += num_run > MAX_RUN
                events["repeated beside drafts"] += num_run > 1
                events["completed a block"] += (part.start + num_run) // size > part.start // size
            elif part.completion.num_output_tokens:
                events["folded"] += num_run > MAX_RUN
        return launch(batch, awaited)

    engine.runner.launch = noted  # type: ignore[method-assign]

    def check() -> None:
        for completion in engine.scheduler.running:
            num_computed = completion.num_computed_tokens
            assert manager.num_tokens(completion.seq_id) == num_computed
            assert states._states[completion.seq_id].num_tokens == num_computed
            (table,) = manager.groups[completion.seq_id]
            assert table.num_cached_blocks * size <= num_computed
            if num_computed < completion.num_tokens - 1:
                events["fell back"] += 1
                events["fell back to the end of a block"] += not num_computed % size
        assert not states._before_drafts

    outputs = run(engine, check)
    assert {(name, 0): out.outputs[0].token_ids for name, out in outputs.items()} == answers
    assert events.pop("too long") == 0
    names = ["repeated beside drafts", "completed a block", "fell back", rare]
    assert all(events[name] > 0 for name in names), events
    assert_nothing_held(engine)


def test_a_state_at_the_end_of_a_block_needs_no_place_among_the_checkpoints():
    model = adapted_model("falcon_h1")
    tokens, params = prompt(9), greedy(40)
    expected = ask_alone(model, tokens, params)
    engine = make_engine(model, block_size=8, run_ahead=False, enable_prefix_caching=False)
    engine.scheduler.speculation = eager_speculation(VOCAB_SIZE, knows({("a", 0): expected}))
    assert ask(engine, {"a": (tokens, params)}) == {"a": expected}
    assert engine.stats().num_checkpoints == 0 < engine.stats().spec_decoding.num_accepted_tokens


def test_steps_with_drafts_that_fail_are_run_again():
    """They have left their states already."""
    model = adapted_model("falcon_h1")
    asks: dict[str, Any] = {str(each): (prompt(9 + each, each), greedy(30)) for each in range(3)}
    answers = ask(make_engine(model), asks)
    engine = make_engine(model)
    known = knows({(name, 0): answer for name, answer in answers.items()})
    engine.scheduler.speculation = eager_speculation(VOCAB_SIZE, known)
    launch, num_failed = engine.runner.launch, 0

    def failing(batch: Any, awaited: Any) -> mx.array:
        nonlocal num_failed
        logits = launch(batch, awaited)
        if batch.drafted and num_failed < 4:
            num_failed += 1
            raise RuntimeError("now and then")
        return logits

    engine.runner.launch = failing  # type: ignore[method-assign]
    assert ask(engine, asks) == answers
    assert num_failed == 4 and engine.stats().spec_decoding.num_accepted_tokens > 0
    assert_nothing_held(engine)


def test_drafts_that_are_all_accepted_keep_the_state_of_their_run():
    """The look-up knows a text that repeats itself; its runs are computed once."""
    model = adapted_model("qwen3_next")
    engine = make_engine(model, num_draft_tokens=7, run_ahead=False)
    speculation = EagerSpeculation(engine.scheduler.speculation.drafter, 7)
    engine.scheduler.speculation = speculation
    params = greedy(60, logits_processors=[follows_the_alphabet])
    engine.add_request("a", [number % 9 for number in range(40)], params)
    (output,) = run(engine).values()
    assert output.outputs[0].token_ids == [number % 9 for number in range(40, 100)]
    stats = engine.stats()
    assert stats.spec_decoding.num_accepted_tokens == stats.spec_decoding.num_draft_tokens > 30
    # The prompt in one step, and a token more than was drafted in each of the others.
    assert stats.num_steps == 1 + 59 - stats.spec_decoding.num_accepted_tokens


def follows_the_alphabet(tokens: mx.array, logits: mx.array) -> mx.array:
    """The token after the last one, of nine."""
    row = mx.full(logits.shape, -mx.inf)
    row[:, (tokens[-1].item() + 1) % 9] = 0
    return row


def test_an_answer_is_found_again_up_to_a_checkpoint_behind_its_drafts():
    """The next turn begins with a state of the answer and computes the same as from the start."""
    model = adapted_model("qwen3_next")
    tokens, params = prompt(30), greedy(70)
    answer = ask_alone(model, tokens, params)
    engine = make_engine(model, block_size=8, max_num_seqs=16)
    speculation = eager_speculation(VOCAB_SIZE, knows({("a", 0): answer}))
    engine.scheduler.speculation = speculation
    engine.add_request("a", tokens, params)
    assert run(engine)["a"].outputs[0].token_ids == answer
    turn = [*tokens, *answer, *prompt(5, 1)]
    engine.add_request("b", turn, greedy(20))
    output = run(engine)["b"]
    assert output.outputs[0].token_ids == ask_alone(model, turn, greedy(20))
    # A block end of the answer, which drafts may have put some blocks before its own end.
    assert 64 <= output.num_cached_tokens <= 96 and output.num_cached_tokens % 8 == 0


@pytest.mark.slow
def test_states_of_answers_with_drafts_are_found_on_disk_after_a_restart(tmp_path: Path):
    model = adapted_model("qwen3_next")
    asks: dict[str, Any] = {str(each): (prompt(40 + each, each), greedy(50)) for each in range(3)}
    answers = {name: ask_alone(model, *each) for name, each in asks.items()}
    turns: dict[str, Any] = {
        name: ([*tokens, *answers[name], *prompt(6, 9)], greedy(20))
        for name, (tokens, _) in asks.items()
    }
    expected = {name: ask_alone(model, *each) for name, each in turns.items()}
    for completions, right in ((asks, answers), (turns, expected)):
        engine = make_engine(model, cache_dir=tmp_path, block_size=8, kv_cache_bytes="4M")
        known = knows({(name, 0): answer for name, answer in right.items()})
        engine.scheduler.speculation = eager_speculation(VOCAB_SIZE, known)
        for name, (tokens, params) in completions.items():
            engine.add_request(name, tokens, params)
        outputs = run(engine)
        assert {name: out.outputs[0].token_ids for name, out in outputs.items()} == right
        engine.close()
    # The end of each prompt at least, and most often an end of a block of its answer.
    assert all(out.num_read_tokens >= 40 for out in outputs.values())
    assert any(out.num_read_tokens >= 56 for out in outputs.values())


class OneOfTwoIsWrong(Drafter):
    """Three drafts, the last of which is wrong every other time of every other request."""

    def __init__(self, answers: dict[str, list[int]]):
        self.answers = answers

    def propose(self, completion: Completion, num_drafts: int) -> list[int]:
        begin = completion.num_output_tokens
        drafts = self.answers[completion.request_id][begin : begin + num_drafts]
        if int(completion.request_id) % 2 and begin // 5 % 2:
            drafts[-1] = (drafts[-1] + 1) % 256
        return drafts

    note = RandomDrafter.note


class ThreeDrafts(EagerSpeculation):
    def num_drafts(self, completions: Any, *_: Any) -> list[int]:
        return [3] * len(completions)


@pytest.mark.slow
def test_states_before_drafts_stay_inside_the_budget(monkeypatch: pytest.MonkeyPatch):
    """Some sequences of a stack fall back to it, and others go on from the next one: both are there
    until the step after that, and no longer.
    """
    config = WIDE | {"num_hidden_layers": 8}
    model = PackedModel(make_from_config(config), config)
    asks: dict[str, Any] = {str(number): (prompt(12, number), greedy(25)) for number in range(8)}
    answers = ask(make_engine(model), asks)
    stacks, init = weakref.WeakSet[StateStack](), StateStack.__init__

    def counted(stack: StateStack, arrays: Any, num_states: int) -> None:
        init(stack, arrays, num_states)
        stacks.add(stack)

    monkeypatch.setattr(StateStack, "__init__", counted)
    mx.clear_cache()
    before = mx.get_active_memory()
    engine = make_engine(
        model,
        max_num_seqs=8,
        num_draft_tokens=3,
        enable_prefix_caching=False,
        run_ahead=False,
        kv_cache_bytes=8 * 16 * model.state_nbytes,
    )
    share = 8 * engine.cache.shared_budget.sizes.sequence
    assert share == 8 * 4 * model.state_nbytes
    engine.scheduler.speculation = ThreeDrafts(OneOfTwoIsWrong(answers), 3)  # type: ignore[arg-type]
    for name, (tokens, params) in asks.items():
        engine.add_request(name, tokens, params)
    # Activations are some of a state more.
    share += model.state_nbytes
    most, counts = 0, Counter[int]()

    def check() -> None:
        nonlocal most
        most = max(most, mx.get_peak_memory() - before - engine.cache.nbytes_held)
        mx.reset_peak_memory()
        counts[sum(stack.num_states for stack in stacks)] += 1

    mx.reset_peak_memory()
    outputs = run(engine, check)
    assert {name: out.outputs[0].token_ids for name, out in outputs.items()} == answers
    assert most <= share
    assert 8 < max(counts) <= 16, counts
    assert_nothing_held(engine)
    assert not stacks


def test_a_stack_before_drafts_goes_with_the_first_of_its_states():
    """Nothing is copied while any sequence may fall back to it; then what is left is, in the next
    step of whatever sequences.
    """
    stack = StateStack([[mx.arange(6).reshape(3, 2)]], 3)
    rows = stack.rows()
    assert forget_before([StepState(row) for row in rows]) == [stack]
    assert [row.stack for row in rows] == [stack] * 3
    accepted = rows.pop(0)
    del accepted
    assert forget_before([], earlier=[stack]) == []
    assert [row.stack.num_states for row in rows] == [1, 1]
    assert [row.stack.arrays[0][0].tolist() for row in rows] == [[[2, 3]], [[4, 5]]]


# Refusals and prices


def test_a_draft_model_with_a_state_is_refused_with_the_way_out():
    says = "can't be a mamba2, which is recurrent, for a gpt_bigcode, which is not"
    with pytest.raises(ArgumentError, match=says):
        make_engine(adapted_model("gpt_bigcode"), draft_model=adapted_model("mamba2"))


def test_the_states_of_a_draft_model_count_in_the_budget():
    model, other = adapted_model("falcon_h1"), adapted_model("mamba2")
    alone, both = (
        make_engine(model, kv_cache_bytes="4M", max_num_seqs=2, draft_model=each)
        for each in (None, other)
    )
    assert alone.cache.shared_budget is not None and both.cache.shared_budget is not None
    assert alone.cache.shared_budget.sizes.state == model.state_nbytes
    assert both.cache.shared_budget.sizes.state == model.state_nbytes + other.state_nbytes
    assert both.cache.config.state_nbytes == model.state_nbytes  # of a file


def test_what_runs_with_drafts_cost_is_known_of_a_model():
    """Its layers with states count, and so do the rows that it may compute again."""
    recurrent, plain = adapted_model("qwen3_next"), adapted_model("gpt_bigcode")
    assert (recurrent.num_layers, len(recurrent.layer_specs)) == (2, 1)
    for model, repeats, max_more in ((recurrent, True, 9), (plain, False, 3)):
        speculation = make_engine(model, num_draft_tokens=3).scheduler.speculation
        assert speculation.repeats_runs is repeats and speculation.max_more == max_more
        assert speculation.step == cost_of(model)
