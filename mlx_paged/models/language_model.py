"""The interface of models that run here."""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_paged.cache import AnySeqId, LayerKV, LayerSpec, Sequences
from mlx_paged.errors import ArgumentError

WEIGHT_PATTERN = "model*.safetensors"  # what mlx-lm reads
# A file changed more recently than this may change again without a change of its times: file
# systems have a resolution of up to two seconds, and a write through a mapping updates the times
# when it is written back, on Linux within some 35 seconds.
SETTLING_SECONDS = 60


class ModelConfig(Protocol):
    """The fields of a model's configuration that are read outside of the model."""

    vocab_size: int
    max_position_embeddings: int
    rope_scaling: dict[str, Any] | None


@dataclass(frozen=True)
class WeightFiles:
    """The weight files of a model at one moment, before they are read.

    That its arrays are those of the files is known only until something else has had the model: MLX
    writes into arrays (``weight[0] = 1``) without leaving a trace. So ``load`` forgets them, and an
    engine takes them from a model that was loaded for it.

    Attributes:
        folder: that contains them.
        versions: device, inode, size, mtime and ctime in ns of each file, links followed, in the
            order in which mlx-lm reads them: of two tensors with the same name, it takes the later
            one. The content can't change without the ctime, which programs can't set.
        settled: whether any later change would show in the versions.
        config: the model's configuration as it was read.
    """

    folder: Path
    versions: tuple[tuple[int, ...], ...]
    settled: bool
    config: str = ""

    @classmethod
    def at(cls, folder: Path) -> WeightFiles:
        """Raises ``OSError`` if a file is deleted meanwhile."""
        now = time.time()
        found = list(map(os.stat, glob.glob(str(folder / WEIGHT_PATTERN))))
        newest = max((max(each.st_mtime_ns, each.st_ctime_ns) for each in found), default=0)
        versions = tuple(
            (each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns)
            for each in found
        )
        return cls(folder, versions, now - newest / 1e9 > SETTLING_SECONDS)

    def are_unchanged(self) -> bool:
        """Whether everything read since is of these versions."""
        try:
            return self.settled and WeightFiles.at(self.folder).versions == self.versions
        except OSError:
            return False

    def key(self, *described: str) -> str:
        """A digest of everything that the arrays depend on.

        Args:
            described: the model without the contents of its arrays.
        """
        code = [version("mlx"), version("mlx-lm"), str(mx.default_device())]
        text = json.dumps([code, self.versions, self.config, described])
        return hashlib.sha256(text.encode()).hexdigest()


