"""The flags of the chat, which follow ``mlx_lm.chat``, and errors that name them. No MLX here."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from mlx_paged import __version__
from mlx_paged.config import (
    BLOCK_SIZES,
    BUDGET_NOTATION,
    DEFAULT_BACKEND,
    DEFAULT_BLOCK_SIZE,
    DEFAULT_KV,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_NUM_DRAFT_TOKENS,
    DEFAULT_NUM_SINK_TOKENS,
    KV_BITS_NOTATION,
    KV_CACHES,
    MAX_DRAFT_TOKENS,
    KVBits,
    KVBudget,
)
from mlx_paged.errors import one_line, shown
from mlx_paged.standard_streams import write

EXAMPLE_MODEL = "mlx-community/Qwen3-0.6B-4bit"
_FROM_MODEL = "default: as the model's generation_config.json says, else"
# Arguments of the library that flags are handed on as.
_FLAGS = {
    "adapter_path": "--adapter-path",
    "draft_model": "--draft-model",
    "kv_cache_bytes": "--kv-cache-bytes",
    "kv_format": "--kv-bits",
    "num_sink_tokens": "--num-sink-tokens",
    "max_model_len": "--max-model-len",
    "max_num_batched_tokens": "--prefill-step-size",
    "num_draft_tokens": "--num-draft-tokens",
    "path_or_hf_repo": "--model",
    "window": "--window",
}
_MAX_ERROR = 2000  # characters
_DASHES_AS_VALUE = re.compile(r"(--[^=]+)=--|(-[a-zA-Z])=?--")
Number = TypeVar("Number", int, float)


def setup_arg_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The argument parser of the chat, for a program of this name."""
    parser = _Parser(
        prog=prog or _name_as_called(),
        description="Chat with a model whose K/V live in a paged (or a contiguous) cache.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "message",
        nargs="?",
        help="answer this once and leave; - reads one message, of any number of lines, from stdin",
    )
    add(
        "--model",
        help=f"local folder or Hugging Face repo, e.g. {EXAMPLE_MODEL} "
        "(default: the bundled demo model)",
    )
    add(
        "--adapter-path",
        help="folder with LoRA or DoRA adapters for the model, as mlx-lm trains them",
    )
    _add_sampling_flags(parser)
    _add_template_flags(parser)
    _add_cache_flags(parser)
    add(
        "--verbose",
        action="store_true",
        help="say all figures of the model, the cache and each answer",
    )
    add(
        "--version",
        action=_VersionAction,
        nargs=0,
        const=f"mlx_paged {__version__}",
        help="the version of mlx_paged",
    )
    return parser


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--max-tokens",
        "-m",
        type=max_tokens,
        default=-1,
        help="tokens per answer (default: -1, as many as the context holds)",
    )
    add("--temp", type=at_least_0, help=f"sampling temperature, 0 is greedy ({_FROM_MODEL} 0)")
    add("--top-p", type=probability, help=f"sampling top-p, 1 is off ({_FROM_MODEL} 1)")
    add("--top-k", type=whole, help=f"sampling top-k, 0 is off ({_FROM_MODEL} 0)")
    add("--min-p", type=probability, help=f"sampling min-p, 0 is off ({_FROM_MODEL} 0)")
    add(
        "--xtc-probability",
        type=probability,
        help="how often XTC removes the most likely tokens (default: 0, never)",
    )
    add(
        "--xtc-threshold",
        type=up_to_a_half,
        help="tokens above this probability are removed but the least likely one (default: 0.1)",
    )
    add(
        "--no-generation-config",
        action="store_true",
        help="leave the model's generation_config.json out: greedy, unless flags say otherwise",
    )
    add("--seed", type=whole, default=0, help="seed of the sampling (default: 0)")


def _add_template_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--system-prompt", help="system prompt of the conversation")
    add(
        "--no-thinking",
        action="store_true",
        help="ask the model's chat template for an answer without reasoning",
    )
    add("--hide-thinking", action="store_true", help="do not show the model's reasoning (<think>)")


