"""What `on_a_mac.py` measures, section by section. Each yields its rows one by one, so that a
section that is cut off leaves what it has.
"""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from benchmarks.kernels import attention
from benchmarks.lib.card import machine_card
from benchmarks.lib.models import QWEN3_0_6B_LAYERS, load_both, random_weights
from benchmarks.mac import mac_kernels
from benchmarks.serving import throughput
from benchmarks.serving.throughput_scenarios import SampleRequest, Scenario
from benchmarks.serving.throughput_sides import MlxLmBatch, MlxLmOneByOne, PagedEngine, Side
from mlx_paged.cli.fit.machine import Machine
from mlx_paged.cli.fit.verdict import Fit, Footprint
from mlx_paged.engine.engine import Engine
from mlx_paged.errors import ArgumentError
from mlx_paged.models.mlx_lm import check_model
from mlx_paged.ops import AttentionShape, KVFormat, KVHandle, SlotMapping, choose
from mlx_paged.ops.in_place import check_writes_in_place
from mlx_paged.ops.metal import MetalBackend, decode_runs_of
from mlx_paged.ops.self_check import WorkingKernels, try_kernels
from mlx_paged.options.config import KVBits
from mlx_paged.options.sampling_params import SamplingParams

Row: TypeAlias = dict[str, Any]

QWEN3_0_6B = QWEN3_0_6B_LAYERS | {"num_hidden_layers": 28, "vocab_size": 151_936}
NEEDS_METAL: Row = {"skipped": "needs Metal"}


# The shapes whose kernels are tried, the usual ones first; of dense rows head_dim, group,
# block_size and dtype.
F16, BF16, F32 = "float16", "bfloat16", "float32"
_DENSE_SHAPES = [
    (128, 2, 16, BF16),
    *((128, group, 16, BF16) for group in (1, 4, 5, 8)),
    *((128, group, 16, F16) for group in (2, 4, 8)),
    *((64, group, 16, dtype) for group in (4, 8) for dtype in (F16, BF16)),
    *((256, 2, 16, dtype) for dtype in (F16, BF16)),
    *((dim, 2, 16, F32) for dim in (32, 64, 80, 96, 128, 256)),
    *((dim, 2, 16, F16) for dim in (32, 80, 96)),
    *((128, 2, block_size, F16) for block_size in (8, 32, 64)),
    *((128, 16, 16, dtype) for dtype in (F16, BF16)),
    *((512, 4, 16, dtype) for dtype in (F16, BF16)),
    (128, 32, 16, BF16),
]
_LATENTS = AttentionShape(1, 16, 512, 64, 16, KVFormat.dense(BF16), holds_latents=True)
KERNEL_SHAPES = [
    *(
        AttentionShape(2, group, dim, dim, size, KVFormat.dense(dtype))
        for dim, group, size, dtype in _DENSE_SHAPES
    ),
    *(
        AttentionShape(2, 4, 128, 128, 16, KVFormat.quantised(KVBits(*bits), 128, 128, BF16))
        for bits in ((8, 8), (8, 4), (4, 4))
    ),
    AttentionShape(4, 1, 96, 64, 16, KVFormat.quantised(KVBits(8, 8), 96, 64, BF16)),
    _LATENTS,
    replace(_LATENTS, format=KVFormat.quantised(KVBits(8, 8), 512, 64, BF16)),
]


NUM_LAUNCHES = 400


@dataclass(frozen=True)
class Sizes:
    """How much is measured: on a GPU, on a CPU, or in a moment."""

    model: tuple[dict[str, Any], mx.Dtype]  # whose weights are random
    # Arguments of attention.py, one list after another, what matters most first.
    attention: tuple[list[str], ...]
    copy_bytes: int
    num_kernel_shapes: int
    streams: tuple[int, ...]
    prompt: int  # tokens of each stream
    answer: int
    long_prompt: int
    turns: int
    decodes: int  # whose memory is counted
    keys: int  # that a decode attends to, where kernels are held side by side
    layer_width: int  # of layers whose cost by rows is measured, and the bytes of a chain of them
    chain_bytes: int


