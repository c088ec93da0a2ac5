"""What is asked of the engine is checked before it is queued; a fork is a completion of its own."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest

from mlx_paged.engine.request import Completion, CompletionStatus, Request
from mlx_paged.errors import ArgumentError
from mlx_paged.options.sampling_params import MAX_LOGPROBS, SamplingParams
from mlx_paged.request import NO_DRAFTS, CompletionOutput, RequestOutput, SpecDecodingStats

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [0, -1, 1.0, True, "1", None]),
        ("temperature", [-0.1, NAN, INF, "0", None, True, 10**400]),
        ("top_p", [-1e-9, -0.1, 1.1, NAN, "1", None]),
        ("top_k", [-2, 1.5, True, None]),
        ("min_p", [-0.1, 1.1, NAN, None]),
        ("seed", [1.5, "1", True]),
        ("repetition_penalty", [0, -1.0, NAN, INF, None]),
        ("presence_penalty", [NAN, INF, "1", None]),
        ("frequency_penalty", [NAN, -INF, "1", None]),
        (
            "logit_bias",
            [
                {"1": 1.0},
                {-1: 1.0},
                {1.5: 1.0},
                {True: 1.0},
                {1: NAN},
                {1: "1"},
                {1: None},
                {1: INF},
                {1: True},
                5,
                [1],
            ],
        ),
        ("stop", ["", [""], ["end", ""], [1], ["end", None], b"end", 5]),
        ("stop_token_ids", [[1.0], ["1"], [None], [True], "12", [-1], 5, [[]], [[1, -1]], [[[1]]]]),
        ("max_tokens", [0, -2, 1.0, True, "1"]),
        ("min_tokens", [-1, 1.0, True, None, 257]),
        ("logprobs", [-1, MAX_LOGPROBS + 1, 1.0, True]),
        ("prompt_logprobs", [-1, MAX_LOGPROBS + 1, 1.0, True]),
        ("allowed_token_ids", [[], [1.0], ["1"], [True], [-1], 5, "12"]),
        ("bad_words", ["", [""], ["end", ""], [1], ["end", None], b"end", 5]),
        ("xtc_probability", [-0.1, 1.1, NAN, None, True]),
        ("xtc_threshold", [-0.1, 0.6, NAN, None, True]),
        ("xtc_special_tokens", [[1.0], ["1"], [-1], 5]),
        ("detokenize", [0, 1, None, "no"]),
        ("skip_special_tokens", [0, 1, None]),
        ("include_stop_str_in_output", [0, 1, None]),
        ("logits_processors", [[None], ["name"], [len, 1], len]),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_that_names_it(name: str, values: list):
    for value in values:
        with pytest.raises(
            ValueError, match=rf"^\[sampling_params\] {name} must be .+, got .+"
        ) as caught:
            SamplingParams(**{name: value})
        assert "\n" not in str(caught.value)


def test_the_message_says_what_is_right_and_what_was_given():
    with pytest.raises(ValueError) as caught:
        SamplingParams(stop=["end", ""])
    assert str(caught.value) == "[sampling_params] stop must be texts that are not empty, got ''"
    with pytest.raises(ValueError) as caught:
        SamplingParams(logit_bias={3: 1.0, 5: NAN})
    assert (
        str(caught.value)
        == "[sampling_params] logit_bias must be a mapping of token ids to numbers, or -inf, "
        "got {5: nan}"
    )


def test_values_at_the_ends_of_their_ranges_are_taken():
    for values in (
        {"top_p": 0, "min_p": 0, "top_k": 0, "temperature": 0, "logprobs": 0, "max_tokens": -1},
        {"top_p": 1, "min_p": 1, "n": 1, "logprobs": MAX_LOGPROBS, "max_tokens": 1, "seed": 0},
        {
            "presence_penalty": -2,
            "frequency_penalty": -2.0,
            "repetition_penalty": 0.1,
            "logit_bias": {0: -INF},
        },
    ):
        params = SamplingParams(**values)
        assert {name: getattr(params, name) for name in values} == values


def test_what_can_not_be_together_is_refused_by_name():
    with pytest.raises(ArgumentError) as caught:
        SamplingParams(max_tokens=5, min_tokens=6)
    assert str(caught.value) == ("[sampling_params] min_tokens must be at most max_tokens=5, got 6")
    assert caught.value.argument == "min_tokens"
    for max_tokens in (None, -1):
        assert SamplingParams(max_tokens=max_tokens, min_tokens=10**6).min_tokens == 10**6
    with pytest.raises(ArgumentError, match=r"stop is looked for in the text, .*stop_token_ids"):
        SamplingParams(stop="end", detokenize=False)


def test_stop_sequences_are_the_entries_with_several_tokens_the_longest_first():
    params = SamplingParams(stop_token_ids=[3, [4, 5], (6,), np.int64(7), [8, 9, np.int64(10)]])
    assert params.stop_token_ids == (3, (4, 5), 6, 7, (8, 9, 10))
    assert params.stop_sequences == ((8, 9, 10), (4, 5))
    assert SamplingParams().stop_sequences == ()


def test_a_clone_is_equal_and_shares_nothing_that_could_change():
    params = SamplingParams(logit_bias={3: 1.0}, stop=["a"], sampler=len, max_tokens=None)
    clone = params.clone()
    assert clone == params and clone is not params
    assert clone.logit_bias is not params.logit_bias and clone.sampler is len
    changed = params.clone(max_tokens=5, temperature=1)
    assert (changed.max_tokens, changed.temperature, changed.stop) == (5, 1, ("a",))
    with pytest.raises(ArgumentError, match="top_p"):
        params.clone(top_p=3)
    with pytest.raises(TypeError, match="use max_tokens"):
        params.clone(max_new_tokens=3)


def test_one_text_is_one_stop_text_and_lists_become_tuples():
    def processor(tokens, logits):
        return logits

    params = SamplingParams(
        stop="end", stop_token_ids=[5, 6], logits_processors=[processor], logit_bias={7: -INF, 8: 1}
    )
    assert (params.stop, params.stop_token_ids) == (("end",), (5, 6))
    assert (params.logits_processors, params.logit_bias) == ((processor,), {7: -INF, 8: 1})
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_none_and_empty_stand_for_the_default():
    given_none = SamplingParams(
        stop=None,
        stop_token_ids=None,
        logits_processors=None,
        logit_bias=None,
        bad_words=None,
        xtc_special_tokens=None,
    )
    assert given_none == SamplingParams(
        stop=[], stop_token_ids=[], logits_processors=[], logit_bias={}
    )
    assert given_none == SamplingParams()
    assert (given_none.stop, given_none.logit_bias) == ((), {})


def test_sampling_params_do_not_change_with_what_they_were_made_from():
    stop, stop_token_ids, logit_bias = ["a"], [1], {2: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=stop_token_ids, logit_bias=logit_bias)
    stop.append("b")
    stop_token_ids.append(9)
    logit_bias[9] = 9.0
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (1,), {2: 1.0})


def test_sampling_params_are_frozen():
    params = SamplingParams()
    for name in (field.name for field in dataclasses.fields(params)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(params, name, getattr(params, name))


def test_replaced_values_are_checked_as_well():
    params = dataclasses.replace(SamplingParams(stop="end", max_tokens=5), temperature=0.5)
    assert params == SamplingParams(stop=("end",), max_tokens=5, temperature=0.5)
    with pytest.raises(ValueError, match="temperature"):
        dataclasses.replace(params, temperature=-1)


def test_temperature_0_is_greedy_whatever_else_is_set():
    assert SamplingParams().is_greedy
    assert SamplingParams(temperature=0, top_p=0.5, seed=1).is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy


def test_a_new_request_has_one_completion_that_waits_and_has_nothing_computed():
    prompt = [1, 2, 3]
    request = Request("a", prompt, SamplingParams(n=2))
    prompt.append(4)
    (completion,) = request.completions
    assert (completion.seq_id, completion.token_ids, completion.num_prompt_tokens) == (
        ("a", 0),
        [1, 2, 3],
        3,
    )
    assert (completion.num_tokens, completion.output_token_ids, completion.num_seqs) == (3, [], 2)
    assert completion.num_output_tokens == completion.num_computed_tokens == 0
    assert request.num_cached_tokens == completion.num_preemptions == 0
    assert (completion.status, completion.is_finished, completion.finish_reason) == (
        CompletionStatus.WAITING,
        False,
        None,
    )
    assert repr(completion) == "Completion('a', 0, waiting, 0 of 3 tokens computed)"
    assert request.output == RequestOutput(
        "a", None, [1, 2, 3], [CompletionOutput(0), CompletionOutput(1)]
    )


def test_what_follows_the_prompt_is_output():
    (completion,) = Request("a", [1, 2, 3], SamplingParams()).completions
    completion.token_ids += [7, 8]
    assert (completion.num_tokens, completion.num_output_tokens, completion.output_token_ids) == (
        5,
        2,
        [7, 8],
    )
    assert completion.num_prompt_tokens == 3


@pytest.mark.parametrize("status", CompletionStatus)
def test_only_a_finished_completion_is_finished(status: CompletionStatus):
    (completion,) = Request("a", [1], SamplingParams()).completions
    completion.status = status
    assert completion.is_finished == (status is CompletionStatus.FINISHED)


def state(completion: Completion) -> dict:
    return {name: getattr(completion, name) for name in Completion.__slots__}


def test_a_fork_is_as_far_as_its_parent_under_a_name_of_its_own():
    request = Request("a", [1, 2, 3], SamplingParams(n=3, seed=5), seed=5)
    (parent,) = request.completions
    parent.token_ids.append(4)
    parent.order = (2, 7, 0)
    parent.num_computed_tokens = 3
    parent.block_hashes.append(b"hash")
    parent.status = CompletionStatus.RUNNING
    parent.num_preemptions = 4
    parent.sampling_state = object()
    child = parent.fork(2)
    own = {
        "index": 2,
        "seq_id": ("a", 2),
        "order": (2, 7, 2),
        "num_preemptions": 0,
        "sampling_state": None,
        "output": request.output.outputs[2],
    }
    assert state(child) == state(parent) | own and child.output is not parent.output
    assert child.output_token_ids == [4] and child.request is request


def test_a_fork_and_its_parent_go_on_apart():
    (parent,) = Request("a", [1, 2, 3], SamplingParams(n=2)).completions
    parent.block_hashes.append(b"hash")
    child = parent.fork(1)
    before = {
        name: list(value) if isinstance(value, list) else value
        for name, value in state(parent).items()
    }
    child.token_ids.append(9)
    child.block_hashes.append(b"other")
    child.num_computed_tokens = 3
    child.status = CompletionStatus.FINISHED
    assert state(parent) == before


def test_a_completion_has_the_attributes_that_it_lists_and_no_others():
    (completion,) = Request("a", [1], SamplingParams()).completions
    assert set(state(completion)) == set(Completion.__slots__)
    with pytest.raises(AttributeError):
        completion.num_computed_token = 1
    with pytest.raises(AttributeError):
        completion.request.num_cached_token = 1


def test_a_request_that_ends_before_it_is_forked_ends_all_of_its_completions():
    request = Request("a", [1, 2, 3], SamplingParams(n=3))
    (completion,) = request.completions
    completion.status, completion.finish_reason = CompletionStatus.FINISHED, "abort"
    completion.end_output()
    assert [each.is_finished for each in request.completions] == [True] * 3
    assert [each.finish_reason for each in request.output.outputs] == ["abort"] * 3
    assert request.output.finished


def test_a_completion_is_finished_when_it_has_a_reason():
    assert not CompletionOutput(0).finished
    assert all(
        CompletionOutput(0, finish_reason=reason).finished
        for reason in ("stop", "length", "abort", "error")
    )


def test_outputs_share_no_lists():
    first, second = CompletionOutput(0), CompletionOutput(1)
    first.token_ids.append(1)
    assert second.token_ids == []
    assert not RequestOutput("a", None, [1], [first, second]).finished


def test_drafts_are_counted_by_position():
    steps = [(3, 3), (3, 1), (1, 0), (3, 2), (0, 0)]
    counted = sum((SpecDecodingStats.of_step(*step) for step in steps), NO_DRAFTS)
    assert counted == SpecDecodingStats((4, 3, 3), (3, 2, 1))
    assert (counted.num_drafts, counted.num_draft_tokens, counted.num_accepted_tokens) == (4, 10, 6)
    assert counted.acceptance_rate_per_pos == [3 / 4, 2 / 3, 1 / 3]
    assert (counted.acceptance_rate, counted.mean_acceptance_length) == (0.6, 1 + 6 / 4)
    assert (NO_DRAFTS.acceptance_rate, NO_DRAFTS.acceptance_rate_per_pos) == (0, [])
    assert NO_DRAFTS.mean_acceptance_length == 1


def test_finished_is_an_attribute_and_a_method_of_outputs_and_completions():
    completion = CompletionOutput(0)
    output = RequestOutput("a", None, [1], [completion])
    for is_finished in (False, True):
        output.finished = is_finished
        completion.finish_reason = "stop" if is_finished else None
        for finished in (output.finished, completion.finished):
            assert bool(finished) is finished() is is_finished and finished == is_finished
            assert (repr(finished), str(finished)) == (str(is_finished), str(is_finished))
    done = RequestOutput("a", None, [1], [completion], finished=True)
    assert done == output == dataclasses.replace(output) == copy.deepcopy(output)
    assert pickle.loads(pickle.dumps(output)).finished()
    assert dataclasses.asdict(output)["finished"] == True  # noqa: E712
    assert "finished=True" in repr(output)


def test_a_fork_has_nothing_of_the_prompt_to_score():
    (completion,) = Request("a", [1, 2, 3], SamplingParams(n=2, prompt_logprobs=0)).completions
    assert completion.num_unscored_tokens == 2
    assert completion.fork(1).num_unscored_tokens == 0
