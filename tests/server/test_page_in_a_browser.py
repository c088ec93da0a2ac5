"""The page at ``/`` in a real browser: headless Chromium, driven by selenium."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from helpers.adapted_models import adapted_model
from helpers.engine_runs import between_steps, greedy, prompt
from helpers.servers import ScriptedEngine, make_service, serving, wait_until
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service as Chromedriver
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver

from mlx_paged import SamplingParams
from mlx_paged.engine.stats import CACHED, MAX_HOLDERS
from mlx_paged.server.app import App
from mlx_paged.server.service import Service
from mlx_paged.server.settings import ApiKey, ServerSettings

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or CHROMEDRIVER is None, reason="Chromium or its driver is not installed"
    ),
]
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
]
ENDLESS = SamplingParams(max_tokens=900, ignore_eos=True)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    options = Options()
    options.binary_location = str(CHROMIUM)
    for flag in (*QUIET, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Chromedriver(CHROMEDRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = make_service(kv_cache_bytes="300blocks", max_num_seqs=8, num_history_tokens=10_000)
    with service.engine:
        yield service


@pytest.fixture(scope="module")
def url(service: Service) -> Iterator[str]:
    with serving(App(service)) as url:
        yield url


@pytest.fixture
def page(browser: WebDriver, service: Service, url: str) -> Iterator[Page]:
    page = Page(browser)
    page.open(url)
    yield page
    browser.get("about:blank")
    service.engine.engine.abort_all()
    wait_until(lambda: service.engine.stats().num_running == 0)


class Page:
    """The page, as a user sees it."""

    def __init__(self, browser: WebDriver):
        self.browser = browser

    def open(self, url: str) -> None:
        self.browser.get("about:blank")
        self.browser.get_log("browser")  # forgets what was logged before
        self.browser.get_log("performance")
        self.browser.get(url)

    def script(self, text: str, *arguments: Any) -> Any:
        return self.browser.execute_script(text, *arguments)

    def text(self, selector: str) -> str:
        return str(self.script(f"return document.querySelector({selector!r})?.innerText ?? ''"))

    def waits_for(self, selector: str, is_so: Callable[[str], object]) -> str:
        """The text of an element, when it is as wanted."""
        end = time.monotonic() + 15
        while not is_so(text := self.text(selector)):
            assert time.monotonic() < end, f"{selector} is {text!r}; {self.errors()}"
            time.sleep(0.05)
        return text

    def is_live(self) -> None:
        self.waits_for("#status", "Live".__eq__)

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log("browser")]

    def requested(self) -> set[str]:
        """The addresses that the page asked for."""
        events = [json.loads(entry["message"]) for entry in self.browser.get_log("performance")]
        return {
            event["message"]["params"]["request"]["url"]
            for event in events
            if event["message"]["method"] == "Network.requestWillBeSent"
        }

    def cells(self) -> list[str]:
        """The colour in the middle of each cell of the grid, as the name of its legend."""
        return list(
            self.script("""
                const canvas = document.getElementById("grid"), data = canvas.dataset;
                const context = canvas.getContext("2d"), scale = canvas.width / canvas.clientWidth;
                const names = {};
                for (const mark of document.querySelectorAll(".legend i"))
                    names[getComputedStyle(mark).backgroundColor] = mark.id.slice(2);
                return [...Array(Number(data.cells)).keys()].map((i) => {
                    const step = Number(data.cell) + Number(data.gap), half = data.cell / 2;
                    const x = (i % data.columns) * step + half;
                    const y = Math.floor(i / data.columns) * step + half;
                    const pixel = context.getImageData(x * scale, y * scale, 1, 1).data;
                    const color = `rgb(${pixel[0]}, ${pixel[1]}, ${pixel[2]})`;
                    return names[color] || color;
                });
            """)
        )


def names_of(blocks: bytes) -> list[str]:
    """What the legend calls each block of a view."""
    names = []
    for byte in blocks:
        holders = byte & MAX_HOLDERS
        floor = next((least for least in (5, 3, 2, 1) if holders >= least), 0)
        names.append(f"held{floor}" if floor else "cached" if byte & CACHED else "empty")
    return names


def start_streams(service: Service, prompts: list[str], params: SamplingParams) -> list[Any]:
    """Requests that run and stay; their blocks settle when the tests stop the engine's steps."""
    streams = [service.engine.stream(prompt, params) for prompt in prompts]
    for stream in streams:
        next(stream)
    return streams


