"""Models that run one sequence at a time, and one with recurrent layers, on the Metal kernels:
slabs are written in the order of the calls, and the next step is launched while one runs.
"""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import pytest
from helpers.adapted_models import adapted_model, greedy_answer
from helpers.engine_runs import assert_nothing_held, greedy, make_engine, prompt, run
from metal_emulator.checks import Call

from mlx_paged.cache import Sequences
from mlx_paged.models.kv_cache import make_kv_cache


@pytest.mark.parametrize("name", ["gpt_bigcode", "falcon_h1"])
def test_tokens_are_those_of_mlx_lm_on_metal_kernels(metal: list[Call], name: str):
    engine = make_engine(
        adapted_model(name),
        backend="metal",
        block_size=8,
        max_num_seqs=8,
        max_num_batched_tokens=23,
        max_num_mixed_tokens=11,
    )
    assert engine.run_ahead
    shared = prompt(17, 1)
    asked = {"a": shared, "b": prompt(30), "c": [*shared, *prompt(9, 9)]}
    engine.add_request("a", shared, greedy(6))
    outputs = run(engine)
    for request_id in ("b", "c"):
        engine.add_request(request_id, asked[request_id], greedy(6))
    outputs |= run(engine)
    for request_id, output in outputs.items():
        expected = greedy_answer(name, asked[request_id], 6)
        assert output.outputs[0].token_ids == expected, request_id
    assert outputs["c"].num_cached_tokens == 16
    assert_nothing_held(engine)
    kernels = Counter(call.kernel.removeprefix("mlx_paged_") for call in metal)
    # Rows are written and gathered by kernels, and gpt_bigcode attends by itself.
    is_packed = name == "falcon_h1"
    assert {"reshape_and_cache", "gather_blocks"} <= set(kernels)
    assert any("attention" in kernel for kernel in kernels) == is_packed


def test_quantised_rows_are_read_as_they_are_stored_on_metal_kernels(metal: list[Call]):
    """The logits are those of plain MLX on the same format."""
    model, tokens = adapted_model("gpt_bigcode"), mx.array(prompt(30))
    logits = []
    for backend in ("reference", "metal"):
        cache = make_kv_cache(
            model, block_size=8, kv_cache_bytes="9blocks", kv_format="K:4,V:8", backend=backend
        )
        seqs = Sequences(cache)
        for begin, end in ((0, 21), (21, 30)):
            with seqs.step({"a": end - begin}) as step:
                rows = model(tokens[begin:end], cache.layers, step.logit_rows)
                mx.eval(rows, cache.arrays)
        logits.append(rows)
    assert mx.allclose(*logits, rtol=1e-4, atol=1e-4)
