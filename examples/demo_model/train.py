"""Train the demo model: `python examples/demo_model/train.py --work-dir WORK --out MODEL`.

The same seed and settings give the same batches in the same order. A run that is stopped (Ctrl-C,
or a killed process) continues from the last checkpoint in --work-dir when the same command is given
again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "float32",
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "max_position_embeddings": 4096,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    # Half of the 16 rotations turn less than once in 1,000 tokens, so that recall can match by
    # content at any distance.
    "rope_theta": 100000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "use_cache": True,
    "use_sliding_window": False,
}

# The user's words can mostly not be predicted; a little weight on them still teaches their
# spelling.
PROMPT_WEIGHT = 0.05

# Per lesson: until which step, which lengths of conversation (drawn with equal chance), and how
# many tokens a step has. Copying and recall have to form first, on short conversations where the
# answer is near and many small steps are cheap; they then hold as far as the examples reach.
CURRICULUM: dict[str, list[tuple[float, list[int], int]]] = {
    "recall": [
        (1000, [128], 2048),
        (1700, [256], 2048),
        (2000, [256, 512], 4096),
        (math.inf, [256, 512, 1280, 1280], 4096),
    ],
    "everything": [
        (800, [128, 128, 128, 128, 256, 256, 512, 1280], 2048),
        (math.inf, [128, 128, 128, 256, 256, 512, 1280, 1280], 2048),
    ],
    "practice": [(math.inf, [128, 256, 256, 256, 512, 1280], 2048)],
}

# Until this step of the first lesson half of the turns are copying: the densest exercise in looking
# back.
COPY_FIRST = 500

# The last part of the run, in which the learning rate falls to nothing.
DECAY_SHARE = {"recall": 0.25, "everything": 0.5, "practice": 1.0}


@dataclass(frozen=True)
class Settings:
    """Everything that decides the result of a run, kept in its checkpoints."""

    steps: int
    seed: int
    batch_tokens: int | None
    vocab_size: int
    learning_rate: float
    matrix_learning_rate: float
    warmup: int
    longest: int
    lesson: str


SMOKE = {"steps": 2, "batch_tokens": 256, "vocab_size": 512, "warmup": 2, "longest": 128}


class UserError(Exception):
    """A mistake at the command line; reported as one line."""


def setup_arg_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train mlx_paged's bundled demo model on text it generates itself."
    )
    parser.add_argument("--out", type=Path, required=True, help="Folder for the finished model.")
    parser.add_argument(
        "--work-dir", type=Path, required=True, help="Folder for checkpoints and the log."
    )
    parser.add_argument(
        "--lesson", choices=list(CURRICULUM), default="recall", help="In this order."
    )
    parser.add_argument(
        "--init", type=Path, help="Start from the weights and tokenizer of this finished model."
    )
    parser.add_argument(
        "--steps", type=int, default=2400, help="Optimizer steps (default: %(default)s)."
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="Seed of the data and the weights (default: %(default)s).",
    )
    parser.add_argument(
        "--batch-tokens",
        type=int,
        help="Tokens per step (default: the curriculum's, 2,048 to 4,096).",
    )
    parser.add_argument(
        "--vocab-size", type=int, default=1024, help="Tokenizer pieces (default: %(default)s)."
    )
    parser.add_argument(
        "--learning-rate", type=float, default=3e-3, help="AdamW: embeddings and norms."
    )
    parser.add_argument(
        "--matrix-learning-rate", type=float, default=0.02, help="Muon: weight matrices."
    )
    parser.add_argument(
        "--warmup", type=int, default=100, help="Steps of linear warmup (default: %(default)s)."
    )
    parser.add_argument(
        "--longest", type=int, default=1280, help="Tokens of the longest conversations."
    )
    parser.add_argument(
        "--save-every",
        type=int,
        default=50,
        help="Steps between checkpoints (default: %(default)s).",
    )
    parser.add_argument(
        "--export",
        action="store_true",
        help="Only write the model of the last checkpoint to --out.",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="A few tiny steps, to see that everything runs."
    )
    return parser


def resolve_settings(args: argparse.Namespace) -> Settings:
    """Check the arguments and freeze them."""
    values = {name: getattr(args, name) for name in Settings.__dataclass_fields__}
    if args.smoke:
        values.update(SMOKE)
    settings = Settings(**values)
    for name in ("steps", "batch_tokens", "longest"):
        if getattr(settings, name) is not None and getattr(settings, name) < 1:
            raise UserError(
                f"--{name.replace('_', '-')} must be at least 1, got {getattr(settings, name)}"
            )
    if settings.vocab_size < 450:
        raise UserError(
            f"--vocab-size {settings.vocab_size} is too small: 256 bytes and the characters need "
            "about 450"
        )
    if settings.longest > CONFIG["max_position_embeddings"]:
        raise UserError(f"--longest {settings.longest} is above max_position_embeddings 4096")
    return settings


def make_batch(settings: Settings, step: int, processor: Any) -> tuple[Any, Any]:
    """The step's token ids and loss weights, both [rows, length + 1]; they depend on seed and step
    alone.
    """
    import conversations
    import numpy as np
    import tokenizer

    rng = random.Random(
        f"{settings.seed}:{step}"
        if settings.lesson == "recall"
        else f"{settings.seed}:{settings.lesson}:{step}"
    )
    stages = CURRICULUM[settings.lesson]
    lengths, batch_tokens = next((lengths, size) for until, lengths, size in stages if step < until)
    length = min(rng.choice(lengths), settings.longest)
    # An even number of rows, for the two halves that are computed at the same time.
    rows = max(2, (settings.batch_tokens or batch_tokens) // length // 2 * 2)
    copying = 0.5 if settings.lesson == "recall" and step < COPY_FIRST else 0.0
    tokens = np.full(
        (rows, length + 1), processor.piece_to_id(tokenizer.END_OF_TEXT), dtype=np.int32
    )
    weights = np.zeros((rows, length + 1), dtype=np.float32)

    def length_of(text: str) -> int:
        return len(processor.encode(text))

    for row in range(rows):
        system, turns = conversations.conversation(
            rng, length + 1, length_of, settings.lesson, copying
        )
        at = 0
        for number, turn in enumerate(turns):
            prompt = conversations.render_prompt(turn.user, system if number == 0 else None)
            answer, end = conversations.render_answer(turn.answer)
            for text, weight in ((prompt, PROMPT_WEIGHT), (answer, 1.0), (end, PROMPT_WEIGHT)):
                ids = processor.encode(text)[: length + 1 - at]
                tokens[row, at : at + len(ids)] = ids
                weights[row, at : at + len(ids)] = weight
                at += len(ids)
    return tokens, weights


def learning_rate_scale(settings: Settings, step: int) -> float:
    """Linear warmup, then constant, then a straight line to nothing over the last steps.

    Unlike a cosine it does not depend on --steps before the decay starts, so a run can still be
    made longer or shorter.
    """
    remaining = (settings.steps - step) / max(1, DECAY_SHARE[settings.lesson] * settings.steps)
    return min(1.0, (step + 1) / settings.warmup, remaining)


class Run:
    """The model, its optimizers and how far they are: what a checkpoint holds."""

    def __init__(self, settings: Settings, quick: bool = False):
        import cpu_ops
        import mlx.core as mx
        import mlx.nn as nn
        from mlx_lm.models.qwen3 import Model, ModelArgs
        from updates import Updates

        self.settings = settings
        self.step = 0
        self.seconds = 0.0
        self.tokens = 0
        on_cpu = mx.default_device() == mx.Device(mx.cpu)
        cross_entropy = cpu_ops.cross_entropy if on_cpu else nn.losses.cross_entropy
        mx.random.seed(settings.seed)
        self.model = Model(ModelArgs.from_dict({**CONFIG, "vocab_size": settings.vocab_size}))

        def loss_of(tokens: mx.array, weights: mx.array) -> tuple[mx.array, mx.array]:
            logits = self.model(tokens[:, :-1])
            targets, weights = tokens[:, 1:], weights[:, 1:]
            loss = (cross_entropy(logits, targets) * weights).sum() / weights.sum()
            answers = weights == 1.0
            right = ((logits.argmax(-1) == targets) & answers).sum() / answers.sum()
            return loss, right

        self.update = Updates(
            self.model,
            settings,
            loss_of,
            lambda path, weight: weight.ndim == 2 and "embed" not in path,
            is_quick=quick,
        )
        self.optimizer = self.update.optimizer

    def advance(self, tokens: Any, weights: Any) -> tuple[float, float]:
        """One optimizer step; returns the loss and the share of answer tokens predicted."""
        loss, right = self.update(tokens, weights, learning_rate_scale(self.settings, self.step))
        self.step += 1
        self.tokens += tokens.shape[0] * (tokens.shape[1] - 1)
        return loss.item(), right.item()

    def save_checkpoint(self, path: Path) -> None:
        """Write weights, optimizer state and progress into one file, replaced at once."""
        import mlx.core as mx
        from mlx.utils import tree_flatten

        arrays = {f"model.{name}": value for name, value in tree_flatten(self.model.parameters())}
        arrays |= {f"optimizer.{name}": value for name, value in tree_flatten(self.optimizer.state)}
        progress = {"step": self.step, "seconds": round(self.seconds, 1), "tokens": self.tokens}
        partial_file = path.with_name("partial.safetensors")
        metadata = {"settings": json.dumps(asdict(self.settings)), "progress": json.dumps(progress)}
        mx.save_safetensors(str(partial_file), arrays, metadata=metadata)
        os.replace(partial_file, path)

    def load_checkpoint(self, path: Path) -> None:
        """Continue where a checkpoint of the same settings ended."""
        import mlx.core as mx
        from mlx.utils import tree_unflatten

        try:
            arrays, metadata = mx.load(str(path), return_metadata=True)
            saved, progress = json.loads(metadata["settings"]), json.loads(metadata["progress"])
        except (RuntimeError, KeyError, ValueError) as error:
            raise UserError(f"{path} is not a checkpoint of this script: {error}") from None
        mine = asdict(self.settings)
        # A run may become longer or shorter: --steps only decides where the learning rate starts to
        # fall.
        saved["steps"] = mine["steps"]
        if saved != mine:
            changed = ", ".join(
                f"{k} {saved.get(k)} -> {v}" for k, v in mine.items() if saved.get(k) != v
            )
            raise UserError(
                f"{path} was made with other settings ({changed}); repeat those or choose a new "
                "--work-dir"
            )
        weights = [
            (k.removeprefix("model."), v) for k, v in arrays.items() if k.startswith("model.")
        ]
        self.model.load_weights(weights)
        flat = [
            (k.removeprefix("optimizer."), v)
            for k, v in arrays.items()
            if k.startswith("optimizer.")
        ]
        state = tree_unflatten(flat)
        for optimizer, part in zip(self.optimizer.optimizers, state["states"], strict=True):
            _refill(optimizer.state, part)
        mx.eval(self.model.state, self.optimizer.state)
        self.step, self.seconds, self.tokens = (
            progress["step"],
            progress["seconds"],
            progress["tokens"],
        )

    def load_weights(self, folder: Path) -> None:
        """Start from a finished model."""
        try:
            self.model.load_weights(str(folder / "model.safetensors"))
        except (RuntimeError, ValueError) as error:
            raise UserError(f"--init {folder} does not fit this model: {error}") from None

    def export(self, folder: Path, tokenizer_model: bytes, earlier_lessons: list[dict]) -> None:
        """Write the model as a Hugging Face style folder; each file is replaced at once."""
        import mlx.core as mx
        import sentencepiece
        import tokenizer
        from mlx.utils import tree_flatten

        staging = folder.parent / f".{folder.name}.partial"
        shutil.rmtree(staging, ignore_errors=True)
        tokenizer.save_tokenizer(tokenizer_model, staging, CONFIG["max_position_embeddings"])
        processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer_model)
        ids = {"eos_token_id": tokenizer.IM_END, "pad_token_id": tokenizer.END_OF_TEXT}
        token_ids = {name: processor.piece_to_id(piece) for name, piece in ids.items()}
        config = {
            **CONFIG,
            "vocab_size": self.settings.vocab_size,
            "bos_token_id": None,
            **token_ids,
        }
        (staging / "config.json").write_text(
            json.dumps(dict(sorted(config.items())), indent=2) + "\n"
        )
        generation = {"do_sample": False, **token_ids}
        (staging / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        lesson = {
            **asdict(self.settings),
            "steps_done": self.step,
            "tokens": self.tokens,
            "seconds": round(self.seconds),
        }
        lessons = [
            *earlier_lessons,
            {name: value for name, value in lesson.items() if value is not None},
        ]
        (staging / "training.json").write_text(json.dumps({"lessons": lessons}, indent=2) + "\n")
        weights = dict(tree_flatten(self.model.parameters()))
        mx.save_safetensors(str(staging / "model.safetensors"), weights, metadata={"format": "mlx"})
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(staging.iterdir()):
            os.replace(file, folder / file.name)
        staging.rmdir()


def _refill(into: dict, values: dict) -> None:
    """Put loaded values into an optimizer's state without replacing its dictionaries.

    The compiled step holds on to these very dictionaries.
    """
    for name, value in values.items():
        if isinstance(value, dict):
            _refill(into[name], value)
        elif isinstance(value, list):
            for inner, part in zip(into[name], value, strict=True):
                _refill(inner, part)
        else:
            into[name] = value


def load_or_train_tokenizer(work_dir: Path, settings: Settings, init: Path | None) -> bytes:
    """The tokenizer of this run: that of --init, or one trained once and kept."""
    import conversations
    import tokenizer

    path = work_dir / "tokenizer.model"
    if init:
        return (init / "tokenizer.model").read_bytes()
    if not path.exists():
        lines = conversations.training_text(settings.seed, characters=1_000_000)
        path.write_bytes(tokenizer.train_tokenizer(lines, settings.vocab_size))
    return path.read_bytes()


def log_step(work_dir: Path, line: dict[str, float], is_printed: bool) -> None:
    """Add a line to the log of the run, and print it if it is one of those that are printed."""
    with (work_dir / "log.jsonl").open("a") as log:
        log.write(json.dumps(line) + "\n")
    if is_printed:
        text = "  ".join(f"{name} {value}" for name, value in line.items())
        print(text, file=sys.stderr, flush=True)


def check_folders(args: argparse.Namespace, checkpoint: Path) -> None:
    """Raise `UserError` if a folder lacks what an option needs of it."""
    if args.init and not (args.init / "training.json").exists():
        raise UserError(
            f"--init {args.init} is not a model made by this script: it holds no training.json"
        )
    if args.export and not checkpoint.exists():
        raise UserError(f"--export needs a checkpoint, but {args.work_dir} holds none; train first")


def train(args: argparse.Namespace) -> int:
    """Run from the last checkpoint, or from the start, to the end; returns the exit status."""
    settings = resolve_settings(args)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    checkpoint = args.work_dir / "checkpoint.safetensors"
    check_folders(args, checkpoint)

    import mlx.core as mx
    import sentencepiece
    from mlx.utils import tree_flatten

    tokenizer_model = load_or_train_tokenizer(args.work_dir, settings, args.init)
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer_model)
    if processor.get_piece_size() != settings.vocab_size:
        raise UserError(
            f"{args.work_dir}/tokenizer.model has {processor.get_piece_size()} pieces, not "
            "--vocab-size"
        )
    run = Run(settings, quick=args.smoke)
    if checkpoint.exists():
        run.load_checkpoint(checkpoint)
    elif args.init:
        run.load_weights(args.init)
    size = sum(value.size for _, value in tree_flatten(run.model.parameters()))
    print(
        f"{size:,} parameters on {mx.default_device()}, step {run.step} of {settings.steps}",
        file=sys.stderr,
    )

    stop: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, _: stop.append(number))
        for number in STOP_SIGNALS
    }
    last_saved = run.step
    try:
        while run.step < settings.steps and not stop and not args.export:
            started = time.perf_counter()
            tokens, weights = make_batch(settings, run.step, processor)
            loss, right = run.advance(tokens, weights)
            elapsed = time.perf_counter() - started
            run.seconds += elapsed
            line = {
                "step": run.step,
                "length": tokens.shape[1] - 1,
                "loss": round(loss, 4),
                "answer_tokens_right": round(right, 4),
                "tokens_per_second": round(tokens.size / elapsed),
                "minutes": round(run.seconds / 60, 1),
            }
            log_step(
                args.work_dir, line, is_printed=run.step % 20 == 0 or run.step == settings.steps
            )
            if run.step % args.save_every == 0:
                run.save_checkpoint(checkpoint)
                last_saved = run.step
        if run.step != last_saved:
            run.save_checkpoint(checkpoint)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if stop:
        print(f"Stopped at step {run.step}; the same command continues from here.", file=sys.stderr)
        return 128 + stop[0]
    earlier = json.loads((args.init / "training.json").read_text())["lessons"] if args.init else []
    run.export(args.out, tokenizer_model, earlier)
    print(f"Wrote {args.out} after {run.step} steps.", file=sys.stderr)
    return 0


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main() -> int:
    """Entry point."""
    args = setup_arg_parser().parse_args()
    try:
        return train(args)
    except UserError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
