"""Answer one prompt, from Python.

    python examples/generate_text.py
    python examples/generate_text.py --model mlx-community/Qwen3-0.6B-4bit \\
        --prompt "Why is the sky blue?"
"""

from __future__ import annotations

import argparse

from mlx_paged import demo_model_path, generate, load, make_sampler


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default=str(demo_model_path()),
        help="a folder or a hub id (default: the demo model)",
    )
    parser.add_argument("--prompt", default="The code of apple is 4821. What is the code of apple?")
    parser.add_argument("--temp", type=float, default=0.0)
    args = parser.parse_args()

    model, tokenizer = load(args.model)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": args.prompt}], add_generation_prompt=True
    )
    generate(
        model, tokenizer, prompt, verbose=True, max_tokens=256, sampler=make_sampler(temp=args.temp)
    )


if __name__ == "__main__":
    main()
