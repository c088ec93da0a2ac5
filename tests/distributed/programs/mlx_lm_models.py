"""Greedy tokens of mlx-lm's models, unmodified and split; each rank prints those of each."""

import json

from helpers import mlx_lm_models
from helpers.engine_runs import greedy
from helpers.mlx_lm_models import random_model

from mlx_paged.distributed import launched_ranks
from mlx_paged.engine.engine import Engine
from mlx_paged.loading.folder import LoadError
from mlx_paged.loading.split import split
from mlx_paged.models.mlx_lm import adapt

PROMPTS = [[(7 * number + place) % 200 for place in range(5 + 9 * number)] for number in range(3)]

ranks = launched_ranks()
assert ranks is not None


def answers(engine):
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, greedy(12))
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    return [outputs[name].outputs[0].token_ids for name in sorted(outputs)]


for name in ("LLAMA", "GPT_OSS", "DEEPSEEK_V3", "GEMMA3"):
    config = getattr(mlx_lm_models, name)
    model = random_model(config)
    try:
        split(model, config, ranks.group)
    except LoadError as error:
        told = str(error)
    else:
        adapted = adapt(model, config)
        adapted.group = ranks.group
        engine = Engine(
            adapted,
            kv_cache_bytes="30blocks",
            max_num_batched_tokens=16,
            max_num_seqs=8,
            max_num_mixed_tokens=16,
        )
        told = engine.share(lambda engine=engine: answers(engine))
    print(json.dumps({name: told}), flush=True)