BATCHES = ["--batches", "1", "8"]
SIZES = {
    "gpu": Sizes(
        model=(QWEN3_0_6B, mx.bfloat16),
        attention=(
            ["--groups", "2", "4", "--contexts", "256", "1024", "4096", "16384", *BATCHES],
            ["--groups", "1", "8", "--contexts", "1024", "16384", *BATCHES],
            ["--groups", "2", "8", "--contexts", "4096", "--dtypes", "f16", "--batches", "1"],
            ["--groups", "4", "--contexts", "4096", "--head-dims", "64", "256", *BATCHES],
            ["--groups", "2", "--contexts", "4096", "--runs", "4", "8", "--batches", "1"],
        ),
        copy_bytes=1 << 30,
        num_kernel_shapes=len(KERNEL_SHAPES),
        streams=(1, 8, 32),
        prompt=128,
        answer=96,
        long_prompt=2048,
        turns=3,
        decodes=1000,
        keys=16_384,
        layer_width=4096,
        chain_bytes=1 << 30,
    ),
    "cpu": Sizes(
        model=(throughput.SHAPE, mx.float32),
        attention=(
            ["--groups", "2", "--contexts", "256", "1024", "--batches", "1", "4"],
            ["--groups", "8", "--contexts", "1024", "--batches", "1"],
        ),
        copy_bytes=1 << 28,
        num_kernel_shapes=0,
        streams=(1, 4),
        prompt=64,
        answer=32,
        long_prompt=256,
        turns=2,
        decodes=100,
        keys=1024,
        layer_width=512,
        chain_bytes=1 << 24,
    ),
    "quick": Sizes(
        model=(throughput.QUICK_SHAPE, mx.float32),
        attention=(["--groups", "2", "--contexts", "64", "300", "--batches", "1"],),
        copy_bytes=1 << 24,
        num_kernel_shapes=1,
        streams=(1, 2),
        prompt=16,
        answer=4,
        long_prompt=64,
        turns=1,
        decodes=20,
        keys=300,
        layer_width=256,
        chain_bytes=1,
    ),
}


