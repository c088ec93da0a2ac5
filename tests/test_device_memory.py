"""What stays wired: nothing, unless it is asked for; how many freed buffers MLX keeps; and what is
said of a model that does not fit. The device is made up.
"""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest
from helpers.engine_runs import greedy, load_demo, prompt
from mlx.utils import tree_flatten

from mlx_paged import (
    LLM,
    AsyncEngine,
    Engine,
    batch_generate,
    generate,
    stream_generate,
)
from mlx_paged.errors import ArgumentError
from mlx_paged.generation import generate_step
from mlx_paged.models import memory
from mlx_paged.models.activations import default_activation_nbytes

RECOMMENDED = 12 * 10**9
BUDGET: dict[str, Any] = {"kv_cache_bytes": "100blocks", "backend": "reference"}


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 16 GB with Metal."""
    info = {"memory_size": 16 * 10**9, "max_recommended_working_set_size": RECOMMENDED}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)


@pytest.fixture
def limits(mac: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The wired limits that MLX is given, from a first one of 7 bytes on."""
    found = [7]

    def set_limit(limit: int) -> int:
        found.append(limit)
        return found[-2]

    monkeypatch.setattr(mx, "set_wired_limit", set_limit)
    yield found
    gc.collect()
    assert found[-1] == 7, "what was there before comes back"


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    return load_demo()


def ask_engine(demo: tuple[Any, Any], **options: Any) -> None:
    engine = Engine(*demo, **BUDGET, **options)
    engine.add_request("a", prompt(5), greedy(2))
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()


def ask_async_engine(demo: tuple[Any, Any], **options: Any) -> None:
    async def ask() -> None:
        async with AsyncEngine(*demo, **BUDGET, **options) as engine:
            async for _ in engine.generate(prompt(5), greedy(2)):
                pass

    asyncio.run(ask())


WAYS: dict[str, Callable[..., Any]] = {
    "generate": lambda demo, **options: generate(
        *demo, prompt(5), max_tokens=2, **BUDGET, **options
    ),
    "stream_generate": lambda demo, **options: list(
        stream_generate(*demo, prompt(5), max_tokens=2, **BUDGET, **options)
    ),
    "generate_step": lambda demo, **options: list(
        generate_step(prompt(5), demo[0], max_tokens=2, **BUDGET, **options)
    ),
    "batch_generate": lambda demo, **options: batch_generate(
        *demo, [prompt(5)], max_tokens=2, **BUDGET, **options
    ),
    "LLM": lambda demo, **options: LLM(*demo, **BUDGET, **options).generate(prompt(5), greedy(2)),
    "Engine": ask_engine,
    "AsyncEngine": ask_async_engine,
}
in_every_way = pytest.mark.parametrize("ask", WAYS.values(), ids=WAYS)


@in_every_way
def test_the_limit_that_is_asked_for_is_set_while_there_is_an_engine(
    demo: tuple[Any, Any], limits: list[int], ask: Callable[..., Any]
):
    ask(demo, wired_limit="2G")
    gc.collect()
    assert limits == [7, 2 * 2**30, 7]


def test_the_recommended_limit_can_be_asked_for_by_name(demo: tuple[Any, Any], limits: list[int]):
    Engine(*demo, **BUDGET, wired_limit=None).close()
    assert limits == [7]
    engine = Engine(*demo, **BUDGET, wired_limit="recommended")
    assert limits == [7, RECOMMENDED]
    engine.close()
    engine.close()
    assert limits == [7, RECOMMENDED, 7]


def test_of_several_engines_the_largest_limit_holds_and_the_last_one_puts_back_what_was_there(
    demo: tuple[Any, Any], limits: list[int]
):
    first = Engine(*demo, **BUDGET, wired_limit=3000)
    second = Engine(*demo, **BUDGET, wired_limit=5000)
    third = Engine(*demo, **BUDGET, wired_limit=4000)
    assert limits[-1] == 5000
    first.close()
    assert limits[-1] == 5000
    second.close()
    assert limits[-1] == 4000
    del third
    gc.collect()
    assert limits[-1] == 7


