"""The ranks that follow: they do what the leader's engine does, in the same order."""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from mlx_paged.distributed import Ranks, RanksError
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
from mlx_paged.engine.request_state import RequestState
from mlx_paged.engine.scheduler import Scheduler
from mlx_paged.engine.steps import Steps
from mlx_paged.engine.token_texts import TokenTexts
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
        token_texts: TokenTexts | None,
        special_token_ids: Collection[int],
        calls: dict[str, Callable[[], object]],
    ):
        self._ranks = ranks
        self._steps = steps
        self._scheduler = scheduler
        self._reports = reports
        self._token_texts = token_texts
        self._special_token_ids = special_token_ids
        self._calls = calls

    def run(self) -> Value:
        """Follow until the leader hands over a value.

        Raises:
            RanksError: the leader has ended.
        """
        with _interrupts_are_the_leaders():
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
        with self._steps.change():
            if isinstance(message, NewRequest):
                self._add(message)
            elif isinstance(message, Abort):
                state = self._reports.states[message.request_id]
                state.is_aborted = True
                self._steps.abort(state)
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
        state = RequestState(request, new.prompt, self._token_texts, self._special_token_ids)
        self._reports.states[new.request_id] = state
        self._steps.add(state)

    def _step(self, step: Step) -> None:
        state = state_of_scheduler(self._scheduler)
        if state != step.state:
            raise RanksError(
                f"its scheduler differs from that of rank 0 before step {step.state[0]}: "
                f"{state}, not {step.state}"
            )
        self._steps.run()
        self._reports.hand_over(self._reports.take())


def share(ranks: Ranks, call: Callable[[], T]) -> T:
    """On rank 0 what ``call`` returns or raises, which the other ranks are told."""
    try:
        value = call()
    except Exception as error:
        ranks.tell(Value(None, portable_error(error)))
        raise
    except BaseException as error:
        ranks.tell(Value(None, KeyboardInterrupt(*map(str, error.args))))
        raise
    ranks.tell(Value(_portable(value)))
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


@contextmanager
def _interrupts_are_the_leaders() -> Iterator[None]:
    """Ctrl-C in a terminal reaches all ranks of this machine, and rank 0 decides what it means."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
