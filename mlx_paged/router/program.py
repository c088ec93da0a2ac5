"""``mlx-paged serve``: one model is served by the server itself, several ones by a router in front
of a process for each. Flags and a configuration file become the models' settings.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from mlx_paged.block_store import BlockStoreError
from mlx_paged.block_store.directory import make_folder, user_cache_folder
from mlx_paged.cli.program import Parser, run_program
from mlx_paged.cli.streams import say, warnings_as_lines
from mlx_paged.errors import STUCK_STATUS, ArgumentError, one_line, shown, system_reason
from mlx_paged.options.config import DEFAULT_CACHE_DIR_SIZE, KEEP_ALIVE, NBYTES
from mlx_paged.server import program as server
from mlx_paged.server.settings import KeyFile, in_words

FLAGS = server.FLAGS | {
    name: f"--{name.replace('_', '-')}"
    for name in ("models_dir", "config", "served_model_name", "memory_limit", "keep_alive")
}
# What the router does for all models, so that no section of a model may set it.
_FOR_ALL = {
    *("host", "port", "allow_unauthenticated", "allowed_host", "cors_origin", "share_cache"),
    *("api_key", "api_key_file", "models_dir", "config", "memory_limit"),
    *("cache_dir_size", "cache_dir_writes"),
}
_MAX_FOLDER = 90  # bytes; macOS allows a socket's path 104, with the zero at its end


def setup_arg_parser(prog: str | None = None) -> Parser:
    """The parser of the server's flags and of those for several models."""
    parser = server.setup_arg_parser(prog or "mlx-paged serve")
    parser.conflict_handler = "resolve"  # --model of the server is one model
    several = parser.add_argument_group("several models")
    several.add_argument(
        "--model",
        action="append",
        default=[],
        dest="models",
        metavar="MODEL",
        help="local folder, GGUF file or Hugging Face repo; several are served side by side, each "
        "loaded when it is needed (default: the bundled demo model)",
    )
    several.add_argument(
        "--models-dir", metavar="DIR", help="serve every model in the folders of this folder"
    )
    several.add_argument(
        "--memory-limit",
        type=NBYTES.read_flag,
        metavar="BYTES",
        help="memory for all models together (65536, 512M, 96G; default: what Metal recommends, or "
        "all memory)",
    )
    several.add_argument(
        "--keep-alive",
        type=KEEP_ALIVE.read_flag,
        metavar="T",
        help="how long a model stays in memory after a request if no other needs its room: "
        f"{KEEP_ALIVE.what} (default: -1)",
    )
    several.add_argument(
        "--config",
        metavar="FILE",
        help="a TOML file: the names of flags for all models, and a section [models.NAME] for each",
    )
    return parser


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Serve one or several models and return the exit status, as that of the server for one.

    Args:
        argv: the arguments without the program's name; by default those of this process.
        prog: the program's name in help and errors.
    """
    words = sys.argv[1:] if argv is None else argv
    parser = setup_arg_parser(prog)
    return run_program(parser, words, lambda args: _run(parser.prog, args, words), FLAGS)


def read_flags(
    prog: str, args: argparse.Namespace, words: Sequence[str]
) -> tuple[argparse.Namespace, dict[str, dict[str, Any]] | None]:
    """The flags with those of ``--config``, and the models that they name as :func:`read_models`
    returns them; ``None`` if there is one, which is then ``args.model``.

    Args:
        prog: the program's name in errors.
        args: what the words were parsed to.

    Raises:
        ArgumentError: the file, or a flag in it, is invalid; or as of :func:`read_models`.
    """
    sections: dict[str, dict[str, Any]] = {}
    if args.config is not None:
        table = _read_file(args.config)
        sections = table.pop("models", {})
        from_file = _parse_table(setup_arg_parser(f"{prog}: {args.config}"), table)
        # The command line overrides the file.
        args = setup_arg_parser(prog).parse_args(words, from_file)
    models = [*args.models, *([] if args.name is None else [args.name])]
    if not sections and args.models_dir is None and len(models) < 2:
        for name in ("memory_limit", "keep_alive"):
            if getattr(args, name) is not None:
                what = "is for several models, or for one in a section of --config"
                raise ArgumentError(f"[server] {name} {what}", name)
        args.model, args.name = next(iter(models), None), None
        return args, None
    if args.served_model_name:
        raise ArgumentError(
            "[server] served_model_name is for one model; write aliases in --config",
            "served_model_name",
        )
    return args, read_models(prog, args, models, sections)


@warnings_as_lines(say)
def _run(prog: str, args: argparse.Namespace, words: Sequence[str]) -> int:
    args, models = read_flags(prog, args, words)
    if models is None:
        return server.run(args)
    server.check_extra()
    if "MLX_RANK" in os.environ:
        raise ValueError(
            "several models can't be served by several ranks; under mlx.launch, give one --model"
        )
    return _serve(args, models)


def _read_file(file: str) -> dict[str, Any]:
    """The table of ``--config``, whose ``models`` are sections.

    Raises:
        ArgumentError: the file can't be read.
    """
    try:
        with open(file, "rb") as opened:
            table = tomllib.load(opened)
    except OSError as error:
        what = f"can't be read: {system_reason(error)}"
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        what = f"is not valid TOML: {one_line(error)}"
    else:
        sections = table.get("models", {})
        if isinstance(sections, dict) and all(isinstance(each, dict) for each in sections.values()):
            return table
        what = "has models that are not sections; write [models.NAME]"
    raise ArgumentError(f"[server] config {shown(file)} {what}", "config")


def _parse_table(
    parser: Parser, table: Mapping[str, Any], base: argparse.Namespace | None = None
) -> argparse.Namespace:
    """Parse a table with the names and values of flags, which override those of ``base``."""
    words = [word for name, value in table.items() for word in parser.words_of(name, value)]
    return parser.parse_args(words, argparse.Namespace() if base is None else copy(base))


def read_models(
    prog: str,
    args: argparse.Namespace,
    models: Iterable[str],
    sections: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """The models to serve, by name, each with the flags of its process, its ``aliases`` and whether
    to ``pin`` it: the models of the flags, then those that only a section names.

    Args:
        prog: the program's name in errors.
        args: the flags for all models.
        models: folders, files or hub ids.
        sections: of ``--config``, by name.

    Raises:
        ArgumentError: two models have the same name, or ``--models-dir`` has none.
    """
    found = [(server.name_of(model), model) for model in models]
    if args.models_dir is not None:
        found += _models_in(args.models_dir)
    named = {name for name, _ in found}
    found += [(name, name) for name in sections if name not in named]
    flags: dict[str, dict[str, Any]] = {}
    names: Counter[str] = Counter()
    for name, model in found:
        section = sections.get(name, {})
        parser = setup_arg_parser(f"{prog}: {args.config} [models.{name}]")
        parser.add_argument("--aliases", action="append", default=[])
        parser.add_argument("--pin", action="store_true")
        for key in section:
            if key.replace("-", "_") in _FOR_ALL:
                parser.error(f"{key} is for all models; write it at the top of the file")
        own = _parse_table(parser, section, argparse.Namespace(**{**vars(args), "models": []}))
        own.model = own.models[-1] if own.models else model
        own.served_model_name = [name, *own.aliases]
        own.name, own.api_key, own.api_key_file = None, [], None
        flags[name] = vars(own)
        names.update([*own.served_model_name, *(adapter for adapter, _ in own.adapters)])
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:
        raise ArgumentError(f"[server] models: two have the name {shown(twice)}", "models")
    return flags


def names_of(models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """All names of models, aliases included."""
    return [name for flags in models.values() for name in flags["served_model_name"]]


def _models_in(folder: str) -> list[tuple[str, str]]:
    """The names and paths of the models in a folder, or in folders of publishers in it: folders
    with a ``config.json``, and GGUF files.

    Raises:
        ArgumentError: there is none.
    """
    root = Path(folder).expanduser()
    found = [path.parent for depth in ("*", "*/*") for path in root.glob(f"{depth}/config.json")]
    found += [path for depth in ("*", "*/*") for path in root.glob(f"{depth}.gguf")]
    if not found:
        raise ArgumentError(
            f"[server] models_dir {shown(folder)} has no model: no folder with a config.json, and "
            "no .gguf file",
            "models_dir",
        )
    return [(path.relative_to(root).as_posix(), str(path)) for path in sorted(found)]


def _serve(args: argparse.Namespace, models: Mapping[str, Mapping[str, Any]]) -> int:
    """Serve models until a signal arrives; returns the exit status."""
    from mlx_paged.router.app import RouterApp
    from mlx_paged.router.model_process import ModelProcess
    from mlx_paged.router.residency import Residency, Resident
    from mlx_paged.router.router import Router
    from mlx_paged.server.http.http_server import (
        HttpServer,
        bind,
        close_all,
        is_loopback,
        url_of,
    )
    from mlx_paged.server.http.logs import setup_logging

    names = names_of(models)
    settings = server.read_settings(args, names)
    budget = _budget(args.memory_limit)
    sockets = bind(settings.host, settings.port)
    folder = _folder_for_sockets()
    try:
        server.check_keys(settings, is_loopback(sockets))
        setup_logging(settings.log_level, settings.log_prompts)
        key_file = None
        if args.api_key_file is not None:
            key_file = KeyFile(args.api_key, args.api_key_file, settings.api_keys, names)
        models = with_cache_dir(models)
        residents = [
            Resident(
                ModelProcess(name, flags, folder / str(number)),
                KEEP_ALIVE.check("server", "keep_alive", flags["keep_alive"] or "-1"),
                flags["pin"],
            )
            for number, (name, flags) in enumerate(models.items())
        ]
        router = Router(Residency(residents, *budget))
        is_open = is_loopback(sockets)
        app = RouterApp(router, settings, is_open, key_file, server.max_connections())

        def announce() -> None:
            keys = in_words(settings.api_keys) if settings.api_keys else "no key needed"
            say(f"[{len(models)} models: {', '.join(models)} | {keys}]")
            say(f"[listening on {url_of(settings.host, sockets)}; Ctrl-C to end]")
            router.begin()

        http = HttpServer(app, app.gate, router, settings, announce, key_file)
        http.run(sockets)
        return STUCK_STATUS if http.has_abandoned else 0
    finally:
        close_all(sockets)
        shutil.rmtree(folder, ignore_errors=True)


def _budget(limit: str | int | None) -> tuple[int, Callable[[int, int], int]]:
    """The bytes for all models, and what of them K/V may take beside weights and activations: the
    share that a single model's K/V take by default.
    """
    from mlx_paged.models.memory import kv_share, memory_size, recommended_memory

    recommended = recommended_memory()
    if limit is not None:
        recommended = NBYTES.check("server", "memory_limit", limit)
    budget = recommended or memory_size()

    def share_of_kv(weight_nbytes: int, activation_nbytes: int) -> int:
        return kv_share(weight_nbytes, activation_nbytes, recommended, budget)

    return budget, share_of_kv


def with_cache_dir(models: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The flags of models, with a folder for their conversations where none is given, so that these
    outlive their time in memory.
    """
    from mlx_paged.models.memory import format_nbytes

    folder = default_cache_dir()
    without = {
        name: {**flags, "cache_dir": str(folder)}
        for name, flags in models.items()
        if flags["cache_dir"] is None and flags["kv"] == "paged" and flags["enable_prefix_caching"]
    }
    if not without:
        return dict(models)
    try:
        make_folder(folder)
    except BlockStoreError as error:
        say(f"[conversations are kept in memory only: {one_line(error)}]")
        return dict(models)
    given = next(iter(without.values()))["cache_dir_size"] or DEFAULT_CACHE_DIR_SIZE
    size = format_nbytes(NBYTES.check("server", "cache_dir_size", given))
    say(
        f"[conversations are kept in {folder}, {size} at most for all models, as private as their "
        "texts; --cache-dir none keeps them in memory only]"
    )
    return {**models, **without}


def default_cache_dir() -> Path:
    """The folder of conversations that no flag names."""
    return user_cache_folder() / "mlx-paged"


def _folder_for_sockets() -> Path:
    """A new folder that only this user can open, with a path that is short enough for sockets."""
    folder = tempfile.gettempdir()
    return Path(tempfile.mkdtemp("", "mlx-", folder if len(folder) < _MAX_FOLDER else "/tmp"))
