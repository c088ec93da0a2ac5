"""Fuzz the inputs of the package: ``python tests/fuzz/fuzz_inputs.py --count 2000 --seed 0``.

Each input must succeed or be refused in one clear line; no traceback, no hang, nothing left behind,
and the tokens of good requests beside bad ones unchanged. Prints how the cases ended and every
defect; the exit status is 1 if there is one. ``--only library --index 17`` runs one case again.
"""

from __future__ import annotations

import argparse
import faulthandler
import resource
import sys
import time

from fuzz_families import DEADLINES, FAMILIES, SHARES
from fuzzing import Report, run_family

# A case that asks for all of the machine's memory is to fail, not to take the machine along.
MEMORY_LIMIT = 12 * 2**30


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--count", type=int, default=2000, help="cases, over all families (default: 2000)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="another seed is other cases (default: 0)"
    )
    parser.add_argument(
        "--only", choices=sorted(FAMILIES), help="one family, with all of the cases"
    )
    parser.add_argument("--index", type=int, help="one case of --only")
    args = parser.parse_args(argv)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    total = Report()
    for name in [args.only] if args.only else FAMILIES:
        count = args.count if args.only else round(args.count * SHARES[name])
        indices = range(count) if args.index is None else range(args.index, args.index + 1)
        start = time.perf_counter()
        # The last resort, for what hangs outside of Python.
        faulthandler.dump_traceback_later(60 + len(indices) * 5, exit=True)
        report = run_family(name, FAMILIES[name], indices, args.seed, DEADLINES[name])
        faulthandler.cancel_dump_traceback_later()
        total.ends += report.ends
        total.defects += report.defects
        print(f"{name}: {len(indices)} cases in {time.perf_counter() - start:.1f} s", flush=True)
    for end, count in sorted(total.ends.items()):
        print(f"  {end}: {count}")
    for defect in total.defects:
        print(defect)
    print(f"{total.ends.total()} cases, {len(total.defects)} defects")
    return 1 if total.defects else 0


if __name__ == "__main__":
    sys.exit(main())
