"""Settings of an engine, a cache and a model folder: a value of the wrong type is refused by name,
in one line.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers.engine_runs import answer, ask_alone, greedy, make_engine, prompt, run

from mlx_paged import demo_model_path, load, make_kv_cache
from mlx_paged.loading import LoadError
from mlx_paged.models import qwen3


class Text(str):
    """A text of a type of its own."""


class Unprintable:
    def __repr__(self) -> str:
        raise LookupError("no repr")

    __str__ = __repr__


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": {1: 2}}, "seed must be a whole number, got {1: 2}"),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
        ({"tokenizer": "folder"}, "tokenizer must be one that mlx_paged.load returns, got str"),
        ({"tokenizer": np.True_}, "tokenizer must be one that mlx_paged.load returns, got bool"),
        ({"swap_bytes": np.array([1, 2])}, r"swap_bytes must be bytes .*, got array"),
        (
            {"swap_bytes": Unprintable()},
            "swap_bytes must be bytes .*, got a Unprintable that has no repr",
        ),
        ({"kv_cache_bytes": ["x" * 5000]}, "kv_cache_bytes must be bytes .*, got .'xxx"),
        ({"kv_cache_bytes": True}, "kv_cache_bytes must be bytes .*, got True"),
        ({"kv_cache_bytes": 1e9}, "kv_cache_bytes must be bytes .*, got 1000000000.0"),
        ({"backend": "x" * 5000}, "unknown backend"),
        (
            {"model": None},
            "model must be one that mlx_paged.load or mlx_lm.load returns, got NoneType",
        ),
        (
            {"model": np.array([])},
            "model must be one that mlx_paged.load or mlx_lm.load returns, got numpy.ndarray",
        ),
        (
            {"model": mx.array([1])},
            "model must be one that mlx_paged.load or mlx_lm.load returns, got mlx.core.array",
        ),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else None,
)
def test_settings_of_an_engine(model: qwen3.Model, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message) as refusal:
        make_engine(**({"model": model} | options))
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300


def test_settings_of_an_engine_of_any_integer_type(model: qwen3.Model):
    engine = make_engine(
        model, seed=np.int64(3), kv_cache_bytes=np.int64(10**6), swap_bytes=np.int32(0)
    )
    assert answer(engine, prompt(5), greedy(2)).outputs[0].token_ids == ask_alone(
        model, prompt(5), greedy(2)
    )


def test_an_abort_names_a_request_by_a_text(model: qwen3.Model):
    engine = make_engine(model)
    for call in (engine.abort, engine.prompt_progress):
        with pytest.raises(ValueError, match="request_id must be a text, got"):
            call(["a"])


def test_texts_of_a_type_of_their_own_are_texts(model: qwen3.Model):
    engine = make_engine(model)
    for request_id in ("a", "b"):
        salt = Text("salt") if request_id == "a" else "salt"
        engine.add_request(Text(request_id), prompt(40), greedy(3), cache_salt=salt)
        output = run(engine)[request_id]
        assert output.outputs[0].token_ids == ask_alone(model, prompt(40), greedy(3))
    assert output.num_cached_tokens == 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "x" * 5000}, "unknown cache mode"),
        ({"kind": ["paged"]}, "kind must be a text"),
        ({"block_size": None}, "block_size must be a positive integer, got None"),
    ],
    ids=str,
)
def test_settings_of_a_cache(model: qwen3.Model, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message) as refusal:
        make_kv_cache(model, **options)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"path_or_hf_repo": None},
            "path_or_hf_repo must be a folder, a hub id or a file, got None",
        ),
        ({"path_or_hf_repo": 7}, "path_or_hf_repo must be a folder, a hub id or a file, got 7"),
        ({"model_config": 0.5}, "model_config must be a dict with texts as keys, or None, got 0.5"),
        ({"tokenizer_config": {1: 2}}, "tokenizer_config must be a dict with texts as keys"),
        ({"adapter_path": 7}, "adapter_path must be a text, or None, got 7"),
        ({"revision": True}, "revision must be a text, or None, got True"),
        ({"lazy": 1}, "lazy must be True or False, got 1"),
        ({"return_config": "yes"}, "return_config must be True or False, got 'yes'"),
    ],
    ids=str,
)
def test_arguments_of_load(options: dict[str, Any], message: str):
    with pytest.raises(LoadError, match=message):
        load(**({"path_or_hf_repo": demo_model_path()} | options))
