"""Train the demo model's draft head: `python examples/demo_model/train_head.py --model MODEL`.

The head predicts the token after next from the embedding of a token and the model's hidden row of
the token before it, as the `mtp` layer of a Qwen3.5 does. It learns the model's own probabilities
(distillation), on the conversations that the model was trained on, at several depths: a draft after
a draft reads the head's own row in place of the model's.

The same seed and settings give the same batches in the same order. A run takes minutes, so there
are no checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import cpu_ops
import mlx.core as mx
import mlx.nn as nn
import sentencepiece
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3 import ModelArgs, TransformerBlock
from mlx_lm.utils import load_model
from train import Settings, UserError, learning_rate_scale, make_batch
from updates import Updates

FILE = "mtp.safetensors"

# Those of the batches, in turn. In the first 500 steps half of the turns of the first lesson are
# copies: what one layer learns last is to look for the token of a text that comes next.
LESSONS = ("everything", "recall")

# What the loss of each further depth weighs, since it is only reached if those before it are right.
DEPTH_WEIGHT = 0.75


class Head(nn.Module):
    """A draft head, with the names that published ones have after `mtp.`"""

    def __init__(self, args: ModelArgs):
        super().__init__()
        size, eps = args.hidden_size, args.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps)
        self.layers = [TransformerBlock(args)]
        self.norm = nn.RMSNorm(size, eps)

    def __call__(
        self,
        embeddings: mx.array,  # [batch, num_tokens, hidden_size]
        hidden: mx.array,  # [batch, num_tokens, hidden_size], of the token before each
        chain: Chain,
    ) -> mx.array:  # [batch, num_tokens, hidden_size]
        pair = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        mask = chain.mask(embeddings.shape[1])
        return self.norm(self.layers[0](self.fc(mx.concatenate(pair, axis=-1)), mask, chain))

    def start_from(self, model: nn.Module) -> None:
        """Begin with the model's last layer, and with the sum of both inputs."""
        self.layers[0].update(model.layers[-1].parameters())
        identity = mx.eye(model.args.hidden_size)
        self.fc.weight = 0.5 * mx.concatenate([identity, identity], axis=-1)
        self.norm.weight = model.model.norm.weight


