"""Why the prefix cache did not hold more of a prompt."""

from __future__ import annotations

import random

import pytest
from helpers.completions import new_completion
from helpers.engine_runs import lose_all_kv, tiny_models

from mlx_paged import Engine, SamplingParams
from mlx_paged.core import hash_token_blocks
from mlx_paged.engine.scheduling.prefix_cache import PrefixHistory, extra_hash_keys
from mlx_paged.request import Change, change_between

BLOCK = 8


def completion(name, prompt, answer=(), salt=None):
    found = new_completion(name, prompt, cache_salt=salt)
    found.token_ids += answer
    found.block_hashes = hash_token_blocks(found.token_ids, BLOCK, extra_hash_keys(salt))
    return found


def remember(history, name, prompt, answer=(), salt=None):
    history.admit(completion(name, prompt, salt=salt), 0)
    history.finish(completion(name, prompt, answer, salt))


def ask(history, prompt, num_cached=0, salt=None, name="new"):
    return history.admit(completion(name, prompt, salt=salt), num_cached)


A, B, C = list(range(100, 140)), list(range(200, 240)), list(range(300, 310))


def test_a_prompt_is_told_where_it_left_the_longest_sequence_of_the_same_beginning():
    history = PrefixHistory(1000, BLOCK)
    remember(history, "a", [*A, *B[:5]])
    remember(history, "b", [*A, *B[:20]])
    remember(history, "c", [*A, *C])
    report = ask(history, [*A, *B[:13], *range(7, 17)], num_cached=48)
    assert (report.reason, report.position, report.other_request_id) == ("changed", 53, "b")
    assert report.before == [*A, *B[:13]][-16:]
    assert (list(report.expected), list(report.found)) == (B[13:20], list(range(7, 17)))


@pytest.mark.parametrize(
    "prompt, num_cached, reason, position, other",
    [
        (C, 0, "new", 0, None),
        ([*A, *B, *C], 80, "continued", 82, "a"),  # the answer's two tokens are C's first
        ([*A, *B[:10]], 48, "hit", 48, None),
        ([*A, *B, *C], 16, "evicted", 16, "a"),
        ([*A, *B[:10]], 0, "evicted", 0, "a"),
        ([A[0], *C], 0, "changed", 1, "a"),
    ],
)
def test_every_reason_there_is(prompt, num_cached, reason, position, other):
    history = PrefixHistory(1000, BLOCK)
    remember(history, "a", [*A, *B], C[:2])
    report = ask(history, prompt, num_cached)
    assert (report.reason, report.position, report.other_request_id) == (reason, position, other)
    num_missed = len(prompt) - num_cached
    assert history.num_missed_tokens[reason] >= num_missed


def test_a_beginning_that_is_being_computed_is_pending():
    history = PrefixHistory(1000, BLOCK)
    ask(history, A, name="a")
    assert ask(history, [*A, *C]).reason == "pending"


def test_sequences_of_another_salt_are_never_compared():
    history = PrefixHistory(1000, BLOCK)
    remember(history, "a", A, salt="one")
    for salt in (None, "two"):
        report = ask(history, [*A, *C], salt=salt, name=f"of {salt}")
        assert (report.reason, report.other_request_id) == ("new", None)
    assert ask(history, [*A, *C], salt="one").reason == "evicted"


def test_the_oldest_sequences_are_forgotten_and_nothing_of_them_is_left():
    history = PrefixHistory(100, BLOCK)
    for number in range(20):
        remember(history, str(number), [*A, number], [number] * 5)
        assert history.num_tokens <= 100
    assert list(history._sequences) == [("18", 0), ("19", 0)]
    remember(history, "huge", list(range(101)))
    assert len(history._sequences) == 2
    for seq_id in list(history._sequences):
        history._forget(seq_id)
    assert (history._children, history.num_tokens) == ({}, 0)


