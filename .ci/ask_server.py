"""Ask a server that is just starting one question, and look at its page; imports nothing of ours.

python .ci/ask_server.py http://127.0.0.1:8000 "What is 17 + 25?" 42
"""

import json
import sys
import time
import urllib.error
import urllib.request


def main(url: str, question: str, expected: str) -> None:
    wait_for(url)
    messages = [{"role": "user", "content": question}]
    body = {"model": "demo", "messages": messages, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)["choices"][0]["message"]["content"]
    print("the server says:", answer)
    assert expected in answer
    with urllib.request.urlopen(url) as response:
        assert b"<html" in response.read()


def wait_for(url: str) -> None:
    for _ in range(150):
        try:
            urllib.request.urlopen(f"{url}/health").close()
            return
        except urllib.error.URLError:
            time.sleep(0.2)
    raise SystemExit(f"nothing answers at {url}")


if __name__ == "__main__":
    main(*sys.argv[1:])