def test_it_loads_without_an_error_and_asks_nobody_else(page: Page, url: str):
    page.is_live()
    assert page.text("#model") == "demo"
    assert page.browser.title == "demo · mlx_paged"
    assert page.errors() == []
    asked = page.requested()
    assert asked and all(
        address.startswith((f"{url}/", "data:image/svg+xml")) for address in asked
    ), asked


def test_the_grid_shows_the_pool_block_by_block(page: Page, service: Service):
    prefix = "You are a helpful assistant. " * 12
    for _ in service.engine.stream("A story that is over. " * 9, SamplingParams(max_tokens=2)):
        pass
    streams = start_streams(service, [prefix + name for name in "abcdef"], ENDLESS)
    start_streams(service, ["Alone. " * 20], ENDLESS)
    page.is_live()
    with between_steps(service.engine.engine):
        expected = names_of(service.engine.view().blocks)
        assert {"held1", "held5", "cached", "empty"} <= set(expected)
        end = time.monotonic() + 10
        while (got := page.cells()) != expected and time.monotonic() < end:
            time.sleep(0.1)
        assert got == expected
        held = sum(name.startswith("held") for name in expected)
        assert page.text("#n-held") == str(held)
        assert page.text("#n-cached") == str(expected.count("cached"))
        assert page.text("#n-empty") == str(expected.count("empty"))
        # By the keyboard, too.
        page.script("document.getElementById('grid').focus()")
        page.browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
        words = {"empty": "empty", "cached": "free, cached"}
        assert page.text("#readout").startswith(f"Block 1: {words.get(expected[0], 'held by ')}")
    for stream in streams:
        stream.close()


def test_requests_are_listed_while_they_run(page: Page, service: Service):
    stream = service.engine.stream("Hello there", ENDLESS, request_id="<b>mine</b>")
    next(stream)
    row = page.waits_for("#requests tbody tr", lambda text: text)
    assert row.split("\t")[:2] == ["<b>mine</b>", "running"]  # as text, not as HTML
    page.waits_for(".tile:nth-child(2) .value", lambda text: text.startswith("1"))
    page.waits_for(".tile:nth-child(1) .value", lambda text: float(text.split("/")[0]) > 0)
    stream.close()
    page.waits_for("#no-requests", lambda text: "No request is running" in text)
    assert page.errors() == []


def test_a_table_of_many_requests_ends_after_twenty(browser: WebDriver):
    service, page = make_service(kv_cache_bytes="2000blocks", max_num_seqs=30), Page(browser)
    with service.engine, serving(App(service)) as url:
        page.open(url)
        page.is_live()
        streams = [service.engine.stream("Hello there", ENDLESS) for _ in range(30)]
        for stream in streams:
            next(stream)
        page.waits_for("#requests-more", lambda text: text == "and 10 more")
        rows = page.script("return document.querySelectorAll('#requests tbody tr').length")
        assert rows == 20
        for stream in streams:
            stream.close()
        page.waits_for("#requests-more", "".__eq__)
        assert page.errors() == []
        browser.get("about:blank")


