"""Real signals at random moments while requests run on an engine, as Ctrl-C sends them.

python tests/helpers/interrupts.py --count 2000 --seed 0
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from paged_testing.integrity import check_scheduler

import mlx_paged
from helpers.engine_runs import assert_nothing_held, greedy, load_demo, make_engine, sampled
from mlx_paged import StructuredOutputsParams
from mlx_paged.cache import PagedKVCache
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.request import TokenRules
from mlx_paged.options.sampling_params import RequestOutputKind, SamplingParams
from mlx_paged.request import RequestOutput

PACKAGE = str(Path(mlx_paged.__file__).parent)
MAX_STEPS = 20000

FACTS = "The code of apple is 4821. " * 4
SCHEMA = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 9}
REQUESTS: dict[str, tuple[str, SamplingParams]] = {
    "logprobs": (FACTS, greedy(19, logprobs=2, ignore_eos=True)),
    "sampled": ("Hello, who are you? ", sampled(seed=2, max_tokens=20, ignore_eos=True)),
    "two": (
        "Count from 5 to 40. ",
        sampled(seed=9, max_tokens=16, n=2, logprobs=1, ignore_eos=True),
    ),
    "shared": (FACTS + "What", greedy(18, output_kind=RequestOutputKind.DELTA)),
    "stop": ("Once upon a time ", greedy(26, stop=["e"], repetition_penalty=1.1)),
    "penalties": (
        "Count from 5 to 9. ",
        sampled(seed=4, max_tokens=30, frequency_penalty=1.0, presence_penalty=0.3),
    ),
    "grammar": (
        "Once upon a time ",
        greedy(30, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
    ),
}

Answers = dict[str, list[tuple]]


class Signals:
    """Sends SIGINT to this process again and again, after random times.

    A signal becomes a ``KeyboardInterrupt`` where the main thread is inside the package. Elsewhere
    it would only cut the lines of a test that take note of an answer.

    Attributes:
        num_interrupts: of the package, so far.
    """

    def __init__(self, seed: int, most_seconds: float = 0.01):
        self.num_interrupts = 0
        self._rng, self._most_seconds = random.Random(seed), most_seconds
        self._is_over = threading.Event()

    @contextmanager
    def sent(self) -> Iterator[None]:
        self._is_over.clear()
        before = signal.signal(signal.SIGINT, self._handle)
        thread = threading.Thread(target=self._send, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()
            signal.signal(signal.SIGINT, before)

    def _send(self) -> None:
        while not self._is_over.wait(self._rng.random() * self._most_seconds):
            os.kill(os.getpid(), signal.SIGINT)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                self.num_interrupts += 1
                raise KeyboardInterrupt
            frame = frame.f_back


def answers_of(engine: Engine, rules: Mapping[str, TokenRules]) -> Answers:
    """The answers to ``REQUESTS``, which do not come at the same time, whatever interrupts them."""
    answers: Answers = {}
    deltas: dict[str, str] = {}

    def step() -> None:
        for output in _unless_interrupted(engine.step, default=()):
            if output.request_id == "shared":
                deltas["shared"] = deltas.get("shared", "") + output.outputs[0].text
            if output.finished:
                assert output.request_id not in answers, "an answer came twice"
                answers[output.request_id] = _answer(output, deltas.get(output.request_id))

    for request_id, (text, params) in REQUESTS.items():
        _add(engine, request_id, text, params, rules[request_id])
        step()
    for _ in range(MAX_STEPS):
        if not engine.has_unfinished_requests():
            return answers
        step()
    raise AssertionError("the engine spins")


def _unless_interrupted(call: Callable[[], Any], default: Any) -> Any:
    try:
        return call()
    except KeyboardInterrupt:
        return default


def _add(
    engine: Engine, request_id: str, text: str, params: SamplingParams, rules: TokenRules
) -> None:
    while True:
        try:
            engine.add_request(request_id, text, params, token_rules=rules)
            return
        except KeyboardInterrupt:
            continue
        except ValueError as error:
            # It was interrupted when it was all but done.
            assert "exists already" in str(error)
            return


def _answer(output: RequestOutput, delta_text: str | None) -> list[tuple]:
    if delta_text is not None:
        return [(delta_text, output.outputs[0].finish_reason)]
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


def tight_engine(demo: tuple[Any, Any], swap: bool, cache_dir: Path, drafts: int) -> Engine:
    """Too little room for all requests: they meet growth, preemption, swapping and chunks."""
    return make_engine(
        *demo,
        block_size=8,
        kv_cache_bytes="14blocks",
        swap_bytes="9blocks" if swap else 0,
        max_num_batched_tokens=32,
        max_num_seqs=5,
        num_draft_tokens=drafts,
        cache_dir=cache_dir,
    )


def check_interrupts(
    demo: tuple[Any, Any], count: int, seed: int, swap: bool = True, drafts: int = 2
) -> int:
    """Ask again and again until ``count`` signals have interrupted the package: all answers are
    those of an engine that nothing interrupts. Returns how often it asked.
    """
    with tempfile.TemporaryDirectory() as folder:
        quiet = tight_engine(demo, swap, Path(folder, "quiet"), drafts)
        # Compiling a grammar takes longer than the time between two signals.
        rules = {name: quiet.prepare(params) for name, (_, params) in REQUESTS.items()}
        expected = answers_of(quiet, rules)
        assert quiet.stats().num_preemptions > 0 and len(expected) == len(REQUESTS)
        quiet.close()
        signals, number = Signals(seed), 0
        engine = tight_engine(demo, swap, Path(folder, "disturbed"), drafts)
        while signals.num_interrupts < count:
            with signals.sent():
                answers = answers_of(engine, rules)
            assert answers == expected, f"after {signals.num_interrupts} interrupts"
            engine.thread.call(partial(check_scheduler, engine.scheduler))
            assert_nothing_held(engine)
            number += 1
        engine.close()
    return number


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000, help="interrupts (default: 2000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--recompute", action="store_true", help="preempted requests are never swapped"
    )
    parser.add_argument("--run-ahead", action="store_true", help="one step ahead, as on Metal")
    args = parser.parse_args()
    if args.run_ahead:
        PagedKVCache.can_run_ahead = True  # type: ignore[method-assign, assignment]
    begin = time.monotonic()
    rounds = check_interrupts(load_demo(), args.count, args.seed, not args.recompute)
    print(
        f"{args.count} signals in {rounds} rounds of {len(REQUESTS)} requests and "
        f"{time.monotonic() - begin:.0f} s: no request lost, no token changed"
    )


if __name__ == "__main__":
    main()
