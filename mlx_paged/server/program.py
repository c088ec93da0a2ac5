"""The server program, from flags, named as in ``mlx_lm.server`` and ``vllm serve``, to an exit
status.

Nothing heavy is imported before the arguments have been checked.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import resource
import socket
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_paged.answers.template_traits import KEEPS_REASONING
from mlx_paged.cli import flags
from mlx_paged.cli.program import Parser, import_first, is_follower, run_program
from mlx_paged.cli.streams import say, warnings_as_lines
from mlx_paged.errors import STUCK_STATUS, ArgumentError, one_line, shown, system_reason
from mlx_paged.server.settings import (
    SERVER_SETTINGS,
    KeyFile,
    ServerSettings,
    in_words,
    read_api_keys,
    seems_named_by_equals,
)

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from mlx_paged.server.app import App
    from mlx_paged.server.service import Service

logger = logging.getLogger("mlx_paged.server")

DEMO_NAME = "demo"
ANY_NAME = "*"  # among --served-model-name: accept any model name
_EXTRA = (
    *("starlette", "uvicorn", "h11", "httpcore", "pydantic"),
    *("llguidance", "prometheus_client"),
)
_MAX_FILES = 8192  # open files, a number that macOS lets a process request
_OTHER_FILES = 128
SWITCH_SECONDS = 0.0005
DEFAULT_MAX_ADAPTERS = 8  # with --adapters-dir
FLAGS = {
    **flags.FLAGS,
    **flags.engine_flags("server"),
    "api_key": "--api-key",
    "api_key_file": "--api-key-file",
    "chat_template": "--chat-template",
    "chat_template_args": "--chat-template-args",
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


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run the server and return its exit status: 0 after a shutdown by a signal, 1 if the engine
    failed, 2 for a mistake of the user, 70 if a step of the engine did not end at the shutdown, 130
    if Ctrl-C was pressed twice or before serving.

    Args:
        argv: the arguments without the program's name; by default those of this process.
        prog: the program's name in help and errors.
    """
    return run_program(setup_arg_parser(prog), argv, run, FLAGS)


@warnings_as_lines(say)
def run(args: argparse.Namespace) -> int:
    """Run the server with parsed flags; the exit status as of :func:`main`.

    Raises:
        ValueError, RuntimeError: the user's mistakes.
    """
    check_extra()
    if args.name is not None and args.model is not None:
        raise ArgumentError(
            f"[server] the model is given twice, as --model and as {shown(args.name)}", "model"
        )
    args.model = args.model if args.name is None else args.name
    settings = read_settings(args)
    if is_follower():
        follow(args)
        return 0
    import_first("mlx_paged.loading", "mlx_paged.server.app")
    from mlx_paged.server.app import App
    from mlx_paged.server.http.http_server import bind, close_all, is_loopback
    from mlx_paged.server.http.logs import setup_logging

    # A thread that reads a long request keeps the GIL for up to this long while the event loop and
    # the engine wait, several times per step. Python's default is 5 ms.
    sys.setswitchinterval(SWITCH_SECONDS)
    sockets = bind(settings.host, settings.port)
    try:
        check_keys(settings, is_loopback(sockets))
        setup_logging(settings.log_level, settings.log_prompts)
        say(f"[loading {args.model or 'the bundled demo model'} ...]")
        key_file = None
        if args.api_key_file is not None:
            key_file = KeyFile(args.api_key, args.api_key_file, settings.api_keys)
        service = make_service(args, settings)
        announce = partial(_announce, args, service, sockets)
        with service.engine, warnings_as_lines(partial(logger.warning, "%s")):
            app = App(service, is_loopback(sockets), key_file, max_connections())
            return serve(app, sockets, announce, key_file)
    finally:
        close_all(sockets)


def check_extra() -> None:
    """Raise ``ValueError`` unless what the server needs is installed."""
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"the server needs {', '.join(missing)}; install it with pip install "
            "'mlx-paged[server]'"
        )


