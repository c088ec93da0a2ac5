"""generate_step: mlx-lm's tokens from both caches, alone and in a batch, and clear ends and
refusals.
"""

from __future__ import annotations

import inspect

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from helpers.engine_runs import load_demo, tiny_models
from helpers.servers import dictation
from mlx_lm.generate import BatchResponse
from mlx_lm.generate import batch_generate as mlx_lm_batch_generate
from mlx_lm.generate import generate_step as mlx_lm_generate_step
from mlx_lm.generate_utils import BatchStats
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer, TokenizerWrapper

from mlx_paged import LLM, SamplingParams, make_kv_cache, make_sampler
from mlx_paged.batch_generation import batch_generate
from mlx_paged.cache import Sequences
from mlx_paged.errors import PromptTooLongError
from mlx_paged.generation import generate, generate_step, stream_generate
from mlx_paged.models import qwen3
from mlx_paged.models.run_step import run_step


@pytest.fixture(scope="module")
def demo() -> tuple:
    return load_demo()


def prompt(num_tokens: int) -> list[int]:
    return np.random.default_rng(num_tokens).integers(0, 61, num_tokens).tolist()


def test_logprobs_are_those_of_mlx_lm(cache_options: dict):
    ours, theirs = tiny_models()
    expected = list(mlx_lm_generate_step(mx.array(prompt(20)), theirs, max_tokens=30))
    got = list(generate_step(prompt(20), ours, max_tokens=30, **cache_options))
    assert [t for t, _ in got] == [int(t) for t, _ in expected]
    for (_, mine), (_, other) in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.array(mine), np.array(other), rtol=0, atol=1e-5)


def test_sampled_tokens_are_those_of_mlx_lm_with_the_same_seed(cache_options: dict):
    ours, theirs = tiny_models()
    settings = {"temp": 0.9, "top_p": 0.9, "min_p": 0.02, "top_k": 20}
    # mlx-lm samples one token ahead, so the streams of random numbers meet only at the first token
    # of each run.
    for seed in range(10):
        mx.random.seed(seed)
        (first, _), *_ = mlx_lm_generate_step(
            mx.array(prompt(20)), theirs, max_tokens=1, sampler=make_sampler(**settings)
        )
        mx.random.seed(seed)
        ((token, _),) = generate_step(
            prompt(20), ours, max_tokens=1, sampler=make_sampler(**settings), **cache_options
        )
        assert token == first


