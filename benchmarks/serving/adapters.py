"""Tokens per second with LoRA adapters: a batch whose requests have different ones, beside the
model alone and each adapter alone.

    python -m benchmarks adapters                       # layers as Qwen3-0.6B's, random weights
    python -m benchmarks adapters --model demo          # the demo model: nearly all overhead
    python -m benchmarks adapters --model PATH_OR_REPO  # a real model

Each side answers the same requests, in turns on one engine: the model alone; all requests with one
adapter; each with its own; half of them with one; and each with its own, one request after the
other, as without batches of several adapters. Adapters are random and target all linear layers.
Figures are medians over the turns, for the prompts and for the answers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.layers.base import Module

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from benchmarks.lib.models import load_both, shape_of
from mlx_paged import Engine, SamplingParams
from mlx_paged.models.adapted_layers import sizes_of

SCALE = 0.1  # so small that answers stay ordinary numbers


def write_adapters(folder: Path, model: Module, num_adapters: int, rank: int) -> dict[str, Path]:
    """Adapters of all linear layers, as mlx-lm writes them."""
    linears = {
        path: sizes_of(module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.QuantizedLinear)
    }
    folders = {f"adapter {number}": folder / str(number) for number in range(num_adapters)}
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": rank, "scale": SCALE}}
    for each in folders.values():
        each.mkdir()
        arrays = {}
        for path, (num_inputs, num_outputs) in linears.items():
            arrays[f"{path}.lora_a"] = mx.random.normal((num_inputs, rank)) * num_inputs**-0.5
            arrays[f"{path}.lora_b"] = mx.random.normal((rank, num_outputs)) * rank**-0.5
        mx.save_safetensors(str(each / "adapters.safetensors"), arrays)
        (each / "adapter_config.json").write_text(json.dumps(config))
    return folders


def answer(
    engine: Engine,
    prompts: Sequence[list[int]],
    adapters: Sequence[str | None],
    args: argparse.Namespace,
) -> tuple[float, float]:
    """Seconds until all requests of a batch have a first token, and after that."""
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, detokenize=False)
    clock = time.process_time if args.cpu_time else time.perf_counter
    start = clock()
    for number, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
        engine.add_request(str(number), prompt, params, adapter=adapter)
    waiting = {str(number) for number in range(len(prompts))}
    while waiting:
        waiting -= {each.request_id for each in engine.step() if each.outputs[0].token_ids}
    first = clock()
    while engine.has_unfinished_requests():
        engine.step()
    return first - start, clock() - first


def sides_of(names: Sequence[str]) -> dict[str, list[list[str | None]]]:
    """The adapters of the requests of each side, batch by batch."""
    return {
        "no adapter": [[None] * len(names)],
        "one adapter": [[names[0]] * len(names)],
        "each its own": [[*names]],
        "half with one": [[None if index % 2 else names[0] for index in range(len(names))]],
        "one by one": [[name] for name in names],
    }


def measure(engine: Engine, names: Sequence[str], args: argparse.Namespace) -> Iterator[Any]:
    """The figures of each side."""
    rng = np.random.default_rng(0)
    vocab_size = engine.runner.vocab_size
    prompts = rng.integers(5, vocab_size, (len(names), args.prompt_tokens)).tolist()
    sides = sides_of(names)
    seconds: dict[str, list[np.ndarray]] = {side: [] for side in sides}
    for turn in range(args.turns + 1):
        for side, batches in sides.items():
            total, begin = np.zeros(2), 0
            for batch in batches:
                some = prompts[begin : begin + len(batch)]
                total += answer(engine, some, batch, args)
                begin += len(batch)
            if turn:  # The first one compiles.
                seconds[side].append(total)
    medians = {side: np.median(each, axis=0) for side, each in seconds.items()}
    num_prompt = len(names) * args.prompt_tokens
    num_answer = len(names) * (args.tokens - 1)
    for side, (of_prompts, of_answers) in medians.items():
        base_prompts, base_answers = medians["no adapter"]
        yield {
            "side": side,
            "prompt_tokens_per_second": num_prompt / of_prompts,
            "tokens_per_second": num_answer / of_answers,
            "prompts_over_base": base_prompts / of_prompts,
            "answers_over_base": base_answers / of_answers,
        }


def main() -> None:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--model", default="qwen3-0.6b-layers")
    parser.add_argument("--adapters", type=int, default=8, help="as many requests run at once")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--cpu-time", action="store_true", help="seconds of CPU, on a machine that others use"
    )
    args = parser.parse_args()
    model, _ = load_both(args.model)
    with TemporaryDirectory() as folder:
        root = model.get("inner", model)
        folders = write_adapters(Path(folder), root, args.adapters, args.rank)
        engine = Engine(
            model, adapters=folders, max_adapter_rank=args.rank, enable_prefix_caching=False
        )
    setting = {
        **machine_card(),
        "model": args.model,
        "layers": shape_of(model),
        "adapters": args.adapters,
        "rank": args.rank,
        "adapter bytes": engine.adapters.nbytes // (args.adapters + 1),
        "prompt tokens": args.prompt_tokens,
        "tokens": args.tokens,
        "turns": args.turns,
        "clock": "CPU time" if args.cpu_time else "wall time",
    }
    print_card("Several LoRA adapters in one batch", setting)
    results = list(measure(engine, list(folders), args))
    print_table(
        ["requests", "prompt tok/s", "of no adapter", "answer tok/s", "of no adapter"],
        [
            [
                each["side"],
                f"{each['prompt_tokens_per_second']:.0f}",
                f"{each['prompts_over_base']:.2f}",
                f"{each['tokens_per_second']:.1f}",
                f"{each['answers_over_base']:.2f}",
            ]
            for each in results
        ],
    )
    print_json("adapters", setting, results, args.out)


if __name__ == "__main__":
    main()
