"""One layer of a cache: the shape of its K/V, and the interface that models use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_paged.core import BlockTable
from mlx_paged.errors import ArgumentError, shown
from mlx_paged.ops import AttentionMetadata, AttentionShape, KVFormat, Parts, device
from mlx_paged.options.argument_values import POSITIVE, is_number


@dataclass(frozen=True)
class LayerSpec:
    """The K/V of one layer (vLLM: ``KVCacheSpec``).

    Raises:
        ValueError: a number is below 1, or the cap of scores is not positive.
    """

    num_kv_heads: int
    key_dim: int  # width of a K row
    value_dim: int  # width of a V row
    window: int | None = None  # each query sees its last ``window`` tokens, itself included
    format: KVFormat = KVFormat.dense()  # noqa: RUF009 (frozen)
    # Query heads, for the start-up check of kernels. None means one per KV head.
    num_heads: int | None = None
    # Scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
    softcap: float | None = None
    # Whether K holds latents, which all heads share, and V their rotated keys (MLA).
    holds_latents: bool = False
    # Whether it has no K/V: the rows of a block hold the hidden row of its last token, for a head.
    holds_hidden_rows: bool = False

    def __post_init__(self) -> None:
        names = ["num_kv_heads", "key_dim", "value_dim"]
        names += [name for name in ("window", "num_heads") if getattr(self, name) is not None]
        for name in names:
            POSITIVE.check("kv cache", name, getattr(self, name))
        if self.softcap is not None and not (is_number(self.softcap) and self.softcap > 0):
            raise ArgumentError(
                f"[kv cache] softcap must be a positive number, got {shown(self.softcap)}"
            )

    @classmethod
    def of_hidden_rows(cls, hidden_size: int, block_size: int, dtype: mx.Dtype) -> LayerSpec:
        """One hidden row per block, spread over its tokens; narrow rows are filled up."""
        width = -(-hidden_size // (2 * block_size))
        return cls(1, width, width, format=KVFormat.dense(dtype), holds_hidden_rows=True)

    def attention_shape(self, block_size: int) -> AttentionShape:
        """The shape that selects the kernels of this layer."""
        return AttentionShape(
            self.num_kv_heads,
            (self.num_heads or self.num_kv_heads) // self.num_kv_heads,
            self.key_dim,
            self.value_dim,
            block_size,
            self.format,
            self.softcap,
            self.holds_latents,
        )

    @property
    def nbytes_per_token(self) -> int:
        key, value = self.format.key, self.format.value
        return self.num_kv_heads * (key.row_nbytes(self.key_dim) + value.row_nbytes(self.value_dim))

    def zeros(self, num_tokens: int) -> tuple[Parts, Parts]:
        """Storage for K and V of one sequence, ``[num_kv_heads, num_tokens, width]`` each part."""
        shape = (self.num_kv_heads, num_tokens)
        key, value = self.format.key, self.format.value
        return key.zeros((*shape, self.key_dim)), value.zeros((*shape, self.value_dim))


class LayerKV(ABC):
    """One layer's K/V of all sequences, as a model uses them within a step."""

    def __init__(self, spec: LayerSpec):
        self.spec = spec
        self._step: AttentionMetadata | None = None

    def open(self, step: AttentionMetadata) -> None:
        """Begin a step, which lasts until :meth:`close`."""
        self._step = step

    def close(self) -> None:
        self._step = None

    @property
    def step(self) -> AttentionMetadata:
        """The open step; raises ``RuntimeError`` when there is none."""
        if self._step is None:
            raise RuntimeError("[kv cache] no step is open; use `with cache.open_step(...)`")
        return self._step

    @property
    def offset(self) -> mx.array:
        """``[num_tokens] int32``, the position of each new token (mlx-lm's name)."""
        return self.step.positions

    @abstractmethod
    def update(self, k: mx.array, v: mx.array) -> None:
        """Write the step's rows, ``[num_tokens, num_kv_heads, key_dim]`` and ``value_dim``."""

    @abstractmethod
    def stored_rows(self, table: BlockTable) -> tuple[Parts, Parts]:
        """The stored parts of K and V of a sequence with this block table, ``[num_kv_heads,
        num_held_tokens, width]`` each; they may be views. The sequence must not be empty.
        """

    def update_and_attend(
        self,
        q: mx.array,  # [num_tokens, num_heads, key_dim]
        k: mx.array,  # [num_tokens, num_kv_heads, key_dim]
        v: mx.array,  # [num_tokens, num_kv_heads, value_dim]
        *,
        scale: float,
        sinks: mx.array | None = None,  # [num_heads]
    ) -> mx.array:
        """Write the step's K/V rows, then attend: causal within each sequence and its window.

        Args:
            q: rotated queries of all rows, or of the rows ``step.logit_rows`` only.
            k, v: of all rows, in any floating dtype.
            scale: of the scores, usually ``key_dim ** -0.5``.
            sinks: learned attention-sink logits, one per query head.

        Returns:
            ``[len(q), num_heads, value_dim]`` in the dtype of ``q``.
        """
        self.update(k, v)
        return self.attend(q, scale=scale, sinks=sinks)

    def update_and_fetch(
        self,
        run: AttentionMetadata,
        k: mx.array,  # [num_tokens, num_kv_heads, key_dim]
        v: mx.array,  # [num_tokens, num_kv_heads, value_dim]
        num_before: int | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Write K/V rows of one sequence, and read them back as stored, after the earlier rows
        (mlx-lm's name).

        For a model that computes attention itself, one sequence at a time. Unless
        :attr:`writes_in_place`, evaluate the outputs and :attr:`arrays` before the next rows are
        written.

        Args:
            run: the step of the sequence alone (:meth:`AttentionMetadata.runs_of`).
            num_before: the most earlier rows to read; all by default.

        Returns:
            ``[num_kv_heads, num_rows, key_dim]`` and ``value_dim``, in the format's dtype.
        """
        raise NotImplementedError(f"[{type(self).__name__}] can't be read one sequence at a time")

    @property
    def arrays(self) -> Sequence[mx.array]:
        """The arrays whose evaluation completes all writes so far."""
        return ()

    @property
    def writes_in_place(self) -> bool:
        """Whether writes are ordered by the calls, whenever they are evaluated."""
        return False

    @abstractmethod
    def attend(
        self,
        q: mx.array,  # [num_tokens, num_heads, key_dim]
        *,
        scale: float,
        sinks: mx.array | None = None,  # [num_heads]
    ) -> mx.array:
        """Attend to rows that are written already in this step, also by another layer of the model
        (shared K/V). Arguments and result are those of :meth:`update_and_attend`.
        """

    @abstractmethod
    def update_and_attend_latents(
        self,
        q: mx.array,  # [num_tokens, num_heads, key_dim + value_dim], scaled
        latents: mx.array,  # [num_tokens, 1, key_dim]
        rope_keys: mx.array,  # [num_tokens, 1, value_dim]
    ) -> mx.array:
        """Write a step's latents and their rotated keys, then attend (multi-head latent attention,
        DeepSeek-V2, 2024).

        The latents are stored in place of K and the rotated keys in place of V. Each query has a
        part for each, and the values are the latents.

        Args:
            q: queries of all rows: the part for latents, then the rotated part, both scaled.

        Returns:
            ``[num_tokens, num_heads, key_dim]`` in the dtype of ``q``.
        """


def compute_meanwhile(out: mx.array) -> mx.array:
    """``out``, which a CPU starts to compute while Python builds the rest of the step.

    Not on a GPU, where MLX submits work as the step is built, and this would end a command buffer.
    """
    if device.is_cpu():
        mx.async_eval(out)
    return out
