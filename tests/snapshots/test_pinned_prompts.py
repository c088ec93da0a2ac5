"""K/V of unknown tokens stand before a prompt, whatever happens to the requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from helpers.engine_runs import ask, lose_all_kv, make_engine, prompt, run
from helpers.windowed_models import model_and_options
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from mlx_paged import Engine, SamplingParams
from mlx_paged.engine.pinned_prompts import PinnedPrompt
from mlx_paged.errors import ArgumentError
from mlx_paged.models import qwen3
from mlx_paged.snapshots import SnapshotError

NUM_TOKENS = 16


@pytest.fixture(scope="module")
def file(models: tuple[qwen3.Model, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prompt cache of 37 tokens, which no whole blocks hold."""
    path = tmp_path_factory.mktemp("a") / "a.safetensors"
    caches = make_prompt_cache(models[1])
    list(generate_step(mx.array(prompt(37)), models[1], max_tokens=0, prompt_cache=caches))
    save_prompt_cache(str(path), caches, {"model": "m", "tokenizer_config": "{}"})
    return path


def expected(models: tuple[qwen3.Model, Any], file: Path, token_ids: list[int]) -> list[int]:
    """What mlx-lm goes on with."""
    steps = generate_step(
        mx.array(token_ids),
        models[1],
        max_tokens=NUM_TOKENS,
        prompt_cache=load_prompt_cache(str(file)),
    )
    return [int(token) for token, _ in steps]


def asked(held: PinnedPrompt, token_ids: list[int]) -> dict[str, Any]:
    return {"prompt": [*held.token_ids, *token_ids], "cache_salt": held.cache_salt}


def answer(engine: Engine, prompt: list[int], **options: Any) -> tuple[list[int], int]:
    params = SamplingParams(max_tokens=NUM_TOKENS, **options.pop("params", {}))
    engine.add_request("a", prompt, params, **options)
    output = run(engine)["a"]
    assert output.error is None
    return output.outputs[0].token_ids, output.num_cached_tokens


