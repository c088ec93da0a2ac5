"""A long soak: thousands of requests of every kind come, go and fail at random, and everything has
to add up.

    python -m benchmarks soak                     # 3,000 requests, some 4 minutes on 2 cores
    python -m benchmarks soak --requests 100000 --minutes 60 --seed 7
    python -m benchmarks soak --model demo        # the bundled demo model

Random lengths, shared prefixes, forks, stop tokens, priorities, aborts, preemptions (swapped or
recomputed, as the engine finds cheaper or as it is told), logits processors that raise, steps that
fail after they wrote nonsense, Ctrl-C in steps. After each step the bookkeeping is verified and the
memory is compared with the weights, the budget and a stated slack (`tools/paged_testing/soak.py`,
which also runs the short soak of the test suite). The tokens of a sample of requests are compared
with those of an engine that runs each of them alone. At the end no block is lost, the pool is whole
and memory is back where it was. The exit status is 1 at the first thing that is wrong, which is
printed with its request or its sum.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from paged_testing.soak import Soak, make_request

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from mlx_paged import demo_model_path, load
from mlx_paged.models import qwen3

TINY = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 61,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
}
BATCH = 250  # requests between two lines of the table


def make_model(name: str) -> nn.Module:
    if name != "tiny":
        return load(demo_model_path() if name == "demo" else name)[0]
    mx.random.seed(5)
    model: nn.Module = qwen3.Model(qwen3.ModelArgs.from_dict(TINY))
    mx.eval(model.parameters())
    return model


def resident_mb() -> float:
    """Memory of this process as the system sees it; 0 where there is no /proc."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), 0.0)


def run_batch(soak: Soak, first: int, args: argparse.Namespace) -> dict[str, Any]:
    """Some hundred requests, and a sample of them compared; what memory and counters were
    afterwards.
    """
    count = min(BATCH, args.requests - first)
    soak.run(first, count)
    for number in random.Random(first).sample(
        range(first, first + count), min(count, args.compare)
    ):
        soak.check_tokens(make_request(soak.seed, number, soak.model.args.vocab_size))
    soak.outputs.clear()
    mx.synchronize()
    stats = soak.engine.stats()
    return {
        "requests": first + count,
        "steps": soak.counts["steps"],
        "kv_mb": stats.nbytes_held / 1e6,
        "bytes_above": mx.get_active_memory() - soak.base_nbytes - stats.nbytes_held,
        "resident_mb": resident_mb(),
        "preemptions": stats.num_preemptions,
        "evictions": stats.num_evictions,
        "hit_rate": stats.hit_rate,
    }


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument(
        "--model", default="tiny", help="tiny (random weights), demo, a folder or a hub id"
    )
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="begin no further requests after so long",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--blocks", type=int, default=100, help="the K/V budget, in blocks of 8 tokens"
    )
    parser.add_argument("--swap", choices=["auto", "always", "never"], default="auto")
    parser.add_argument(
        "--compare",
        type=int,
        default=25,
        help=f"of each {BATCH} requests, how many to run again alone",
    )
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    model = make_model(args.model)
    swap_bytes = {"auto": None, "always": f"{args.blocks}blocks", "never": 0}[args.swap]
    options = {"kv_cache_bytes": f"{args.blocks}blocks", "swap_bytes": swap_bytes}
    soak = Soak(model, args.seed, engine_options=options)
    setting = machine_card() | {
        "model": args.model,
        "requests": args.requests,
        "seed": args.seed,
        "swap": args.swap,
        "budget": f"{args.blocks} blocks of 8 tokens, "
        f"{soak.engine.cache.config.nbytes / 1e6:.2f} MB",
        "engine": "12 sequences and 64 tokens a step at most, 24 requests in flight",
    }
    print_card("Soak", setting)
    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    wrong = None
    try:
        for first in range(0, args.requests, BATCH):
            if time.perf_counter() - start > 60 * args.minutes:
                break
            rows.append(run_batch(soak, first, args))
        soak.check_end()
    except AssertionError as error:
        wrong = f"{type(error).__name__} in step {soak.counts['steps']}: {error}"
    header = [
        "requests",
        "steps",
        "K/V MB",
        "bytes above",
        "resident MB",
        "preemptions",
        "evictions",
        "hit rate",
    ]
    print_table(
        header,
        [
            [f"{value:.2f}" if isinstance(value, float) else value for value in row.values()]
            for row in rows
        ],
    )
    results = {
        "wrong": wrong,
        "seconds": time.perf_counter() - start,
        "counts": dict(soak.counts),
        "max_bytes_above_weights_and_kv_between_steps": soak.max_over,
        "slack_between_steps": soak.slack_at_rest,
        "max_share_of_slack_used_in_a_step": soak.max_slack_used,
        "over_time": rows,
    }
    print_json("soak", setting, results, args.out)
    if wrong is not None:
        print(f"wrong: {wrong}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
