"""The process of one model, ``python -m mlx_paged.router.child FD NAME``: the server as for one
model, on a socket that the router has made.

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

from mlx_paged.cli.program import Parser, import_first, run_program
from mlx_paged.cli.streams import say, warnings_as_lines
from mlx_paged.server import program

# After the router's end, for answers that nobody reads to be aborted and queued blocks written.
SECONDS_TO_END = 30.0


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or the end of stdin; the exit status of the server."""
    parser = Parser(prog="mlx-paged serve", flags=program.FLAGS)
    parser.add_argument("fd", type=int)
    parser.add_argument("name")
    return run_program(parser, argv, _run, program.FLAGS)


@warnings_as_lines(say)
def _run(own: argparse.Namespace) -> int:
    args = argparse.Namespace(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_router, daemon=True).start()
    import_first("mlx_paged.loading", "mlx_paged.server.app")
    import mlx.core as mx
    from starlette.responses import JSONResponse, Response

    from mlx_paged.engine.descriptions import describe_engine
    from mlx_paged.server.app import App
    from mlx_paged.server.http.logs import logger, setup_logging
    from mlx_paged.server.routes import ApiRoute, RequestContext
    from mlx_paged.server.schemas import Body

    def nbytes() -> int:
        return mx.get_active_memory() + mx.get_cache_memory()

    async def state(context: RequestContext[Body]) -> Response:
        """The context, and the bytes that this process holds on the device."""
        return JSONResponse({"max_model_len": service.max_model_len, "nbytes": nbytes()})

    async def shrink(context: RequestContext[Body]) -> Response:
        """Free what no running request needs; the bytes that were freed."""
        before = nbytes()
        await asyncio.to_thread(context.service.engine.shrink)
        mx.clear_cache()
        return JSONResponse({"nbytes": before - nbytes()})

    sys.setswitchinterval(program.SWITCH_SECONDS)
    settings = program.read_settings(args)
    setup_logging(settings.log_level, settings.log_prompts)
    service = program.make_service(args, settings)
    routes = [ApiRoute("/router/state", state), ApiRoute("/router/shrink", shrink)]
    with service.engine, warnings_as_lines(partial(logger.warning, "%s")):
        app = App(service, max_connections=program.max_connections(), for_router=routes)

        def announce() -> None:
            say(f"[{' | '.join(describe_engine(args.model, service.engine.engine))}]")

        return program.serve(app, [socket.socket(fileno=own.fd)], announce)


def _end_with_router() -> None:
    """Wait for the end of stdin, and end this process: as on SIGTERM, or else without waiting."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_END)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
