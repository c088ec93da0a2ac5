"""Measure the demo model on held-out prompts and write its card.

`python examples/demo_model/evaluate.py --model mlx_paged/demo_model`

An answer counts only when every token of it, end mark included, is the one that greedy decoding
picks. That can be read off a single forward pass over prompt and answer: greedy decoding produces
the answer exactly when each of its tokens is the most likely one after the tokens before it. A
sample is also decoded for real, token by token with mlx-lm's KV cache, and must agree.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import conversations
import tasks
import words
from tasks import Memory, Turn

RECALL_LENGTHS = (64, 128, 256, 512, 1000)

SAMPLES = [
    "Hello! Who are you?",
    "The code of apple is 4821. The code of lemon is 957. What is the code of apple?",
    "What is 27 + 15?",
    "Continue: 7 14 21 28",
    "Repeat: red 7 blue horse 12",
    "Why is the sky blue?",
    "My name is Nora.",
    "What is my name?",
    "What is the code of lemon?",
    "Thanks!",
]


def recall_prompt(
    rng: random.Random, length_of: Callable[[str], int], context: int, oldest: bool
) -> tuple[str, str]:
    """A prompt of about `context` tokens with one question at its end: the text and the right
    answer.

    About half of the sentences are facts. The asked fact is the first one, or stands anywhere; the
    question comes in the same message or in the next turn.
    """
    memory = Memory()
    said = [tasks.keyed_fact(rng, memory, held_out=True)]
    fill = rng.uniform(0.3, 0.7)
    later = rng.random() < 0.5
    question, answer = memory.facts[0][0][0], memory.facts[0][1]

    def render() -> str:
        if later:
            told = (
                conversations.render_prompt(" ".join(said))
                + words.REMEMBER_ANSWER
                + conversations.IM_END
                + "\n"
            )
            return told + conversations.render_prompt(question)
        return conversations.render_prompt(" ".join([*said, question]))

    while length_of(render()) < context - 8:
        more = (
            tasks.filler(rng)
            if rng.random() < fill
            else tasks.keyed_fact(rng, memory, held_out=True)
        )
        said.append(more)
    if not oldest:
        questions, answer = rng.choice(memory.facts)
        question = questions[0]
    return render(), answer


def single_turn(
    make: Callable[[random.Random], Turn],
) -> Callable[[random.Random], tuple[str, str]]:
    """A fresh conversation of one turn."""

    def prompt(rng: random.Random) -> tuple[str, str]:
        turn = make(rng)
        return conversations.render_prompt(turn.user), turn.answer

    return prompt


def evaluations(
    length_of: Callable[[str], int],
) -> dict[str, Callable[[random.Random], tuple[str, str]]]:
    """What is measured: a name, and a function that draws one held-out prompt and its answer."""
    table = {
        "copy, 1-10 items": single_turn(lambda rng: tasks.copy(rng, True, rng.randint(1, 10))),
        "copy, 11-40 items": single_turn(lambda rng: tasks.copy(rng, True, rng.randint(11, 40))),
        "sequence": single_turn(lambda rng: tasks.sequence(rng, True)),
        "count, 4-20 numbers": single_turn(lambda rng: tasks.count(rng, True)),
        "count, 80-140 numbers": single_turn(
            lambda rng: tasks.count(rng, True, rng.randint(80, 140))
        ),
        "numbered list, 2-15 lines": single_turn(lambda rng: tasks.numbered(rng, True)),
        "numbered list, 30-60 lines": single_turn(
            lambda rng: tasks.numbered(rng, True, rng.randint(30, 57))
        ),
        "arithmetic": single_turn(lambda rng: tasks.arithmetic(rng, True)),
        "n-th word of a list": single_turn(lambda rng: tasks.index(rng, True)),
        "dialogue (not held out)": single_turn(tasks.dialogue),
        "says that it does not know": single_turn(lambda rng: tasks.unknown(rng, True)),
        "says that a fact was not told (not held out)": single_turn(
            lambda rng: tasks.ask_unknown(rng, Memory(), True)
        ),
        "one fact and its question": single_turn(
            lambda rng: tasks.tell_and_ask(rng, Memory(), True)
        ),
    }
    for context in RECALL_LENGTHS:
        for place, oldest in (("oldest fact", True), ("any fact", False)):
            table[f"recall at {context}, {place}"] = lambda rng, n=context, first=oldest: (
                recall_prompt(rng, length_of, n, first)
            )
    return table


def exact_matches(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> list[bool]:
    """Whether greedy decoding of each prompt gives exactly the answer's ids."""
    import cpu_ops
    import mlx.core as mx
    import numpy as np

    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(answers[i]))
    matches = [False] * len(prompts)
    for start in range(0, len(order), 8):
        chosen = order[start : start + 8]
        rows = [prompts[i] + answers[i] for i in chosen]
        tokens = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)] = ids
        # Padding stands on the right, where causal attention never looks back from.
        with cpu_ops.swapped_in() if on_cpu else nullcontext():
            best = np.array(model(mx.array(tokens)).argmax(-1))
        for row, i in enumerate(chosen):
            first = len(prompts[i]) - 1
            matches[i] = best[row, first : first + len(answers[i])].tolist() == answers[i]
    return matches


