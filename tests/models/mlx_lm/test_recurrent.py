"""Models of mlx-lm with recurrent layers, packed: their states in an engine and in a cache, and
what their modules see.
"""

from __future__ import annotations

import gc
import math
import sys
import weakref
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers.adapted_models import WIDE, adapted_model, greedy_answer, mlx_lm_model
from helpers.engine_runs import greedy, make_engine, prompt, run
from helpers.model_zoo import config_of as zoo_config_of
from helpers.model_zoo import make, make_from_config
from helpers.ragged_engines import answers, budget_of, ragged
from mlx.nn import Module

from mlx_paged.cache import Sequences
from mlx_paged.core import BlockTableError, Cut, KVCacheManager, SequenceStates
from mlx_paged.models import kv_cache
from mlx_paged.models.identity import model_identity
from mlx_paged.models.kv_cache import make_kv_cache
from mlx_paged.models.mlx_lm import adapt
from mlx_paged.models.mlx_lm.packed import PackedModel
from mlx_paged.models.run_step import run_step
from mlx_paged.ops import StateStack


@pytest.mark.parametrize("name", ["falcon_h1", "mamba2"])
def test_completions_of_one_prompt_begin_with_one_state(name: str):
    """Greedily, each is the answer of mlx-lm; sampled, the same as alone with its own key."""
    engine = ragged(name)
    tokens = prompt(30)
    engine.add_request("greedy", tokens, greedy(8, n=3))
    assert answers(engine) == {"greedy": [greedy_answer(name, tokens, 8)] * 3}
    found = []
    for share in (9, 2.5):
        engine = ragged(name, **budget_of(name, 54, share))
        engine.add_request("sampled", tokens, greedy(24, n=3, temperature=1.0, seed=5))
        engine.add_request("other", prompt(20, 1), greedy(20))
        found.append(answers(engine))
    assert found[0] == found[1]
    assert len({tuple(ids) for ids in found[0]["sampled"]}) == 3
    assert engine.stats().num_preemptions > 0


# States, directly in a cache


def test_a_body_that_raises_leaves_the_state_before_the_step():
    model = adapted_model("falcon_h1")
    cache = make_kv_cache(model, block_size=8, kv_cache_bytes="40blocks")
    seqs = Sequences(cache)
    tokens = prompt(30)
    run_step(model, seqs, {"a": tokens[:20]})
    with pytest.raises(ZeroDivisionError), seqs.step({"a": 5, "b": 3}) as step:
        mx.eval(model(mx.array(tokens[20:28]), cache.layers, step.logit_rows))
        raise ZeroDivisionError
    assert seqs.seq_len("a") == 20 and list(seqs) == ["a"]
    seqs.fork("a", "b")
    found = [run_step(model, seqs, {"a": tokens[20:]}), run_step(model, seqs, {"b": tokens[20:]})]
    expected = Sequences(make_kv_cache(model, kv_cache_bytes="40blocks"))
    for logits in found:
        assert mx.allclose(logits, run_step(model, expected, {"a": tokens}), atol=1e-4)
        expected.free("a")


def test_an_interrupt_behind_the_new_states_leaves_those_before_the_step(
    monkeypatch: pytest.MonkeyPatch,
):
    """The states of all sequences of the step are there already when it comes."""
    model = adapted_model("falcon_h1")
    cache = make_kv_cache(model, block_size=8, kv_cache_bytes="40blocks")
    seqs, tokens, other = Sequences(cache), prompt(40), prompt(20, 1)
    assert seqs.manager.states is not None
    seqs.manager.states.checkpoints.num_checkpoints = 4
    run_step(model, seqs, {"a": tokens[:20], "b": other[:9]})
    before = seqs.manager.states.snapshot()
    put = SequenceStates.end_step

    def interrupted(*args: Any) -> None:
        put(*args)
        assert seqs.manager.states.snapshot()["a"].num_tokens == 25
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SequenceStates, "end_step", interrupted)
        with pytest.raises(KeyboardInterrupt), seqs.step({"a": 5, "b": 7, "c": 3}) as step:
            new_tokens = [*tokens[20:25], *other[9:16], *other[:3]]
            mx.eval(model(mx.array(new_tokens), cache.layers, step.logit_rows))
    assert [seqs.seq_len(seq) for seq in seqs] == [20, 9] and list(seqs) == ["a", "b"]
    after = seqs.manager.states.snapshot()
    assert after.keys() == before.keys()
    assert all(after[seq] is before[seq] for seq in before)
    assert not seqs.manager.states._pending
    alone = make_kv_cache(model, block_size=8, kv_cache_bytes="40blocks")
    expected = run_step(model, Sequences(alone), {"a": tokens, "b": other})
    assert mx.allclose(
        run_step(model, seqs, {"a": tokens[20:], "b": other[9:]}), expected, atol=1e-4
    )


