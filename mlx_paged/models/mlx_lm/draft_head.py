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
from abc import abstractmethod
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
        make_layer: makes the layer, random, from the configuration of the model.
        projection: joins the two rows, ``[2 * hidden_size] -> [hidden_size]``.
        embedding_norm, hidden_norm: norms of the two rows.
        end_norm: after the layer, before the logits; ``None`` for the model's own last norm.
        is_embedding_first: the order of the two rows.
        is_zero_centred: whether published norms are stored as ``weight - 1``.
        takes_normed: whether the head takes the model's hidden rows after its last norm.
        carries_normed: whether its own row after the end norm takes the place of the hidden row for
            the next draft; otherwise the row before it.
        window: the number of last tokens that the layer attends to; ``None`` for all.
        num_blocks: modules in the place of the layer, which are numbered like heads.
    """

    make_layer: Callable[[Any], Module]
    projection: str
    embedding_norm: str
    hidden_norm: str
    end_norm: str | None
    is_embedding_first: bool = True
    is_zero_centred: bool = False
    takes_normed: bool = True
    carries_normed: bool = True
    window: Callable[[Any], int | None] = lambda args: None
    num_blocks: int = 1


def _layer(
    module: str, layer: str, arguments: Callable[[Any], tuple[Any, ...]] = lambda args: ()
) -> Callable[[Any], Module]:
    """A layer of mlx-lm's, made from the configuration and what follows from it."""

    def make(args: Any) -> Module:
        layer_class: Any = getattr(importlib.import_module(f"mlx_lm.models.{module}"), layer)
        return cast(Module, layer_class(args, *arguments(args)))

    return make


def _after_the_last(args: Any) -> tuple[int]:
    return (args.num_hidden_layers,)


def _full_attention(args: Any) -> tuple[int]:
    return (args.full_attention_interval - 1,)


def _mtp(make_layer: Callable[[Any], Module]) -> HeadLayout:
    """Qwen3-Next and later: ``mtp.*``."""
    return HeadLayout(
        make_layer,
        "fc",
        "pre_fc_norm_embedding",
        "pre_fc_norm_hidden",
        "norm",
        is_zero_centred=True,
    )


def _nextn(
    make_layer: Callable[[Any], Module], end_norm: str = "shared_head.norm", **others: Any
) -> HeadLayout:
    """The names of DeepSeek-V3."""
    return HeadLayout(make_layer, "eh_proj", "enorm", "hnorm", end_norm, **others)


class _LongcatLayer(Module):
    """A layer of LongCat-Flash's latent attention and a dense MLP; the model's own have two each,
    and experts.
    """

    def __init__(self, args: Any):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.self_attn = _layer("longcat_flash", "LongcatFlashMLA")(args)
        self.mlp = _layer("longcat_flash", "LongcatFlashMLP")(args)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        x = x + self["self_attn"](self["input_layernorm"](x), mask=mask, cache=cache)
        both: mx.array = x + self["mlp"](self["post_attention_layernorm"](x))
        return both


class _NemotronLayer(Module):
    """A block of attention and one of experts, which Nemotron-H counts as two layers."""

    def __init__(self, args: Any):
        super().__init__()
        block: Any = importlib.import_module("mlx_lm.models.nemotron_h").NemotronHBlock
        self.layers = [block(args, kind) for kind in ("*", "E")]

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        for block in self["layers"]:
            x = block(x, mask=mask, cache=cache)
        return x


def _window_of_step(args: Any) -> int | None:
    kinds = args.layer_types
    is_sliding = kinds[args.num_hidden_layers] == "sliding_attention" if kinds else True
    return args.sliding_window if is_sliding else None


