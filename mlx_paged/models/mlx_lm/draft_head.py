"""Heads that draft from the hidden rows of a model (multi-token prediction: DeepSeek-V3, 2024;
Gloeckle et al. 2024): a decoder layer of the model's own class, on the embedding of a token and the
hidden row of the token before it.

The pair of a slot is (hidden row of token i - 1, token i): it depends on the tokens of the slot and
those before it only, as the K/V of any layer do. So the layer is one more layer of the same cache.
Peers keep (hidden row of token i, token i + 1) there; rotations are relative, so the shift of all
positions by one does not change the layer's results.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.base import Module

from mlx_paged.cache import LayerKV, LayerSpec
from mlx_paged.errors import UnsuitableModelError, one_line
from mlx_paged.models.language_model import LanguageModel, model_type_of
from mlx_paged.models.mlx_lm.attention import AttentionPatch, PackedKV
from mlx_paged.models.mlx_lm.packed import NUM_TOKENS, PackedModel, RecordedKV


@dataclass(frozen=True)
class HeadLayout:
    """How the heads of a family name and join their parts.

    Attributes:
        projection: joins the two rows, ``[2 * hidden_size] -> [hidden_size]``.
        embedding_norm, hidden_norm: norms of the two rows.
        end_norm: after the layer, before the logits; ``None`` for no norm.
        is_embedding_first: the order of the two rows.
        is_zero_centred: whether published norms are stored as ``weight - 1``.
        takes_normed: whether the head takes the model's hidden rows after its last norm.
        carries_normed: whether its own row after ``end_norm`` takes the place of the hidden row for
            the next draft; otherwise the row before it.
        layer: the class of the layer in the module of mlx-lm, and the arguments after the
            configuration, from it.
    """

    module: str
    layer: str
    layer_arguments: Callable[[Any], tuple[Any, ...]]
    projection: str
    embedding_norm: str
    hidden_norm: str
    end_norm: str | None
    is_embedding_first: bool = True
    is_zero_centred: bool = False
    takes_normed: bool = True
    carries_normed: bool = True


def _mtp(module: str, layer: str, arguments: Callable[[Any], tuple[Any, ...]]) -> HeadLayout:
    """Qwen3-Next and later: ``mtp.*``."""
    return HeadLayout(
        module,
        layer,
        arguments,
        "fc",
        "pre_fc_norm_embedding",
        "pre_fc_norm_hidden",
        "norm",
        is_zero_centred=True,
    )


def _nextn(module: str, layer: str, carries_normed: bool) -> HeadLayout:
    """DeepSeek-V3 and GLM: the layers after the last one."""
    return HeadLayout(
        module,
        layer,
        lambda args: (args.num_hidden_layers,),
        "eh_proj",
        "enorm",
        "hnorm",
        "shared_head.norm",
        carries_normed=carries_normed,
    )


def _attention_layer(args: Any) -> tuple[int]:
    return (args.full_attention_interval - 1,)


# By the model type that mlx-lm runs. Qwen's rows are those after the last norm (llama.cpp #24025,
# LightLLM #1402); vLLM and SGLang do the same for DeepSeek and GLM. vLLM carries DeepSeek's row
# before the head's norm, and GLM's after it (vLLM #46075).
LAYOUTS = {
    "qwen3": _mtp("qwen3", "TransformerBlock", lambda args: ()),
    "qwen3_next": _mtp("qwen3_next", "Qwen3NextDecoderLayer", _attention_layer),
    "qwen3_5": _mtp("qwen3_5", "DecoderLayer", _attention_layer),
    "qwen3_5_moe": _mtp("qwen3_5", "DecoderLayer", _attention_layer),
    "glm4_moe": _nextn("glm4_moe", "DecoderLayer", carries_normed=True),
    "glm4_moe_lite": _nextn("glm4_moe_lite", "Glm4MoeLiteDecoderLayer", carries_normed=True),
    "deepseek_v3": _nextn("deepseek_v3", "DeepseekV3DecoderLayer", carries_normed=False),
}


class DraftHead(LanguageModel):
    """A head of a model, with random weights; :meth:`draft` runs it.

    Args:
        target: the model that it drafts for. Its embedding and its output layer are used, and not
            part of the head.
        layout: how the head's parts are joined.

    Raises:
        UnsuitableModelError: the layer can't run on packed input.
    """

    _text: Any
    _spec: LayerSpec

    def __init__(self, target: LanguageModel, layout: HeadLayout):
        super().__init__()
        text = text_model(target)
        args = text.args
        self.args, self.layout = target.args, layout
        self.model_type = f"{model_type_of(target)} head"
        self.description = f"{model_type_of(target)}, head"
        self.hidden_size = size = args.hidden_size
        self.projection = nn.Linear(2 * size, size, bias=False)
        self.embedding_norm = nn.RMSNorm(size, eps=args.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(size, eps=args.rms_norm_eps)
        if layout.end_norm is not None:
            self.end_norm = nn.RMSNorm(size, eps=args.rms_norm_eps)
        module = importlib.import_module(f"mlx_lm.models.{layout.module}")
        layer_class: Any = getattr(module, layout.layer)
        self.layer = cast(Module, layer_class(args, *layout.layer_arguments(args)))
        # Not as modules: the target's weights are not the head's.
        object.__setattr__(self, "_text", text)
        object.__setattr__(self, "_attention", AttentionPatch())
        object.__setattr__(self, "_spec", self._recorded())
        self.eval()
        # What is not a weight, such as RoPE's frequencies, nothing else evaluates; and what one
        # thread leaves lazy another one can't.
        mx.eval(
            [value for each in self.modules() for name, value in each.items() if name[0] == "_"]
        )

    def own(self, name: str) -> None:
        """Give the head an embedding (``embed_tokens``) or an output layer (``lm_head``) of its
        own, with random weights.
        """
        size = self._text.args.hidden_size
        if name == "embed_tokens":
            self.embed_tokens = nn.Embedding(self.args.vocab_size, size)
        else:
            self.lm_head = nn.Linear(size, self.args.vocab_size, bias=False)

    def _recorded(self) -> LayerSpec:
        """The K/V of the layer, from a run whose results are not computed."""
        kv = RecordedKV(None, mx.arange(NUM_TOKENS))
        rows = mx.zeros((NUM_TOKENS, 1, self.hidden_size), self.dtype)
        try:
            self.layer(rows, mask=None, cache=kv)
        except Exception as error:
            raise UnsuitableModelError(
                f"its layer can't run ({type(error).__name__}: {one_line(error)})"
            ) from error
        if kv.spec is None or kv.is_open:
            raise UnsuitableModelError("its layer does not attend to K/V of a cache")
        return kv.spec

    @property
    def dtype(self) -> mx.Dtype:
        dtype: mx.Dtype = self._text.model.norm.weight.dtype
        return dtype

    @property
    def layer_specs(self) -> list[LayerSpec]:
        return [self._spec]

    def is_of(self, model: LanguageModel) -> bool:
        """Whether the head was made for this model."""
        return text_model(model) is self._text

    @property
    def shared_output(self) -> Module | None:
        """The model's layer that computes the logits of drafts, unless the head has its own."""
        if "lm_head" in self:
            return None
        text = self._text
        return cast(Module, text.lm_head if "lm_head" in text else text.model.embed_tokens)

    def draft(
        self,
        tokens: mx.array,  # [num_tokens] int32
        hidden: mx.array,  # [num_tokens, hidden_size]: of the token before each
        layers: Sequence[LayerKV],
    ) -> tuple[mx.array, mx.array]:
        """Run the open step of a cache on the head's layer.

        Returns:
            Logits ``[num_rows, vocab_size]`` of the tokens that follow, and the rows
            ``[num_rows, hidden_size]`` that take the place of hidden rows for the next draft. The
            latter in the place of both in a step without logits.
        """
        (kv,) = layers
        embed = self.embed_tokens if "embed_tokens" in self else self._text.model.embed_tokens
        pair = [self.embedding_norm(embed(tokens)), self.hidden_norm(hidden)]
        if not self.layout.is_embedding_first:
            pair.reverse()
        x = self.projection(mx.concatenate(pair, axis=-1))
        x = self.layer(x[:, None], mask=None, cache=PackedKV(kv, kv.step.positions)).squeeze(1)
        if not kv.step.wants_logits:
            return x, x
        rows = kv.step.logit_rows
        x = x if rows is None else x[rows]
        normed = x if self.layout.end_norm is None else self.end_norm(x)
        return self._logits(normed), normed if self.layout.carries_normed else x

    def _logits(self, rows: mx.array) -> mx.array:
        owner: Any = self if "lm_head" in self else self._text
        is_tied = "lm_head" not in owner
        output = owner.model.embed_tokens.as_linear if is_tied else owner.lm_head
        logits: mx.array = output(rows)
        return logits

    def __call__(
        self, tokens: mx.array, layers: Sequence[LayerKV], logit_rows: mx.array | None = None
    ) -> mx.array:
        raise NotImplementedError("[draft head] runs on hidden rows; call draft()")


def text_model(target: LanguageModel) -> Any:
    """The module of a model that has its configuration, its embedding and its output layer."""
    inner: Any = target["inner"] if isinstance(target, PackedModel) else target
    return getattr(inner, "language_model", inner)