def check_keys(settings: ServerSettings, is_loopback: bool) -> None:
    """Print a note if unnamed keys look as if they were meant as ``NAME=KEY``.

    Raises:
        ValueError: there are keys that the flags say are not needed, or none although other
            machines can reach the server.
    """
    keys, is_open = settings.api_keys, settings.allow_unauthenticated
    if keys and is_open:
        raise ValueError(
            "--allow-unauthenticated is for a server without keys; give either it or keys"
        )
    if not (keys or is_open or is_loopback):
        raise ValueError(
            f"other machines can reach {settings.host or 'every address'}, and there is no key; "
            "give --api-key-file or --api-key, or --allow-unauthenticated to let all clients in"
        )
    num_keys = sum(map(seems_named_by_equals, keys))
    if num_keys:
        say(
            f"[{num_keys} of the keys {'contains' if num_keys == 1 else 'contain'} a =, which is "
            "part of the key; a name is separated from its key by a space: NAME KEY]"
        )


def read_settings(args: argparse.Namespace, models: Collection[str] = ()) -> ServerSettings:
    """The settings given by the flags.

    Args:
        models: the names of the models that keys can be bound to.

    Raises:
        ArgumentError: an API key is invalid, or the key file can't be used.
    """
    given = {name: getattr(args, name) for name in SERVER_SETTINGS}
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    keys = read_api_keys(args.api_key, args.api_key_file, models)
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


def json_object(text: str) -> dict[str, Any]:
    what = f"must be a JSON object, got {shown(text)}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{what}: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(what)
    return value


def follow(args: argparse.Namespace) -> None:
    """Take part in the steps of rank 0, which runs the server, until it ends.

    Raises:
        ValueError, RuntimeError: the model can't be loaded, or an option is invalid.
    """
    from mlx_paged.engine.engine import Engine

    warnings.simplefilter("ignore")  # rank 0 shows them
    model, tokenizer, options, _ = _load(args)
    Engine(model, tokenizer, **options).follow()


def _load(
    args: argparse.Namespace,
) -> tuple[Module, TokenizerWrapper, dict[str, Any], dict[str, Any]]:
    """:func:`flags.load_model` with ``--chat-template``."""
    return flags.load_model(args, "server", tokenizer_config(args))


def tokenizer_config(args: argparse.Namespace) -> dict[str, Any] | None:
    """What replaces fields of the tokenizer's configuration.

    Raises:
        ArgumentError: the file ``--chat-template``, which replaces the model's own template, can't
            be read.
    """
    if args.chat_template is None:
        return None
    try:
        template = Path(args.chat_template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"[server] chat_template {shown(args.chat_template)} can't be read: "
            f"{system_reason(error)}",
            "chat_template",
        ) from error
    return {"chat_template": template}


def make_service(args: argparse.Namespace, settings: ServerSettings) -> Service:
    """Load the model and start its engine, as given by the flags.

    Raises:
        ValueError, RuntimeError: the model can't be loaded, or an option is invalid.
    """
    from mlx_paged import SamplingParams, StructuredOutputsParams
    from mlx_paged.engine.async_engine import AsyncEngine
    from mlx_paged.engine.stats import SequenceCounts
    from mlx_paged.server.http.limits import QueueLimit
    from mlx_paged.server.service import Service

    options = template_options(args)
    model, tokenizer, engine_options, sampling = _load(args)
    names = args.served_model_name or ()
    names = tuple(name for name in names if name != ANY_NAME) or (name_of(args.model),)
    _prepare_adapters(engine_options, settings, names)
    engine = AsyncEngine(model, tokenizer, **engine_options)

    # Read the vocabulary for grammars now: later, its seconds would delay all requests. A tokenizer
    # that supports no grammars fails only the requests that need one.
    grammar = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    with suppress(ArgumentError):
        engine.engine.prepare(grammar)
    template = str(tokenizer.chat_template)
    if settings.keep_reasoning and not any(name in template for name in KEEPS_REASONING):
        unknown = ", ".join(KEEPS_REASONING)
        say(f"[--keep-reasoning has no effect: the chat template uses none of {unknown}]")
    return Service(
        engine,
        tokenizer,
        model_names=names,
        takes_any_name=ANY_NAME in (args.served_model_name or ()),
        defaults=sampling,
        max_tokens=None if args.max_tokens == -1 else args.max_tokens,
        template_options=options,
        created=int(time.time()),
        # max_num_seqs may be lower than requested if the model's recurrent states are large.
        admit=QueueLimit(
            settings.max_queue_len,
            engine.engine.scheduler.config.max_num_seqs,
            partial(SequenceCounts.of, engine.engine.scheduler),
        ).admit,
        settings=settings,
    )