# By the model type that mlx-lm runs. Qwen's rows are those after the last norm (llama.cpp #24025,
# LightLLM #1402); vLLM and SGLang do the same for DeepSeek, GLM, LongCat and Nemotron, and take the
# rows before it for Step. After the head's own norm, GLM and DeepSeek have more drafts accepted
# (vLLM #46075, ROCm/ATOM #1764). MiMo's rows are those before the norms (vLLM, exllamav3 #238), and
# so are MiMo-V2's in SGLang. ERNIE's logits are of rows after the model's own norm, as in
# FastDeploy; vMLX has found that more are accepted than without a norm, as in vLLM.
#
# Step and MiMo-V2 come with three heads, one for each draft. The first one makes all drafts, as in
# vLLM for MiMo-V2: three layers would have to compute each token and take three times the K/V.
LAYOUTS = {
    "qwen3": _mtp(_layer("qwen3", "TransformerBlock")),
    "qwen3_next": _mtp(_layer("qwen3_next", "Qwen3NextDecoderLayer", _full_attention)),
    "qwen3_5": _mtp(_layer("qwen3_5", "DecoderLayer", _full_attention)),
    "qwen3_5_moe": _mtp(_layer("qwen3_5", "DecoderLayer", _full_attention)),
    "glm4_moe": _nextn(_layer("glm4_moe", "DecoderLayer", _after_the_last)),
    "glm4_moe_lite": _nextn(_layer("glm4_moe_lite", "Glm4MoeLiteDecoderLayer", _after_the_last)),
    "deepseek_v3": _nextn(_layer("deepseek_v3", "DeepseekV3DecoderLayer", _after_the_last)),
    "step3p5": _nextn(
        _layer("step3p5", "Step3p5DecoderLayer", _after_the_last),
        is_zero_centred=True,
        takes_normed=False,
        carries_normed=False,
        window=_window_of_step,
    ),
    "mimo": HeadLayout(
        _layer("mimo", "TransformerBlock"),
        "input_proj",
        "token_layernorm",
        "hidden_layernorm",
        "final_layernorm",
        is_embedding_first=False,
        takes_normed=False,
        carries_normed=False,
    ),
    "mimo_v2_flash": _nextn(
        # Without experts, and with a window.
        _layer("mimo_v2_flash", "DecoderLayer", lambda args: (False, True)),
        "final_layernorm",
        takes_normed=False,
        carries_normed=False,
        window=lambda args: args.sliding_window_size,
    ),
    "ernie4_5_moe": HeadLayout(
        # A number before those of the layers with experts: the head's has none.
        _layer("ernie4_5_moe", "Ernie4_5_DecoderLayer", lambda args: (-1,)),
        "mtp_linear_proj.0",
        "mtp_emb_norm.0",
        "mtp_hidden_norm.0",
        None,
        carries_normed=False,
    ),
    "longcat_flash": _nextn(_LongcatLayer, "norm"),
    "nemotron_h": _nextn(_NemotronLayer, "1.final_layernorm", num_blocks=2),
}
# Heads that are not run, and what they would need.
REFUSED = {
    "deepseek_v32": "its layer attends to the tokens that an indexer chooses",
    "glm_moe_dsa": "its layer attends to the tokens that an indexer chooses",
    "exaone_moe": "the window of its layer is in fields that mlx-lm does not read",
    "deepseek_v41": "it takes the rows of several residual streams",
    "longcat_flash_ngram": "it embeds several tokens at once",
}


class Head(LanguageModel):
    """What drafts from the hidden rows of one model, with random weights.

    Args:
        target: the model that it drafts for. Its weights are not the head's.
        kind: what it is to the model, for messages.

    Attributes:
        hidden_size: of the model.
        takes_normed: whether it takes the hidden rows after the model's last norm.
    """

    takes_normed = True
    _text: Any

    def __init__(self, target: LanguageModel, kind: str):
        super().__init__()
        text = text_model(target)
        self.args = target.args
        self.model_type = f"{model_type_of(target)} {kind}"
        self.description = f"{model_type_of(target)}, {kind}"
        self.hidden_size: int = text.args.hidden_size
        object.__setattr__(self, "_text", text)  # not as a module

    def _complete(self) -> None:
        """Called when all modules are made."""
        object.__setattr__(self, "_attention", AttentionPatch())
        self.eval()
        # What is not a weight, such as RoPE's frequencies, nothing else evaluates; and what one
        # thread leaves lazy another one can't.
        mx.eval(
            [value for each in self.modules() for name, value in each.items() if name[0] == "_"]
        )

    @property
    def dtype(self) -> mx.Dtype:
        dtype: mx.Dtype = last_norm(self._text).weight.dtype
        return dtype

    @property
    def layer_specs(self) -> list[LayerSpec]:
        return []

    def is_of(self, model: LanguageModel) -> bool:
        """Whether the head was made for this model."""
        return text_model(model) is self._text

    @property
    def shared_output(self) -> Module | None:
        """The model's layer that computes the logits of drafts, unless the head has its own."""
        return None

    @property
    def reads_embedding(self) -> bool:
        """Whether each draft reads all rows of the head's own embedding."""
        return False

    @abstractmethod
    def draft(
        self,
        tokens: mx.array,  # [num_tokens] int32
        hidden: mx.array,  # [num_tokens, hidden_size]: of the token before each
        layers: Sequence[LayerKV],
    ) -> tuple[mx.array, mx.array]:
        """Run the open step of a cache.

        Args:
            layers: those that the head needs: its own, or the model's if it has none.

        Returns:
            Logits ``[num_rows, vocab_size]`` of the tokens that follow, and the rows
            ``[num_rows, hidden_size]`` that take the place of hidden rows for the next draft. The
            latter in the place of both in a step without logits.
        """

    def __call__(
        self, tokens: mx.array, layers: Sequence[LayerKV], logit_rows: mx.array | None = None
    ) -> mx.array:
        raise NotImplementedError("[draft head] runs on hidden rows; call draft()")


