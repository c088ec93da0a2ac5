"""The flags of ``mlx-paged fit`` and ``mlx-paged list``. Does not import MLX."""

from __future__ import annotations

import argparse

from mlx_paged.command_line.program import Parser
from mlx_paged.config import KV_FORMAT, NBYTES, KVBits
from mlx_paged.domains import AT_LEAST_1


def setup_arg_parser(prog: str | None = None) -> Parser:
    """The argument parser, for a program of this name."""
    parser = Parser(
        prog=prog or "python -m mlx_paged fit",
        description="Say whether a model fits into this machine, without reading or downloading "
        "its weights. The exit status is 0 if it fits, as it is or with other flags, 1 if it does "
        "not, and 2 if that is unknown.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder, a GGUF file, or a repo on the Hugging Face hub; demo is the bundled model",
    )
    parser.add_argument("--revision", help="branch, tag or commit of the repo")
    _add_kv_bits(parser)
    parser.add_argument(
        "--context",
        type=AT_LEAST_1.read_flag,
        metavar="N",
        help="tokens of each conversation (default: the model's context length)",
    )
    parser.add_argument(
        "--parallel",
        type=AT_LEAST_1.read_flag,
        metavar="N",
        default=1,
        help="the number of conversations at once (default: 1)",
    )
    parser.add_argument(
        "--kv-cache-bytes",
        type=NBYTES.read_flag,
        metavar="N",
        help="the K/V budget, states included: 512M, 2G (default: as the other programs have it)",
    )
    _add_machine(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")
    parser.add_version()
    return parser


def setup_list_parser(prog: str | None = None) -> Parser:
    """The argument parser of the list, for a program of this name."""
    parser = Parser(
        prog=prog or "python -m mlx_paged list",
        description="List the models in the cache of the Hugging Face hub and in folders: how "
        "large they are, how they run here, and whether they fit into this machine. No weights are "
        "read. To download a model, use hf download REPO; to delete one, hf cache rm model/REPO.",
    )
    parser.add_argument(
        "folders",
        metavar="FOLDER",
        nargs="*",
        help="a folder of models, or a model's own folder",
    )
    _add_kv_bits(parser)
    _add_machine(parser)
    parser.add_version()
    return parser


def _add_kv_bits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv-bits",
        type=lambda text: KVBits.parse(KV_FORMAT.read_flag(text)),
        metavar="N",
        help="bits of K and V: 8, 4 or K:8,V:4 (default: those of the model's activations)",
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory",
        type=NBYTES.read_flag,
        metavar="N",
        help="judge for a Mac with this much memory instead of this machine: 16G, 128G",
    )
    parser.add_argument(
        "--chip", help='estimate the speed for this chip: "M2 Max" (default: this machine\'s)'
    )