def test_an_engine_that_can_not_be_made_leaves_no_limit(demo: tuple[Any, Any], limits: list[int]):
    with pytest.raises(ValueError, match="holds no block"):
        Engine(*demo, kv_cache_bytes=1, wired_limit="2G")
    assert limits == [7]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("lots", "wired_limit must be 'recommended' or bytes .*, got 'lots'"),
        ("5blocks", "wired_limit must be 'recommended' or bytes .*, got '5blocks'"),
        (0, "wired_limit must be 'recommended' or bytes .*, got 0"),
        (-1, "wired_limit must be"),
        (True, "wired_limit must be 'recommended' or bytes .*, got True"),
        (2.5, "wired_limit must be"),
        (
            "12G",
            r"wired_limit: 12,884,901,888 bytes are more than the 12,000,000,000 .* "
            r"sudo sysctl iogpu\.wired_limit_mb",
        ),
    ],
)
def test_other_limits_are_refused_by_name(
    demo: tuple[Any, Any], limits: list[int], value: Any, message: str
):
    with pytest.raises(ArgumentError, match=message) as refused:
        Engine(*demo, **BUDGET, wired_limit=value)
    assert refused.value.argument == "wired_limit" and limits == [7]


def test_a_device_without_metal_says_that_it_wires_nothing(
    demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(mx, "set_wired_limit", None)
    with pytest.warns(UserWarning, match="wired_limit has no effect without Metal"):
        Engine(*demo, **BUDGET, wired_limit="recommended")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Engine(*demo, **BUDGET)
    with pytest.raises(ArgumentError, match="wired_limit must be"):
        Engine(*demo, **BUDGET, wired_limit="lots")


# Freed buffers

MLX_DEFAULT = 18 * 10**9


@pytest.fixture
def cache_limits(mac: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The limits of freed buffers that MLX is given, from its own default for this device on."""
    found = [MLX_DEFAULT]

    def set_limit(limit: int) -> int:
        found.append(limit)
        return found[-2]

    monkeypatch.setattr(mx, "set_cache_limit", set_limit)
    return found


@in_every_way
def test_nothing_is_wired_unless_it_is_asked_for_and_freed_buffers_are_bounded_by_activations(
    demo: tuple[Any, Any],
    limits: list[int],
    cache_limits: list[int],
    ask: Callable[..., Any],
):
    ask(demo)
    gc.collect()
    assert limits == [7]
    before, bound, after = cache_limits
    assert before == after == MLX_DEFAULT and 10**6 < bound < 10**9


def test_the_bound_is_twice_what_stats_say_and_that_of_several_engines_their_sum(
    demo: tuple[Any, Any], cache_limits: list[int]
):
    first, second = (Engine(*demo, **BUDGET, max_num_batched_tokens=size) for size in (512, 1024))
    sizes = [2 * engine.stats().nbytes_activations for engine in (first, second)]
    assert cache_limits == [MLX_DEFAULT, sizes[0], sum(sizes)]
    first.close()
    first.close()
    del second
    gc.collect()
    assert cache_limits == [MLX_DEFAULT, sizes[0], sum(sizes), sizes[1], MLX_DEFAULT]


@pytest.mark.parametrize("own", [0, 10**6, RECOMMENDED - 1])
def test_a_limit_that_the_user_has_set_stays(
    demo: tuple[Any, Any], cache_limits: list[int], own: int
):
    cache_limits[:] = [own]
    engine = Engine(*demo, **BUDGET)
    assert cache_limits[-1] == own
    engine.close()
    assert cache_limits[-1] == own


def test_without_metal_the_limit_is_left_to_mlx(
    demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mx, "set_cache_limit", None)
    Engine(*demo, **BUDGET).close()


# Models that do not fit

WEIGHTS = sum(leaf.nbytes for _, leaf in tree_flatten(load_demo()[0].parameters()))
ACTIVATIONS = default_activation_nbytes(load_demo()[0])
# What weights have to leave for the least K/V budget.
LEAST_LEFT = max(2 * memory.MIN_KV_CACHE_BYTES, memory.MIN_KV_CACHE_BYTES + ACTIVATIONS)
IN_WORDS = f"{WEIGHTS / 1e6:.2g} MB"
WAY_OUT = (
    "a smaller model or one of fewer bits, kv_format (--kv-bits) 8 or 4, a smaller max_model_len "
    "(--max-model-len), or a kv_cache_bytes (--kv-cache-bytes) of your own"
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 200 KB, where budgets have a 32nd of their least size."""
    monkeypatch.setattr(memory, "memory_size", lambda: 200_000)
    monkeypatch.setattr(memory, "MIN_KV_CACHE_BYTES", 2**21)


def said_of(demo: tuple[Any, Any], **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Engine(*demo, **options)
    return [str(each.message) for each in said]


def test_a_model_that_does_not_fit_says_so_with_the_numbers_and_the_way_out(
    demo: tuple[Any, Any], small: None
):
    assert said_of(demo) == [
        f"[engine] the model does not fit into this machine: its weights take {IN_WORDS}, and "
        "this machine has 0.2 MB of memory; the K/V budget is 2.1 MB "
        f"and holds 1,008 of its 4,096 tokens of context. What you can do: {WAY_OUT}"
    ]
    assert (
        "holds its 1,000 tokens of context. What you can do" in said_of(demo, max_model_len=1000)[0]
    )
    assert "holds an unlimited context. What you can" in said_of(demo, window=64)[0]


def test_on_metal_it_is_held_against_what_metal_recommends(
    demo: tuple[Any, Any], mac: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory, "recommended_memory", lambda: WEIGHTS + 10**6)
    (said,) = said_of(demo, backend="reference")
    assert (
        f"and they leave 1 MB of the {memory.format_nbytes(WEIGHTS + 10**6)} that Metal recommends "
        f"for K/V and some {memory.format_nbytes(ACTIVATIONS)} of activations; the K/V budget is "
    ) in said


def test_a_budget_that_was_given_is_judged_by_the_whole_memory(
    demo: tuple[Any, Any], small: None, monkeypatch: pytest.MonkeyPatch
):
    given = {"kv_cache_bytes": "100blocks"}
    (said,) = said_of(demo, **given)
    assert f"take {IN_WORDS}, and this machine has 0.2 MB of memory; the K/V budget is" in said
    monkeypatch.setattr(memory, "memory_size", lambda: WEIGHTS)
    assert said_of(demo, **given) == []
    assert len(said_of(demo)) == 1


def test_a_model_that_fits_says_nothing(demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch):
    least = WEIGHTS + LEAST_LEFT
    monkeypatch.setattr(memory, "memory_size", lambda: least)
    assert said_of(demo) == []
    monkeypatch.setattr(memory, "memory_size", lambda: least - 2)
    assert len(said_of(demo)) == 1


def test_the_weights_of_a_draft_model_count(demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "memory_size", lambda: WEIGHTS + LEAST_LEFT)
    assert said_of(demo) == []
    (said,) = said_of(demo, draft_model=load_demo()[0])
    assert f"its weights take {2 * WEIGHTS / 1e6:.2g} MB" in said


@pytest.mark.parametrize(
    ("weights", "activations", "recommended", "expected"),
    [
        (10, 1, 100, 72),  # four fifths of what is left on a Mac
        (90, 1, 100, 8),
        (90, 5, 100, 5),  # less where activations need more than the fifth
        (99, 5, 100, -4),
        (20, 1, 0, 90),  # half of it without Metal
    ],
)
def test_kv_take_a_share_of_what_weights_leave_but_never_that_of_activations(
    weights: int, activations: int, recommended: int, expected: int
):
    assert memory.kv_share(weights, activations, recommended, 200) == expected