def test_a_hidden_page_asks_for_nothing(page: Page):
    page.is_live()
    page.script("""
        Object.defineProperty(document, "hidden", {value: true, configurable: true});
        document.dispatchEvent(new Event("visibilitychange"));
    """)
    assert page.text("#status") == "Paused"
    time.sleep(0.2)
    page.requested()
    time.sleep(1.3)
    assert page.requested() == set()
    page.script("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    page.is_live()


def test_it_comes_back_when_the_server_does(browser: WebDriver, service: Service):
    page = Page(browser)
    app = App(service)
    with serving(app) as url:
        page.open(url)
        page.is_live()
    port = int(url.rpartition(":")[2])
    page.waits_for("#status", lambda text: "can't be reached" in text)
    assert page.script("return document.body.hasAttribute('data-stale')")
    with serving(app, port=port):
        page.is_live()
        assert not page.script("return document.body.hasAttribute('data-stale')")


def test_it_asks_for_a_key_where_the_server_wants_one(browser: WebDriver, service: Service):
    settings = ServerSettings(api_keys=(ApiKey("me", "secret"),))
    locked = App(replace(service, settings=settings))
    page = Page(browser)
    with serving(locked) as url:
        page.open(url)
        page.waits_for("#status", "This server requires an API key.".__eq__)
        for key, expected in (("wrong", "The API key is wrong."), ("secret", "Live")):
            field = browser.find_element("id", "key-field")
            field.clear()
            field.send_keys(key, Keys.ENTER)
            page.waits_for("#status", expected.__eq__)
        assert not browser.find_element("id", "key").is_displayed()
        page.open(url)  # The tab remembers it.
        page.is_live()
        page.script("sessionStorage.clear()")


@pytest.mark.parametrize("width", [360, 700, 1400])
def test_it_fits_the_width_of_the_window(page: Page, width: int):
    command = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", command)  # type: ignore[attr-defined]
    try:
        page.is_live()
        assert page.script("return document.documentElement.scrollWidth") <= width
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})  # type: ignore[attr-defined]


def test_an_answer_streams_in_and_says_what_was_cached(page: Page, service: Service):
    page.is_live()
    for number in range(2):
        page.browser.find_element("id", "prompt").send_keys("Who are you?", Keys.ENTER)
        figures = page.waits_for(
            f".turn.assistant:nth-of-type({2 * number + 2}) .figures", lambda text: text
        )
        assert re.match(r"\d+ of \d+ prompt tokens from the cache · \d+ tokens", figures)
    assert int(figures.split()[0]) > 0, "the second turn found the first"
    assert len(page.text(".turn.assistant .text")) > 10
    page.waits_for(
        "#prompts li:nth-child(1)", lambda text: re.match(r"\d+ of \d+ tokens cached", text)
    )
    assert page.errors() == []


def test_drafts_are_shown_where_they_are_made(browser: WebDriver):
    service = make_service(kv_cache_bytes="300blocks", num_draft_tokens=4)
    with service.engine, serving(App(service)) as url:
        page = Page(browser)
        page.open(url)
        page.is_live()
        assert "drafts" not in page.text("#tiles")
        text = "repeat: one two three four. one two three four. one two three four. one two"
        page.browser.find_element("id", "prompt").send_keys(text, Keys.ENTER)
        page.waits_for(".turn.assistant .figures", lambda text: re.search(r"· \d+ by drafts", text))
        shown = r"tokens so far, \d\.\d per step with drafts, accepted \d+%(, \d+%)*"
        page.waits_for(".tile:nth-child(1)", lambda text: re.search(shown, text))
        assert page.errors() == []
        browser.get("about:blank")


def test_stop_aborts_the_answer(page: Page, service: Service):
    page.is_live()
    engine = service.engine
    assert isinstance(engine, ScriptedEngine)
    engine.scripts.append(service.tokenizer.encode("and so on, " * 200))
    page.browser.find_element("id", "prompt").send_keys("Go on", Keys.ENTER)
    page.waits_for(".turn.assistant .text", lambda text: text)
    num_aborted = service.engine.stats().num_finished["abort"]
    page.browser.find_element("id", "send").click()
    page.waits_for(".turn.assistant .figures", lambda text: "stopped" in text)
    wait_until(lambda: service.engine.stats().num_finished["abort"] == num_aborted + 1)
    wait_until(lambda: service.engine.stats().num_used_blocks == 0)
    assert page.text("#send") == "Send"


def test_it_says_that_states_were_missing(browser: WebDriver):
    model, shared = adapted_model("qwen3_next"), prompt(50, 1)
    service = make_service(model=model, block_size=8, num_history_tokens=1000)
    with service.engine as engine, serving(App(service)) as url:
        for number, tokens in enumerate((shared, [*shared[:30], *prompt(9, 5)])):
            engine.engine.add_request(str(number), tokens, greedy(1))
            wait_until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
        page = Page(browser)
        page.open(url)
        page.waits_for("#pool-size", lambda text: "3 recurrent states kept" in text)
        page.waits_for(
            ".tile:nth-child(4)", lambda text: "24 recomputed for lack of a state" in text
        )
        page.waits_for("#prompts", lambda text: "the recurrent state was not kept" in text)
        browser.get("about:blank")
