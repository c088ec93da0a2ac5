"""Recurrent states beside their blocks on disk: what a restart finds, what a disk has to take, and
what is never used.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from helpers.adapted_models import RECURRENT, adapted_model, greedy_answer
from helpers.disk_tiers import flush, tier_stats, tiered
from helpers.drafting import eager_speculation, looks_up
from helpers.engine_runs import VOCAB_SIZE, answer, greedy, make_engine, prompt, run
from helpers.recurrent_agents import (
    BLOCK_SIZE,
    NUM_ANSWERED,
    NUM_NEW,
    Agent,
    entries_of,
    kv_in,
    states_in,
)
from helpers.workloads import Workload, assert_same

from mlx_paged.cache.state_bytes import state_from_bytes, state_to_bytes
from mlx_paged.core.tier import STATES, BlockHeader, GuardedTier, HostMemory, Payload
from mlx_paged.engine.speculation.speculation import NO_SPECULATION
from mlx_paged.engine.storing import tier_cache, unsaved
from mlx_paged.errors import ArgumentError
from mlx_paged.models.identity import fingerprint_of, model_identity
from mlx_paged.ops import StateRow, StateStack

# Beside attention, and alone.
TWO = ("qwen3_next", "mamba2")
ALL = [name if name in TWO else pytest.param(name, marks=pytest.mark.slow) for name in RECURRENT]


# After a restart


@pytest.mark.parametrize("name", ALL)
def test_an_engine_that_starts_again_goes_on_from_a_state(name: str, tmp_path: Path):
    tokens = prompt(70)
    for num_found in (0, 64):
        with tiered(adapted_model(name), tmp_path, block_size=BLOCK_SIZE) as engine:
            output = answer(engine, tokens, greedy(12))
        assert output.outputs[0].token_ids == greedy_answer(name, tokens, 12)
        assert output.num_cached_tokens == num_found
        assert tier_stats(engine).num_read_states == (num_found > 0)
    # At the prompt's end and at the answer's; where there are no K/V, there is nothing else.
    assert {64, 80} <= set(states_in(tmp_path))
    assert bool(kv_in(tmp_path)) == (name != "mamba2")


@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("mamba2", marks=pytest.mark.slow)])
def test_after_a_restart_the_tenth_turn_computes_what_is_new(name: str, tmp_path: Path):
    agent = Agent(name)
    for turns in (9, 1):
        with tiered(adapted_model(name), tmp_path, block_size=BLOCK_SIZE) as engine:
            computed = [agent.turn(engine) for _ in range(turns)]
    # 213 tokens, of which the last full block before the tool's result ends with token 200: the
    # answer's last token has no K/V before it is a prompt's.
    assert computed == [13]


KILLED = """
import os, signal, sys
from helpers.adapted_models import adapted_model
from helpers.disk_tiers import flush
from helpers.engine_runs import make_engine
from helpers.recurrent_agents import BLOCK_SIZE, Agent
name, folder = sys.argv[1:]
agent, engine = Agent(name), make_engine(
    adapted_model(name), cache_dir=folder, block_size=BLOCK_SIZE
)
for _ in range(9):
    agent.turn(engine)
flush(engine)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_kill_costs_the_tokens_since_the_last_state_that_was_outweighed(tmp_path: Path):
    name, tests = "qwen3_next", Path(__file__).parents[2]
    script = f"import sys; sys.path[:0] = {[str(tests), str(tests.parent / 'tools')]}{KILLED}"
    killed = subprocess.run([sys.executable, "-c", script, name, str(tmp_path)])
    assert killed.returncode == -9
    model, agent = adapted_model(name), Agent(name)
    engine = make_engine(model, block_size=BLOCK_SIZE)
    for _ in range(9):
        agent.turn(engine)
    assert set(states_in(tmp_path)) == {56, 104, 160}
    with tiered(model, tmp_path, block_size=BLOCK_SIZE) as engine:
        assert agent.turn(engine) == 213 - 160
    # What a state weighs is 20.5 tokens of K/V, of which each has ended a block in the meantime.
    num_lost = unsaved.KV_PER_STATE * model.state_nbytes / engine.cache.config.nbytes_per_token
    assert num_lost + BLOCK_SIZE > 213 - NUM_NEW - 160


