"""The memory of a step's activations, estimated from the widths of a model."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.models.context_length import context_length
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm.model_args import EXPERTS_PER_TOKEN
from mlx_paged.ops import device
from mlx_paged.options.config import DEFAULT_MAX_NUM_BATCHED_TOKENS

# How many rows of each width a token has in memory at the peak, fitted to the peaks of models of
# many shapes on a CPU (tests/models/test_activations.py). The arrays of a layer are freed while the
# next one or two are computed, so the number of layers does not matter.
HIDDEN_ROWS, MLP_ROWS, ATTENTION_ROWS, EXPERT_ROWS = 5, 2, 6, 2
# Float32 rows of logits per sequence that is sampled with filters: penalised, sorted, indices,
# sums.
LOGIT_ROWS = 8
# Head dimensions for which MLX's attention of a prompt is a fused kernel, which stores no scores.
FUSED_HEAD_DIMS = (64, 80, 128)


def activation_nbytes(
    model: LanguageModel,
    num_tokens: int,
    num_seqs: int,
    context_len: int,
    is_cpu: bool | None = None,
) -> int:
    """An estimate of a step's peak of activations in bytes: that of its layers or of its logits,
    whichever is larger.

    In the layers a token has ``5 * hidden + 2 * mlp + 6 * attention`` numbers in the dtype of the
    activations: the widths of the residual stream, of the widest projection, and of queries and
    keys together. Each of its experts adds ``2 * (hidden + expert)``. Scores, a float32 number per
    head, token and position, count where MLX's attention of a prompt is not fused: on a CPU, and
    for head dimensions other than 64, 80 and 128. Logits are 8 float32 rows per sequence.

    Args:
        num_tokens: of the step.
        num_seqs: the number of sequences whose next tokens are sampled.
        context_len: the number of positions that each token attends to.
        is_cpu: whether the step runs on a CPU; ``None`` for this process's device.
    """
    is_cpu = device.is_cpu() if is_cpu is None else is_cpu
    hidden, mlp, expert = _widths_of(model)
    num_experts = num_experts_per_token(model) if expert else 0
    layer_specs = model.layer_specs
    num_heads = [spec.num_heads or spec.num_kv_heads for spec in layer_specs]
    attention = max(
        (
            heads * spec.key_dim + spec.num_kv_heads * spec.key_dim
            for heads, spec in zip(num_heads, layer_specs, strict=True)
        ),
        default=0,
    )
    numbers = (
        HIDDEN_ROWS * hidden
        + MLP_ROWS * mlp
        + ATTENTION_ROWS * attention
        + EXPERT_ROWS * num_experts * (hidden + expert)
    )
    with_scores = [
        heads
        for heads, spec in zip(num_heads, layer_specs, strict=True)
        if is_cpu or spec.key_dim not in FUSED_HEAD_DIMS
    ]
    scores = 4 * max(with_scores, default=0) * context_len
    logits = LOGIT_ROWS * 4 * num_seqs * model.args.vocab_size
    return max(num_tokens * (numbers * model.dtype.size + scores), logits)


def default_activation_nbytes(model: LanguageModel, is_cpu: bool | None = None) -> int:
    """:func:`activation_nbytes` of the largest step of one sequence, with default options."""
    largest = DEFAULT_MAX_NUM_BATCHED_TOKENS
    context = min(largest, context_length(model.args))
    return activation_nbytes(model, largest, 1, context, is_cpu)


def _widths_of(model: LanguageModel) -> tuple[int, int, int]:
    """The widths of the residual stream, of the widest projection except that to the vocabulary,
    and of an expert's widest projection, 0 without experts.
    """
    hidden = mlp = expert = 0
    for _, module in model.named_modules():
        weight = module.get("weight")
        if isinstance(module, nn.QuantizedEmbedding):
            hidden = max(hidden, module.dims)
        elif isinstance(module, nn.Embedding):
            hidden = max(hidden, module.weight.shape[-1])
        elif isinstance(weight, mx.array) and weight.ndim > 1:
            width = weight.shape[-2]
            if weight.ndim == 3:
                expert = max(expert, width)
            elif width < model.args.vocab_size:
                mlp = max(mlp, width)
    return hidden, mlp, expert


def num_experts_per_token(model: LanguageModel) -> int:
    """The number of experts per token in a layer; 0 for a model without experts."""
    sources = [
        vars(source)
        for _, module in model.named_modules()
        for source in (module, getattr(module, "args", None))
        if hasattr(source, "__dict__")
    ]
    # Modules of mixtures also call it top_k, which in a configuration is a sampling parameter.
    counts = [source.get(name) for source in sources for name in (*EXPERTS_PER_TOKEN, "top_k")]
    return max((count for count in counts if isinstance(count, int)), default=0)
