"""How each architecture runs, and the tables of ``docs/guide/models.md`` that say so.

PYTHONPATH=tests:tools/metal-emulator python -m helpers.model_zoo.page

runs every architecture and writes them again; the tests hold them to what they find.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx_lm
from mlx.nn import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING

from helpers.model_zoo.answers import (
    NUM_TOKENS,
    PROMPTS,
    StockAnswers,
    answers_of,
    stock_answers,
)
from helpers.model_zoo.configs import ARCHITECTURES, SLIDING, Config, config_of
from helpers.model_zoo.models import make, make_from_config
from mlx_paged import Engine
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm import UnsuitableModelError, adapt
from mlx_paged.models.mlx_lm.trial import tried
from mlx_paged.options.engine_options import EngineOptions

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "models.md"
MARK = "<!-- {}: written by tests/helpers/model_zoo/page.py -->"

# Fields of configurations in which layers use K/V of other layers.
SHARED_KV = ("num_kv_shared_layers", "num_kv_reuse_layers")


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        way: "packed", "packed, with state", "per sequence", or "refused: " and why.
        traits: what it has.
    """

    architecture: str
    way: str
    traits: str

    def __str__(self) -> str:
        return f"| `{self.architecture}` | {self.way} | {self.traits} |"


def run(architecture: str, model: Module) -> Row:
    """Run the tiny model of an architecture, if it runs: in the way that the trial finds, which
    the table names.

    Raises:
        AssertionError: tokens or log-probabilities differ from mlx-lm's.
    """
    config = config_of(architecture)
    traits = traits_of(model, config)
    try:
        way = way_of(tried(model, config))
    except UnsuitableModelError as error:
        return Row(architecture, f"refused: {error}", traits)
    model, expected = with_clear_answers(config, model=model)
    adapted = adapt(model, config)
    assert way_of(adapted) == way, "the table says another way than the trial"
    check_answers(adapted, expected)
    return Row(architecture, way, traits)


def way_of(model: LanguageModel) -> str:
    """The way in which a model of mlx-lm runs, as its line at start has it."""
    way = model.description.split(" of mlx-lm, ")[1]
    return way.removesuffix(", its text part only")


def with_clear_answers(
    config: Config, prompts: Sequence[list[int]] = PROMPTS, model: Module | None = None
) -> tuple[Module, StockAnswers]:
    """The model of the first seed with which no step of mlx-lm's answers is a near tie, which
    rounding would decide; ``model`` is that of the first.
    """
    for seed in itertools.count():
        if model is None or seed:
            model = make_from_config(config, seed)
        expected = stock_answers(model, prompts)
        if expected.is_clear:
            return model, expected
    raise AssertionError  # count() has no end


def check_answers(
    model: LanguageModel,
    expected: StockAnswers,
    prompts: Sequence[list[int]] = PROMPTS,
    max_num_batched_tokens: int = 7,
) -> None:
    """All prompts at once, in ragged chunks; then the same, which finds their beginnings cached;
    then all but the first on a pool so small that one is preempted.
    """
    options: EngineOptions = {
        "block_size": 8,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": 4,
        "swap_bytes": 0,
    }
    engine = Engine(model, kv_cache_bytes=f"{sum(map(len, prompts))}blocks", **options)
    expected.check(answers_of(engine, prompts), "in chunks")
    num_cached = engine.stats().num_cached_prompt_tokens
    expected.check(answers_of(engine, prompts), "with a prefix hit")
    assert engine.stats().num_cached_prompt_tokens > num_cached
    # The prompts and the watermark, and no answer beside another; one alone has to fit.
    most_held = engine.manager.block_need.max_num_held_blocks
    num_blocks = max(
        sum(most_held(len(prompt)) for prompt in prompts[1:]) + 1,
        most_held(max(map(len, prompts[1:])) + NUM_TOKENS),
    )
    engine = Engine(model, kv_cache_bytes=f"{num_blocks}blocks", **options)
    expected.check(answers_of(engine, prompts[1:]), "with a preemption", first=1)
    # Where all layers have windows, requests don't grow.
    is_growing = any(spec.window is None for spec in model.layer_specs)
    assert (engine.stats().num_preemptions > 0) == is_growing


