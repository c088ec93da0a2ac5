"""``KernelsBeside``: the kernels of an engine are checked while the model's weights are read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from mlx.nn.layers.base import Module

from mlx_paged.cache import LayerSpec
from mlx_paged.engine.thread import EngineThread
from mlx_paged.models.kv_cache import stored_as
from mlx_paged.models.matmul_choice import try_formats_of
from mlx_paged.ops import TrialStoppedError, try_kernels_of
from mlx_paged.ops.tried_once import GoOn
from mlx_paged.options.config import (
    DEFAULT_BACKEND,
    DEFAULT_BLOCK_SIZE,
    DEFAULT_KV,
    DEFAULT_MATMUL,
    KVBits,
)


class KernelsBeside:
    """Checks kernels in a separate thread with its own MLX streams: those of a cache and those that
    multiply. An engine takes the results when it is made, waits for running checks, and makes those
    that were not begun. An error or an interrupt inside the context ends the checks.

        with KernelsBeside(options) as beside:
            ...  # read the shapes of layers
            beside.begin(layers, model)
            ...  # read weights

    Args:
        options: of the engine to be made, not validated yet; ``None`` checks nothing.
    """

    def __init__(self, options: Mapping[str, Any] | None):
        self._options = options
        self._is_stopped = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._is_stopped.set()

    def begin(self, layers: Sequence[LayerSpec], model: Module) -> None:
        """Begin to check the kernels for these layers, and for the linear layers of the model,
        whose weights are lazy, as far as the engine will use kernels.
        """
        try:
            trials = self._trials_of(layers, model)
        except (ValueError, TypeError):
            return  # Invalid options, which the engine refuses.
        if not trials:
            return
        thread = EngineThread("mlx_paged kernels")

        def go_on() -> None:
            if self._is_stopped.is_set():
                raise TrialStoppedError
            thread.check()  # Python may be exiting.

        def run() -> None:
            try:
                for trial in trials:
                    trial(go_on)
            finally:
                thread.end()

        # The engine's own check reports what this one raises.
        thread.submit(run)

    def _trials_of(
        self, layers: Sequence[LayerSpec], model: Module
    ) -> list[Callable[[GoOn], None]]:
        options = self._options
        if options is None or not layers:
            return []
        trials = []
        if options.get("kv", DEFAULT_KV) == "paged":
            block_size = options.get("block_size", DEFAULT_BLOCK_SIZE)
            stored = stored_as(KVBits.parse(options.get("kv_format")), layers)
            shapes = [spec.attention_shape(block_size) for spec in stored]
            trials.append(try_kernels_of(options.get("backend", DEFAULT_BACKEND), shapes))
        matmul = options.get("matmul", DEFAULT_MATMUL)
        trials.append(try_formats_of(matmul, model, layers[0].format.dtype))
        return [trial for trial in trials if trial is not None]
