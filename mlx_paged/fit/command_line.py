"""The flags of ``mlx-paged fit`` and ``mlx-paged list``. No MLX here."""

from __future__ import annotations

import argparse

from mlx_paged.command_line.parser import Parser
from mlx_paged.config import KV_FORMAT, NBYTES
from mlx_paged.domains import AT_LEAST_1

_KV_BITS = "the bits of K and V: 8, 4 or K:8,V:4 (default: as the model computes them)"


def setup_arg_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The argument parser, for a program of this name."""
    parser = Parser(
        prog=prog or "python -m mlx_paged fit",
        description="Say whether a model fits into this machine, without reading its weights, nor "
        "downloading them. The status is 0 where it does, as it is or with other flags, 1 where it "
        "does not, and 2 where that can't be said.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder, a GGUF file, or a repo on the Hugging Face hub; demo is the bundled model",
    )
    parser.add_argument("--revision", help="branch, tag or commit of the repo")
    parser.add_argument("--kv-bits", type=KV_FORMAT.read_flag, metavar="N", help=_KV_BITS)
    parser.add_argument(
        "--context",
        type=AT_LEAST_1.read_flag,
        metavar="N",
        help="tokens of each conversation (default: what the model was made for)",
    )
    parser.add_argument(
        "--parallel",
        type=AT_LEAST_1.read_flag,
        metavar="N",
        default=1,
        help="conversations at once (default: 1)",
    )
    _add_machine(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")
    parser.add_version()
    return parser


def setup_list_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The argument parser of the list, for a program of this name."""
    parser = Parser(
        prog=prog or "python -m mlx_paged list",
        description="List the models in the cache of the Hugging Face hub and in folders: how "
        "large they are, how they run here, and whether they fit into this machine. No weights are "
        "read. The program hf downloads and deletes: hf download REPO, hf cache rm model/REPO.",
    )
    parser.add_argument(
        "folders",
        metavar="FOLDER",
        nargs="*",
        help="with models in it, or a model itself",
    )
    parser.add_argument("--kv-bits", type=KV_FORMAT.read_flag, metavar="N", help=_KV_BITS)
    _add_machine(parser)
    parser.add_version()
    return parser


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory",
        type=NBYTES.read_flag,
        metavar="N",
        help="ask for a Mac with this memory instead: 16G, 128G",
    )
    parser.add_argument("--chip", help='the chip of that Mac, for its speed: "M2 Max"')
