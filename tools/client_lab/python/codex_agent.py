"""Codex: two turns of one conversation, each of which reads a file by a command."""

import json
import os
import subprocess
from pathlib import Path

from lab import V1

CONFIGURATION = f"""\
model = "local"
model_provider = "mlx_paged"
web_search = "disabled"

[model_providers.mlx_paged]
name = "mlx_paged"
base_url = "{V1}"
wire_api = "responses"
"""
WORD = "The word is heron."

work = Path(os.environ["LAB_WORK"])
(work / "home").mkdir()
(work / "home" / "config.toml").write_text(CONFIGURATION)
(work / "hello.txt").write_text(WORD + "\n")


def run(*arguments: str) -> list[dict]:
    """The events of a turn."""
    done = subprocess.run(
        [f"{os.environ['LAB_BIN']}/codex", "exec", *arguments],
        env={**os.environ, "CODEX_HOME": str(work / "home")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0, done.returncode
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert "command_execution" in [item["type"] for item in items]
    assert WORD in [item["text"] for item in items if item["type"] == "agent_message"][-1]
    return events


options = ("--skip-git-repo-check", "--json")
run(*options, "What does hello.txt say?")
usage = run("resume", "--last", *options, "And what does hello.txt say now?")[-1]["usage"]
# Of both turns together, four requests.
print("lab: {cached_input_tokens} of {input_tokens} prompt tokens cached".format(**usage))