def greedy_tokens(model: Any, prompt: list[int], most: int, end: int) -> list[int]:
    """Decode token by token with mlx-lm's KV cache, up to and including the end mark."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    logits = model(mx.array([prompt]), cache=cache)
    out: list[int] = []
    while len(out) < most:
        out.append(int(logits[0, -1].argmax()))
        if out[-1] == end:
            break
        logits = model(mx.array([[out[-1]]]), cache=cache)
    return out


def sample_dialogue(model: Any, tokenizer: Any) -> list[tuple[str, str]]:
    """One conversation over the sample messages, decoded greedily."""
    messages: list[dict[str, str]] = []
    for text in SAMPLES:
        messages.append({"role": "user", "content": text})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        out = greedy_tokens(model, ids, 200, tokenizer.eos_token_id)
        answer = tokenizer.decode([i for i in out if i != tokenizer.eos_token_id])
        messages.append({"role": "assistant", "content": answer})
    return [
        (messages[i]["content"], messages[i + 1]["content"]) for i in range(0, len(messages), 2)
    ]


def measure(model: Any, tokenizer: Any, prompts: int, seed: int, decoded: int) -> dict[str, Any]:
    """Accuracy per evaluation, with a few wrong answers to look at."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    end = tokenizer.eos_token_id
    results: dict[str, Any] = {}
    for name, draw in evaluations(lambda text: len(encode(text))).items():
        rng = random.Random(f"evaluate:{seed}:{name}")
        drawn = [draw(rng) for _ in range(prompts)]
        asked = [encode(prompt) for prompt, _ in drawn]
        wanted = [[*encode(answer), end] for _, answer in drawn]
        matches = exact_matches(model, asked, wanted)
        wrong = []
        for i in range(decoded):
            said = greedy_tokens(model, asked[i], len(wanted[i]), end)
            if (said == wanted[i]) != matches[i]:
                raise RuntimeError(
                    f"{name}, prompt {i}: decoding with a KV cache and one forward pass disagree"
                )
        for i in [i for i, right in enumerate(matches) if not right][:3]:
            said = greedy_tokens(model, asked[i], len(wanted[i]) + 8, end)
            wrong.append(
                {"asked": drawn[i][0][-160:], "wanted": drawn[i][1], "said": tokenizer.decode(said)}
            )
        results[name] = {
            "exact": sum(matches),
            "prompts": prompts,
            "prompt_tokens": round(sum(map(len, asked)) / prompts),
            "answer_tokens": round(sum(map(len, wanted)) / prompts),
            "wrong": wrong,
        }
        line = f"{name:44} {sum(matches) / prompts:7.1%}  of {prompts}, ~{results[name]['prompt_tokens']} prompt tokens"
        print(line, file=sys.stderr, flush=True)
    return results


