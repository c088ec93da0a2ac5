"""The ranks that follow: they do what the leader's engine does, in the same order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from mlx_paged.distributed import Ranks, RanksError
from mlx_paged.engine.input_processor import InputProcessor
from mlx_paged.engine.replicas import (
    Abort,
    Call,
    NewRequest,
    Step,
    Value,
    portable_error,
    state_of_scheduler,
)
from mlx_paged.engine.reports import Reports
from mlx_paged.engine.scheduler import Scheduler
from mlx_paged.engine.steps import Steps
from mlx_paged.engine.thread import EngineThread
from mlx_paged.errors import words_for_all
from mlx_paged.request import Request, RequestOutput

T = TypeVar("T")


class FollowingLoop:
    """Hears what the leader does, and does it.

    Args:
        calls: what a :class:`Call` may name.
    """

    def __init__(
        self,
        ranks: Ranks,
        steps: Steps,
        scheduler: Scheduler,
        reports: Reports,
        input_processor: InputProcessor,
        calls: dict[str, Callable[[], object]],
    ):
        self._ranks = ranks
        self._steps = steps
        self._scheduler = scheduler
        self._reports = reports
        self._input_processor = input_processor
        self._calls = calls

    def run(self) -> Value:
        """Follow until the leader hands over a value.

        Raises:
            RanksError: the leader has ended.
        """
        while True:
            message = self._ranks.hear()
            if isinstance(message, Value):
                return message
            try:
                self._do(message)
            except BaseException as error:
                # The leader may wait for this rank in a collective.
                self._ranks.fail(f"failed: {words_for_all(error)}", error)

    def _do(self, message: Any) -> None:
        if isinstance(message, NewRequest):
            self._add(message)
        elif isinstance(message, Abort):
            self._steps.abort(self._reports.states[message.request_id])
        elif isinstance(message, Call):
            self._calls[message.name]()
        elif isinstance(message, Step):
            self._step(message)
        else:
            raise RanksError(f"heard {type(message).__name__} between two steps")

    def _add(self, new: NewRequest) -> None:
        request = Request(
            new.request_id,
            new.token_ids,
            new.params,
            seed=new.seed,
            priority=new.priority,
            cache_salt=new.cache_salt,
            no_store=new.no_store,
        )
        self._reports.states[new.request_id] = self._input_processor.state_of(request, new.prompt)
        self._steps.add_new()

    def _step(self, step: Step) -> None:
        state = state_of_scheduler(self._scheduler)
        if state != step.state:
            raise RanksError(
                f"its scheduler differs from that of rank 0 before step {step.state[0]}: "
                f"{state}, not {step.state}"
            )
        self._steps.run()
        self._reports.report()


def share(ranks: Ranks, thread: EngineThread, call: Callable[[], T]) -> T:
    """On rank 0 what ``call`` returns or raises, which the other ranks are told."""
    try:
        value = call()
    except Exception as error:
        thread.call(partial(ranks.tell, Value(None, portable_error(error))))
        raise
    except BaseException as error:
        # Behind the step that runs, for which an interrupt does not wait.
        interrupt = KeyboardInterrupt(*map(str, error.args))
        thread.submit(partial(ranks.tell, Value(None, interrupt)))
        raise
    thread.call(partial(ranks.tell, Value(_portable(value))))
    return value


def _portable(value: object) -> object:
    """``value``; the errors of outputs in it become such that another process can read them."""
    if not isinstance(value, list):
        return value
    return [_portable_output(each) if isinstance(each, RequestOutput) else each for each in value]


def _portable_output(output: RequestOutput) -> RequestOutput:
    if output.error is None:
        return output
    copied = copy.copy(output)
    copied.error = portable_error(output.error)
    return copied
