"""A small model of the same class in float32, which shows faults that a large one shows only far
into a prompt.

It has the switches of the model's configuration and the first layers of each kind in the same
order, but is narrow and has windows of a few tokens. Its weights are random: what a class does with
its caches does not depend on them, and in float32 rounding explains little. Numbers of the
configuration only become smaller, so a small one stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged.models.mlx_lm.model_args import EXPERTS_PER_TOKEN, OTHER_PARTS
from mlx_paged.options.argument_values import is_plain_integer

Config = dict[str, Any]

# This many take some 0.1 s to make.
MAX_NUM_PARAMETERS = 2**25
# Of random matrices, times the square root of their fan-in. With smaller weights, a token hardly
# depends on earlier ones.
_GAIN = 1.3
_NOISE = 0.1

# The most tokens in a window, chunk or selection of a small model, and in its original context.
WINDOW = 8
ORIGINAL_CONTEXT = 16
VOCAB_SIZE = 512
_HEAD_DIM = 32
_NUM_HEADS = 4
_NUM_KV_HEADS = 2
_NUM_EXPERTS = 4

# Names of mlx-lm's ModelArgs; of heads, the first one that a configuration has is the main one.
_HIDDEN_SIZES = ("hidden_size", "d_model", "model_dim", "n_embd", "hidden_dim", "block_dim")
_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "swa_num_attention_heads",
    "num_swa_attention_heads",
)
_KV_HEADS = (
    "num_key_value_heads",
    "n_kv_heads",
    "num_kv_heads",
    "kv_n_heads",
    "num_global_key_value_heads",
    "num_attention_groups",
    "swa_num_key_value_heads",
    "num_swa_key_value_heads",
)
_HEAD_DIMS = ("head_dim", "hidden_size_per_head", "kv_channels")
_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "zero_expert_num",
)
_VOCAB_SIZES = ("vocab_size", "vocab_size_per_layer_input", "embedding_size", "num_vocab")
# The most that a number may be, by its name; the first pattern that matches the whole name counts.
_AT_MOST = {
    r"(\w+_)?window(_size|_length)?|attention_chunk_size|index_topk|floor_scale": WINDOW,
    r"original_max_position_embeddings": ORIGINAL_CONTEXT,
    r"(index|blocksparse_num)_local_blocks": 1,
    r"index_topk_blocks|blocksparse_vert_stride|(mamba_)?n_groups|group_norm_size|n_shared_head": 2,
    r"index_block_size|mamba_(n|num)_heads|index_n_heads|n_heads_in_group": _NUM_HEADS,
    r"\w+_low_rank_dim|(laurel|time_step|mamba_dt)_rank": 8,
    r"qk_[nr]ope_head_dim|mamba_(d_head|head_dim)|hidden_size_per_layer_input|rotary_dim": 16,
    r"(moe|shared)_(\w+_)?intermediate_size|\w*expert_\w*(size|dim)|moe_latent_size": _HEAD_DIM,
    r"(\w+_)?intermediate_size(_mlp)?|(ffn|mlp|moe)_hidden_size|n_inner": 128,
    r"block_ff_dim|global_head_dim": 128,
    r"(\w+_)?head_dim|hidden_size_per_head|kv_channels|\w+_lora_rank": _HEAD_DIM,
    r"mamba_d_state|(ssm_)?state_size|block_multiple_of|blocksparse_block_size": _HEAD_DIM,
}
# Lists of RoPE factors, one for each rotated pair of a head.
_FACTORS = ("long_factor", "short_factor")
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
# The number of last layers that share the K/V of others.
NUM_SHARING_LAYERS = ("num_kv_shared_layers", "num_kv_reuse_layers")


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


def _cuts(model: Module, config: Config) -> list[ModelCut]:
    """The cuts to try, smallest model first."""
    layers: Sequence[Module] = getattr(model, "layers", ())
    text = {**config, **(config.get("text_config") or {})}
    num_sharing = max(text.get(name) or 0 for name in NUM_SHARING_LAYERS)
    num_first = _num_first_of_all_kinds(layers[: len(layers) - num_sharing], model)
    num_kept = min(len(layers), num_first * (2 if num_sharing else 1))
    all_layers = len(layers)
    cuts = [(kept, small) for kept in (num_kept, all_layers) for small in (True, False)]
    return [ModelCut(all_layers, kept, small) for kept, small in dict.fromkeys(cuts)]


def _num_first_of_all_kinds(layers: Sequence[Module], model: Module) -> int:
    """The number of first layers in which each kind of layer occurs; at least two if possible."""
    caches = make_prompt_cache(model)
    has_one_each = len(caches) >= len(layers)
    first: dict[str, int] = {}
    for index, layer in enumerate(layers):
        cache = caches[index] if has_one_each else None
        switches = [
            (
                path,
                type(module).__name__,
                sorted(each for each in vars(module).items() if isinstance(each[1], bool)),
            )
            for path, module in layer.named_modules()
        ]
        first.setdefault(repr((type(cache), getattr(cache, "max_size", 0), switches)), index)
    return max([min(2, len(layers)), *(index + 1 for index in first.values())])


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


@dataclass(frozen=True)
class ModelCut:
    """How a small model is cut.

    Attributes:
        num_layers: of the original model.
        num_kept: the number of first layers that the small one has.
        small_vocabulary: whether its vocabulary is cut, too.
    """

    num_layers: int
    num_kept: int
    small_vocabulary: bool = True


def small_config(config: Config, cut: ModelCut) -> Config:
    """The configuration of a small model of the same architecture.

    Args:
        config: the content of ``config.json``, which is not changed. Its ``text_config`` is made
            small, too; those of vision and audio are left out.
    """
    small = {
        name: _small(name, each, cut) for name, each in config.items() if name not in OTHER_PARTS
    }
    _narrow_heads(small, config)
    _keep_sums(small, config)
    return small


def _small(name: str, value: Any, cut: ModelCut) -> Any:
    if isinstance(value, dict):
        return small_config(value, cut)
    if isinstance(value, list | tuple | str):
        # One entry per layer; in nemotron_h a text with a letter per layer.
        if len(value) == cut.num_layers and name not in _FACTORS:
            value = value[: cut.num_kept]
        return value if isinstance(value, str) else type(value)(_small(name, e, cut) for e in value)
    limits = (most for pattern, most in _AT_MOST.items() if re.fullmatch(pattern, name))
    limit = next(limits, None)
    if name in _VOCAB_SIZES and cut.small_vocabulary:
        limit = VOCAB_SIZE
    elif cut.num_kept < cut.num_layers and name in (*_NUM_LAYERS, *NUM_SHARING_LAYERS):
        limit = cut.num_kept if name in _NUM_LAYERS else cut.num_kept // 2
    return min(value, limit) if limit is not None and is_plain_integer(value, 1) else value


def _numbers(config: Config, names: Iterable[str]) -> dict[str, int]:
    """The positive integers under these names."""
    return {name: config[name] for name in names if is_plain_integer(config.get(name), 1)}


def _narrow_heads(small: Config, config: Config) -> None:
    """Reduce the number of heads, which stay grouped if they were, and the width of the model."""
    heads, kv_heads = _numbers(config, _HEADS), _numbers(config, _KV_HEADS)
    for name, number in heads.items():
        small[name] = min(number, _NUM_HEADS)
    for name, number in kv_heads.items():
        is_grouped = number not in heads.values()
        small[name] = min(number, _NUM_KV_HEADS if is_grouped else _NUM_HEADS)
    sizes = _numbers(config, _HIDDEN_SIZES)
    if not sizes:
        return
    hidden_size = next(iter(sizes.values()))
    num_heads = next(iter(heads.values()), None)
    # The head dimension follows from these two unless the configuration gives it.
    derived = hidden_size // num_heads if num_heads else _HEAD_DIM
    named = _numbers(config, _HEAD_DIMS)
    head_dim = min(next(iter(named.values()), derived), _HEAD_DIM)
    narrow = min(num_heads or _NUM_HEADS, _NUM_HEADS) * head_dim
    for name, size in sizes.items():
        small[name] = min(size, narrow)
    if not named and num_heads:
        _shorten_factors(small, head_dim / derived)


def _shorten_factors(small: Config, share: float) -> None:
    for value in small.values():
        if isinstance(value, dict):
            for name in _FACTORS:
                factors = value.get(name)
                if isinstance(factors, list) and len(factors) > 1:
                    value[name] = factors[: max(1, round(len(factors) * share))]


def _keep_sums(small: Config, config: Config) -> None:
    """Adapt numbers that follow from others of the configuration."""
    given = _numbers(config, config)
    if "mamba_d_ssm" in given:
        small["mamba_d_ssm"] = small["mamba_n_heads"] * small["mamba_d_head"]
    if "qk_head_dim" in given:
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    keys, values = given.get("linear_num_key_heads"), given.get("linear_num_value_heads")
    if keys and values:
        small["linear_num_key_heads"] = min(keys, 2)
        small["linear_num_value_heads"] = min(keys, 2) * min(values // keys, 2)
    # Each group has more experts than a token chooses in it.
    chosen = max(_numbers(config, EXPERTS_PER_TOKEN).values(), default=0)
    groups = max(_numbers(config, ("n_group", "num_expert_group")).values(), default=1)
    num_experts = max(groups * (1 - -chosen // groups), _NUM_EXPERTS)
    for name, number in _numbers(config, _EXPERTS).items():
        small[name] = min(number, num_experts)
