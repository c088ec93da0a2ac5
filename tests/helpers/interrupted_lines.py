"""An interrupt at any line of the package: the worst that Ctrl-C, or an exception from another
thread, can do.

python tests/helpers/interrupted_lines.py --count 500 --seed 0
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import mlx_paged
from helpers.engine_runs import assert_nothing_held, greedy, load_demo, make_engine, sampled
from mlx_paged.cache import PagedKVCache
from mlx_paged.engine.engine import Engine
from mlx_paged.request import RequestOutput, SamplingParams

PACKAGE = str(Path(mlx_paged.__file__).parent)
MAX_STEPS = 2000

FACTS = "The code of apple is 4821. " * 4
REQUESTS: dict[str, tuple[str, SamplingParams]] = {
    "logprobs": (FACTS, greedy(9, logprobs=2, ignore_eos=True)),
    "sampled": ("Hello, who are you? ", sampled(seed=2, max_tokens=10, ignore_eos=True)),
    "two": (
        "Count from 5 to 40. ",
        sampled(seed=9, max_tokens=6, n=2, logprobs=1, ignore_eos=True),
    ),
    "shared": (FACTS + "What", greedy(8)),
    "stop": ("Once upon a time ", greedy(16, stop=["e"], repetition_penalty=1.1)),
}

Answers = dict[str, list[tuple]]


class LineInterrupt:
    """Counts the lines of the package that begin to run, and raises ``KeyboardInterrupt`` before
    one of them.

    Args:
        at: the number of that line, from 0; ``None`` only counts.
        rooms: with which the names of the files end whose lines count; to look at few of them is
            faster.

    Attributes:
        num_lines: lines so far.
        turns: for each line, by file and number, when it began to run.
        where: the function and line that was interrupted.
    """

    def __init__(self, at: int | None = None, rooms: tuple[str, ...] = ("",)):
        self.at = at
        self.rooms = rooms
        self.num_lines = 0
        self.turns: dict[tuple[str, int], list[int]] = {}
        self.where: str | None = None

    @contextmanager
    def armed(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not (file.startswith(PACKAGE) and file.endswith(self.rooms)):
            return None
        if event == "line":
            number, self.num_lines = self.num_lines, self.num_lines + 1
            if self.at is None:
                self.turns.setdefault((file.rpartition("/")[2], frame.f_lineno), []).append(number)
            elif number == self.at:
                self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace


class Work:
    """``REQUESTS`` on an engine, not all at the same time; it may go on after any interrupt."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.to_ask = dict(REQUESTS)
        self.answers: Answers = {}

    def go_on(self) -> None:
        for request_id, (text, params) in list(self.to_ask.items()):
            try:
                self.engine.add_request(request_id, text, params)
            except ValueError as error:
                # It was interrupted when it was all but done.
                assert "exists already" in str(error)
            self.to_ask.pop(request_id)
            if request_id == "sampled":
                self._step()
        for _ in range(MAX_STEPS):
            if not self.engine.has_unfinished_requests():
                return
            self._step()
        raise AssertionError("the engine spins")

    def _step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                self.answers[output.request_id] = _answer(output)


def _answer(output: RequestOutput) -> list[tuple]:
    return [
        (
            c.token_ids,
            c.text,
            c.finish_reason,
            c.stop_reason,
            c.logprobs and [sorted(entry) for entry in c.logprobs],
        )
        for c in output.outputs
    ]


def tight_engine(demo: tuple[Any, Any], swap: bool = True) -> Engine:
    """Too little room for all requests: they meet growth, preemption, swapping and chunks."""
    return make_engine(
        *demo,
        block_size=8,
        kv_cache_bytes="9blocks",
        swap_bytes="9blocks" if swap else 0,
        max_num_batched_tokens=32,
        max_num_seqs=5,
    )


def run_undisturbed(
    demo: tuple[Any, Any], swap: bool = True, rooms: tuple[str, ...] = ("",)
) -> tuple[LineInterrupt, Answers]:
    """The lines that the work takes, and its answers."""
    lines, work = LineInterrupt(rooms=rooms), Work(tight_engine(demo, swap))
    with lines.armed():
        work.go_on()
    assert work.engine.stats().num_preemptions > 0 and len(work.answers) == len(REQUESTS)
    return lines, work.answers


def check_interrupt(
    demo: tuple[Any, Any],
    interrupt: LineInterrupt,
    is_aborted: bool,
    expected: Answers,
    swap: bool = True,
) -> None:
    """Interrupt the work before a line; then it goes on, or begins again after ``abort_all``: every
    answer is right.

    Raises:
        AssertionError: with the line that was interrupted.
    """
    engine = tight_engine(demo, swap)
    work = Work(engine)
    try:
        with interrupt.armed():
            work.go_on()
        raise AssertionError("the line was not reached")
    except KeyboardInterrupt:
        pass
    try:
        if is_aborted:
            engine.abort_all()
            assert engine.stats().num_used_blocks == 0
            for _ in range(MAX_STEPS):
                if not engine.has_unfinished_requests():
                    break
                engine.step()
            assert_nothing_held(engine)
            work = Work(engine)
        work.go_on()
        assert work.answers == expected
        assert_nothing_held(engine)
    except BaseException as error:
        error.add_note(
            f"interrupted at line event {interrupt.at}, {interrupt.where}; aborted: {is_aborted}"
        )
        raise


def check_random_interrupts(
    demo: tuple[Any, Any], expected: Answers, num_lines: int, count: int, seed: int, swap: bool
) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        # The last steps differ by a line or so from run to run: where garbage is collected, for
        # one.
        at = rng.randrange(num_lines * 9 // 10)
        check_interrupt(demo, LineInterrupt(at), rng.random() < 0.5, expected, swap)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=500, help="interrupts (default: 500)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--recompute", action="store_true", help="preempted requests are never swapped"
    )
    parser.add_argument("--run-ahead", action="store_true", help="one step ahead, as on Metal")
    args = parser.parse_args()
    if args.run_ahead:
        PagedKVCache.can_run_ahead = True  # type: ignore[method-assign, assignment]
    demo = load_demo()
    swap = not args.recompute
    lines, expected = run_undisturbed(demo, swap)
    check_random_interrupts(demo, expected, lines.num_lines, args.count, args.seed, swap)
    print(
        f"{args.count} interrupts in {lines.num_lines:,} lines: no request lost, no token changed"
    )


if __name__ == "__main__":
    main()
