"""The server that clients talk to: the program's own, with all that is around it, on a small model
that reasons and calls tools. What it answers follows from the conversation, as the model itself
would say nothing of sense; engine, prompts, grammars, readers and protocols are the real ones.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
from helpers import servers
from helpers.agent_models import make_agent_model
from helpers.pooling_folders import end_texts, reranker_folder

from mlx_paged import demo_model_path
from mlx_paged.server.app import App
from mlx_paged.server.http.http_server import bind, url_of
from mlx_paged.server.http.logs import setup_logging
from mlx_paged.server.program import serve
from mlx_paged.server.settings import ServerSettings

MODEL = "local"
MAX_MODEL_LEN = 2**17  # agents' own prompts have tens of thousands of this tokenizer's tokens
CITY = {"name": "Paris", "population": 2100000}
THOUGHT = "<think>\nA tool knows that.\n</think>\n\n"

# What is called, by the name of the tool and the question, in the order in which they are looked
# for. Agents have many tools; one that reads the file is enough.
_READS = "cat hello.txt"
_CALLS: dict[str, Any] = {
    "get_weather": lambda question: {"city": "Rome" if "Rome" in question else "Paris"},
    "exec_command": lambda _: {"cmd": _READS},
    "shell_command": lambda _: {"command": _READS},
    "shell": lambda _: {"command": ["bash", "-lc", _READS]},
    "bash": lambda _: {"command": _READS, "description": "Reads the file"},
}
_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?=<\|im_end\|>|\Z)", re.DOTALL)


def answer_to(prompt: str) -> str | None:
    """The answer to a conversation, as the model would write it: a call of a tool that fits the
    question, and what the tool said once it has. ``None`` is left to the model.
    """
    messages = _MESSAGE.findall(prompt)
    tools = [text for role, text in messages if role == "tools"]
    # The last one is the answer, which is not there yet.
    said = [(role, text) for role, text in messages if role != "tools"][:-1]
    role, text = said[-1]
    if role == "tool":
        return f"The tool said: {text.strip()}"
    lines = tools[0].splitlines() if tools else []
    functions = [json.loads(line)["function"] for line in lines if line.startswith("{")]
    call = _call_of(functions, text)
    if call is not None:
        # With thinking off, the prompt has closed it already.
        thought = "" if prompt.endswith("</think>\n\n") else THOUGHT
        return f"{thought}<tool_call>\n{json.dumps(call)}\n</tool_call>"
    if "anything" in text:
        return None
    return json.dumps(CITY) if "JSON" in text or "City" in text else "I am here."


def _call_of(functions: list[dict[str, Any]], question: str) -> dict[str, Any] | None:
    """The call that answers a question, if one of the functions does."""
    names = [function["name"] for function in functions]
    if re.search(r"weather|And in|hello\.txt", question):
        for name, arguments in _CALLS.items():
            if name in names:
                return {"name": name, "arguments": arguments(question)}
    for function in functions:  # Clients describe an answer in a format as a tool.
        properties = function.get("parameters", {}).get("properties", {})
        if "City" in question and properties.keys() == CITY.keys():
            return {"name": function["name"], "arguments": CITY}
    return None


def _keep_one_layer(model: Path) -> None:
    """Answers are dictated, so one layer is enough; agents' prompts take a while with more."""
    config, weights = model / "config.json", model / "model.safetensors"
    changes = {"max_position_embeddings": MAX_MODEL_LEN, "num_hidden_layers": 1}
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    arrays = dict(mx.load(str(weights)))
    kept = {name: each for name, each in arrays.items() if not re.search(r"layers\.[1-9]", name)}
    mx.eval(kept)  # The file is written over.
    mx.save_safetensors(str(weights), kept, {"format": "mlx"})


class LabEngine(servers.ScriptedEngine):
    """An engine whose answers are those of :func:`answer_to`."""

    tokenizer: Any = None

    def generate(self, prompt: Any, params: Any = None, **options: Any) -> Any:
        text = str(self.tokenizer.decode(prompt["prompt_token_ids"]))
        # A history that is computed ahead has no answer.
        is_asked = "<|im_start|>" in text and options.get("priority") != servers.MAX_PRIORITY
        answer = answer_to(text) if is_asked else None
        if answer is not None:
            tokens = self.tokenizer.encode(answer, add_special_tokens=False)
            self.scripts.append([*tokens, self.tokenizer.eos_token_id])
        return super().generate(prompt, params, **options)


def main() -> int:
    """Serve on a free port, and say its address on stdout. With ``--demo``, the demo model answers
    for itself; with ``--retrieval``, it gives embeddings and scores.
    """
    if "--retrieval" not in sys.argv:
        servers.ScriptedEngine = LabEngine  # type: ignore[misc]
    settings = ServerSettings(port=0, log_cache=True)
    setup_logging("info", log_prompts="--log-prompts" in sys.argv)
    with tempfile.TemporaryDirectory() as folder:
        model = demo_model_path()
        if "--retrieval" in sys.argv:
            model = reranker_folder(Path(folder))
            end_texts(model)
        elif "--demo" not in sys.argv:
            model = make_agent_model(Path(folder) / "model")
            _keep_one_layer(model)
        names, budget = (MODEL, "demo"), "12000blocks"
        service = servers.make_service(model, model_names=names, kv_cache_bytes=budget)
        LabEngine.tokenizer = service.tokenizer
        sockets = bind(settings.host, settings.port)
        url = url_of(settings.host, sockets)
        with service.engine:
            return serve(App(service), sockets, lambda: print(url, flush=True))


if __name__ == "__main__":
    raise SystemExit(main())
