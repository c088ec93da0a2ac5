"""What stands above weights and K/V at the highest, by the most tokens of a step, beside the
estimate that an engine says.

    python -m benchmarks step_memory
    python -m benchmarks step_memory --model PATH_OR_REPO --prompts 4 --length 2048

A few prompts arrive together in a pool that is allocated before, and answer a few tokens. Several
short prompts keep fewer scores than the estimate counts where attention is not one kernel, as on a
CPU: there it has one prompt as long as the step.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from mlx_paged import demo_model_path, load
from mlx_paged.engine.engine import Engine
from mlx_paged.options.sampling_params import SamplingParams

LIMITS = (128, 512, 2048, 4096)


def peak_of(model: nn.Module, limit: int, num_prompts: int, length: int) -> dict[str, Any]:
    """Bytes at the highest in steps of ``limit`` tokens at most."""
    engine = Engine(
        model,
        None,
        kv_cache_bytes=f"{num_prompts * (length // 16 + 2)}blocks",
        preallocate=True,
        enable_prefix_caching=False,
        max_num_seqs=num_prompts,
        max_num_batched_tokens=limit,
        max_num_mixed_tokens=min(limit, 512),
    )
    for number in range(num_prompts):
        prompt = [(7 * number + 3 * position) % 500 for position in range(length)]
        engine.add_request(str(number), prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    mx.synchronize()
    mx.clear_cache()
    base = mx.get_active_memory()
    mx.reset_peak_memory()
    while engine.has_unfinished_requests():
        engine.step()
    mx.synchronize()
    return {
        "max_num_batched_tokens": limit,
        "peak_bytes": mx.get_peak_memory() - base,
        "estimated_bytes": engine.stats().nbytes_activations,
        "kv_bytes": engine.stats().nbytes_held,
    }


def main() -> None:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--model", default=demo_model_path(), help="a folder or a hub id")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--length", type=int, default=400, help="tokens of each prompt")
    args = parser.parse_args()
    model, _ = load(args.model)
    setting = machine_card() | {"prompts": f"{args.prompts} of {args.length} tokens"}
    print_card("Memory of a step", setting)
    rows = [peak_of(model, limit, args.prompts, args.length) for limit in LIMITS]
    print_table(
        ["tokens of a step", "peak, MB", "estimate, MB"],
        [
            [
                row["max_num_batched_tokens"],
                f"{row['peak_bytes'] / 1e6:.1f}",
                f"{row['estimated_bytes'] / 1e6:.1f}",
            ]
            for row in rows
        ],
    )
    print_json("step_memory", setting, {"rows": rows}, args.out)


if __name__ == "__main__":
    main()