# What a disk has to take


@pytest.mark.parametrize(
    ("num_checkpoints", "last"), [(5, 192), pytest.param(40, 200, marks=pytest.mark.slow)]
)
def test_states_add_at_most_half_of_what_kv_take_while_a_conversation_goes_on(
    tmp_path: Path, num_checkpoints: int, last: int
):
    """With few in memory they are of prompts alone, and of answers otherwise, too."""
    model, agent = adapted_model("qwen3_next"), Agent("qwen3_next")
    with tiered(model, tmp_path, block_size=BLOCK_SIZE) as engine:
        engine.manager.states.checkpoints.num_checkpoints = num_checkpoints
        for _ in range(9):
            agent.turn(engine)
            flush(engine)
            num_kv, num_states = len(kv_in(tmp_path)), len(states_in(tmp_path))
            nbytes_kv = num_kv * engine.cache.config.nbytes_per_block
            assert num_states * model.state_nbytes <= nbytes_kv / unsaved.KV_PER_STATE
        assert sorted(states_in(tmp_path)) == [56, 104, 160], "of nine turns"
    # And at the end those from which the next turn may go on.
    assert max(states_in(tmp_path)) == last and len(states_in(tmp_path)) <= 5


def test_a_state_that_a_second_prompt_goes_on_from_is_written_at_once(tmp_path: Path):
    model, shared = adapted_model("mamba2"), prompt(40, 1)
    with tiered(model, tmp_path, block_size=BLOCK_SIZE) as engine:
        found = []
        for number in range(4):
            tokens = [*shared, *prompt(20, 50 + number)]
            output = answer(engine, tokens, greedy(1))
            flush(engine)
            found.append((output.num_cached_tokens, sorted(states_in(tmp_path))))
    # The second one leaves a state where it leaves the first, and the third begins there.
    assert found == [(0, []), (0, []), (40, [40]), (40, [40])]


def test_a_state_that_leaves_memory_is_written_unless_its_conversation_has_moved_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Of a model without K/V; half of it is the worth of a state that leaves memory.
    monkeypatch.setattr(unsaved, "TOKENS_WITHOUT_KV", 120)
    name = "mamba2"
    agents = [Agent(name, 40 + 9 * seed, seed) for seed in range(4)]
    with tiered(adapted_model(name), tmp_path, block_size=BLOCK_SIZE) as engine:
        engine.manager.states.checkpoints.num_checkpoints = 3
        for _ in range(3):
            agents[0].turn(engine)
        flush(engine)
        assert states_in(tmp_path) == {}, "it goes on from the newest one alone"
        for agent in agents[1:]:
            agent.turn(engine)
        flush(engine)
        assert set(states_in(tmp_path)) == {72}, "40 and 56 went before it"
        assert agents[0].turn(engine) == len(agents[0].tokens) - 72 - NUM_NEW - NUM_ANSWERED
        assert tier_stats(engine).num_read_states == 1


def test_an_engine_that_is_idle_writes_nothing_twice(tmp_path: Path):
    tokens = prompt(70)
    for num_written in (2, 0):
        with tiered(adapted_model("mamba2"), tmp_path, block_size=BLOCK_SIZE) as engine:
            for _ in range(2):
                answer(engine, tokens, greedy(12))
        assert tier_stats(engine).num_saved_states == num_written
        assert tier_stats(engine).num_dropped_blocks == 0


# What is never used


