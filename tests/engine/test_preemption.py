"""A short budget: requests wait, are computed again or swapped, and their tokens are those of an
undisturbed run.
"""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers.adapted_models import adapted_model
from helpers.cache_helpers import sequences_of, swap_in, swapped_out
from helpers.engine_runs import (
    ask,
    ask_alone,
    greedy,
    make_engine,
    make_engine_without_drafts,
    prompt,
    run,
    sampled,
)
from helpers.fast_lane import in_one_way, mostly_slow
from helpers.windowed_models import model_and_options

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.scheduling.batch import SwapIn
from mlx_paged.models import kv_cache, qwen3

pytestmark = pytest.mark.usefixtures("run_ahead")


@pytest.fixture(params=[False, True], ids=["recompute", "swap"])
def swap(request: pytest.FixtureRequest) -> bool:
    return request.param


def count_copies(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Blocks that are swapped out and in from now on."""
    counts = {"out": 0, "in": 0}
    read_blocks, write_blocks = engine.cache.read_blocks, engine.cache.write_blocks

    def out(group: int, block_ids: list[int]) -> Any:
        counts["out"] += len(block_ids)
        return read_blocks(group, block_ids)

    def back(group: int, block_ids: list[int], contents: Any) -> None:
        counts["in"] += len(block_ids)
        write_blocks(group, block_ids, contents)

    monkeypatch.setattr(engine.cache, "read_blocks", out)
    monkeypatch.setattr(engine.cache, "write_blocks", back)
    return counts


# Each way to step meets both.
@mostly_slow(
    ("run_ahead", "swap", "seed", "prefix_caching"),
    [
        ("ahead", False, 0, True),
        ("ahead", True, 0, True),
        ("ahead", True, 1, False),
        ("waiting", False, 1, False),
        ("waiting", True, 2, True),
        ("drafting", False, 2, True),
        ("drafting", True, 0, False),
    ],
    quick=(0, 1),
    indirect=["run_ahead"],
)
def test_preempted_requests_get_the_tokens_of_undisturbed_ones(
    model: qwen3.Model, monkeypatch: pytest.MonkeyPatch, swap: bool, seed: int, prefix_caching: bool
):
    rng = random.Random(seed)
    engine = make_engine(
        model,
        block_size=rng.choice([8, 16]),
        kv_cache_bytes="16blocks",
        swap_bytes="16blocks" if swap else 0,
        max_num_batched_tokens=rng.choice([8, 30, 200]),
        max_num_seqs=8,
        watermark=rng.choice([0.0, 0.05]),
        enable_prefix_caching=prefix_caching,
    )
    copies = count_copies(engine, monkeypatch)
    shared = prompt(32, seed=seed)
    requests = {}
    for n in range(8):
        tokens = shared[: rng.choice([0, 20, 32])] + prompt(rng.randint(1, 30), seed=n)
        max_tokens = rng.randint(20, 50)
        requests[str(n)] = tokens, sampled(n, max_tokens) if n % 2 else greedy(max_tokens)
        engine.add_request(str(n), *requests[str(n)])
    outputs = run(engine)
    assert engine.stats().num_preemptions > 1
    for request_id, (tokens, params) in requests.items():
        assert outputs[request_id].outputs[0].token_ids == ask_alone(model, tokens, params), (
            request_id
        )
    assert (copies["out"] > 0) == swap and (copies["in"] > 0) == swap
    # What is still in the prefix cache is not copied back.
    assert copies["in"] <= copies["out"] if prefix_caching else copies["in"] == copies["out"]


def test_forks_that_are_preempted_get_the_tokens_of_undisturbed_ones(
    model: qwen3.Model, swap: bool
):
    params = sampled(seed=5, max_tokens=40, n=4)
    calm = make_engine(model)
    calm.add_request("a", prompt(40), params)
    expected = [completion.token_ids for completion in run(calm)["a"].outputs]
    engine = make_engine(
        model, kv_cache_bytes="12blocks", swap_bytes="12blocks" if swap else 0, max_num_seqs=8
    )
    engine.add_request("a", prompt(40), params)
    engine.add_request("b", prompt(40), params)
    outputs = run(engine)
    assert engine.stats().num_preemptions > 3 and calm.stats().num_preemptions == 0
    for request_id in ("a", "b"):
        # Both have the same seed.
        assert [completion.token_ids for completion in outputs[request_id].outputs] == expected


@in_one_way
def test_what_comes_back_from_the_swap_space_is_what_went_there(
    model: qwen3.Model, monkeypatch: pytest.MonkeyPatch
):
    engine = make_engine_without_drafts(
        model,
        kv_cache_bytes="8blocks",
        swap_bytes="8blocks",
        max_num_seqs=2,
        enable_prefix_caching=False,
        watermark=0,
        run_ahead=False,  # Its rows are looked at after each step.
    )
    manager, seqs = engine.manager, sequences_of(engine)
    engine.add_request("first", prompt(40), greedy(60))
    engine.add_request("second", prompt(41), greedy(30))

    def rows_of(seq: tuple[str, int]) -> list[np.ndarray]:
        rows = [array for layer in range(2) for array in seqs.materialize(seq, layer)]
        return [np.array(array) for array in rows]

    before: list[np.ndarray] = []
    stages = []
    while engine.has_unfinished_requests():
        is_present = ("second", 0) in manager.tables
        if is_present:
            rows = rows_of(("second", 0))
        engine.step()
        if is_present and ("second", 0) not in manager.tables and engine.scheduler.num_preemptions:
            if engine.swap_space.num_used_tokens:
                before = rows
                stages.append("out")
                assert engine.stats().num_swapped_tokens == before[0].shape[1]
        elif not is_present and ("second", 0) in manager.tables and before:
            stages.append("in")
            assert engine.stats().num_swapped_tokens == 0
            num_tokens = before[0].shape[1]
            for ours, theirs in zip(rows_of(("second", 0)), before, strict=True):
                assert ours.shape[1] == num_tokens + 1, "nothing but the new token was computed"
                np.testing.assert_array_equal(ours[:, :num_tokens], theirs)
    assert stages == ["out", "in"]


def test_what_a_failed_step_was_to_swap_in_is_computed_again(
    model: qwen3.Model, monkeypatch: pytest.MonkeyPatch
):
    """It may be in the pool in part; none of it is kept in host memory."""
    engine = make_engine_without_drafts(
        model, kv_cache_bytes="8blocks", swap_bytes="8blocks", max_num_seqs=2, watermark=0
    )
    requests = {
        "first": (prompt(40), greedy(60, ignore_eos=True)),
        "second": (prompt(41), greedy(30, ignore_eos=True)),
        "third": (prompt(5), greedy(5, ignore_eos=True)),
    }
    for request_id, (tokens, params) in requests.items():
        engine.add_request(request_id, tokens, params)
    transfer, swapped = engine.runner._transfer, []

    def failing(transfer_: Any) -> None:
        if isinstance(transfer_, SwapIn) and not swapped:
            swapped.append(engine.swap_space.num_used_tokens)
            raise RuntimeError("no memory")
        transfer(transfer_)

    monkeypatch.setattr(engine.runner, "_transfer", failing)
    outputs = {}
    while not swapped:
        outputs |= {output.request_id: output for output in engine.step()}
    assert swapped[0] > 0
    assert (engine.stats().num_swapped_tokens, engine.swap_space.tier._blocks) == (0, {})
    outputs |= run(engine)
    for request_id, (tokens, params) in requests.items():
        assert outputs[request_id].outputs[0].token_ids == ask_alone(model, tokens, params)


@in_one_way
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_precision_comes_back_bit_by_bit(model: qwen3.Model, dtype: mx.Dtype):
    half = qwen3.Model(model.args)
    half.set_dtype(dtype)
    seqs = sequences_of(Engine(half, kv_cache_bytes="100blocks"))
    rows = mx.random.normal((2, 37, 2, 16)).astype(dtype)
    seqs.append("a", rows, rows * 2)
    swapped = swapped_out(seqs, "a")
    before = [seqs.materialize("a", layer) for layer in range(2)]
    seqs.free("a")
    seqs.append("other", -rows, -rows)
    swap_in(seqs, "a", swapped)
    seqs.trim("a", 37)
    for layer in range(2):
        for ours, theirs in zip(seqs.materialize("a", layer), before[layer], strict=True):
            assert mx.array_equal(ours, theirs)


def test_a_swapped_request_that_is_aborted_gives_back_its_place(model: qwen3.Model):
    engine = make_engine(
        model, kv_cache_bytes="8blocks", swap_bytes="8blocks", max_num_seqs=2, watermark=0
    )
    engine.add_request("first", prompt(40), greedy(60))
    engine.add_request("second", prompt(41), greedy(60))
    while not engine.stats().num_swapped_tokens:
        engine.step()
    engine.abort("second")
    assert engine.stats().num_swapped_tokens == 0
    outputs = run(engine)
    assert outputs["second"].outputs[0].finish_reason == "abort"
    assert outputs["first"].outputs[0].token_ids == ask_alone(model, prompt(40), greedy(60))


def test_a_full_swap_space_sends_the_next_ones_to_be_computed_again(
    model: qwen3.Model, monkeypatch: pytest.MonkeyPatch
):
    engine = make_engine(
        model, kv_cache_bytes="14blocks", swap_bytes="4blocks", max_num_seqs=4, watermark=0
    )
    requests = {str(n): (prompt(40, seed=n), greedy(60)) for n in range(4)}
    for request_id, (tokens, params) in requests.items():
        engine.add_request(request_id, tokens, params)
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, engine.stats().num_swapped_tokens)

    outputs = run(engine, look)
    assert 0 < most <= 64
    for request_id, (tokens, params) in requests.items():
        assert outputs[request_id].outputs[0].token_ids == ask_alone(model, tokens, params)


@in_one_way
def test_by_default_sizes_decide_whether_requests_are_swapped(
    model: qwen3.Model, monkeypatch: pytest.MonkeyPatch
):
    for is_cheaper, num_blocks in ((True, 10), (False, 0)):
        monkeypatch.setattr(kv_cache, "is_swapping_cheaper", lambda n, m: is_cheaper)  # noqa: B023
        engine = make_engine(model, kv_cache_bytes="80blocks")
        assert engine.swap_space.num_blocks == num_blocks


def test_the_oldest_request_is_never_preempted(model: qwen3.Model, swap: bool):
    engine = make_engine(
        model, kv_cache_bytes="10blocks", swap_bytes="10blocks" if swap else 0, max_num_seqs=6
    )
    for n in range(6):
        engine.add_request(str(n), prompt(16, seed=n), greedy(80))
    first = engine.scheduler.completions["0", 0]
    run(engine)
    assert engine.scheduler.num_preemptions > 5 and first.num_preemptions == 0


@mostly_slow(("run_ahead", "swap"), [("ahead", False), ("waiting", True)], indirect=["run_ahead"])
def test_an_urgent_request_beside_sixteen_long_answers_has_its_first_token_within_three_steps(
    model: qwen3.Model, swap: bool
):
    options = {"max_num_seqs": 16, "enable_prefix_caching": False}
    requests = {str(n): (prompt(5, seed=n), greedy(70, ignore_eos=True)) for n in range(16)}
    calm = make_engine_without_drafts(model, kv_cache_bytes="400blocks", **options)
    expected = ask(calm, requests)
    # All blocks are held when it comes, but for the watermark.
    engine = make_engine_without_drafts(
        model, kv_cache_bytes="68blocks", swap_bytes="40blocks" if swap else 0, **options
    )
    for request_id, (tokens, params) in requests.items():
        engine.add_request(request_id, tokens, params)
    for _ in range(50):
        engine.step()
    num_free = engine.scheduler.max_num_blocks - engine.manager.pool.num_used_blocks
    assert (len(engine.scheduler.running), num_free) == (16, 4)
    engine.add_request("urgent", prompt(30), greedy(5), priority=-100)
    outputs = [output for _ in range(3) for output in engine.step()]
    urgent = [output for output in outputs if output.request_id == "urgent"]
    assert urgent and urgent[-1].outputs[0].token_ids
    assert engine.scheduler.num_preemptions == 1
    tokens_of = {
        request_id: output.outputs[0].token_ids for request_id, output in run(engine).items()
    }
    assert tokens_of == expected | {"urgent": ask_alone(model, prompt(30), greedy(5))}


@mostly_slow(
    ("run_ahead", "kind", "swap"),
    [
        ("waiting", "windowed", False),
        ("ahead", "windowed", True),
        ("ahead", "recurrent", False),
        ("waiting", "recurrent", True),
        ("ahead", "basic", False),
    ],
    quick=(1, 4),
    indirect=["run_ahead"],
)
def test_an_urgent_request_takes_a_place_whatever_the_model_keeps_and_its_victim_goes_on(
    model: qwen3.Model, kind: str, swap: bool
):
    options: dict[str, Any] = {}
    of_kind: Any = model
    if kind == "windowed":
        of_kind, options = model_and_options("both")
    elif kind == "recurrent":
        of_kind = adapted_model("falcon_h1")
    else:
        options = {"kv": "basic"}
    options |= {"kv_cache_bytes": "300blocks", "max_num_seqs": 3, "enable_prefix_caching": False}
    requests = {str(n): (prompt(12, seed=n), greedy(70, ignore_eos=True)) for n in range(3)}
    urgent = {"urgent": (prompt(30), greedy(5, ignore_eos=True))}
    calm = make_engine_without_drafts(of_kind, **options)
    expected = ask(calm, requests) | ask(calm, urgent)
    assert calm.scheduler.num_preemptions == 0
    if kind != "basic":
        options |= {"swap_bytes": "100blocks" if swap else 0}
    engine = make_engine_without_drafts(of_kind, **options)
    for request_id, (tokens, params) in requests.items():
        engine.add_request(request_id, tokens, params)
    for _ in range(52):  # Tokens have left the windows.
        engine.step()
    victim = engine.scheduler.running[-1]
    engine.add_request("urgent", *urgent["urgent"], priority=-1)
    outputs = [output for _ in range(3) for output in engine.step()]
    assert any(output.request_id == "urgent" and output.outputs[0].token_ids for output in outputs)
    assert engine.scheduler.num_preemptions == victim.num_preemptions == 1
    assert bool(engine.swap_space.num_used_tokens) == swap
    answers = {name: output.outputs[0].token_ids for name, output in run(engine).items()}
    assert answers == expected