def _add_cache_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--kv",
        choices=KV_CACHES,
        default=DEFAULT_KV,
        help="the KV cache: contiguous or paged (default: %(default)s)",
    )
    add(
        "--block-size",
        type=int,
        choices=BLOCK_SIZES,
        default=DEFAULT_BLOCK_SIZE,
        help="tokens per K/V block (default: %(default)s)",
    )
    add(
        "--kv-cache-bytes",
        type=budget,
        metavar="N",
        help="K/V budget: bytes (65536, 512M, 2G) or blocks (256blocks) "
        "(default: a share of the memory)",
    )
    add(
        "--kv-bits",
        type=kv_bits,
        metavar="N",
        help="quantise the K/V of a paged cache: 8, 4, or K:8,V:4 (default: the model's dtype)",
    )
    add(
        "--max-model-len",
        type=positive,
        metavar="N",
        help="context limit: tokens of the conversation and its answer (default: the model's own)",
    )
    add(
        "--window",
        type=positive,
        metavar="N",
        help="keep the last N tokens, and the first ones, so that the conversation has no end "
        "(default: keep all)",
    )
    add(
        "--num-sink-tokens",
        type=whole,
        metavar="M",
        help=f"first tokens to keep beside a window (default: {DEFAULT_NUM_SINK_TOKENS})",
    )
    add(
        "--prefill-step-size",
        type=positive,
        default=DEFAULT_MAX_NUM_BATCHED_TOKENS,
        help="prompt tokens computed at a time (default: %(default)s)",
    )
    add(
        "--draft-model",
        help="a small model of the same tokenizer, folder or repo, that drafts the next tokens; "
        "without one they are looked up in the conversation",
    )
    add(
        "--num-draft-tokens",
        type=drafts,
        metavar="K",
        help=f"verify up to K drafts per step, 0 to {MAX_DRAFT_TOKENS}; the answers are the same "
        f"(default: {DEFAULT_NUM_DRAFT_TOKENS} with a draft model, else 0)",
    )
    add(
        "--backend",
        choices=("auto", "reference", "metal"),
        default=DEFAULT_BACKEND,
        help="operations on the paged cache (default: %(default)s)",
    )


def error_line(error: BaseException) -> str:
    """What an error says, on one line, with the flag in place of the argument it is about."""
    text = one_line(error, _MAX_ERROR)
    argument = getattr(error, "argument", None)
    return text.replace(argument, _FLAGS[argument]) if argument in _FLAGS else text


# Types of values: each returns the value of a text, or says what it must be.


def whole(text: str) -> int:
    return _number(text, int, 0, 2**63, "a whole number, at least 0")


def positive(text: str) -> int:
    return _number(text, int, 1, 2**63, "a whole number, at least 1")


def drafts(text: str) -> int:
    return _number(text, int, 0, MAX_DRAFT_TOKENS, f"a whole number within 0..{MAX_DRAFT_TOKENS}")


def max_tokens(text: str) -> int:
    what = "a whole number, at least 1, or -1"
    return -1 if text.strip() == "-1" else _number(text, int, 1, 2**63, what)


def at_least_0(text: str) -> float:
    return _number(text, float, 0, sys.float_info.max, "a number, at least 0")


def probability(text: str) -> float:
    return _number(text, float, 0, 1, "within 0..1")


def up_to_a_half(text: str) -> float:
    return _number(text, float, 0, 0.5, "within 0..0.5")


def budget(text: str) -> str:
    try:
        KVBudget.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {BUDGET_NOTATION}, got {shown(text)}") from error
    return text


def kv_bits(text: str) -> str:
    try:
        KVBits.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be {KV_BITS_NOTATION}, got {shown(text)}"
        ) from error
    return text


def _number(text: str, kind: Callable[[str], Number], low: float, high: float, what: str) -> Number:
    with contextlib.suppress(ValueError):
        value = kind(text)
        if low <= value <= high:
            return value
    raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")


class _Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one line and exits with status 2."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        for word in words[: words.index("--")] if "--" in words else words:
            # Python 3.11 takes such a value for the end of the options, and makes an empty list of
            # it.
            flag = _DASHES_AS_VALUE.fullmatch(word)
            if flag:
                self.error(f"argument {flag[1] or flag[2]}: the value can't be '--'")
        return super().parse_known_args(words, namespace)

    def print_help(self, file: Any = None) -> None:
        # argparse would swallow the error of an output that is full.
        if file is None:
            write(self.format_help())
        else:
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        # The values in the message are the user's, and may hold line ends.
        self.exit(2, f"{self.prog}: error: {one_line(message, _MAX_ERROR)} (see --help)\n")


class _VersionAction(argparse.Action):
    """Writes ``const`` and leaves. argparse's own would swallow the error of an output that is
    full.
    """

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        write(f"{self.const}\n")
        parser.exit()


def _name_as_called() -> str:
    """The command that the user typed, as far as it can be known."""
    name = Path(sys.argv[0]).name
    return name if name == "mlx_paged.chat" else "python -m mlx_paged.chat"
