"""Keys, hosts, origins and preflights, in front of an application that answers everybody."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.asgi import ask, echo

from mlx_paged.errors import ArgumentError, shown
from mlx_paged.server.app import guarded as shielded
from mlx_paged.server.http.access import Access, OriginGuard, Principal, is_loopback_name
from mlx_paged.server.settings import (
    ApiKey,
    KeyFile,
    ServerSettings,
    num_users,
    read_api_keys,
    seems_named_by_equals,
)

KEYS = read_api_keys(["alice sesame", "bob abracadabra", "plain"])


def guarded(**settings: object) -> Access:
    return Access(echo, ServerSettings(**settings))  # type: ignore[arg-type]


# Keys


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer sesame"},
        {"authorization": "bearer  sesame "},
        {"x-api-key": "sesame"},
        {"Authorization": "Basic abc", "X-Api-Key": "sesame"},
    ],
)
def test_a_key_opens_as_bearer_and_as_x_api_key(headers: dict[str, str]):
    answered = ask(guarded(api_keys=KEYS), "POST", "/v1/chat/completions", headers)
    assert answered.status == 200
    assert answered.state["principal"].name == "alice"


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "no API key was given"),
        ({"Authorization": "Bearer "}, "no API key was given"),
        ({"Authorization": "sesame"}, "no API key was given"),
        ({"Authorization": "Bearer Sesame"}, "the API key is wrong"),
        ({"x-api-key": "alice sesame"}, "the API key is wrong"),
        ({"x-api-key": "sesam\u00e9"}, "the API key is wrong"),
    ],
)
def test_without_a_right_key_there_is_401_in_the_shape_of_the_protocol(
    headers: dict[str, str], message: str
):
    app = guarded(api_keys=KEYS)
    openai, anthropic, ollama = (
        ask(app, "POST", path, headers=headers)
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat")
    )
    assert openai.status == anthropic.status == ollama.status == 401
    assert message in ollama.json["error"]
    assert message in openai.json["error"]["message"]
    assert openai.json["error"]["code"] == "invalid_api_key"
    assert openai.headers["www-authenticate"] == "Bearer"
    assert anthropic.json["type"] == "error"
    assert anthropic.json["error"]["type"] == "authentication_error"


def test_only_health_and_the_page_are_open_and_only_to_look_at():
    app = guarded(api_keys=KEYS)
    asked = [
        ask(app, method, path).status
        for method, path in [
            ("GET", "/health"),
            ("HEAD", "/health"),
            ("GET", "/"),
            ("POST", "/"),
            ("GET", "/metrics"),
            ("GET", "/v1/models"),
            ("GET", "/v1/pool"),
            ("GET", "/health/"),
        ]
    ]
    assert asked == [200, 200, 200, 401, 401, 401, 401, 401]


def test_without_keys_everybody_is_nobody_and_shares_the_cache():
    assert ask(guarded()).state["principal"] == Principal("-", None)


def test_users_have_salts_of_their_own_which_outlive_a_change_of_key_or_order():
    def salts(*texts: str, share_cache: bool = False) -> dict[str, str | None]:
        keys = read_api_keys(texts)
        app = guarded(api_keys=keys, share_cache=share_cache)
        return {
            key.key: ask(app, headers={"x-api-key": key.key}).state["principal"].cache_salt
            for key in keys
        }

    before = salts("alice old", "first", "second")
    after = salts("second", "alice old", "alice new")
    assert len(set(before.values())) == 3
    assert after == {
        "second": before["second"],
        "old": before["old"],
        "new": before["old"],
    }
    assert "first" not in str(before["first"])
    assert salts("a x", "y", share_cache=True) == {"x": None, "y": None}


def test_the_salts_of_user_and_request_join_without_collisions():
    ones = [
        Principal("a", user).salted(own) for user in (None, "x", "y") for own in (None, "x", "y")
    ]
    assert ones[0] is None
    # Without users there are the request's own salts, which no user can bring about by another.
    assert len({*ones[3:]}) == 6
    assert not {*ones[1:3]} & {*ones[4:6], *ones[7:]}


def test_users_own_what_is_under_their_salts_and_nothing_else():
    def principals(*texts: str, **settings: bool) -> list[Principal]:
        app = guarded(api_keys=read_api_keys(texts), **settings)
        keys = [text.split()[-1] for text in texts]
        return [ask(app, headers={"x-api-key": key}).state["principal"] for key in keys]

    alice, bob = principals("alice x", "bob y")
    for own in (None, "conversation", alice.cache_salt):
        assert alice.owns(alice.salted(own)) and not bob.owns(alice.salted(own))
    assert not alice.owns(None)
    # Where the cache is shared, a prompt of another user's has the same salt.
    assert not any(each.owns(None) for each in principals("alice x", "bob y", share_cache=True))
    assert principals("alice x", "alice y", share_cache=True)[0].owns(None)
    assert Principal().owns(None)


@pytest.mark.parametrize("names", [("key2 A", "B"), ("A", "key1 B"), ("A", "B"), ("key#2", "B")])
@pytest.mark.parametrize("share_cache", [False, True])
def test_a_key_without_a_name_is_a_user_of_its_own_whatever_others_are_called(
    names: tuple[str, str], share_cache: bool
):
    keys = read_api_keys(names)
    app = guarded(api_keys=keys, share_cache=share_cache)
    first, second = (ask(app, headers={"x-api-key": key.key}).state["principal"] for key in keys)
    assert first.name != second.name
    for one, other in ((first, second), (second, first)):
        for own in (None, "conversation"):
            assert not other.owns(one.salted(own))
        assert not one.is_alone


def test_keys_of_one_given_name_are_one_user():
    settings = ServerSettings(api_keys=read_api_keys(["alice A", "alice B"]))
    app = Access(echo, settings)
    first, second = (ask(app, headers={"x-api-key": key}).state["principal"] for key in "AB")
    assert first == second == Principal("alice", first.cache_salt, is_alone=True)
    assert num_users(settings.api_keys) == 1


# Keys as operators give them


def test_keys_have_names_or_get_numbers_that_no_name_can_have():
    assert read_api_keys(["alice a=b", "plain", "Zm9vYg==", "bob\t  c", " sk-a=b=c "]) == (
        ApiKey("alice", "a=b"),
        ApiKey("key#2", "plain", False),
        ApiKey("key#3", "Zm9vYg==", False),
        ApiKey("bob", "c"),
        ApiKey("key#5", "sk-a=b=c", False),
    )
    assert "sesame" not in repr(KEYS)


@pytest.mark.parametrize(
    "key", ["sk-half=otherhalf", "Zm9v=YmFy", "abc=", "abc==", "=abc", "a=b=c", "key2=A"]
)
def test_no_part_of_a_key_with_equals_signs_becomes_a_name(key: str):
    (read,) = read_api_keys([key])
    assert read == ApiKey("key#1", key, False)
    principal = ask(guarded(api_keys=(read,)), headers={"x-api-key": key}).state["principal"]
    assert principal.name == "key#1"
    assert seems_named_by_equals(read) is (key.rstrip("=")[1:].count("=") > 0)
    assert not seems_named_by_equals(ApiKey("alice", key))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([""], "key 1 must be 1 to 512 ASCII characters"),
        (["a", "b c d"], "key 2 must be 1 to 512 ASCII characters"),
        (["sch\u00f6n"], "key 1 must be"),
        (["al/ice xxxx"], "the name of key 1 must be"),
        (["key#2 xxxx"], "the name of key 1 must be"),
        (["a xxxx", "b xxxx"], "key 2 is given twice"),
    ],
)
def test_keys_that_no_header_can_have_are_refused_without_being_said(
    texts: list[str], message: str
):
    with pytest.raises(ArgumentError, match=message) as raised:
        read_api_keys(texts)
    assert raised.value.argument == "api_key"
    assert all(text not in str(raised.value) for text in texts if len(text) > 3)


def test_a_file_of_keys_is_read_if_only_its_owner_can(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nalice sesame\n\n  plain  \n")
    file.chmod(0o600)
    assert read_api_keys(["zero"], str(file)) == (
        ApiKey("key#1", "zero", False),
        ApiKey("alice", "sesame"),
        ApiKey("key#3", "plain", False),
    )
    for mode in (0o640, 0o604, 0o660):
        file.chmod(mode)
        with pytest.raises(ArgumentError, match=f"by other users .mode {mode:o}.; run chmod 600"):
            read_api_keys([], str(file))
    file.chmod(0o600)
    for text, message in [
        ("", "has no key"),
        ("\n# none\n", "has no key"),
        ("x" * (2**20 + 1), "more"),
    ]:
        file.write_text(text)
        with pytest.raises(ArgumentError, match=message):
            read_api_keys([], str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match="can't be read"):
        read_api_keys([], str(file))
    with pytest.raises(ArgumentError, match="can't be read: No such file"):
        read_api_keys([], str(tmp_path / "nothing"))


def test_a_file_of_keys_is_read_again_once_it_has_changed_and_rests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "mlx_paged.server")
    file = tmp_path / "keys"
    file.write_text("alice old\n")
    file.chmod(0o600)
    keys = KeyFile(["zero"], str(file), read_api_keys(["zero"], str(file)))
    app = Access(echo, ServerSettings(), keys)

    def statuses() -> list[int]:
        return [
            ask(app, path="/v1/models", headers={"x-api-key": key}).status
            for key in ("zero", "old", "new")
        ]

    keys.reread_if_changed()
    assert statuses() == [200, 200, 401]
    file.write_text("alice new\nbob other\n")
    keys.reread_if_changed()  # It may be in the middle of being written.
    assert statuses() == [200, 200, 401]
    keys.reread_if_changed()
    assert statuses() == [200, 401, 200]
    keys.reread_if_changed()
    # What can't be used changes nothing, and is said once.
    for change in (lambda: file.write_text(""), lambda: file.chmod(0o644), file.unlink):
        change()
        for _ in range(4):
            keys.reread_if_changed()
        assert statuses() == [200, 401, 200]
    said = f"the API keys were not changed: api_key_file {shown(str(file))}"
    assert [record.getMessage() for record in caplog.records] == [
        "the API keys were reread: 3 keys",
        f"{said} has no key",
        f"{said} can be read or written by other users (mode 644); run chmod 600 on it",
        f"{said} can't be read: No such file or directory",
    ]


def test_a_user_keeps_the_salt_over_a_change_of_keys_and_learns_that_there_are_others(
    tmp_path: Path,
):
    file = tmp_path / "keys"
    file.write_text("alice old\n")
    file.chmod(0o600)
    keys = KeyFile([], str(file), read_api_keys([], str(file)))
    app = Access(echo, ServerSettings(), keys)
    before = ask(app, headers={"x-api-key": "old"}).state["principal"]
    file.write_text("alice new\nbob other\n")
    keys.reread()
    after = ask(app, headers={"x-api-key": "new"}).state["principal"]
    assert (before.is_alone, after.is_alone) == (True, False)
    assert before.cache_salt == after.cache_salt


# Hosts and origins


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("HEAD", "/health", 200),
        ("POST", "/health", 421),
        ("GET", "/v1/models", 421),
        ("POST", "/v1/completions", 421),
    ],
)
def test_without_a_host_one_may_look_whether_the_server_is_well(
    method: str, path: str, status: int
):
    app = OriginGuard(echo, ServerSettings(), is_loopback=True)
    assert ask(app, method, path, {"host": None}).status == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("app.localhost:1", 200),
        ("[::1]:8000", 200),
        ("[::1]", 200),
        ("127.1.2.3", 200),
        ("mac.example:8000", 200),
        ("evil.example:8000", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example:8000", 421),
        ("evil.example:127.0.0.1", 421),
        ("", 421),
        ("0.0.0.0:8000", 421),
        ("192.168.1.5:8000", 421),
    ],
)
def test_a_server_for_this_machine_answers_to_its_own_names_only(host: str, status: int):
    settings = ServerSettings(allowed_hosts=("mac.example",))
    for method in ("GET", "POST", "OPTIONS"):
        answered = ask(
            OriginGuard(echo, settings, is_loopback=True), method, headers={"host": host}
        )
        assert answered.status == status
    assert status == 200 or "--allowed-host" in answered.json["error"]["message"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("192.168.1.5:8000", 200),
        ("8.8.8.8", 200),
        ("[2001:db8::1]:8000", 200),
        ("[::1]", 200),
        ("localhost:8000", 200),
        ("app.localhost", 200),
        ("mac.example:1", 200),
        ("MAC.example", 200),
        ("evil.example", 421),
        ("evil.example:8000", 421),
        ("192.168.1.5.evil.example:8000", 421),
        ("evil.example:192.168.1.5", 421),
        ("[evil.example]:8000", 421),
        ("[::1].evil.example", 421),
        ("1", 421),
        ("", 421),
    ],
)
@pytest.mark.parametrize("keys", [(), KEYS])
def test_a_server_for_others_answers_to_addresses_and_allowed_names(
    keys: tuple[ApiKey, ...], host: str, status: int
):
    settings = ServerSettings(host="0.0.0.0", allowed_hosts=("mac.example",), api_keys=keys)
    app = OriginGuard(echo, settings, is_loopback=False)
    for method in ("GET", "POST", "OPTIONS"):
        # A page that reached this server by a name of its own has that name in both headers.
        for headers in ({}, {"origin": f"http://{host}"}):
            answered = ask(app, method, headers={"host": host, **headers})
            assert answered.status == status
    assert status == 200 or "--allowed-host" in answered.json["error"]["message"]


def test_a_server_for_others_without_a_key_answers_to_no_name_that_was_not_allowed():
    settings = ServerSettings(host="0.0.0.0", allow_unauthenticated=True)
    app = OriginGuard(echo, settings, is_loopback=False)
    rebound = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
    assert ask(app, "POST", "/v1/chat/completions", rebound).status == 421
    assert ask(app, "GET", "/v1/cache", rebound).status == 421
    assert ask(app, headers={"host": "10.0.0.7:8000"}).status == 200


def test_a_server_for_others_with_a_key_answers_to_any_name_unless_some_are_allowed():
    settings = ServerSettings(host="0.0.0.0", api_keys=KEYS)
    app = OriginGuard(echo, settings, is_loopback=False)
    assert ask(app, headers={"host": "mac.local:8000"}).status == 200


def test_a_server_answers_to_the_name_that_it_listens_on():
    app = OriginGuard(echo, ServerSettings(host="Mac.local"), is_loopback=False)
    asked = {host: ask(app, headers={"host": host}).status for host in ("mac.local:1", "mac")}
    assert asked == {"mac.local:1": 200, "mac": 421}


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://127.0.0.1:8000", 200),  # the server's own page
        ("https://127.0.0.1:8000", 200),  # the same, behind a proxy
        ("http://mine.example", 200),
        ("app://obsidian.md", 200),
        ("http://127.0.0.1:3000", 403),
        ("http://localhost:8000", 403),
        ("https://mine.example", 403),
        ("http://mine.example.evil", 403),
        ("null", 403),
        ("", 403),
        ("http://[", 403),
    ],
)
def test_pages_of_other_origins_can_ask_for_nothing_that_computes(origin: str | None, status: int):
    settings = ServerSettings(cors_origins=("http://mine.example", "app://obsidian.md"))
    app = OriginGuard(echo, settings, is_loopback=True)
    headers = {} if origin is None else {"origin": origin}
    assert ask(app, "POST", "/v1/messages", headers).status == status
    assert ask(app, "DELETE", "/v1/cache", headers).status == status
    # What it reads, a browser keeps from the page unless CORS allows it.
    assert ask(app, "GET", "/v1/models", headers).status == 200


def test_every_origin_may_be_allowed_by_name():
    app = OriginGuard(echo, ServerSettings(cors_origins=("*",)), is_loopback=True)
    assert ask(app, "POST", headers={"origin": "null"}).status == 200


def test_a_preflight_needs_no_key_and_an_answer_without_a_key_can_be_read():
    settings = ServerSettings(api_keys=KEYS, cors_origins=("http://mine.example",))
    app = shielded(echo, settings, is_loopback=True)
    asks = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type, x-stainless-lang",
    }
    allowed = ask(app, "OPTIONS", "/v1/messages", {"origin": "http://mine.example", **asks})
    assert allowed.status == 200
    assert allowed.headers["access-control-allow-origin"] == "http://mine.example"
    assert "x-stainless-lang" in allowed.headers["access-control-allow-headers"]
    assert ask(app, "OPTIONS", "/v1/messages", {"origin": "http://other", **asks}).status == 400
    refused = ask(app, "POST", "/v1/messages", {"origin": "http://mine.example"})
    assert refused.status == 401
    assert refused.headers["access-control-allow-origin"] == "http://mine.example"
    assert "x-request-id" in refused.headers["access-control-expose-headers"]
    headers = {"origin": "http://mine.example", "x-api-key": "sesame"}
    answered = ask(app, "POST", "/v1/messages", headers, [b"{}"])
    assert (answered.status, answered.body) == (200, b"{}")


def test_loopback_is_told_by_name_and_by_address():
    assert all(map(is_loopback_name, ("localhost", "127.0.0.1", "::1", "[::1]", "127.9.9.9")))
    assert not any(map(is_loopback_name, ("0.0.0.0", "::", "10.0.0.1", "example.com", "", "1")))
