"""A model folder whose tokenizer has marks for reasoning and calls, and a template that knows them.

The weights are the demo model's, with a few rows more: answers are dictated in any case.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import mlx.core as mx
from transformers import AddedToken, AutoTokenizer

from mlx_paged import demo_model_path

# The marks are tokens, as in Qwen3's tokenizer, where they are no special tokens.
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# A special token that no answer shows.
HIDDEN = "<|hidden|>"

# Reasoning is written after the last question only, and calls with the keys in their order.
TEMPLATE = """\
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}
{{- '<|im_start|>tools\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and message.reasoning_content and
       (loop.index0 > last.question or (preserve_thinking is defined and preserve_thinking)) %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- set tool_call = call.function %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""


def pieces_of(text: str, size: int) -> list[str]:
    """A text in pieces of so many characters; marks, which models write as tokens, stay whole."""
    pieces = []
    for part in re.split(f"({'|'.join(map(re.escape, MARKS))})", text):
        step = len(part) or 1 if part in MARKS else size
        pieces += [part[place : place + step] for place in range(0, len(part), step)]
    return pieces


def make_agent_model(folder: Path, *, are_marks_special: bool = False) -> Path:
    """Write the folder; returns it."""
    shutil.copytree(demo_model_path(), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = len(tokenizer)
    marks = [AddedToken(mark, special=are_marks_special, normalized=False) for mark in MARKS]
    tokenizer.add_tokens(marks, special_tokens=are_marks_special)
    tokenizer.add_tokens([AddedToken(HIDDEN, special=True)], special_tokens=True)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    num_new = len(tokenizer) - size
    weights = mx.load(str(folder / "model.safetensors"))
    name = "model.embed_tokens.weight"
    weights[name] = mx.concatenate([weights[name], mx.zeros((num_new, weights[name].shape[1]))])
    mx.eval(weights)  # The file is written over.
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] += num_new
    config["max_position_embeddings"] = 16384
    (folder / "config.json").write_text(json.dumps(config))
    return folder