class LanguageModel(Module, ABC):
    """A model for packed input: the tokens of a ragged batch on one axis, without padding.

    To add one, write ``models/<model_type>.py`` with a ``Model`` and a ``ModelArgs``, like
    :mod:`mlx_paged.models.qwen3`.

    Attributes:
        args: the model's configuration.
        name: of the folder, repository or file that it was loaded from, or empty.
        path: of that folder or file, if it is known.
        description: its type and how it runs, for the first line that programs print.
        group: the ranks that its heads are split over; ``None`` if this process has all of them.
        loaded_from: the files whose weights it has, if nothing can have written into them.
        adapter_nbytes: that the adapters of its engine may take, in addition to its weights.
    """

    args: ModelConfig
    name: str = ""
    path: Path | None = None
    description: str
    group: mx.distributed.Group | None = None
    loaded_from: WeightFiles | None = None
    adapter_nbytes: int = 0

    @property
    @abstractmethod
    def dtype(self) -> mx.Dtype:
        """Of the activations."""

    @property
    @abstractmethod
    def layer_specs(self) -> list[LayerSpec]:
        """The K/V of each layer, usually in :attr:`dtype`; layers may differ."""

    @property
    def num_layers(self) -> int:
        """The number of layers that mix the tokens of a sequence, with or without K/V."""
        return len(self.layer_specs)

    @property
    def runs_packed(self) -> bool:
        """Whether all new tokens of a step run together, not one sequence at a time."""
        return True

    @property
    def state_nbytes(self) -> int:
        """Bytes of the states that recurrent layers keep of a sequence; 0 without such layers.

        A model with states reads and sets ``step.states``.
        """
        return 0

    @property
    def state_layout(self) -> tuple[str, ...]:
        """Per recurrent cache, the dtypes and shapes of its arrays as text."""
        return ()

    @property
    def keeps_kv(self) -> bool:
        """Whether any layer has K/V; otherwise :attr:`layer_specs` has a single unused layer."""
        return True

    @property
    def hidden_row_size(self) -> int:
        """The width of the rows of its last norm, which :class:`HiddenRows` takes; 0 if it does not
        let it.
        """
        return 0

    def stock_caches(self) -> list[tuple[Any, int | None]]:
        """The empty caches that mlx-lm makes for this model, each with the index of the layer whose
        K/V it holds; ``None`` for one without K/V.
        """
        return [(stock_cache(spec.window), layer) for layer, spec in enumerate(self.layer_specs)]

    def shard(self, group: mx.distributed.Group) -> None:
        """Keep this rank's share of the weights (tensor parallelism). The logits are the same on
        all ranks, and :attr:`layer_specs` has the heads of this rank.

        Raises:
            ArgumentError: names a size that is not divisible; nothing was changed.
            NotImplementedError: the model can't be split.
        """
        raise NotImplementedError(f"[{type(self).__module__}] can't be split over ranks")

    def rotate_keys(self, layer: int, keys: mx.array, distance: int) -> mx.array:
        """Keys as a layer would have computed them at positions higher by ``distance``.

        Rotations add up, so already rotated keys are rotated further.

        Args:
            keys: ``[num_tokens, num_kv_heads, key_dim]``, in any floating dtype.

        Raises:
            NotImplementedError: positions are not encoded as a rotation of the keys.
        """
        raise NotImplementedError(f"[{type(self).__module__}] can't rotate keys")

    @abstractmethod
    def __call__(
        self,
        tokens: mx.array,  # [num_tokens] int32, packed
        layers: Sequence[LayerKV],
        logit_rows: mx.array | None = None,  # [num_rows] int32
    ) -> mx.array:
        """Run the open step of a cache.

        A layer calls ``update_and_attend`` of its entry in ``layers`` with K and V of all tokens;
        positions are ``layers[0].offset``. The last layer may skip queries whose logits are not
        needed.

        Args:
            layers: ``cache.layers``.
            logit_rows: ``step.logit_rows``, the rows whose logits are needed; ``None`` for all.

        Returns:
            Logits ``[num_rows, vocab_size]``.
        """


@dataclass
class HiddenRows:
    """The hidden rows of a step at a model's last norm: those of all tokens, for a head that makes
    drafts, and those of the rows with logits, for embeddings.

    Attributes:
        are_normed: whether the rows of all tokens are the norm's results; otherwise its inputs.
            ``None``: they are not computed.
        rows: of all tokens, ``[num_tokens, hidden_size]``, once the model has run.
        of_logits: the norm's results that the logits are computed from, ``[num_rows,
            hidden_size]``.
    """

    are_normed: bool | None
    rows: mx.array | None = None
    of_logits: mx.array | None = None

    @property
    def takes_all(self) -> bool:
        """Whether the last layer and the norm compute the rows of all tokens."""
        return self.are_normed is not None

    def take(self, x: mx.array, normed: mx.array) -> None:
        """Called by a model with the norm's input and result for all tokens, ``[num_tokens, ...,
        hidden_size]``.
        """
        rows = normed if self.are_normed else x
        self.rows = rows.reshape(rows.shape[0], rows.shape[-1])

    def take_of_logits(self, normed: mx.array) -> None:
        """Called by a model with the norm's result for the rows with logits, ``[num_rows, ...,
        hidden_size]``.
        """
        self.of_logits = normed.reshape(normed.shape[0], normed.shape[-1])


