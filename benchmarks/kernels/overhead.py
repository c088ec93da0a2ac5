"""Host work per step: microseconds of Python for the scheduler, the block manager and the metadata,
without a model.

    python -m benchmarks overhead

The sequences decode with contexts around ``--context`` tokens. Each gets a token per step, so every
16th step of a sequence takes a block and caches one. The parts, in the order of a step:

    schedule   which requests run, their slots and blocks (scheduler and manager, prefix cache on)
    pack       token ids of the packed input, as an array
    metadata   positions, block tables, lengths and slots, as arrays
    plan       what the Metal kernels read: tables and lengths in one array (Python, on any machine)
    update     the sampled tokens into their requests, and whether they end
    observe    what was reported of each request, and its latencies into histograms

Figures are medians over ``--steps`` steps. Left out: sampling (one call of MLX for all requests),
the model's own calls, text.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict

import mlx.core as mx

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from mlx_paged.cache import KVCacheConfig, PagedKVCache
from mlx_paged.core import KVCacheManager
from mlx_paged.engine.reports import Latencies
from mlx_paged.engine.request import Request
from mlx_paged.engine.scheduling.scheduler import Scheduler
from mlx_paged.ops.attention_plan import AttentionPlan
from mlx_paged.options.config import SchedulerConfig
from mlx_paged.options.sampling_params import SamplingParams

BATCHES = (1, 16, 64, 256)
PARTS = ("schedule", "pack", "metadata", "plan", "update", "observe")
AIM_US, AIM_BATCH = 300, 64


def measure(batch: int, context: int, num_steps: int) -> dict[str, float]:
    """Median microseconds of each part of a step, and of all."""
    num_blocks = batch * (-(-(context + num_steps) // 16) + 2)
    cache = PagedKVCache(
        KVCacheConfig.uniform(1, 1, 8, num_blocks=num_blocks), initial_blocks=num_blocks
    )
    config = SchedulerConfig(
        max_num_seqs=batch, max_num_batched_tokens=batch * (context + 16), watermark=0.0
    )
    manager = KVCacheManager(cache.pool)
    scheduler = Scheduler(manager, cache, config)
    params = SamplingParams(max_tokens=-1)
    for index in range(batch):
        # Lengths differ, so that in each step some sequences take a block.
        num_tokens = context - 8 + index % 16
        scheduler.add(
            Request(str(index), [index * 7919 % 1000 + t for t in range(num_tokens)], params)
        )
    latencies = Latencies(None)
    output = scheduler.schedule()
    assert len(output.completions) == batch
    for completion in output.completions:
        scheduler.append_token(completion, 1)
    requests = [completion.request for completion in output.completions]
    times: dict[str, list[float]] = defaultdict(list)
    for step in range(num_steps):
        marks = [time.perf_counter()]
        output = scheduler.schedule()
        marks.append(time.perf_counter())
        parts = output.scheduled
        tokens = mx.array(output.token_ids)
        marks.append(time.perf_counter())
        with cache.open_step(
            [manager.groups[part.completion.seq_id] for part in parts],
            [part.num_new_tokens for part in parts],
            [part.num_logit_rows for part in parts],
            output.shares_new_blocks,
        ) as metadata:
            packed = metadata.slot_mapping.packed
            marks.append(time.perf_counter())
            plan = AttentionPlan.pack(metadata, None, 8)
            marks.append(time.perf_counter())
        mx.eval(packed, plan.array, tokens, cache.arrays)
        seconds = [end - start for start, end in itertools.pairwise(marks)]
        begin = time.perf_counter()
        for completion in output.completions:
            scheduler.append_token(completion, step % 100)
        seconds.append(time.perf_counter() - begin)
        for request in requests:
            request.output.outputs[0].token_ids.append(step % 100)
        now = time.perf_counter()
        latencies.observe(requests, now)
        seconds.append(time.perf_counter() - now)
        for part, each in zip(PARTS, seconds, strict=True):
            times[part].append(each)
        times["all"].append(sum(seconds))
    return {part: 1e6 * statistics.median(values) for part, values in times.items()}


def main() -> None:
    parser = make_arg_parser(__doc__)
    parser.add_argument(
        "--context", type=int, default=1000, help="tokens per sequence (default: 1000)"
    )
    parser.add_argument(
        "--steps", type=int, default=200, help="steps per batch size (default: 200)"
    )
    args = parser.parse_args()

    setting = machine_card() | {"context": args.context, "steps": args.steps}
    print_card("Host work per decode step", setting)
    measure(4, args.context, 20)
    figures = {batch: measure(batch, args.context, args.steps) for batch in BATCHES}
    rows = [
        [
            str(batch),
            *(f"{parts[part]:.0f}" for part in PARTS),
            f"{parts['all']:.0f}",
            f"{parts['all'] / batch:.1f}",
        ]
        for batch, parts in figures.items()
    ]
    heads = [*(f"{part}, us" for part in PARTS), "all, us", "us per sequence"]
    print_table(["batch", *heads], rows)
    total = figures[AIM_BATCH]["all"]
    print(
        f"\nBatch {AIM_BATCH}: {total:.0f} us, aim: under {AIM_US} us: "
        f"{'met' if total < AIM_US else 'missed'}"
    )
    print_json("overhead", setting, figures, args.out)


if __name__ == "__main__":
    main()
