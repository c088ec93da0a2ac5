"""Engines on the tiny models of mlx-lm, whose prompts come in ragged chunks, and their answers."""

from __future__ import annotations

from typing import Any

from helpers.adapted_models import adapted_model
from helpers.engine_runs import make_engine, run
from mlx_paged.engine.engine import Engine


def ragged(name: str, **options: Any) -> Engine:
    """An engine whose prompts come in chunks that end anywhere, beside running answers."""
    sizes = {"block_size": 8, "max_num_seqs": 8}
    budgets = {"max_num_batched_tokens": 23, "max_num_mixed_tokens": 11}
    return make_engine(adapted_model(name), **(sizes | budgets | options))


def budget_of(name: str, num_tokens: int, share: float) -> dict[str, Any]:
    """``share`` times the blocks that a sequence of ``num_tokens`` tokens takes."""
    need = ragged(name).scheduler.manager.block_need
    return {"kv_cache_bytes": f"{int(share * need.max_num_held_blocks(num_tokens))}blocks"}


def answers(engine: Engine) -> dict[str, list[list[int]]]:
    """The tokens of all completions of all requests that are there."""
    return {
        request_id: [completion.token_ids for completion in output.outputs]
        for request_id, output in run(engine).items()
    }