def test_logits_processors_see_all_tokens_and_change_the_choice(model: qwen3.Model):
    seen: list[list[int]] = []

    def forbid_repeats(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        logits[:, tokens] = -mx.inf
        return logits

    got = [
        t
        for t, _ in generate_step(
            prompt(5), model, max_tokens=20, logits_processors=[forbid_repeats]
        )
    ]
    assert len({*prompt(5), *got}) == len(set(prompt(5))) + 20
    assert seen == [prompt(5) + got[:n] for n in range(20)]


def test_generation_ends_when_the_budget_is_full_and_says_so_by_its_length(model: qwen3.Model):
    for kind in ("basic", "paged"):
        got = list(
            generate_step(prompt(20), model, max_tokens=-1, kv=kind, kv_cache_bytes="2blocks")
        )
        # 32 slots hold the prompt and 12 tokens; the 13th is sampled and needs no K/V.
        assert len(got) == 13


def test_a_prompt_that_fills_the_budget_exactly_still_gets_one_token(model: qwen3.Model):
    assert len(list(generate_step(prompt(32), model, kv_cache_bytes="2blocks"))) == 1
    with pytest.raises(PromptTooLongError):
        next(generate_step(prompt(33), model, kv_cache_bytes="2blocks"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [61]}, "token id 61 is outside the model's vocabulary of 61"),
        ({"prompt": [-1]}, "token id -1 is outside"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, or -1"),
        ({"max_tokens": -2}, "max_tokens must be at least 1, or -1"),
        ({"kv": "ring"}, "unknown cache mode 'ring'; supported: basic, paged"),
        ({"block_size": 12}, r"block_size must be one of \(8, 16, 32, 64\), got 12"),
        ({"kv_cache_bytes": "much"}, "kv_cache_bytes must be bytes .*, got 'much'"),
        ({"kv_cache_bytes": 100}, "a budget of 100 bytes holds no block"),
        ({"backend": "vulkan"}, "unknown backend 'vulkan'; choose one of auto, reference, metal"),
        ({"prefill_step_size": 0}, "prefill_step_size must be a positive integer"),
        ({"prefill_step_size": 10**30}, "prefill_step_size must be a positive integer"),
        ({"logits_processors": np.array([1, 2])}, "logits_processors must be functions"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_by_name(model: qwen3.Model, arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        list(generate_step(**({"prompt": [1, 2], "model": model} | arguments)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": None}, "a prompt is text or token ids, got NoneType as prompt"),
        ({"prompt": b"ab"}, "a prompt is text or token ids, got bytes as prompt"),
        ({"prompt": [1, "2"]}, r"token ids are integers, got '2' \(str\) as prompt\[1\]"),
        ({"prompt": [1, 2.0]}, "token ids are integers, got 2.0"),
        ({"prompt": mx.array([[1, 2]])}, r"prompt is an array of shape \(1, 2\)"),
        ({"prompt": "text"}, "a text prompt needs a tokenizer"),
        (
            {"model": "model"},
            "model must be one that mlx_paged.load or mlx_lm.load returns, got str",
        ),
        ({"max_tokens": "9"}, "max_tokens must be at least 1, or -1 for no limit, got '9'"),
        ({"max_tokens": 2.0}, "max_tokens must be at least 1, or -1 for no limit, got 2.0"),
        ({"max_tokens": True}, "max_tokens must be at least 1, or -1 for no limit, got True"),
        ({"prefill_step_size": 0}, "prefill_step_size must be a positive integer, got 0"),
        (
            {"prefill_step_size": "8"},
            "prefill_step_size must be a positive integer, got '8'",
        ),
        ({"sampler": 0.7}, "sampler must be a function, such as make_sampler"),
        (
            {"logits_processors": lambda tokens, logits: logits},
            "logits_processors must be a sequence, got",
        ),
        ({"logits_processors": "x"}, "logits_processors must be functions, got 'x'"),
        (
            {"logits_processors": [None]},
            "logits_processors must be functions, got None",
        ),
        (
            {"prompt_progress_callback": 1},
            "prompt_progress_callback must be a function of 2 numbers, got 1",
        ),
        ({"kv": 1}, "kind must be a text, got 1"),
        ({"kv": ["paged"]}, "kind must be a text, got .'paged'."),
        ({"backend": None}, "backend must be a text, got None"),
        (
            {"block_size": "16"},
            "block_size must be a positive integer, got '16'",
        ),
        (
            {"block_size": 16.0},
            "block_size must be a positive integer, got 16.0",
        ),
        (
            {"max_model_len": 1},
            r"max_model_len must be a whole number within 2\.\.1048576, .*, got 1",
        ),
        ({"max_model_len": 2**20 + 1}, r"max_model_len must be a whole number within 2\.\.1048576"),
        ({"max_model_len": "8"}, "max_model_len must be a whole number .*, got '8'"),
        (
            {"max_model_len": 2},
            "a prompt of 2 tokens leaves no room for an answer: .* at most 2 tokens together",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_arguments_are_refused_at_the_call(model: qwen3.Model, arguments: dict, message: str):
    with pytest.raises((ValueError, PromptTooLongError), match=message) as refusal:
        generate_step(**({"prompt": [1, 2], "model": model} | arguments))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokenizer": None}, "tokenizer must be one that mlx_paged.load returns, got NoneType"),
        (
            {"tokenizer": "some/folder"},
            "tokenizer must be one that mlx_paged.load returns, got str",
        ),
        ({"verbose": "no"}, "verbose must be True or False, got 'no'"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "\ud800"}, "prompt is not valid Unicode"),
    ],
    ids=ascii,
)
def test_generate_refuses_at_the_call_and_prints_nothing(
    demo: tuple, arguments: dict, message: str, capsys: pytest.CaptureFixture
):
    with pytest.raises(ValueError, match=message):
        generate(
            **(
                {"model": demo[0], "tokenizer": demo[1], "prompt": "Hello", "verbose": True}
                | arguments
            )
        )
    assert capsys.readouterr() == ("", "")


def test_streams_refuse_at_the_call(demo: tuple):
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        stream_generate(*demo, "Hello", max_tokens=-7)
    with pytest.raises(TypeError, match="give sampler=make_sampler"):
        stream_generate(*demo, "Hello", temperature=0.7)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (mx.array([61]), "the sampler chose token 61, outside the model's vocabulary of 61"),
        (mx.array([-1]), "the sampler chose token -1, outside"),
        (7, "a sampler returns an array, got int"),
        (None, "a sampler returns an array, got NoneType"),
        (
            mx.array(7),
            r"a sampler returns integers of shape \(1,\), got mlx.core.int32 of shape \(\)",
        ),
        (
            mx.array([7, 8]),
            r"a sampler returns integers of shape \(1,\), got mlx.core.int32 of shape \(2,\)",
        ),
        (mx.array([7.0]), r"a sampler returns integers of shape \(1,\), got mlx.core.float32"),
        (mx.array([True]), r"a sampler returns integers of shape \(1,\), got mlx.core.bool"),
    ],
    ids=repr,
)
def test_a_sampler_that_names_no_token_is_an_error_at_once(
    model: qwen3.Model, cache_options: dict, returned: object, message: str
):
    with pytest.raises(ValueError, match=message):
        list(generate_step(prompt(5), model, sampler=lambda logprobs: returned, **cache_options))


@pytest.mark.parametrize("returned", [None, 3.0, mx.zeros((1, 60)), mx.zeros((61,))], ids=repr)
def test_a_logits_processor_that_returns_no_logits_is_an_error(
    model: qwen3.Model, returned: object
):
    with pytest.raises(
        ValueError, match=r"logits processor .* must return floats of shape \(1, 61\), got"
    ):
        list(generate_step(prompt(5), model, logits_processors=[lambda tokens, logits: returned]))


@pytest.mark.parametrize("kind", ["basic", "paged"])
def test_prompt_and_answer_never_exceed_the_context(demo: tuple, kind: str):
    ids = demo[1].encode("Once upon a time")
    limit = len(ids) + 3
    responses = list(stream_generate(*demo, ids, max_tokens=-1, kv=kind, max_model_len=limit))
    assert [response.finish_reason for response in responses] == [None, None, "length"]
    free = list(stream_generate(*demo, ids, max_tokens=3, kv=kind))
    assert [response.token for response in responses] == [response.token for response in free]
    assert len(list(stream_generate(*demo, ids, kv=kind, max_model_len=len(ids) + 1))) == 1
    with pytest.raises(
        PromptTooLongError,
        match=f"prompt of {len(ids)} tokens leaves no room .* shorten the prompt or",
    ):
        stream_generate(*demo, ids, kv=kind, max_model_len=len(ids))


def test_the_context_is_by_default_what_the_model_was_made_for(
    model: qwen3.Model, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(model.args, "max_position_embeddings", 40)
    assert len(list(generate_step(prompt(34), model, max_tokens=-1))) == 6
    with pytest.raises(
        PromptTooLongError, match="a prompt of 40 tokens leaves no room for an answer"
    ):
        generate_step(prompt(40), model)


def test_prompts_of_every_form_have_one_answer(demo: tuple):
    text = "Once upon a time"
    ids = demo[1].encode(text)
    forms = (
        text,
        ids,
        tuple(ids),
        np.array(ids),
        mx.array(ids),
        {"prompt": text},
        {"prompt_token_ids": ids},
    )
    answers = {generate(*demo, form, max_tokens=5) for form in forms}
    assert len(answers) == 1


@pytest.mark.parametrize("kind", ["basic", "paged"])
def test_a_ragged_batch_decodes_the_tokens_of_each_sequence_alone(model: qwen3.Model, kind: str):
    lengths = (1, 15, 16, 17, 100)
    alone = {n: [t for t, _ in generate_step(prompt(n), model, max_tokens=60)] for n in lengths}
    seqs = Sequences(make_kv_cache(model, kind, kv_cache_bytes="200blocks"))
    batch = {n: prompt(n) for n in lengths}
    together: dict[int, list[int]] = {n: [] for n in lengths}
    for step in range(60):
        sampled = mx.argmax(run_step(model, seqs, batch), axis=-1).tolist()
        for n, token in zip(batch, sampled, strict=True):
            together[n].append(token)
        # Sequences leave one after the other; 17 comes back in the middle of the run, as a prompt
        # among decodes.
        batch = {n: [together[n][-1]] for n in batch if step < n + 20}
        if step == 30 and 17 in together and 17 in seqs:
            seqs.free(17)
            batch[17] = prompt(17) + together[17]
    for n in lengths:
        assert together[n] == alone[n][: len(together[n])] and len(together[n]) > 20


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_drafts_change_no_token_whatever_the_sampler(demo: tuple, temperature: float):
    model, tokenizer = demo
    text = "The code of apple is 4821. " * 5
    responses = {}
    for num_draft_tokens in (0, 7):
        mx.random.seed(4)  # of the sampler, which is asked as often as there are tokens
        sampler = make_sampler(temp=temperature)
        responses[num_draft_tokens] = list(
            stream_generate(
                model,
                tokenizer,
                text,
                max_tokens=60,
                sampler=sampler,
                num_draft_tokens=num_draft_tokens,
            )
        )
    plain, drafted = responses[0], responses[7]
    assert [each.token for each in drafted] == [each.token for each in plain]
    assert "".join(each.text for each in drafted) == "".join(each.text for each in plain)
    assert [each.generation_tokens for each in drafted] == [n + 1 for n in range(len(drafted))]
    for one, other in zip(drafted, plain, strict=True):
        assert mx.allclose(one.logprobs, other.logprobs, atol=1e-4)
        assert one.finish_reason == other.finish_reason
    assert not any(each.from_draft for each in plain)
    last = drafted[-1].spec_decoding
    assert sum(each.from_draft for each in drafted) == last.num_accepted_tokens
    assert last.num_accepted_tokens <= last.num_draft_tokens > 0
    assert temperature or last.num_accepted_tokens > 10


# batch_generate


def mlx_lm_responses(demo: tuple, prompts: list[list[int]], **options):
    from mlx_lm import load as mlx_lm_load

    from mlx_paged.loading import demo_model_path

    theirs, tokenizer = mlx_lm_load(str(demo_model_path()))
    return mlx_lm_batch_generate(theirs, tokenizer, prompts, **options)


def encoded(tokenizer, *texts: str) -> list[list[int]]:
    return [tokenizer.encode(text) for text in texts]


def test_batch_generate_gives_the_response_of_mlx_lm(demo: tuple, cache_options: dict):
    prompts = encoded(demo[1], "Hello, who are you?", "One two three", "The sky is")
    options = {"max_tokens": [30, 7, 12], "return_token_ids": True, "return_logprobs": True}
    expected = mlx_lm_responses(demo, prompts, **options)
    got = batch_generate(*demo, prompts, **options, **cache_options)
    assert isinstance(got, BatchResponse) and isinstance(got.stats, BatchStats)
    assert (got.texts, got.token_ids, got.caches) == (expected.texts, expected.token_ids, None)
    for mine, other in zip(got.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=0.02)  # both sides are half precision
    stats = got.stats
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert stats.generation_tokens == expected.stats.generation_tokens
    assert 0 < stats.prompt_time <= stats.wall_time and stats.generation_steps <= 30
    plain = batch_generate(*demo, prompts, max_tokens=5)
    assert (plain.token_ids, plain.logprobs) == (None, None) and len(plain.texts) == 3


def test_the_logprobs_of_a_batch_are_those_after_the_processors(demo: tuple):
    prompts = encoded(demo[1], "Hello, who are you?", "One two three")

    def colder(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits * 0.5

    options = {"max_tokens": 12, "return_logprobs": True, "logits_processors": [colder]}
    expected = mlx_lm_responses(demo, prompts, **options)
    got = batch_generate(*demo, prompts, **options, completion_batch_size=1)
    for mine, other in zip(got.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=0.02)
    assert (
        got.logprobs != batch_generate(*demo, prompts, max_tokens=12, return_logprobs=True).logprobs
    )


def test_a_batch_may_be_larger_than_a_step_of_prompts(demo: tuple):
    prompts = encoded(demo[1], "Hello, who are you?", "One two three", "The sky is")
    expected = batch_generate(*demo, prompts, max_tokens=3).texts
    sizes = {"completion_batch_size": 2**31, "prefill_step_size": 2}
    assert batch_generate(*demo, prompts, max_tokens=3, **sizes).texts == expected


def test_batch_generate_samples_and_says_its_figures(demo: tuple, capsys):
    prompts = ["Hello", "One two three"]
    mx.random.seed(1)
    got = batch_generate(
        *demo, prompts, max_tokens=8, verbose=True, sampler=make_sampler(temp=1.0, top_p=0.9)
    )
    assert len(got.texts) == 2 and got.stats.generation_tokens <= 16
    shown = capsys.readouterr().out
    assert "Finished 2/2" in shown and "Prompt: " in shown and "Peak memory" in shown
    assert batch_generate(*demo, []).texts == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_caches": [[]]}, "prompt_caches is not supported: an engine shares"),
        ({"return_prompt_caches": True}, "return_prompt_caches is not supported"),
        ({"max_tokens": [1, 2, 3]}, "3 max_tokens for 1 prompts; give one for each"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"verbose": 1}, "verbose must be True or False, got 1"),
        ({"return_logprobs": None}, "return_logprobs must be True or False, got None"),
        ({"completion_batch_size": 0}, "completion_batch_size must be a positive integer, got 0"),
        ({"prefill_step_size": "8"}, "prefill_step_size must be a positive integer, got '8'"),
        ({"prompts": [[]]}, "the prompt is empty"),
        ({"sampler": 1}, "sampler must be a function"),
        ({"sampler": lambda row: row}, "a sampler returns integers of shape"),
    ],
)
def test_bad_arguments_of_a_batch_are_refused_by_name(demo: tuple, arguments: dict, message: str):
    model, tokenizer = demo
    call = {"model": model, "tokenizer": tokenizer, "prompts": ["Hello"]} | arguments
    with pytest.raises(ValueError, match=message):
        batch_generate(**call)


@pytest.mark.parametrize("text", [" upon a time", "  upon", "upon", "\n upon"])
def test_generate_leaves_out_the_first_space_as_mlx_lm_does_and_an_llm_does_not(
    demo: tuple, text: str
):
    model, tokenizer = demo[0], TokenizerWrapper(demo[1]._tokenizer, SPMStreamingDetokenizer)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    ask = tokenizer.encode("Once")
    detokenizer = tokenizer.detokenizer
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()

    dictate = dictation(tokens, len(ask))
    options = {"max_tokens": len(tokens), "logits_processors": [dictate]}
    assert generate(model, tokenizer, ask, **options) == detokenizer.text
    pieces = [each.text for each in stream_generate(model, tokenizer, ask, **options)]
    assert "".join(pieces) == detokenizer.text
    llm = LLM(model, tokenizer, kv_cache_bytes="20blocks")
    (output,) = llm.generate([ask], SamplingParams(**options, ignore_eos=True))
    assert output.outputs[0].text == text


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (generate, mlx_lm.generate),
        (stream_generate, mlx_lm.stream_generate),
        (batch_generate, mlx_lm_batch_generate),
    ],
)
def test_arguments_by_position_are_those_of_mlx_lm(ours, theirs):
    """In its order and with its defaults; what is given here by name alone comes after them."""
    mine, stock = (list(inspect.signature(each).parameters.values()) for each in (ours, theirs))
    by_position = [each for each in mine if each.kind is each.POSITIONAL_OR_KEYWORD]
    names = [each.name for each in stock]
    shared = [each for each in by_position if each.name in names]
    assert by_position[: len(shared)] == shared and len(shared) >= 4
    pairs = list(zip(shared, stock, strict=False))
    assert [(a.name, a.default) for a, _ in pairs] == [(b.name, b.default) for _, b in pairs]
