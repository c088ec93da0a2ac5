"""Qwen3 for packed input: the tokens of a whole ragged batch on one axis, each with its position.

The architecture is that of the Qwen3 technical report (Yang et al., 2025): grouped-query attention
with an RMSNorm on each query and key head, RoPE, SwiGLU, pre-norm. Weight names are those of the
Hugging Face checkpoints. Attention goes through ``update_and_attend`` of a layer, whichever cache
it belongs to.

In the forward pass, submodules are looked up as items: an attribute lookup, which ``nn.Module``
resolves in ``__getattr__``, takes half a microsecond more, and a step makes hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_linear
from mlx_lm.models.activations import swiglu
from mlx_lm.models.rope_utils import initialize_rope

from mlx_paged.cache import KVFormat, LayerKV, LayerSpec
from mlx_paged.models.decoder_args import DecoderArgs
from mlx_paged.models.language_model import (
    LanguageModel,
    check_divisible,
    check_linear_sizes,
    rotate_on,
    wanted_hidden_rows,
)
from mlx_paged.ops import device

# How the projections are split over ranks: by output, or by input with a sum of the results.
SHARDING = {
    "self_attn": {
        "q_proj": "all-to-sharded",
        "k_proj": "all-to-sharded",
        "v_proj": "all-to-sharded",
        "o_proj": "sharded-to-all",
    },
    "mlp": {
        "gate_proj": "all-to-sharded",
        "up_proj": "all-to-sharded",
        "down_proj": "sharded-to-all",
    },
}
SPLIT_SIZES = ("num_key_value_heads", "num_attention_heads", "intermediate_size")


@dataclass
class ModelArgs(DecoderArgs):
    """The fields of ``config.json`` that Qwen3 needs, under their names there."""

    family = "qwen3"

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    rms_norm_eps: float
    vocab_size: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool
    max_position_embeddings: int = 32768
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        self.check()


class Attention(nn.Module):
    def __init__(self, args: ModelArgs, window: int | None):
        super().__init__()
        self.window = window
        self.num_heads = args.num_attention_heads
        self.num_kv_heads = args.num_key_value_heads
        self.head_dim = args.head_dim
        self.scale = args.head_dim**-0.5

        self.q_proj = nn.Linear(args.hidden_size, self.num_heads * args.head_dim, bias=False)
        self.k_proj = nn.Linear(args.hidden_size, self.num_kv_heads * args.head_dim, bias=False)
        self.v_proj = nn.Linear(args.hidden_size, self.num_kv_heads * args.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * args.head_dim, args.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(args.head_dim, eps=args.rms_norm_eps)
        self.k_norm = nn.RMSNorm(args.head_dim, eps=args.rms_norm_eps)
        try:
            # It is called with one offset per row; nn.RoPE's annotation allows a single one.
            self.rope: Callable[..., mx.array] = initialize_rope(
                args.head_dim,
                base=args.rope_theta,
                traditional=False,
                scaling_config=args.rope_scaling,
                max_position_embeddings=args.max_position_embeddings,
            )
        except KeyError as error:
            raise ValueError(f"[qwen3] rope_scaling in config.json lacks {error}") from error
        # Its frequencies are not parameters, so nothing else evaluates them, and another thread
        # can't evaluate what this one leaves lazy.
        mx.eval(self.rope)

    def __call__(
        self,
        x: mx.array,  # [num_tokens, hidden_size]
        positions: mx.array,  # [num_tokens] int32
        kv: LayerKV,
        query_rows: mx.array | None = None,  # [num_rows] int32: no others are computed
    ) -> mx.array:
        k = self["k_norm"](self._heads(self["k_proj"](x)))
        v = self["v_proj"](x).reshape(x.shape[0], self.num_kv_heads, -1)
        if query_rows is None:
            q = self["q_norm"](self._heads(self["q_proj"](x)))
            q, k = self._rotate_both(q, k, positions)
        else:
            k = self.rope(k, offset=positions)
            x, positions = x[query_rows], positions[query_rows]
            q = self.rope(self["q_norm"](self._heads(self["q_proj"](x))), offset=positions)
        out = kv.update_and_attend(q.squeeze(2), k.squeeze(2), v, scale=self.scale)
        projected: mx.array = self["o_proj"](out.reshape(x.shape[0], -1))
        return projected

    def _heads(self, x: mx.array) -> mx.array:
        """``[num_tokens, heads * head_dim]`` as ``[num_tokens, heads, 1, head_dim]``.

        RoPE takes one offset per batch entry: here a token is a batch entry of length 1.
        """
        return x.reshape(x.shape[0], -1, 1, self.head_dim)

    def _rotate_both(
        self, q: mx.array, k: mx.array, positions: mx.array
    ) -> tuple[mx.array, mx.array]:
        rope = self["rope"]
        if not device.is_cpu():
            return rope(q, offset=positions), rope(k, offset=positions)
        # RoPE is one kernel on a GPU, and some thirty operations on a CPU.
        both = rope(mx.concatenate([q, k], axis=1), offset=positions)
        return both[:, : self.num_heads], both[:, self.num_heads :]


class MLP(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.gate_proj = nn.Linear(args.hidden_size, args.intermediate_size, bias=False)
        self.up_proj = nn.Linear(args.hidden_size, args.intermediate_size, bias=False)
        self.down_proj = nn.Linear(args.intermediate_size, args.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        projected: mx.array = self["down_proj"](swiglu(self["gate_proj"](x), self["up_proj"](x)))
        return projected


class TransformerBlock(nn.Module):
    """The modules of one layer; :class:`Model` runs them."""

    def __init__(self, args: ModelArgs, window: int | None):
        super().__init__()
        self.self_attn = Attention(args, window)
        self.mlp = MLP(args)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)


class Qwen3Model(nn.Module):
    """The modules that the checkpoints name ``model.*``; :class:`Model` runs them."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [TransformerBlock(args, window) for window in args.windows]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)


