"""The queue limit, with an engine that is two numbers and a clock that stands."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from mlx_paged.engine.stats import SequenceCounts
from mlx_paged.server.errors import ApiError
from mlx_paged.server.http.limits import QueueLimit


class Engine:
    """An engine that says how many run and wait, how many of these have no token yet, and what the
    time is.
    """

    def __init__(self) -> None:
        self.counts = (0, 0, 0)
        self.seconds = 100.0

    def admission(self, max_queue_len: int, max_num_seqs: int) -> QueueLimit:
        def counts() -> SequenceCounts:
            num_running, num_waiting, num_new = self.counts
            begun = {None: num_running + num_waiting - num_new}
            return SequenceCounts(num_running, num_waiting, begun)

        return QueueLimit(max_queue_len, max_num_seqs, counts, lambda: self.seconds)


def refusal(admission: QueueLimit, num_seqs: int = 1) -> ApiError:
    with pytest.raises(ApiError) as raised, admission.admit(num_seqs):
        pass
    return raised.value


def test_places_and_the_queue_are_filled_before_the_engine_has_seen_anything():
    admission = Engine().admission(max_queue_len=2, max_num_seqs=4)
    with ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(admission.admit())
        error = refusal(admission)
        assert (error.status, error.code, str(error)) == (
            503,
            "queue_full",
            "2 sequences are waiting already, and at most 2 may wait; retry later",
        )
        assert admission.num_pending == 6
    assert admission.num_pending == 0
    with admission.admit():
        assert admission.num_pending == 1


def test_it_is_the_same_when_the_engine_has_seen_some_or_all():
    engine = Engine()
    admission = engine.admission(max_queue_len=2, max_num_seqs=4)
    with ExitStack() as stack:
        for counts in [(0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 0, 3), (4, 0, 4), (4, 1, 5)]:
            engine.counts = counts
            stack.enter_context(admission.admit())
        for engine.counts in [(4, 0, 4), (4, 1, 5), (4, 2, 6)]:
            assert refusal(admission).message.startswith("2 sequences are waiting already")


def test_what_has_begun_is_the_engines_to_count():
    engine = Engine()
    admission = engine.admission(max_queue_len=0, max_num_seqs=2)
    engine.counts = (1, 0, 0)
    with admission.admit():
        pass
    engine.counts = (2, 0, 0)
    assert refusal(admission).status == 503
    engine.counts = (1, 0, 0)  # it ended; whether its client has read that does not matter
    with admission.admit():
        pass


def test_no_more_may_wait_beside_those_that_have_begun():
    """While a step runs, the engine sees nothing of what comes."""
    engine = Engine()
    admission = engine.admission(max_queue_len=3, max_num_seqs=4)
    engine.counts = (4, 0, 0)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(admission.admit())
        assert refusal(admission).message.startswith("3 sequences are waiting already")
        engine.counts = (4, 3, 3)
        assert refusal(admission).message.startswith("3 sequences are waiting already")
        engine.counts = (4, 2, 3)  # one has begun to be computed
        stack.enter_context(admission.admit())
        assert refusal(admission).message.startswith("3 sequences are waiting already")


def test_what_waits_for_memory_fills_the_queue_though_there_are_places():
    engine = Engine()
    admission = engine.admission(max_queue_len=2, max_num_seqs=64)
    engine.counts = (5, 1, 0)
    with admission.admit():
        engine.counts = (5, 2, 1)
        error = refusal(admission)
        assert str(error).startswith("2 sequences are waiting already, and at most 2 may wait")


def test_a_request_of_many_sequences_needs_as_many_places_unless_nobody_is_there():
    engine = Engine()
    admission = engine.admission(max_queue_len=0, max_num_seqs=4)
    with admission.admit(8):
        assert refusal(admission).message.startswith(
            "4 sequences are waiting already, and at most 0 may wait"
        )
    engine.counts = (3, 0, 0)
    assert refusal(admission, 2).status == 503
    with admission.admit(1):
        pass


def test_places_are_given_back_by_what_fails():
    admission = Engine().admission(max_queue_len=0, max_num_seqs=1)
    with pytest.raises(KeyError), admission.admit():
        raise KeyError
    assert admission.num_pending == 0


def test_retry_after_is_how_long_the_queue_lasts_at_the_rate_of_the_last_minute():
    engine = Engine()
    admission = engine.admission(max_queue_len=8, max_num_seqs=2)
    assert admission.retry_after(5) == 60  # nothing began yet
    engine.seconds += 600
    for _ in range(30):
        with admission.admit():
            pass
    # 30 in a minute are one in two seconds.
    assert [admission.retry_after(n) for n in (0, 1, 5, 1000)] == [1, 2, 10, 60]
    engine.counts = (2, 8, 0)
    assert refusal(admission).headers == {"Retry-After": "16"}
    engine.seconds += 61
    assert admission.retry_after(1) == 60


def test_a_server_that_just_began_takes_its_rate_from_that_time():
    engine = Engine()
    admission = engine.admission(max_queue_len=8, max_num_seqs=2)
    engine.seconds += 6
    with admission.admit(3):
        pass
    assert admission.retry_after(5) == 10


def test_a_user_with_less_than_an_equal_share_is_admitted_though_others_fill_the_queue():
    admission = QueueLimit(20, 64, lambda: SequenceCounts(64, 0, {"ann": 64}))
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(admission.admit(1, "ann"))
        for _ in range(42):  # Half of 84.
            stack.enter_context(admission.admit(1, "bob"))
        for user in ("ann", "bob"):
            with pytest.raises(ApiError, match="62 sequences are waiting already"):
                stack.enter_context(admission.admit(1, user))
        # Of one who has nothing there, any number.
        stack.enter_context(admission.admit(64, "cid"))
        assert admission.num_pending == 126
    assert admission.num_pending == 0


def test_the_sequences_of_a_user_that_the_engine_has_are_not_counted_twice():
    counts = [SequenceCounts(2, 0, {"ann": 2})]
    admission = QueueLimit(2, 2, lambda: counts[0])
    with admission.admit(1, "ann"), admission.admit(1, "bob"):
        counts[0] = SequenceCounts(2, 1, {"ann": 2})  # The third one is Bob's.
        # Two of four places are half.
        with admission.admit(1, "bob"):
            for user in ("ann", "bob"):
                with pytest.raises(ApiError), admission.admit(1, user):
                    pass
