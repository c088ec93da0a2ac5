"""Serving many requests: our engine against mlx-lm's BatchGenerator, on the same weights in one
run, as ratios.

    python -m benchmarks throughput                             # some 10 minutes
    python -m benchmarks throughput --scenario 2 --scenario 4   # some of them
    python -m benchmarks throughput --model PATH_OR_REPO        # a real model
    python -m benchmarks throughput --quick                     # does it run at all

On Linux, MLX computes faster with LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libopenblas.so.0.

Scenarios are in `throughput_scenarios.py`; the sides, and how each counts its K/V, are in
`throughput_sides.py`. Sampling is greedy and nothing but max_tokens ends an answer. Our engine and
BatchGenerator take turns, a fresh one each time; figures are medians over these turns, ratios are
ratios of medians. The other sides are run once.

    tok/s        answer tokens over the seconds from the first arrival to the last token
    TTFT         time to first token, from the arrival, waiting included: median and 95th
                 percentile of the requests
    TPOT         time per output token after a request's first: median of the requests
    K/V peak     the most bytes of K/V arrays held between two steps
    active peak  the most that MLX had allocated between two steps, above the weights: K/V, logits,
                 tokens, and the needs of a step under way (BatchGenerator has one, ours none)
    peak memory  the most that MLX had allocated at any time, above the weights: activations and
                 copies, too
    wasted       slots reserved for sequences that hold no token's K/V, over slots reserved, summed
                 over the steps
    same tokens  share of the answer tokens that equal those of mlx-lm's BatchGenerator, by place
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json
from benchmarks.lib.models import QWEN3_0_6B_LAYERS, load_both, random_weights
from benchmarks.serving.throughput_report import judge, print_aims, print_scenario
from benchmarks.serving.throughput_scenarios import (
    QUICK,
    SampleRequest,
    Scale,
    Scenario,
    make_scenarios,
)
from benchmarks.serving.throughput_sides import (
    BLOCK_SIZE,
    COMPLETION_BATCH_SIZE,
    OURS,
    PREFILL_BATCH_SIZE,
    PREFILL_STEP_SIZE,
    SIDES,
    THEIRS,
    KVUse,
    Side,
    kv_nbytes_per_token,
    pool_nbytes,
)

MAX_IDLE_STEPS = 10_000  # more than any prompts take
# Half as wide as Qwen3-0.6B with as many bytes of K/V per weight, so that a CPU serves all
# scenarios in minutes. Six layers, because mlx-lm's prefill, evaluated lazily, leaves out all of
# the last one but its K and V: of two it would skip nearly half of the work, of the real model's 28
# it skips a thirtieth.
SHAPE = QWEN3_0_6B_LAYERS | {
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
QUICK_SHAPE = SHAPE | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


@dataclass
class Serving:
    """What was seen while a side served a list of requests."""

    seconds: float = 0.0
    cpu_seconds: float = (
        0.0  # of the whole process: what a machine busy with something else leaves comparable
    )
    arrivals: dict[str, float] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)  # of each token given out
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def figures(self) -> dict[str, float]:
        firsts = [times[0] - self.arrivals[request_id] for request_id, times in self.times.items()]
        per_token = [
            (times[-1] - times[0]) / (len(times) - 1)
            for times in self.times.values()
            if len(times) > 1
        ]
        return {
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "tokens_per_second": sum(map(len, self.times.values())) / self.seconds,
            "ttft_median": float(np.median(firsts)),
            "ttft_p95": float(np.percentile(firsts, 95)),
            "tpot_median": float(np.median(per_token)) if per_token else 0.0,
        }


def serve(
    side: Side, requests: list[SampleRequest], after_step: Callable[[], None] = lambda: None
) -> Serving:
    """All requests at the times they come, to the end."""
    serving = Serving()
    coming = sorted(requests, key=lambda request: request.arrival)[::-1]
    num_tokens = num_left = num_idle_steps = 0
    start, cpu_start = time.perf_counter(), time.process_time()
    while coming or num_left:
        # Where nobody is left and the next request is not due, it comes now: the clock is one of
        # tokens.
        while coming and (coming[-1].arrival <= num_tokens or not num_left):
            request = coming.pop()
            serving.arrivals[request.request_id] = time.perf_counter()
            serving.times[request.request_id], serving.tokens[request.request_id] = [], []
            side.add(request)
            num_left += request.max_tokens
        given = side.step()
        now = time.perf_counter()
        for request_id, token in given:
            serving.times[request_id].append(now)
            serving.tokens[request_id].append(token)
        num_tokens += len(given)
        num_left -= len(given)
        num_idle_steps = 0 if given else num_idle_steps + 1
        if num_idle_steps > MAX_IDLE_STEPS:
            raise RuntimeError(
                f"[throughput] {MAX_IDLE_STEPS} steps gave no token, and {num_left} are still to "
                "come"
            )
        after_step()
    serving.seconds = time.perf_counter() - start
    serving.cpu_seconds = time.process_time() - cpu_start
    return serving


@dataclass
class Counts:
    """A side's K/V after every step, and what MLX had allocated then."""

    uses: list[KVUse] = field(default_factory=list)
    active_peak: int = 0

    def add(self, use: KVUse) -> None:
        self.uses.append(use)
        self.active_peak = max(self.active_peak, mx.get_active_memory())

    def figures(self, base: int, nbytes_per_token: int) -> dict[str, float]:
        held = sum(use.nbytes_held for use in self.uses)
        num_slots, num_filled = (
            sum(getattr(use, n) for use in self.uses) for n in ("num_slots", "num_filled_slots")
        )
        return {
            "kv_peak": max(use.nbytes_held for use in self.uses),
            "live_kv_peak": max(use.num_filled_slots for use in self.uses) * nbytes_per_token,
            "active_peak": self.active_peak - base,
            "peak_memory": mx.get_peak_memory() - base,
            "wasted": 1 - num_filled / max(1, num_slots),
            "wasted_of_held": 1 - num_filled * nbytes_per_token / max(1, held),
        }


