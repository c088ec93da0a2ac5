"""The process of one model, ``python -m mlx_paged.router.child FD NAME``: the server as for one
model, on a socket that the router has made. With ``--describe``, it only writes what lists say of
the model, without reading its weights.

Its settings come on stdin as a line of JSON, the parsed flags of the server. The router keeps the
other end of stdin open: its end is the end of the router, and then this process ends, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from functools import partial
from typing import Any

from mlx_paged.cli import flags
from mlx_paged.cli.program import Parser, import_first, run_program
from mlx_paged.cli.streams import say, warnings_as_lines
from mlx_paged.errors import shown
from mlx_paged.server import program

# After the router's end, for answers that no client reads to be aborted and queued blocks written.
SECONDS_TO_END = 30.0
# How often, in a row, K/V are asked to take less while a request of the server itself may run.
_TRIES, _SECONDS_BETWEEN_TRIES = 20, 0.1


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or the end of stdin; the exit status of the server."""
    parser = Parser(prog="mlx-paged serve", flags=program.FLAGS)
    parser.add_argument("fd", type=int)
    parser.add_argument("name")
    parser.add_argument("--describe", action="store_true")
    return run_program(parser, argv, _run, program.FLAGS)


@warnings_as_lines(say)
def _run(own: argparse.Namespace) -> int:
    args = argparse.Namespace(**json.loads(sys.stdin.readline()))
    if own.describe:
        print(json.dumps(_described(args)))
        return 0
    threading.Thread(target=_end_with_router, daemon=True).start()
    import_first("mlx_paged.loading", "mlx_paged.server.app")
    import mlx.core as mx
    from starlette.responses import JSONResponse, Response

    from mlx_paged.engine.descriptions import describe_engine
    from mlx_paged.server.app import App
    from mlx_paged.server.http.logs import logger, setup_logging
    from mlx_paged.server.ollama.models import describe
    from mlx_paged.server.routes import ApiRoute, RequestContext
    from mlx_paged.server.schemas import Body

    async def state(context: RequestContext[Body]) -> Response:
        """The context, and the bytes that this process holds."""
        return JSONResponse({"max_model_len": service.max_model_len, "nbytes": nbytes_held()})

    async def description(context: RequestContext[Body]) -> Response:
        """What lists say of the model."""
        return JSONResponse(await context.run_in_tokenizer_pool(lambda _: describe(service)))

    async def budget(context: RequestContext[Body]) -> Response:
        """Change what K/V may take: ``?nbytes=N``; the budget then."""
        nbytes = int(context.request.query_params["nbytes"])
        service = context.service
        found = nbytes + 1
        for _ in range(_TRIES):
            service.idle_prefill.pause()  # It is a request, too, and ends soon.
            found = await asyncio.to_thread(service.engine.set_budget, nbytes)
            if found <= nbytes:
                break
            await asyncio.sleep(_SECONDS_BETWEEN_TRIES)
        mx.clear_cache()
        return JSONResponse({"nbytes": found})

    sys.setswitchinterval(program.SWITCH_SECONDS)
    settings = program.read_settings(args)
    setup_logging(settings.log_level, settings.log_prompts)
    service = program.make_service(args, settings)
    routes = [
        ApiRoute("/router/state", state),
        ApiRoute("/router/description", description),
        ApiRoute("/router/budget", budget),
    ]
    with service.engine, warnings_as_lines(partial(logger.warning, "%s")):
        app = App(service, max_connections=program.max_connections(), for_router=routes)

        def announce() -> None:
            say(f"[{' | '.join(describe_engine(args.model, service.engine.engine))}]")

        return program.serve(app, [socket.socket(fileno=own.fd)], announce)


def _described(args: argparse.Namespace) -> dict[str, Any]:
    """What lists say of a model in a folder on this machine.

    Raises:
        ValueError: it is none, or can't run here.
    """
    from mlx_paged import loading
    from mlx_paged.loading.folder import find_local_model, find_tokenizer
    from mlx_paged.loading.outline import read_outline
    from mlx_paged.loading.tokenizer import read_tokenizer
    from mlx_paged.models.context_length import context_length
    from mlx_paged.server.ollama.models import description_of

    folder = find_local_model(args.model or "demo")
    if folder is None or folder.is_file():
        raise ValueError(f"the model {shown(args.model)} is not a folder on this machine")
    outline = read_outline(folder)
    model = outline.model
    model.name = outline.name
    where = folder if args.tokenizer is None else find_tokenizer(args.tokenizer)
    own = {} if args.no_generation_config else loading.read_sampling_defaults(folder)
    return description_of(
        model,
        read_tokenizer(where, program.tokenizer_config(args), None),
        flags.chosen_sampling(args, own),
        context_length=args.max_model_len or context_length(model.args),
        task=args.task,
    )


def nbytes_held() -> int:
    """The bytes that this process holds: on a Mac what MLX has allocated, in use or for reuse, and
    elsewhere all memory that is resident.
    """
    import mlx.core as mx

    if mx.metal.is_available():
        return mx.get_active_memory() + mx.get_cache_memory()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _end_with_router() -> None:
    """Wait for the end of stdin, and end this process: as on SIGTERM, or else without waiting."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_END)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
