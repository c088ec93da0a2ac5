"""The charts themselves: from the JSON lines of benchmarks to figures."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.cache.restart import COMPUTED, FROM_CACHE, FROM_DEVICE
from benchmarks.lib import chart_style as style

MIB = 2**20
MLX_LM = "mlx-lm"


def setting_line(result: dict[str, Any], *names: str) -> str:
    """The machine, and what these entries of a setting say."""
    setting = result["setting"]
    place = "CPU" if "cpu" in setting["device"] else "GPU"
    machine = (
        f"{setting['processor']}, {setting['cores']} cores, {setting['system']}, on its {place}"
    )
    versions = f"MLX {setting['mlx']}, mlx-lm {setting['mlx_lm']}, BLAS: {setting['blas']}"
    return "\n".join([f"{machine}; {versions}", *(f"{name}: {setting[name]}" for name in names)])


# Approaches


def draw_approaches(result: dict[str, Any]) -> Figure:
    rows: dict[str, dict[str, Any]] = result["results"]["approaches"]
    names = list(rows)
    figure, panels = style.make_panels(4, 4.9, sharey=True)
    context, speed, first, memory = panels
    context.set_yticks(range(len(names)), names)
    context.invert_yaxis()
    _draw_contexts(context, rows)
    together = [row["tokens_per_second"]["together"] for row in rows.values()]
    _draw_bars(speed, together, names, [f"{value:,.0f}" for value in together])
    speed.set_title("tokens/s, 8 together")
    _draw_first_tokens(first, rows)
    held = [row["kv_nbytes"] / MIB for row in rows.values()]
    _draw_bars(memory, held, names, [f"{value:.1f}" for value in held])
    memory.set_title("K/V at peak, MiB")
    for panel in panels:
        panel.tick_params(axis="y", length=0)
        panel.grid(visible=False, axis="y")
    lines = [
        setting_line(result, "model", "budget", "together", "first tokens"),
        'Each line with "sharing" is prefix sharing and this one thing more; they do not add up. '
        "No limit: none but the model's own.",
        "After a restart: files from the page cache; what keeps no files computes as at first.",
    ]
    style.write_setting(figure, "\n".join(lines))
    return figure


def _colour(name: str) -> str:
    if name == MLX_LM:
        return style.THEIRS
    return style.NEUTRAL if name == "no cache" else style.OURS


def _draw_bars(axes: Axes, values: list[float], names: list[str], labels: list[str]) -> None:
    bars = axes.barh(range(len(values)), values, color=[_colour(name) for name in names])
    axes.bar_label(bars, labels, padding=3, fontsize=9)
    axes.set_xlim(0, max(values) * 1.25)
    style.plain_numbers(axes.xaxis)


def _draw_contexts(axes: Axes, rows: dict[str, dict[str, Any]]) -> None:
    """Bars; those without a limit reach the edge."""
    contexts = {name: row["longest_context"] for name, row in rows.items()}
    limits = [each["num_tokens"] for each in contexts.values()]
    edge = 1.4 * max([each for each in limits if each] or [1])
    values = [edge if limit is None else limit for limit in limits]
    labels = ["" if limit is None else f"{limit:,}" for limit in limits]
    _draw_bars(axes, values, list(rows), labels)
    axes.set_xlim(0, edge)
    for place, limit in enumerate(limits):
        if limit is None:
            axes.text(edge * 0.96, place, "no limit", color="white", ha="right", va="center")
    axes.set_title("longest context")


def _draw_first_tokens(axes: Axes, rows: dict[str, dict[str, Any]]) -> None:
    """Of an approach that forgets with its process, the time after a restart is the cold one."""
    for place, row in enumerate(rows.values()):
        times = [1e3 * row["ttft"][key] for key in ("cold", "warm")]
        axes.plot(times, [place, place], color=style.GRID, zorder=1)
    kinds = [
        ("cold", "first time", style.NEUTRAL, "o"),
        ("warm", "again", style.OURS, "s"),
        ("restarted", "after a restart", style.OTHER, "D"),
    ]
    for key, label, colour, marker in kinds:
        shown = [
            (1e3 * row["ttft"][key], place)
            for place, row in enumerate(rows.values())
            if key != "restarted" or row["survives"]
        ]
        axes.plot(*zip(*shown, strict=True), marker, color=colour, label=label, zorder=2)
    axes.set_xscale("log")
    style.plain_numbers(axes.xaxis)
    axes.set_title("first token, ms (log)")
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.07),
        ncols=3,
        columnspacing=0.8,
        handletextpad=0.1,
        borderpad=0,
    )


# Serving


def draw_serving(result: dict[str, Any]) -> Figure:
    counted, shared = result["results"]["at_once"], result["results"]["shared_prefix"]
    figure, (speed, memory, first) = style.make_panels(3, 3.6)
    counts = [each["num_requests"] for each in counted]
    sides = (("mlx_paged", style.OURS, "o-"), ("mlx-lm", style.THEIRS, "s-"))
    for name, colour, line in sides:
        own = [each["sides"][name] for each in counted]
        speeds = [each["tokens_per_second"] for each in own]
        speed.plot(counts, speeds, line, color=colour, label=name)
        memory.plot(counts, [each["kv_peak"] / MIB for each in own], line, color=colour, label=name)
    live = [each["sides"]["mlx_paged"]["live_kv_peak"] / MIB for each in counted]
    memory.plot(counts, live, ":", color=style.FAINT, label="tokens alone")
    for axes, title in ((speed, "tokens/s"), (memory, "K/V at peak, MiB")):
        style.powers_of_two(axes, counts)
        style.plain_numbers(axes.yaxis)
        axes.set_title(title)
        axes.set_xlabel("requests at once")
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left")
    _draw_shared_prefix(first, shared)
    style.write_setting(figure, setting_line(result, "shape", "at once", "shared prefix"))
    return figure


def _draw_shared_prefix(axes: Axes, shared: list[dict[str, Any]]) -> None:
    prefixes = [each["prefix"] for each in shared]
    for when, name, label, colour, line in (
        ("new", "mlx-lm", "mlx-lm", style.THEIRS, "s-"),
        ("seen", "mlx-lm + prompt cache", "mlx-lm, seen before", style.THEIRS, "s--"),
        ("new", "mlx_paged", "mlx_paged", style.OURS, "o-"),
        ("seen", "mlx_paged", "mlx_paged, seen before", style.OURS, "o--"),
    ):
        times = [1e3 * each[when][name]["ttft_median"] for each in shared]
        axes.plot(prefixes, times, line, color=colour, label=label)
    axes.set_yscale("log")
    longest = max(prefixes)  # labels of short ones would overlap
    axes.set_xticks(
        prefixes, [f"{each:,}" if not 0 < each < longest / 4 else "" for each in prefixes]
    )
    style.plain_numbers(axes.yaxis)
    axes.set_title("first token, median, ms")
    axes.set_xlabel("shared prefix, tokens")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, handlelength=2.5)


# Few rows

SHOWN_CHIPS = ("M1 Max", "M3 Max", "M4 Pro", "M5 Max")


def draw_few_rows(result: dict[str, Any]) -> Figure:
    """The cost of steps over rows, of 4 bits; the fainter lines are of 8 bits."""
    rows = {(row["chip"], row["bits"]): row["costs"] for row in result["results"]}
    figure, panels = style.make_panels(len(SHOWN_CHIPS), 3.4, sharey=True)
    for axes, chip in zip(panels, SHOWN_CHIPS, strict=True):
        for bits, width in ((4, 2.0), (8, 0.9)):
            for matmul, colour in (("mlx", style.THEIRS), ("rows", style.OURS)):
                costs = rows[chip, bits][matmul]
                name = {"mlx": "MLX", "rows": "rows_matmul"}[matmul]
                axes.plot(
                    list(map(int, costs)),
                    list(costs.values()),
                    "o-",
                    color=colour,
                    linewidth=width,
                    markersize=2 * width,
                    label=f"{name}, {bits} bits",
                )
        style.powers_of_two(axes, [1, 2, 4, 8, 16])
        axes.set_title(chip)
        axes.set_xlabel("rows of a step")
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("cost over one row by MLX")
    panels[1].legend(loc="upper left")
    setting = result["setting"]
    text = f"{setting['figures']}. Time: {setting['time']}.\nLayers: {setting['layers']}; weights: "
    style.write_setting(figure, text + setting["weights"])
    return figure


# Restart

WAYS = (
    (COMPUTED, "computed", style.NEUTRAL, "o--"),
    (FROM_DEVICE, "read from the device", style.OTHER, "D-"),
    (FROM_CACHE, "read from the page cache", style.OURS, "s-"),
)
MODEL_NAMES = {
    "demo": "The demo model",
    "qwen3-0.6b": "The shape of Qwen3-0.6B, random weights",
}


def draw_restart(result: dict[str, Any]) -> Figure:
    """Lines through medians, and a dot for each run."""
    rows, setting = result["results"], result["setting"]
    lengths = [row["length"] for row in rows]
    figure, (times, ratios) = style.make_panels(2, 4.4)
    for way, label, colour, line in WAYS:
        if way not in rows[0]["seconds"]:
            continue
        times.plot(lengths, [row["seconds"][way] for row in rows], line, color=colour, label=label)
        _draw_runs(times, [(row["length"], _seconds(row, way)) for row in rows], colour)
        if way != COMPUTED:
            over = [row["computed_over"][way] for row in rows]
            ratios.plot(lengths, over, line, color=colour, label=label)
            runs = [
                (
                    row["length"],
                    [
                        a / b
                        for a, b in zip(_seconds(row, COMPUTED), _seconds(row, way), strict=True)
                    ],
                )
                for row in rows
            ]
            _draw_runs(ratios, runs, colour)
    times.set_yscale("log")
    times.set_title("seconds to the first token (log scale)")
    ratios.set_ylim(bottom=0)
    ratios.set_title("time computed / time read")
    for axes in (times, ratios):
        style.plain_numbers(axes.yaxis)
        axes.set_xlabel("tokens of the prompt")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    times.set_ylim(top=10 * times.get_ylim()[1])  # room for the legend
    times.legend(loc="upper left", handlelength=3)
    model = str(setting["model"])
    lines = [
        setting_line(result),
        f"{MODEL_NAMES.get(model, model)}: {setting['shape']}",
        "Lines join medians; small dots are single runs, each in a fresh process. Page cache: the "
        "files were written a moment before.",
        "Device: the same files, after the system had dropped them from its page cache.",
    ]
    style.write_setting(figure, "\n".join(lines))
    return figure


def _seconds(row: dict[str, Any], way: str) -> list[float]:
    return [each["seconds_to_first_token"] for each in row["runs"][way]]


def _draw_runs(axes: Axes, runs: list[tuple[int, list[float]]], colour: str) -> None:
    for length, values in runs:
        axes.plot([length] * len(values), values, ".", color=colour, markersize=4, alpha=0.6)