def forget() -> None:
    """Nothing of the run before is left, in flight or in MLX's store of buffers."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()


def run(
    name: str, models: dict[str, nn.Module], scenario: Scenario
) -> tuple[Serving, dict[str, Any]]:
    """A fresh side serves a scenario: what was seen, and its figures."""
    forget()
    base = mx.get_active_memory()
    side = SIDES[name](models["ours" if name == OURS else "theirs"], scenario)
    serve(side, scenario.warm_up)
    counts = Counts()
    mx.reset_peak_memory()
    serving = serve(side, scenario.requests, lambda: counts.add(side.kv_use()))
    print(f"  {scenario.name}: {name}, {serving.seconds:.1f} s", file=sys.stderr)
    figures = serving.figures() | counts.figures(base, kv_nbytes_per_token(models["theirs"]))
    return serving, figures | {"notes": side.notes()}


def share_of_same_tokens(tokens: dict[str, list[int]], expected: dict[str, list[int]]) -> float:
    same = sum(
        a == b for name in expected for a, b in zip(tokens[name], expected[name], strict=True)
    )
    return same / sum(map(len, expected.values()))


def measure(
    scenario: Scenario, models: dict[str, nn.Module], names: list[str], repeats: int
) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    tokens: dict[str, dict[str, list[int]]] = {}
    for turn in range(repeats):
        for name in names if turn % 2 == 0 else names[::-1]:
            if turn == 0 or name in (OURS, THEIRS):
                serving, figures = run(name, models, scenario)
                tokens[name] = serving.tokens
                runs[name].append(figures)
    results = {
        name: {"notes": figures[-1].pop("notes"), "runs": figures} for name, figures in runs.items()
    }
    for name, result in results.items():
        result |= {
            key: float(np.median([run[key] for run in result["runs"]]))
            for key in result["runs"][-1]
        }
        if THEIRS in tokens:
            result["same_tokens"] = share_of_same_tokens(tokens[name], tokens[THEIRS])
    lengths = [len(request.prompt_token_ids) for request in scenario.requests]
    return {
        "scenario": scenario.number,
        "name": scenario.name,
        "what": scenario.what,
        "num_requests": len(lengths),
        "num_prompt_tokens": sum(lengths),
        "num_answer_tokens": sum(request.max_tokens for request in scenario.requests),
        "pool_nbytes": pool_nbytes(scenario, models["ours"]),
        "sides": results,
    }


def load_models(args: argparse.Namespace) -> dict[str, nn.Module]:
    """The same weights in our Qwen3 and in mlx-lm's."""
    if args.model != "random":
        ours, theirs = load_both(args.model)
        return {"ours": ours, "theirs": theirs}
    ours, theirs = random_weights(QUICK_SHAPE if args.quick else SHAPE)
    return {"ours": ours, "theirs": theirs}


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument(
        "--model",
        default="random",
        help="random (weights, of a small Qwen3), demo, a folder or a hub id",
    )
    parser.add_argument(
        "--scenario", type=int, action="append", choices=range(1, 6), help="repeat for more; all"
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed turns of each side")
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="only these; all")
    parser.add_argument(
        "--quick", action="store_true", help="a small model, few and short requests, one turn"
    )
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    repeats = 1 if args.quick else args.repeats
    models = load_models(args)
    shape = models["ours"].args
    scenarios = make_scenarios(shape.vocab_size, QUICK if args.quick else Scale())
    scenarios = [s for s in scenarios if not args.scenario or s.number in args.scenario]
    setting = machine_card() | {
        "model": args.model
        + (", quick: a smoke test, its figures say nothing" if args.quick else ""),
        "shape": f"{shape.num_hidden_layers} layers, hidden {shape.hidden_size}, "
        f"{shape.num_attention_heads} query / "
        f"{shape.num_key_value_heads} KV heads, head_dim {shape.head_dim}, {models['ours'].dtype}",
        "K/V per token": f"{kv_nbytes_per_token(models['ours'])} bytes",
        "ours": f"max_num_seqs {COMPLETION_BATCH_SIZE}, block_size {BLOCK_SIZE}, else defaults",
        "theirs": f"completion_batch_size {COMPLETION_BATCH_SIZE}, "
        f"prefill_batch_size {PREFILL_BATCH_SIZE}, "
        f"prefill_step_size {PREFILL_STEP_SIZE}: its defaults",
        "repeats": repeats,
    }
    print_card("Throughput of many requests", setting)
    for name in (OURS, THEIRS):  # kernels are compiled, threads started
        if not args.sides or name in args.sides:
            run(name, models, make_scenarios(shape.vocab_size, QUICK)[0])
    measured = []
    for scenario in scenarios:
        names = [
            name for name in (OURS, THEIRS, *scenario.sides) if not args.sides or name in args.sides
        ]
        if not names:
            continue
        measured.append(measure(scenario, models, names, repeats))
        print_scenario(measured[-1])
    aims = judge(measured)
    print_aims(aims)
    print_json("throughput", setting, {"scenarios": measured, "aims": aims}, args.out)


if __name__ == "__main__":
    main()
