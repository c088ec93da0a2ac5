"""The flags of the chat, which follow ``mlx_lm.chat``, and errors that name them. No MLX here."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mlx_paged.command_line import flags, parser
from mlx_paged.config import DEFAULT_MAX_NUM_BATCHED_TOKENS
from mlx_paged.domains import AT_LEAST_0, AT_LEAST_1

# Arguments of the library that flags are handed on as. Errors say kv='basic', as in the library.
_FLAGS = {
    **flags.FLAGS,
    **{name: flag for name, flag in flags.engine_flags("chat").items() if name != "kv"},
    "max_num_batched_tokens": "--prefill-step-size",
}


def setup_arg_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The argument parser of the chat, for a program of this name."""
    chat = parser.Parser(
        prog=prog or _name_as_called(),
        description="Chat with a model whose K/V live in a paged (or a contiguous) cache.",
        flags=flags.SAMPLING | _FLAGS,
    )
    chat.add_argument(
        "message",
        nargs="?",
        help="answer this once and leave; - reads one message, of any number of lines, from stdin",
    )
    flags.add_model_flags(chat)
    flags.add_sampling_flags(chat, "chat")
    flags.add_generation_config_flag(chat)
    chat.add_argument(
        "--seed", type=AT_LEAST_0.read_flag, default=0, help="seed of the sampling (default: 0)"
    )
    chat.add_argument("--system-prompt", help="system prompt of the conversation")
    chat.add_argument(
        "--prompt-cache-file",
        metavar="FILE",
        help="K/V that stand before the conversation: a file of mlx_lm.cache_prompt, or a snapshot",
    )
    flags.add_no_thinking_flag(chat)
    chat.add_argument(
        "--hide-thinking", action="store_true", help="do not show the model's reasoning (<think>)"
    )
    chat.add_argument(
        "--prefill-step-size",
        type=AT_LEAST_1.read_flag,
        help="prompt tokens computed at a time (default: as many as take --prefill-step-seconds, "
        f"up to {DEFAULT_MAX_NUM_BATCHED_TOKENS})",
    )
    flags.add_engine_flags(chat, "chat")
    chat.add_argument(
        "--verbose",
        action="store_true",
        help="say all figures of the model, the cache and each answer",
    )
    chat.add_version()
    return chat


def error_line(error: BaseException) -> str:
    """What an error says, on one line, with the flag in place of the argument it is about."""
    return parser.error_line(error, _FLAGS)


def _name_as_called() -> str:
    """The command that the user typed, as far as it can be known."""
    name = Path(sys.argv[0]).name
    return name if name == "mlx_paged.chat" else "python -m mlx_paged.chat"
