"""mlx-lm's models on the Metal kernels: windows, sinks, latents, and widths without a kernel for
attention.
"""

from __future__ import annotations

import warnings

from helpers.fast_lane import mostly_slow
from helpers.mlx_lm_models import DEEPSEEK_V3, GPT_OSS, LLAMA, random_model, stock_tokens
from helpers.write_rules import slots_of_the_step
from metal_emulator import Checks
from paged_testing.emulated_metal import emulated_metal

from mlx_paged import Engine, SamplingParams
from mlx_paged.models.mlx_lm import adapt

PROMPTS = [[7, 3, 3, 8] * 5, [90, 4, 17]]
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
CONFIGS = {
    "windows_and_sinks": GPT_OSS,
    "latents": {**DEEPSEEK_V3, "kv_lora_rank": 256, "qk_rope_head_dim": 64},
    "latents_that_are_gathered": {**DEEPSEEK_V3, "kv_lora_rank": 64},
    "other_width": {**LLAMA, "head_dim": 48},
}


@mostly_slow("name", CONFIGS)
def test_answers_are_those_of_mlx_lm(name, compiler):
    config = CONFIGS[name]
    model = random_model(config)
    expected = {str(i): stock_tokens(model, prompt, 4) for i, prompt in enumerate(PROMPTS)}
    checks = Checks(("ascending",), writable=slots_of_the_step, watch_accesses=False)
    with emulated_metal(checks) as trace, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*gathered for MLX's own attention")
        engine = Engine(adapt(model, config), block_size=8, backend="metal")
        trace.clear()  # of what the check at start-up called
        for request_id, prompt in zip(expected, PROMPTS, strict=True):
            engine.add_request(request_id, prompt, GREEDY)
        answers = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
    assert answers == expected
    called = {call.kernel.removeprefix("mlx_paged_") for call in trace}
    attends = name in ("windows_and_sinks", "latents")
    assert called == {"reshape_and_cache", "paged_attention" if attends else "gather_blocks"}
