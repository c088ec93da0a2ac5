"""Kernels are tried while the weights of a model are read, and the cache asks for the outcome."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from helpers.gguf_files import write_demo
from helpers.mlx_lm_models import DEEPSEEK_V3, GEMMA3, GPT_OSS, LLAMA, random_model
from metal_emulator import Checks
from metal_emulator.checks import Call
from paged_testing.emulated_metal import emulated_metal

from mlx_paged import LLM, demo_model_path
from mlx_paged.loading import load_for, loader
from mlx_paged.models import matmul_choice
from mlx_paged.models.mlx_lm import adapt, layer_specs_of
from mlx_paged.ops import AttentionShape, KVFormat, kernels, self_check
from mlx_paged.ops.self_check import WorkingKernels
from mlx_paged.ops.tried_once import GoOn, TrialResult, TriedOnce

DEMO_SHAPE = AttentionShape(2, 2, 32, 32, 16, KVFormat.dense("float32"))
WORKING = WorkingKernels(True, True, (1, 2, 4, 8))
SECONDS = 60


@pytest.fixture
def metal(compiler: Any) -> Iterator[list[Call]]:
    """As on a device, with the check at start-up."""
    with emulated_metal(Checks.quick(), tries_kernels=True) as trace:
        yield trace


class Trials:
    """In the place of those of kernels: they wait for the word, and note shapes and threads."""

    def __init__(self) -> None:
        self.tried: list[tuple[AttentionShape, str]] = []
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()
        self.warnings: tuple[str, ...] = ()

    def attempt(self, shape: AttentionShape, go_on: GoOn) -> TrialResult[WorkingKernels]:
        self.tried.append((shape, threading.current_thread().name))
        self.begun.set()
        assert self.may_go_on.wait(SECONDS)
        go_on()
        return TrialResult(WORKING, self.warnings)

    @property
    def threads(self) -> list[str]:
        return [thread for _, thread in self.tried]


@pytest.fixture
def trials(metal: list[Call], monkeypatch: pytest.MonkeyPatch) -> Trials:
    made = Trials()
    monkeypatch.setattr(self_check.try_kernels, "_attempt", made.attempt)
    return made


@pytest.fixture
def on_reading(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Has something done when weights are about to be read."""
    read = loader._read_weights

    def put(action: Callable[[], Any]) -> None:
        def act_and_read(*args: Any) -> None:
            action()
            read(*args)

        monkeypatch.setattr(loader, "_read_weights", act_and_read)

    return put


