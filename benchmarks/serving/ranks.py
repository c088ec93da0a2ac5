"""A model over several ranks: decode steps, prompts, and what the sums between the ranks take.

    python -m benchmarks ranks                                        # one process
    mlx.launch -n 2 --backend ring -- python -m benchmarks ranks      # two ranks of this machine
    mlx.launch --hostfile hosts.json -- python -m benchmarks ranks --model PATH_OR_REPO

Each decode step and each prompt is timed on rank 0, whole: messages, sums and sampling included.
The sums are also timed alone, with vectors of the model's size, one behind the other as in a step;
what they take is the share of a step that more bandwidth or less latency would save. Medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from mlx_paged.distributed import Ranks, launched_ranks
from mlx_paged.engine.engine import Engine
from mlx_paged.loading import demo_model_path, find_model, load_for
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.options.sampling_params import SamplingParams


def median_seconds(run: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def decode_seconds(engine: Engine, batch: int, prompt_len: int, num_steps: int) -> float:
    """Of a step in which ``batch`` answers go on."""
    params = SamplingParams(max_tokens=num_steps + 8, ignore_eos=True, detokenize=False)
    for number in range(batch):
        prompt = [5 + (number + index) % 50 for index in range(prompt_len)]
        engine.add_request(str(number), prompt, params)
    while engine.scheduler.waiting or any(
        r.num_output_tokens < 2 for r in engine.scheduler.running
    ):
        engine.step()
    seconds = median_seconds(engine.step, num_steps)
    engine.abort_all()
    while engine.has_unfinished_requests():
        engine.step()
    return seconds


def prompt_seconds(engine: Engine, prompt_len: int, count: int) -> float:
    """From a prompt to its first token; no two prompts begin alike."""
    vocab_size = engine.runner.vocab_size
    numbers = iter(range(count))

    def answer() -> None:
        first = next(numbers) % (vocab_size - 10)
        prompt = [first, *[5 + index % 50 for index in range(prompt_len - 1)]]
        engine.add_request("prompt", prompt, SamplingParams(max_tokens=1, detokenize=False))
        while engine.has_unfinished_requests():
            engine.step()

    return median_seconds(answer, count)


def vector_bytes(model: LanguageModel, folder: Path) -> int:
    """Of what ranks add up for one token, twice in each layer as a rule."""
    hidden_size = getattr(model.args, "hidden_size", None)
    if hidden_size is None:
        config = json.loads((folder / "config.json").read_text())
        hidden_size = (config.get("text_config", {}) | config)["hidden_size"]
    return int(hidden_size) * model.dtype.size


def sum_seconds(ranks: Ranks, nbytes: int, num_sums: int, count: int) -> float:
    """Of so many sums of ``nbytes`` bytes, each of which waits for the one before."""

    def run() -> None:
        vector = mx.zeros((nbytes // 4,))
        for _ in range(num_sums):
            vector = mx.distributed.all_sum(vector, group=ranks.group) * 0.5
        mx.eval(vector)

    return median_seconds(run, count)


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--model", default="demo", help="demo, a folder or a hub id")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="answers at once")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=50, help="decode steps that are timed")
    parser.add_argument("--prompts", type=int, default=5, help="prompts that are timed")
    parser.add_argument("--kv-cache-bytes", default="1G", help="of each rank")
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    ranks = launched_ranks()
    folder = demo_model_path() if args.model == "demo" else find_model(args.model)
    model, tokenizer = load_for(ranks, folder)
    engine = Engine(
        model, tokenizer, kv_cache_bytes=args.kv_cache_bytes, enable_prefix_caching=False
    )
    num_ranks = 1 if ranks is None else ranks.size
    is_leader = ranks is None or ranks.is_leader
    setting = machine_card() | {
        "model": args.model,
        "ranks": num_ranks,
        "prompt_len": args.prompt_len,
        "one step ahead": engine.run_ahead,
    }
    if is_leader:
        print_card("A model over several ranks", setting)
    seconds = engine.share(
        lambda: {
            **{
                f"decode, {batch} at once": decode_seconds(
                    engine, batch, args.prompt_len, args.steps
                )
                for batch in args.batch
            },
            "prompt": prompt_seconds(engine, args.prompt_len, args.prompts),
        }
    )
    results: dict[str, float] = {name: value * 1000 for name, value in seconds.items()}
    split = engine.runner.model
    nbytes, num_sums = vector_bytes(split, folder), 2 * len(split.layer_specs)
    if ranks is not None:
        for batch in args.batch:
            took = sum_seconds(ranks, batch * nbytes, num_sums, args.steps)
            results[f"sums alone, {batch} at once"] = took * 1000
    if not is_leader:
        return
    print_table(["what", "ms"], [[name, f"{value:.2f}"] for name, value in results.items()])
    # A ring passes parts of a vector on, each as often as there are other ranks, and then the sums.
    sent = nbytes * num_sums * 2 * (num_ranks - 1) // num_ranks
    print(f"a rank sends {sent:,} bytes of activations for a token")
    print_json("ranks", setting, {"milliseconds": results, "sent_bytes": sent}, args.out)


if __name__ == "__main__":
    main()
