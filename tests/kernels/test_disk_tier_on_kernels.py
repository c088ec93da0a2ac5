"""Blocks that the Metal kernels wrote go to disk and come back through them, one step ahead."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.write_rules import slots_of_the_step
from metal_emulator import Checks
from paged_testing.emulated_metal import emulated_metal
from paged_testing.integrity import check_scheduler

from mlx_paged import Engine, SamplingParams, demo_model_path, load

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


def answers(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Token ids of all, and how many prompt tokens came from disk."""
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, PARAMS)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
        check_scheduler(engine.scheduler)
    ordered = [outputs[str(index)] for index in range(len(prompts))]
    tokens = [list(output.outputs[0].token_ids) for output in ordered]
    return tokens, sum(output.num_read_tokens for output in ordered)


@pytest.mark.parametrize(
    "kv_format", [None, pytest.param("K:8,V:4", marks=pytest.mark.slow)], ids=["dense", "K8V4"]
)
def test_an_answer_after_a_restart_is_that_of_the_reference(
    compiler: str, tmp_path: Path, kv_format: str | None
) -> None:
    model, tokenizer = load(demo_model_path())
    facts = tokenizer.encode("The code of apple is 4821. The code of pear is 1234. My name is Tom.")
    questions = ("What is the code of pear?", "What is my name?")
    prompts = [facts + tokenizer.encode(question) for question in questions]
    options = {"kv_cache_bytes": "60blocks", "kv_format": kv_format, "block_size": 8}
    expected, _ = answers(Engine(model, tokenizer, backend="reference", **options), prompts)
    with emulated_metal(Checks.quick(writable=slots_of_the_step)):
        first = Engine(model, tokenizer, backend="metal", cache_dir=tmp_path, **options)
        assert first.run_ahead
        assert answers(first, prompts) == (expected, 0)
        assert first.close()
        again = Engine(model, tokenizer, backend="metal", cache_dir=tmp_path, **options)
    with emulated_metal(Checks.quick()):
        tokens, num_read_tokens = answers(again, prompts)
        assert tokens == expected
        assert num_read_tokens >= len(facts) // 8 * 8
    reference = Engine(model, tokenizer, backend="reference", cache_dir=tmp_path, **options)
    # What the kernels wrote is theirs: they round in other places.
    assert answers(reference, prompts) == (expected, 0)
