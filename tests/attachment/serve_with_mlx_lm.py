"""Answers of mlx-lm's own server, with its model as it is and attached, as lines of JSON.

A program of its own: mlx-lm's server ends its threads with the process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import ThreadingHTTPServer

import mlx_lm.server

import mlx_paged
from mlx_paged.loading import demo_model_path

SYSTEM = "You are an assistant who counts, remembers and repeats. " * 6


class PagedProvider(mlx_lm.server.ModelProvider):
    def _load(self, *args) -> None:
        super()._load(*args)
        # A few more blocks than the requests of one moment need.
        self.paged = mlx_paged.attach(self.model, kv_cache_bytes="100blocks")


def provider_of(kind: type[mlx_lm.server.ModelProvider]) -> mlx_lm.server.ModelProvider:
    """With the arguments of mlx-lm's own command line."""
    made = []
    mlx_lm.server.ModelProvider = kind
    mlx_lm.server.run = lambda host, port, provider, **options: made.append(provider)
    sys.argv = ["server", "--model", str(demo_model_path()), "--max-tokens", "12"]
    mlx_lm.server.main()
    return made[0]


def answers(provider: mlx_lm.server.ModelProvider) -> list[str]:
    store = mlx_lm.server.LRUPromptCache(10)
    generator = mlx_lm.server.ResponseGenerator(provider, store)
    handler = partial(mlx_lm.server.APIHandler, generator, system_fingerprint="test")
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with ThreadPoolExecutor(4) as threads:
        conversations = list(threads.map(partial(converse, server.server_port), range(4)))
    conversations.append(converse(server.server_port, 0))
    server.shutdown()
    generator.stop_and_join()
    return [text for conversation in conversations for text in conversation]


def converse(port: int, number: int) -> list[str]:
    """The answers to two turns."""
    messages = [{"role": "system", "content": SYSTEM}]
    for turn in range(2):
        messages.append({"role": "user", "content": f"Count to {number}{turn}."})
        body = json.dumps({"messages": messages}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            body,
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            message = json.load(answer)["choices"][0]["message"]
        messages.append({"role": "assistant", "content": message.get("content") or ""})
    return [message["content"] for message in messages if message["role"] == "assistant"]


if __name__ == "__main__":
    stock = answers(provider_of(mlx_lm.server.ModelProvider))
    provider = provider_of(PagedProvider)
    attached = answers(provider)
    print(json.dumps({"stock": stock, "attached": attached}), flush=True)
    os._exit(0)
