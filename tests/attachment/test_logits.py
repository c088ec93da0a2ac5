"""The logits of a call are right in every row, whether it was computed, found or padded."""

from __future__ import annotations

import mlx.core as mx
from helpers.attached_models import attached, tokens
from helpers.fast_lane import mostly_slow
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged.attachment import Attachment
from mlx_paged.attachment.logits import Logits

LONG, SHORT = tokens(60), tokens(11, 1)


def error(actual: mx.array, expected: mx.array) -> float:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    return mx.abs(actual - expected).max().item()


@mostly_slow("chunk", [60, 23, 7], quick=(1,))
def test_all_rows_of_prompts_are_those_of_the_model(any_model, chunk):
    prompt = mx.array(LONG)[None]
    expected = any_model(prompt)
    with attached(any_model):
        for _ in range(2):  # computed, then found
            cache = make_prompt_cache(any_model)
            parts = [
                any_model(prompt[:, begin : begin + chunk], cache=cache)
                for begin in range(0, prompt.size, chunk)
            ]
            assert error(mx.concatenate(parts, axis=1), expected) < 1e-4


def test_the_last_row_of_a_prompt_reads_nothing_else(llama, monkeypatch):
    """So a loop that takes ``logits[:, -1]`` of a whole prompt computes nothing twice."""
    expected = llama(mx.array(LONG)[None])

    def poisoned(self, batch):
        return mx.full((*batch.shape, 256), float("nan"))

    monkeypatch.setattr(Attachment, "_recompute", poisoned)
    with attached(llama):
        for _ in range(2):
            logits = llama(mx.array(LONG)[None], cache=make_prompt_cache(llama))
            assert isinstance(logits, Logits)
            assert error(logits[:, -1], expected[:, -1]) < 1e-4
            assert error(logits[:, -1, :], expected[:, -1, :]) < 1e-4
            assert error(logits[0, -1], expected[0, -1]) < 1e-4
            assert error(logits[:, -1:, 3:5], expected[:, -1:, 3:5]) < 1e-4
            assert error(logits[:, 59], expected[:, 59]) < 1e-4
            # The poison is where the others read.
            assert mx.isnan(logits[:, :2]).any().item()
            assert mx.isnan(mx.softmax(logits, axis=-1)).any().item()


def test_rows_of_drafts_are_all_computed(llama, monkeypatch):
    monkeypatch.setattr(Attachment, "_recompute", None)
    expected = llama(mx.array(LONG)[None])
    with attached(llama):
        cache = make_prompt_cache(llama)
        for begin, end in ((0, 16), (16, 25), (25, 41)):
            logits = llama(mx.array(LONG[begin:end])[None], cache=cache)
            assert error(logits, expected[:, begin:end]) < 1e-4


def test_rows_of_a_padded_batch_are_right_and_padding_is_zero(llama):
    expected = [llama(mx.array(prompt)[None])[0] for prompt in (LONG, SHORT)]
    padded = mx.array([LONG, [*SHORT, *[0] * 49]])
    with attached(llama):
        for _ in range(2):
            single = [make_prompt_cache(llama) for _ in range(2)]
            cache = [caches[0].merge(list(caches)) for caches in zip(*single, strict=True)]
            for each in cache:
                each.prepare(lengths=[60, 11], right_padding=[0, 49])
            parts = [llama(padded[:, :40], cache=cache), llama(padded[:, 40:], cache=cache)]
            logits = mx.concatenate(parts, axis=1)
            assert error(logits[0], expected[0]) < 1e-4
            assert error(logits[1, :11], expected[1]) < 1e-4
            assert mx.all(logits[1, 11:] == 0).item()
            for each in cache:
                each.finalize()
            assert cache[0].offset.tolist() == [60, 11]


def test_a_batch_that_is_padded_on_the_left(llama):
    expected = llama(mx.array(SHORT)[None])
    padded = mx.array([LONG, [*[0] * 49, *SHORT]])
    with attached(llama):
        single = [make_prompt_cache(llama) for _ in range(2)]
        cache = [caches[0].merge(list(caches)) for caches in zip(*single, strict=True)]
        for each in cache:
            each.prepare(left_padding=[0, 49])
        logits = llama(padded, cache=cache)
        assert error(logits[1:, -1], expected[:, -1]) < 1e-4
        assert error(logits[1:, 49:], expected) < 1e-4


def test_rows_of_equal_length_need_no_batch_cache(llama):
    """As mlx-lm's KVCache, which takes any number of rows when it is empty."""
    batch = mx.array([tokens(20, seed) for seed in range(3)])
    with attached(llama):
        cache = make_prompt_cache(llama)
        logits = [llama(batch[:, :12], cache=cache), llama(batch[:, 12:], cache=cache)]
        assert cache[0].offset == 20
    assert error(mx.concatenate(logits, axis=1), llama(batch)) < 1e-4
