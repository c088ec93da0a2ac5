"""Many requests at once: a shared beginning that is computed once, an urgent request, one that is
cut short.

    python examples/many_requests.py
"""

from __future__ import annotations

from mlx_paged import LLM, AsyncEngine, SamplingParams, demo_model_path, load

FACTS = (
    "The code of apple is 4821. The code of stone is 905. The code of river is 31. My name is Tom."
)
QUESTIONS = [
    "What is the code of stone?",
    "What is the code of river?",
    "What is my name?",
    "What is 17 + 25?",
]


def main() -> None:
    model, tokenizer = load(demo_model_path())
    llm = LLM(model, tokenizer, kv_cache_bytes="256blocks")
    conversations = [[{"role": "user", "content": f"{FACTS} {question}"}] for question in QUESTIONS]
    for question, output in zip(
        QUESTIONS, llm.chat(conversations, SamplingParams(max_tokens=40)), strict=True
    ):
        print(
            f"{question}\n  -> {output.outputs[0].text}   ({output.num_cached_tokens} tokens were "
            "there already)"
        )
    stats = llm.stats()
    print(
        f"{stats.hit_rate:.0%} of all prompt tokens found; {stats.num_used_blocks} blocks in use "
        "after it\n"
    )

    # Three completions of one prompt: computed once, then forked.
    params = SamplingParams(n=3, temperature=1.5, seed=1, max_tokens=12)
    for completion in llm.generate("Hello, ", params)[0].outputs:
        print(f"completion {completion.index}: {completion.text!r}")

    with AsyncEngine(model, tokenizer, kv_cache_bytes="256blocks") as engine:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Count from 20 to 60."}], add_generation_prompt=True
        )
        for output in engine.stream(prompt, SamplingParams(max_tokens=200), request_id="counting"):
            if "30" in output.outputs[0].text:
                engine.abort("counting")
            if output.finished:
                print(f"\nstopped: {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")


if __name__ == "__main__":
    main()
