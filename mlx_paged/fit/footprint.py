"""The memory that a model takes and the duration of its steps, computed from its shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.base import Module
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_paged.cache import KVCacheConfig, group_layers
from mlx_paged.config import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    KVBits,
)
from mlx_paged.core.block_need import BlockNeed
from mlx_paged.engine.draft_model import num_parameters_of
from mlx_paged.models.activations import activation_nbytes, num_experts_per_token
from mlx_paged.models.context_length import context_length
from mlx_paged.models.kv_cache import NUM_COPIES_AHEAD, stored_as, weight_nbytes
from mlx_paged.models.language_model import LanguageModel

# Dependent kernels in a layer's decode, and the time to launch one; both assumed.
LAUNCHES_PER_LAYER = 14
LAUNCH_SECONDS = 4e-6
_EXPERTS = (SwitchLinear, QuantizedSwitchLinear)


@dataclass(frozen=True)
class Footprint:
    """The sizes of a model with K/V in a format.

    Args:
        model: its weights need not be read.
        kv_bits: of K and V; ``None`` for the dtype of the model's activations.

    Raises:
        ArgumentError: rows of the model can't be stored in these bits.
    """

    model: LanguageModel
    kv_bits: KVBits | None = None

    def __post_init__(self) -> None:
        _ = self.one_block

    @cached_property
    def one_block(self) -> KVCacheConfig:
        layers = stored_as(self.kv_bits, self.model.layer_specs)
        groups = group_layers(layers, DEFAULT_BLOCK_SIZE, None)
        return KVCacheConfig(tuple(layers), DEFAULT_BLOCK_SIZE, 1, groups)

    @cached_property
    def num_parameters(self) -> int:
        return num_parameters_of(self.model)

    @cached_property
    def weight_nbytes(self) -> int:
        return weight_nbytes(self.model)

    @property
    def context_length(self) -> int:
        """The model's own context length, in tokens."""
        return context_length(self.model.args)

    @property
    def nbytes_per_token(self) -> int:
        """K/V of a token in all layers."""
        return self.one_block.nbytes_per_token

    @property
    def nbytes_per_late_token(self) -> int:
        """K/V that one more token adds to a sequence that exceeds all windows: a layer with a
        window drops an old token for each new one.
        """
        layers = self.one_block.layers
        return sum(layer.nbytes_per_token for layer in layers if layer.window is None)

    def state_nbytes(self, num_seqs: int) -> int:
        """States of recurrent layers, including all copies that exist at once."""
        return num_seqs * NUM_COPIES_AHEAD * self.model.state_nbytes

    def kv_nbytes(self, num_tokens: int, num_seqs: int) -> int:
        """K/V of sequences of ``num_tokens`` each, in whole blocks."""
        blocks = num_seqs * self._need.max_num_held_blocks(num_tokens) + 1  # the null block
        return blocks * self.one_block.nbytes_per_block

    def activation_nbytes(self, num_tokens: int, num_seqs: int, is_cpu: bool | None = None) -> int:
        """An estimate for the largest step of an engine with default options.

        Args:
            num_tokens: of the longest sequence.
            is_cpu: whether the machine runs it on a CPU; ``None`` for this machine.
        """
        largest = DEFAULT_MAX_NUM_BATCHED_TOKENS
        context = min(largest, num_tokens)
        return activation_nbytes(self.model, largest, num_seqs, context, is_cpu)

    def num_tokens(self, nbytes: int, num_seqs: int) -> int:
        """The most tokens that each of ``num_seqs`` sequences may have in a budget of ``nbytes``
        for K/V and states, at most the model's context length; 0 if the budget is too small.
        """
        nbytes -= self.state_nbytes(num_seqs)
        blocks = (nbytes // self.one_block.nbytes_per_block - 1) // num_seqs
        if blocks < 1:
            return 0
        return min(self._need.max_num_tokens(blocks), self.context_length)

    @cached_property
    def _need(self) -> BlockNeed:
        return BlockNeed(self.one_block.retentions, DEFAULT_BLOCK_SIZE)

    # Speed

    def tokens_per_second(self, bandwidth: float, num_tokens: int, num_seqs: int) -> float:
        """An estimate of the decode throughput of ``num_seqs`` sequences of ``num_tokens``: a step
        takes its bytes over ``bandwidth``, in bytes per second, plus its kernel launches.
        """
        nbytes = self._weights_read(num_seqs)
        nbytes += self.kv_nbytes(num_tokens, num_seqs) + 2 * num_seqs * self.model.state_nbytes
        seconds = nbytes / bandwidth + self.model.num_layers * LAUNCHES_PER_LAYER * LAUNCH_SECONDS
        return num_seqs / seconds

    def _weights_read(self, num_seqs: int) -> int:
        """Bytes of weights that a step reads. Experts count with the share that the tokens choose,
        independently of each other; embeddings only if they also compute the logits.
        """
        share = _share_of_experts(self.model, num_seqs)
        modules = [each for _, each in self.model.named_modules() if "weight" in each]
        vocab_size = self.model.args.vocab_size
        has_head = any(
            isinstance(each, nn.Linear | nn.QuantizedLinear) and each.weight.shape[0] == vocab_size
            for each in modules
        )
        total = 0
        for each in modules:
            nbytes = _nbytes_of(each)
            if isinstance(each, _EXPERTS):
                nbytes = int(share * nbytes)
            elif has_head and isinstance(each, nn.Embedding | nn.QuantizedEmbedding):
                nbytes = 0
            total += nbytes
        return total


def _nbytes_of(module: Module) -> int:
    """The bytes of a module's own arrays, without its submodules."""
    return sum(value.nbytes for value in module.values() if isinstance(value, mx.array))


def _share_of_experts(model: LanguageModel, num_seqs: int) -> float:
    """The expected share of a layer's experts that the tokens of a step choose."""
    chosen = num_experts_per_token(model)
    modules = [each for _, each in model.named_modules() if isinstance(each, _EXPERTS)]
    if not chosen or not modules:
        return 1.0
    num_experts = max(each.weight.shape[0] for each in modules)
    return float(1 - (1 - min(1.0, chosen / num_experts)) ** num_seqs)
