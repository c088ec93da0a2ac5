"""``Snapshots``: what of an engine's prefix cache goes into files, and comes back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from mlx.nn.layers.base import Module

from mlx_paged.cache import KVCache
from mlx_paged.distributed import Ranks
from mlx_paged.engine.scheduler import extra_hash_keys
from mlx_paged.errors import ArgumentError
from mlx_paged.request import check_cache_salt
from mlx_paged.snapshots import KVFacts, SnapshotFile, load_prefix, save_prefix


class Snapshots:
    """Files of K/V for the engine of a model and a cache.

    Args:
        draft_model: whose layers stand behind those of the model, if there is one.
        finds_prefixes: whether K/V stay to be found when a request has ended.
        ranks: that hold the model together.
    """

    def __init__(
        self,
        model: Module,
        cache: KVCache,
        draft_model: Module | None,
        finds_prefixes: bool,
        ranks: Ranks | None,
    ):
        self._model, self._cache, self._draft_model = model, cache, draft_model
        self._finds_prefixes, self._ranks = finds_prefixes, ranks

    @cached_property
    def facts(self) -> KVFacts:
        """Reads all weights, once."""
        return KVFacts.of(self._model, self._cache, self._draft_model)

    def check(self, name: str) -> None:
        """Refuse by name what has no K/V to save, or not all of them.

        Raises:
            ArgumentError: no prefixes are kept, the model has a recurrent state, or it is split.
        """
        if self._ranks is not None:
            raise ArgumentError(
                f"[engine] {name} can't be combined with several ranks, each of which has K/V of "
                "its own heads",
                "model",
            )
        if not self._finds_prefixes:
            raise ArgumentError(
                f"[engine] {name} needs enable_prefix_caching: K/V of requests that have ended lie "
                "in the prefix cache",
                "enable_prefix_caching",
            )
        self.facts  # noqa: B018

    def save(self, path: str | Path, token_ids: Sequence[int], cache_salt: str | None) -> int:
        return save_prefix(path, self.facts, self._cache, token_ids, _keys(cache_salt))

    def open(self, path: str | Path) -> SnapshotFile:
        return SnapshotFile(path, self.facts)

    def load(self, file: SnapshotFile, cache_salt: str | None) -> list[int] | Exception:
        """What it raises is returned: the bookkeeping is as it was."""
        try:
            return load_prefix(file, self._cache, _keys(cache_salt))
        except Exception as error:
            return error


def _keys(cache_salt: str | None) -> tuple[str, ...]:
    return extra_hash_keys(check_cache_salt(cache_salt))
