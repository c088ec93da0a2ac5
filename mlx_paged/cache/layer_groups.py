"""Groups of layers that keep the same tokens and share a block table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_paged.cache.layer import LayerSpec
from mlx_paged.config import StreamingWindow
from mlx_paged.core import KEEP_ALL, POSITION_WRAP, Retention

# The most tokens evicted from a streaming window at a time: prompts are computed in such runs.
MAX_STRIDE = 256
# A group with fewer layers than the others leaves a part of each of its blocks unused: the largest
# such share over all groups.
MAX_PADDING = 1 / 8


@dataclass(frozen=True)
class LayerGroup:
    """Layers that keep the same tokens and share a block table.

    The groups share the slabs: the i-th layer of each group uses the i-th slab, and each block
    belongs to one group (as in vLLM's hybrid KV cache manager).
    """

    retention: Retention
    layers: tuple[int, ...]


def group_layers(
    layers: Sequence[LayerSpec], block_size: int, streaming: StreamingWindow | None = None
) -> tuple[LayerGroup, ...]:
    """Divide the layers of a model into groups, the one that keeps the most tokens first.

    Layers with rows of different sizes can't share a slab. A model with windows and such layers is
    one group with the widest retention.

    Args:
        streaming: the retention of layers without a narrower window; by default they keep all.
    """
    retentions = [_retention(spec, block_size, streaming) for spec in layers]
    by_retention: dict[Retention, list[int]] = {}
    for index in sorted(range(len(layers)), key=lambda index: -_width(retentions[index])):
        by_retention.setdefault(retentions[index], []).append(index)
    shapes = {(spec.num_kv_heads, spec.key_dim, spec.value_dim, spec.format) for spec in layers}
    if len(by_retention) == 1 or len(shapes) > 1:
        widest = next(iter(by_retention))
        return (LayerGroup(widest, tuple(range(len(layers)))),)
    size = _group_size([len(indices) for indices in by_retention.values()])
    return tuple(
        LayerGroup(retention, tuple(sorted(indices)[start : start + size]))
        for retention, indices in by_retention.items()
        for start in range(0, len(indices), size)
    )


def _retention(spec: LayerSpec, block_size: int, streaming: StreamingWindow | None) -> Retention:
    if streaming is None:
        window = spec.window
        return KEEP_ALL if window is None else Retention.sliding_window(window, block_size)
    stream = Retention.streaming(
        streaming.window, streaming.num_sink_tokens, block_size, MAX_STRIDE, POSITION_WRAP
    )
    if spec.window is not None and spec.window <= streaming.window:
        return Retention.sliding_window(spec.window, block_size, primary=stream)
    return stream


def _width(retention: Retention) -> float:
    recent = retention.num_recent_tokens
    return float("inf") if recent is None else recent


def _group_size(counts: Sequence[int]) -> int:
    """The largest group size whose padding is within ``MAX_PADDING``."""
    for size in range(min(counts), 1, -1):
        num_padded = sum(-count % size for count in counts)
        if num_padded <= MAX_PADDING * sum(counts):
            return size
    return 1
