"""``fingerprint_of``: what the bytes of an engine's blocks and states depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.metadata import version

import mlx.core as mx

from mlx_paged.block_store import STORED_KV_VERSION, Fingerprint
from mlx_paged.cache import LayerSpec, PagedKVCache
from mlx_paged.core import KEEP_ALL, Retention
from mlx_paged.models.identity import ModelIdentity


def fingerprint_of(cache: PagedKVCache, identity: Sequence[ModelIdentity]) -> Fingerprint:
    """What the bytes of a block depend on besides its tokens."""
    config = cache.config
    layers = tuple(
        f"group {index}: {_described(config.layers[layer])}, {_kept(group.retention)}"
        for index, group in enumerate(config.groups)
        for layer in group.layers
    )
    layers += tuple(f"state {index}: {text}" for index, text in enumerate(config.state_layout))
    digests = "\n".join(each.digest for each in identity)
    formats = dict.fromkeys(str(spec.format) for spec in config.layers)
    return Fingerprint(
        model=hashlib.sha256(digests.encode()).hexdigest(),
        model_name=" + ".join(each.name for each in identity),
        layers=layers,
        kv_format=", ".join(formats),
        block_size=config.block_size,
        code=code_of(cache),
    )


def code_of(cache: PagedKVCache) -> str:
    """The code that computes and stores K/V: the version of what is stored, that of MLX, the
    backend and the device. They differ in rounding, and an answer must be the same as if it were
    computed here.
    """
    computer = f"{cache.backend.name} backend on a {mx.default_device().type.name}"
    return f"mlx_paged {STORED_KV_VERSION}, mlx {version('mlx')}, {computer}"


def _described(spec: LayerSpec) -> str:
    window = "" if spec.window is None else f", window {spec.window}"
    widths = f"K {spec.key_dim} and V {spec.value_dim} wide"
    return f"{spec.num_kv_heads} heads, {widths}{window}, {spec.format.description}"


def _kept(retention: Retention) -> str:
    return "all tokens" if retention == KEEP_ALL else str(retention)