class DraftHead(Head):
    """A head of a model with a layer of its own.

    Args:
        target: the model that it drafts for. Its embedding and its output layer are used.
        layout: how the head's parts are joined.

    Raises:
        UnsuitableModelError: the layer can't run on packed input.
    """

    _spec: LayerSpec

    def __init__(self, target: LanguageModel, layout: HeadLayout):
        super().__init__(target, "head")
        args, eps, size = self._text.args, last_norm(self._text).eps, self.hidden_size
        self.layout, self.takes_normed = layout, layout.takes_normed
        self.projection = nn.Linear(2 * size, size, bias=False)
        self.embedding_norm = nn.RMSNorm(size, eps=eps)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        if layout.end_norm is not None:
            self.end_norm = nn.RMSNorm(size, eps=eps)
        try:
            self.layer, window = layout.make_layer(args), layout.window(args)
        except (LookupError, TypeError) as error:
            raise UnsuitableModelError(
                f"the model's configuration does not describe it ({type(error).__name__}: "
                f"{one_line(error)})"
            ) from error
        # The dtype of its K/V follows from that of its weights.
        self.set_dtype(self.dtype)
        self._complete()
        object.__setattr__(self, "_spec", self._recorded(window))

    def own(self, name: str) -> None:
        """Give the head an embedding (``embed_tokens``) or an output layer (``lm_head``) of its
        own, with random weights.
        """
        size = self.hidden_size
        if name == "embed_tokens":
            self.embed_tokens = nn.Embedding(self.args.vocab_size, size)
        else:
            self.lm_head = nn.Linear(size, self.args.vocab_size, bias=False)

    def _recorded(self, window: int | None) -> LayerSpec:
        """The K/V of the layer, from a run whose results are not computed."""
        kv = RecordedKV(window, mx.arange(NUM_TOKENS))
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
    def layer_specs(self) -> list[LayerSpec]:
        return [self._spec]

    @property
    def shared_output(self) -> Module | None:
        return None if "lm_head" in self else cast(Module, output_of(self._text))

    def draft(
        self, tokens: mx.array, hidden: mx.array, layers: Sequence[LayerKV]
    ) -> tuple[mx.array, mx.array]:
        (kv,) = layers
        embed = self.embed_tokens if "embed_tokens" in self else embedding_of(self._text)
        pair = [self.embedding_norm(embed(tokens)), self.hidden_norm(hidden)]
        if not self.layout.is_embedding_first:
            pair.reverse()
        x = self.projection(mx.concatenate(pair, axis=-1))
        x = self.layer(x[:, None], mask=None, cache=PackedKV(kv, kv.step.positions)).squeeze(1)
        if not kv.step.wants_logits:
            return x, x
        rows = kv.step.logit_rows
        x = x if rows is None else x[rows]
        normed = self.end_norm(x) if "end_norm" in self else last_norm(self._text)(x)
        return self._logits(normed), normed if self.layout.carries_normed else x

    def _logits(self, rows: mx.array) -> mx.array:
        output: Any = self.lm_head if "lm_head" in self else output_of(self._text)
        logits: mx.array = getattr(output, "as_linear", output)(rows)
        return logits


def text_model(target: LanguageModel) -> Any:
    """The module of a model that has its configuration, its embedding and its output layer."""
    inner: Any = target["inner"] if isinstance(target, PackedModel) else target
    return getattr(inner, "language_model", inner)


def embedding_of(text: Any) -> Any:
    """The embedding of a text model."""
    return text.backbone.embeddings if "backbone" in text else text.model.embed_tokens


def output_of(text: Any) -> Any:
    """The layer of a text model that computes its logits: the embedding, if they share weights."""
    return text.lm_head if "lm_head" in text else embedding_of(text)


def last_norm(text: Any) -> Any:
    """The last norm of a text model."""
    return text.backbone.norm_f if "backbone" in text else text.model.norm
