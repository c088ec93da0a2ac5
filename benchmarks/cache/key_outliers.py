"""What formats of K/V cost a model whose keys have a bias, and whether a short prompt shows it.

    python -m benchmarks key_outliers

A random llama (head_dim 128, four layers, float32), with a bias on one of 32 channels of K, of 0,
20 and 50 times the spread of the rest. Divergences are those of its predictions from the same with
dense K/V, of 512 random tokens, and of the 64 that the model writes as a cache is made. Beside them
stands the demo model, whose keys have no such bias, with 512 and 64 tokens that it writes.
"""

from __future__ import annotations

import numpy as np
from paged_testing.biased_keys import CONFIG, llama_with_biased_keys

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from mlx_paged import demo_model_path, load
from mlx_paged.config import KVBits
from mlx_paged.models.kv_format import NUM_TOKENS, divergence, log_probabilities, own_text
from mlx_paged.models.language_model import check_model

BIASES = (0, 20, 50)
FORMATS = ("K8V8", "K8V4", "K4V4")


def main() -> None:
    parser = make_arg_parser(__doc__)
    args = parser.parse_args()
    setting = machine_card() | {"model": CONFIG, "num_tokens": 512, "num_probed": NUM_TOKENS}
    print_card("K/V formats and a bias of K", setting)
    models = {f"{bias} x": llama_with_biased_keys(bias) for bias in BIASES}
    demo, _ = load(demo_model_path())
    results: dict[str, dict[str, float]] = {}
    for bias, model in {**models, "demo model": check_model(demo)}.items():
        texts = {str(number): own_text(model, number) for number in (512, NUM_TOKENS)}
        if bias in models:  # What a random model writes is random, too.
            ids = np.random.default_rng(1).integers(0, model.args.vocab_size, 512).tolist()
            texts["512"] = ids, log_probabilities(model, None, ids)
        for length, (ids, exact) in texts.items():
            for name in FORMATS:
                found = log_probabilities(model, KVBits.parse(name), ids)
                results.setdefault(bias, {})[f"{name}, {length}"] = divergence(exact, found)
    columns = ["bias of K", *results["0 x"]]
    rows = [[name, *(f"{each:.2g}" for each in found.values())] for name, found in results.items()]
    print_table(columns, rows)
    print_json("key_outliers", setting, results, args.out)


if __name__ == "__main__":
    main()
