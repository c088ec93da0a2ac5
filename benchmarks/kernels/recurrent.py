"""Decodes and prompts of a hybrid model through the engine, beside one sequence at a time and
mlx-lm's ``BatchGenerator``: process CPU time per step, on the same random weights in one run.

    python -m benchmarks recurrent                    # 8 layers like Qwen3.5's, hidden size 512
    python -m benchmarks recurrent --models hybrid --streams 4 --contexts 2000

Each side has all streams running when a turn begins, and sides take turns. "One at a time" is an
engine per stream, whose steps follow each other. A figure is the smallest of all turns, and a ratio
is one of two smallest figures, or the median of the ratios within each turn. Contexts are filled
with random K/V instead of computed. The model is also called alone, without an engine on either
side. Models are a hybrid of six recurrent layers and two that attend, and eight layers of either
kind; those without attention have no K/V at all. Primitives are those of MLX in the graph of one
decode of the model alone, per layer.

The time of a prompt, which shares nothing with another one, is that of one alone: with its
checkpoints, without them, and in mlx-lm.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.kernels.recurrent_sides import (
    MODELS,
    NUM_LAYERS,
    Step,
    engine_step,
    generator_step,
    num_primitives,
    one_at_a_time_step,
    packed_model,
    packed_pass,
    prompt_of,
    stock_model,
    stock_pass,
)
from benchmarks.lib.card import machine_card, print_card, print_json, print_table
from mlx_paged.engine.engine import Engine
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.options.sampling_params import SamplingParams

PACKED, IN_TURN, THEIRS = "packed", "one at a time", "BatchGenerator"
# Without an engine.
ALONE_HERE, ALONE_THERE = "model, packed", "model, mlx-lm"


def milliseconds(step: Step, num_steps: int) -> float:
    begin = time.process_time()
    for _ in range(num_steps):
        step()
    # What was launched ahead is computed here, as what the turn began with was in the one before.
    mx.synchronize()
    return (time.process_time() - begin) * 1000 / num_steps


def measure_decodes(
    name: str, packed: LanguageModel, stock: nn.Module, streams: int, context: int, args: Any
) -> dict[str, Any]:
    passes = {
        ALONE_HERE: packed_pass(packed, streams, context),
        ALONE_THERE: stock_pass(stock, streams, context),
    }
    sides: dict[str, Step] = {
        THEIRS: generator_step(stock, streams, context),
        PACKED: engine_step(packed, streams, context),
        **{side: partial(run, len) for side, run in passes.items()},
    }
    if streams > 1:
        sides[IN_TURN] = one_at_a_time_step(packed, streams, context)
    turns: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(args.turns + 1):
        for side, step in sides.items():
            spent = milliseconds(step, args.steps)
            if turn:  # the first one is warm-up
                turns[side].append(spent)
    pairs = [(side, PACKED) for side in (IN_TURN, THEIRS) if side in turns]
    return {
        "model": name,
        "streams": streams,
        "context": context,
        "milliseconds": {side: min(each) for side, each in turns.items()},
        "times_as_fast": {
            slower: {
                "smallest": min(turns[slower]) / min(turns[faster]),
                "median": median(a / b for a, b in zip(turns[slower], turns[faster], strict=True)),
            }
            for slower, faster in [*pairs, (ALONE_THERE, ALONE_HERE)]
        },
        "primitives_per_layer": {
            side: num_primitives(run) / NUM_LAYERS for side, run in passes.items()
        },
    }


def measure_prompts(
    packed: LanguageModel, stock: nn.Module, length: int, turns: int
) -> dict[str, float]:
    """Milliseconds of CPU time of a prompt that shares nothing, with checkpoints and without, and
    in mlx-lm.
    """
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    engines = {
        name: Engine(
            packed,
            max_num_seqs=1,
            kv_cache_bytes="4000blocks",
            max_num_batched_tokens=2048,
            enable_prefix_caching=name == "with checkpoints",
        )
        for name in ("with checkpoints", "without")
    }

    def run(side: str, prompt: list[int]) -> None:
        if side == "mlx-lm":
            # One pass, of whose rows the last one has logits. (mlx-lm's generate_step never
            # evaluates what the last layer makes of the others: 1 of 8 MLPs less.)
            text = stock.language_model
            hidden = text.model(mx.array([prompt]), make_prompt_cache(stock))
            mx.eval(text.lm_head(hidden[:, -1]))
            return
        engines[side].add_request("prompt", prompt, params)
        while engines[side].has_unfinished_requests():
            engines[side].step()

    found: dict[str, list[float]] = {side: [] for side in (*engines, "mlx-lm")}
    for turn in range(turns + 1):
        for side, times in found.items():
            prompt = prompt_of(length, 17 + turn)
            spent = milliseconds(lambda side=side, prompt=prompt: run(side, prompt), 1)  # type: ignore[misc]
            if turn:
                times.append(spent)
    smallest = {side: min(each) for side, each in found.items()}
    return {
        "length": length,
        **smallest,
        "over_without": smallest["with checkpoints"] / smallest["without"],
        "mlx-lm_over": smallest["mlx-lm"] / smallest["with checkpoints"],
    }


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 2000])
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--turns", type=int, default=9, help="of each side")
    parser.add_argument("--steps", type=int, default=8, help="of a turn")
    parser.add_argument("--out", type=Path, help="also write the JSON line to this file")
    return parser


def decode_row(found: dict[str, Any]) -> list[str]:
    fast, spent = found["times_as_fast"], found["milliseconds"]
    over = [
        f"{fast[side]['smallest']:.2f}" if side in fast else "-"
        for side in (IN_TURN, THEIRS, ALONE_THERE)
    ]
    counts = [f"{count:.0f}" for count in found["primitives_per_layer"].values()]
    milliseconds = f"{spent[PACKED]:.1f}"
    return [
        found["model"],
        str(found["context"]),
        str(found["streams"]),
        milliseconds,
        *over,
        *counts,
    ]


def main() -> None:
    args = setup_arg_parser().parse_args()
    setting = machine_card() | {
        "model": f"{NUM_LAYERS} layers like Qwen3.5's, hidden size 512, float32",
        "turns": f"{args.turns} of {args.steps} steps",
    }
    print_card("A hybrid model", setting)
    decodes, prompts = [], []
    for name in args.models:
        packed, stock = packed_model(name), stock_model(name)
        decodes += [
            measure_decodes(name, packed, stock, streams, context, args)
            for context in args.contexts
            for streams in args.streams
        ]
        if name == "hybrid":
            prompts.append(measure_prompts(packed, stock, args.prompt, args.turns))
    print_table(
        [
            *("model", "context", "streams", "packed, ms"),
            *("over one at a time", "over BatchGenerator", "model alone, over mlx-lm's"),
            *("primitives per layer", "mlx-lm's"),
        ],
        [decode_row(each) for each in decodes],
    )
    for each in prompts:
        print_table(list(each), [[f"{value:.3f}" for value in each.values()]])
    print_json("recurrent", setting, {"decodes": decodes, "prompts": prompts}, args.out)


if __name__ == "__main__":
    main()
