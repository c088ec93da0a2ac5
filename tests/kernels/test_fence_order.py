"""The order of kernel calls on one slab: their fences make a chain, and the checker sees where a
link is missing.
"""

from __future__ import annotations

import mlx.core as mx
import pytest
from helpers.backends import METAL, REFERENCE
from helpers.engine_runs import lose_all_kv
from helpers.fence_order import disorders
from helpers.numpy_attention import before_the_step, make_problem
from helpers.quantised_problems import quantised
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from metal_emulator.checks import Call
from paged_testing.by_hand import slots_of

from mlx_paged import Engine, SamplingParams, demo_model_path, load
from mlx_paged.cache import KVCacheConfig, PagedKVCache, Sequences
from mlx_paged.ops import AttentionParams, KVHandle, kernels

CONFIG = KVCacheConfig.uniform(
    num_layers=2, num_kv_heads=1, head_dim=32, dtype="float32", block_size=8, num_blocks=24
)
ROWS = mx.ones((1, 2, 32))


def names(trace: list[Call]) -> list[str]:
    return [call.kernel.removeprefix("mlx_paged_") for call in trace]


def use_every_operation(problem) -> None:
    kv = problem.kv
    rows = mx.ones((1, kv.num_kv_heads, kv.key_dim))
    free = sorted(
        set(range(kv.num_blocks)) - {block for table in problem.tables for block in table}
    )
    METAL.reshape_and_cache(
        (rows,), (rows,), kv, slots_of([free[0] * kv.block_size], kv.block_size)
    )
    METAL.attend(*problem.args)
    METAL.copy_blocks(kv, [(free[0], free[1])])
    METAL.gather_blocks(kv, [free[1]], kv.block_size * len([free[1]]))
    METAL.reshape_and_cache(
        (rows,), (rows,), kv, slots_of([free[1] * kv.block_size], kv.block_size)
    )


def test_all_operations_on_a_slab_are_one_chain(metal):
    use_every_operation(make_problem([5, 300], 2))
    assert names(metal) == [
        "reshape_and_cache",
        "paged_attention",
        "merge_partitions",
        "copy_blocks",
        "gather_blocks",
        "reshape_and_cache",
    ]
    assert disorders(metal) == []
    # Each dispatch counts the fence up by one, so the last one says how long the chain is.
    assert metal[-1].outputs["fence_out"].tolist() == [5] * 8


def test_two_layers_are_two_chains_that_do_not_wait_for_each_other(metal):
    problems = [make_problem([5], 1, seed=seed) for seed in range(2)]
    for problem in problems:
        use_every_operation(problem)
    assert disorders(metal) == []
    assert [problem.kv.fence[0].item() for problem in problems] == [5, 5]


def lose_a_link(monkeypatch, name: str, link: str) -> None:
    """Kernel ``name`` no longer binds the fence before it, or no longer leaves its own."""
    chained = kernels._chained

    def broken(called, kv, *args, **kwargs):
        fence = kv.fence
        if called == name and link == "binds":
            kv.fence = None
        launch = chained(called, kv, *args, **kwargs)
        if called == name and link == "leaves":
            return lambda: [*launch()[:-1], fence]
        return launch

    monkeypatch.setattr(kernels, "_chained", broken)


def lack(calls: str, order: str) -> str:
    """What is said of the number and name of a call and of the one before it."""
    return "call {} ({}) is not behind call {} ({}): ".format(*calls.split()) + order


@pytest.mark.parametrize(
    ("name", "link", "calls", "order"),
    [
        ("paged_attention", "binds", "1 paged_attention 0 reshape_and_cache", "read after write"),
        ("paged_attention", "leaves", "3 copy_blocks 1 paged_attention", "write after read"),
        (
            "reshape_and_cache",
            "leaves",
            "1 paged_attention 0 reshape_and_cache",
            "read after write",
        ),
        ("copy_blocks", "binds", "3 copy_blocks 0 reshape_and_cache", "write after write"),
        ("copy_blocks", "leaves", "4 gather_blocks 3 copy_blocks", "read after write"),
        ("gather_blocks", "binds", "4 gather_blocks 3 copy_blocks", "read after write"),
        ("gather_blocks", "leaves", "5 reshape_and_cache 4 gather_blocks", "write after read"),
        ("reshape_and_cache", "binds", "5 reshape_and_cache 4 gather_blocks", "write after read"),
    ],
)
def test_a_missing_link_is_found(name, link, calls, order, metal, monkeypatch):
    lose_a_link(monkeypatch, name, link)
    use_every_operation(make_problem([5, 300], 2))
    assert lack(calls, order) in disorders(metal)