def test_a_hit_needs_blocks_and_state(tmp_path: Path):
    model, tokens = adapted_model("qwen3_next"), prompt(70)

    def num_found(num_tokens: int) -> int:
        with tiered(model, tmp_path, block_size=BLOCK_SIZE) as engine:
            output = answer(engine, tokens[:num_tokens], greedy(2))
        assert output.outputs[0].token_ids == greedy_answer("qwen3_next", tokens[:num_tokens], 2)
        return output.num_cached_tokens

    assert [num_found(40), num_found(70), num_found(70)] == [0, 40, 64]
    states_in(tmp_path)[64].unlink()
    assert num_found(70) == 40
    kv_in(tmp_path)[24].unlink()
    assert num_found(70) == 0


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("qwen3_next", "cut"),
        ("mamba2", "flipped"),
        pytest.param("qwen3_next", "flipped", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "empty", marks=pytest.mark.slow),
        pytest.param("mamba2", "cut", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_state_is_removed_and_counted_and_the_one_before_it_is_used(
    name: str, damage: str, tmp_path: Path
):
    agent = Agent(name)
    for num_turns in (1, 2):  # each end leaves the states of its last turn
        with tiered(adapted_model(name), tmp_path, block_size=BLOCK_SIZE) as engine:
            for _ in range(num_turns):
                agent.turn(engine)
    places = sorted(states_in(tmp_path))
    last = states_in(tmp_path)[places[-1]]
    content = last.read_bytes()
    altered = bytearray(content)
    altered[-100] ^= 1
    last.write_bytes({"cut": content[:-7], "flipped": bytes(altered), "empty": b""}[damage])
    with tiered(adapted_model(name), tmp_path, block_size=BLOCK_SIZE) as engine:
        num_prompt_tokens = len(agent.tokens)
        assert agent.turn(engine) == num_prompt_tokens - places[-2]
        assert tier_stats(engine).num_corrupt_blocks == 1
    assert not last.exists()


def test_no_store_keeps_states_off_the_disk(tmp_path: Path):
    model, tokens = adapted_model("mamba2"), prompt(70)
    with tiered(model, tmp_path, block_size=BLOCK_SIZE) as engine:
        for _ in range(3):
            answer(engine, tokens, greedy(12), no_store=True)
    assert entries_of(tmp_path) == []


def test_another_layout_of_states_is_another_fingerprint():
    model = adapted_model("qwen3_next")
    cache = make_engine(model).cache
    layers = fingerprint_of(cache, [model_identity(model)]).layers
    assert layers[-1] == "state 0: float32 [3, 192], float32 [4, 16, 32]"
    digests = set()
    for layout in (("float32 [3, 192]",), ("bfloat16 [3, 192]",), ("float32 [3, 96]",), ()):
        cache.config = dataclasses.replace(cache.config, state_layout=layout)
        digests.add(fingerprint_of(cache, [model_identity(model)]).digest)
    assert len(digests) == 4


def test_a_folder_that_does_not_hold_one_state_is_refused(tmp_path: Path):
    with pytest.raises(ArgumentError, match="a recurrent state takes 20992") as refused:
        make_engine(adapted_model("mamba2"), cache_dir=tmp_path, cache_dir_size=20_000)
    assert refused.value.argument == "cache_dir_size"


# Beside everything else


@pytest.mark.slow
def test_states_leave_a_folder_that_is_full_before_the_blocks_that_they_need(tmp_path: Path):
    model = adapted_model("qwen3_next")
    agents = [Agent("qwen3_next", 60, seed) for seed in range(1, 6)]
    for agent in agents:
        agent.tokens = prompt(60, 70 + agent.seed)
        with tiered(model, tmp_path, block_size=BLOCK_SIZE, cache_dir_size=300_000) as engine:
            for _ in range(2):
                agent.turn(engine)
    assert sum(each.nbytes for each in entries_of(tmp_path)) <= 300_000
    assert tier_stats(engine).num_evicted_blocks > 0
    kv = {each.block_hash for each in entries_of(tmp_path) if each.group == 0}
    for each in entries_of(tmp_path):
        assert each.parent_hash is None or each.parent_hash in kv
    with tiered(model, tmp_path, block_size=BLOCK_SIZE, cache_dir_size=300_000) as engine:
        assert agents[-1].turn(engine) <= NUM_NEW + BLOCK_SIZE


class Shelf(HostMemory):
    """A tier of somebody's own; what it has under a key may be anything."""

    def store(self, header: BlockHeader, content: Payload) -> bool:
        assert header.group in (0, STATES) and len(header.token_ids) == BLOCK_SIZE
        return super().store(header, content)


def test_a_tier_of_the_callers_keeps_states_and_nonsense_in_it_is_not_used():
    model, tokens, shelf = adapted_model("qwen3_next"), prompt(70), Shelf()
    found = []
    for number in range(3):
        engine = make_engine(model, tier=lambda fingerprint: shelf, block_size=BLOCK_SIZE)
        output = answer(engine, tokens, greedy(4))
        assert output.outputs[0].token_ids == greedy_answer("qwen3_next", tokens, 4)
        found.append(output.num_cached_tokens)
        assert engine.close(60)
        for key in shelf._blocks if number == 1 else ():
            if len(key) > 32:
                shelf._blocks[key] = b"\x07\0\0\0nothing" * 9
    assert found == [0, 64, 0]


def test_a_state_of_another_dtype_in_a_tier_is_not_used():
    model, tokens, shelf = adapted_model("qwen3_next"), prompt(70), Shelf()
    for _ in range(2):
        engine = make_engine(model, tier=lambda fingerprint: shelf, block_size=BLOCK_SIZE)
        output = answer(engine, tokens, greedy(4))
        assert output.num_cached_tokens == 0
        assert output.outputs[0].token_ids == greedy_answer("qwen3_next", tokens, 4)
        assert engine.close(60)
        memory = HostMemory()
        memory._blocks, guarded = shelf._blocks, GuardedTier(memory)
        for key in [key for key in shelf._blocks if len(key) > 32]:
            stack = state_from_bytes(guarded.load(key)).stack
            half = [[array.astype(mx.float16) for array in slots] for slots in stack.arrays]
            content = state_to_bytes(StateRow(StateStack(half, 1), 0))
            guarded.store(BlockHeader(key), content)


@pytest.mark.parametrize(
    ("name", "seed", "options"),
    [
        ("qwen3_next", 0, {}),
        *(
            pytest.param(name, seed, options, marks=pytest.mark.slow)
            for seed, (name, options) in enumerate(
                [
                    ("qwen3_next", {"kv_format": "K:8,V:4"}),
                    ("mamba2", {}),
                    ("falcon_h1", {"kv_format": 8}),
                    ("lfm2", {"swap_bytes": 0}),
                    ("recurrent_gemma", {}),
                    ("qwen3_next", {"swap_bytes": 0, "kv_cache_bytes": "40blocks"}),
                    ("mamba2", {"swap_bytes": 0, "kv_cache_bytes": "40blocks"}),
                    ("mamba2", {"speculation": eager_speculation(VOCAB_SIZE, looks_up)}),
                    ("qwen3_next", {"speculation": eager_speculation(VOCAB_SIZE, looks_up)}),
                ],
                1,
            )
        ),
    ],
)
def test_random_workloads_have_the_same_tokens_with_states_on_disk(
    name: str, seed: int, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Evictions, preemptions, aborts, n > 1, drafts: cold, from memory, from disk, and from a
    folder that holds few blocks.
    """
    monkeypatch.setattr(tier_cache, "is_reading_cheaper", lambda *_: True)
    workload = Workload(900 + seed, 7, VOCAB_SIZE)
    speculation = options.get("speculation", NO_SPECULATION)
    workload.options |= {name: each for name, each in options.items() if name != "speculation"}
    model, runs = adapted_model(name), {}
    for way, more in {
        "cold": {},
        "memory": {},
        "first": {"cache_dir": tmp_path},
        "second": {"cache_dir": tmp_path},
        "small": {"cache_dir": tmp_path, "cache_dir_size": 400_000},
    }.items():
        workload.options["enable_prefix_caching"] = way != "cold"
        runs[way] = workload.run(model, speculation=speculation, **more)
        assert runs[way].engine.close(60)
    for request_id, expected in runs["cold"].outputs.items():
        for found in (runs[way].outputs[request_id] for way in runs):
            if all(each.finish_reason != "abort" for each in (*found.outputs, *expected.outputs)):
                assert_same(found, expected)
    assert tier_stats(runs["second"].engine).num_read_states > 0
    assert run(runs["second"].engine) == {}