def test_a_state_cannot_be_cut_nor_made_from_rows():
    model = adapted_model("falcon_h1")
    cache = make_kv_cache(model, block_size=8, kv_cache_bytes="40blocks")
    seqs = Sequences(cache)
    run_step(model, seqs, {"a": prompt(20)})
    with pytest.raises(BlockTableError, match="a recurrent state of 20 tokens, which can't be cut"):
        seqs.trim("a", 12)
    assert seqs.seq_len("a") == 20
    rows = np.zeros((1, 2, 32), np.float32)
    with pytest.raises(ValueError, match="rows of K/V can't be appended or restored without it"):
        seqs.append("a", [mx.array(rows)] * 2, [mx.array(rows)] * 2)
    assert seqs.seq_len("a") == 20
    seqs.trim("a", 0)
    seqs.free("a")
    assert len(seqs.manager.states) == 0


def test_a_state_keeps_no_more_memory_than_its_size():
    """The end of a convolution's input is a view of all of it."""
    model = adapted_model("mamba2")
    cache = make_kv_cache(model, block_size=64, kv_cache_bytes="100blocks")
    seqs = Sequences(cache)
    run_step(model, seqs, {"warm": prompt(2000)})
    before = mx.get_active_memory()
    run_step(model, seqs, {"a": prompt(2000)})
    grown = mx.get_active_memory() - before
    # Arrays share a buffer that is up to 16 KB larger; the input is 1 MB for each layer.
    assert grown < model.state_nbytes + 4 * 2**14 + 2**14


def test_states_share_the_budget_with_kv():
    model = adapted_model("falcon_h1")
    nbytes = model.state_nbytes

    def num_states(budget: int, **options: Any) -> tuple[int, int]:
        """How many states the K/V of one sequence leave, and the most checkpoints."""
        engine = make_engine(model, kv_cache_bytes=budget * nbytes, **options)
        checkpoints = engine.manager.states.checkpoints
        assert engine.stats().nbytes_budget == budget * nbytes
        return budget - math.ceil(engine.cache.config.nbytes / nbytes), checkpoints.num_checkpoints

    # Three copies of a running one, a fourth where steps run ahead, and one more with drafts.
    assert num_states(200, max_num_seqs=9, run_ahead=False) == (3, 32)
    assert num_states(200, max_num_seqs=9, run_ahead=True) == (4, 32)
    assert num_states(200, max_num_seqs=9, num_draft_tokens=3, run_ahead=True) == (5, 32)
    # As many checkpoints as are of use: one for 128 tokens, which take 6.25 states of memory, two
    # per sequence, or MANY; or as many as there is memory for.
    assert num_states(2000, max_num_seqs=9, run_ahead=False) == (3, 320)
    assert num_states(200, max_num_seqs=20, run_ahead=False) == (3, 40)
    assert num_states(20, max_num_seqs=1, run_ahead=True) == (4, 16)
    assert num_states(20, max_num_seqs=1, enable_prefix_caching=False, run_ahead=True) == (4, 0)
    with pytest.warns(UserWarning, match="at most 4 sequences run at once instead of max_num_seqs"):
        num_states(20, max_num_seqs=9, run_ahead=True)


