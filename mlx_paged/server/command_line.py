"""The flags of the server, which follow ``mlx_lm.server`` and ``vllm serve``. Imports no MLX."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mlx_paged import flag_values as values
from mlx_paged.command_line import flags, parser
from mlx_paged.errors import ArgumentError, shown, system_reason
from mlx_paged.server.http.api_keys import read_api_keys
from mlx_paged.server.settings import (
    DEFAULT_DRAIN_SECONDS,
    DEFAULT_HOST,
    DEFAULT_MAX_BODY_BYTES,
    DEFAULT_MAX_QUEUE_LEN,
    DEFAULT_PORT,
    DEFAULT_STEP_TIMEOUT,
    ServerSettings,
)

# Options of the engine that flags are handed on as: LoadedEngineOptions, all of them.
ENGINE_FLAGS = flags.engine_flags("server")
_FLAGS = {
    **flags.FLAGS,
    **ENGINE_FLAGS,
    "api_key": "--api-key",
    "api_key_file": "--api-key-file",
    "chat_template": "--chat-template",
    "chat_template_args": "--chat-template-args",
}
_OTHER_FLAGS = {
    "allowed_origins": "--cors-origin",
    "batch_size": "--max-num-seqs",
    "decode_concurrency": "--max-num-seqs",
    "max_kv_size": "--window",
    "model_alias": "--served-model-name",
    "parallel": "--max-num-seqs",
    "ctx_size": "--max-model-len",
    "default_chat_template_kwargs": "--chat-template-args",
}
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}|\[[0-9a-fA-F:.]+\]")


def setup_arg_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The argument parser of the server, for a program of this name."""
    server = parser.Parser(
        prog=prog or "python -m mlx_paged.server",
        description="Serve a model to clients of the APIs of OpenAI and Anthropic.",
        flags=flags.SAMPLING | _FLAGS | _OTHER_FLAGS,
    )
    flags.add_model_flags(server)
    server.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names that clients may call the model (default: that of --model)",
    )
    _add_address_flags(server)
    _add_access_flags(server)
    _add_limit_flags(server)
    _add_log_flags(server)
    flags.add_sampling_flags(server, "server")
    flags.add_generation_config_flag(server)
    _add_template_flags(server)
    flags.add_engine_flags(server, "server")
    server.add_version()
    return server


def _add_address_flags(server: argparse.ArgumentParser) -> None:
    add = server.add_argument
    add("--host", default=DEFAULT_HOST, help="address to listen on (default: %(default)s)")
    add(
        "--port",
        type=values.port,
        default=DEFAULT_PORT,
        help="port to listen on, 0 for a free one (default: %(default)s)",
    )


def _add_access_flags(server: argparse.ArgumentParser) -> None:
    add = server.add_argument
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
    add(
        "--allow-unauthenticated",
        action="store_true",
        help="listen without a key on an address that others can reach",
    )
    add(
        "--allowed-host",
        action="append",
        type=host_name,
        default=[],
        metavar="NAME",
        help="a name that requests may have in their Host header, beside addresses and localhost; "
        "may be given several times",
    )
    add(
        "--cors-origin",
        action="append",
        type=origin,
        default=[],
        metavar="ORIGIN",
        help="web origin whose pages may use the server, such as http://localhost:3000, or * for "
        "all; may be given several times",
    )
    add(
        "--share-cache",
        action="store_true",
        help="let users with different keys share cached K/V",
    )
    add(
        "--allow-cache-texts",
        action="store_true",
        help="let /v1/cache?text=true show pieces of prompts, to the users whose they are",
    )


def _add_limit_flags(server: argparse.ArgumentParser) -> None:
    add = server.add_argument
    add(
        "--max-queue-len",
        type=values.whole,
        default=DEFAULT_MAX_QUEUE_LEN,
        metavar="N",
        help="sequences that may wait; more are told to come back (default: %(default)s)",
    )
    add(
        "--max-body-bytes",
        type=values.num_bytes,
        default=DEFAULT_MAX_BODY_BYTES,
        metavar="N",
        help="largest body of a request: bytes (65536, 512K, 16M) (default: 16M)",
    )
    add(
        "--drain-seconds",
        type=values.at_least_0,
        default=DEFAULT_DRAIN_SECONDS,
        metavar="S",
        help="how long running answers may go on after SIGTERM (default: %(default)g)",
    )
    add(
        "--step-timeout",
        type=values.at_least_0,
        default=DEFAULT_STEP_TIMEOUT,
        metavar="S",
        help="seconds after which a step of the engine counts as hanging and /health answers 503; "
        "0 never (default: %(default)g)",
    )


def _add_log_flags(server: argparse.ArgumentParser) -> None:
    add = server.add_argument
    add(
        "--log-level",
        type=str.lower,
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="what is logged, on stderr (default: %(default)s)",
    )
    add("--log-prompts", action="store_true", help="let the log hold texts of prompts")
    add(
        "--log-cache",
        action="store_true",
        help="log for each prompt where it left what was cached, and why",
    )


def _add_template_flags(server: argparse.ArgumentParser) -> None:
    add = server.add_argument
    add("--chat-template", metavar="FILE", help="a chat template in the place of the model's")
    add(
        "--chat-template-args",
        type=values.json_object,
        default={},
        metavar="JSON",
        help="variables of the chat template, where a request does not say",
    )
    flags.add_no_thinking_flag(server)


def read_settings(args: argparse.Namespace) -> ServerSettings:
    """The settings that the flags say.

    Raises:
        ArgumentError: keys that are wrong, or a file of them.
    """
    return ServerSettings(
        host=args.host,
        port=args.port,
        api_keys=read_api_keys(args.api_key, args.api_key_file),
        allow_unauthenticated=args.allow_unauthenticated,
        allowed_hosts=tuple(args.allowed_host),
        cors_origins=tuple(args.cors_origin),
        share_cache=args.share_cache,
        allow_cache_texts=args.allow_cache_texts,
        max_queue_len=args.max_queue_len,
        max_body_bytes=args.max_body_bytes,
        drain_seconds=args.drain_seconds,
        step_timeout=args.step_timeout or math.inf,
        log_prompts=args.log_prompts,
        log_cache=args.log_cache,
        log_level=args.log_level,
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of the engine that the flags say, all of ``LoadedEngineOptions``."""
    return flags.engine_options(args, "server")


def template_options(args: argparse.Namespace) -> dict[str, Any]:
    """The variables of the chat template that the flags say.

    Raises:
        ArgumentError: two flags say different things.
    """
    options = dict(args.chat_template_args)
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


def host_name(text: str) -> str:
    """A name or an address as a ``Host`` header has it, without a port."""
    if not _HOST_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"must be a name or an address without a port, got {shown(text)}"
        )
    return text.lower()


def origin(text: str) -> str:
    """``*``, or a scheme and a host, with a port where it is not the scheme's own."""
    try:
        parts = urlsplit(text)
        is_right = bool(parts.scheme and parts.netloc) and text.isprintable()
        is_right = is_right and text == f"{parts.scheme}://{parts.netloc}" and "@" not in text
    except ValueError:
        is_right = False
    if text != "*" and not is_right:
        raise argparse.ArgumentTypeError(
            f"must be * or an origin without a path, such as http://localhost:3000, got "
            f"{shown(text)}"
        )
    return text.lower()
