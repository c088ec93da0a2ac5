"""``mlx-paged fit`` and ``mlx-paged list`` as programs: arguments, output and exit status."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from mlx_paged.command_line.program import import_first, run_program
from mlx_paged.fit.command_line import setup_arg_parser, setup_list_parser
from mlx_paged.standard_streams import say, warnings_as_lines, write

if TYPE_CHECKING:
    from mlx_paged.fit.verdict import Fit
    from mlx_paged.loading.outline import Outline

_FLAGS = {"path_or_hf_repo": "MODEL", "kv_format": "--kv-bits", "max_model_len": "--context"}


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


@warnings_as_lines(say)
def _list(args: argparse.Namespace) -> int:
    from mlx_paged.fit.listing import list_models

    machine = _machine(args.memory, args.chip)
    for line in list_models(args.folders, machine, args.kv_bits):
        write(line + "\n")
    return 0


@warnings_as_lines(say)
def _judge(args: argparse.Namespace) -> int:
    import_first("mlx_paged.fit.report", "mlx_paged.loading.outline")
    from mlx_paged.fit.report import report
    from mlx_paged.fit.verdict import Fit
    from mlx_paged.loading.outline import read_outline

    machine = _machine(args.memory, args.chip)
    outline = read_outline(args.model, args.revision)
    fit = Fit.of(
        outline.model, machine, args.kv_bits, args.context, args.parallel, args.kv_cache_bytes
    )
    ways_out = [] if fit.is_yes else fit.ways_out()
    if args.json:
        import json

        write(json.dumps(_as_json(outline, fit, ways_out), indent=2) + "\n")
    else:
        write(report(outline, fit, ways_out))
    return 0 if fit.is_yes or ways_out else 1


def _machine(memory: int | None, chip: str | None) -> Any:
    from mlx_paged.errors import ArgumentError
    from mlx_paged.fit.machine import BANDWIDTHS, Machine

    if chip is not None:
        chip = chip.removeprefix("Apple ")
        known = list(dict.fromkeys(name.partition(" (")[0] for name in BANDWIDTHS))
        if chip not in known:
            raise ArgumentError(f"unknown chip {chip!r}; known: {', '.join(known)}", "chip")
    return Machine.here(chip) if memory is None else Machine.mac(memory, chip)


def _as_json(outline: Outline, fit: Fit, ways_out: list[str]) -> dict[str, Any]:
    footprint, machine = fit.footprint, fit.machine
    return {
        "model": outline.name,
        "runs": outline.model.description,
        "parameters": footprint.num_parameters,
        "bytes_to_download": outline.num_bytes_to_download,
        "weights": footprint.weight_nbytes,
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
