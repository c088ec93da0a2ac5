"""The server as a program: from flags to an exit status.

Nothing heavy is imported until the arguments are known to be right.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import resource
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_paged.command_line.imports import import_first
from mlx_paged.errors import ArgumentError, one_line
from mlx_paged.launch import is_follower, say_errors_only
from mlx_paged.server.command_line import (
    KEEPS_REASONING,
    engine_options,
    error_line,
    read_chat_template,
    read_settings,
    setup_arg_parser,
    template_options,
)
from mlx_paged.server.settings import ServerSettings
from mlx_paged.standard_streams import (
    OutputLostError,
    finish_output,
    open_closed_streams,
    say,
    warnings_as_lines,
)

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from mlx_paged.engine.async_engine import AsyncEngine
    from mlx_paged.server.http.api_keys import KeyFile
    from mlx_paged.server.service import Service

logger = logging.getLogger("mlx_paged.server")

DEMO_NAME = "demo"
ANY_NAME = "*"  # of a model
_EXTRA = ("starlette", "uvicorn", "h11", "pydantic", "llguidance", "prometheus_client")
_MAX_FILES = 8192  # that are open, which macOS lets a process ask for
_OTHER_FILES = 128
SWITCH_SECONDS = 0.0005


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run the server and return its exit status.

    That is 0 when a signal ended it and its answers were through, 1 when the engine failed, 2 for
    the user's mistakes, or 130 when Ctrl-C ended it at once.

    Args:
        argv: the arguments, without the program's name; those of this process by default.
        prog: the program's name in help and errors.
    """
    open_closed_streams()
    parser = setup_arg_parser(prog)
    try:
        try:
            args = parser.parse_args(argv)
        except SystemExit as end:  # --help and --version, too
            return finish_output(end.code if isinstance(end.code, int) else 2, parser.prog)
        with warnings_as_lines(say):
            return _run(args)
    except OutputLostError as error:
        say(f"{parser.prog}: error: {error}")
        return 1
    except (ValueError, RuntimeError) as error:  # the user's mistake
        say(f"{parser.prog}: error: {error_line(error)}")
        return 2
    except KeyboardInterrupt:
        say("")
        return 130


def _run(args: argparse.Namespace) -> int:
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"the server needs {', '.join(missing)}; install it with pip install "
            "'mlx-paged[server]'"
        )
    settings = read_settings(args)
    if is_follower():
        follow(args)
        return 0
    import_first("mlx_paged.loading", "mlx_paged.server.app")
    from mlx_paged.server.http.api_keys import KeyFile
    from mlx_paged.server.http.http_server import bind, close_all
    from mlx_paged.server.http.logs import setup_logging

    # A thread that reads a long request holds the interpreter for this long while the loop and the
    # engine wait for it, several times in a step. Python's default is 5 ms.
    sys.setswitchinterval(SWITCH_SECONDS)
    sockets = bind(settings.host, settings.port)
    try:
        _check_access(settings, sockets)
        _note_equals(settings)
        setup_logging(settings.log_level, settings.log_prompts)
        say(f"[loading {args.model or 'the bundled demo model'} ...]")
        key_file = None
        if args.api_key_file is not None:
            key_file = KeyFile(args.api_key, args.api_key_file, settings.api_keys)
        service = make_service(args, settings)
        announce = partial(_announce, args, settings, service, sockets)
        with service.engine, warnings_as_lines(partial(logger.warning, "%s")):
            return serve(service, settings, sockets, announce, key_file)
    finally:
        close_all(sockets)


def _check_access(settings: ServerSettings, sockets: list[socket.socket]) -> None:
    from mlx_paged.server.http.http_server import is_loopback

    if settings.api_keys and settings.allow_unauthenticated:
        raise ValueError(
            "--allow-unauthenticated is for a server without keys; leave it or the keys out"
        )
    if settings.api_keys or settings.allow_unauthenticated or is_loopback(sockets):
        return
    raise ValueError(
        f"others can reach {settings.host or 'every address'}, and there is no key; give "
        "--api-key-file or --api-key, or --allow-unauthenticated to let all clients in"
    )


def _note_equals(settings: ServerSettings) -> None:
    """Say so where a key without a name may have been meant to have one."""
    from mlx_paged.server.http.api_keys import seems_named_by_equals

    num_keys = sum(map(seems_named_by_equals, settings.api_keys))
    if num_keys:
        say(
            f"[{num_keys} of the keys {'has' if num_keys == 1 else 'have'} a = inside, which is "
            "part of the key; a name stands in front of a blank: NAME KEY]"
        )


def follow(args: argparse.Namespace) -> None:
    """Take part in the steps of rank 0, which serves, until that ends.

    Raises:
        ValueError, RuntimeError: the model can't be loaded, or an option is wrong.
    """
    from mlx_paged.engine.engine import Engine

    say_errors_only()
    model, tokenizer, options = _load(args, _folder_of(args))
    Engine(model, tokenizer, **options).follow()


def _folder_of(args: argparse.Namespace) -> Path:
    from mlx_paged.loading import demo_model_path, find_model_for

    return demo_model_path() if args.model is None else find_model_for(args.model, args.force)