def use_every_quantised_operation(bits: int) -> KVHandle:
    problem = quantised(make_problem([5, 300], 1, head_dim=32), bits, bits)
    kv, k, v = before_the_step(problem)
    settings = problem.args[2:]
    METAL.update(k, v, kv, problem.metadata.slot_mapping)
    METAL.update_and_attend(problem.q, k, v, kv, *settings)
    METAL.update_and_attend(problem.q, k, v, kv, *settings)
    METAL.copy_blocks(kv, [(problem.tables[0][0], problem.tables[1][0])])
    METAL.update(k, v, kv, problem.metadata.slot_mapping)
    METAL.gather_blocks(kv, problem.tables[0], 5)
    METAL.update(k, v, kv, problem.metadata.slot_mapping)
    return kv


STEP = ("encode_and_cache", "paged_attention_affine", "merge_partitions")
QUANTISED = [
    *("encode_and_cache", *STEP, *STEP),
    *("copy_blocks", "copy_blocks", "copy_blocks", "encode_and_cache"),
    *("dequantize_blocks", "encode_and_cache"),
]


@pytest.mark.parametrize("bits", [8, 4], ids=["rows_alone", "with_rotated_queries"])
def test_all_operations_on_quantised_slabs_are_one_chain(bits, metal):
    kv = use_every_quantised_operation(bits)
    assert names(metal) == QUANTISED
    assert disorders(metal) == []
    num_chained = len(QUANTISED) - QUANTISED.count("merge_partitions")
    mx.eval(kv.fence)
    assert kv.fence.tolist() == [num_chained] * 8


@pytest.mark.parametrize("bits", [8, 4], ids=["rows_alone", "with_rotated_queries"])
@pytest.mark.parametrize(
    ("name", "link", "calls", "order"),
    [
        ("encode_and_cache", "binds", "4 encode_and_cache 2 paged_attention_affine", "write after"),
        ("encode_and_cache", "leaves", "2 paged_attention_affine 1 encode_and_cache", "read after"),
        (
            "paged_attention_affine",
            "leaves",
            "4 encode_and_cache 2 paged_attention_affine",
            "write after",
        ),
        ("dequantize_blocks", "leaves", "12 encode_and_cache 11 dequantize_blocks", "write after"),
        ("dequantize_blocks", "binds", "11 dequantize_blocks 10 encode_and_cache", "read after"),
    ],
)
def test_a_missing_link_of_quantised_slabs_is_found(
    name, link, calls, order, bits, metal, monkeypatch
):
    lose_a_link(monkeypatch, name, link)
    use_every_quantised_operation(bits)
    assert any(line.startswith(lack(calls, order)) for line in disorders(metal))


def step(seqs: Sequences, counts: dict[str, int]) -> None:
    with seqs.step(counts) as packed:
        rows = mx.ones((packed.num_tokens, 1, 32))
        queries = mx.ones((packed.num_tokens, 2, 32))
        for layer in range(len(CONFIG.layers)):
            seqs.cache.layers[layer].update_and_attend(queries, rows, rows, scale=1.0)
        mx.eval(seqs.cache.arrays)


def test_a_freed_block_is_written_behind_the_last_reader_of_its_last_owner(metal):
    seqs = Sequences(PagedKVCache(CONFIG, backend="metal", initial_blocks=3))
    step(seqs, {"a": 17})
    step(seqs, {"a": 1})
    last_reader = len(metal) - 1
    blocks_of_a = set(seqs.block_ids("a"))
    seqs.free("a")
    step(seqs, {"b": 20})
    assert set(seqs.block_ids("b")) == blocks_of_a
    assert names(metal)[last_reader] == "paged_attention"
    assert disorders(metal) == []
    # Without what "a" left behind, the writes of "b" would be free to come first.
    for call in metal[last_reader - 1 : last_reader + 1]:
        call.outputs.clear()
    assert any(f"is not behind call {last_reader}" in line for line in disorders(metal))


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("step"), st.dictionaries(st.sampled_from("abc"), st.integers(1, 12), min_size=1)
        ),
        st.tuples(st.sampled_from(["free", "trim", "materialize"]), st.sampled_from("abc")),
        st.tuples(st.just("fork"), st.sampled_from(["ab", "bc", "ca"])),
    ),
    min_size=3,
    max_size=9,
)