class Chain:
    """Keys and values that the drafts of one depth see. Stands in for a cache of mlx-lm.

    A chain of drafts begins after each token of a text. A draft sees the text up to there, and the
    earlier drafts of its own chain.

    Attributes:
        offset: the position of the first chain's draft at this depth.
    """

    def __init__(self) -> None:
        self.offset = 0
        self._seen: list[tuple[mx.array, mx.array]] = []

    def mask(self, num_chains: int) -> mx.array | None:
        """``[num_chains, num_keys]``: 1 for what a chain sees; ``None`` if that is causal."""
        own = [mx.eye(num_chains)] * self.offset
        return mx.concatenate([mx.tri(num_chains), *own], axis=-1) if own else None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add those of the next depth, ``[batch, kv_heads, num_chains, head_dim]``."""
        num_chains = keys.shape[2]
        self._seen.append((keys, values))
        self.offset += 1
        parts = [[each[:, :, :num_chains] for each in pair] for pair in self._seen]
        keys, values = (mx.concatenate(each, axis=2) for each in zip(*parts, strict=True))
        return keys, values


def rows_by_depth(
    head: Head, model: nn.Module, tokens: mx.array, hidden: mx.array, depth: int
) -> list[mx.array]:
    """The head's rows, whose logits are the drafts': those of depth d are
    ``[batch, num_tokens - d, hidden_size]`` with d from 0, and draft the token d + 1 after each.

    Args:
        tokens: ``[batch, num_tokens]``.
        hidden: ``[batch, num_tokens, hidden_size]``, of these tokens.
    """
    embeddings, chain = model.model.embed_tokens(tokens), Chain()
    # There is no row before the first token.
    rows = mx.concatenate([mx.zeros_like(hidden[:, :1]), hidden[:, :-1]], axis=1)
    made = []
    for number in range(depth):
        num_chains = tokens.shape[1] - number
        rows = head(embeddings[:, number:], rows[:, :num_chains], chain)
        made.append(rows)
    return made


class Run:
    """A head, its optimizer and the model that it learns from."""

    def __init__(self, model: nn.Module, settings: Settings, depth: int):
        self.settings = settings
        self.head = Head(model.args)
        self.head.start_from(model)

        def loss_of(tokens: mx.array, weights: mx.array) -> tuple[mx.array, mx.array]:
            hidden = mx.stop_gradient(model.model(tokens[:, :-1]))
            output = model.model.embed_tokens.as_linear
            wanted = output(hidden)
            loss, right = mx.array(0.0), []
            made = rows_by_depth(self.head, model, tokens[:, :-1], hidden, depth)
            for number, rows in enumerate(made):
                logits, logits_wanted = output(rows), wanted[:, number:]
                weight = weights[:, 1 + number :]
                each = cpu_ops.distillation_loss(logits, cpu_ops.softmax(logits_wanted))
                loss += DEPTH_WEIGHT**number * (each * weight).sum() / weight.sum()
                answers = weight == 1.0
                same = logits.argmax(-1) == logits_wanted.argmax(-1)
                right.append((same & answers).sum() / answers.sum())
            return loss, mx.stack(right)

        self.update = Updates(
            self.head, settings, loss_of, lambda _, weight: weight.ndim == 2, [model.state]
        )

    def advance(self, step: int, processor: Any) -> tuple[float, list[float]]:
        """One optimizer step; returns the loss, and the share of an answer's tokens for which the
        draft is the model's own choice, by depth.
        """
        settings = replace(self.settings, lesson=LESSONS[step % len(LESSONS)])
        tokens, weights = make_batch(settings, step, processor)
        scale = learning_rate_scale(self.settings, step)
        loss, right = self.update(tokens, weights, scale)
        return loss.item(), right.tolist()

    def save(self, path: Path, record: dict[str, Any]) -> None:
        """Write the head in half the bytes; the file is replaced at once."""
        weights = {
            f"mtp.{name}": value.astype(mx.float16)
            for name, value in tree_flatten(self.head.parameters())
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_file = path.with_name(f"partial.{FILE}")
        metadata = {"format": "mlx", "training": json.dumps(record)}
        mx.save_safetensors(str(partial_file), weights, metadata=metadata)
        os.replace(partial_file, path)


def setup_arg_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train the draft head of the demo model on the text that the model learned."
    )
    parser.add_argument("--model", type=Path, required=True, help="Folder of the finished model.")
    parser.add_argument("--out", type=Path, help=f"File (default: {FILE} in the model's folder).")
    numbers = {
        "steps": (800, "Optimizer steps"),
        "seed": (77, "Seed of the data"),
        "batch_tokens": (2048, "Tokens per step"),
        "longest": (256, "Tokens of the longest conversations"),
        "warmup": (20, "Steps of linear warmup"),
        "depth": (3, "Drafts in a row that it learns to make"),
    }
    for name, (default, text) in numbers.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=default,
            help=f"{text} (default: %(default)s).",
        )
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="AdamW: norms.")
    parser.add_argument(
        "--matrix-learning-rate", type=float, default=0.02, help="Muon: weight matrices."
    )
    return parser


def train(args: argparse.Namespace) -> None:
    """Run from the start to the end, and write the head."""
    if not (args.model / "config.json").exists():
        raise UserError(f"--model {args.model} holds no config.json; train a model there first")
    for name in ("steps", "batch_tokens", "longest", "depth"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(args.model / "tokenizer.model"))
    given = {name: getattr(args, name) for name in Settings.__dataclass_fields__ if name in args}
    settings = Settings(**given, lesson="everything", vocab_size=processor.get_piece_size())
    model, _ = load_model(args.model)
    run = Run(model, settings, args.depth)
    size = sum(value.size for _, value in tree_flatten(run.head.parameters()))
    print(f"{size:,} parameters on {mx.default_device()}", file=sys.stderr)
    recent: list[list[float]] = []
    shares: list[float] = []
    for step in range(args.steps):
        loss, right = run.advance(step, processor)
        recent = [*recent[-19:], right]
        if step % 20 == 19 or step + 1 == args.steps:
            by_depth = zip(*recent, strict=True)
            shares = [round(sum(each) / len(recent), 3) for each in by_depth]
            print(
                f"step {step + 1}  loss {loss:.3f}  drafts right {shares}  "
                f"CPU seconds {time.process_time():.0f}",
                file=sys.stderr,
                flush=True,
            )
    seconds = round(time.process_time())
    record = asdict(settings) | {"depth": args.depth, "drafts_right": shares}
    path = args.out or args.model / FILE
    run.save(path, record | {"cpu_seconds": seconds})
    print(f"Wrote {path}.", file=sys.stderr)


def main() -> int:
    """Entry point."""
    args = setup_arg_parser().parse_args()
    try:
        train(args)
    except UserError as error:
        print(f"train_head.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
