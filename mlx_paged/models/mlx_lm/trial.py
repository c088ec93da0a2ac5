"""How a model of mlx-lm runs on this package's caches: packed, or one sequence at a time.

A table says it of the architectures that the tests sweep, for the versions of mlx-lm that they are
swept with. Of all others, a small random copy (:mod:`mlx_paged.models.mlx_lm.small_copy`) is
compared with mlx-lm's own caches, in float32, where rounding hides nothing and windows end after a
few tokens: some models would be wrong without any error. afm7, for example, takes the positions of
its queries from the shape of K, which in a packed step is not that of the sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import mlx.core as mx
import mlx_lm
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged.cache import KVCacheConfig, LayerSpec, PagedKVCache, Sequences, group_layers
from mlx_paged.errors import ArgumentError, FailedCheckError, UnsuitableModelError, one_line
from mlx_paged.models.context_length import context_length
from mlx_paged.models.language_model import LanguageModel, packed_step
from mlx_paged.models.mlx_lm.modules import ModuleClasses
from mlx_paged.models.mlx_lm.packed import PackedModel
from mlx_paged.models.mlx_lm.per_sequence import PerSequenceModel
from mlx_paged.models.mlx_lm.small_copy import small_copy
from mlx_paged.options.argument_values import kind_of
from mlx_paged.options.config import KVBudget

Kind: TypeAlias = type[PackedModel | PerSequenceModel]
WAYS: dict[str, Kind] = {"packed": PackedModel, "per sequence": PerSequenceModel}

# The table, by the names of modules in mlx_lm.models. A test tries each of them as if it were
# unknown, and compares.
MLX_LM_VERSIONS = ("0.32.2",)
ARCHITECTURES = {
    "packed": """
        afmoe apertus baichuan_m1 bailing_hybrid bailing_moe bailing_moe_linear
        bailing_moe_v3 bitnet cohere cohere2 dbrx deepseek deepseek_v2 deepseek_v3 dots1
        ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon_h1 gear gemma gemma2 gemma3
        gemma3_text gemma3n gemma4 gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_neox
        gpt_oss gptj granite granitemoe granitemoehybrid helium hunyuan hunyuan_v1_dense
        internlm2 internlm3 iquestloopcoder jamba kimi_k25 kimi_k3 kimi_linear kimi_vl Klear
        laguna lfm2 lfm2-vl lfm2_moe lille-130m llama llama4_text longcat_flash
        longcat_flash_ngram mamba mamba2 mellum mimo mimo_v2_flash minicpm minicpm3 minimax
        ministral3 mistral3 mistral4 mixtral muse_glimmer muse_spark nanbeige nanochat
        nemotron nemotron-nas nemotron_h olmo2 olmo3 olmo_hybrid olmoe openelm phi phi3
        phimoe phixtral pixtral plamo2 prism_hadamard_qwen35 qwen qwen2 qwen2_moe qwen2_vl
        qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe recurrent_gemma
        rwkv7 seed_oss smollm3 solar_open spark2_5 starcoder2 step3p5 talkie telechat3
        youtu_llm
    """,
    "per sequence": """
        afm7 deepseek_v32 glm_moe_dsa gpt_bigcode llama4 minimax_m3_vl plamo stablelm
    """,
}

# Tokens of the first sequence; its second chunk, which runs in one step with all of the second
# sequence; tokens of that; and decodes of each in float32, which reveal a step that has read a
# wrong state.
NUM_TOKENS = 40
NUM_LAST = 9
NUM_OTHER = 7
NUM_DECODED = 3
# The most of the first sequence if it goes beyond windows.
MAX_NUM_TOKENS = 512
PROBE_BLOCK_SIZE = 8
# An attribute of a model of mlx-lm: the adapted model, made once.
_ADAPTED = "_mlx_paged_model"
# The relative error of a row of logits that rounding explains. A layer that attends to the wrong
# tokens has a larger one: 0.30 for afm7.
FLOAT32_LIMIT = 1e-3
HALF_LIMIT = 0.05
# A model's own error is the difference between two ways to cut a prompt.
NUM_TIMES_OWN_ERROR = 4
# With an own error of more limits than this, a model computes something else for each cut, and
# there is no reference: plamo3 prefills with a window one token longer than that of its cache.
MAX_OWN_LIMITS = 10


def adapt(
    model: Module,
    config: dict[str, Any],
    *,
    evaluates_weights: bool = True,
    skip_check: bool = False,
) -> LanguageModel:
    """A model of mlx-lm as a :class:`LanguageModel`: packed, or else one sequence at a time.

    Args:
        model: with its weights, adapters included.
        config: its ``config.json``.
        evaluates_weights: whether the model's weights may be evaluated.
        skip_check: run a model whose logits differ in both ways: one sequence at a time, with its
            own attention, if it can.

    Raises:
        FailedCheckError: its logits differ in one of the ways, and it can't run in the other.
        UnsuitableModelError: it can run in neither way; the message gives both reasons.
    """
    if evaluates_weights:
        # Arrays that are not parameters, such as frequencies of RoPE, are lazy at first, and
        # another thread can't evaluate what this one leaves lazy.
        mx.eval([value for module in model.modules() for value in module.values()])
    kind = _kind_in_table(model)
    if kind is not None:
        classes = ModuleClasses(model.modules())
        try:
            return kind(model, config)
        except UnsuitableModelError:
            classes.restore()  # Its configuration needs another way than that of the sweep.
    return tried(model, config, evaluates_weights=evaluates_weights, skip_check=skip_check)


def tried(
    model: Module,
    config: dict[str, Any],
    *,
    evaluates_weights: bool = True,
    skip_check: bool = False,
) -> LanguageModel:
    """:func:`adapt` of a model that is not in the table."""
    trial = Trial(model, config, evaluates_weights)
    errors: dict[str, UnsuitableModelError] = {}
    for way, kind in WAYS.items():
        try:
            return trial.run(kind)
        except UnsuitableModelError as error:
            errors[way] = error
    if skip_check:
        for way in reversed(WAYS):
            if isinstance(errors[way], FailedCheckError):
                return WAYS[way](model, config)
    reasons = [str(error) for error in errors.values()]
    text = "; ".join(f"{way}, {reason}" for way, reason in zip(WAYS, reasons, strict=True))
    is_check = any(isinstance(error, FailedCheckError) for error in errors.values())
    kind_of_error = FailedCheckError if is_check else UnsuitableModelError
    raise kind_of_error(reasons[0] if len(set(reasons)) == 1 else text)


def _kind_in_table(model: Module) -> Kind | None:
    package, _, architecture = type(model).__module__.rpartition(".")
    if package != "mlx_lm.models" or mlx_lm.__version__ not in MLX_LM_VERSIONS:
        return None
    ways = (WAYS[way] for way, names in ARCHITECTURES.items() if architecture in names.split())
    return next(ways, None)


def check_model(model: object) -> LanguageModel:
    """``model`` as a :class:`LanguageModel`. A model of :func:`mlx_paged.load` is one already; a
    model of ``mlx_lm.load`` is adapted the first time, with the same weights.

    Raises:
        ArgumentError: it is neither, or can't run here.
    """
    if isinstance(model, LanguageModel):
        return model
    is_called_as_mlx_lm = (
        isinstance(model, Module)
        and (hasattr(model, "make_cache") or hasattr(model, "layers"))
        and "cache" in inspect.signature(type(model).__call__).parameters
    )
    if not isinstance(model, Module) or not is_called_as_mlx_lm:
        kind = f"{type(model).__module__}.{kind_of(model)}".removeprefix("builtins.")
        raise ArgumentError(
            f"[model] model must be one that mlx_paged.load or mlx_lm.load returns, got {kind}",
            "model",
        )
    found = vars(model).get(_ADAPTED)
    if isinstance(found, LanguageModel):
        return found
    model_type = getattr(model, "model_type", kind_of(model))
    fields = vars(model.args) if hasattr(model, "args") else {}
    try:
        found = adapt(model, {"model_type": model_type, **fields})
    except UnsuitableModelError as error:
        is_check = isinstance(error, FailedCheckError)
        way_out = "; to run it all the same, mlx_paged.load(..., skip_check=True)"
        raise ArgumentError(
            f"[model] model type {model_type} can't run on a paged cache: {one_line(error)}"
            f"{way_out if is_check else ''}",
            "model",
        ) from error
    # A plain attribute: as a submodule, it would contain the model that contains it.
    object.__setattr__(model, _ADAPTED, found)
    return found


def layer_specs_of(model: Module) -> list[LayerSpec]:
    """The layers of a model of this package or of mlx-lm, without evaluating a weight; empty for a
    model that can't run packed.
    """
    if isinstance(model, LanguageModel):
        return model.layer_specs
    classes = ModuleClasses(model.modules())
    try:
        return PackedModel(model, {}).layer_specs
    except UnsuitableModelError:
        return []
    finally:
        classes.restore()


class Trial:
    """Runs a model of mlx-lm in one way after the other, and compares it with mlx-lm's own caches.

    A small copy decides for the model. A model that is small itself, or whose class can't be built
    small, is compared itself.

    Args:
        model: with its weights.
        config: its ``config.json``.
        evaluates_weights: whether the model itself may be compared.
    """

    def __init__(self, model: Module, config: dict[str, Any], evaluates_weights: bool = True):
        self._model, self._config = model, config
        self._evaluates_weights = evaluates_weights
        self._copy = small_copy(model, config)
        self._references: dict[int, Reference] = {}

    def run(self, kind: Kind) -> LanguageModel:
        """The model as it runs in this way.

        Raises:
            UnsuitableModelError: its logits differ by more than rounding, or mlx-lm's own do, or
                mlx-lm can't run the model.
        """
        # A kind of model may give modules other classes.
        classes = ModuleClasses(self._model.modules())
        try:
            adapted = kind(self._model, self._config)
            if not self._copy_agrees(kind) and self._evaluates_weights:
                self._compare(self._model, adapted)
        except BaseException:
            classes.restore()
            raise
        return adapted

    def _copy_agrees(self, kind: Kind) -> bool:
        """``False`` if there is no copy that runs in this way."""
        if self._copy is None:
            return False
        try:
            adapted = kind(*self._copy)
        except UnsuitableModelError:
            return False  # The model itself can run in this way, so the copy is the exception.
        try:
            self._compare(self._copy[0], adapted)
        except UnsuitableModelError as error:
            raise type(error)(f"in a small copy of the model, {error}") from error
        return True

    def _compare(self, model: Module, adapted: LanguageModel) -> None:
        if id(model) not in self._references:
            self._references[id(model)] = Reference(model, adapted)
        self._references[id(model)].compare(adapted)


class Reference:
    """The logits of two sequences on mlx-lm's own caches.

    Args:
        model: one of mlx-lm.
        adapted: the same, which gives the lengths of prompts.

    Raises:
        UnsuitableModelError: mlx-lm can't run the model.
        FailedCheckError: its logits depend on where a prompt is cut.
    """

    def __init__(self, model: Module, adapted: LanguageModel):
        self._num_tokens, self._num_other = num_tokens, num_other = lengths_for(adapted)
        # In half precision, rounding may send most of so few tokens to other experts.
        num_decoded = NUM_DECODED if adapted.dtype == mx.float32 else 0
        size = adapted.args.vocab_size
        self._ids = probe_ids(size, num_tokens + num_decoded)
        self._other_ids = probe_ids(size, num_other + num_decoded, first=5)
        ones, num_last = [1] * num_decoded, min(NUM_LAST, num_tokens // 2)
        self._num_first = num_tokens - num_last
        num_alone = max(num_decoded, 1)
        rest = len(self._ids) - num_last - num_alone
        try:
            rows = _stock_logits(model, self._ids, [self._num_first, num_last, *ones])
            again = _stock_logits(model, self._ids, [num_last, rest, *[1] * num_alone])
            other = _stock_logits(model, self._other_ids, [num_other, *ones])
        except Exception as error:
            # An unknown model may raise anything, for example if the device lacks an operation for
            # its dtype.
            raise UnsuitableModelError(
                f"mlx-lm can't run it on its own caches ({type(error).__name__}: {one_line(error)})"
            ) from error
        # Also of decoded tokens alone, for which a model may sum in another order.
        own_error = max(
            median_error(again, rows), median_error(again[-num_alone:], rows[-num_alone:])
        )
        limit = FLOAT32_LIMIT if rows.dtype == mx.float32 else HALF_LIMIT
        if own_error > MAX_OWN_LIMITS * limit:
            raise FailedCheckError(
                f"its logits on mlx-lm's own caches differ by {own_error:.2g} where a prompt is "
                "cut elsewhere"
            )
        self._limit = max(limit, NUM_TIMES_OWN_ERROR * own_error)
        self._rows, self._other = rows, other  # [num_tokens, vocab_size]

    def compare(self, model: LanguageModel) -> None:
        """Compare the logits of a model on caches of this package.

        Raises:
            UnsuitableModelError: it can't run on them.
            FailedCheckError: its logits differ by more than rounding explains.
        """
        try:
            parts = list(self._parts(model))
        except Exception as error:
            # It may rely on any detail of mlx-lm's caches, such as the shape of a mask.
            raise UnsuitableModelError(
                f"it can't run on caches here ({type(error).__name__}: {one_line(error)})"
            ) from error
        for what, logits, expected in parts:
            found = median_error(logits, expected)
            # NaN counts as a difference unless mlx-lm's logits are NaN, too.
            if not found <= self._limit and not mx.isnan(expected).any():
                raise FailedCheckError(
                    f"its logits of {what} differ from those on mlx-lm's caches by {found:.2g} "
                    f"(rounding explains {self._limit:.2g})"
                )

    def _parts(self, model: LanguageModel) -> Iterator[tuple[str, mx.array, mx.array]]:
        """A name, the model's rows of logits, and those on mlx-lm's caches."""
        ids, rows, other_ids, other = self._ids, self._rows, self._other_ids, self._other
        first, end, num_other = self._num_first, self._num_tokens, self._num_other
        sequences = probe_sequences(model, len(ids) + len(other_ids))
        begin = packed_step(model, sequences, {"a": ids[:first]}, [first])
        yield "its first tokens", begin, rows[:first]
        # Logits of some tokens only, so that a model that can drop rows does so here.
        last, last_other = (end - first) // 2, (num_other + 1) // 2
        batch = {"a": ids[first:end], "b": other_ids[:num_other]}
        both = packed_step(model, sequences, batch, [last, last_other])
        yield "later tokens", both[:last], rows[end - last : end]
        yield "tokens of a second sequence", both[last:], other[num_other - last_other : num_other]
        decoded = [
            packed_step(model, sequences, {"a": [a], "b": [b]}, [1, 1])
            for a, b in zip(ids[end:], other_ids[num_other:], strict=True)
        ]
        if decoded:
            expected = mx.stack([rows[end:], other[num_other:]], axis=1).flatten(0, 1)
            yield "tokens that come one by one", mx.concatenate(decoded), expected


def lengths_for(model: LanguageModel) -> tuple[int, int]:
    """Tokens of the two sequences before the decodes: beyond the model's windows, if these are
    short, and within its context.
    """
    windows = [spec.window for spec in model.layer_specs if spec.window is not None]
    num_tokens = max([NUM_TOKENS, *(window + NUM_LAST + NUM_OTHER for window in windows)])
    num_tokens = num_tokens if num_tokens <= MAX_NUM_TOKENS else NUM_TOKENS
    num_tokens = max(4, min(num_tokens, context_length(model.args) - NUM_DECODED))
    return num_tokens, min(NUM_OTHER, num_tokens)


def _stock_logits(model: Module, ids: Sequence[int], chunks: Sequence[int]) -> mx.array:
    """``[num_tokens, vocab_size]``, on mlx-lm's own caches."""
    cache, logits, start = make_prompt_cache(model), [], 0
    for size in chunks:
        logits.append(model(mx.array([ids[start : start + size]]), cache=cache)[0])
        mx.eval(logits, [entry.state for entry in cache])
        start += size
    return mx.concatenate(logits)


