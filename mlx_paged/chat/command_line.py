"""The flags of the chat, which follow ``mlx_lm.chat``, and errors that name them. No MLX here."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from mlx_paged.command_line import flags, parser
from mlx_paged.config import DEFAULT_MAX_NUM_BATCHED_TOKENS
from mlx_paged.declarations import Option
from mlx_paged.domains import AT_LEAST_0, AT_LEAST_1, BOOL, such

_TEXT = such("a text", lambda value: isinstance(value, str))
OPTIONS = {
    "seed": Option("seed of the sampling", AT_LEAST_0, default=0),
    "system_prompt": Option("system prompt of the conversation", _TEXT),
    "prompt_cache_file": Option(
        "K/V that stand before the conversation: a file of mlx_lm.cache_prompt, or a snapshot",
        replace(_TEXT, metavar="FILE"),
    ),
    "hide_thinking": Option("do not show the model's reasoning (<think>)", BOOL, default=False),
    "prefill_step_size": Option(
        "prompt tokens computed at a time",
        AT_LEAST_1,
        says=f"as many as take --prefill-step-seconds, up to {DEFAULT_MAX_NUM_BATCHED_TOKENS}",
    ),
    "verbose": Option(
        "say all figures of the model, the cache and each answer", BOOL, default=False
    ),
}
# Arguments of the library that flags are passed on as. Errors say kv='basic', as in the library.
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
    flags.add_flags(chat, "chat", OPTIONS)
    chat.add_version()
    return chat


def error_line(error: BaseException) -> str:
    """What an error says, on one line, with the flag in place of the argument it is about."""
    return parser.error_line(error, _FLAGS)


def _name_as_called() -> str:
    """The command that the user typed, as far as it can be known."""
    name = Path(sys.argv[0]).name
    return name if name == "mlx_paged.chat" else "python -m mlx_paged.chat"