def test_random_histories_agree_with_a_look_at_all_sequences():
    draws = random.Random(0)
    for _ in range(60):
        history = PrefixHistory(10**6, BLOCK)
        sequences = {}
        for number in range(30):
            base = draws.choice([[], *sequences.values()])
            cut = draws.randint(0, len(base))
            prompt = [*base[:cut], *(draws.randint(0, 2) for _ in range(draws.randint(1, 30)))]
            common = max((_common(prompt, other) for other in sequences.values()), default=0)
            num_usable = (len(prompt) - 1) // BLOCK * BLOCK
            num_known = min(common // BLOCK * BLOCK, num_usable)
            num_cached = draws.choice([num_known, draws.randint(0, num_known // BLOCK) * BLOCK])
            report = ask(history, prompt, num_cached, name=str(number))
            if num_cached == num_usable:
                assert report.reason == "hit"
            elif num_cached < num_known:
                assert (report.reason, report.position) == ("evicted", num_cached)
            else:
                ends = [len(other) for other in sequences.values() if other == prompt[: len(other)]]
                expected = "continued" if common in ends else "changed" if common else "new"
                assert (report.reason, report.position) in [
                    (expected, common), ("changed", common)
                ]  # fmt: skip
            answer = [draws.randint(0, 2) for _ in range(draws.randint(0, 12))]
            history.finish(completion(str(number), prompt, answer))
            sequences[number] = [*prompt, *answer]


def _common(left, right):
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))


@pytest.mark.parametrize(
    "expected, found, change",
    [
        ([1, 2, *A], [2, 1, *A], Change("reordered", 2, 2)),
        ([*A[:9], *B[:9], *C], [*B[:9], *A[:9], *C], Change("reordered", 18, 18)),
        (A, [7, 8, *A], Change("inserted", 0, 2)),
        ([7, 8, *A], A, Change("removed", 2, 0)),
        ([7, 8, *A], [9, *A], Change("replaced", 2, 1)),
        ([7, 5, 8, *A], [9, 5, 6, 3, *A], Change("replaced", 3, 4)),
        (A, B, Change("replaced", 40, 40)),
        (A, [], Change("removed", 40, 0)),
    ],
)
def test_how_two_sequences_differ(expected, found, change):
    assert change_between(expected, found) == change


@pytest.mark.parametrize("kv", ["paged", "basic"])
def test_an_engine_tells_each_request_why_no_more_of_its_prompt_was_cached(kv, run_ahead):
    engine = Engine(
        tiny_models()[0], kv=kv, kv_cache_bytes="24blocks", num_history_tokens=4096, seed=0
    )
    params = SamplingParams(max_tokens=4)
    vocabulary = 40
    first = [number % vocabulary for number in range(40)]

    def run(name, prompt):
        engine.add_request(name, prompt, params)
        outputs = [each for _ in range(40) for each in engine.step()]
        return outputs[-1]

    one = run("one", first)
    assert (one.prefix_report.reason, one.num_cached_tokens) == ("new", 0)
    again = run("again", first)
    assert (again.prefix_report.reason, again.num_cached_tokens) == ("hit", 32)
    longer = run("longer", [*first, *again.outputs[0].token_ids, *first])
    assert longer.prefix_report.reason == "continued"
    assert longer.prefix_report.position == 44
    changed = run("changed", [*first[:20], 1, 1, *first])
    assert changed.prefix_report.reason == "changed"
    assert changed.prefix_report.position == 20
    assert changed.num_cached_tokens == changed.prefix_report.num_cached_tokens == 16
    engine.reset_prefix_cache()
    assert run("lost", first).prefix_report.reason == "evicted"
    assert [report.request_id for report in engine.prefix_history.reports] == [
        "one", "again", "longer", "changed", "lost"
    ]  # fmt: skip


def test_nothing_is_remembered_unless_it_is_asked_for():
    engine = Engine(tiny_models()[0], kv_cache_bytes="24blocks")
    engine.add_request("a", list(range(30)), SamplingParams(max_tokens=2))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].prefix_report is None
    assert not engine.prefix_history.reports
    assert engine.prefix_history.num_tokens == 0


def test_a_request_that_is_computed_again_is_reported_once(run_ahead):
    engine = Engine(tiny_models()[0], kv_cache_bytes="24blocks", num_history_tokens=4096)
    engine.add_request("a", list(range(30)), SamplingParams(max_tokens=4))
    engine.step()
    lose_all_kv(engine)
    while engine.has_unfinished_requests():
        engine.step()
    assert len(engine.prefix_history.reports) == 1
