"""Runs the workloads that its arguments name; each rank prints what became of each."""

import json
import sys
import warnings

from helpers.rank_workloads import WORKLOADS, run_workload

warnings.filterwarnings("ignore", ".*no memory for more than 64 blocks")
for name in sys.argv[1:]:
    print(json.dumps({name: run_workload(WORKLOADS[name])}), flush=True)