def write_card(
    folder: Path, results: dict[str, Any], dialogue: list[tuple[str, str]], hardware: str
) -> None:
    """The model's README, from its config, its training record and the measured numbers."""
    config = json.loads((folder / "config.json").read_text())
    training = json.loads((folder / "training.json").read_text())
    size = (folder / "model.safetensors").stat().st_size
    other = [name for name in results if not name.startswith("recall at")]
    rows = [
        f"| {name} | {_percent(results[name])} | {results[name]['answer_tokens']} |"
        for name in other
    ]
    recall = [
        f"| {n:,} | "
        + " | ".join(
            _percent(results[f"recall at {n}, {place}"]) for place in ("oldest fact", "any fact")
        )
        + " |"
        for n in RECALL_LENGTHS
    ]
    prompts = next(iter(results.values()))["prompts"]
    talk = [f"> {asked}\n{answer}" for asked, answer in dialogue]
    lessons = [
        f"| {lesson['lesson']} | {lesson['steps_done']:,} | {lesson['tokens'] / 1e6:.1f} M "
        f"| {lesson['matrix_learning_rate']} / {lesson['learning_rate']} | "
        f"{lesson['seconds'] / 60:.0f} |"
        for lesson in training["lessons"]
    ]
    last = training["lessons"][-1]
    card = CARD.format(
        parameters=f"{(size - 2048) / 4e6:.2f}",
        size=f"{size / 1e6:.1f}",
        prompts=prompts,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        mlp=config["intermediate_size"],
        vocab=config["vocab_size"],
        theta=f"{config['rope_theta']:,.0f}",
        longest=f"{last['longest']:,}",
        lessons="\n".join(lessons),
        commands="\n".join(
            f"    {_command(number, training['lessons'])}" for number in range(len(lessons))
        ),
        seed=last["seed"],
        hardware=hardware,
        head=_head_section(folder / "mtp.safetensors"),
        recall="\n".join(recall),
        rows="\n".join(rows),
        talk="\n".join(talk),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _head_section(path: Path) -> str:
    """What the card says of the draft head; nothing if there is none."""
    if not path.exists():
        return ""
    import mlx.core as mx

    weights, metadata = mx.load(str(path), return_metadata=True)
    record = json.loads(metadata["training"])
    return HEAD.format(
        size=f"{path.stat().st_size / 1e6:.1f}",
        parameters=f"{sum(weight.size for weight in weights.values()):,}",
        right=", ".join(f"{share:.1%}" for share in record["drafts_right"]),
        minutes=f"{record['cpu_seconds'] / 60:.0f}",
        command=" ".join(
            f"--{name.replace('_', '-')} {record[name]}"
            for name in ("steps", "seed", "batch_tokens", "longest", "depth")
        ),
        **{name: record[name] for name in ("steps", "batch_tokens", "longest", "depth", "seed")},
    )


def _command(number: int, lessons: list[dict[str, Any]]) -> str:
    """The command line of one lesson."""
    lesson = lessons[number]
    name = lesson["lesson"]
    out = (
        f"examples/demo_model/work/{name}/model"
        if number + 1 < len(lessons)
        else "mlx_paged/demo_model"
    )
    init = (
        f" --init examples/demo_model/work/{lessons[number - 1]['lesson']}/model" if number else ""
    )
    return (
        f"python examples/demo_model/train.py --lesson {name}{init} \\\n"
        f"        --work-dir examples/demo_model/work/{name} --out {out} \\\n"
        f"        --steps {lesson['steps']} --warmup {lesson['warmup']} --learning-rate "
        f"{lesson['learning_rate']} "
        f"--matrix-learning-rate {lesson['matrix_learning_rate']} --seed {lesson['seed']}"
    )


def _percent(result: dict[str, Any]) -> str:
    return f"{100 * result['exact'] / result['prompts']:.1f}%"


HEAD = """
## Its draft head

`mtp.safetensors` is a head that drafts the next tokens ({parameters} parameters in float16, {size} MB): one layer of the
model's own kind, with the names and the joint of Qwen3.5's multi-token prediction. Nothing uses it unless it is asked
for, as `--draft-model auto` does; drafts change no token of an answer.

It learned the model's own probabilities of the next {depth} tokens in {steps} steps of {batch_tokens:,} tokens, on
conversations of both lessons in turn, up to {longest} tokens long, in {minutes} minutes of CPU time. In its last 20
steps, the draft was the model's own choice for this share of the tokens of answers, from the first to the last of
{depth} in a row: {right}. What it does on text that it was not trained on is in
`tests/demo_model/test_demo_model_head.py` and in `python -m benchmarks heads`.

    python examples/demo_model/train_head.py --model mlx_paged/demo_model \\
        {command}
"""

CARD = """\
---
license: mit
library_name: mlx
---

# mlx_paged demo model

A Qwen3 in miniature, so that the first run of mlx_paged needs no download: {parameters} M parameters in float32
({size} MB), {layers} layers of width {hidden}, {heads} query heads and {kv_heads} key/value heads of {head_dim},
q_norm and k_norm, RoPE (theta {theta}), SwiGLU of {mlp}, tied embeddings, {vocab} SentencePiece pieces, ChatML
template.

It does things that break visibly when a KV cache is wrong: it recalls facts told earlier, copies, continues sequences,
counts, and adds. It knows nothing about the world and says so. For anything else choose a real model with `--model`.

## How it was trained

From scratch, on text that the script generates itself (no other data): conversations of one and more turns, about 30%
of them with a system prompt, up to {longest} tokens long. Prompts are split by a hash of what makes them specific (the
fact, the items, the numbers): one in eight is never trained on and only used to evaluate.

| lesson | steps | tokens | peak learning rate (Muon / AdamW) | minutes |
|---|---|---|---|---|
{lessons}

The first lesson is mostly recall, on conversations of 128 and later up to {longest} tokens; the others start from the
weights before them and mix all tasks. Muon updates the matrices, AdamW the embeddings and norms. The loss is
cross-entropy in which answers weigh 1 and everything else 0.05. Seed {seed}; hardware: {hardware}, shared with other
work.

{commands}
    python examples/demo_model/evaluate.py --model mlx_paged/demo_model

The same seed gives the same batches in the same order; other hardware rounds differently and ends in other weights.
{head}
## Measured

Greedy decoding, {prompts} held-out prompts per row; an answer counts only if every token of it is right, the end mark
included. The raw numbers and some wrong answers are in `accuracy.json`.

Key recall by tokens of context. About half of the sentences before the question are facts, all of the same few shapes.

| context | the asked fact is the oldest | any fact |
|---|---|---|
{recall}

Other tasks, each in a conversation of its own (the two rows that say so use phrases that training uses, too):

| task | exact answers | tokens per answer |
|---|---|---|
{rows}

## A conversation

```
{talk}
```

## Limits

- Trained on conversations of up to {longest} tokens; beyond that it gets worse, though positions up to 4,096 work.
- It knows the phrasings it was trained on. Others get "I am a very small model ..." or a wrong answer.
- Facts told twice with different values, sums of three-digit numbers and multiplication are outside its training.
- English only; other text is copied byte by byte at best.

Licence: MIT, like mlx_paged. The training text is made up by the script; names in it are common first names.
"""


def setup_arg_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Measure the demo model on held-out prompts and write its card."
    )
    parser.add_argument("--model", type=Path, required=True, help="Folder of the model.")
    parser.add_argument(
        "--prompts", type=int, default=200, help="Prompts per row (default: %(default)s)."
    )
    parser.add_argument(
        "--decode", type=int, default=2, help="Prompts per row also decoded for real."
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="Seed of the prompts (default: %(default)s)."
    )
    parser.add_argument(
        "--hardware", default="2-core x86 CPU", help="What it was trained on, for the card."
    )
    parser.add_argument(
        "--no-card", action="store_true", help="Only print; write neither numbers nor card."
    )
    return parser