def test_a_hit_that_is_lost_for_want_of_a_state_is_told_and_the_next_one_is_not_lost():
    engine = ragged("qwen3_next", num_history_tokens=1000)
    shared = prompt(50, 1)
    reports = []
    for number, tokens in enumerate(
        ([*shared], [*shared[:30], *prompt(9, 5)], [*shared[:30], *prompt(12, 6)])
    ):
        engine.add_request(str(number), tokens, greedy(2))
        (output,) = run(engine).values()
        reports.append(output.prefix_report)
        assert output.outputs[0].token_ids == greedy_answer("qwen3_next", tokens, 2)
    found = [(report.reason, report.num_cached_tokens) for report in reports]
    assert found == [("new", 0), ("no_state", 0), ("changed", 24)]
    text = (
        "0 of 39 tokens cached: from token 0 on its K/V are there, and the recurrent state was not"
    )
    assert reports[1].explanation.startswith(text)
    assert engine.prefix_history.num_missed_tokens["no_state"] == 39
    stats = engine.stats()
    # At the ends of three prompts and an answer, and where the second prompt left the first.
    assert stats.num_checkpoints == 5 and stats.num_stateless_tokens == 24
    assert stats.nbytes_checkpoints == 5 * engine.runner.model.state_nbytes


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", [8, "K:8,V:4"])
def test_quantised_kv_beside_states_give_the_same_side_by_side_as_alone(kv_format: str | int):
    asked = {str(length): prompt(length, length) for length in (5, 30, 41)}
    together = ragged("qwen3_next", kv_format=kv_format)
    for name, tokens in asked.items():
        together.add_request(name, tokens, greedy(12))
    found = answers(together)
    for name, tokens in asked.items():
        alone = ragged("qwen3_next", kv_format=kv_format)
        alone.add_request(name, tokens, greedy(12))
        assert answers(alone)[name] == found[name]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
def test_states_stay_inside_the_budget(ahead: bool, monkeypatch: pytest.MonkeyPatch):
    """Every stack that is alive at once, and the checkpoints, by MLX's own count of its memory."""
    config = WIDE | {"num_hidden_layers": 8}
    model = PackedModel(make_from_config(config), config)
    share, used = used_by_states(model, ahead)
    # Activations of a chunk are some state more.
    assert 0.6 * share < used <= share + model.state_nbytes
    # A planted fault: one copy of each running state is counted.
    monkeypatch.setattr(kv_cache, "NUM_COPIES", 1)
    monkeypatch.setattr(kv_cache, "NUM_COPIES_AHEAD", 1)
    share, used = used_by_states(model, ahead)
    assert used > share + model.state_nbytes


def used_by_states(model: PackedModel, ahead: bool) -> tuple[int, int]:
    """Bytes that K/V leave of a budget, and the most that were in use beside them."""
    budget = 30 * model.state_nbytes
    engine = make_engine(
        model,
        kv_cache_bytes=budget,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_num_mixed_tokens=9,
        run_ahead=ahead,
        block_size=8,
    )
    for number in range(18):
        # Answers end in different steps, and checkpoints come and go: there are more than are kept.
        tokens, length = prompt(9 + 5 * (number % 8), number), 4 + (7 * number) % 20
        engine.add_request(str(number), tokens, greedy(length))
    # An engine before this one that only the garbage collector frees must not be freed meanwhile.
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory() - engine.cache.nbytes_held
    mx.reset_peak_memory()
    run(engine)
    used = mx.get_peak_memory() - before - engine.cache.nbytes_held
    return budget - engine.cache.nbytes_held, used


# What modules see, and what they leave behind


def test_only_modules_with_a_state_run_more_than_once_in_a_step(monkeypatch: pytest.MonkeyPatch):
    """Two decodes, a prompt, and one that is cut at the end of its last block: three groups of
    equal lengths, and one of what follows the cut.
    """
    shapes: list[tuple[str, tuple[int, ...]]] = []
    stock = mlx_lm_model("qwen3_next")
    layer = stock.layers[0]
    for name, kind in (("mixer", type(layer.linear_attn)), ("mlp", type(layer.mlp))):
        noted = kind.__mro__[1] if hasattr(kind, "runs_by_groups") else kind

        def call(self: Module, x: Any, *args: Any, name=name, of=noted.__call__, **kwargs: Any):
            if self is layer.linear_attn or self is layer.mlp:
                shapes.append((name, x.shape[:2]))
            return of(self, x, *args, **kwargs)

        monkeypatch.setattr(noted, "__call__", call)
    model = adapted_model("qwen3_next")
    seqs = Sequences(make_kv_cache(model, block_size=8, kv_cache_bytes="40blocks"))
    states = seqs.manager.states
    assert states is not None
    run_step(model, seqs, {"a": prompt(5), "b": prompt(6)})
    monkeypatch.setattr(
        states, "cuts", lambda seq, begin, end, size: [Cut(8)] if seq == "d" else []
    )
    shapes.clear()
    run_step(model, seqs, {"a": [1], "c": prompt(7), "b": [2], "d": prompt(11)})
    mixer = [shape for name, shape in shapes if name == "mixer"]
    assert mixer == [(2, 1), (1, 7), (1, 8), (1, 3)]
    assert [shape for name, shape in shapes if name == "mlp"] == [(20, 1)]