def measure_device(sizes: Sizes, model: str) -> Iterator[Row]:
    """The machine, and how large a part of it MLX may use."""
    info = mx.device_info()
    names = ("architecture", "memory_size", "max_recommended_working_set_size")
    yield (
        machine_card()
        | {"os": platform.mac_ver()[0] or platform.release(), "model": model}
        | {name: info[name] for name in names if name in info}
        | {"environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("MLX_")}}
    )


def measure_writes(sizes: Sizes, model: str) -> Iterator[Row]:
    """Whether slabs are written in place, in the order of the fences."""
    yield {"failure": check_writes_in_place()} if choose.is_metal_available() else NEEDS_METAL


def measure_kernels(sizes: Sizes, model: str) -> Iterator[Row]:
    """Every kernel against plain MLX in many shapes, and how long it takes to compile and try."""
    if not choose.is_metal_available():
        yield NEEDS_METAL
        return
    for shape in KERNEL_SHAPES[: sizes.num_kernel_shapes]:
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = try_kernels(shape)
        yield {
            "shape": str(shape),
            "seconds": round(time.perf_counter() - start, 3),
            "right": found
            == WorkingKernels(True, True, decode_runs_of(shape.group, shape.holds_latents)),
            "said": [str(warning.message) for warning in said],
        }


def measure_launches(sizes: Sizes, model: str) -> Iterator[Row]:
    """What a launch costs that has to wait for the one before, as those of a layer's slabs do: one
    that copies a token's rows into their slots, and one that encodes them.
    """
    if not choose.is_metal_available():
        yield NEEDS_METAL
        return
    backend, dtype = MetalBackend(), "bfloat16"
    rows = mx.random.normal((1, 8, 128)).astype(mx.bfloat16)
    for bits in (None, KVBits(8, 8), KVBits(8, 4), KVBits(4, 4)):
        format = (
            KVFormat.dense(dtype) if bits is None else KVFormat.quantised(bits, 128, 128, dtype)
        )
        kv = KVHandle.allocate(64, 8, 16, 128, 128, format)
        slots = SlotMapping([17], 16)
        seconds = []
        for _ in range(sizes.turns + 1):
            for _ in range(NUM_LAUNCHES):
                backend.update(rows, rows, kv, slots)
            start = time.perf_counter()
            mx.eval(kv.arrays)
            seconds.append(time.perf_counter() - start)
        # The first turn compiles.
        micros = float(np.median(seconds[1:])) / NUM_LAUNCHES * 1e6
        yield {"rows": str(format), "us_per_launch": round(micros, 2)}


def measure_questions(sizes: Sizes, model: str) -> Iterator[Row]:
    """What was assumed of the kernels: each question with the answer that is expected."""
    if not choose.is_metal_available():
        yield NEEDS_METAL
        return
    turns, num_calls = sizes.turns, NUM_LAUNCHES // 8
    yield from mac_kernels.measure_registers()
    yield from mac_kernels.measure_merging(num_calls, turns)
    yield from mac_kernels.measure_comparisons(num_calls, turns, sizes.keys)
    yield measure_bits(load_models(sizes, model)[0], sizes.prompt, sizes.answer)


def measure_bits(model: nn.Module, num_tokens: int, max_tokens: int) -> Row:
    """How many answers of a deterministic engine have the same bits in a batch with drafts as alone
    without them.
    """
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=1)
    # Repetitions, so that drafts are looked up.
    prompts = {
        str(seq): [token % (3 + seq) for token in range(seq * num_tokens + 5)] for seq in range(4)
    }

    def answers(names: Sequence[str], num_drafts: int) -> dict[str, Any]:
        engine = Engine(
            model,
            None,
            kv_cache_bytes=f"{4 * (4 * num_tokens + max_tokens) // 16 + 16}blocks",
            deterministic=True,
            num_draft_tokens=num_drafts,
        )
        for name in names:
            engine.add_request(name, prompts[name], params)
        found = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                found[output.request_id] = output.outputs[0].logprobs
        engine.close()
        return found

    try:
        together = answers(list(prompts), 3)
    except ArgumentError as error:
        return {"skipped": str(error)}
    same = [name for name in prompts if answers([name], 0)[name] == together[name]]
    return {
        "question": "deterministic answers with the same bits in a batch as alone",
        "found": len(same),
        "expected": [len(prompts), len(prompts)],
    }


def measure_few_rows(sizes: Sizes, model: str) -> Iterator[Row]:
    """Whether what few_rows estimates of the two matmuls holds."""
    if not choose.is_metal_available():
        return iter([NEEDS_METAL])
    return mac_kernels.measure_few_rows(sizes.layer_width, sizes.chain_bytes, sizes.turns)


def measure_row_costs(sizes: Sizes, model: str) -> Iterator[Row]:
    """What a step costs by its rows, relative to one row: the table by which drafts are made."""
    return mac_kernels.measure_row_costs(sizes.layer_width, sizes.chain_bytes, sizes.turns)


def measure_bandwidth(sizes: Sizes, model: str) -> Iterator[Row]:
    """Bytes per second of MLX's own copy."""
    yield {"copy_gb_per_s": round(attention.measure_copy(sizes.copy_bytes, 8) / 1e9, 2)}


def measure_attention(sizes: Sizes, model: str) -> Iterator[Row]:
    """Paged attention beside MLX's SDPA, as attention.py measures it."""
    copy_bandwidth = attention.measure_copy(sizes.copy_bytes, 8)
    mx.random.seed(0)
    for argv in sizes.attention:
        orders = ["--orders", "shuffled", "--layers", "4", "--turns", "8"]
        args = attention.setup_arg_parser().parse_args([*orders, *argv])
        attention.fill_in_defaults(args)
        for shape in attention.shapes_of(args):
            if attention.is_too_large(shape, args):
                continue
            try:
                yield attention.measure_shape(shape, copy_bandwidth, args)
            except SystemExit as error:  # results that differ: the other shapes still count
                yield asdict(shape) | {"wrong": str(error)}
            mx.clear_cache()


