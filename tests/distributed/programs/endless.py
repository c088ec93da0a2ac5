"""Answers without end; each rank says when it is in the middle. Arguments: what goes wrong, and on
which rank.
"""

import os
import sys
import time

from helpers.engine_runs import sampled
from helpers.rank_workloads import make_model

from mlx_paged.distributed import launched_ranks, links
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.model_runner import ModelRunner

NUM_STEPS = 6

fault, bad_rank = sys.argv[1], int(sys.argv[2])
is_bad = os.environ["MLX_RANK"] == str(bad_rank)
if fault in ("silence", "deaf"):
    links.SILENCE_SECONDS, links.PING_SECONDS = 2.0, 0.3
receive = links.Connection.recv_bytes


def receive_until_deaf(connection, *limit):
    data = receive(connection, *limit)
    if b"be deaf" in data:
        time.sleep(1000)
    return data


links.Connection.recv_bytes = receive_until_deaf
launch = ModelRunner.launch
num_launched = 0


def counted(self, batch, awaited):
    global num_launched
    num_launched += 1
    if num_launched == NUM_STEPS:
        print("in the middle", flush=True)
        if fault == "raises" and is_bad:
            raise MemoryError("no memory left")
        if fault == "leaves" and is_bad:
            os._exit(3)
    if fault == "other tokens" and is_bad and num_launched == NUM_STEPS:
        batch.scheduled[0].completion.num_computed_tokens -= 1
    return launch(self, batch, awaited)


ModelRunner.launch = counted
ranks = launched_ranks()
assert ranks is not None
model = make_model()
model.shard(ranks.group)
engine = Engine(model, kv_cache_bytes="2000blocks")


def answer():
    engine.add_request("a", [1, 2, 3], sampled(1, max_tokens=10_000))
    while engine.has_unfinished_requests():
        engine.step()


if fault == "deaf":
    print("in the middle", flush=True)
    if ranks.is_leader:
        ranks.send("call", "be deaf")
        ranks.send("call", "a" * 50_000_000)
    time.sleep(1000)
elif fault == "idle":
    print("in the middle", flush=True)
    if ranks.is_leader:
        time.sleep(60)
    else:
        engine.follow()
elif fault == "interrupted":
    try:
        engine.share(answer)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print(engine.share(lambda: [engine.abort_all(), "goes on"][1]), flush=True)
else:
    engine.share(answer)