_hidden_rows: ContextVar[HiddenRows | None] = ContextVar("hidden rows", default=None)


def wanted_hidden_rows() -> HiddenRows | None:
    """What takes the hidden rows of the step that runs in this thread, if anything does."""
    return _hidden_rows.get()


@contextmanager
def taking_hidden_rows(
    are_normed: bool | None, of_logits: bool = False
) -> Iterator[HiddenRows | None]:
    """Have the models that run in this context give their hidden rows.

    Args:
        are_normed: of all tokens; ``None`` for none of them.
        of_logits: whether those of the rows with logits are read.
    """
    hidden = HiddenRows(are_normed) if of_logits or are_normed is not None else None
    token = _hidden_rows.set(hidden)
    try:
        yield hidden
    finally:
        _hidden_rows.reset(token)


def rotate_on(rope: Callable[..., mx.array], keys: mx.array, distance: int) -> mx.array:
    """Implements :meth:`LanguageModel.rotate_keys` for keys that ``rope`` has rotated.

    Args:
        rope: a RoPE module of mlx-lm or MLX, called with an ``offset``.
        keys: ``[num_tokens, num_kv_heads, key_dim]``, in any floating dtype.
    """
    # Some kinds of scaling also multiply keys, which must not happen twice.
    length = rope(mx.ones((1, 1, 1, keys.shape[-1])), offset=0)
    rotated = rope(keys.astype(mx.float32)[:, :, None] / length, offset=distance)
    return rotated.squeeze(2).astype(keys.dtype)


def stock_cache(window: int | None) -> KVCache | RotatingKVCache:
    """An empty cache of mlx-lm for one layer."""
    return KVCache() if window is None else RotatingKVCache(window)


def packed_step(
    model: LanguageModel,
    sequences: Sequences,
    new_tokens: Mapping[AnySeqId, Sequence[int]],
    num_logit_rows: Sequence[int] | None = None,
) -> mx.array:
    """As :func:`mlx_paged.run_step`, whose arguments are checked."""
    num_new_tokens = {seq: len(ids) for seq, ids in new_tokens.items()}
    with sequences.step(num_new_tokens, num_logit_rows) as step:
        tokens = mx.array(list(itertools.chain.from_iterable(new_tokens.values())))
        logits: mx.array = model(tokens, sequences.cache.layers, step.logit_rows)
        # While this step is unevaluated, a later one would copy every slab it writes to.
        mx.eval(logits, sequences.cache.arrays)
    return logits


def model_type_of(model: LanguageModel) -> str:
    """The model's ``model_type``, for messages."""
    return str(getattr(model, "model_type", type(model).__name__))


def check_divisible(sizes: dict[str, int], num_ranks: int) -> None:
    """Check that sizes are divisible by the number of ranks.

    Args:
        sizes: by their names in ``config.json``.

    Raises:
        ArgumentError: a size is not; the message names it.
    """
    for name, size in sizes.items():
        if size % num_ranks:
            raise ArgumentError(
                f"[ranks] {name}={size} of the model is not divisible by {num_ranks} ranks; start "
                "another number of ranks",
                name,
            )


def check_linear_sizes(model: Module, names: set[str], num_ranks: int) -> None:
    """Check that the inputs of quantised weights can be split between two groups of a scale.

    Args:
        names: of the layers whose inputs are split, such as ``o_proj``.

    Raises:
        ArgumentError: those of a layer can't; the message names it.
    """
    for path, module in model.named_modules():
        name, group_size = path.rpartition(".")[2], getattr(module, "group_size", None)
        if name in names and group_size is not None and module.scales.shape[-1] % num_ranks:
            num_inputs = module.scales.shape[-1] * group_size
            raise ArgumentError(
                f"[ranks] {path} has {num_inputs} inputs in groups of {group_size} for each scale, "
                f"which {num_ranks} ranks can't share evenly; quantise it with smaller groups",
                name,
            )
