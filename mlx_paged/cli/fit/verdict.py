"""The memory that a model takes and the duration of its steps, computed from its shapes alone;
whether a number of conversations of a given length fit, or what would make them fit.
"""

from __future__ import annotations

from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, replace

from mlx_paged.cache import KVCacheConfig
from mlx_paged.cli.fit.machine import Machine
from mlx_paged.core.block_need import BlockNeed
from mlx_paged.engine.speculation.speculation import WAITING_SHARE
from mlx_paged.engine.speculation.step_costs import cost_of, nbytes_read, num_parameters_of
from mlx_paged.errors import ArgumentError
from mlx_paged.models.activations import activation_nbytes, default_activation_nbytes
from mlx_paged.models.context_length import context_length
from mlx_paged.models.kv_cache import (
    NUM_COPIES_AHEAD,
    NUM_COPIES_BEFORE_DRAFTS,
    layers_of,
    weight_nbytes,
)
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.options.config import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    KVBits,
)

# Dependent kernels in a layer's decode, and the time to launch one; both assumed.
LAUNCHES_PER_LAYER = 14
LAUNCH_SECONDS = 4e-6
_SECONDS_PER_LAYER = LAUNCHES_PER_LAYER * LAUNCH_SECONDS
# The share of drafts that are accepted where those before them are; assumed. For the first draft of
# a head, 0.45 to 0.94 are published.
ACCEPTANCE = 0.7
# In the order of their loss of quality.
_FEWER_BITS = (("8", KVBits(8, 8)), ("K:8,V:4", KVBits(8, 4)), ("4", KVBits(4, 4)))
# A shorter context is not suggested.
_LEAST_CONTEXT = 1024
_CONTEXT_STEP = 256
_BUDGET_STEP = 2**28


@dataclass
class Footprint:
    """The sizes of a model with K/V in a format.

    Args:
        model: its weights need not be read.
        kv_bits: of K and V; ``None`` for the dtype of the model's activations.
        draft_model: a model or a head that drafts, which counts, too.

    Attributes:
        draft_nbytes: weights of the draft model, which are among ``weight_nbytes``.
        adapter_nbytes: room for LoRA adapters, which is, too.
        draft_share: of the K/V of a token, those of the draft model.
        context_length: the model's own, in tokens.
        nbytes_per_token: K/V of a token in all layers.
        nbytes_per_late_token: K/V that one more token adds to a sequence that exceeds all windows:
            a layer with a window drops an old token for each new one.

    Raises:
        ArgumentError: rows of the model can't be stored in these bits.
    """

    model: LanguageModel
    kv_bits: KVBits | None = None
    draft_model: LanguageModel | None = None

    def __post_init__(self) -> None:
        model, draft_model = self.model, self.draft_model
        models = [model] if draft_model is None else [model, draft_model]
        layers, groups = layers_of(models, self.kv_bits, DEFAULT_BLOCK_SIZE)
        self.one_block = block = KVCacheConfig(tuple(layers), DEFAULT_BLOCK_SIZE, 1, groups)
        self.num_parameters = num_parameters_of(model)
        self.draft_nbytes = 0 if draft_model is None else weight_nbytes(draft_model)
        self.adapter_nbytes = model.adapter_nbytes
        self.weight_nbytes = weight_nbytes(model) + self.draft_nbytes
        self.context_length = context_length(model.args)
        self.nbytes_per_token = block.nbytes_per_token
        late = [each.nbytes_per_token for each in layers if block.keeps_all or each.window is None]
        self.nbytes_per_late_token = sum(late)
        of_draft = layers[len(model.layer_specs) :]
        self.draft_share = sum(each.nbytes_per_token for each in of_draft) / self.nbytes_per_token
        self._need = BlockNeed(self.one_block.retentions, DEFAULT_BLOCK_SIZE)

    def state_nbytes(self, num_seqs: int) -> int:
        """States of recurrent layers, including all copies that exist at once."""
        draft, copies, nbytes = self.draft_model, NUM_COPIES_AHEAD, self.model.state_nbytes
        if draft is not None:
            copies, nbytes = copies + NUM_COPIES_BEFORE_DRAFTS, nbytes + draft.state_nbytes
        return num_seqs * copies * nbytes

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

    def tokens_per_second(self, num_seqs: int, num_drafts: int = 0) -> float:
        """An estimate of the decode throughput of this number of conversations: a step takes its
        bytes over the machine's bandwidth, which has to be known, plus its kernel launches.

        Args:
            num_drafts: of each sequence in a step. Their rows, and the wait for the step, cost what
                an engine assumes for the chip; ``ACCEPTANCE`` says how many are accepted.
        """
        footprint, model, bandwidth = self.footprint, self.footprint.model, self.machine.bandwidth
        assert bandwidth is not None
        kv_nbytes, draft_share = footprint.kv_nbytes(self.context, num_seqs), footprint.draft_share
        nbytes = nbytes_read(model, num_seqs) + (1 - draft_share) * kv_nbytes
        nbytes += 2 * num_seqs * model.state_nbytes
        seconds = nbytes / bandwidth + model.num_layers * _SECONDS_PER_LAYER
        if num_drafts and (draft := footprint.draft_model) is not None:
            chip, num_rows = self.machine.chip, num_seqs * (1 + num_drafts)
            step, draft_pass = cost_of(model, chip), cost_of(draft, chip)
            seconds *= step.of(num_rows) / step.of(num_seqs) + WAITING_SHARE
            nbytes = draft_pass.of(num_seqs) + draft_share * kv_nbytes
            seconds += num_drafts * (nbytes / bandwidth + draft.num_layers * _SECONDS_PER_LAYER)
        return num_seqs * sum(ACCEPTANCE**depth for depth in range(num_drafts + 1)) / seconds

    def ways_out(self) -> list[str]:
        """Flags of this program with which it fits, least costly first; empty if none helps.

        The budget is the least one, in steps of ``_BUDGET_STEP``, that holds the conversations and
        leaves memory for activations; a context is the longest one, in steps of ``_CONTEXT_STEP``.
        """
        before = self.footprint
        left = self.machine.limit - before.weight_nbytes - self.activations
        budgets = range(_BUDGET_STEP, left + 1, _BUDGET_STEP)
        place = bisect_left(budgets, True, key=lambda n: replace(self, kv_cache_bytes=n).is_yes)
        found = [f"--kv-cache-bytes {n / 2**30:g}G" for n in budgets[place : place + 1]]
        for flag, bits in _FEWER_BITS:
            with suppress(ArgumentError):  # where rows can't be stored in these bits
                stored = Footprint(before.model, bits, before.draft_model)
                is_less = stored.nbytes_per_token < before.nbytes_per_token
                if is_less and replace(self, footprint=stored).is_yes:
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
