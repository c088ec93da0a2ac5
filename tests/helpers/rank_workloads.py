"""Random workloads for one process and for several ranks, whose tokens are the same."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from paged_testing.integrity import check_scheduler
from paged_testing.soak import SoakRequest, make_request

from helpers.engine_runs import livelier_model
from mlx_paged.distributed import launched_ranks
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.speculation.speculation import PromptLookup, Speculation
from mlx_paged.models import qwen3
from mlx_paged.request import RequestOutput

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 61,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2**20,
    "rope_theta": 1e4,
}


@dataclass(frozen=True)
class Workload:
    """Options of an engine, the seed of its requests, the drafts that each of them tries, how many
    requests and layers there are, whether the pool of the last rank has no memory to grow, and how
    many users the requests are of.
    """

    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    num_drafts: int = 0
    num_requests: int = 20
    num_layers: int = 2
    fails_to_grow: bool = False
    num_users: int = 0


WORKLOADS = {
    "swaps": Workload({"swap_bytes": "40blocks"}, 1),
    "one step ahead": Workload({"swap_bytes": 0, "run_ahead": True}, 2),
    "budgets": Workload(
        {"run_ahead": True, "token_budgets": [(0, 17, 20), (9, 64, 32), (14, 40, 28)]}, 3
    ),
    "users": Workload(
        {"run_ahead": True, "max_num_seqs": 4, "swap_bytes": "20blocks"}, 9, num_users=3
    ),
    "drafts": Workload({"swap_bytes": 0}, 3, num_drafts=3),
    "basic": Workload({"kv": "basic"}, 4),
    "eight bits": Workload({"kv_format": 8, "swap_bytes": "40blocks"}, 5),
    "a window": Workload({"window": 48, "num_sink_tokens": 4, "kv_cache_bytes": "120blocks"}, 6),
    "no memory": Workload({"kv_cache_bytes": "300blocks", "swap_bytes": 0}, 8, fails_to_grow=True),
    # Of more ranks than a machine has cores, each sum takes tens of milliseconds.
    "few": Workload({"kv_cache_bytes": "44blocks", "run_ahead": True}, 14, 0, 5, 1),
}


def make_model(num_layers: int = 2) -> qwen3.Model:
    return livelier_model(CONFIG | {"num_hidden_layers": num_layers})


def run_workload(workload: Workload) -> dict[str, Any]:
    """What became of the requests, and of the engine; the same on every rank."""
    ranks = launched_ranks()
    model = make_model(workload.num_layers)
    if ranks is not None:
        model.shard(ranks.group)
    options = {
        "block_size": 8,
        "kv_cache_bytes": "70blocks",
        "max_num_seqs": 12,
        "max_num_batched_tokens": 64,
        "max_num_mixed_tokens": 32,
        "seed": workload.seed,
        **workload.options,
    }
    if ranks is not None and ranks.rank > 0:
        # Rank 0 tells the others.
        options.pop("token_budgets", None)
    engine = Engine(model, **options)
    if workload.fails_to_grow and (ranks is None or ranks.rank == ranks.size - 1):
        vars(engine.cache)["_grow"] = lambda num_new_blocks: False
    if workload.num_drafts:
        engine.scheduler.speculation = Speculation(PromptLookup(), workload.num_drafts)
    outputs = engine.share(lambda: _run(engine, workload))
    check_scheduler(engine.scheduler)
    # Asked of the engine of this rank.
    stats = engine.stats()
    return {
        "answers": [_answer(output) for output in outputs],
        "preemptions": stats.num_preemptions,
        "accepted drafts": stats.spec_decoding.num_accepted_tokens,
        "steps": engine.scheduler.num_steps,
        "blocks": engine.scheduler.max_num_blocks,
        "blocks left in use": stats.num_used_blocks,
        "requests left": len(engine.reports.requests),
    }


def _run(engine: Engine, workload: Workload) -> list[RequestOutput]:
    rng, vocab_size = random.Random(workload.seed), engine.runner.vocab_size
    numbers = range(workload.num_requests)
    coming = [make_request(workload.seed, number, vocab_size) for number in numbers]
    asked: dict[str, tuple[SoakRequest, int]] = {}
    outputs: dict[str, RequestOutput] = {}
    num_steps = 0
    while coming or engine.has_unfinished_requests():
        while coming and rng.random() < 0.5:
            request = coming.pop(0)
            asked[request.request_id] = request, num_steps
            engine.add_request(
                request.request_id,
                request.prompt,
                request.params,
                priority=request.priority,
                cache_salt=request.cache_salt,
                user=f"user {rng.randrange(workload.num_users)}" if workload.num_users else None,
            )
        for request, step in asked.values():
            if request.abort_after is not None and num_steps == step + request.abort_after:
                engine.abort(request.request_id)
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
        num_steps += 1
        if num_steps == 30:
            engine.shrink()
    assert engine.reset_prefix_cache()
    return [outputs[name] for name in sorted(outputs, key=int)]


def _answer(output: RequestOutput) -> list[Any]:
    return [
        output.num_cached_tokens,
        # On other ranks it is of the nearest type that Python itself has.
        None
        if output.error is None
        else [isinstance(output.error, RuntimeError), str(output.error)],
        *[
            [completion.token_ids, completion.finish_reason, completion.stop_reason]
            for completion in output.outputs
        ],
    ]
