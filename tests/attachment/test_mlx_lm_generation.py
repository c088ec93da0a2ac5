"""mlx-lm's own programs give the tokens that they gave before the model was attached."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from helpers.attached_models import attached, cached_model, generated, tokens
from helpers.mlx_lm_models import LLAMA, random_model
from helpers.model_zoo import make
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import BatchGenerator, batch_generate, generate_step, speculative_generate_step
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_paged.cache import PagedKVCache

PROMPTS = [tokens(45, 0), tokens(3, 1), tokens(31, 2)]


def test_generate_step_gives_the_same_tokens_and_probabilities(any_model, computed):
    prompt = PROMPTS[0]
    expected = list(generate_step(mx.array(prompt), any_model, max_tokens=12))
    with attached(any_model) as paged:
        computed.clear()
        for _ in range(2):
            actual = list(generate_step(mx.array(prompt), any_model, max_tokens=12))
            assert [token for token, _ in actual] == [token for token, _ in expected]
            error = max(
                mx.abs(ours - theirs).max().item()
                for (_, ours), (_, theirs) in zip(actual, expected, strict=True)
            )
            assert error < 1e-4
        del actual
        stats = paged.stats()
    assert stats.num_used_blocks == stats.num_seqs == 0
    # 44 of the 45 tokens come in the first call; of the second time, 5 blocks are there already.
    assert stats.num_hit_tokens == 40
    assert computed == [44, *[1] * 13, 4, *[1] * 13]


def test_a_prompt_in_chunks_is_found_chunk_by_chunk(any_model, computed):
    expected = generated(any_model, PROMPTS[0], prefill_step_size=20)
    with attached(any_model):
        assert generated(any_model, PROMPTS[0]) == expected
        computed.clear()
        assert generated(any_model, PROMPTS[0], prefill_step_size=20) == expected
    # Chunks of 20, 20 and 4 tokens. The last token of each is computed, so of the second one the
    # whole block that it ends with.
    assert computed[:4] == [4, 8, 4, 1]


def run_batch(model) -> dict[int, list[int]]:
    """Prompts that come and go while others run, in chunks."""
    generator = BatchGenerator(
        model, max_tokens=14, prefill_batch_size=2, completion_batch_size=3, prefill_step_size=16
    )
    uids = generator.insert(PROMPTS)
    answers: dict[int, list[int]] = {}
    for step in range(100):
        prompts, responses = generator.next()
        if not prompts and not responses:
            break
        for response in responses:
            answers.setdefault(response.uid, []).append(response.token)
        if step == 5:
            uids += generator.insert([[*PROMPTS[0], 5], tokens(19, 3)], max_tokens=[6, 9])
        if step == 9:
            generator.remove([uids[1]])
    return answers


def test_a_batch_generator_gives_the_same_tokens_while_prompts_come_and_go(any_model):
    expected = run_batch(any_model)
    assert len(expected) == 5
    with attached(any_model) as paged:
        assert run_batch(any_model) == expected
        stats = paged.stats()
    assert stats.num_hit_tokens >= 24  # the prompt that begins like another one
    assert stats.num_used_blocks == 0


def test_calls_may_be_built_while_others_run(llama, monkeypatch):
    """As on Metal: nothing waits for a step before the next one is built."""
    expected = [generated(llama, PROMPTS[0]), run_batch(llama)]
    with attached(llama):
        monkeypatch.setattr(PagedKVCache, "can_run_ahead", True)
        assert [generated(llama, PROMPTS[0]), run_batch(llama)] == expected


def test_quantised_weights_and_adapters_give_the_same_tokens():
    model = random_model(LLAMA)
    nn.quantize(model, group_size=32, bits=4)
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 10.0, "dropout": 0.0})
    for name, weight in tree_flatten(model.trainable_parameters()):
        model.update(tree_unflatten([(name, mx.random.normal(weight.shape) * 0.1)]))
    model.eval()
    expected = generated(model, PROMPTS[0], 20)
    with attached(model):
        for _ in range(2):
            assert generated(model, PROMPTS[0], 20) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    ["cohere2", "gemma3n", "gemma4", "glm4_moe_lite", "gpt2", "mimo_v2_flash", "phi3", "step3p5"],
)
def test_other_architectures_give_the_same_tokens(architecture):
    """Windows beside full layers, shared K/V, latents, absolute positions, K and V of two
    widths.
    """
    model = make(architecture)
    expected = [generated(model, PROMPTS[0]), run_batch(model)]
    with attached(model):
        assert [generated(model, PROMPTS[0]), run_batch(model)] == expected


def test_prompts_of_one_batch_share_what_they_begin_with(llama, computed):
    system, endings = tokens(40), [tokens(5, seed) for seed in range(1, 5)]
    prompts = [system + ending for ending in endings]
    expected = [generated(llama, prompt) for prompt in prompts]
    with attached(llama) as paged:
        computed.clear()
        generator = BatchGenerator(llama, max_tokens=12)
        uids = generator.insert(prompts)
        answers = {uid: [] for uid in uids}
        while responses := generator.next_generated():
            for response in responses:
                answers[response.uid].append(response.token)
            del response, responses
        assert list(answers.values()) == expected
        assert paged.stats().num_hit_tokens == 3 * 40
    # Each has 44 tokens before its last one.
    assert computed[0] == 4 * 44 - 3 * 40


def test_texts_of_generate_and_batch_generate_are_the_same(demo):
    model, tokenizer = demo
    texts = ["Count: 1 2 3", "A b c", "Count: 1 2 3 4 5 6 7 8 9 10 11 12 13 14"]
    prompts = [tokenizer.encode(text) for text in texts]

    def run() -> list[object]:
        streamed = mlx_lm.stream_generate(model, tokenizer, texts[0], max_tokens=8)
        batch = batch_generate(model, tokenizer, prompts, max_tokens=8, return_token_ids=True)
        return [
            mlx_lm.generate(model, tokenizer, texts[2], max_tokens=8),
            [(response.text, response.token) for response in streamed],
            batch.texts,
            batch.token_ids,
        ]

    expected = run()
    with attached(model) as paged:
        assert run() == expected
        assert paged.stats().num_used_blocks == 0


def test_prompt_caches_of_batch_generate_go_on(demo):
    model, tokenizer = demo
    prompts = [tokenizer.encode("Count: 1 2 3 4"), tokenizer.encode("Say the words")]
    more = [tokenizer.encode(" and then"), tokenizer.encode(" of it")]

    def run() -> list[list[int]]:
        options = {"max_tokens": 6, "return_token_ids": True}
        first = batch_generate(model, tokenizer, prompts, return_prompt_caches=True, **options)
        caches = first.caches
        again = [
            batch_generate(model, tokenizer, more, prompt_caches=caches, **options).token_ids
            for _ in range(2)
        ]
        # The caches that were given are as they were.
        assert again[0] == again[1]
        return again[0]

    expected = run()
    with attached(model) as paged:
        assert run() == expected
        assert paged.stats().num_used_blocks == 0


def test_drafts_of_another_model_are_taken_back(llama):
    """The main model, its draft model and both attached."""
    draft = cached_model("qwen3")
    prompt = mx.array(PROMPTS[0])
    expected = generated(llama, PROMPTS[0], 20)

    def run() -> list[int]:
        steps = speculative_generate_step(prompt, llama, draft, num_draft_tokens=3, max_tokens=20)
        return [token for token, _, _ in steps]

    assert run() == expected
    with attached(llama) as paged:
        assert run() == expected
        with attached(draft) as drafting:
            assert run() == expected
            assert drafting.stats().num_used_blocks == 0
        assert paged.stats().num_used_blocks == 0


def test_drafts_behind_a_full_window_are_taken_back():
    """mlx-lm's own caches keep the rejected ones there."""
    model, draft = cached_model("gemma3"), cached_model("llama")
    expected = generated(model, PROMPTS[0], 20)
    with attached(model) as paged:
        steps = speculative_generate_step(
            mx.array(PROMPTS[0]), model, draft, num_draft_tokens=3, max_tokens=20
        )
        assert [token for token, _, _ in steps] == expected
        del steps
        stats = paged.stats()
        assert stats.num_used_blocks == stats.num_recomputed_tokens == 0


def test_quantised_blocks_are_near(llama):
    prompt = mx.array(PROMPTS[0])[None]
    expected = llama(prompt)[:, -1]
    with attached(llama, kv_format=8):
        cache = llama.make_cache()
        llama(prompt[:, :-1], cache=cache)
        actual = llama(prompt[:, -1:], cache=cache)[:, -1]
    assert 0 < mx.abs(actual - expected).max().item() < 0.05 * mx.abs(expected).max().item()
