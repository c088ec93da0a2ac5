"""The flags of the server, which follow ``mlx_lm.server`` and ``vllm serve``. Imports no MLX."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mlx_paged.command_line import flags, parser
from mlx_paged.errors import ArgumentError, one_line, shown, system_reason
from mlx_paged.server.http.api_keys import read_api_keys
from mlx_paged.server.settings import SERVER_SETTINGS, ServerSettings

# Options of the engine that flags are passed on as: EngineOptions, all of them.
ENGINE_FLAGS = flags.engine_flags("server")
_FLAGS = {
    **flags.FLAGS,
    **ENGINE_FLAGS,
    "api_key": "--api-key",
    "api_key_file": "--api-key-file",
    "chat_template": "--chat-template",
    "chat_template_args": "--chat-template-args",
}
# The variables by which chat templates write the reasoning of earlier answers: Qwen 3.6's and Kimi
# K2.6's, that of GLM from 4.7 on, and Nemotron 3's.
KEEPS_REASONING = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
}
_OTHER_FLAGS = {
    "allowed_origins": "--cors-origin",
    "model_alias": "--served-model-name",
    "default_chat_template_kwargs": "--chat-template-args",
}


def setup_arg_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The argument parser of the server, for a program of this name."""
    server = parser.Parser(
        prog=prog or "python -m mlx_paged.server",
        description="Serve a model to clients of the APIs of OpenAI and Anthropic.",
        flags=flags.SAMPLING | _FLAGS | _OTHER_FLAGS,
        usage="%(prog)s [options]",
    )
    own = flags.add_flags(server, "server", SERVER_SETTINGS)
    own.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names that clients may call the model; '*' is any (default: that of --model)",
    )
    _add_key_flags(own)
    _add_template_flags(own)
    server.add_version()
    return server


def _add_key_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--api-key",
        action="append",
        default=[],
        metavar="[NAME ]KEY",
        help="a key that clients may show, with a name for the log and a blank in front of it if "
        "you like; other processes can see it, so prefer a file; may be given several times",
    )
    add(
        "--api-key-file",
        metavar="FILE",
        help="keys, KEY or NAME KEY on each line, in a file that only its owner can read",
    )


def _add_template_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--chat-template", metavar="FILE", help="a chat template in the place of the model's")
    add(
        "--chat-template-args",
        type=json_object,
        default={},
        metavar="JSON",
        help="variables of the chat template, where a request does not say",
    )


def read_settings(args: argparse.Namespace) -> ServerSettings:
    """The settings that the flags say.

    Raises:
        ArgumentError: keys that are wrong, or a file of them.
    """
    given = {name: getattr(args, name) for name in SERVER_SETTINGS}
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    keys = read_api_keys(args.api_key, args.api_key_file)
    return ServerSettings(**{**given, **lists, "api_keys": keys})


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of the engine that the flags say, all of ``EngineOptions``."""
    return flags.engine_options(args, "server")


def template_options(args: argparse.Namespace) -> dict[str, Any]:
    """The variables of the chat template that the flags say.

    Raises:
        ArgumentError: two flags say different things.
    """
    options = {**(KEEPS_REASONING if args.keep_reasoning else {}), **args.chat_template_args}
    if args.no_thinking and options.setdefault("enable_thinking", False) is not False:
        raise ArgumentError(
            "[server] chat_template_args says enable_thinking "
            f"{shown(options['enable_thinking'])} and --no-thinking says false; leave one out",
            "chat_template_args",
        )
    return options


def read_chat_template(file: str | None) -> str | None:
    """The text of ``--chat-template``; ``None`` is the model's own.

    Raises:
        ArgumentError: the file can't be read.
    """
    if file is None:
        return None
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"[server] chat_template {shown(file)} can't be read: {system_reason(error)}",
            "chat_template",
        ) from error


def error_line(error: BaseException) -> str:
    """What an error says, on one line, with the flag in place of the argument it is about."""
    return parser.error_line(error, _FLAGS)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(
            f"must be a JSON object, got {shown(text)}: {one_line(error)}"
        ) from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {shown(text)}")
    return value
