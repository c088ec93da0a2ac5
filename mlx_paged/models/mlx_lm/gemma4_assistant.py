"""Gemma 4's assistants, which draft with queries alone: they attend to the K/V that the model has
stored.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.base import Module

from mlx_paged.cache import LayerKV
from mlx_paged.errors import UnsuitableModelError
from mlx_paged.models.language_model import LanguageModel, model_type_of
from mlx_paged.models.mlx_lm.attention import PackedKV
from mlx_paged.models.mlx_lm.draft_head import Head, embedding_of

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
# The logit of tokens near no chosen centroid. It is finite, since a grammar may allow no others.
FAR = -1e4
# What an assistant's layers lack, whatever its configuration says or leaves out.
_WITHOUT = {
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
}


class Assistant(Head):
    """An assistant of a Gemma 4 model, with random weights.

    Its layers read the K/V of the model's last layer of their kind (full or sliding attention) that
    has K/V of its own, so it keeps none. All drafts of a round have the position of the last token
    with K/V; only their tokens and rows differ.

    Args:
        target: the model that it drafts for. Its embedding is used.
        config: the assistant's ``config.json``.

    Raises:
        UnsuitableModelError: it is not one of this model.
    """

    model: Any
    _layers_to_read: dict[str, int]

    def __init__(self, target: LanguageModel, config: dict[str, Any]):
        super().__init__(target, "assistant")
        text = self._text
        if getattr(text, "model_type", None) != "gemma4_text":
            raise UnsuitableModelError(
                f"it reads the K/V of a Gemma 4, and the model is a {model_type_of(target)}"
            )
        module: Any = importlib.import_module("mlx_lm.models.gemma4_text")
        own = config["text_config"]
        args = module.ModelArgs.from_dict(
            own | _WITHOUT | {"num_kv_shared_layers": own["num_hidden_layers"]}
        )
        for name, mine, theirs in (
            ("hidden_size", config.get("backbone_hidden_size"), text.args.hidden_size),
            ("vocab_size", args.vocab_size, text.args.vocab_size),
        ):
            if mine != theirs:
                raise UnsuitableModelError(
                    f"it is for a model whose {name} is {mine}, and this one's is {theirs}"
                )
        size = args.hidden_size
        self.pre_projection = nn.Linear(2 * self.hidden_size, size, bias=False)
        self.post_projection = nn.Linear(size, self.hidden_size, bias=False)
        self.model = Module()
        self.model.embed_tokens = nn.Embedding(args.vocab_size, size)
        self.model.layers = [
            module.DecoderLayer(args, layer_idx=index) for index in range(args.num_hidden_layers)
        ]
        self.model.norm = nn.RMSNorm(size, eps=args.rms_norm_eps)
        if config.get("use_ordered_embeddings"):
            self.masked_embedding = Module()
            num_centroids = config.get("num_centroids", 2048)
            self.masked_embedding.centroids = nn.Linear(size, num_centroids, bias=False)
            self.masked_embedding.token_ordering = mx.arange(args.vocab_size, dtype=mx.int32)
        self.num_chosen: int = config.get("centroid_intermediate_top_k", 32)
        self.softcap: float | None = own.get("final_logit_softcapping")
        to_read = _layers_to_read(target, text.args, self.model.layers)
        object.__setattr__(self, "_layers_to_read", to_read)
        self._complete()

    @property
    def num_layers(self) -> int:
        return len(self.model.layers)

    @property
    def reads_embedding(self) -> bool:
        return "masked_embedding" not in self

    def draft(
        self, tokens: mx.array, hidden: mx.array, layers: Sequence[LayerKV]
    ) -> tuple[mx.array, mx.array]:
        positions = layers[0].step.positions
        stored = {
            kind: PackedKV(layers[index], positions).fetch_stored()
            for kind, index in self._layers_to_read.items()
        }
        embedding = embedding_of(self._text)(tokens) * self._text.model.embed_scale
        x = self.pre_projection(mx.concatenate([embedding, hidden], axis=-1))[:, None]
        for layer in self.model.layers:
            x, _, _ = layer(x, shared_kv=stored[layer.layer_type], offset=positions)
        normed = self.model.norm(x.squeeze(1))
        return self._logits(normed), self.post_projection(normed)

    def _logits(self, rows: mx.array) -> mx.array:
        embed: Any = self.model.embed_tokens
        if "masked_embedding" not in self:
            logits: mx.array = embed.as_linear(rows)
            cap = self.softcap
            return logits if cap is None else mx.tanh(logits / cap) * cap
        # Those of the tokens near the centroids with the largest scores.
        centroids, ordering = (
            self.masked_embedding[key] for key in ("centroids", "token_ordering")
        )
        scores = centroids(rows)
        count = self.num_chosen
        chosen = mx.argpartition(-scores, kth=count - 1, axis=-1)[:, :count]
        near = ordering.reshape(scores.shape[-1], -1)[chosen].flatten(1)
        logits = (embed(near) @ rows[..., None]).squeeze(-1)
        others = mx.full((len(rows), len(ordering)), FAR, logits.dtype)
        return mx.put_along_axis(others, near, logits, axis=-1)


def _layers_to_read(target: LanguageModel, args: Any, layers: Sequence[Any]) -> dict[str, int]:
    """By kind of layer, the number of the cache's layer to read."""
    kinds = args.layer_types[: args.num_hidden_layers - args.num_kv_shared_layers]
    last = {kind: index for index, kind in enumerate(kinds)}
    caches, read = target.stock_caches(), {}
    for layer in layers:
        kind, attention = layer.layer_type, layer.self_attn
        index = caches[last[kind]][1] if kind in last else None
        spec = None if index is None else target.layer_specs[index]
        if index is None or spec is None:
            raise UnsuitableModelError(f"the model has no K/V of a layer of {kind}")
        if spec.key_dim != attention.head_dim or attention.n_heads % spec.num_kv_heads:
            raise UnsuitableModelError(
                f"its {attention.n_heads} heads of {attention.head_dim} numbers don't fit the "
                f"model's {spec.num_kv_heads} of {spec.key_dim} in layers of {kind}"
            )
        read[kind] = index
    return read
