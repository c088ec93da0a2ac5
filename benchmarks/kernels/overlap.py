"""Host work beside a device whose time is simulated: our engine, waiting, one step ahead, and ahead
with decodes that are replayed from a trace; and mlx-lm's own loops, on the same weights in one run.

    python -m benchmarks overlap                   # a device that takes 5 ms per step, and none
    python -m benchmarks overlap --device-ms 2 10
    python -m benchmarks overlap --chart           # and a bar for each line

The model has the 28 layers of Qwen3-0.6B, so narrow that computing them costs next to nothing.
Kernels are stand-ins of one MLX primitive each (`paged_testing.lazy_metal`), ours and those of
`mx.fast` alike. The device's time is a primitive behind the last layer that sleeps in the stream's
thread (`paged_testing.simulated_device`), the same on all sides. What is left is Python, and MLX's
building and scheduling of the graph.

The sides take turns of some steps; a step gives each stream one token. The first steps of a turn
are not counted. Figures are medians over the turns, and a ratio (of tokens per second) is the
median of the ratios within each turn.

What this can't show: Metal's encoding of commands, which costs more than a CPU's, and how far MLX
runs ahead. It stops at 10 tasks that are not done, which are 100 primitives on a CPU and up to 400
on Metal. `--call-us` is what a call of a kernel of ours takes beyond a stand-in's: MLX composes its
name and source each time, 4 us in all in 0.32.4 and 11 in 0.32.0. A replayed call does not, and a
stand-in's is spent where Python builds. Contexts are cut finer for the one KV head here than for
more, so traces fit for fewer steps than in a real model. Needs Linux and a C compiler.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import qwen3 as mlx_lm_qwen3
from paged_testing.lazy_metal import fused_operations, lazy_metal
from paged_testing.simulated_device import SimulatedDevice

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from benchmarks.lib.turns import Step, median_and_fastest, median_ratio, num_steps_taken, take_turns
from mlx_paged.engine.engine import Engine
from mlx_paged.models import qwen3
from mlx_paged.options.sampling_params import SamplingParams

NARROW: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "num_hidden_layers": 28,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}
WAITING, AHEAD, COMPILED = "ours, waiting", "ours, ahead", "ours, compiled"
THEIRS = "mlx-lm"
PROMPT_LEN = 16
NUM_SPARE_TOKENS = 32  # prompts may be computed in several steps, in which answers go on
# Tokens per second beside mlx-lm's that one step ahead is to reach.
AIMS = {1: 1.0, 8: 1.1, 32: 1.2}


class BusyNorm(nn.RMSNorm):
    """The last norm of a model, and then the device's time."""

    def __init__(self, hidden_size: int, device: SimulatedDevice):
        super().__init__(hidden_size)
        self._run = device.run

    def __call__(self, x: mx.array) -> mx.array:
        return self._run(mx.fast.rms_norm(x, self.weight, self.eps))


def make_models(device: SimulatedDevice) -> tuple[qwen3.Model, nn.Module]:
    """The same weights in our Qwen3 and in mlx-lm's, both on the device."""
    mx.random.seed(0)
    theirs = mlx_lm_qwen3.Model(mlx_lm_qwen3.ModelArgs.from_dict(NARROW))
    ours = qwen3.Model(qwen3.ModelArgs.from_dict(NARROW))
    weights: list[tuple[str, Any]] = list(dict(tree_flatten(theirs.parameters())).items())
    ours.load_weights(weights)
    mx.eval(ours.parameters(), theirs.parameters())
    for model in (ours, theirs):
        model.model.norm = BusyNorm(NARROW["hidden_size"], device)
    return ours, theirs


def prompts(num_streams: int) -> list[list[int]]:
    return [[(31 * i + j) % 64 for j in range(PROMPT_LEN)] for i in range(num_streams)]


def our_step(
    model: qwen3.Model, num_streams: int, num_tokens: int, compiled: bool = False, **options: Any
) -> Step:
    """A step of our engine, in which all streams decode: built in Python, or ``compiled``."""
    engine = Engine(
        model,
        kv_cache_bytes=f"{num_streams * (PROMPT_LEN + num_tokens + 16) // 16}blocks",
        backend="metal",
        max_num_seqs=num_streams,
        **options,
    )
    if not compiled:
        engine.runner.compiled_decode = None
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts(num_streams)):
        engine.add_request(str(index), prompt, params)
    num_outputs = 0
    while num_outputs < num_streams:
        num_outputs = len(engine.step())

    def step() -> None:
        outputs = engine.step()
        assert len(outputs) == num_streams, f"{len(outputs)} of {num_streams} streams"

    return step