@pytest.mark.parametrize("block_size", [8, pytest.param(16, marks=pytest.mark.slow), 64])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_turns_go_on_as_in_mlx_lm(
    models: tuple[qwen3.Model, Any], file: Path, block_size: int, run_ahead: bool
):
    engine = make_engine(models[0], block_size=block_size, run_ahead=run_ahead)
    held = engine.pin_prompt_cache(file)
    assert len(held.token_ids) == 37
    first, second = prompt(5, seed=1), prompt(9, seed=2)
    told = expected(models, file, first)
    assert answer(engine, **asked(held, first)) == (told, 37)
    # The next turn finds the blocks of the first one, the prompt cache included.
    tokens, num_cached = answer(engine, **asked(held, [*first, *told, *second]))
    assert tokens == expected(models, file, [*first, *told, *second])
    assert num_cached == max(37, (37 + 5 + NUM_TOKENS - 1) // block_size * block_size)
    # No other request finds them, and they remain when nothing is cached.
    assert answer(engine, held.token_ids)[1] == 0
    engine.reset_prefix_cache()
    assert answer(engine, **asked(held, first)) == (told, 37)
    assert engine.stats().num_swapped_tokens == 0 and engine.cache.pool.num_used_blocks == 0


def test_preemption_changes_no_token(models: tuple[qwen3.Model, Any], file: Path):
    prompts = {name: prompt(7 + number, seed=number) for number, name in enumerate("abcd")}
    wanted = {name: expected(models, file, token_ids) for name, token_ids in prompts.items()}
    for swap_bytes in ("0", "4blocks", "100blocks"):
        engine = make_engine(models[0], kv_cache_bytes="10blocks", swap_bytes=swap_bytes)
        held = engine.pin_prompt_cache(file)
        for name, token_ids in prompts.items():
            params = SamplingParams(max_tokens=NUM_TOKENS)
            engine.add_request(name, params=params, **asked(held, token_ids))
        outputs = run(engine)
        assert {name: each.outputs[0].token_ids for name, each in outputs.items()} == wanted
        assert engine.scheduler.num_preemptions > 0
        assert engine.stats().num_swapped_tokens == 0


def test_several_completions_share_the_held_kv(models: tuple[qwen3.Model, Any], file: Path):
    engine = make_engine(models[0])
    held, token_ids = engine.pin_prompt_cache(file), prompt(5, seed=1)
    params = SamplingParams(max_tokens=NUM_TOKENS, n=3)
    engine.add_request("a", params=params, **asked(held, token_ids))
    told = expected(models, file, token_ids)
    assert [each.token_ids for each in run(engine)["a"].outputs] == [told] * 3


def test_a_failed_step_and_an_interrupt_change_no_token(
    models: tuple[qwen3.Model, Any], file: Path, monkeypatch: pytest.MonkeyPatch
):
    token_ids = prompt(5, seed=1)
    told = expected(models, file, token_ids)
    for error in (RuntimeError, KeyboardInterrupt):
        for when in (1, 4):
            engine = make_engine(models[0])
            held = engine.pin_prompt_cache(file)
            params = SamplingParams(max_tokens=NUM_TOKENS)
            engine.add_request("a", params=params, **asked(held, token_ids))
            engine.add_request("b", prompt(9), params)
            launch, calls = engine.runner.launch, []

            def fails(*args: Any, launch: Any = launch, calls: Any = calls) -> Any:
                calls.append(args)
                if len(calls) == when:  # noqa: B023
                    raise error("here")  # noqa: B023
                return launch(*args)

            monkeypatch.setattr(engine.runner, "launch", fails)
            outputs = {}
            while engine.has_unfinished_requests():
                try:
                    outputs |= {each.request_id: each for each in engine.step()}
                except KeyboardInterrupt:
                    continue
            assert outputs["a"].outputs[0].token_ids == told
    lose_all_kv(engine)
    assert answer(engine, **asked(held, token_ids)) == (told, 37)


def test_other_requests_are_as_ever(models: tuple[qwen3.Model, Any], file: Path):
    engine = make_engine(models[0])
    requests = {name: (prompt(20, seed=n), SamplingParams(max_tokens=12))
                for n, name in enumerate("abc")}  # fmt: skip
    alone = ask(make_engine(models[0]), requests)
    held = engine.pin_prompt_cache(file)
    params = SamplingParams(max_tokens=NUM_TOKENS)
    engine.add_request("held", params=params, **asked(held, prompt(5, seed=1)))
    both = ask(engine, requests)
    assert both.pop("held") == expected(models, file, prompt(5, seed=1))
    assert both == alone


def test_kv_of_8_bits_are_held(wide_models: tuple[qwen3.Model, Any], tmp_path: Path):
    path, (model, stock) = tmp_path / "a.safetensors", wide_models
    made = [each.to_quantized(64, 8) for each in make_prompt_cache(stock)]
    list(generate_step(mx.array(prompt(21)), stock, max_tokens=0, prompt_cache=made))
    save_prompt_cache(str(path), made)
    engine = make_engine(model, kv_format=8)
    held = engine.pin_prompt_cache(path)
    told = expected(wide_models, path, [5, 6])
    assert answer(engine, **asked(held, [5, 6])) == (told, 21)


@pytest.mark.parametrize(
    ("options", "argument"),
    [({"kv": "basic"}, "kv"), ({"window": 64}, "window")],
)
def test_what_can_not_hold_is_refused_by_name(
    models: tuple[qwen3.Model, Any], file: Path, options: dict[str, Any], argument: str
):
    engine = make_engine(models[0], **options)
    with pytest.raises(ArgumentError, match="prompt cache without token ids") as caught:
        engine.pin_prompt_cache(file)
    assert caught.value.argument == argument


def test_layers_with_windows_and_draft_models_are_refused(
    models: tuple[qwen3.Model, Any], file: Path
):
    model, options = model_and_options("layers")
    with pytest.raises(ArgumentError, match="keep only the tokens of a window"):
        make_engine(model, **options).pin_prompt_cache(file)
    drafting = make_engine(models[0], draft_model=models[0], num_draft_tokens=2)
    with pytest.raises(ArgumentError, match="a draft model, of which it has no K/V") as caught:
        drafting.pin_prompt_cache(file)
    assert caught.value.argument == "draft_model"
    with pytest.raises(SnapshotError, match="can't be read: No such file"):
        make_engine(models[0]).pin_prompt_cache(file.parent / "none")


def test_requests_that_would_look_at_the_tokens_are_refused(
    models: tuple[qwen3.Model, Any], file: Path
):
    engine = make_engine(models[0])
    held = engine.pin_prompt_cache(file)
    for token_ids in (held.token_ids, [1] * 50, [5]):
        with pytest.raises(ArgumentError, match="begin with its 37 token_ids and add at least"):
            engine.add_request("a", token_ids, cache_salt=held.cache_salt)
    for name, params in (
        ("repetition_penalty", {"repetition_penalty": 1.1}),
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        ("logits_processors", {"logits_processors": [lambda tokens, logits: logits]}),
    ):
        with pytest.raises(ArgumentError, match=f"{name} can't be combined") as caught:
            answer(engine, **asked(held, [5]), params=params)
        assert caught.value.argument == name
    assert not engine.has_unfinished_requests()
