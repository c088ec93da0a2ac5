"""A text without end in a window with sinks, on the demo model: perplexity along the way, and the
blocks that are held.

    python -m benchmarks windows

One stream of held-out conversations, far longer than the text that the model was trained on, is run
teacher-forced through the paged cache: with sinks, without them, and with everything kept. It is
compared with the same conversations in pieces of the trained length, each on an empty cache.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from benchmarks.lib.held_out import documents
from mlx_paged import Sequences, demo_model_path, load, make_kv_cache, run_step
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm import check_model

TRAINED_LENGTH = 1280


class Stream:
    """A text on a cache: the loss of each predicted token, in nats, and what was held."""

    def __init__(self, model: LanguageModel, tokens: Sequence[int], chunk: int, **options: Any):
        sequences = Sequences(make_kv_cache(model, kv_cache_bytes="4096blocks", **options))
        self.losses: list[float] = []
        self.num_blocks: list[int] = []
        done = 0
        while done < len(tokens):
            run = list(tokens[done : done + min(chunk, sequences.manager.max_run("s"))])
            logits = run_step(model, sequences, {"s": run}, [len(run)]).astype(mx.float32)
            done += len(run)
            self.num_blocks.append(sequences.stats().blocks_used)
            targets = mx.array(list(tokens[done - len(run) + 1 : done + 1]), dtype=mx.int32)
            if not targets.size:
                break  # Nothing follows the last token.
            logits = logits[: len(targets)]
            found = mx.logsumexp(logits, axis=-1) - mx.take_along_axis(
                logits, targets[:, None], axis=-1
            ).squeeze(1)
            self.losses += found.tolist()  # type: ignore[arg-type]
        self.nbytes = sequences.cache.nbytes_held


def perplexity(losses: Sequence[float]) -> float:
    return math.exp(sum(losses) / len(losses))


def measure(model: LanguageModel, texts: list[list[int]], args: argparse.Namespace) -> Any:
    tokens = [token for text in texts for token in text][: args.num_tokens]
    inside: list[float] = []
    for start in range(0, len(tokens), args.piece):
        # One more, so that the same tokens are predicted as in the stream.
        inside += Stream(model, tokens[start : start + args.piece + 1], 512).losses[: args.piece]
    sides = {
        f"window {args.window}, {args.num_sink_tokens} sinks": {
            "window": args.window,
            "num_sink_tokens": args.num_sink_tokens,
        },
        f"window {args.window}, no sinks": {"window": args.window, "num_sink_tokens": 0},
        "everything": {},
    }
    results: dict[str, Any] = {
        "pieces": {"perplexity": perplexity(inside), "ratio": 1.0},
    }
    for name, options in sides.items():
        stream = Stream(model, tokens, 512, **options)
        late = [count for count in stream.num_blocks[len(stream.num_blocks) // 4 :]]
        last = len(stream.losses) * 3 // 4
        results[name] = {
            "perplexity": perplexity(stream.losses),
            "ratio": perplexity(stream.losses) / perplexity(inside),
            "last_quarter_ratio": perplexity(stream.losses[last:]) / perplexity(inside[last:]),
            "most_blocks": max(stream.num_blocks),
            "blocks_later": sorted({max(late), min(late)}),
            "megabytes_held": stream.nbytes / 1e6,
        }
    return results


def main() -> None:
    parser = make_arg_parser(__doc__)
    parser.add_argument("--num-tokens", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--num-sink-tokens", type=int, default=4)
    parser.add_argument("--piece", type=int, default=1024, help="tokens on an empty cache")
    parser.add_argument("--length", type=int, default=512, help="tokens of a conversation")
    args = parser.parse_args()
    loaded, tokenizer = load(demo_model_path())
    model = check_model(loaded)
    texts = documents(tokenizer, args.num_tokens, args.length)
    setting = {
        **machine_card(),
        "model": "demo",
        "trained length": TRAINED_LENGTH,
        "tokens": args.num_tokens,
        "conversation": args.length,
        "piece": args.piece,
    }
    print_card("windows with sinks", setting)
    results = measure(model, texts, args)
    print_table(
        ["what is kept", "perplexity", "over pieces", "last quarter", "blocks", "MB"],
        [
            [
                name,
                f"{row['perplexity']:.4f}",
                f"{row['ratio']:.3f}",
                f"{row['last_quarter_ratio']:.3f}" if "last_quarter_ratio" in row else "",
                row.get("most_blocks", ""),
                f"{row['megabytes_held']:.1f}" if "megabytes_held" in row else "",
            ]
            for name, row in results.items()
        ],
    )
    print_json("windows", setting, results, args.out)


if __name__ == "__main__":
    main()
