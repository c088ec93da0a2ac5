"""Models with random weights."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from functools import cache

import mlx.core as mx
from metal_emulator import Checks, patched
from mlx.nn import Module
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

from helpers.model_zoo.configs import Config, config_of

# Architectures that are made of Metal kernels, and the modules that hold these.
METAL_KERNELS = {
    "bitnet": ("mlx_lm.models.bitlinear_layers",),
    "muse_spark": tuple(
        f"mlx_lm.kernels.{name}"
        for name in (
            "expert_routing",
            "norm_add_norm",
            "post_expert_norm_combine",
            "qk_norm",
            "qk_norm_rope",
            "rms_norm_sigmoid_gate",
        )
    ),
}

# Matrices, over the square root of their fan-in: with less, a token hardly feels the ones before.
GAIN = 1.3
NOISE = 0.1
# By the ends of their names. A state decays slowly enough that a token is still felt after a few
# dozen others, and ternary weights of 64 inputs are as large as other matrices.
CENTRES = {
    "weight_scale": 0.15,
    "dt_bias": -3.0,
    "dt_proj.bias": -3.0,
    "recurrent_param": -4.0,
    "w_lora.lora.2.bias": -5.0,
}


def make(architecture: str, seed: int = 0) -> Module:
    """A tiny model; see :func:`make_from_config`."""
    for name in METAL_KERNELS.get(architecture, ()):
        _emulate_kernels(name)
    return make_from_config(config_of(architecture), seed)


def make_from_config(config: Config, seed: int = 0) -> Module:
    """mlx-lm's model of a configuration, with random float32 weights."""
    model_class, args_class = _get_classes(config)
    mx.random.seed(seed)  # Some classes draw weights themselves, which are kept below.
    model: Module = model_class(args_class.from_dict(copy.deepcopy(config)))
    model.eval()
    model.update(tree_unflatten(list(_random_weights(model, seed))))
    mx.eval(model.parameters())
    return model


@cache
def _emulate_kernels(module_name: str) -> None:
    """Let the emulator run the kernels of a module, where there is no Metal."""
    module = importlib.import_module(module_name)
    if not mx.metal.is_available():
        with patched(Checks.quick()):
            # Functions that others have imported from it find the new kernels: they look them up
            # in this very module.
            importlib.reload(module)


def _random_weights(model: Module, seed: int) -> Iterator[tuple[str, mx.array]]:
    weights = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(seed), len(weights))
    for (name, old), key in zip(weights, keys, strict=True):
        yield name, _random_weight(name, old, key)


def _random_weight(name: str, old: mx.array, key: mx.array) -> mx.array:
    if not mx.issubdtype(old.dtype, mx.floating):
        # Packed numbers of two bits, of which ternary weights don't use 3.
        digits = mx.random.randint(0, 3, (*old.shape, 4 * old.itemsize), key=key)
        return (digits << mx.arange(0, 8 * old.itemsize, 2)).sum(-1).astype(old.dtype)
    noise = mx.random.normal(old.shape, key=key)
    centre = next((value for end, value in CENTRES.items() if name.endswith(end)), None)
    if centre is not None:
        return centre * (1 + NOISE * noise)
    if old.ndim >= 2 and min(old.shape[-2:]) > 1:
        return noise * (GAIN / old.shape[-1] ** 0.5)
    # Weights of norms stay near 1, biases near 0.
    return old.astype(mx.float32) + NOISE * noise
