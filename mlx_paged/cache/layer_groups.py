"""Groups of layers that keep the same tokens and share a block table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlx_paged.cache.layer import LayerSpec
from mlx_paged.core import KEEP_ALL, POSITION_WRAP, Retention
from mlx_paged.options.config import StreamingWindow

# The most tokens evicted from a streaming window at a time: prompts are computed in such runs.
MAX_STRIDE = 256
# A group with fewer layers than the others leaves a part of each of its blocks unused. The largest
# share of bytes that this may add to a sequence of ``CONTEXT`` tokens, and to one that is still
# shorter than any window.
CONTEXT = 32_768
MAX_PADDING = 1 / 32
MAX_PADDING_SHORT = 1 / 4


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
    size = _group_size({retention: len(each) for retention, each in by_retention.items()})
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


def _group_size(counts: Mapping[Retention, int]) -> int:
    """The largest group size, and so the fewest tables, whose padding is within the limits.

    In groups of ``size``, the ``count`` layers of a retention take the slots of ``ceil(count /
    size) * size`` layers, each for the tokens that the retention keeps. So the bytes of a sequence
    are proportional to the sum, over the retentions, of these slots times those tokens. A single
    unused slot among layers that keep all tokens can cost more than many among windows.
    """

    def padding(size: int, held: Mapping[Retention, int]) -> float:
        used = sum(count * held[retention] for retention, count in counts.items())
        unused = sum(-count % size * held[retention] for retention, count in counts.items())
        return unused / used

    long = {retention: retention.max_num_held(CONTEXT) for retention in counts}
    short = dict.fromkeys(counts, 1)
    for size in range(max(counts.values()), 1, -1):
        if padding(size, long) <= MAX_PADDING and padding(size, short) <= MAX_PADDING_SHORT:
            return size
    return 1
