"""The memory that a model takes and the duration of its steps, computed from its shapes alone;
whether a number of conversations of a given length fit, or what would make them fit.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from mlx_paged.cache import KVCacheConfig, group_layers
from mlx_paged.cli.fit.machine import Machine
from mlx_paged.core.block_need import BlockNeed
from mlx_paged.engine.speculation.draft_model import nbytes_read, num_parameters_of
from mlx_paged.errors import ArgumentError
from mlx_paged.models.activations import activation_nbytes, default_activation_nbytes
from mlx_paged.models.context_length import context_length
from mlx_paged.models.kv_cache import NUM_COPIES_AHEAD, stored_as, weight_nbytes
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.options.config import DEFAULT_BLOCK_SIZE, DEFAULT_MAX_NUM_BATCHED_TOKENS, KVBits

# Dependent kernels in a layer's decode, and the time to launch one; both assumed.
LAUNCHES_PER_LAYER = 14
LAUNCH_SECONDS = 4e-6
# In the order of their loss of quality.
_FEWER_BITS = (("8", KVBits(8, 8)), ("K:8,V:4", KVBits(8, 4)), ("4", KVBits(4, 4)))
# A shorter context is not suggested.
_LEAST_CONTEXT = 1024
_CONTEXT_STEP = 256
_BUDGET_STEP = 2**28


class Footprint:
    """The sizes of a model with K/V in a format.

    Args:
        model: its weights need not be read.
        kv_bits: of K and V; ``None`` for the dtype of the model's activations.

    Attributes:
        context_length: the model's own, in tokens.
        nbytes_per_token: K/V of a token in all layers.
        nbytes_per_late_token: K/V that one more token adds to a sequence that exceeds all windows:
            a layer with a window drops an old token for each new one.

    Raises:
        ArgumentError: rows of the model can't be stored in these bits.
    """

    def __init__(self, model: LanguageModel, kv_bits: KVBits | None = None):
        self.model, self.kv_bits = model, kv_bits
        layers = stored_as(kv_bits, model.layer_specs)
        groups = group_layers(layers, DEFAULT_BLOCK_SIZE, None)
        self.one_block = KVCacheConfig(tuple(layers), DEFAULT_BLOCK_SIZE, 1, groups)
        self.num_parameters, self.weight_nbytes = num_parameters_of(model), weight_nbytes(model)
        self.context_length = context_length(model.args)
        self.nbytes_per_token = self.one_block.nbytes_per_token
        late = [layer.nbytes_per_token for layer in layers if layer.window is None]
        self.nbytes_per_late_token = sum(late)
        self._need = BlockNeed(self.one_block.retentions, DEFAULT_BLOCK_SIZE)

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

    # Speed

    def tokens_per_second(self, bandwidth: float, num_tokens: int, num_seqs: int) -> float:
        """An estimate of the decode throughput of ``num_seqs`` sequences of ``num_tokens``: a step
        takes its bytes over ``bandwidth``, in bytes per second, plus its kernel launches.
        """
        nbytes = nbytes_read(self.model, num_seqs)
        nbytes += self.kv_nbytes(num_tokens, num_seqs) + 2 * num_seqs * self.model.state_nbytes
        seconds = nbytes / bandwidth + self.model.num_layers * LAUNCHES_PER_LAYER * LAUNCH_SECONDS
        return num_seqs / seconds


@dataclass
class Fit:
    """The memory that conversations with a model take on a machine.

    Args:
        context: tokens of each conversation; 0 for the model's context length.
        num_seqs: the number of conversations at once.
        kv_cache_bytes: the budget of K/V and states; ``None`` for the default.

    Attributes:
        budget: of K/V and states; negative if it is the default, and the weights leave nothing.
        kv_nbytes, state_nbytes, activations: bytes that they take; those of activations are an
            estimate.
        nbytes: all bytes, weights included.
        is_yes: whether all of it fits.
        loads: whether the machine can hold the weights at all.

    Raises:
        ArgumentError: ``context`` exceeds the model's context length.
    """

    footprint: Footprint
    machine: Machine
    context: int = 0
    num_seqs: int = 1
    kv_cache_bytes: int | None = None

    def __post_init__(self) -> None:
        footprint, machine = self.footprint, self.machine
        most = footprint.context_length
        self.context = self.context or most
        if self.context > most:
            raise ArgumentError(
                f"max_model_len: the model was made for {most:,} tokens, got {self.context:,}",
                "max_model_len",
            )
        is_cpu, weights = None if machine.is_this_one else False, footprint.weight_nbytes
        activations = default_activation_nbytes(footprint.model, is_cpu)
        default = machine.kv_share(weights, activations)
        self.budget = default if self.kv_cache_bytes is None else self.kv_cache_bytes
        self.kv_nbytes = footprint.kv_nbytes(self.context, self.num_seqs)
        self.state_nbytes = footprint.state_nbytes(self.num_seqs)
        self.activations = footprint.activation_nbytes(self.context, self.num_seqs, is_cpu)
        self.nbytes = weights + self.kv_nbytes + self.state_nbytes + self.activations
        fits_budget = self.longest_context(self.num_seqs) >= self.context
        self.is_yes = fits_budget and self.nbytes <= machine.limit
        self.loads = weights <= machine.limit

    def longest_context(self, num_seqs: int) -> int:
        """The most tokens for each of these conversations; 0 if the weights leave too little."""
        return self.footprint.num_tokens(self.budget, num_seqs) if self.budget > 0 else 0

    def ways_out(self) -> list[str]:
        """Flags of this program with which it fits, least costly first; empty if none helps.

        The budget is the least one, in steps of ``_BUDGET_STEP``, that holds the conversations and
        leaves memory for activations; a context is the longest one, in steps of ``_CONTEXT_STEP``.
        """
        left = self.machine.limit - self.footprint.weight_nbytes - self.activations
        budgets = range(_BUDGET_STEP, left + 1, _BUDGET_STEP)
        place = bisect_left(budgets, True, key=lambda n: replace(self, kv_cache_bytes=n).is_yes)
        found = [f"--kv-cache-bytes {n / 2**30:g}G" for n in budgets[place : place + 1]]
        for flag, bits in _FEWER_BITS:
            footprint = _stored(self.footprint.model, bits)
            if footprint is None or footprint.nbytes_per_token >= self.footprint.nbytes_per_token:
                continue
            if replace(self, footprint=footprint).is_yes:
                found.append(f"--kv-bits {flag}")
                break
        contexts = range(_LEAST_CONTEXT, self.context + 1, _CONTEXT_STEP)
        for num_seqs in dict.fromkeys((self.num_seqs, 1)):
            fit = replace(self, num_seqs=num_seqs)
            place = bisect_left(contexts, True, key=fit._is_too_long)
            parallel = "" if num_seqs == self.num_seqs else f" --parallel {num_seqs}"
            if place:
                found.append(f"--context {contexts[place - 1]}{parallel}")
        return found

    def _is_too_long(self, context: int) -> bool:
        return not replace(self, context=context).is_yes


def _stored(model: LanguageModel, bits: KVBits) -> Footprint | None:
    try:
        return Footprint(model, bits)
    except ArgumentError:
        return None
