"""Decodes and prompts of a hybrid model through the engine, beside mlx-lm's ``BatchGenerator``:
process CPU time per step, on the same random weights in one run.

    python -m benchmarks recurrent                    # 8 layers like Qwen3.5's, hidden size 512
    python -m benchmarks recurrent --streams 4 --contexts 2000

Each side has all streams running when a turn begins, and sides take turns. A figure is the median
over the turns; a ratio is the median of the ratios within each turn. The time of a prompt is that
of one alone, with its checkpoints, without them, and in mlx-lm.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import qwen3_5

from benchmarks.lib.card import machine_card, print_card, print_json, print_table
from mlx_paged.engine.engine import Engine
from mlx_paged.models.mlx_lm import adapt
from mlx_paged.sampling_params import SamplingParams

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 4096,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "full_attention_interval": 4,
    },
}
NUM_TOKENS = 10**6  # no answer ends

Step = Callable[[], object]


def make_model(config: dict[str, Any] = CONFIG) -> nn.Module:
    mx.random.seed(0)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))
    model.update(tree_map(lambda weight: weight.astype(mx.float32), model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def prompt_of(length: int, seed: int) -> list[int]:
    return [(7 * index * index + 131 * seed + index) % 4096 for index in range(length)]


def our_step(model: nn.Module, num_streams: int, context: int) -> Step:
    engine = Engine(model, max_num_seqs=num_streams, kv_cache_bytes="8000blocks")
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    for stream in range(num_streams):
        engine.add_request(str(stream), prompt_of(context, stream), params)
    while sum(request.is_decoding for request in _running(engine)) < num_streams:
        engine.step()
    return engine.step


def _running(engine: Engine) -> list[Any]:
    return [_Running(request) for request in engine.scheduler.running]


class _Running:
    def __init__(self, request: Any):
        self.is_decoding = request.num_tokens > request.num_prompt_tokens


def their_step(model: nn.Module, num_streams: int, context: int) -> Step:
    generator = BatchGenerator(model, max_tokens=NUM_TOKENS, completion_batch_size=num_streams)
    generator.insert([prompt_of(context, stream) for stream in range(num_streams)])
    while len(generator.next_generated()) < num_streams:
        pass
    return generator.next_generated


def milliseconds(step: Step, num_steps: int) -> float:
    begin = time.process_time()
    for _ in range(num_steps):
        step()
    return (time.process_time() - begin) * 1000 / num_steps


def measure_decodes(
    ours: nn.Module, theirs: nn.Module, streams: int, context: int, args: argparse.Namespace
) -> dict[str, Any]:
    sides = {
        "BatchGenerator": their_step(theirs, streams, context),
        "packed": our_step(ours, streams, context),
    }
    turns: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(args.turns + 1):
        for name, step in sides.items():
            spent = milliseconds(step, args.steps)
            if turn:  # the first one is warm-up
                turns[name].append(spent)
    ratios = [
        theirs / ours for theirs, ours in zip(turns["BatchGenerator"], turns["packed"], strict=True)
    ]
    return {
        "streams": streams,
        "context": context,
        "milliseconds": {name: median(each) for name, each in turns.items()},
        "times_as_fast": median(ratios),
    }


def measure_prompts(model: nn.Module, length: int, turns: int) -> dict[str, float]:
    """Milliseconds of CPU time of a prompt that shares nothing, with checkpoints and without."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    engines = {
        name: Engine(
            model,
            max_num_seqs=1,
            kv_cache_bytes="4000blocks",
            max_num_batched_tokens=2048,
            enable_prefix_caching=name == "with checkpoints",
        )
        for name in ("with checkpoints", "without")
    }
    found: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(turns + 1):
        for name, engine in engines.items():
            engine.add_request("prompt", prompt_of(length, 17 + turn), params)
            begin = time.process_time()
            while engine.has_unfinished_requests():
                engine.step()
            if turn:
                found[name].append((time.process_time() - begin) * 1000)
    pairs = zip(found["with checkpoints"], found["without"], strict=True)
    result = {name: median(each) for name, each in found.items()}
    return {"length": length, **result, "ratio": median(a / b for a, b in pairs)}


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 2000])
    parser.add_argument("--turns", type=int, default=9, help="of each side")
    parser.add_argument("--steps", type=int, default=8, help="of a turn")
    parser.add_argument("--out", type=Path, help="also write the JSON line to this file")
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    theirs = make_model()
    ours = adapt(theirs, CONFIG)
    setting = machine_card() | {"turns": f"{args.turns} of {args.steps} steps"}
    print_card("A hybrid model: 8 layers like Qwen3.5's, hidden size 512, float32", setting)
    decodes = [
        measure_decodes(ours, theirs, streams, context, args)
        for context in args.contexts
        for streams in args.streams
    ]
    print_table(
        ["context", "streams", "BatchGenerator, ms", "packed, ms", "times as fast"],
        [
            [
                each["context"],
                each["streams"],
                *(f"{ms:.1f}" for ms in each["milliseconds"].values()),
                f"{each['times_as_fast']:.2f}",
            ]
            for each in decodes
        ],
    )
    prompts = measure_prompts(ours, max(args.contexts), args.turns)
    print_table(list(prompts), [[f"{value:.3f}" for value in prompts.values()]])
    print_json("recurrent", setting, {"decodes": decodes, "prompts": prompts}, args.out)


if __name__ == "__main__":
    main()
