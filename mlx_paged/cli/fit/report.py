"""The text that ``mlx-paged fit`` prints, and the table of ``mlx-paged list``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mlx_paged.cli.fit.machine import Machine
from mlx_paged.cli.fit.verdict import (
    ACCEPTANCE,
    LAUNCH_SECONDS,
    LAUNCHES_PER_LAYER,
    Fit,
    Footprint,
)
from mlx_paged.errors import ArgumentError
from mlx_paged.loading import LoadError
from mlx_paged.loading.folder import find_local_model, is_model, local_repositories
from mlx_paged.loading.gguf.files import is_later_part
from mlx_paged.loading.outline import Outline, read_outline
from mlx_paged.models.memory import format_nbytes
from mlx_paged.options.config import DEFAULT_NUM_DRAFT_TOKENS, KVBits

_REMEDY = "use a smaller model, or one with fewer bits per weight"


def report(outline: Outline, fit: Fit, ways_out: list[str]) -> str:
    """A table of sizes, lines on the machine, the context and the speed, and the verdict."""
    lines = [f"{outline.name} ({outline.model.description})"]
    if outline.num_bytes_to_download:
        lines.append(f"to download: {format_nbytes(outline.num_bytes_to_download)}")
    lines += ["", *_sizes(fit), "", _machine_line(fit), *_context_lines(fit)]
    return "\n".join([*lines, "", _verdict(fit, ways_out)]) + "\n"


def _sizes(fit: Fit) -> Iterator[str]:
    footprint, num = fit.footprint, fit.footprint.num_parameters
    bits = "as the model computes them" if footprint.kv_bits is None else str(footprint.kv_bits)
    each = f"{fit.context:,} tokens"
    whose = f"a conversation of {each}" if fit.num_seqs == 1 else f"{fit.num_seqs} of {each} each"
    first, late = footprint.nbytes_per_token, footprint.nbytes_per_late_token
    per_token = f"{first:,} bytes a token"
    if late != first:
        per_token = f"{late:,} bytes a token beyond the windows, {first:,} within them"
    count = f"{num / 1e9:.1f} billion" if num >= 1e8 else f"{num / 1e6:.1f} million"
    drafter = getattr(footprint.draft_model, "description", "")
    others = footprint.draft_nbytes + footprint.adapter_nbytes
    for name, nbytes, what in (
        ("weights", footprint.weight_nbytes - others, f"{count} parameters"),
        ("draft model", footprint.draft_nbytes, drafter),
        ("adapters", footprint.adapter_nbytes, "room for those of requests"),
        ("K/V", fit.kv_nbytes, f"{whose}; {per_token}, {bits}"),
        ("states", fit.state_nbytes, "of recurrent layers, all copies included"),
        ("activations", fit.activations, "of the largest step, estimated"),
        ("all", fit.nbytes, ""),
    ):
        if nbytes:
            yield f"  {name:<12}{format_nbytes(nbytes):>10}  {what}".rstrip()


def _machine_line(fit: Fit) -> str:
    machine, chip = fit.machine, f"{fit.machine.chip}, " if fit.machine.chip else ""
    line = f"{chip}{format_nbytes(machine.memory)} of memory"
    if machine.recommended:
        line += f"; Metal recommends at most {format_nbytes(machine.recommended)}"
        if not machine.is_this_one:
            before = format_nbytes(machine.recommended_before)
            line += f" on such Macs, and {before} with older versions of macOS"
    if machine.free is not None:
        line += f"; {format_nbytes(machine.free)} are free now"
    default = " by default" if fit.kv_cache_bytes is None else ""
    return line + f". K/V may take {format_nbytes(max(0, fit.budget))}{default}."


def _context_lines(fit: Fit) -> Iterator[str]:
    """The context that fits, and the speed where the bandwidth is known."""
    contexts, numbers, bandwidth = [], dict.fromkeys((1, fit.num_seqs)), fit.machine.bandwidth
    for n in numbers:
        tokens = fit.longest_context(n)
        whole = ", the model's whole context" if tokens == fit.footprint.context_length else ""
        who = "one conversation" if n == 1 else f"each of {n}"
        contexts.append(f"{tokens:,} tokens for {who}{whole}")
    yield f"context that fits: {'; '.join(contexts)}"
    if bandwidth is None:
        return
    speeds = ", ".join(_speed(fit, n, 0) for n in numbers)
    yield (
        f"speed at that context, an estimate at most: {speeds} (bytes read over "
        f"{bandwidth / 1e9:g} GB/s, and {LAUNCHES_PER_LAYER} launches of "
        f"{LAUNCH_SECONDS * 1e6:g} us per layer; not measured on a Mac)"
    )
    if fit.footprint.draft_model is not None:
        speeds = ", ".join(_speed(fit, n, DEFAULT_NUM_DRAFT_TOKENS) for n in numbers)
        yield (
            f"speed with as many drafts per step as pay, an estimate: {speeds} (if "
            f"{ACCEPTANCE:.0%} of drafts are accepted where those before them are)"
        )


def _speed(fit: Fit, num_seqs: int, most: int) -> str:
    """The speed with the number of drafts that gives the most tokens."""
    speed, best = max((fit.tokens_per_second(num_seqs, n), n) for n in range(most + 1))
    where = "alone" if num_seqs == 1 else f"at {num_seqs} together"
    return f"{speed:.0f} tokens/s {where}" + f" with {best or 'none'}" * (most > 0)


def _verdict(fit: Fit, ways_out: list[str]) -> str:
    machine = fit.machine
    if fit.is_yes:
        missing = 0 if machine.free is None else fit.nbytes - machine.free
        return "yes" + f", once other programs free {format_nbytes(missing)}" * (missing > 0)
    if ways_out:
        return f"yes, with {', or '.join(ways_out)}"
    if fit.loads:
        held = fit.longest_context(1)
        return f"no: the weights leave memory for {held:,} tokens of K/V; {_REMEDY}"
    limit = format_nbytes(machine.limit)
    limit = f"the {limit} that Metal recommends" if machine.recommended else f"{limit} of memory"
    return f"no: the weights alone exceed {limit}; {_REMEDY}"


def list_models(
    folders: Sequence[str], machine: Machine, kv_bits: KVBits | None = None
) -> Iterator[str]:
    """The lines of a table: the models in the hub's cache, and those in ``folders``.

    Raises:
        ArgumentError: something is not a folder.
    """
    found: list[tuple[str, str | Path]] = [(repo, repo) for repo in local_repositories()]
    found += [(str(path), path) for path in _models_in(folders)]
    if not found:
        yield "no models in the hub's cache or the given folders"
        return
    rows = [("model", "weights", "runs", "fits")]
    rows += [(name, *_cells(where, machine, kv_bits)) for name, where in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, size, runs, fits in rows:
        yield f"{name:<{widths[0]}}  {size:>{widths[1]}}  {runs:<{widths[2]}}  {fits}".rstrip()


def _models_in(folders: Sequence[str]) -> Iterator[Path]:
    """The models in folders: a folder itself, or its subfolders and GGUF files."""
    for name in folders:
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise ArgumentError(f"{name!r} is not a folder")
        for path in [folder] if is_model(folder) else sorted(folder.iterdir()):
            if is_model(path) and not is_later_part(path):
                yield path


def _cells(where: str | Path, machine: Machine, kv_bits: KVBits | None) -> tuple[str, str, str]:
    """The size of a model, how it runs, and whether it fits."""
    try:
        path = find_local_model(where)
        if path is None:
            return "", "", "not fully downloaded"
        outline = read_outline(path)
        fit = Fit(Footprint(outline.model, kv_bits), machine)
    except LoadError as error:
        return "", "refused", str(error).removeprefix("[load] ")
    held = fit.longest_context(1)
    fits = f"yes, with {held:,} of {fit.context:,} tokens" if held and fit.loads else "no"
    if fit.is_yes:
        fits = f"yes, with all {fit.context:,} tokens of context"
    return format_nbytes(fit.footprint.weight_nbytes), outline.model.description, fits
