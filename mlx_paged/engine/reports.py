"""``Reports``: the outputs of requests, and which of them have to be reported."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mlx_paged.engine.latencies import Latencies
from mlx_paged.engine.request import Completion, Request
from mlx_paged.request import RequestOutput
from mlx_paged.sampling_params import RequestOutputKind


class Reports:
    """The requests whose end is not reported yet, and which of them have changed.

    Attributes:
        requests: by id. Any thread may add an entry, in a single operation that needs no
            lock; only the engine's thread removes them.
    """

    def __init__(self, latencies: Latencies):
        self.requests: dict[str, Request] = {}
        self._latencies = latencies
        self._news: dict[str, None] = {}  # ids of requests, in order
        self._num_taken_on = 0

    def new_requests(self) -> Sequence[Request]:
        """The requests that were added since the last call, in order."""
        num_new = len(self.requests) - self._num_taken_on
        if not num_new:
            return ()
        # Another thread may have added more since then; dicts keep their order.
        new = list(self.requests.values())[self._num_taken_on :]
        self._num_taken_on += len(new)
        return new

    def note(self, completion: Completion) -> None:
        """Mark a completion as changed."""
        if completion.is_finished:
            completion.end_output()
        self._news[completion.request.request_id] = None

    def drop(self, request: Request) -> None:
        """Forget a finished request without reporting it."""
        name = request.request_id
        if self.requests.get(name) is request:
            self._latencies.observe([request], time.perf_counter())
            self._news.pop(name, None)
            self._forget(name)

    def report(self) -> list[RequestOutput]:
        """The changed outputs, by the ``output_kind`` of each request. Forgets finished ones."""
        requests = [self.requests[name] for name in self._news]
        self._news.clear()
        outputs: list[RequestOutput] = []
        for request in requests:
            output, kind = request.output, request.params.output_kind
            if kind is RequestOutputKind.DELTA:
                outputs.append(request.new_part())
            elif output.finished or kind is RequestOutputKind.CUMULATIVE:
                outputs.append(output)
            if output.finished:
                self._forget(request.request_id)
        self._latencies.observe(requests, time.perf_counter())
        self._latencies.observe_steps()
        return outputs

    def _forget(self, name: str) -> None:
        del self.requests[name]
        self._num_taken_on -= 1
