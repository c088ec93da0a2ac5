"""Requests whose tokens leave a window, on kernels: on lazy ones, from traces, and emulated."""

from __future__ import annotations

import mlx.core as mx
from helpers.engine_runs import ask, greedy, make_engine, prompt, sampled
from helpers.fast_lane import mostly_slow
from helpers.windowed_models import KINDS, model_and_options
from helpers.workloads import Workload, assert_same
from metal_emulator import Checks
from paged_testing.emulated_metal import emulated_metal
from paged_testing.lazy_metal import lazy_metal
from paged_testing.pure_metal import pure_metal

from mlx_paged.engine import compiled_decode
from mlx_paged.engine.compiled_decode import CompiledDecode


# Each kind is in the fast lane on one sort of kernels.
@mostly_slow("kind", KINDS, quick=(0, 3))
def test_lazy_kernels_one_step_ahead_get_the_same_as_plain_mlx(kind):
    model, options = model_and_options(kind, head_dim=32)
    workload = Workload(400, 14, model.args.vocab_size)
    own = {name: value for name, value in options.items() if name not in workload.options}
    plain = workload.run(model, run_ahead=False, **own)
    with lazy_metal(computes=True):
        ahead = workload.run(model, run_ahead=True, **own)
    assert ahead.engine.cache.backend.name == "metal"
    for name, output in plain.outputs.items():
        assert_same(ahead.outputs[name], output)


@mostly_slow("kind", KINDS, quick=(4,))
def test_replayed_decodes_get_the_same_as_plain_mlx(kind, monkeypatch):
    monkeypatch.setattr(compiled_decode, "NUM_BUILT_FIRST", 0)
    replay, replays = CompiledDecode.replay, []

    def counted(decode: CompiledDecode, tokens: mx.array) -> mx.array | None:
        logits = replay(decode, tokens)
        replays.append(logits is not None)
        return logits

    monkeypatch.setattr(CompiledDecode, "replay", counted)
    model, options = model_and_options(kind, head_dim=32)
    asked = {"a": (prompt(30), greedy(90)), "b": (prompt(9), sampled(1, 100))}
    expected = ask(make_engine(model, **options), asked)
    with pure_metal():
        engine = make_engine(model, **options)
        assert engine.cache.backend.name == "metal"
        assert ask(engine, asked) == expected
    assert sum(replays) > 80


@mostly_slow("kind", KINDS, quick=(1, 2))
def test_emulated_kernels_get_the_same_as_plain_mlx(kind, compiler):
    model, options = model_and_options(kind, head_dim=32)
    asked = {"a": (prompt(70), greedy(40)), "b": (prompt(9), sampled(1, 60))}
    expected = ask(make_engine(model, **options), asked)
    with emulated_metal(Checks.quick()):
        engine = make_engine(model, run_ahead=True, **options)
        assert engine.cache.backend.name == "metal"
        assert ask(engine, asked) == expected
        assert ask(engine, asked) == expected, "warm as cold"
