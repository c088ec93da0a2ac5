"""Converts token ids of any form to Python integers. Does not import MLX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard

from mlx_paged.argument_values import as_integer, is_sequence, kind_of
from mlx_paged.errors import ArgumentError, reason, shown

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np


TokenIds: TypeAlias = "Sequence[int] | mx.array | np.ndarray"


class Array(Protocol):
    """An array of numpy, MLX or another library."""

    shape: Any
    ndim: int

    def tolist(self) -> Any: ...


def check_token_ids(token_ids: object, vocab_size: int, name: str = "prompt") -> list[int]:
    """The token ids as Python integers, checked because a model looks up any number silently.

    Raises:
        ValueError: not a sequence or an array of one dimension, or an element is not an integer or
            is outside the vocabulary; the message gives its position.
    """
    checked: list[int] = []
    for token in _elements(token_ids, name):
        index = token if type(token) is int else as_integer(token)
        if index is None:
            raise ArgumentError(
                f"[prompt] token ids are integers, got {shown(token)} ({kind_of(token)}) as "
                f"{name}[{len(checked)}]"
            )
        if not 0 <= index < vocab_size:
            raise ArgumentError(
                f"[prompt] token id {index} is outside the model's vocabulary of {vocab_size}, "
                f"given as {name}[{len(checked)}]"
            )
        checked.append(index)
    return checked


def _elements(token_ids: object, name: str) -> Sequence[object]:
    if is_array(token_ids):
        if token_ids.ndim != 1:
            raise ArgumentError(
                f"[prompt] {name} is an array of shape {tuple(token_ids.shape)}; token ids "
                f"have one dimension, such as {name}[0]"
            )
        return read_array(token_ids, name)
    if not is_sequence(token_ids):
        raise ArgumentError(
            f"[prompt] a prompt is text or token ids, got {kind_of(token_ids)} as {name}"
        )
    return token_ids


def is_array(value: object) -> TypeGuard[Array]:
    """Whether a value is an array, judged by its attributes, which works for any library."""
    return (
        hasattr(value, "tolist")
        and hasattr(value, "ndim")
        and not isinstance(value, (type, memoryview))
    )


def read_array(array: Array, name: str) -> list[object]:
    """The elements of an array; raises ``ValueError`` if it can't be read."""
    try:
        elements: list[object] = array.tolist()
    except Exception as error:
        # A lazy array of MLX may fail, or belong to another thread.
        raise ArgumentError(
            f"[prompt] {name} is an array that can't be read: {reason(error)}"
        ) from error
    return elements
