"""``mlx-paged fit`` and ``mlx-paged list`` as programs: flags, JSON and exit status. MLX is not
imported until the arguments are checked.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from mlx_paged.cli.program import Parser, import_first, run_program
from mlx_paged.cli.streams import say, warnings_as_lines, write
from mlx_paged.errors import ArgumentError
from mlx_paged.options.argument_values import AT_LEAST_0, AT_LEAST_1
from mlx_paged.options.config import (
    DEFAULT_ADAPTER_RANK,
    DEFAULT_KV,
    KV_BITS_LISTED,
    KV_FORMAT,
    NBYTES,
    KVBits,
)

if TYPE_CHECKING:
    from mlx_paged.cli.fit.machine import Machine
    from mlx_paged.cli.fit.verdict import Fit
    from mlx_paged.loading.outline import Outline

_FLAGS = {
    "path_or_hf_repo": "MODEL",
    "kv_format": "--kv-bits",
    "max_model_len": "--context",
    "draft_model": "--draft-model",
}


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
    draft_help = "a draft model or head, which counts, too; auto for the head in the model's folder"
    parser.add_argument("--draft-model", metavar="NAME", help=draft_help)
    context_help = "tokens of each conversation (default: the model's context length)"
    parser.add_value("--context", AT_LEAST_1, context_help, default=0)
    parallel_help = "the number of conversations at once (default: 1)"
    parser.add_value("--parallel", AT_LEAST_1, parallel_help, default=1)
    parser.add_value(
        "--kv-cache-bytes",
        NBYTES,
        "the K/V budget, states included: 512M, 2G (default: as the other programs have it)",
    )
    adapters_help = "room for this many LoRA adapters of requests (default: 0)"
    parser.add_value("--max-adapters", AT_LEAST_0, adapters_help, default=0)
    rank_help = f"the largest rank of an adapter (default: {DEFAULT_ADAPTER_RANK})"
    parser.add_value("--max-adapter-rank", AT_LEAST_1, rank_help)
    _add_bits_and_machine(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")
    parser.add_version()
    return parser


def setup_list_parser(prog: str | None = None) -> Parser:
    """The argument parser of the list, for a program of this name."""
    parser = Parser(
        prog=prog or "python -m mlx_paged list",
        description="List the models in the cache of the Hugging Face hub and in folders: how "
        "large they are, how they run here, and whether they fit into this machine. No weights are "
        "read. mlx-paged pull downloads a model, and mlx-paged rm removes one.",
    )
    folder_help = "a folder of models, or a model's own folder"
    parser.add_argument("folders", metavar="FOLDER", nargs="*", help=folder_help)
    _add_bits_and_machine(parser)
    parser.add_version()
    return parser


def _add_bits_and_machine(parser: Parser) -> None:
    bits = f"{KV_BITS_LISTED} or K:8,V:4 (default: those of the model's activations)"
    parser.add_value("--kv-bits", KV_FORMAT, f"bits of K and V: {bits}")
    memory_help = "judge for a Mac with this much memory instead of this machine: 16G, 128G"
    parser.add_value("--memory", NBYTES, memory_help)
    chip_help = 'estimate the speed for this chip: "M2 Max" (default: this machine\'s)'
    parser.add_argument("--chip", help=chip_help)


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run ``mlx-paged fit`` and return its exit status.

    That is 0 for a model that fits, as it is or with other flags, 1 for one that does not, 2 if it
    is unknown, or 130 after Ctrl-C.

    Args:
        argv: the arguments, without the program's name; those of this process by default.
        prog: the program's name in help and errors.
    """
    return run_program(setup_arg_parser(prog), argv, _judge, _FLAGS, lost=2)


def main_of_list(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run ``mlx-paged list`` and return its exit status: 0, 2 for wrong arguments, or 130 after
    Ctrl-C.
    """
    return run_program(setup_list_parser(prog), argv, _list, _FLAGS, lost=2)


def _machine(args: argparse.Namespace) -> Machine:
    from mlx_paged.cli.fit.machine import BANDWIDTHS, Machine

    chip = args.chip and args.chip.removeprefix("Apple ")
    known = dict.fromkeys(name.partition(" (")[0] for name in BANDWIDTHS)
    if chip not in (None, *known):
        raise ArgumentError(f"unknown chip {chip!r}; known: {', '.join(known)}", "chip")
    return Machine.here(chip) if args.memory is None else Machine.mac(args.memory, chip)


@warnings_as_lines(say)
def _judge(args: argparse.Namespace) -> int:
    import_first("mlx_paged.cli.fit.report")
    from mlx_paged.cli.fit.report import report
    from mlx_paged.cli.fit.verdict import Fit, Footprint
    from mlx_paged.engine.speculation.draft_model import check_draft_model
    from mlx_paged.loading.outline import read_outline
    from mlx_paged.models.adapters import Adapters

    machine = _machine(args)
    outline = read_outline(args.model, args.revision, args.draft_model)
    draft_model = check_draft_model(outline.draft_model, outline.model, DEFAULT_KV)
    adapters = Adapters(outline.model, {}, args.max_adapters, args.max_adapter_rank)
    footprint = Footprint(adapters.model, KVBits.parse(args.kv_bits), draft_model)
    fit = Fit(footprint, machine, args.context, args.parallel, args.kv_cache_bytes)
    ways_out = [] if fit.is_yes else fit.ways_out()
    if args.json:
        write(json.dumps(_as_json(outline, fit, ways_out), indent=2) + "\n")
    else:
        write(report(outline, fit, ways_out))
    return 0 if fit.is_yes or ways_out else 1


def _as_json(outline: Outline, fit: Fit, ways_out: list[str]) -> dict[str, Any]:
    footprint, machine = fit.footprint, fit.machine
    return {
        "model": outline.name,
        "runs": outline.model.description,
        "parameters": footprint.num_parameters,
        "bytes_to_download": outline.num_bytes_to_download,
        "weights": footprint.weight_nbytes,
        "weights_of_draft_model": footprint.draft_nbytes,
        "adapters": footprint.adapter_nbytes,
        "kv_per_token": footprint.nbytes_per_token,
        "kv_per_late_token": footprint.nbytes_per_late_token,
        "kv": fit.kv_nbytes,
        "states": fit.state_nbytes,
        "activations_estimated": fit.activations,
        "total": fit.nbytes,
        "memory": machine.memory,
        "recommended_by_metal": machine.recommended or None,
        "free": machine.free,
        "kv_cache_bytes": max(0, fit.budget),
        "context": fit.context,
        "parallel": fit.num_seqs,
        "context_of_model": footprint.context_length,
        "context_that_fits": {str(n): fit.longest_context(n) for n in {1, fit.num_seqs}},
        "fits": fit.is_yes,
        "fits_with": ways_out,
    }


@warnings_as_lines(say)
def _list(args: argparse.Namespace) -> int:
    from mlx_paged.cli.fit.report import list_models

    lines = list_models(args.folders, _machine(args), KVBits.parse(args.kv_bits))
    write("".join(f"{line}\n" for line in lines))
    return 0
