"""``Updates``: the optimizer steps of the model's training and of its head's."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import cpu_ops
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map


class Updates:
    """Updates a module by the gradients of a loss: matrices by Muon, the rest by AdamW.

    Args:
        loss_of: of tokens and weights, ``[batch, length]`` each: the loss, and a share of right
            tokens.
        is_matrix: of a name and a weight: whether Muon updates it.
        inputs: the state of other modules that the loss reads.
        is_quick: for a few steps, which would take less time than fusing their loops.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Any,
        loss_of: Callable[[mx.array, mx.array], tuple[mx.array, mx.array]],
        is_matrix: Callable[[str, mx.array], bool],
        inputs: Sequence[Any] = (),
        is_quick: bool = False,
    ):
        self.settings = settings
        on_cpu = mx.default_device() == mx.Device(mx.cpu)
        self._fast_ops = cpu_ops.swapped_in if on_cpu else nullcontext
        # Muon makes a matrix's update orthogonal: on this model it learns recall in about half of
        # AdamW's steps.
        self.optimizer = optim.MultiOptimizer(
            [
                optim.Muon(settings.matrix_learning_rate, momentum=0.95, weight_decay=0.0),
                optim.AdamW(settings.learning_rate, betas=[0.9, 0.95], weight_decay=0.0),
            ],
            [is_matrix],
        )
        self.optimizer.init(module.trainable_parameters())
        self._state = [module.state, self.optimizer.state]
        mx.eval(self._state)
        gradients_of = nn.value_and_grad(module, loss_of)
        # MLX runs each CPU stream on a thread of its own, so two halves of a batch take two cores.
        streams = (
            [mx.new_stream(mx.cpu), mx.new_stream(mx.cpu)]
            if on_cpu
            else [mx.default_stream(mx.default_device())]
        )

        def update(tokens: mx.array, weights: mx.array) -> tuple[mx.array, mx.array]:
            parts = []
            halves = (mx.split(each, len(streams)) for each in (tokens, weights))
            for stream, some, their in zip(streams, *halves, strict=True):
                with mx.stream(stream):
                    parts.append(gradients_of(some, their))
            share = 1 / len(parts)
            gradients = tree_map(lambda *each: sum(each) * share, *[part[1] for part in parts])
            gradients, _ = optim.clip_grad_norm(gradients, 1.0)
            self.optimizer.update(module, gradients)
            loss, right = (
                sum(each) * share for each in zip(*[part[0] for part in parts], strict=True)
            )
            return loss, right

        # On a CPU, MLX compiles its fused loops with the system's compiler.
        fuses = not on_cpu or (shutil.which("g++") is not None and not is_quick)
        compiled = partial(mx.compile, inputs=[*self._state, *inputs], outputs=self._state)
        self._update = compiled(update) if fuses else update

    def __call__(self, tokens: Any, weights: Any, scale: float) -> tuple[mx.array, mx.array]:
        """One step, with the learning rates times ``scale``; returns what the loss does."""
        matrices, others = self.optimizer.optimizers
        matrices.learning_rate = self.settings.matrix_learning_rate * scale
        others.learning_rate = self.settings.learning_rate * scale
        with self._fast_ops():
            loss, right = self._update(mx.array(tokens), mx.array(weights))
        mx.eval(loss, right, self._state)
        return loss, right
