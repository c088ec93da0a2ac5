"""``show``: one prefix in detail."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from mlx_paged.block_store import BlockName
from mlx_paged.cache_tool.amounts import counted, in_bytes, in_full
from mlx_paged.cache_tool.listing import OUTDATED, Look, list_runs
from mlx_paged.cache_tool.prefixes import PrefixBlock, PrefixTree
from mlx_paged.cache_tool.selection import num_unique_digits
from mlx_paged.cache_tool.text import in_a_line, in_lines

_MAX_FACT = 1000  # columns


def show_prefix(
    tree: PrefixTree, block: PrefixBlock, pins: Collection[BlockName], look: Look
) -> Iterator[str]:
    """The lines of ``show`` for the prefix that ends with ``block``.

    Args:
        pins: all pins of the folder.
    """
    path = tree.path_to(block)
    num_digits = num_unique_digits(tree.blocks)
    facts = _facts(tree, path, look.now)
    holders = [each.block_hash.hex()[:num_digits] for each in pinned_by(tree, block, pins)]
    if holders:
        facts["pinned"] = f"yes, by the pin of {', '.join(holders)}"
    for name, fact in facts.items():
        yield f"{name:<12}{in_a_line(fact, _MAX_FACT)}"
    yield ""
    yield "its parts"
    yield from list_runs(tree.runs_of(path), num_digits, look)
    following = [tree.run_from(child) for child in tree.after(block)]
    if following:
        yield ""
        yield "what continues it"
        yield from list_runs(following, num_digits, look)
    if look.text_of is not None:
        yield ""
        yield in_lines(look.text_of(path))


def pinned_by(
    tree: PrefixTree, block: PrefixBlock, pins: Collection[BlockName]
) -> list[PrefixBlock]:
    """The blocks whose pins keep a block: itself or its successors."""
    return [
        each
        for each in (block, *(tree.below(block) if block.is_pinned else ()))
        if each.entries[0].name in pins
    ]


def _facts(tree: PrefixTree, path: Sequence[PrefixBlock], now: float) -> dict[str, str]:
    block, known = path[-1], tree.fingerprint
    before = f" (those before {path[0].first_token:,} are gone)" if path[0].first_token else ""
    num_files = sum(len(each.entries) for each in path)
    facts = {"hash": block.block_hash.hex(), "model": tree.name, "fingerprint": tree.digest}
    if known is not None:
        facts["content"] = known.model
        facts["code"] = known.code + (f" ({OUTDATED})" if tree.is_outdated else "")
        is_state = [layer.startswith("state ") for layer in known.layers]
        facts["K/V"] = f"{known.kv_format}, {counted(is_state.count(False), 'layer')}"
        if any(is_state):
            places = [f"{each.end_token:,}" for each in path if each.state is not None]
            after = f"after {', '.join(places)} tokens" if places else "none, so no hit ends in it"
            facts["states"] = f"{counted(is_state.count(True), 'layer')}, {after}"
    return facts | {
        "tokens": f"{block.end_token:,} in {counted(len(path), 'block')}{before}",
        "bytes": f"{in_bytes(sum(each.nbytes for each in path))} in {counted(num_files, 'file')}",
        "prefixes": f"{tree.num_prefixes[block.block_hash]:,} go through it, "
        f"of {tree.num_leaves:,} of the model",
        "created": in_full(block.created, now),
        "used": in_full(block.last_used, now),
        "pinned": "yes" if block.is_pinned else "no",
        "expires": "never" if block.expires is None else in_full(block.expires, now),
    }