def median_error(logits: mx.array, expected: mx.array) -> float:
    """The median over rows, ``[num_rows, vocab_size]``, of the norm of the difference over the norm
    of the expected row. Logits of minus infinity count if only one side has them.

    The median, because rounding may route single tokens of a mixture to other experts.
    """
    logits, expected = logits.astype(mx.float32), expected.astype(mx.float32)
    never = mx.isneginf(logits) & mx.isneginf(expected)
    logits, expected = mx.where(never, 0, logits), mx.where(never, 0, expected)
    centred = expected - expected.mean(-1, keepdims=True)
    errors = mx.linalg.norm(logits - expected, axis=-1) / mx.linalg.norm(centred, axis=-1)
    median: float = mx.median(errors).item()  # type: ignore[assignment]
    return median


def probe_ids(vocab_size: int, count: int, first: int = 3) -> list[int]:
    """Token ids without meaning, which hardly repeat."""
    return [(first + 7 * i + 13 * i * i) % vocab_size for i in range(count)]


def probe_sequences(
    model: LanguageModel, num_tokens: int, layers: Sequence[LayerSpec] | None = None
) -> Sequences:
    """Sequences on a small cache in plain MLX, for ``num_tokens`` tokens together.

    Args:
        layers: those of the model, possibly with another K/V format; by default as they are.
    """
    layers = model.layer_specs if layers is None else layers
    groups = group_layers(layers, PROBE_BLOCK_SIZE)
    budget = KVBudget(num_blocks=(num_tokens // PROBE_BLOCK_SIZE + 4) * len(groups))
    config = KVCacheConfig.within(budget, layers, PROBE_BLOCK_SIZE, groups)
    config = replace(
        config,
        state_nbytes=model.state_nbytes,
        state_layout=model.state_layout,
        keeps_kv=model.keeps_kv,
    )
    return Sequences(PagedKVCache(config, "reference"))
