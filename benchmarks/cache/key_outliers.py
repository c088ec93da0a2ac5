"""What formats of K/V cost a model whose keys have a bias, and whether a short prompt shows it.

    python -m benchmarks key_outliers

A random llama (head_dim 128, four layers, float32), with a bias on one of 32 channels of K, of 0,
20 and 50 times the spread of the rest. Divergences are those of its predictions from the same with
dense K/V, of 512 random tokens, and of 64 that the model writes. Beside them stands the
demo model, whose keys have no such bias, with 512 and 64 tokens that it writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from paged_testing.biased_keys import CONFIG, llama_with_biased_keys

from benchmarks.lib.card import machine_card, make_arg_parser, print_card, print_json, print_table
from mlx_paged import demo_model_path, load
from mlx_paged.models.kv_cache import stored_as
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm import check_model
from mlx_paged.models.mlx_lm.trial import probe_ids, probe_sequences
from mlx_paged.models.run_step import run_step
from mlx_paged.options.config import KVBits

BIASES = (0, 20, 50)
FORMATS = ("K8V8", "K8V4", "K4V4")
# Of the short text.
NUM_TOKENS = 64


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


def own_text(model: LanguageModel, num_tokens: int) -> tuple[list[int], mx.array]:
    """Tokens that the model samples with fixed seeds, and its log-probabilities after each of them,
    ``[num_tokens, vocab_size]`` float32, with unquantised K/V.
    """
    sequences, ids = probe_sequences(model, num_tokens), probe_ids(model.args.vocab_size, 1)
    rows: list[mx.array] = []
    for index in range(num_tokens):
        rows.append(_log_softmax(run_step(model, sequences, {"a": ids[-1:]}, [1])))
        drawn: int = mx.random.categorical(rows[-1][0], key=mx.random.key(index)).item()  # type: ignore[assignment]
        ids.append(drawn)
    return ids[:-1], mx.concatenate(rows)


def log_probabilities(model: LanguageModel, bits: KVBits | None, ids: Sequence[int]) -> mx.array:
    """Log-probabilities after each token of a prompt, with K/V in these bits,
    ``[num_tokens, vocab_size]`` float32.
    """
    sequences = probe_sequences(model, len(ids), stored_as(bits, model.layer_specs))
    return _log_softmax(run_step(model, sequences, {"a": ids}, [len(ids)]))


def _log_softmax(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    normalised: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return normalised


def divergence(exact: mx.array, found: mx.array) -> float:
    """The Kullback-Leibler divergence of two results of :func:`log_probabilities`, in nats per
    token.
    """
    per_token = mx.where(exact > -mx.inf, mx.exp(exact) * (exact - found), 0).sum(-1)
    mean: float = per_token.mean().item()  # type: ignore[assignment]
    return mean


if __name__ == "__main__":
    main()
