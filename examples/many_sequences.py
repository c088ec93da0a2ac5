"""Several conversations in one paged cache: one pool, one ragged step for all, a fork for a second
answer.

    python examples/many_sequences.py
"""

from __future__ import annotations

import mlx.core as mx

from mlx_paged import Sequences, demo_model_path, load, make_kv_cache, run_step

QUESTIONS = [
    "What is 17 + 25?",
    "Repeat: red 7 blue 9 green",
    "The code of stone is 905. The code of river is 31. What is the code of stone?",
]


def main() -> None:
    model, tokenizer = load(demo_model_path())
    sequences = Sequences(make_kv_cache(model, "paged", kv_cache_bytes="256blocks"))

    # One step for all prompts, packed; then one step per token, for the answers that go on.
    batch = {
        question: tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True
        )
        for question in QUESTIONS
    }
    answers: dict[str, list[int]] = {question: [] for question in QUESTIONS}
    while batch:
        tokens = map(int, mx.argmax(run_step(model, sequences, batch), axis=-1))
        next_batch = {}
        for question, token in zip(batch, tokens, strict=True):
            if token in tokenizer.eos_token_ids or len(answers[question]) == 100:
                continue
            answers[question].append(token)
            next_batch[question] = [token]
        batch = next_batch

    for question, answer in answers.items():
        print(f"{question}\n  -> {tokenizer.decode(answer)}")
    stats = sequences.stats()
    print(
        f"{stats.num_seqs} sequences, {stats.num_tokens} tokens in {stats.blocks_used} of "
        f"{stats.num_blocks} blocks"
    )

    sequences.fork(QUESTIONS[0], "a branch")
    print(f"after a fork: {sequences.stats().blocks_used} blocks (shared until one side writes)")


if __name__ == "__main__":
    main()
