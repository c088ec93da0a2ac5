"""Whether a number of conversations of a given length fit, or what would make them fit."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_paged.config import KVBits
from mlx_paged.errors import ArgumentError
from mlx_paged.fit.footprint import Footprint
from mlx_paged.fit.machine import Machine
from mlx_paged.models.language_model import LanguageModel

# In the order of their loss of quality.
_FEWER_BITS = (("8", KVBits(8, 8)), ("K:8,V:4", KVBits(8, 4)), ("4", KVBits(4, 4)))
# A shorter context is not suggested.
_LEAST_CONTEXT = 1024


@dataclass(frozen=True)
class Fit:
    """The memory that conversations with a model take on a machine.

    Attributes:
        context: tokens of each conversation.
        num_seqs: the number of conversations at once.
    """

    footprint: Footprint
    machine: Machine
    context: int
    num_seqs: int

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        machine: Machine,
        kv_bits: KVBits | None = None,
        context: int | None = None,
        num_seqs: int = 1,
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
        return cls(footprint, machine, context or most, num_seqs)

    @property
    def budget(self) -> int:
        """The default budget of K/V and states; negative if the weights exceed it."""
        return self.machine.usable - self.footprint.weight_nbytes

    @property
    def activations(self) -> int:
        """An estimate, in bytes."""
        is_cpu = None if self.machine.is_this_one else False
        return self.footprint.activation_nbytes(self.context, self.num_seqs, is_cpu)

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
        for flag, bits in _FEWER_BITS:
            footprint = _stored(self.footprint.model, bits)
            if footprint is None or footprint.nbytes_per_token >= self.footprint.nbytes_per_token:
                continue
            if Fit(footprint, self.machine, self.context, self.num_seqs).is_yes:
                found.append(f"--kv-bits {flag}")
                break
        for num_seqs in dict.fromkeys((self.num_seqs, 1)):
            context = min(self.longest_context(num_seqs), self.context) // 256 * 256
            shorter = Fit(self.footprint, self.machine, context, num_seqs)
            if context >= _LEAST_CONTEXT and shorter.is_yes:
                parallel = "" if num_seqs == self.num_seqs else f" --parallel {num_seqs}"
                found.append(f"--context {context}{parallel}")
        return found


def _stored(model: LanguageModel, bits: KVBits) -> Footprint | None:
    try:
        return Footprint(model, bits)
    except ArgumentError:
        return None
