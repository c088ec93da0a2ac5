"""The class of a model while it is attached: a subclass of its own with another ``make_cache`` and
``__call__``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged.attachment.prompt_cache import FollowingCache, PromptCache
from mlx_paged.errors import ArgumentError
from mlx_paged.models.language_model import ATTACHMENT

PromptCaches = Sequence[PromptCache | FollowingCache]


class Runner(Protocol):
    """What the class of an attached model calls."""

    model: Module

    def make_cache(self) -> list[PromptCache | FollowingCache]: ...

    def run(self, tokens: mx.array, caches: PromptCaches) -> mx.array: ...


def is_attached(model: Module) -> bool:
    return hasattr(type(model), ATTACHMENT)


def attached_class(stock_class: Any, attachment: Runner) -> type[Module]:
    """A subclass of a model's class that passes calls with prompt caches of an attached model to
    ``attachment``, and all others to the model's own class.
    """
    stock_call: Callable[..., mx.array] = stock_class.__call__
    names = list(inspect.signature(stock_call).parameters)[1:]
    cache_index = names.index("cache")

    def call(self: Module, *args: Any, **kwargs: Any) -> mx.array:
        caches: Any = args[cache_index] if len(args) > cache_index else kwargs.get("cache")
        if not _are_ours(caches):
            return stock_call(self, *args, **kwargs)
        _check_same(self, attachment.model)
        given = dict(zip(names, args, strict=False)) | kwargs
        for name, value in given.items():
            if name not in (names[0], "cache") and value is not None:
                raise ArgumentError(
                    f"[attach] {name} can't be combined with a prompt cache of an attached model",
                    name,
                )
        return attachment.run(given[names[0]], caches)

    def make_cache(self: Module) -> list[PromptCache | FollowingCache]:
        _refuse_max_kv_size()
        _check_same(self, attachment.model)
        return attachment.make_cache()

    members = {
        "__call__": call,
        "make_cache": make_cache,
        "__module__": stock_class.__module__,
        ATTACHMENT: attachment,
    }
    return type(stock_class.__name__, (stock_class,), members)


def _check_same(model: Module, attached: Module) -> None:
    if model is not attached:
        raise ArgumentError(
            "[attach] model is a copy of an attached model; copy it before attaching", "model"
        )


def _are_ours(caches: Any) -> bool:
    if not isinstance(caches, list | tuple) or not caches:
        return False
    return isinstance(caches[0], PromptCache | FollowingCache)


def _refuse_max_kv_size() -> None:
    """mlx-lm's ``make_prompt_cache`` ignores ``max_kv_size`` if a model makes its own cache."""
    # Not kept in a variable of its own frame: such a cycle would keep the callers' variables alive.
    caller = sys._getframe(2)
    is_asked = caller.f_code is make_prompt_cache.__code__
    if is_asked and caller.f_locals.get("max_kv_size") is not None:
        raise ArgumentError(
            "[attach] max_kv_size can't be combined with an attached model, which keeps all tokens "
            "that its layers attend to; leave it out: kv_cache_bytes limits all sequences together",
            "max_kv_size",
        )
