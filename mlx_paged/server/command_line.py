"""The server's flags, named as in ``mlx_lm.server`` and ``vllm serve``. Imports no MLX."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mlx_paged.cli import flags
from mlx_paged.cli.program import Parser
from mlx_paged.errors import ArgumentError, one_line, shown, system_reason
from mlx_paged.server.settings import SERVER_SETTINGS, ServerSettings, read_api_keys

FLAGS = {
    **flags.FLAGS,
    **flags.engine_flags("server"),
    "api_key": "--api-key",
    "api_key_file": "--api-key-file",
    "chat_template": "--chat-template",
    "chat_template_args": "--chat-template-args",
}
# Variables that make chat templates keep the reasoning of earlier answers: of Qwen 3.6 and Kimi
# K2.6, of GLM since 4.7, and of Nemotron 3.
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


def setup_arg_parser(prog: str | None = None) -> Parser:
    """The server's argument parser; ``prog`` is the program's name in help and errors."""
    server = Parser(
        prog=prog or "python -m mlx_paged.server",
        description="Serve a model through OpenAI- and Anthropic-compatible APIs.",
        flags=flags.SAMPLING | FLAGS | _OTHER_FLAGS,
        usage="%(prog)s [options] [model]",
    )
    server.add_argument(
        "name", nargs="?", metavar="model", help="the model, in the place of --model"
    )
    own = flags.add_flags(server, "server", SERVER_SETTINGS)
    own.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names that clients may call the model; '*' is any (default: that of --model)",
    )
    own.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="[NAME ]KEY",
        help="an API key, optionally preceded by a name for the log and a space; other processes "
        "can see it, so prefer a file; may be given several times",
    )
    own.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="a file with KEY or NAME KEY on each line, which only its owner may read",
    )
    own.add_argument(
        "--chat-template", metavar="FILE", help="a chat template to use instead of the model's"
    )
    own.add_argument(
        "--chat-template-args",
        type=json_object,
        default={},
        metavar="JSON",
        help="default variables of the chat template",
    )
    server.add_version()
    return server


def take_model(args: argparse.Namespace) -> None:
    """Set ``args.model`` to the model that is given without a flag.

    Raises:
        ArgumentError: it is given twice.
    """
    if args.name is not None and args.model is not None:
        raise ArgumentError(
            f"[server] the model is given twice, as --model and as {shown(args.name)}", "model"
        )
    args.model = args.model if args.name is None else args.name


def read_settings(args: argparse.Namespace) -> ServerSettings:
    """The settings given by the flags.

    Raises:
        ArgumentError: an API key is invalid, or the key file can't be used.
    """
    given = {name: getattr(args, name) for name in SERVER_SETTINGS}
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    keys = read_api_keys(args.api_key, args.api_key_file)
    return ServerSettings(**{**given, **lists, "api_keys": keys})


def template_options(args: argparse.Namespace) -> dict[str, Any]:
    """The chat template's variables given by the flags.

    Raises:
        ArgumentError: two flags contradict each other.
    """
    options = {**(KEEPS_REASONING if args.keep_reasoning else {}), **args.chat_template_args}
    if args.no_thinking and options.setdefault("enable_thinking", False) is not False:
        raise ArgumentError(
            "[server] chat_template_args sets enable_thinking to "
            f"{shown(options['enable_thinking'])}, but --no-thinking sets it to false; give only "
            "one of them",
            "chat_template_args",
        )
    return options


def read_chat_template(file: str | None) -> str | None:
    """The contents of the file ``--chat-template``; ``None`` selects the model's own template.

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
