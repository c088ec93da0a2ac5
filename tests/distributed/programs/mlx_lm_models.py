"""Greedy tokens of mlx-lm's models, unmodified and split; each rank prints those of each.

Without arguments, all that have a way to be split.
"""

import json
import sys

import mlx.core as mx
from helpers.model_zoo.answers import PROMPTS, answers_of
from helpers.model_zoo.configs import ARCHITECTURES, config_of
from helpers.model_zoo.models import make

from mlx_paged.distributed import launched_ranks
from mlx_paged.engine.engine import Engine
from mlx_paged.loading.folder import LoadError
from mlx_paged.loading.split import split
from mlx_paged.models.mlx_lm import UnsuitableModelError, adapt


def answers_or_refusal(name):
    mx.random.seed(0)  # of weights that the zoo leaves as the model makes them
    config, model = config_of(name), make(name)
    try:
        if ranks is not None:
            split(model, config, ranks.group)
        adapted = adapt(model, config)
    except (LoadError, UnsuitableModelError) as error:
        return str(error)
    adapted.group = None if ranks is None else ranks.group
    engine = Engine(
        adapted, kv_cache_bytes="64M", block_size=8, max_num_seqs=4, max_num_batched_tokens=7
    )
    return engine.share(lambda: answers_of(engine, PROMPTS).tokens)


ranks = launched_ranks()
for name in sys.argv[1:] or ARCHITECTURES:
    if sys.argv[1:] or callable(getattr(make(name), "shard", None)):
        print(json.dumps({name: answers_or_refusal(name)}), flush=True)