def load_models(sizes: Sizes, model: str) -> tuple[nn.Module, nn.Module]:
    return random_weights(*sizes.model) if model == "random" else load_both(model)


def scenarios_of(sizes: Sizes, vocab_size: int) -> list[Scenario]:
    rng = np.random.default_rng(0)

    def scenario(name: str, num_streams: int, prompt: int, answer: int) -> Scenario:
        requests = [
            SampleRequest(str(index), rng.integers(0, vocab_size, prompt).tolist(), answer)
            for index in range(num_streams)
        ]
        what = f"{num_streams} x {prompt} + {answer} tokens"
        return Scenario(0, name, what, requests, pool_over_demand=2)

    return [
        *(
            scenario(f"streams: {num_streams}", num_streams, sizes.prompt, sizes.answer)
            for num_streams in sizes.streams
        ),
        scenario(LONG_PROMPT, 1, sizes.long_prompt, 2),
    ]


LONG_PROMPT = "long prompt"
OURS, AHEAD, WAITING, MLX_LM = "ours", "ours, ahead", "ours, waiting", "mlx-lm"
BUILT = "ours, decodes built in Python"
BY_MLX = "ours, MLX's matmul"
BASIC, BASIC_AHEAD = "basic", "basic, ahead"


def sides_of(
    ours: nn.Module, theirs: nn.Module, scenario: Scenario
) -> dict[str, Callable[[], Side]]:
    """Who serves a scenario; ours also with either cache, waiting and one step ahead, without
    replaying decodes, and with MLX's matmul alone.
    """
    alone = len(scenario.requests) == 1
    return {
        OURS: partial(PagedEngine, ours, scenario),
        MLX_LM: partial(MlxLmOneByOne if alone else MlxLmBatch, theirs, scenario),
        BUILT: partial(built_decodes, ours, scenario),
        BY_MLX: partial(PagedEngine, ours, scenario, matmul="mlx"),
        AHEAD: partial(PagedEngine, ours, scenario, run_ahead=True),
        WAITING: partial(PagedEngine, ours, scenario, run_ahead=False),
        BASIC: partial(PagedEngine, ours, scenario, kv="basic", run_ahead=False),
        BASIC_AHEAD: partial(PagedEngine, ours, scenario, kv="basic", run_ahead=True),
    }


def built_decodes(model: nn.Module, scenario: Scenario) -> PagedEngine:
    """Ours, each decode built in Python."""
    side = PagedEngine(model, scenario)
    side.engine.runner.compiled_decode = None
    return side


def serve_in_turns(
    sides: dict[str, Callable[[], Side]], scenario: Scenario, turns: int
) -> tuple[dict[str, Row], dict[str, dict[str, list[int]]]]:
    """Medians over turns of each side, and its tokens; the first turn only warms up."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    failures: dict[str, Row] = {}
    tokens: dict[str, dict[str, list[int]]] = {}
    for turn in range(turns + 1):
        for name, make in sides.items():
            if name in failures:
                continue
            throughput.forget()
            try:
                serving = throughput.serve(make(), scenario.requests)
            except Exception as error:  # the other sides still count
                failures[name] = {"error": f"{type(error).__name__}: {error}"}
                continue
            if turn:
                runs[name].append(serving.figures())
                tokens[name] = serving.tokens
    medians: dict[str, Row] = {
        name: {key: float(np.median([run[key] for run in figures])) for key in figures[0]}
        for name, figures in runs.items()
        if figures and name not in failures
    }
    return medians | failures, tokens


def estimated_speed(model: nn.Module, scenario: Scenario) -> float | None:
    """What `mlx-paged fit` says of decodes halfway; ``None`` for a chip that it does not know."""
    machine = Machine.here()
    if machine.bandwidth is None:
        return None
    first, num_streams = scenario.requests[0], len(scenario.requests)
    context = len(first.prompt_token_ids) + first.max_tokens // 2
    return Fit(Footprint(check_model(model)), machine, context).tokens_per_second(num_streams)


def measure_streams(sizes: Sizes, model: str) -> Iterator[Row]:
    """Prefill and decode through the engine beside mlx-lm's own loops, one stream and several."""
    ours, theirs = load_models(sizes, model)
    for scenario in scenarios_of(sizes, ours.args.vocab_size):
        figures, tokens = serve_in_turns(sides_of(ours, theirs, scenario), scenario, sizes.turns)
        yield {
            "name": scenario.name,
            "what": scenario.what,
            "num_streams": len(scenario.requests),
            "estimated_tokens_per_second": estimated_speed(ours, scenario),
            "sides": figures,
            "same_tokens": {
                name: throughput.share_of_same_tokens(tokens[name], tokens[OURS])
                for name in tokens
                if name != OURS and OURS in tokens
            },
        }


