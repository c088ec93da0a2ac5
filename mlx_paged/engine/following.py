"""The side of the followers: they do what rank 0's engine does, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from mlx_paged.distributed import Ranks, RanksError
from mlx_paged.engine.build import EngineParts
from mlx_paged.engine.input_processor import InputProcessor
from mlx_paged.engine.replicas import state_of_scheduler
from mlx_paged.engine.request import Request
from mlx_paged.engine.shared_values import as_json, from_json
from mlx_paged.engine.step_budget import TokenBudgets
from mlx_paged.engine.thread import EngineThread

T = TypeVar("T")


def follow(ranks: Ranks, engine: EngineParts, input_processor: InputProcessor) -> Any:
    """Do what the leader's engine does until it sends a result; return or raise that result.

    Raises:
        RanksError: the leader has ended.
    """
    steps, scheduler, reports = engine.steps, engine.scheduler, engine.reports

    def add(value: Any) -> None:
        request = input_processor.with_texts(Request.from_arguments(from_json(value)))
        reports.requests[request.request_id] = request
        steps.add_new()

    def step(leaders_numbers: list[int]) -> None:
        prefill_budget, mixed_budget, *leaders_state = leaders_numbers
        state = state_of_scheduler(scheduler)
        if state != leaders_state:
            raise RanksError(
                f"its scheduler differs from that of rank 0 before step {leaders_state[0]}: "
                f"{tuple(state)}, not {tuple(leaders_state)}"
            )
        steps.run(TokenBudgets(prefill_budget, mixed_budget))
        reports.report()

    do: dict[str, Callable[[Any], object]] = {
        "add": add,
        "abort": lambda request_id: steps.abort(reports.requests[request_id]),
        "step": step,
        "shrink": lambda _: steps.shrink(),
        "reset_prefix_cache": lambda _: steps.reset_prefix_cache(),
        "result": from_json,
    }
    kind = result = None
    while kind != "result":
        kind, value = ranks.receive(*do)
        try:
            result = do[kind](value)
        except BaseException as error:
            ranks.fail(error)  # The leader may wait for this rank in a collective.
    if isinstance(result, BaseException):
        raise result
    return result


def share(ranks: Ranks, thread: EngineThread, call: Callable[[], T]) -> T:
    """On rank 0: send what ``call`` returns or raises to the other ranks, and do the same here."""

    def tell(value: object) -> Callable[[], None]:
        return partial(ranks.send, "result", as_json(value))

    try:
        value = call()
        told = tell(value)
    except BaseException as error:
        # An interrupt does not wait for the current step: it is sent after that.
        run = thread.call if isinstance(error, Exception) else thread.submit
        run(tell(error))
        raise
    thread.call(told)
    return value