def traits_of(model: Module, config: Config) -> str:
    """Of a tiny model, separated by commas; a dash for none."""
    return ", ".join(_traits(model, config)) or "-"


def _traits(model: Module, config: Config) -> Iterator[str]:
    config = config | config.get("text_config", {})
    names = [name for name, _ in tree_flatten(model.parameters())]
    kinds = {type(cache).__name__ for cache in _caches(make_prompt_cache(model))}
    if any("expert" in name or "switch_mlp" in name for name in names):
        yield "experts"
    if "RotatingKVCache" in kinds or _has_windowed_layers(config):
        yield "windows"
    if "ChunkedKVCache" in kinds:
        yield "chunks"
    if config.get("attn_logit_softcapping"):
        yield "capped scores"
    if any("sink" in name for name in names):
        yield "sinks"
    if "kv_lora_rank" in config:
        yield "MLA"
    if any("index" in name for name in names):
        yield "indexer"
    if any(config.get(name) for name in SHARED_KV):
        yield "shared K/V"
    if "ArraysCache" in kinds:
        yield "state"


def _caches(caches: list) -> Iterator[object]:
    for cache in caches:
        parts = getattr(cache, "caches", None)  # of a CacheList
        yield from [cache] if parts is None else _caches(list(parts))


def _has_windowed_layers(config: Config) -> bool:
    return SLIDING in (config.get("layer_types") or ())


def rows_on_page() -> dict[str, Row]:
    """By architecture, in the order of the page."""
    cells = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+?) \|$", _part("table"), re.MULTILINE)
    return {name: Row(name, way, traits) for name, way, traits in cells}


def version_on_page() -> str:
    """Of mlx-lm, which the page is about."""
    found = re.search(r"mlx-lm (\S+) has", _part("counts"))
    assert found, "the page names no version"
    return found[1]


def write_page(rows: Sequence[Row]) -> None:
    parts = {"counts": _counts(rows), "table": _table(rows), "names": _names()}
    text = PAGE.read_text()
    for name, part in parts.items():
        mark = MARK.format(name)
        before, _, after = text.split(mark)
        text = f"{before}{mark}\n{part}\n{mark}{after}"
    PAGE.write_text(text)


def _part(name: str) -> str:
    """What lies between the marks."""
    mark = MARK.format(name)
    _, part, _ = PAGE.read_text().split(mark)
    return part


def _counts(rows: Sequence[Row]) -> str:
    counts = Counter(row.way.partition(":")[0] for row in rows)
    return (
        f"mlx-lm {mlx_lm.__version__} has {len(rows)} architectures. Here {counts['packed']} of "
        f"them run packed,\n{counts['per sequence']} per sequence and "
        f"{counts['packed, with state']} packed with state; {counts['refused']} are refused."
    )


def _table(rows: Sequence[Row]) -> str:
    lines = ["| architecture | runs | has |", "|---|---|---|", *map(str, rows)]
    return "\n".join(lines)


def _names() -> str:
    """The model types that are read by the module of another."""
    types = defaultdict(list)
    for model_type, module in MODEL_REMAPPING.items():
        types[module].append(f"`{model_type}`")
    for (model_type, kind), module in MODEL_ARCHITECTURE_REMAPPING.items():
        types[module].append(f"`{model_type}` ({kind})")
    lines = [f"| {', '.join(names)} | `{module}` |" for module, names in types.items()]
    return "\n".join(["| model type | architecture |", "|---|---|", *sorted(lines)])


if __name__ == "__main__":
    write_page([run(architecture, make(architecture)) for architecture in ARCHITECTURES])
