"""opencode: two turns of one conversation, each of which reads a file by a command."""

import json
import os
import subprocess
from pathlib import Path

from lab import V1

CONFIGURATION = {
    "model": "mlx_paged/local",
    "provider": {
        "mlx_paged": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": V1},
            "models": {"local": {}},
        }
    },
}
WORD = "The word is heron."

work = Path(os.environ["LAB_WORK"])
(work / "opencode.json").write_text(json.dumps(CONFIGURATION))
(work / "hello.txt").write_text(WORD + "\n")
homes = {
    name: str(work / "home")
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")
}


def run(*arguments: str) -> None:
    done = subprocess.run(
        [f"{os.environ['LAB_BIN']}/opencode", "run", "--format", "json", *arguments],
        # It looks for its configuration where PWD says, and not where it is.
        env={**os.environ, **homes, "PWD": str(work), "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0, done.returncode
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert "tool_use" in [event["type"] for event in events]
    assert WORD in [event["part"]["text"] for event in events if event["type"] == "text"][-1]


run("What does hello.txt say?")
run("--continue", "And what does hello.txt say now?")
