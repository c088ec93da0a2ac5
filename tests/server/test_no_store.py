"""``no_store`` reaches the engine in every protocol, from the body and from ``Cache-Control``."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.fast_lane import mostly_slow
from helpers.servers import ask, bodies_of

from mlx_paged.server.service import Service

BODIES = bodies_of("Hello", 1)
BODIES["/v1/completions"]["prompt"] = ["a", "b"]


CASES: list[tuple[dict[str, Any], dict[str, str], bool]] = [
    ({}, {}, False),
    ({"no_store": False}, {}, False),
    ({"no_store": None}, {}, False),
    ({"no_store": True}, {}, True),
    ({}, {"Cache_Control": "no-store"}, True),
    ({"no_store": False}, {"cache_control": "no-cache, No-Store"}, True),
    ({}, {"Cache_Control": "no-cache, max-age=0"}, False),
]
OF_OPENAI: list[tuple[dict[str, Any], dict[str, str], bool]] = [
    ({"prompt_cache_retention": "24h"}, {}, False),
    ({"prompt_cache_retention": "in_memory"}, {}, True),
]


SAYINGS = [
    (path, *case)
    for path in BODIES
    for case in (CASES if path == "/v1/messages" else [*CASES, *OF_OPENAI])
]


# Each third is in the fast lane.
@mostly_slow(
    ("path", "body", "headers", "no_store"),
    SAYINGS,
    ids=str,
    quick=range(0, len(SAYINGS), 3),
)
def test_a_body_or_a_header_says_that_nothing_is_stored(
    server_url: str,
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
    no_store: bool,
):
    asked: list[bool] = []
    generate = service.engine.generate

    def noting(*args: Any, **options: Any) -> Any:
        asked.append(options["no_store"])
        return generate(*args, **options)

    monkeypatch.setattr(service.engine, "generate", noting)
    for is_streamed in (False, True):
        asked.clear()
        answer = ask(server_url, path, {**BODIES[path], **body, "stream": is_streamed}, **headers)
        assert answer.status == 200, answer.text
        assert asked == [no_store] * (2 if "prompt" in BODIES[path] else 1)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", ["yes", 1, [], {}], ids=str)
def test_no_store_is_true_or_false(server_url: str, path: str, value: object):
    answer = ask(server_url, path, {**BODIES[path], "no_store": value})
    assert answer.status == 400
    assert "no_store must be true or false" in answer.body["error"]["message"]