def _load(
    args: argparse.Namespace, folder: Path
) -> tuple[Module, TokenizerWrapper, dict[str, Any]]:
    """The model in a folder and its tokenizer, and the options of their engine as the flags say."""
    from mlx_paged.distributed import launched_ranks
    from mlx_paged.loading import dtype_config, load_draft_model, load_for

    template, options = read_chat_template(args.chat_template), engine_options(args)
    model, tokenizer = load_for(
        launched_ranks(),
        folder,
        tokenizer_config=None if template is None else {"chat_template": template},
        model_config=dtype_config(folder, args.dtype),
        adapter_path=args.adapter_path,
        tokenizer_path=args.tokenizer,
        engine_options=options,
        refuses_too_large=not args.force,
    )
    draft_model = load_draft_model(args.draft_model, tokenizer)
    return model, tokenizer, {**options, "draft_model": draft_model}


def make_service(args: argparse.Namespace, settings: ServerSettings) -> Service:
    """Load what the flags name, and start its engine.

    Raises:
        ValueError, RuntimeError: it can't be loaded, or an option is wrong.
    """
    from mlx_paged.command_line.flags import chosen_sampling
    from mlx_paged.engine.async_engine import AsyncEngine
    from mlx_paged.loading import read_sampling_defaults
    from mlx_paged.request import PENDING_TOKEN
    from mlx_paged.server.admission import Admission, Counts
    from mlx_paged.server.service import Service

    options, folder = template_options(args), _folder_of(args)
    own = {} if args.no_generation_config else read_sampling_defaults(folder)
    model, tokenizer, chosen = _load(args, folder)
    engine = AsyncEngine(model, tokenizer, **chosen)

    def counts() -> Counts:
        scheduler = engine.engine.scheduler
        running, waiting = (list(each) for each in (scheduler.running, scheduler.waiting))
        num_new = sum(
            # The token of a step that is computed now is none yet.
            request.num_output_tokens == (request.token_ids[-1] == PENDING_TOKEN)
            for request in (*running, *waiting)
        )
        return Counts(len(running), len(waiting), num_new)

    _prepare_grammars(engine)
    template = str(tokenizer.chat_template)
    if settings.keep_reasoning and not any(name in template for name in KEEPS_REASONING):
        unknown = ", ".join(KEEPS_REASONING)
        say(f"[--keep-reasoning has no effect: the chat template knows none of {unknown}]")
    names = args.served_model_name or ()
    return Service(
        engine,
        tokenizer,
        model_names=tuple(name for name in names if name != ANY_NAME) or (_model_name(args.model),),
        takes_any_name=ANY_NAME in names,
        defaults=chosen_sampling(args, own),
        max_tokens=None if args.max_tokens == -1 else args.max_tokens,
        template_options=options,
        created=int(time.time()),
        # Fewer than were asked for, where a model's states would take too much of the budget.
        admit=Admission(
            settings.max_queue_len, engine.engine.scheduler.config.max_num_seqs, counts
        ).admit,
        settings=settings,
    )


def _prepare_grammars(engine: AsyncEngine) -> None:
    """Read the vocabulary for grammars now: it takes seconds, in which nothing else would run."""
    from mlx_paged import SamplingParams, StructuredOutputsParams

    params = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    # Requests that want a grammar of a tokenizer without one are refused; others are not.
    with suppress(ArgumentError):
        engine.engine.prepare(params)


def _model_name(model: str | None) -> str:
    """What clients call the model: a hub id as it is, and the last part of a folder's path."""
    if model is None:
        return DEMO_NAME
    return Path(model).resolve().name if Path(model).exists() else model


def serve(
    service: Service,
    settings: ServerSettings,
    sockets: list[socket.socket],
    announce: Callable[[], None] = lambda: None,
    key_file: KeyFile | None = None,
) -> int:
    """Serve until a signal comes or the engine fails; returns the exit status.

    Args:
        sockets: that listen.
        announce: called when requests are served.
        key_file: whose keys are read again.
    """
    from mlx_paged.server.app import build_app
    from mlx_paged.server.http.http_server import HttpServer, ended_by_signals, is_loopback
    from mlx_paged.server.http.tidying import keep_out_of_sight

    keep_out_of_sight()
    app = build_app(service, settings, is_loopback(sockets), key_file)
    server = HttpServer(
        app, app.gate, service.engine, settings, _max_connections(), announce, key_file
    )
    with ended_by_signals(server):
        server.run(sockets)
        if server.has_failed:
            stopped = service.engine.stopped()
            logger.error(
                "the engine failed: %s", one_line(stopped), exc_info=stopped and stopped.__cause__
            )
            return 1
        logger.info("ended")
        service.engine.shutdown()
    return 0


def _max_connections() -> int:
    """As many as files may be open, of which macOS allows 256 unless a program asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = _MAX_FILES if soft == resource.RLIM_INFINITY else min(soft, _MAX_FILES)
    return max(num_files - _OTHER_FILES, 16)


def _announce(
    args: argparse.Namespace,
    settings: ServerSettings,
    service: Service,
    sockets: list[socket.socket],
) -> None:
    """Say what is served, how, and where."""
    from mlx_paged.command_line.descriptions import (
        describe_backend,
        describe_budget,
        describe_context,
        describe_device,
        describe_disk_tier,
        describe_memory,
        describe_model,
    )
    from mlx_paged.server.http.api_keys import in_words
    from mlx_paged.server.http.http_server import url_of

    engine, url = service.engine.engine, url_of(settings.host, sockets)
    cache = engine.cache
    parts = [
        describe_model(args.model, engine),
        f"{describe_device()}, {describe_backend(cache)}",
        describe_budget(cache),
        describe_memory(engine),
        *describe_disk_tier(engine),
        f"context: {describe_context(engine)}",
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
