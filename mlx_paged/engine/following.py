"""The ranks that follow: they do what the leader's engine does, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from mlx_paged.distributed import Ranks, RanksError
from mlx_paged.engine.input_processor import InputProcessor
from mlx_paged.engine.replicas import state_of_scheduler
from mlx_paged.engine.reports import Reports
from mlx_paged.engine.scheduler import Scheduler
from mlx_paged.engine.shared_values import as_json, from_json
from mlx_paged.engine.step_budget import TokenBudgets
from mlx_paged.engine.steps import Steps
from mlx_paged.engine.thread import EngineThread
from mlx_paged.errors import words_for_all
from mlx_paged.request import Request

T = TypeVar("T")


@dataclass
class Follower:
    """Hears what the leader does, and does it.

    Args:
        calls: methods of the engine without arguments that the leader may name.
    """

    ranks: Ranks
    steps: Steps
    scheduler: Scheduler
    reports: Reports
    input_processor: InputProcessor
    calls: dict[str, Callable[[], object]]

    def run(self) -> Any:
        """Follow until the leader hands over a value; return it, or raise it.

        Raises:
            RanksError: the leader has ended.
        """
        do: dict[str, Callable[[Any], object]] = {
            "add": self._add,
            "abort": self._abort,
            "step": self._step,
            "call": lambda name: self.calls[name](),
        }
        while True:
            kind, value = self.ranks.receive("returned", "raised", *do)
            try:
                if kind in do:
                    do[kind](value)
                    continue
                value = from_json(value)
            except BaseException as error:
                # The leader may wait for this rank in a collective.
                self.ranks.fail(f"failed: {words_for_all(error)}", error)
            if kind == "raised":
                raise value
            return value

    def _add(self, asked: dict[str, Any]) -> None:
        request = Request(**asked | {"params": from_json(asked["params"])})
        self.reports.states[request.request_id] = self.input_processor.state_of(request, None)
        self.steps.add_new()

    def _abort(self, request_id: str) -> None:
        self.steps.abort(self.reports.states[request_id])

    def _step(self, leaders_numbers: list[int]) -> None:
        prefill_budget, mixed_budget, *leaders_state = leaders_numbers
        state = state_of_scheduler(self.scheduler)
        if state != leaders_state:
            raise RanksError(
                f"its scheduler differs from that of rank 0 before step {leaders_state[0]}: "
                f"{tuple(state)}, not {tuple(leaders_state)}"
            )
        self.steps.run(TokenBudgets(prefill_budget, mixed_budget))
        self.reports.report()


def share(ranks: Ranks, thread: EngineThread, call: Callable[[], T]) -> T:
    """On rank 0 what ``call`` returns or raises, which the other ranks are told."""
    try:
        value = call()
        shared = as_json(value)
    except Exception as error:
        thread.call(partial(ranks.send, "raised", as_json(error)))
        raise
    except BaseException as error:
        # Behind the step that runs, for which an interrupt does not wait.
        thread.submit(partial(ranks.send, "raised", as_json(error)))
        raise
    thread.call(partial(ranks.send, "returned", shared))
    return value