@pytest.mark.slow
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(actions=ACTIONS)
def test_any_use_of_a_cache_is_in_order(metal, actions):
    metal.clear()
    seqs = Sequences(PagedKVCache(CONFIG, backend="metal", initial_blocks=24))
    for action, what in actions:
        if action == "step":
            if sum(seqs.seq_len(seq) for seq in seqs) + sum(what.values()) < 100:
                step(seqs, what)
        elif action == "fork":
            if what[0] in seqs and what[1] not in seqs:
                seqs.fork(*what)
        elif what in seqs:
            if action == "free":
                seqs.free(what)
            elif action == "trim":
                seqs.trim(what, seqs.seq_len(what) // 2)
            else:
                seqs.materialize(what, 0)
    assert disorders(metal) == []


def test_steps_in_flight_are_in_order_with_all_that_comes_between_them(metal, monkeypatch):
    """Blocks are reused, requests are aborted and slabs grow while a step is in flight."""
    model, tokenizer = load(demo_model_path())
    engine = Engine(model, tokenizer, kv_cache_bytes="24blocks", watermark=0.0, block_size=8)
    engine.cache._initial_blocks = 6
    lose_all_kv(engine)
    grow, old_slabs, growths = KVHandle.grow, [], []

    def recorded_grow(kv: KVHandle, num_new_blocks: int) -> None:
        # They stay alive, so that no new slab has the address of an old one.
        old_slabs.extend(kv.slabs)
        growths.append(len(engine.steps.in_flight))
        grow(kv, num_new_blocks)

    monkeypatch.setattr(KVHandle, "grow", recorded_grow)
    tokens = tokenizer.encode("The code of apple is 4821. The code of pear is 1234.")
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    num_in_flight, aborted_blocks, written_later = 0, set(), set()
    for number in range(5):
        engine.add_request(str(number), tokens[: 5 + 7 * number], params)
        for _ in range(4):
            engine.step()
            num_in_flight += len(engine.steps.in_flight)
            tables = engine.manager.tables
            written_later |= {table.block_ids[-1] for table in tables.values()}
        if number in (1, 3):
            assert engine.steps.in_flight
            aborted_blocks |= set(tables[(str(number), 0)].block_ids)
            written_later.clear()
            engine.abort(str(number))
    while engine.has_unfinished_requests():
        engine.step()
    assert num_in_flight > 15 and 1 in growths
    assert aborted_blocks & written_later, "a block of an aborted request is used again"
    assert disorders(metal) == []
    # The chain is what makes the order: without the fence of one call, others are not behind it.
    calls = [call for call in metal if call.kernel == "mlx_paged_paged_attention"]
    calls[len(calls) // 2].outputs.clear()
    assert disorders(metal) != []


class SlabOfKernels:
    """Stands for a slab where nothing but a kernel may touch it: no operation of MLX takes it."""

    def __init__(self, like: mx.array):
        self.shape, self.dtype, self.ndim, self.nbytes = (
            like.shape,
            like.dtype,
            like.ndim,
            like.nbytes,
        )


@pytest.mark.parametrize("query_len", [1, 8, 20], ids=["decode", "run", "prefill"])
def test_nothing_but_kernels_touches_a_slab(query_len, metal, monkeypatch):
    problem = make_problem([40], query_len)
    calls = []

    def record_only(name):
        def call(inputs, output_shapes, output_dtypes, **_):
            calls.append(name)
            return [
                mx.zeros(shape, dtype)
                for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
            ]

        return call

    monkeypatch.setattr(kernels, "kernel", record_only)
    slabs = [SlabOfKernels(slab) for slab in problem.kv.arrays]
    problem.kv.k, problem.kv.v = ((slab,) for slab in slabs)

    use_every_operation(problem)
    rows = mx.ones((query_len, problem.kv.num_kv_heads, problem.kv.key_dim))
    out = METAL.update_and_attend(
        problem.q,
        rows,
        rows,
        problem.kv,
        problem.metadata,
        AttentionParams(problem.params.scale, problem.params.window, problem.params.sinks),
    )
    mx.eval(out, problem.kv.fence)
    assert list(problem.kv.slabs) == slabs
    assert len(calls) >= 6


@pytest.mark.parametrize(
    "change", [lambda kv: kv.grow(2), lambda kv: kv.shrink_to(2)], ids=["growth", "shrinking"]
)
def test_a_change_of_size_waits_for_the_chain_and_begins_a_new_one(change, metal):
    kv = KVHandle.allocate(3, 1, 8, 32, 32)
    METAL.reshape_and_cache((ROWS[:, :1],), (ROWS[:, :1],), kv, slots_of([9], kv.block_size))
    assert kv.fence is not None
    change(kv)
    assert kv.fence is None
    assert kv.k[0][1, 0, 1].tolist() == [1.0] * 32


def test_plain_mlx_operations_wait_for_the_chain(metal):
    kv = KVHandle.allocate(2, 1, 8, 32, 32)
    METAL.reshape_and_cache((ROWS[:, :1],), (ROWS[:, :1],), kv, slots_of([3], kv.block_size))
    keys, _ = REFERENCE.gather_blocks(kv, [0], 4)
    assert kv.fence is None
    assert keys[0, 3].tolist() == [1.0] * 32
