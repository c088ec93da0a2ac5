"""A user alone is served as if there were no users: the plans are those of the version before."""

from __future__ import annotations

import pytest
from helpers.fast_lane import mostly_slow
from helpers.planned_steps import WORKLOADS, Planner

# Digests of the plans, made with `python -m helpers.planned_steps` before there were users.
RECORDED = {
    "a small pool": "6beeffa02a822e1db922ca7ef3604dd0",
    "a small pool and a swap space": "b30100767b4e1211322170a27c4bb910",
    "steps ahead": "23e1105b9a56520445a21944852be908",
    "steps ahead, few places": "9315a6c892631eb51408f92f58998265",
    "steps of few tokens": "393a93a207716eab65848dbe83699a0f",
    "a watermark, and growth": "b19b4cec36e11830c94c7052b4492533",
    "drafts": "cb784431a9a102cc6c17edeb69663350",
    "no prefix cache": "ec2343b160d599e527e7bfb564a73d1d",
    "all fit": "e4643532f818aba054824a6919eaca69",
}


@mostly_slow("name", RECORDED, quick=(1, 2, 6))
@pytest.mark.parametrize("users", [None, [None], ["ann"]], ids=["none", "None", "one"])
def test_one_user_alone_sees_the_plans_and_the_order_of_the_version_before(
    name: str, users: list[str | None] | None
):
    planner = Planner(0, users, **WORKLOADS[name])
    assert planner.run() == RECORDED[name]
    if name not in ("all fit", "steps ahead, few places"):
        assert planner.scheduler.num_preemptions > 20


def test_with_several_users_the_plans_are_others_and_all_requests_end():
    planner = Planner(0, ["ann", "bob"], **WORKLOADS["a small pool and a swap space"])
    assert planner.run() != RECORDED["a small pool and a swap space"]


@mostly_slow("name", [name for name in WORKLOADS if "ahead" in name], quick=(0, 1))
def test_steps_ahead_end_all_requests_of_several_users(name: str):
    planner = Planner(1, ["ann", "ann", "bob", None], **WORKLOADS[name])
    planner.run()
    assert planner.scheduler.num_preemptions > 10