def their_step(model: nn.Module, num_streams: int, num_tokens: int) -> Step:
    """A step of mlx-lm's loop for one stream, or of its loop for many."""
    if num_streams == 1:
        (prompt,) = prompts(1)
        tokens = generate_step(mx.array(prompt), model, max_tokens=num_tokens)
        return lambda: next(tokens)
    generator = BatchGenerator(
        model, completion_batch_size=num_streams, prefill_batch_size=num_streams
    )
    generator.insert(prompts(num_streams), [num_tokens] * num_streams)
    num_outputs = 0
    while num_outputs < num_streams:
        num_outputs = len(generator.next()[1])

    def step() -> None:
        responses = generator.next()[1]
        assert len(responses) == num_streams, f"{len(responses)} of {num_streams} streams"

    return step


def measure(device: SimulatedDevice, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    ours, theirs = make_models(device)
    num_tokens = num_steps_taken(args.turns, args.steps) + NUM_SPARE_TOKENS
    for num_streams in args.streams:
        for device_ms in args.device_ms:
            device.set_busy_time(device_ms / 1e3)
            count = num_streams, num_tokens
            steps = {
                WAITING: our_step(ours, *count, run_ahead=False),
                AHEAD: our_step(ours, *count),
                COMPILED: our_step(ours, *count, compiled=True),
                THEIRS: their_step(theirs, *count),
            }
            times = take_turns(steps, args.turns, args.steps)
            milliseconds = median_and_fastest(times)
            yield {
                "num_streams": num_streams,
                "device_ms": device_ms,
                "milliseconds": milliseconds,
                "tokens_per_second": {
                    name: num_streams / ms["median"] * 1e3 for name, ms in milliseconds.items()
                },
                "over_mlx_lm": {
                    name: median_ratio(times[THEIRS], turns) for name, turns in times.items()
                },
                "compiled_over_ahead": median_ratio(times[AHEAD], times[COMPILED]),
            }


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--device-ms", type=float, nargs="+", default=[5.0, 0.0], help="of a step, simulated"
    )
    parser.add_argument(
        "--call-us", type=float, default=2.0, help="of a kernel call of ours, simulated"
    )
    parser.add_argument("--turns", type=int, default=23, help="turns of each side")
    parser.add_argument("--steps", type=int, default=8, help="steps of a turn")
    parser.add_argument("--chart", action="store_true", help="also print a bar for each line")
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    mx.set_default_device(mx.cpu)
    setting = machine_card() | {
        "model": "28 layers, hidden 16, kernels are stand-ins of one primitive",
        "device": "simulated",
        "device_ms": args.device_ms,
        "call_us": args.call_us,
        "turns": f"{args.turns} of {args.steps} steps",
    }
    print_card("Host work beside a device", setting)
    with lazy_metal(call_seconds=args.call_us / 1e6), fused_operations():
        results = list(measure(SimulatedDevice(), args))
    print_table(
        ["streams", "device ms", "side", "ms per step", "fastest", "tokens/s", "over mlx-lm"],
        [
            [
                result["num_streams"],
                f"{result['device_ms']:g}",
                side,
                f"{ms['median']:.2f}",
                f"{ms['fastest']:.2f}",
                f"{result['tokens_per_second'][side]:.0f}",
                f"{result['over_mlx_lm'][side]:.2f}",
            ]
            for result in results
            for side, ms in result["milliseconds"].items()
        ],
    )
    if args.chart:
        print_chart(results)
    print_json("overlap", setting | {"aims": AIMS}, results, args.out)


def print_chart(results: list[dict[str, Any]]) -> None:
    """A bar per side: its milliseconds per step."""
    longest = max(ms["median"] for result in results for ms in result["milliseconds"].values())
    for result in results:
        print(f"{result['num_streams']} streams, device {result['device_ms']:g} ms")
        for side, ms in result["milliseconds"].items():
            bar = "#" * round(60 * ms["median"] / longest)
            print(f"  {side:>14} {bar} {ms['median']:.2f} ms")
    print()


if __name__ == "__main__":
    main()