def test_a_sequence_that_is_left_out_does_not_keep_the_states_of_others():
    model = adapted_model("qwen3_next")
    seqs = Sequences(make_kv_cache(model, block_size=8, kv_cache_bytes="40blocks"))
    states = seqs.manager.states
    assert states is not None
    names = [str(number) for number in range(6)]
    run_step(model, seqs, dict.fromkeys(names, prompt(5)))
    old = weakref.ref(states.get("0", 5).stack)
    assert old().num_states == 6
    seqs.fork("1", "fork")
    expected = {name: _values(states.get(name, 5)) for name in ("0", "1")}
    run_step(model, seqs, {name: [3] for name in names[1:4]})
    assert old() is None
    # One stack for those that ran, one each for the others and the fork of one that ran.
    stacks = {name: states.get(name, seqs.seq_len(name)).stack for name in [*names, "fork"]}
    assert [stack.num_states for stack in stacks.values()] == [1, 3, 3, 3, 1, 1, 1]
    assert len({id(stacks[name]) for name in names[1:4]}) == 1
    for name, same in (("0", "0"), ("fork", "1")):
        assert all(map(mx.array_equal, _values(states.get(name, 5)), expected[same]))


def _values(row: Any) -> list[mx.array]:
    return [array[row.index] for array in row.stack.leaves]


def test_an_unchanged_batch_hands_on_its_states_as_they_lie(monkeypatch: pytest.MonkeyPatch):
    """No array is gathered between decodes of the same sequences in the same order."""
    model = adapted_model("qwen3_next")
    seqs = Sequences(make_kv_cache(model, block_size=8, kv_cache_bytes="40blocks"))
    run_step(model, seqs, {"a": prompt(5), "b": prompt(6)})
    run_step(model, seqs, {"a": [1], "b": [2]})
    rows = [seqs.manager.states.get(name, length) for name, length in (("a", 6), ("b", 7))]
    assert StateStack.of(rows) is rows[0].stack
    assert StateStack.of(rows[::-1]) is not rows[0].stack


@pytest.mark.parametrize("architecture", ["qwen3_5", "plamo2", "baichuan_m1"])
def test_mlx_lms_modules_are_as_they_were_when_a_model_is_dropped(architecture: str):
    stock, config = make(architecture), zoo_config_of(architecture)
    module = sys.modules[type(stock).__module__]
    # A module that was imported while other models were in use has its own functions after that.
    PackedModel(make(architecture), config)
    gc.collect()
    before = dict(vars(module))
    packed = PackedModel(stock, config)
    del packed
    gc.collect()
    assert vars(module) == before


def test_running_by_groups_changes_no_identity():
    """The digest is of mlx-lm's classes, weights and values, and not of what lets them run."""
    stock, config = make("qwen3_5"), zoo_config_of("qwen3_5")
    model = adapt(stock, config)
    mixers = [each for each in stock.modules() if hasattr(each, "runs_by_groups")]
    assert len(mixers) == 1
    digest = model_identity(model).digest
    for mixer in mixers:
        mixer.__class__ = type(mixer).__mro__[1]
    assert model_identity(model).digest == digest


def test_a_step_without_states_is_refused():
    model = adapted_model("mamba2")
    cache = make_kv_cache(model, block_size=8, kv_cache_bytes="40blocks")
    manager = KVCacheManager(cache.pool, cache.config.retentions)
    manager.allocate_slots("a", 5)
    with (
        pytest.raises(ValueError, match="a mamba2 keeps a recurrent state of each sequence"),
        cache.open_step([manager.groups["a"]], [5]) as step,
    ):
        model(mx.array(prompt(5)), cache.layers, step.logit_rows)
