"""What only a Mac can say of the kernels, asked with the answer that is expected: sections of
`on_a_mac.py`.

Each row is a question, what was found, and between which figures it was expected. Expectations come
from docs/internals/kernels.md, "Cost model": issue slots by Mesa's compiler and bytes over
published bandwidths.
"""

from __future__ import annotations

import itertools
import re
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_paged.engine.speculation.step_costs import CHIPS
from mlx_paged.models.kv_cache import weight_nbytes
from mlx_paged.models.matmul import LinearShape, multiplied_by_mlx, multiplied_by_rows
from mlx_paged.models.matmul_choice import seconds_of_chain, some_rows
from mlx_paged.ops import (
    AttentionMetadata,
    AttentionParams,
    KVFormat,
    KVHandle,
    PlanKey,
    attend_to_latents,
    attention_plan,
    device,
    kernels,
)
from mlx_paged.ops.attention_plan import AttentionPlan
from mlx_paged.ops.metal import MetalBackend
from mlx_paged.options.config import KVBits

Row: TypeAlias = dict[str, Any]

BLOCK_SIZE = 16
METAL = MetalBackend()


@dataclass(frozen=True)
class Decode:
    """One new token of one sequence, in one layer."""

    keys: int = 16_384
    num_kv_heads: int = 8
    group: int = 4
    key_dim: int = 128
    value_dim: int = 128
    bits: KVBits | None = None
    softcap: float | None = None
    dtype: str = "bfloat16"
    holds_latents: bool = False  # in the place of K, and their rotated keys in that of V

    def slabs(self) -> KVHandle:
        form = KVFormat.dense(self.dtype)
        if self.bits is not None:
            form = KVFormat.quantised(self.bits, self.key_dim, self.value_dim, self.dtype)
        shape = self.num_kv_heads, BLOCK_SIZE, self.key_dim, self.value_dim
        return KVHandle.allocate(-(-self.keys // BLOCK_SIZE), *shape, form)

    def step(self) -> AttentionMetadata:
        blocks = array("i", range(-(-self.keys // BLOCK_SIZE)))
        return AttentionMetadata([blocks], [self.keys], [1], BLOCK_SIZE)

    def queries(self) -> mx.array:
        width = self.key_dim + (self.value_dim if self.holds_latents else 0)
        rows = mx.random.normal((1, self.num_kv_heads * self.group, width))
        return rows.astype(getattr(mx, self.dtype))

    @property
    def params(self) -> AttentionParams:
        scale, latents = self.key_dim**-0.5, self.holds_latents
        return AttentionParams(scale, softcap=self.softcap, holds_latents=latents)

    def attention(self) -> Callable[[], mx.array]:
        """A call that waits for the one before it, by the fence of the slabs."""
        kv, step, q = self.slabs(), self.step(), self.queries()
        return lambda: METAL.attend(q, kv, step, self.params)

    def attention_to_gathered_latents(self) -> Callable[[], mx.array]:
        """The same on latents that are gathered first."""
        kv, step, q = self.slabs(), self.step(), self.queries()

        def attend() -> mx.array:
            rows = [(k[None], v[None]) for k, v in METAL.gather_step(kv, step)]
            return attend_to_latents(q, rows, step, self.params)

        return attend


def microseconds(call: Callable[[], mx.array], num_calls: int, turns: int) -> float:
    """Of one of many calls in a row, the median over turns; the first one warms up."""
    seconds = []
    for _ in range(turns + 1):
        results = [call() for _ in range(num_calls)]
        start = time.perf_counter()
        mx.eval(results)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[1:])) / num_calls * 1e6


def answer(question: str, found: float, low: float, high: float) -> Row:
    return {"question": question, "found": float(f"{found:.3g}"), "expected": [low, high]}


BASE = Decode()
# What is held beside what, and between which shares of its time it should take.
COMPARISONS = {
    "8 bits of K and V over bfloat16": (replace(BASE, bits=KVBits(8, 8)), BASE, 0.5, 0.65),
    "8 bits of K and 4 of V over bfloat16": (replace(BASE, bits=KVBits(8, 4)), BASE, 0.4, 0.55),
    "4 bits of K and V over bfloat16": (replace(BASE, bits=KVBits(4, 4)), BASE, 0.28, 0.5),
    "head_dim 512 over 128": (replace(BASE, key_dim=512, value_dim=512), BASE, 3.6, 4.4),
    "K of 96 and V of 64 over both of 128, one head": (
        replace(BASE, key_dim=96, value_dim=64, group=1),
        replace(BASE, group=1),
        0.55,
        0.75,
    ),
    "capped scores over others": (replace(BASE, softcap=50.0), BASE, 0.95, 1.1),
    "32 query heads for each KV head over 16": (
        replace(BASE, group=32, num_kv_heads=2),
        replace(BASE, group=16, num_kv_heads=2),
        1.7,
        2.2,
    ),
}
LATENTS = Decode(num_kv_heads=1, group=16, key_dim=512, value_dim=64, holds_latents=True)
# Heads and bits, and between which shares of the time of gathering latents they should take.
LATENT_SHARES = (
    (8, None, 0.12, 0.4),
    (16, None, 0.25, 0.7),
    (20, None, 0.3, 0.8),
    (32, None, 0.5, 1.2),
    (16, KVBits(8, 8), 0.3, 0.8),
)


def measure_comparisons(num_calls: int, turns: int, keys: int) -> Iterator[Row]:
    """Decodes of one kind over another."""
    for question, (one, other, low, high) in COMPARISONS.items():
        seconds = [
            microseconds(replace(each, keys=keys).attention(), num_calls, turns)
            for each in (one, other)
        ]
        yield answer(f"time of {question}", seconds[0] / seconds[1], low, high)
    for heads, bits, low, high in LATENT_SHARES:
        latents = replace(LATENTS, keys=keys, group=heads, bits=bits)
        seconds = [
            microseconds(attend, num_calls, turns)
            for attend in (latents.attention(), latents.attention_to_gathered_latents())
        ]
        form = latents.slabs().format
        question = f"time of latents where they lie over gathered ones, {heads} heads, {form}"
        yield answer(question, seconds[0] / seconds[1], low, high)


@contextmanager
def partitions_of(size: int) -> Iterator[None]:
    """Contexts are cut into partitions of ``size``, whatever their length."""
    sizes = attention_plan.partition_sizes
    attention_plan.partition_sizes = lambda num_kv_heads: (size,) * 33  # type: ignore[assignment]
    try:
        yield
    finally:
        attention_plan.partition_sizes = sizes


def measure_merging(num_calls: int, turns: int) -> Iterator[Row]:
    """Contexts around WHOLE_BELOW: cut as longer ones are and merged, over one partition."""
    for num_kv_heads in (1, 8):
        for keys, low, high in ((128, 1.0, 2.5), (255, 0.8, 1.5), (510, 0.4, 1.0)):
            decode = Decode(keys, num_kv_heads)
            seconds = []
            for size in (16 * num_kv_heads, 512):
                with partitions_of(size):
                    seconds.append(microseconds(decode.attention(), num_calls, turns))
            question = f"{keys} keys of {num_kv_heads} KV heads, merged over whole"
            yield answer(question, seconds[0] / seconds[1], low, high)


# Threads that a core holds by Mesa's compiler, which Apple's should reach.
THREADS = {
    Decode(group=2, dtype="float16"): 704,
    Decode(group=4, dtype="float16"): 448,
    Decode(group=8, dtype="float16"): 448,
    Decode(group=4): 448,
    Decode(group=2, key_dim=256, value_dim=256): 576,
    Decode(group=2, key_dim=512, value_dim=512): 448,
    Decode(group=4, bits=KVBits(8, 8)): 448,
    Decode(group=4, bits=KVBits(4, 4)): 448,
    LATENTS: 384,
    replace(LATENTS, bits=KVBits(8, 8)): 384,
}
TOO_MANY_THREADS = 2048
_ALLOWED = re.compile(r"maximum allowed .*\((\d+)\)")


def measure_registers() -> Iterator[Row]:
    """``maxTotalThreadsPerThreadgroup`` of the attention kernels, which says how many registers
    Apple's compiler takes. MLX says it where a launch asks for more threads.
    """
    for decode, threads in THREADS.items():
        decode = replace(decode, keys=300)
        kv, step = decode.slabs(), decode.step()
        plan = AttentionPlan.of(step, PlanKey.of(None, kv))
        q = decode.queries()
        sinks = kernels.sink_logits(None, q.shape[1])
        launch = kernels.attention(q, None, kv, plan, 1, decode.params, sinks)
        assert isinstance(launch, partial)
        name = f"{kv.format}, {decode.key_dim} x {decode.group}"
        try:
            mx.eval(launch(threadgroup=(TOO_MANY_THREADS, 1, 1)))
        except Exception as error:  # whatever MLX raises
            allowed = _ALLOWED.search(str(error))
            if allowed is None:
                raise
            question = f"most threads of a threadgroup, {name}"
            yield answer(question, int(allowed.group(1)), threads, 1024)


# Matmuls of few rows

MATMUL_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
MATMUL_BITS = (4, 8, 16)


def measure_few_rows(width: int, nbytes: int, turns: int) -> Iterator[Row]:
    """The microseconds of MLX's matmul and of ``rows_matmul`` by rows, in chains of products that
    wait for one another; and whether a row has the same bits among any others.

    Args:
        width: of the layers' inputs.
        nbytes: of the different weights of a chain, which must not fit in a cache.
    """
    gpu = device.apple_gpu()
    for bits in MATMUL_BITS:
        layers: list[nn.Module] = []
        while not layers or weight_nbytes(layers[0]) * len(layers) < nbytes:
            layer: nn.Module = nn.Linear(width, 3 * width, bias=False)
            layer.set_dtype(mx.bfloat16)
            if bits < 16:
                layer = nn.QuantizedLinear.from_linear(layer, 64, bits)
            mx.eval(layer)
            layers.append(layer)
        shape = LinearShape.of(layers[0], mx.bfloat16)
        row: Row = {
            "generation": None if gpu is None else gpu.generation,
            "bits": bits,
            "shape": str(shape),
            "same_bits": _has_same_bits(layers[0], shape),
        }
        products = {"mlx": multiplied_by_mlx, "rows": multiplied_by_rows}
        seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        # The sides take turns; the first turn warms up.
        for turn, num_rows in itertools.product(range(turns + 1), MATMUL_ROWS):
            for name, product in products.items():
                chain = seconds_of_chain(layers, num_rows, shape, product, time.perf_counter)
                if turn:
                    seconds[name, num_rows].append(chain)
        for name in products:
            row[name] = [
                (num_rows, round(float(np.median(seconds[name, num_rows])) / len(layers) * 1e6, 2))
                for num_rows in MATMUL_ROWS
            ]
        yield row
        mx.clear_cache()


def _has_same_bits(layer: nn.Module, shape: LinearShape) -> bool:
    """Whether the bits of a row don't depend on the number of rows, in float32, whose digits show
    another order of sums.
    """
    wide = nn.Module()
    for name in {"weight", "scales", "biases"} & layer.keys():
        value = layer[name]
        wide[name] = value if value.dtype == mx.uint32 else value.astype(mx.float32)
    shape = shape._replace(dtype="float32")
    rows = some_rows(max(MATMUL_ROWS), shape)
    whole = multiplied_by_rows(wide, rows, shape)
    return all(
        mx.array_equal(multiplied_by_rows(wide, rows[-count:], shape), whole[-count:]).item()
        for count in MATMUL_ROWS
    )


# What a step costs with several rows

NUM_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32)
KINDS = {"2 bits": 2, "4 bits": 4, "8 bits": 8, "16 bits": 16, "mixture": 4}
NUM_EXPERTS, NUM_CHOSEN = 128, 8


class DenseLayer(nn.Module):
    """The products of a layer of a dense model."""

    def __init__(self, width: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def __call__(self, rows: mx.array) -> mx.array:
        made: mx.array = self.down(self.up(rows))
        return made


class MixtureLayer(nn.Module):
    """The products of a layer with experts, which each row chooses at random."""

    def __init__(self, width: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.dense = DenseLayer(width)
        self.experts = SwitchGLU(width, width // 2, NUM_EXPERTS)

    def __call__(self, rows: mx.array) -> mx.array:
        chosen = mx.random.randint(0, NUM_EXPERTS, (len(rows), NUM_CHOSEN))
        made: mx.array = self.dense(rows) + self.experts(rows, chosen).sum(axis=-2)
        return made


def measure_row_costs(width: int, nbytes: int, turns: int) -> Iterator[Row]:
    """The time of a chain of layers over that with one row, for each kind of ``ROW_COSTS``.

    Args:
        width: of the layers.
        nbytes: of the weights of a chain, which must not fit in a cache.
    """
    gpu = device.apple_gpu()
    chip = "this machine" if gpu is None else CHIPS.get(gpu.generation, f"g{gpu.generation}")
    chip += " Ultra" if gpu is not None and gpu.is_ultra else ""
    for kind, bits in KINDS.items():
        layers: list[DenseLayer | MixtureLayer] = []
        left = nbytes
        while left > 0:
            layer = MixtureLayer(width // 2) if kind == "mixture" else DenseLayer(width)
            layer.set_dtype(mx.bfloat16)
            if bits < 16:
                nn.quantize(layer, group_size=64, bits=bits)
            mx.eval(layer)
            left -= weight_nbytes(layer)
            layers.append(layer)
        costs = []
        for num_rows in NUM_ROWS:
            first = mx.random.normal((num_rows, width // 2 if kind == "mixture" else width))
            seconds = []
            for _ in range(turns + 1):
                rows = first.astype(mx.bfloat16)
                start = time.perf_counter()
                for layer in layers:
                    rows = layer(rows) * 0.01
                mx.eval(rows)
                seconds.append(time.perf_counter() - start)
            costs.append(float(np.median(seconds[1:])))
        yield {
            "chip": chip,
            "kind": kind,
            "costs": [
                (num_rows, round(cost / costs[0], 2))
                for num_rows, cost in zip(NUM_ROWS[1:], costs[1:], strict=True)
            ],
        }
        mx.clear_cache()