def ends_soon(name: str) -> bool:
    """Whether there is no thread of this name any more."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(SECONDS)
    return all(thread.name != name for thread in threading.enumerate())


@pytest.mark.slow
def test_kernels_are_tried_before_weights_are_read_and_not_again(
    metal: list[Call],
    on_reading: Callable[[Callable[[], Any]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    callers: list[str] = []
    make, has_begun = kernels.kernel, threading.Event()

    def noted(name: str) -> Any:
        callers.append(threading.current_thread().name)
        has_begun.set()
        return make(name)

    monkeypatch.setattr(kernels, "kernel", noted)
    on_reading(lambda: has_begun.wait(SECONDS) or pytest.fail("no kernel is tried"))
    llm = LLM(demo_model_path(), kv_cache_bytes="40blocks")
    assert set(callers) == {"mlx_paged kernels"}
    assert ends_soon("mlx_paged kernels")
    tried = {(call.kernel, *call.template.items()) for call in metal}
    metal.clear()
    (output,) = llm.generate(["The code of apple is 4821."])
    assert output.outputs[0].token_ids
    assert {(call.kernel, *call.template.items()) for call in metal} <= tried


def test_the_cache_waits_for_a_trial_that_is_slow(
    trials: Trials, on_reading: Callable[[Callable[[], Any]], None]
) -> None:
    trials.may_go_on.clear()
    on_reading(lambda: trials.begun.wait(SECONDS) or pytest.fail("nothing is tried"))
    made = threading.Event()

    def release() -> None:
        time.sleep(0.3)
        assert not made.is_set()
        trials.may_go_on.set()

    waiter = threading.Thread(target=release)
    waiter.start()
    LLM(demo_model_path(), kv_cache_bytes="9blocks")
    made.set()
    waiter.join()
    assert trials.tried == [(DEMO_SHAPE, "mlx_paged kernels")]


def test_what_fails_is_said_once_and_by_the_cache(
    trials: Trials, on_reading: Callable[[Callable[[], Any]], None]
) -> None:
    trials.warnings = ("[metal] gather_blocks fails",)

    def end_trial() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ends_soon("mlx_paged kernels")

    on_reading(end_trial)
    with pytest.warns(UserWarning, match=r"^\[metal\] gather_blocks fails$") as said:
        for _ in range(2):
            LLM(demo_model_path(), kv_cache_bytes="9blocks")
    assert len(said) == len(trials.tried) == 1


def test_an_interrupt_while_weights_are_read_ends_the_trial_too(
    trials: Trials, on_reading: Callable[[Callable[[], Any]], None]
) -> None:
    trials.may_go_on.clear()

    def interrupt() -> None:
        assert trials.begun.wait(SECONDS)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(SECONDS)

    on_reading(interrupt)
    with pytest.raises(KeyboardInterrupt):
        LLM(demo_model_path(), kv_cache_bytes="9blocks")
    trials.may_go_on.set()
    assert ends_soon("mlx_paged kernels")
    on_reading(lambda: None)
    # It was not tried to its end, and so it is tried again.
    LLM(demo_model_path(), kv_cache_bytes="9blocks")
    assert trials.threads == ["mlx_paged kernels"] * 2
    LLM(demo_model_path(), kv_cache_bytes="9blocks")
    assert len(trials.tried) == 2


def test_a_model_that_is_broken_ends_the_trial_too(trials: Trials, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo_model_path(), folder)
    (folder / "tokenizer.json").write_text("{")
    trials.may_go_on.clear()
    with pytest.raises(ValueError, match="tokenizer"):
        LLM(folder, kv_cache_bytes="9blocks")
    trials.may_go_on.set()
    assert ends_soon("mlx_paged kernels")
    LLM(demo_model_path(), kv_cache_bytes="9blocks")
    assert len(trials.tried) == 2


def test_a_trial_that_raises_leaves_it_to_the_cache(trials: Trials) -> None:
    attempt, calls = trials.attempt, []

    def fail_first(shape: AttentionShape, go_on: GoOn) -> TrialResult[WorkingKernels]:
        calls.append(shape)
        if len(calls) == 1:
            raise RuntimeError("the driver is away")
        return attempt(shape, go_on)

    self_check.try_kernels._attempt = fail_first
    try:
        LLM(demo_model_path(), kv_cache_bytes="9blocks")
    finally:
        self_check.try_kernels._attempt = attempt
    assert len(calls) == 2
    assert trials.threads != ["mlx_paged kernels"]


@pytest.mark.parametrize(
    "options",
    [{"kv": "basic"}, {"backend": "reference"}, {"kv_format": "q9"}, {"block_size": "16"}, None],
    ids=str,
)
def test_nothing_is_tried_for_an_engine_that_needs_nothing(
    trials: Trials, options: dict[str, Any] | None
) -> None:
    """Or for options that are wrong, which the engine says."""
    load_for(None, demo_model_path(), engine_options=options)
    assert ends_soon("mlx_paged kernels")
    assert trials.tried == []


def test_nothing_is_tried_where_there_is_no_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check.try_kernels, "quietly", lambda *_, **__: pytest.fail("tried"))
    load_for(None, demo_model_path(), engine_options={})
    assert ends_soon("mlx_paged kernels")


def test_the_options_of_the_cache_say_what_is_tried(trials: Trials) -> None:
    options = {"kv_format": "8", "block_size": 32, "kv_cache_bytes": "9blocks"}
    LLM(demo_model_path(), **options)
    ((shape, thread),) = trials.tried
    assert (shape.block_size, thread) == (32, "mlx_paged kernels")
    assert str(shape.format) == "8 bits in groups of 32"


@pytest.mark.parametrize(
    ("options", "formats"),
    [
        ({}, [("float32", 16, 0, "dense")]),
        ({"kv": "basic", "matmul": "rows"}, [("float32", 16, 0, "dense")]),
        ({"matmul": "mlx"}, []),
    ],
    ids=["auto", "rows", "mlx"],
)
def test_the_matmul_of_an_engine_is_tried_meanwhile_and_not_again(
    trials: Trials,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    formats: list[tuple[Any, ...]],
) -> None:
    tried: list[tuple[Any, ...]] = []

    def attempt(*arguments: Any) -> TrialResult[bool]:
        *format, go_on = arguments
        go_on()
        tried.append((*format, threading.current_thread().name))
        return TrialResult(True)

    monkeypatch.setattr(matmul_choice, "try_rows_matmul", TriedOnce(attempt))
    LLM(demo_model_path(), **options, kv_cache_bytes="9blocks")
    assert tried == [(*format, "mlx_paged kernels") for format in formats]


def test_a_gguf_file_is_tried_when_its_cache_is_made(trials: Trials, tmp_path: Path) -> None:
    LLM(write_demo(tmp_path / "demo.gguf"), kv_cache_bytes="9blocks")
    assert len(trials.tried) == 1
    assert "mlx_paged kernels" not in trials.threads


@pytest.mark.parametrize(
    "config", [LLAMA, GEMMA3, GPT_OSS, DEEPSEEK_V3], ids=lambda config: config["model_type"]
)
def test_layers_are_known_before_weights_are_read(config: dict[str, Any]) -> None:
    model = random_model(config)
    read = mx.eval

    def refuse(*_: Any) -> None:
        pytest.fail("something was evaluated")

    mx.eval = refuse
    try:
        layers = layer_specs_of(model)
    finally:
        mx.eval = read
    assert layers == adapt(model, config).layer_specs