# MLX ends a command buffer after 40 operations or 40 Mi elements of inputs; slabs count whole.
LARGE_COMMAND_BUFFERS = {"MLX_MAX_MB_PER_BUFFER": "100000", "MLX_MAX_OPS_PER_BUFFER": "100"}


def measure_large_command_buffers(sizes: Sizes, model: str) -> Iterator[Row]:
    """The same streams once more where MLX's command buffers end later."""
    return measure_streams(sizes, model) if choose.is_metal_available() else iter([NEEDS_METAL])


def measure_memory(sizes: Sizes, model: str) -> Iterator[Row]:
    """What decodes at a constant batch obtain from the system, with and without a window, and what
    a step of a prompt takes at its highest beside the estimate.
    """
    ours, _ = load_models(sizes, model)
    num_seqs, warm_up = 8, sizes.decodes // 3
    for window in (None, 64):
        engine = Engine(
            ours,
            None,
            kv_cache_bytes=f"{num_seqs * (2 * sizes.decodes // 16 + 16)}blocks",
            preallocate=True,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(sizes.long_prompt, 64),
            max_num_mixed_tokens=64,
            window=window,
        )
        prompt = [token % 50 for token in range(sizes.long_prompt - 2)]
        mx.synchronize()
        mx.clear_cache()
        base = mx.get_active_memory()
        mx.reset_peak_memory()
        engine.add_request("prompt", prompt, SamplingParams(max_tokens=1))
        while engine.has_unfinished_requests():
            engine.step()
        peak = mx.get_peak_memory() - base
        params = SamplingParams(max_tokens=2 * sizes.decodes, ignore_eos=True)
        for seq in range(num_seqs):
            engine.add_request(str(seq), [seq + 1] * 20, params)
        # MLX gives nothing back then, so what it holds grows with each array that it has no buffer
        # for.
        before = mx.set_cache_limit(1 << 36)
        held = [0, 0]
        for index, num_steps in enumerate((warm_up, sizes.decodes)):
            for _ in range(num_steps):
                engine.step()
            mx.synchronize()
            held[index] = mx.get_active_memory() + mx.get_cache_memory()
        mx.set_cache_limit(before)
        engine.abort_all()
        yield {
            "window": window,
            "num_seqs": num_seqs,
            "num_decodes": sizes.decodes,
            "grown_bytes": held[1] - held[0],
            "prompt_tokens": len(prompt),
            "peak_bytes": peak,
            "estimated_bytes": engine.stats().nbytes_activations,
            "cache_limit": before,
        }


@dataclass(frozen=True)
class Section:
    name: str
    measure: Callable[[Sizes, str], Iterator[Row]]
    seconds: int  # after which no further row is begun
    environment: dict[str, str] | None = None


SECTIONS = [
    Section("device", measure_device, 20),
    Section("few rows", measure_few_rows, 30),
    Section("writes", measure_writes, 20),
    Section("bandwidth", measure_bandwidth, 30),
    Section("kernels", measure_kernels, 80),
    Section("launches", measure_launches, 10),
    Section("questions", measure_questions, 40),
    Section("row costs", measure_row_costs, 30),
    Section("attention", measure_attention, 80),
    Section("streams", measure_streams, 100),
    Section("memory", measure_memory, 60),
    Section("large command buffers", measure_large_command_buffers, 70, LARGE_COMMAND_BUFFERS),
]
