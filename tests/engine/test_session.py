"""A session computes only what its cache does not hold, and never gives another answer for it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import ModelRunner, Session, make_kv_cache
from mlx_paged.cache import CacheFullError
from mlx_paged.engine.session import PromptTooLongError, common_prefix_len
from mlx_paged.models import qwen3


def tokens(num_tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 61, num_tokens).tolist()


def logits_of(prompt: list[int], model: qwen3.Model, kind: str) -> np.ndarray:
    runner = ModelRunner(model, make_kv_cache(model, kind, kv_cache_bytes="40blocks"))
    return np.array(runner.run({"fresh": prompt}))


def same(logits: mx.array) -> mx.array:
    return logits


@pytest.mark.parametrize("step_size", [1, 7, 16, 512])
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(
    session: Session, model: qwen3.Model, step_size: int
):
    prompt = tokens(50)
    logits, num_cached = session.prefill(prompt, same, prefill_step_size=step_size)
    assert num_cached == 0 and session.tokens == prompt and session.cache.seq_len(session.seq) == 50
    np.testing.assert_allclose(
        np.array(logits), logits_of(prompt, model, session.cache.kind), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    ("second", "num_cached"),
    [
        (tokens(50) + tokens(10, seed=1), 50),  # a longer conversation
        (tokens(50), 49),  # the same one: the last token is computed for its logits
        (tokens(50)[:20], 19),  # a shorter one
        (tokens(50)[:33] + tokens(30, seed=2), 33),  # an edited one
        (tokens(30, seed=3), 0),  # another one
    ],
    ids=["longer", "same", "shorter", "edited", "other"],
)
def test_a_prompt_reuses_what_it_shares_with_the_tokens_held(
    session: Session, model: qwen3.Model, second: list[int], num_cached: int
):
    session.prefill(tokens(50), same)
    if num_cached == 33:
        assert second[33] != tokens(50)[33]
    logits, reused = session.prefill(second, same)
    assert (reused, session.tokens) == (num_cached, second)
    np.testing.assert_allclose(
        np.array(logits), logits_of(second, model, session.cache.kind), rtol=0, atol=1e-5
    )


def test_decoding_goes_on_where_the_prompt_ended(session: Session, model: qwen3.Model):
    prompt = tokens(20)
    session.prefill(prompt, same)
    for token in tokens(5, seed=1):
        logits = session.decode(token, same)
        prompt.append(token)
        np.testing.assert_allclose(
            np.array(logits), logits_of(prompt, model, session.cache.kind), rtol=0, atol=1e-5
        )
    assert session.tokens == prompt


def test_progress_counts_up_to_the_total_and_begins_at_what_was_reused(session: Session):
    seen: list[tuple[int, int]] = []
    session.prefill(tokens(25), same, prefill_step_size=10, progress=lambda *p: seen.append(p))
    assert seen == [(0, 25), (10, 25), (20, 25), (25, 25)]
    seen.clear()
    session.prefill(
        [*tokens(25), 1, 2], same, prefill_step_size=10, progress=lambda *p: seen.append(p)
    )
    assert seen == [(25, 27), (27, 27)]


def test_a_prefill_that_is_interrupted_keeps_the_chunks_that_are_done(
    session: Session, model: qwen3.Model
):
    def stop_at_20(done: int, total: int) -> None:
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.prefill(tokens(50), same, prefill_step_size=10, progress=stop_at_20)
    assert session.tokens == tokens(50)[:20] and session.cache.seq_len(session.seq) == 20
    logits, num_cached = session.prefill(tokens(50), same)
    assert num_cached == 20
    np.testing.assert_allclose(
        np.array(logits), logits_of(tokens(50), model, session.cache.kind), rtol=0, atol=1e-5
    )


def test_a_prompt_that_can_not_fit_is_refused_with_the_sum_and_leaves_the_session_as_it_was(
    session: Session,
):
    session.prefill(tokens(30), same)
    with pytest.raises(PromptTooLongError) as refusal:
        session.prefill(tokens(700), same)
    expected = "a prompt of 700 tokens needs 44 blocks of 16, the budget holds 40; raise"
    assert expected in str(refusal.value)
    assert session.tokens == tokens(30) and session.cache.seq_len(session.seq) == 30


def test_sessions_share_one_cache_and_closing_one_makes_room(model: qwen3.Model):
    runner = ModelRunner(model, make_kv_cache(model, "paged", kv_cache_bytes="10blocks"))
    first, second = Session(runner, "first"), Session(runner, "second")
    first.prefill(tokens(100), same)
    with pytest.raises(PromptTooLongError, match="needs 4 blocks of 16, the budget holds 3"):
        second.prefill(tokens(64), same)
    first.close()
    second.prefill(tokens(64), same)
    assert runner.cache.seqs == ["second"] and first.tokens == []
    first.close()


def test_bad_prompts_are_refused(session: Session):
    with pytest.raises(ValueError, match="the prompt is empty"):
        session.prefill([], same)
    with pytest.raises(ValueError, match="prefill_step_size must be at least 1, got 0"):
        session.prefill([1], same, prefill_step_size=0)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 61], "token id 61 is outside the model's vocabulary of 61"),
        ([1, 2.0], "token ids are integers, got 2.0"),
        ([1, True], "token ids are integers, got True"),
        (None, "a prompt is text or token ids, got NoneType"),
        ("text", "a text prompt needs a tokenizer"),
    ],
    ids=repr,
)
def test_a_prompt_that_names_no_tokens_is_refused_before_anything_changes(
    session: Session, prompt: object, message: str
):
    session.prefill(tokens(30), same)
    with pytest.raises(ValueError, match=message):
        session.prefill(prompt, same)
    assert session.tokens == tokens(30) and session.cache.seq_len(session.seq) == 30


def test_bad_settings_of_a_session_are_refused(session: Session, model: qwen3.Model):
    for arguments, message in (
        ({"runner": model}, "runner must be a ModelRunner, got Model"),
        ({"seq": ["list"]}, "seq must be hashable, such as a text, got list"),
        (
            {"max_model_len": 0},
            r"max_model_len must be a whole number within 2\.\.1048576, .* got 0",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Session(**({"runner": session.runner} | arguments))
    session.prefill(tokens(3), same)
    for length in (-1, 1.5, "1", True):
        with pytest.raises(ValueError, match="length must be at least 0, got"):
            session.trim(length)
    with pytest.raises(ValueError, match="head must be a function of the logits, got None"):
        session.prefill(tokens(4), None)
    for token in (61, -1, 2.0, "2", None, True):
        with pytest.raises(ValueError, match=r"token id.* as batch\['session'\]\[0\]"):
            session.decode(token, same)
    assert session.tokens == tokens(3) and session.cache.seq_len(session.seq) == 3


def test_a_session_never_holds_more_than_its_context(session: Session):
    short = Session(session.runner, "short", max_model_len=8)
    with pytest.raises(
        PromptTooLongError,
        match=r"a prompt of 8 tokens leaves no room .* at most 8 tokens together",
    ):
        short.prefill(tokens(8), same)
    assert short.tokens == [] and session.cache.seqs == []
    short.prefill(tokens(7), same)
    branch = short.fork()
    assert branch.max_model_len == 8
    for one in (short, branch):
        one.decode(1, same)
        with pytest.raises(
            CacheFullError, match="holds 8 tokens, and max_model_len is 8; trim it, or raise"
        ):
            one.decode(1, same)
        assert len(one.tokens) == 8
    assert session.max_model_len == session.runner.model.args.max_position_embeddings


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({}, "a step needs at least one sequence"),
        ({"a": []}, "a step adds at least 1 token, got 0"),
        (
            {"a": [1], "b": [61]},
            r"token id 61 is outside the model's vocabulary of 61, given as batch\['b'\]\[0\]",
        ),
        ({"a": [1, -1]}, "token id -1 is outside"),
        ({"a": [1.0]}, "token ids are integers, got 1.0"),
        ({"a": "text"}, "a prompt is text or token ids, got str"),
        ({"a": 7}, "a prompt is text or token ids, got int"),
        ({"a": None}, "a prompt is text or token ids, got NoneType"),
        ([1, 2], "batch must be a mapping of sequences to their new tokens, got list"),
        (None, "batch must be a mapping"),
    ],
    ids=repr,
)
def test_a_step_that_names_no_tokens_is_refused_before_anything_changes(
    session: Session, model: qwen3.Model, batch: object, message: str
):
    session.prefill(tokens(20), same)
    with pytest.raises(ValueError, match=message):
        session.runner.run(batch)
    with pytest.raises(
        ValueError, match="head must be a function of the logits, or None, got 'argmax'"
    ):
        session.runner.run({"a": [1]}, "argmax")
    assert session.cache.seqs == ["session"] and session.cache.seq_len("session") == 20
    got = session.runner.run({"session": np.array([5], dtype=np.uint8)})
    np.testing.assert_allclose(
        np.array(got), logits_of([*tokens(20), 5], model, session.cache.kind), rtol=0, atol=1e-5
    )


def test_the_common_prefix_is_that_of_both():
    assert [
        common_prefix_len(a, b)
        for a, b in (([], [1]), ([1, 2], [1, 2, 3]), ([1, 2], [1, 3]), ([2], [1]))
    ] == [
        0,
        2,
        1,
        0,
    ]
