"""The text that ``mlx-paged fit`` prints."""

from __future__ import annotations

from mlx_paged.fit.footprint import LAUNCH_SECONDS, LAUNCHES_PER_LAYER
from mlx_paged.fit.verdict import Fit
from mlx_paged.loading.outline import Outline
from mlx_paged.memory import format_nbytes

REMEDY = "use a smaller model, or one with fewer bits per weight"


def report(outline: Outline, fit: Fit, ways_out: list[str]) -> str:
    """A table of sizes, lines on the machine, the context and the speed, and the verdict."""
    footprint = fit.footprint
    bits = "as the model computes them" if footprint.kv_bits is None else str(footprint.kv_bits)
    each = f"{fit.context:,} tokens"
    whose = f"a conversation of {each}" if fit.num_seqs == 1 else f"{fit.num_seqs} of {each} each"
    per_token = f"{footprint.nbytes_per_token:,} bytes a token"
    if footprint.nbytes_per_late_token != footprint.nbytes_per_token:
        per_token = (
            f"{footprint.nbytes_per_late_token:,} bytes a token beyond the windows, "
            f"{footprint.nbytes_per_token:,} within them"
        )
    rows = [
        ("weights", footprint.weight_nbytes, f"{_count(footprint.num_parameters)} parameters"),
        ("K/V", fit.kv_nbytes, f"{whose}; {per_token}, {bits}"),
        ("states", fit.state_nbytes, "of recurrent layers, all copies included"),
        ("activations", fit.activations, "of the largest step, estimated"),
        ("all", fit.nbytes, ""),
    ]
    lines = [f"{outline.name} ({outline.model.description})"]
    if outline.num_bytes_to_download:
        lines.append(f"to download: {format_nbytes(outline.num_bytes_to_download)}")
    lines.append("")
    for name, nbytes, what in rows:
        if nbytes:
            lines.append(f"  {name:<12}{format_nbytes(nbytes):>10}  {what}".rstrip())
    lines += [
        "",
        _machine_line(fit),
        _context_line(fit),
        *_speed_lines(fit),
        "",
        _verdict(fit, ways_out),
    ]
    return "\n".join(lines) + "\n"


def _limit(fit: Fit) -> str:
    machine = fit.machine
    if machine.recommended:
        return f"the {format_nbytes(machine.recommended)} that Metal recommends"
    return f"{format_nbytes(machine.memory)} of memory"


def _machine_line(fit: Fit) -> str:
    machine = fit.machine
    line = f"{machine.chip}, {format_nbytes(machine.memory)} of memory" if machine.chip else ""
    line = line or f"{format_nbytes(machine.memory)} of memory"
    if machine.recommended:
        line += f"; Metal recommends at most {format_nbytes(machine.recommended)}"
        if not machine.is_this_one:
            before = format_nbytes(machine.recommended_before)
            line += f" on such Macs, and {before} with older versions of macOS"
    if machine.free is not None:
        line += f"; {format_nbytes(machine.free)} are free now"
    default = " by default" if fit.kv_cache_bytes is None else ""
    return line + f". K/V may take {format_nbytes(max(0, fit.budget))}{default}."


def _context_line(fit: Fit) -> str:
    parts = []
    for num_seqs in dict.fromkeys((1, fit.num_seqs)):
        tokens = fit.longest_context(num_seqs)
        who = "one conversation" if num_seqs == 1 else f"each of {num_seqs}"
        whole = ", the model's whole context" if tokens == fit.footprint.context_length else ""
        parts.append(f"{tokens:,} tokens for {who}{whole}")
    return f"context that fits: {'; '.join(parts)}"


def _speed_lines(fit: Fit) -> list[str]:
    bandwidth = fit.machine.bandwidth
    if bandwidth is None:
        return []
    counts = dict.fromkeys((1, fit.num_seqs))
    speeds = [
        f"{fit.footprint.tokens_per_second(bandwidth, fit.context, n):.0f} tokens/s "
        + ("alone" if n == 1 else f"at {n} together")
        for n in counts
    ]
    return [
        f"speed at that context, an estimate at most: {', '.join(speeds)} (bytes read over "
        f"{bandwidth / 1e9:g} GB/s, and {LAUNCHES_PER_LAYER} launches of "
        f"{LAUNCH_SECONDS * 1e6:g} us per layer; not measured on a Mac)"
    ]


def _verdict(fit: Fit, ways_out: list[str]) -> str:
    if fit.is_yes:
        free, needed = fit.machine.free, fit.nbytes
        if free is not None and free < needed:
            return f"yes, once other programs free {format_nbytes(needed - free)}"
        return "yes"
    if ways_out:
        return f"yes, with {', or '.join(ways_out)}"
    if not fit.loads:
        return f"no: the weights alone exceed {_limit(fit)}; {REMEDY}"
    return f"no: the weights leave memory for {fit.longest_context(1):,} tokens of K/V; {REMEDY}"


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 1e8 else f"{number / 1e6:.1f} million"
