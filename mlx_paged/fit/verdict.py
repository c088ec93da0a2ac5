"""Whether a number of conversations of a given length fit, or what would make them fit."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from mlx_paged.config import KVBits
from mlx_paged.errors import ArgumentError
from mlx_paged.fit.footprint import Footprint
from mlx_paged.fit.machine import Machine
from mlx_paged.models.activations import default_activation_nbytes
from mlx_paged.models.language_model import LanguageModel

# In the order of their loss of quality.
_FEWER_BITS = (("8", KVBits(8, 8)), ("K:8,V:4", KVBits(8, 4)), ("4", KVBits(4, 4)))
# A shorter context is not suggested.
_LEAST_CONTEXT = 1024
_CONTEXT_STEP = 256
_BUDGET_STEP = 2**28


@dataclass(frozen=True)
class Fit:
    """The memory that conversations with a model take on a machine.

    Attributes:
        context: tokens of each conversation.
        num_seqs: the number of conversations at once.
        kv_cache_bytes: the budget of K/V and states; ``None`` for the default.
    """

    footprint: Footprint
    machine: Machine
    context: int
    num_seqs: int
    kv_cache_bytes: int | None = None

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        machine: Machine,
        kv_bits: KVBits | None = None,
        context: int | None = None,
        num_seqs: int = 1,
        kv_cache_bytes: int | None = None,
    ) -> Fit:
        """For conversations of ``context`` tokens, by default the model's context length.

        Raises:
            ArgumentError: ``context`` exceeds the model's context length, or its K/V can't be
                stored in these bits.
        """
        footprint = Footprint(model, kv_bits)
        most = footprint.context_length
        if context is not None and context > most:
            raise ArgumentError(
                f"max_model_len: the model was made for {most:,} tokens, got {context:,}",
                "max_model_len",
            )
        return cls(footprint, machine, context or most, num_seqs, kv_cache_bytes)

    @property
    def budget(self) -> int:
        """The budget of K/V and states; negative if it is the default, and the weights leave
        nothing.
        """
        if self.kv_cache_bytes is not None:
            return self.kv_cache_bytes
        activations = default_activation_nbytes(self.footprint.model, self._is_cpu)
        return self.machine.kv_share(self.footprint.weight_nbytes, activations)

    @property
    def activations(self) -> int:
        """An estimate, in bytes."""
        return self.footprint.activation_nbytes(self.context, self.num_seqs, self._is_cpu)

    @property
    def _is_cpu(self) -> bool | None:
        return None if self.machine.is_this_one else False

    @property
    def kv_nbytes(self) -> int:
        return self.footprint.kv_nbytes(self.context, self.num_seqs)

    @property
    def state_nbytes(self) -> int:
        return self.footprint.state_nbytes(self.num_seqs)

    @property
    def nbytes(self) -> int:
        return self.footprint.weight_nbytes + self.kv_nbytes + self.state_nbytes + self.activations

    def longest_context(self, num_seqs: int) -> int:
        """The most tokens for each of these conversations; 0 if the weights leave too little."""
        return self.footprint.num_tokens(self.budget, num_seqs) if self.budget > 0 else 0

    @property
    def is_yes(self) -> bool:
        fits_budget = self.longest_context(self.num_seqs) >= self.context
        return fits_budget and self.nbytes <= self.machine.limit

    @property
    def loads(self) -> bool:
        """Whether the machine can hold the weights at all."""
        return self.footprint.weight_nbytes <= self.machine.limit

    def ways_out(self) -> list[str]:
        """Flags of this program with which it fits, least costly first; empty if none helps."""
        found = []
        budget = self._least_budget()
        if budget is not None:
            found.append(f"--kv-cache-bytes {budget / 2**30:g}G")
        for flag, bits in _FEWER_BITS:
            footprint = _stored(self.footprint.model, bits)
            if footprint is None or footprint.nbytes_per_token >= self.footprint.nbytes_per_token:
                continue
            if replace(self, footprint=footprint).is_yes:
                found.append(f"--kv-bits {flag}")
                break
        for num_seqs in dict.fromkeys((self.num_seqs, 1)):
            context = self._longest_that_fits(num_seqs)
            if context is not None:
                parallel = "" if num_seqs == self.num_seqs else f" --parallel {num_seqs}"
                found.append(f"--context {context}{parallel}")
        return found

    def _longest_that_fits(self, num_seqs: int) -> int | None:
        """The longest context, in steps of ``_CONTEXT_STEP``, with which everything fits; ``None``
        if that is shorter than ``_LEAST_CONTEXT``.
        """
        contexts = range(_LEAST_CONTEXT, self.context + 1, _CONTEXT_STEP)

        def is_too_long(context: int) -> bool:
            return not replace(self, context=context, num_seqs=num_seqs).is_yes

        num_fitting = bisect_left(contexts, True, key=is_too_long)
        return contexts[num_fitting - 1] if num_fitting else None

    def _least_budget(self) -> int | None:
        """The least budget, in steps of ``_BUDGET_STEP``, that holds the conversations and leaves
        memory for activations; ``None`` if there is none.
        """
        left = self.machine.limit - self.footprint.weight_nbytes - self.activations
        budgets = range(_BUDGET_STEP, left + 1, _BUDGET_STEP)

        def holds_all(budget: int) -> bool:
            return replace(self, kv_cache_bytes=budget).is_yes

        place = bisect_left(budgets, True, key=holds_all)
        return budgets[place] if place < len(budgets) else None


def _stored(model: LanguageModel, bits: KVBits) -> Footprint | None:
    try:
        return Footprint(model, bits)
    except ArgumentError:
        return None
