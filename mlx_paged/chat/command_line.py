"""The flags of the chat; they follow ``mlx_lm.chat``. Imports no MLX."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mlx_paged import __version__, arguments
from mlx_paged.config import BLOCK_SIZES

EXAMPLE_MODEL = "mlx-community/Qwen3-0.6B-4bit"
_FROM_MODEL = "default: as the model's generation_config.json says, else"


def setup_arg_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The argument parser of the chat, for a program of this name."""
    parser = arguments.Parser(
        prog=prog or name_as_called(),
        description="Chat with a model whose K/V live in a paged (or a contiguous) cache.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "message",
        nargs="?",
        help="answer this once and leave; - reads one message, of any number of lines, from stdin",
    )
    parser.add_argument(
        "--model",
        help=f"local folder or Hugging Face repo, e.g. {EXAMPLE_MODEL} (default: the bundled demo model)",
    )
    parser.add_argument(
        "--adapter-path",
        help="folder with LoRA or DoRA adapters for the model, as mlx-lm trains them",
    )
    _add_sampling_flags(parser)
    _add_template_flags(parser)
    _add_cache_flags(parser)
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="say all figures of the model, the cache and each answer",
    )
    parser.add_argument(
        "--version",
        action=arguments.VersionAction,
        nargs=0,
        const=f"mlx_paged {__version__}",
        help="the version of mlx_paged",
    )
    return parser


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-tokens",
        "-m",
        type=arguments.max_tokens,
        default=-1,
        help="tokens per answer (default: -1, as many as the context holds)",
    )
    parser.add_argument(
        "--temp",
        type=arguments.at_least_0,
        help=f"sampling temperature, 0 is greedy ({_FROM_MODEL} 0)",
    )
    parser.add_argument(
        "--top-p", type=arguments.probability, help=f"sampling top-p, 1 is off ({_FROM_MODEL} 1)"
    )
    parser.add_argument(
        "--top-k", type=arguments.whole, help=f"sampling top-k, 0 is off ({_FROM_MODEL} 0)"
    )
    parser.add_argument(
        "--min-p", type=arguments.probability, help=f"sampling min-p, 0 is off ({_FROM_MODEL} 0)"
    )
    parser.add_argument(
        "--no-generation-config",
        action="store_true",
        help="leave the model's generation_config.json out: greedy, unless flags say otherwise",
    )
    parser.add_argument(
        "--seed", type=arguments.whole, default=0, help="seed of the sampling (default: 0)"
    )


def _add_template_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system-prompt", help="system prompt of the conversation")
    parser.add_argument(
        "--no-thinking",
        action="store_true",
        help="ask the model's chat template for an answer without reasoning",
    )
    parser.add_argument(
        "--hide-thinking", action="store_true", help="do not show the model's reasoning (<think>)"
    )


def _add_cache_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv",
        choices=("basic", "paged"),
        default="paged",
        help="the KV cache: contiguous or paged (default: paged)",
    )
    parser.add_argument(
        "--block-size",
        type=int,
        choices=BLOCK_SIZES,
        default=16,
        help="tokens per K/V block (default: 16)",
    )
    parser.add_argument(
        "--kv-cache-bytes",
        type=arguments.budget,
        metavar="N",
        help="K/V budget: bytes (65536, 512M, 2G) or blocks (256blocks) (default: a share of the memory)",
    )
    parser.add_argument(
        "--max-model-len",
        type=arguments.positive,
        metavar="N",
        help="context limit: tokens of the conversation and its answer (default: the model's own)",
    )
    parser.add_argument(
        "--prefill-step-size",
        type=arguments.positive,
        default=512,
        help="prompt tokens computed at a time (default: 512)",
    )
    parser.add_argument(
        "--backend",
        choices=("auto", "reference", "metal"),
        default="auto",
        help="operations on the paged cache (default: auto)",
    )


def name_as_called() -> str:
    """What the user typed to get here, as far as it can be known."""
    name = Path(sys.argv[0]).name
    return name if name == "mlx_paged.chat" else "python -m mlx_paged.chat"
