"""A small model of the same class in float32, which shows faults that a large one shows only far
into a prompt.

It has the switches of the model's configuration and the first layers of each kind in the same
order, but is narrow and has windows of a few tokens. Its weights are random: what a class does with
its caches does not depend on them, and in float32 rounding explains little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged.models.mlx_lm.small_config import (
    NUM_SHARING_LAYERS,
    VOCAB_SIZE,
    Config,
    Cut,
    small_config,
)

# This many take some 0.1 s to make.
MAX_NUM_PARAMETERS = 2**25
# Of random matrices, times the square root of their fan-in. With smaller weights, a token hardly
# depends on earlier ones.
_GAIN = 1.3
_NOISE = 0.1


def small_copy(model: Module, config: Config) -> tuple[Module, Config] | None:
    """A small model of the same class, evaluated, and its configuration; ``None`` if the model is
    small itself, or its class can't be built from a small configuration.

    Args:
        model: one of mlx-lm.
        config: its ``config.json``.
    """
    config = {
        name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for name, value in config.items()
    }
    cuts = _cuts(model, config)
    if small_config(config, cuts[-1]) == config and _is_float32(model):
        return None
    for cut in cuts:
        small = small_config(config, cut)
        if cut.small_vocabulary:
            small = {"vocab_size": VOCAB_SIZE, **small}
        try:
            copy = _build(model, small)
        except Exception:
            continue  # A class may require anything of its configuration.
        if copy is not None:
            return copy, small
    return None


def _cuts(model: Module, config: Config) -> list[Cut]:
    """The cuts to try, smallest model first."""
    layers: Sequence[Module] = getattr(model, "layers", ())
    text = {**config, **(config.get("text_config") or {})}
    num_sharing = max(text.get(name) or 0 for name in NUM_SHARING_LAYERS)
    num_first = _num_first_of_all_kinds(layers[: len(layers) - num_sharing], model)
    num_kept = min(len(layers), num_first * (2 if num_sharing else 1))
    all_layers = len(layers)
    cuts = [(kept, small) for kept in (num_kept, all_layers) for small in (True, False)]
    return [Cut(all_layers, kept, small) for kept, small in dict.fromkeys(cuts)]


def _num_first_of_all_kinds(layers: Sequence[Module], model: Module) -> int:
    """The number of first layers in which each kind of layer occurs; at least two if possible."""
    caches = make_prompt_cache(model)
    has_one_each = len(caches) >= len(layers)
    first: dict[str, int] = {}
    for index, layer in enumerate(layers):
        cache = caches[index] if has_one_each else None
        switches = [
            (path, type(module).__name__, sorted(_switches(module)))
            for path, module in layer.named_modules()
        ]
        first.setdefault(repr((type(cache), getattr(cache, "max_size", 0), switches)), index)
    return max([min(2, len(layers)), *(index + 1 for index in first.values())])


def _switches(module: Module) -> list[tuple[str, bool]]:
    return [(name, value) for name, value in vars(module).items() if isinstance(value, bool)]


def _is_float32(model: Module) -> bool:
    return all(
        weight.dtype == mx.float32
        for weight in dict(tree_flatten(model.parameters())).values()
        if mx.issubdtype(weight.dtype, mx.floating)
    )


def _build(model: Module, config: Config) -> Module | None:
    """``None`` if the model is not small, or differs from the original in its caches or tokens."""
    model_class: Any = type(model)
    # mlx-lm's convention: a model and its ModelArgs are in the same module.
    args_class = model_class.__init__.__globals__["ModelArgs"]
    with _own_random_numbers():
        copy: Module = model_class(args_class.from_dict(config))
        weights = dict(tree_flatten(copy.parameters()))
        if sum(weight.size for weight in weights.values()) > MAX_NUM_PARAMETERS:
            return None
        copy.update(tree_unflatten({name: _random(weight) for name, weight in weights.items()}))
        copy.eval()
        mx.eval([value for module in copy.modules() for value in module.values()])
    if _cache_kinds(copy) != _cache_kinds(model) or _knows_other_tokens(copy, config):
        return None
    # Raises if shapes do not fit each other.
    mx.eval(copy(mx.zeros((1, 2), dtype=mx.int32), cache=make_prompt_cache(copy)))
    return copy


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Seed MLX's random numbers, and restore the user's state afterwards."""
    state: Any = mx.random.state
    high, low = state[0].tolist()
    mx.random.seed(0)
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)


def _random(weight: mx.array) -> mx.array:
    if not mx.issubdtype(weight.dtype, mx.floating):
        return weight
    noise: mx.array = mx.random.normal(weight.shape)
    if weight.ndim > 1 and min(weight.shape[-2:]) > 1:
        noise *= _GAIN * weight.shape[-1] ** -0.5
        return noise
    noise = weight.astype(mx.float32) + _NOISE * noise
    return noise


def _cache_kinds(model: Module) -> set[type]:
    return {type(cache) for cache in make_prompt_cache(model)}


def _knows_other_tokens(model: Module, config: dict[str, Any]) -> bool:
    """Whether a model has constants with token ids beyond its vocabulary: phi3small masks tokens by
    their ids, and would write beyond its logits.
    """
    text = config.get("text_config")
    sizes = [source.get("vocab_size") for source in (config, text) if isinstance(source, dict)]
    size = min(filter(None, sizes), default=0)
    parameters = set(map(id, dict(tree_flatten(model.parameters())).values()))
    return any(
        isinstance(value, mx.array)
        and value.size > 0
        and mx.issubdtype(value.dtype, mx.integer)
        and id(value) not in parameters
        and mx.any(value >= size).item()
        for module in model.modules()
        for value in module.values()
    )
