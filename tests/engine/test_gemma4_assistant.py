"""Gemma 4's assistants, which attend to the K/V of the model that they draft for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers.drafting import eager_drafts
from helpers.engine_runs import answer, greedy, make_engine, prompt
from helpers.model_zoo import config_of, make, make_from_config
from helpers.workloads import Workload, assert_all_same_but_aborts
from mlx.nn import Module
from mlx.utils import tree_flatten
from paged_testing.pure_metal import pure_metal

from mlx_paged.engine.request import Completion
from mlx_paged.engine.speculation import draft_model
from mlx_paged.engine.speculation.step_costs import nbytes_read
from mlx_paged.errors import ArgumentError, UnsuitableModelError
from mlx_paged.models.language_model import LanguageModel
from mlx_paged.models.mlx_lm import check_model, gemma4_assistant
from mlx_paged.models.mlx_lm.draft_head import text_model
from mlx_paged.models.mlx_lm.gemma4_assistant import Assistant

FULL, SLIDING = "full_attention", "sliding_attention"
CONFIG: dict[str, Any] = {
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 64,
    "text_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "layer_types": [SLIDING, SLIDING, FULL],
    },
}
WITH_CENTROIDS = {
    "use_ordered_embeddings": True,
    "num_centroids": 16,
    "centroid_intermediate_top_k": 4,
}
# Of the small model, whose last two layers share the K/V of others.
READ_LAYERS = {SLIDING: 2, FULL: 3}
WINDOW = 8


@cache
def pair(has_centroids: bool = False, head_dim: int = 16) -> tuple[LanguageModel, Assistant]:
    """A small model and an assistant for it, both with random weights."""
    heads = {"head_dim": head_dim, "global_head_dim": 2 * head_dim}
    model = check_model(make_from_config(config_of("gemma4_text") | heads))
    mx.random.seed(7)
    config = CONFIG | {"text_config": CONFIG["text_config"] | heads}
    assistant = Assistant(model, config | (WITH_CENTROIDS if has_centroids else {}))
    weights = [
        (name, each + 0.2 * mx.random.normal(each.shape))
        for name, each in tree_flatten(assistant.parameters())
        if each.dtype == mx.float32
    ]
    if has_centroids:
        order = mx.random.permutation(256).astype(mx.int32)
        weights.append(("masked_embedding.token_ordering", order))
    assistant.load_weights(weights)
    mx.eval(assistant.parameters())
    return model, assistant


class Rounds:
    """The tokens before each round, and the logits and the token of each of its drafts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seen: list[tuple[list[int], list[tuple[np.ndarray, int]]]] = []
        running: dict[int, list[tuple[np.ndarray, int]]] = {}
        draw = draft_model.draw_drafts

        def recording(
            logits: mx.array, completions: Sequence[Completion], number: int, *readers: Any
        ) -> mx.array:
            drafts = draw(logits, completions, number, *readers)
            for row, token, each in zip(
                np.array(logits), drafts.tolist(), completions, strict=True
            ):
                if number == 0:
                    running[id(each)] = []
                    self.seen.append((list(each.token_ids), running[id(each)]))
                running[id(each)].append((row, token))
            return drafts

        monkeypatch.setattr(draft_model, "draw_drafts", recording)

    def with_expected(
        self, model: LanguageModel, assistant: Assistant
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The logits of the drafts of every third round, and what they should be."""
        for token_ids, drafts in self.seen[::3]:
            expected = of_whole_text(model, assistant, token_ids, [token for _, token in drafts])
            yield from zip([logits for logits, _ in drafts], expected, strict=True)


class Recording(Module):
    """Attention that keeps the K/V of its last call."""

    def __init__(self, attention: Module):
        super().__init__()
        self.attention = attention

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results = self.attention(*args, **kwargs)
        self.kept = results[1]
        return results


def of_whole_text(
    model: LanguageModel, assistant: Assistant, token_ids: list[int], drafts: list[int]
) -> list[np.ndarray]:
    """The assistant's logits of each draft after these tokens: from K/V of mlx-lm's own model on
    all tokens but the last, which has no K/V yet.
    """
    decoder, stored = text_model(model).model, {}
    layers = {kind: decoder.layers[index] for kind, index in READ_LAYERS.items()}
    for layer in layers.values():
        layer.self_attn = Recording(layer.self_attn)
    row = decoder(mx.array([token_ids[:-1]]))[:, -1:]
    for kind, layer in layers.items():
        stored[kind], layer.self_attn = layer.self_attn.kept, layer.self_attn.attention
    position = len(token_ids) - 2
    distance = position - mx.arange(position + 1)
    masks = {FULL: distance >= 0, SLIDING: distance < WINDOW}
    rows = []
    for token in [token_ids[-1], *drafts[:-1]]:
        embedding = decoder.embed_tokens(mx.array([[token]])) * 64**0.5
        x = assistant.pre_projection(mx.concatenate([embedding, row], axis=-1))
        for layer in assistant.model.layers:
            kind = layer.layer_type
            x, _, _ = layer(x, mask=masks[kind][None], shared_kv=stored[kind], offset=position)
        normed = assistant.model.norm(x)
        row = assistant.post_projection(normed)
        rows.append(logits_of(assistant, np.array(normed[0, 0])))
    return rows


def logits_of(assistant: Assistant, row: np.ndarray) -> np.ndarray:
    logits = np.array(assistant.model.embed_tokens.weight) @ row
    if "masked_embedding" in assistant:
        scores = np.array(assistant.masked_embedding.centroids.weight) @ row
        order = np.array(assistant.masked_embedding.token_ordering).reshape(16, 16)
        near = order[np.argsort(-scores)[:4]].ravel()
        logits[np.setdiff1d(np.arange(256), near)] = gemma4_assistant.FAR
    return logits


@pytest.mark.parametrize("has_centroids", [False, True])
def test_answers_are_those_without_it_and_each_draft_is_that_of_the_whole_text(
    has_centroids: bool, monkeypatch: pytest.MonkeyPatch
):
    """Chunks, prefix hits, forks, preemption, swapping, penalties and draws, in one workload."""
    model, assistant = pair(has_centroids)
    workload = Workload(41, 10, model.args.vocab_size)
    plain = workload.run(model, run_ahead=False)
    rounds = Rounds(monkeypatch)
    drafting = workload.run(
        model, draft_model=assistant, speculation=eager_drafts, run_ahead=has_centroids
    )
    assert_all_same_but_aborts(drafting, plain)
    assert drafting.engine.stats().spec_decoding.num_accepted_tokens > 0
    assert len(rounds.seen) > 20
    for logits, expected in rounds.with_expected(model, assistant):
        np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)


def test_it_keeps_no_kv(tmp_path: Path):
    """So a snapshot that was saved beside it is that of the model alone."""
    model, assistant = pair()
    alone, both = (make_engine(model, draft_model=each) for each in (None, assistant))
    assert both.cache.config.layers == alone.cache.config.layers
    assert both.cache.config.nbytes_per_block == alone.cache.config.nbytes_per_block
    answer(both, prompt(40), greedy(1))
    both.save_snapshot(tmp_path / "a", prompt(40))
    alone.load_snapshot(tmp_path / "a")
    assert answer(alone, prompt(40), greedy(1)).num_cached_tokens == 32


def test_centroids_spare_a_draft_the_reading_of_its_embedding():
    (_, dense), (_, sparse) = pair(), pair(True)
    spared = dense.model.embed_tokens.weight.nbytes
    added = sparse.masked_embedding.centroids.weight.nbytes
    read = [nbytes_read(each, 1) for each in (dense, sparse)]
    assert read[0] - read[1] == spared - added


def test_quantised_kv_are_read_as_the_model_reads_them(monkeypatch: pytest.MonkeyPatch):
    model, assistant = pair(head_dim=32)
    rounds = Rounds(monkeypatch)
    engine = make_engine(model, draft_model=assistant, kv_format=8)
    engine.scheduler.speculation = eager_drafts(engine)
    answer(engine, prompt(40), greedy(20))
    for logits, expected in rounds.with_expected(model, assistant):
        assert np.corrcoef(logits, expected)[0, 1] > 0.95


def test_kernels_read_the_same(monkeypatch: pytest.MonkeyPatch):
    model, assistant = pair(head_dim=32)
    plain = answer(make_engine(model), prompt(36), greedy(20))
    rounds = Rounds(monkeypatch)
    with pure_metal():
        engine = make_engine(model, draft_model=assistant)
        engine.scheduler.speculation = eager_drafts(engine)
        drafted = answer(engine, prompt(36), greedy(20))
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    for logits, expected in rounds.with_expected(model, assistant):
        np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)


def test_an_assistant_of_another_model_is_refused():
    model, assistant = pair()
    other = check_model(make("qwen3_next"))
    with pytest.raises(ArgumentError, match="draft_model is a head of another model"):
        make_engine(other, draft_model=assistant)
    with pytest.raises(UnsuitableModelError, match="reads the K/V of a Gemma 4"):
        Assistant(other, CONFIG)
    with pytest.raises(UnsuitableModelError, match="for a model whose hidden_size is 32, and"):
        Assistant(model, CONFIG | {"backbone_hidden_size": 32})
    wide = CONFIG["text_config"] | {"head_dim": 24}
    with pytest.raises(UnsuitableModelError, match="its 4 heads of 24 numbers don't fit"):
        Assistant(model, CONFIG | {"text_config": wide})
