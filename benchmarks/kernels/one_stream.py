"""One stream through the whole engine beside mlx-lm's loop: milliseconds per token, on the same
weights in one run, with all computing done.

    python -m benchmarks one_stream                     # the demo model: nearly all overhead
    python -m benchmarks one_stream --model qwen3-0.6b-layers
    python -m benchmarks one_stream --model PATH_OR_REPO

Sides are `Engine.step` with a paged and with a basic cache, and mlx-lm's `generate_step`, greedy
and without text. They take turns of some tokens; the first tokens of a turn are not counted.
Figures are medians over the turns, and a ratio is the median of the ratios within each turn.
"""

from __future__ import annotations

import argparse

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from benchmarks.lib.models import load_both
from benchmarks.lib.turns import Step, median_and_fastest, median_ratio, num_steps_taken, take_turns
from mlx_paged.engine.engine import Engine
from mlx_paged.options.sampling_params import SamplingParams

THEIRS = "mlx-lm"


def our_step(model: nn.Module, kv: str, prompt: list[int], num_tokens: int) -> Step:
    num_blocks = -(-(len(prompt) + num_tokens) // 16) + 1
    engine = Engine(model, kv=kv, kv_cache_bytes=f"{num_blocks}blocks")
    engine.add_request("s", prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
    return engine.step


def their_step(model: nn.Module, prompt: list[int], num_tokens: int) -> Step:
    tokens = generate_step(mx.array(prompt), model, max_tokens=num_tokens)
    return lambda: next(tokens)


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--model", default="demo", help="demo, qwen3-0.6b-layers, a folder or id")
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--turns", type=int, default=31, help="turns of each side")
    parser.add_argument("--steps", type=int, default=8, help="tokens of a turn")
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    ours, theirs = load_both(args.model)
    setting = machine_card() | {
        "model": args.model,
        "prompt_len": args.prompt_len,
        "turns": f"{args.turns} of {args.steps} tokens",
    }
    print_card("One stream through the engine", setting)
    prompt = [5 + index % 50 for index in range(args.prompt_len)]
    num_tokens = num_steps_taken(args.turns, args.steps) + 8
    steps = {
        THEIRS: their_step(theirs, prompt, num_tokens),
        "paged": our_step(ours, "paged", prompt, num_tokens),
        "basic": our_step(ours, "basic", prompt, num_tokens),
    }
    for step in steps.values():
        step()  # the prompt
    times = take_turns(steps, args.turns, args.steps)
    milliseconds = median_and_fastest(times)
    ratios = {name: median_ratio(turns, times[THEIRS]) for name, turns in times.items()}
    print_table(
        ["side", "ms per token", "fastest", "over mlx-lm"],
        [
            [name, f"{ms['median']:.2f}", f"{ms['fastest']:.2f}", f"{ratios[name]:.2f}"]
            for name, ms in milliseconds.items()
        ],
    )
    results = {"milliseconds": milliseconds, "over_mlx_lm": ratios}
    print_json("one_stream", setting, results, args.out)


if __name__ == "__main__":
    main()
