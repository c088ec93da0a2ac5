"""``mlx-paged ps`` and ``stop``: the models of a running server."""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote, urlsplit

from mlx_paged.cli.program import Parser, run_program
from mlx_paged.cli.streams import write
from mlx_paged.errors import ArgumentError, one_line, shown
from mlx_paged.server.settings import first_key

_FLAGS = {"api_key_file": "--api-key-file", "url": "--url"}
_SECONDS = 600  # for the answers that a model gives when it is stopped


def setup_ps_parser(prog: str | None = None) -> Parser:
    """The argument parser of ``ps``, for a program of this name."""
    parser = Parser(
        prog=prog or "python -m mlx_paged ps",
        description="List the models of a running server: which are loaded, what they take, and "
        "how long they have been idle.",
    )
    _add_server(parser)
    parser.add_argument("--json", action="store_true", help="print what the server answers")
    parser.add_version()
    return parser


def setup_stop_parser(prog: str | None = None) -> Parser:
    """The argument parser of ``stop``, for a program of this name."""
    parser = Parser(
        prog=prog or "python -m mlx_paged stop",
        description="Have a server of several models unload one of them, when it has answered what "
        "it answers now. The next request loads it again.",
    )
    parser.add_argument("name", metavar="NAME", help="a model, as ps lists it")
    _add_server(parser)
    parser.add_version()
    return parser


def _add_server(parser: Parser) -> None:
    url_help = "the address of the server (default: %(default)s)"
    parser.add_argument("--url", default="http://127.0.0.1:8000", help=url_help)
    file_help = "a file like that of serve; its first key is used"
    parser.add_argument("--api-key-file", metavar="FILE", help=file_help)


def main_of_ps(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run ``mlx-paged ps`` and return its exit status: 0, 2 if no server answers, or 130 after
    Ctrl-C.
    """
    return run_program(setup_ps_parser(prog), argv, _ps, _FLAGS)


def main_of_stop(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run ``mlx-paged stop`` and return its exit status: 0, 2 if the server refuses or no server
    answers, or 130 after Ctrl-C.
    """
    return run_program(setup_stop_parser(prog), argv, _stop, _FLAGS)


def _ps(args: argparse.Namespace) -> int:
    found = _ask(args, "GET", "/v1/models")
    if args.json:
        write(json.dumps(found, indent=2) + "\n")
        return 0
    rows: list[tuple[str, ...]] = [
        ("NAME", "STATE", "REQUESTS", "MEMORY", "IDLE FOR", "UNLOADED IN")
    ]
    # What a process holds is in the list that clients of Ollama read.
    held = {each["model"]: each["size"] for each in _ask(args, "GET", "/api/ps")["models"]}
    for model in found["data"]:
        nbytes = held.get(model["id"], held.get(f"{model['id']}:latest"))
        rows.append(_row(model, nbytes))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        write("  ".join(cells).rstrip() + "\n")
    return 0


def _row(model: dict[str, Any], nbytes: int | None) -> tuple[str, ...]:
    """The columns of a model. A server of one model says nothing about its state: it is loaded.

    Args:
        nbytes: that its process holds; ``None`` if it is not loaded.
    """
    from mlx_paged.models.memory import format_nbytes

    def seconds(name: str) -> str:
        value = model.get(name)
        return "" if value is None else f"{value:.0f} s"

    left = "never, it is pinned" if model.get("is_pinned") else seconds("seconds_left")
    return (
        one_line(model.get("id", "")),
        one_line(model.get("state", "loaded")),
        str(model.get("num_requests", "")),
        "" if nbytes is None else format_nbytes(nbytes),
        seconds("idle_seconds"),
        left,
    )


def _stop(args: argparse.Namespace) -> int:
    _ask(args, "POST", f"/v1/models/{quote(args.name)}/unload")
    write(f"unloaded {one_line(args.name)}\n")
    return 0


def _ask(args: argparse.Namespace, method: str, path: str) -> dict[str, Any]:
    """What a server answers.

    Raises:
        ArgumentError: the address is none, or the key file can't be used.
        RuntimeError: no server answers, or it refuses; the message has its reason.
    """
    if urlsplit(args.url).scheme not in ("http", "https"):
        raise ArgumentError(
            f"url must begin with http:// or https://, got {shown(args.url)}", "url"
        )
    headers = {}
    if args.api_key_file is not None:
        headers["Authorization"] = f"Bearer {first_key(args.api_key_file)}"
    request = urllib.request.Request(args.url.rstrip("/") + path, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as response:
            found = json.load(response)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"the server refuses: {_reason(error)}") from error
    except (OSError, ValueError) as error:
        reason = one_line(getattr(error, "reason", error))
        raise RuntimeError(f"no server answers at {one_line(args.url)}: {reason}") from error
    return found if isinstance(found, dict) else {}


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        text: object = json.load(error)["error"]["message"]
    except (OSError, ValueError, KeyError, TypeError):
        text = f"{error.code} {error.reason}"
    return one_line(text)