class Model(LanguageModel):
    """Qwen3 with its language-model head."""

    description = "qwen3, native"

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.tie_word_embeddings = args.tie_word_embeddings
        self.model = Qwen3Model(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(
        self, tokens: mx.array, layers: Sequence[LayerKV], logit_rows: mx.array | None = None
    ) -> mx.array:
        h, positions = self.model.embed_tokens(tokens), layers[0].offset
        hidden = wanted_hidden_rows()
        takes_all = hidden is not None and hidden.takes_all
        last = None if takes_all else layers[-1]
        for block, kv in zip(self.layers, layers, strict=True):
            # After the K and V of the last layer, only the rows with logits are needed.
            rows = logit_rows if kv is last else None
            attended = block["self_attn"](block["input_layernorm"](h), positions, kv, rows)
            h = attended + (h if rows is None else h[rows])
            h = h + block["mlp"](block["post_attention_layernorm"](h))
        x, h = h, self.model.norm(h)
        if hidden is not None:
            if takes_all:
                hidden.take(x, h)
                h = h if logit_rows is None else h[logit_rows]
            hidden.take_of_logits(h)
        return self.model.embed_tokens.as_linear(h) if self.tie_word_embeddings else self.lm_head(h)

    def shard(self, group: mx.distributed.Group | None = None) -> None:
        """As in mlx-lm: heads and the inner dimension of the MLP are split; embeddings, norms and
        the head are replicated.
        """
        group = group or mx.distributed.init()
        num_ranks = group.size()
        check_divisible({name: getattr(self.args, name) for name in SPLIT_SIZES}, num_ranks)
        summed = {"o_proj", "down_proj"}
        check_linear_sizes(self, summed, num_ranks)
        for block in self.layers:
            for part, projections in SHARDING.items():
                for name, sharding in projections.items():
                    linear = block[part][name]
                    block[part][name] = shard_linear(linear, sharding, group=group)
            block.self_attn.num_heads //= num_ranks
            block.self_attn.num_kv_heads //= num_ranks
        self.group = group

    def rotate_keys(self, layer: int, keys: mx.array, distance: int) -> mx.array:
        return rotate_on(self.layers[layer].self_attn.rope, keys, distance)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Drop the head of a checkpoint that also ties it to the embeddings."""
        if self.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        return weights

    @property
    def hidden_row_size(self) -> int:
        return self.model.norm.weight.size

    @property
    def layers(self) -> list[TransformerBlock]:
        return self.model.layers

    @property
    def dtype(self) -> mx.Dtype:
        # Norms are not quantised.
        return self.model.norm.weight.dtype

    @property
    def layer_specs(self) -> list[LayerSpec]:
        dense = KVFormat.dense(self.dtype)
        return [
            LayerSpec(a.num_kv_heads, a.head_dim, a.head_dim, a.window, dense, a.num_heads)
            for a in (block.self_attn for block in self.layers)
        ]
