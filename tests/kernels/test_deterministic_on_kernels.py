"""Deterministic engines on the Metal kernels: decodes, batches and verifications have the bits of
each request alone.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.nn as nn
import pytest
from helpers.deterministic_workloads import assert_same_bits, shorten_steps
from helpers.drafting import eager_speculation, knows
from helpers.engine_runs import CONFIG, greedy, livelier_model, make_engine, prompt, run
from metal_emulator import Checks
from paged_testing.emulated_metal import emulated_metal

from mlx_paged.engine import build
from mlx_paged.request import RequestOutput


@pytest.mark.parametrize("bits", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_a_batch_with_drafts_has_the_bits_of_each_request_alone_on_kernels(
    compiler, monkeypatch: pytest.MonkeyPatch, bits: int
):
    shorten_steps(monkeypatch)
    model = livelier_model(CONFIG | {"num_hidden_layers": 1, "head_dim": 32})
    if bits < 16:
        nn.quantize(model, group_size=32, bits=bits)
    # More than a chunk, fewer tokens than a run, and answers that pass the end of a block.
    prompts = {"long": prompt(35), "short": prompt(3), "middle": prompt(13)}

    def answers(names: list[str], speculation: Any = None) -> dict[str, RequestOutput]:
        engine = make_engine(model, backend="metal", deterministic=True, max_num_seqs=4)
        if speculation is not None:
            engine.scheduler.speculation = speculation
        for name in names:
            engine.add_request(name, prompts[name], greedy(7, logprobs=2))
        outputs = run(engine)
        has_drafts = engine.stats().spec_decoding.num_accepted_tokens > 0
        assert has_drafts == (speculation is not None)
        engine.close()
        return outputs

    with emulated_metal(Checks.quick()) as trace:
        alone = {name: answers([name])[name] for name in prompts}
        right = {(name, 0): output.outputs[0].token_ids for name, output in alone.items()}
        speculation = eager_speculation(61, knows(right))
        trace.clear()
        together = answers(list(prompts), speculation)
        kernels = Counter(call.kernel.removeprefix("mlx_paged_") for call in trace)
        # The kernel for runs walks the keys of the run first, a decode those of all blocks in turn.
        monkeypatch.setattr(build, "MAX_RUN_TOKENS", 0)
        in_runs = answers(list(prompts), speculation)
    assert kernels["rows_matmul"] and kernels["paged_attention"]
    for name, output in together.items():
        assert_same_bits(output, alone[name])
    with pytest.raises(AssertionError):
        for name, output in in_runs.items():
            assert_same_bits(output, alone[name])