def _prepare_adapters(
    options: dict[str, Any], settings: ServerSettings, model_names: Collection[str]
) -> None:
    """Check the adapters of the flags, and make room for those that are loaded later.

    Raises:
        ArgumentError: an adapter has a name of the model, or there is no folder ``--adapters-dir``.
    """
    names, folder = [name for name, _ in options["adapters"]], settings.adapters_dir
    for name in set(names).intersection(model_names):
        what = f"[server] adapters: {shown(name)} is the name of the model; choose another one"
        raise ArgumentError(what, "adapters")
    if folder is not None and not Path(folder).is_dir():
        raise ArgumentError(f"[server] adapters_dir: no folder {shown(folder)}", "adapters_dir")
    options["max_adapters"] = max_adapters_of({**options, "adapters_dir": folder})


def max_adapters_of(flags: Mapping[str, Any]) -> int:
    """The most adapters that a server with these flags has at once."""
    given: int | None = flags.get("max_adapters")
    least = 0 if flags.get("adapters_dir") is None else DEFAULT_MAX_ADAPTERS
    return max(len(flags.get("adapters", ())), least) if given is None else given


def name_of(model: str | None) -> str:
    """A model's name for clients: the hub id, or the last part of the folder's path."""
    if model is None:
        return DEMO_NAME
    return Path(model).resolve().name if Path(model).exists() else model


def serve(
    app: App,
    sockets: list[socket.socket],
    announce: Callable[[], None] = lambda: None,
    key_file: KeyFile | None = None,
) -> int:
    """Serve until a signal arrives or the engine fails; returns the exit status.

    Args:
        sockets: listening sockets.
        announce: called once requests are served.
        key_file: reread when it changes.
    """
    from mlx_paged.server.http.http_server import HttpServer

    # Excludes all objects so far from garbage collections, which then take milliseconds instead of
    # tenths of a second.
    gc.collect()
    gc.freeze()
    service = app.service
    server = HttpServer(app, app.gate, service.engine, service.settings, announce, key_file)
    server.run(sockets)
    if server.has_failed:
        stopped = service.engine.stopped()
        cause = stopped and stopped.__cause__
        logger.error("the engine failed: %s", one_line(stopped), exc_info=cause)
        return 1
    if server.has_abandoned:
        logger.error("a step of the engine did not end; it is abandoned")
        return STUCK_STATUS
    logger.info("ended")
    return 0


def max_connections() -> int:
    """Raise the limit on open files (256 by default on macOS) and derive one on connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = _MAX_FILES if soft == resource.RLIM_INFINITY else min(soft, _MAX_FILES)
    return max(num_files - _OTHER_FILES, 16)


def _announce(args: argparse.Namespace, service: Service, sockets: list[socket.socket]) -> None:
    """Print what is served, how and where."""
    from mlx_paged.engine.descriptions import describe_engine
    from mlx_paged.server.http.http_server import url_of

    engine, settings = service.engine.engine, service.settings
    url = url_of(settings.host, sockets)
    parts = [
        *describe_engine(args.model, engine),
        in_words(settings.api_keys) if settings.api_keys else "no key needed",
    ]
    say(f"[{' | '.join(parts)}]")
    say(f"[listening on {url}; Ctrl-C to end]")
    authorization = " -H 'Authorization: Bearer KEY'" if settings.api_keys else ""
    say(
        f"[try: curl {url}/v1/chat/completions{authorization} "
        "-H 'Content-Type: application/json' "
        """-d '{"messages": [{"role": "user", "content": "Hello"}]}']"""
    )
