"""Models of mlx-lm that cap the scores of their attention: they run packed, each row of logits is
that of mlx-lm, and mlx-lm's modules are as they were afterwards.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from helpers.model_zoo import config_of, make_from_config
from helpers.recurrent_schedules import TOLERANCE, Schedule
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged.cache import LayerSpec
from mlx_paged.errors import UnsuitableModelError
from mlx_paged.models.identity import model_identity
from mlx_paged.models.mlx_lm import adapt, packed
from mlx_paged.models.mlx_lm.packed import PackedModel

# A hybrid with windows, whose scores have no cap where its configuration names none.
CONFIGS = {
    "gemma2": config_of("gemma2"),
    "gear": {**config_of("gear"), "attn_logit_softcapping": 4.0},
}
each_model = pytest.mark.parametrize("name", CONFIGS)


@each_model
def test_every_row_of_logits_is_that_of_mlx_lm(name: str):
    model = make_from_config(CONFIGS[name])
    adapted = adapt(model, CONFIGS[name])
    assert isinstance(adapted, PackedModel)
    assert {spec.softcap for spec in adapted.layer_specs} == {4.0}
    schedule = Schedule(model, adapted, seed=2)
    schedule.run(60)
    assert schedule.worst <= TOLERANCE
    assert schedule.events["steps"] >= 45 and schedule.events["hit"] >= 2


@each_model
@pytest.mark.parametrize("softcap", [None, 4.1], ids=["none", "another"])
def test_a_cap_that_is_not_the_models_shows(
    name: str, softcap: float | None, monkeypatch: pytest.MonkeyPatch
):
    def other(*args: Any, **kwargs: Any) -> LayerSpec:
        return replace(LayerSpec(*args, **kwargs), softcap=softcap)

    monkeypatch.setattr(packed, "LayerSpec", other)
    model = make_from_config(CONFIGS[name])
    schedule = Schedule(model, PackedModel(model, CONFIGS[name]))
    schedule.run(20)
    assert schedule.worst > 20 * TOLERANCE


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    """What computes capped scores in modules of mlx-lm that no other test has used."""
    modules = []
    for name in ("mlx_lm.models.gemma2", "mlx_lm.models.gear"):
        monkeypatch.delitem(sys.modules, name)
        modules.append(importlib.import_module(name))
    gemma2, gear = modules
    return lambda: [gemma2.Attention.__call__, gear._softcap_attention]


@each_model
def test_mlx_lm_is_as_it_was_when_a_model_is_dropped(name: str, functions: Any):
    stock, model = functions(), make_from_config(CONFIGS[name])
    adapted = PackedModel(model, CONFIGS[name])
    assert functions() != stock
    # mlx-lm's own caches get its own attention meanwhile.
    ids = mx.array([[3, 1, 4, 1, 5]])
    meanwhile, digest = model(ids, cache=make_prompt_cache(model)), model_identity(adapted).digest
    # The model itself stays, and what it is has not changed.
    object.__setattr__(adapted._recording, "attention", object())
    gc.collect()
    assert functions() == stock
    assert mx.array_equal(model(ids, cache=make_prompt_cache(model)), meanwhile)
    assert model_identity(adapted).digest == digest


def test_layers_that_share_keys_may_not_cap_their_scores_differently():
    entry = packed.RecordedKV(None, mx.arange(3))
    rows = mx.zeros((3, 2, 1, 8))
    keys, values = entry.update_and_fetch(rows, rows)
    entry.attend(mx.zeros((3, 4, 1, 8)), keys, values, entry, 1.0, None, softcap=4.0)
    with pytest.raises(UnsuitableModelError, match="cap their scores differently"):
        entry.attend(mx.zeros((3, 4, 1, 8)), keys, values, entry, 1.0, None)
