"""lm-eval's local-completions: log-probabilities cold, warm, and with eight requests at once."""

import os

from lab import V1
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

# K/V of a prompt that is computed in other chunks, or beside other prompts, differ in their last
# bits, by the order of additions.
TOLERANCE = 1e-4

facts = " ".join(f"The code of item {number} is {number * 7919 % 10000}." for number in range(40))
pairs = [
    (f"{facts} Question {number}: the code of item {number} is", f" {number * 7919 % 10000}.")
    for number in range(24)
]


def log_probabilities(num_concurrent: int) -> list[float]:
    model = LocalCompletionsAPI(
        model="demo",
        base_url=f"{V1}/completions",
        tokenizer_backend="huggingface",
        tokenizer=os.environ["LAB_DEMO"],
        num_concurrent=num_concurrent,
        max_length=4096,
        batch_size=1,
    )
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=index)
        for index, pair in enumerate(pairs)
    ]
    return [value for value, _ in model.loglikelihood(requests, disable_tqdm=True)]


cold, warm, at_once = (log_probabilities(number) for number in (1, 1, 8))
assert len(set(cold)) > 20 and max(cold) < 0, cold
for name, found in (("warm", warm), ("eight at once", at_once)):
    most = max(abs(one - other) for one, other in zip(cold, found, strict=True))
    print(f"lab: {name}: at most {most:.1e} from cold, of sums of {min(cold):.0f}")
    assert most < TOLERANCE, most