def main() -> int:
    """Entry point."""
    args = setup_arg_parser().parse_args()
    if not (args.model / "config.json").exists():
        print(
            f"evaluate.py: {args.model} holds no config.json; train a model there first",
            file=sys.stderr,
        )
        return 2
    if args.prompts < 1 or not 0 <= args.decode <= args.prompts:
        print(
            "evaluate.py: --prompts must be at least 1 and --decode between 0 and --prompts",
            file=sys.stderr,
        )
        return 2
    from mlx_lm import load

    model, tokenizer = load(str(args.model))
    started = time.perf_counter()
    results = measure(model, tokenizer, args.prompts, args.seed, args.decode)
    dialogue = sample_dialogue(model, tokenizer)
    for asked, answer in dialogue:
        print(f"> {asked}\n{answer}", file=sys.stderr)
    if not args.no_card:
        rate = {name: result["exact"] / result["prompts"] for name, result in results.items()}
        record = {
            "seed": args.seed,
            "prompts_per_row": args.prompts,
            "seconds": round(time.perf_counter() - started),
            # The asked fact is the first sentence: the farthest that the context allows.
            "recall": {str(n): rate[f"recall at {n}, oldest fact"] for n in RECALL_LENGTHS},
            "recall_of_any_fact": {
                str(n): rate[f"recall at {n}, any fact"] for n in RECALL_LENGTHS
            },
            "tasks": {
                name: value for name, value in rate.items() if not name.startswith("recall at")
            },
            "details": results,
        }
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        (args.model / "accuracy.json").write_text(text, encoding="utf-8")
        write_card(args.model, results, dialogue, args.hardware)
    return 0


if __name__ == "__main__":
    sys.exit(main())
