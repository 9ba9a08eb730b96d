"""The page in Chromium: texts never run, views have their parts, the keyboard reaches all, 100,000 rows are quick.

`make test-browser` runs these. AREAL_LITE_SCREENSHOTS names a folder for a picture of each view; timings are printed.
"""

from __future__ import annotations
import asyncio
import fcntl
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
import pyarrow
import pytest
from aiohttp import web
from pyarrow import parquet
from areal_lite.tools.inspect.dumps import Dumps
from areal_lite.tools.view import page_server as server
from areal_lite.tools.view.page_data import Answers
from areal_lite.tools.view.single_file import export_page
from benchmarks.dump_index import write_run as write_large_run
from tests.tools.inspect.dump_lines import failed, line, turn, write
from tests.tools.view.page_runs import EVIL, write_evil_run, write_run

pytestmark = pytest.mark.browser

CHROMIUM = os.environ.get("AREAL_LITE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
VIEWS = {
    "list": ("#episodes", ".line:not([hidden]) .c-reward"),
    "failed": ("#episodes?filter=status%3Dfailed", ".line[data-status=failed]"),
    "failures": ("#failures", ".cause .traceback"),
    "curves": ("#curves", ".panel path.stroke"),
    "timeline": ("#timeline?filter=version%3C3", ".timeline rect.e-call"),
    "diagnosis": ("#diagnosis", ".panel rect"),
    "compare": ("#compare", "td.change"),
}
VIEW_KEYS = (
    ("2", "failures"),
    ("3", "curves"),
    ("4", "timeline"),
    ("5", "diagnosis"),
    ("6", "compare"),
    ("1", "episodes"),
)
TABS = {"conversation": ".turn", "tokens": ".toks .tok", "tree": ".tree-turn", "group": ".member", "record": ".record"}
Page = Any


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium, or set AREAL_LITE_CHROMIUM")
    with playwright.sync_playwright() as driver:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Page]:
    """A page on which every error, refused resource and dialog fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    context.set_default_timeout(10_000)
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    page.problems = problems
    yield page
    context.close()
    gone = ("ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_REFUSED")  # the server ended before its page
    assert [each for each in problems if not any(reason in each for reason in gone)] == []


@contextmanager
def serving(*paths: Path) -> Iterator[str]:
    """Serve the page of ``paths`` from a thread, and give its address."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    address: list[str] = []
    stop = asyncio.Event()

    async def main() -> None:
        with Dumps.open(*paths, may_be_empty=True) as dumps:
            runner = web.AppRunner(server.page_app(Answers(dumps)), access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, server.HOST, 0)
            await site.start()
            address.append(f"http://{server.HOST}:{runner.addresses[0][1]}/")
            ready.set()
            await stop.wait()
            await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert ready.wait(60)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    first = write_run(root / "calculator" / "first", versions=8, groups=4)
    return [first, write_run(root / "calculator" / "second", seed=3, skill=2.0, versions=8, groups=4)]


def show(page: Page, address: str, where: str = "") -> None:
    page.goto("about:blank")
    page.goto(address + where)
    page.wait_for_selector("[data-ready]")


def picture(page: Page, name: str) -> None:
    if folder := os.environ.get("AREAL_LITE_SCREENSHOTS"):
        page.wait_for_timeout(300)
        page.screenshot(path=Path(folder) / f"{name}.png")


def total(page: Page) -> int:
    return int(re.sub(r"\D", "", page.inner_text(".total")) or -1)


def until(page: Page, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline
        page.wait_for_timeout(20)


# -- texts


def check_evil(page: Page, address: str, *, scripts_left: int) -> None:
    """Walk through all views of the evil run; every text is there, and none has become an element or has run."""
    forbidden = "iframe, img, object, embed, frame, base, form, [onerror], [onload], [onmouseover], [onfocus]"
    scripts = "script:not([type='application/json'])"

    def check() -> None:
        assert page.evaluate("window.owned") is None
        assert page.locator(forbidden).count() == 0
        assert page.locator(scripts).count() == scripts_left

    show(page, address)
    check()
    for place, text in enumerate(EVIL):
        shown = page.evaluate("(text) => [...text].length && text", text)
        for member in range(2):
            where = f"#episodes?run=e%2Fevil&id=rollout%2F{place}%2F{place}.jsonl%3A{member + 1}"
            for tab, selector in TABS.items():
                page.evaluate("(where) => { location.hash = where; }", f"{where}&tab={tab}")
                page.wait_for_selector(f".detail [role=tab][aria-selected=true]:text-is('{tab.title()}')")
                page.wait_for_selector(f".detail {selector}")
                if tab == "conversation":
                    visible = page.inner_text(".detail-body")
                    start = re.split("[\x00-\x1f\x7f-\x9f\u200b-\u206f\ufeff]", shown.strip())[0].strip()
                    assert visible.count(start) >= 5, (text, visible)
                    assert not set("\u202e\u2066\u200f\u2028\x1b") & set(page.inner_text("body"))
                check()
    for where in ("failures", "curves?extra=train%2F" + EVIL[1].replace(" ", "%20"), "timeline"):
        page.evaluate("(where) => { location.hash = where; }", where)
        page.wait_for_selector(".page h2")
        check()
    page.keyboard.press("/")
    for text in EVIL:
        page.fill("#filter", f'text="{text}')
        page.wait_for_timeout(80)
        check()
        page.evaluate(
            "(text) => { location.hash = `episodes?filter=${text}&sort=${text}&id=${text}&run=${text}`; }", text
        )
        page.wait_for_timeout(80)
        check()


def test_no_text_of_a_dump_runs_or_becomes_markup(page: Page, tmp_path: Path) -> None:
    write_evil_run(tmp_path / "e" / "evil")
    with serving(tmp_path / "e" / "evil") as address:
        check_evil(page, address, scripts_left=1)
    # Wrong filters and missing episodes are answered with status 400, which Chromium logs.
    page.problems[:] = [each for each in page.problems if "400 (Bad Request)" not in each]


def test_no_text_of_an_exported_page_runs_or_becomes_markup(page: Page, tmp_path: Path) -> None:
    write_evil_run(tmp_path / "e" / "evil")
    export_page([tmp_path / "e" / "evil"], tmp_path / "page.html")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    check_evil(page, (tmp_path / "page.html").as_uri(), scripts_left=0)  # it took itself away
    assert {url.partition("#")[0] for url in requests} == {(tmp_path / "page.html").as_uri()}


def test_a_script_that_gets_into_the_page_does_not_run(page: Page, tmp_path: Path) -> None:
    write_run(tmp_path / "x" / "run", versions=1, groups=1)
    with serving(tmp_path) as address:
        show(page, address)
        page.evaluate(
            """() => {
              const script = document.createElement("script");
              script.textContent = "window.owned = 1";
              document.body.append(script);
              const node = document.createElement("div");
              node.setAttribute("onclick", "window.owned = 1");
              document.body.append(node);
              node.click();
            }"""
        )
        assert page.evaluate("window.owned") is None
        assert len(page.problems) == 2 and all("Content Security Policy" in each for each in page.problems)
        page.problems.clear()


# -- views


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_has_its_parts_and_fits_the_window(page: Page, runs: list[Path], scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    with serving(*runs) as address:
        for name, (where, selector) in VIEWS.items():
            show(page, address, where)
            page.wait_for_selector(selector)
            fits(page)
            picture(page, f"{scheme}-{name}")
        show(page, address, "#episodes?filter=turns%3E3%20version%3D5&sort=reward")
        page.wait_for_selector(".line .c-reward")
        page.keyboard.press("Enter")
        for key, (tab, selector) in zip("ctbs", TABS.items(), strict=False):
            page.keyboard.press(key)
            page.wait_for_selector(f".detail {selector}")
            fits(page)
            picture(page, f"{scheme}-{tab}")
        page.keyboard.press("?")
        page.wait_for_selector("dialog[open]")
        picture(page, f"{scheme}-help")
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background))) > 384) == (scheme == "light")


def fits(page: Page) -> None:
    """Assert that nothing is wider than the window, and that all that can be used has a name."""
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, a, input, select, [role=grid], [role=tree], [role=img]")]
          .filter((each) => each.offsetParent !== null)
          .filter((each) => !(each.textContent.trim() || each.getAttribute("aria-label")))
          .map((each) => each.outerHTML)"""
    )
    assert nameless == []


def test_the_theme_button_wins_over_the_system_and_stays(page: Page, runs: list[Path]) -> None:
    with serving(runs[0]) as address:
        show(page, address)
        page.keyboard.press("d")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        show(page, address)
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_tokens_are_coloured_by_what_the_episode_has_and_described(page: Page, tmp_path: Path) -> None:
    sampled = {"logprobs": [-0.1, -3.0], "versions": [3, 4]}
    turns = [turn("prompt"), turn("assistant", turn_idx=1, parent_idx=0, ids=[11, 12], **sampled)]
    write(tmp_path / "r/t/rollout/3/7.jsonl", line(7, 0, turns=turns))
    facts = {"advantages": [[1.0, -1.0]], "clipped": [[None, 1]], "proximal_logprobs": [[-0.1, -2.5]]}
    keys = {"task_id": ["7"], "sample_idx": [0], "reward": [0.5], "token_idx": [[2, 3]]}
    (tmp_path / "r/t/training").mkdir()
    parquet.write_table(pyarrow.table(keys | facts), tmp_path / "r/t/training/4.parquet")
    with serving(tmp_path / "r" / "t") as address:
        show(page, address, "#episodes?run=r%2Ft&id=rollout%2F3%2F7.jsonl%3A1&tab=tokens")
        page.wait_for_selector(".toks .tok")
        choices = page.locator(".token-tools [role=radio]").all_inner_texts()
        named = ["Loss mask", "Log-prob", "Version", "Advantage", "Clipped", "Trainer minus engine"]
        assert choices == [*named, "proximal logprobs", "None"]
        colors = {}
        for choice in choices:
            page.click(f".token-tools [role=radio]:text-is('{choice}')")
            backgrounds = page.evaluate(
                "[...document.querySelectorAll('.toks .tok')].map((each) => each.style.background)"
            )
            colors[choice] = [re.sub(r".*--(\w+)\) (\d+)%.*", r"\1 \2", each) for each in backgrounds[2:]]
        assert colors == {
            "Loss mask": ["accent 24", "accent 24"],
            "Log-prob": ["heat 3", "heat 82"],
            "Version": ["c0 30", "c1 30"],
            "Advantage": ["up 68", "down 68"],
            "Clipped": ["", "up 68"],
            "Trainer minus engine": ["", "up 68"],
            "proximal logprobs": ["heat 3", "heat 82"],
            "None": ["", ""],
        }
        assert "color=none" in page.url
        page.locator(".toks .tok").nth(2).click()
        page.keyboard.press("ArrowRight")
        told = page.inner_text(".token-info").replace("\n", " ")
        assert re.search(r"#\d+ .*id 12 .*loss mask yes .*log-prob -3 \(4.98 %\) .*version 4 .*advantage -1", told), (
            told
        )
        page.keyboard.press("s")
        page.wait_for_selector(".member:has-text('advantage -1 to 1')")
        assert "Trained in step 4" in re.sub(r"\s+", " ", page.inner_text(".facts"))


def test_a_branch_is_chosen_in_the_tree(page: Page, runs: list[Path]) -> None:
    with serving(runs[0]) as address:
        show(page, address, "#episodes?filter=turns%3D4%20sample%3E0&sort=version")
        until(page, lambda: page.locator(".line:not([hidden])").count() > 8)
        page.keyboard.press("Enter")
        page.keyboard.press("b")
        for _ in range(60):
            page.wait_for_selector(".tree-turn")
            if page.locator(".tree-facts .link").count() > 1:
                break
            page.keyboard.press("j")
            page.wait_for_timeout(120)
        page.locator(".tree-facts .link").nth(1).click()
        page.wait_for_selector("[role=radio][aria-checked=true]:has-text('Sequence 2')")


def test_a_failure_links_to_its_episodes(page: Page, runs: list[Path]) -> None:
    with serving(*runs) as address:
        show(page, address, "#failures")
        page.wait_for_selector(".cause")
        for place in range(page.locator(".cause").count()):
            show(page, address, "#failures")
            page.wait_for_selector(".cause")
            expected = int(re.sub(r"\D", "", page.locator(".cause-count").nth(place).inner_text()))
            page.locator(".cause-links a:first-child").nth(place).evaluate("(each) => each.click()")
            page.wait_for_selector(".split:not([hidden])")
            until(page, lambda expected=expected: total(page) == expected)


def test_the_step_under_the_cursor_links_to_its_episodes(page: Page, runs: list[Path]) -> None:
    with serving(runs[0]) as address:
        show(page, address, "#curves")
        page.wait_for_selector(".panel")
        page.focus(".panels")
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        assert page.inner_text(".strip").startswith("Step 3")
        page.keyboard.press("Enter")
        until(page, lambda: page.input_value("#filter") == "scope=rollout version=2")
        until(page, lambda: total(page) > 0)


def test_a_timeline_can_be_zoomed_and_opens_episodes(page: Page, runs: list[Path]) -> None:
    with serving(runs[0]) as address:
        show(page, address, "#timeline?filter=version%3C2")
        page.wait_for_selector(".timeline rect.e-call")
        servers = [page.locator(".timeline .server text").nth(n).text_content() for n in range(2)]
        assert servers == ["http://127.0.0.1:30000", "http://127.0.0.1:30001"]
        before = page.locator(".timeline rect.e-call").count()
        box = page.locator(".timeline").bounding_box()
        page.mouse.move(box["x"] + 200, box["y"] + 80)
        page.mouse.down()
        page.mouse.move(box["x"] + 400, box["y"] + 90)
        page.mouse.up()
        until(page, lambda: page.locator(".timeline rect.e-call").count() < before)
        page.locator(".timeline rect.e-call").first.hover()
        assert "Task" in page.inner_text(".strip")
        page.locator(".timeline rect.e-call").first.click()
        page.wait_for_selector(".detail .turn")


def test_an_exported_page_works_without_a_server(page: Page, runs: list[Path], tmp_path: Path) -> None:
    export_page(runs, tmp_path / "page.html", filter="version<2")
    show(page, (tmp_path / "page.html").as_uri())
    whole = total(page)
    page.keyboard.press("/")
    page.fill("#filter", "status=failed")
    until(page, lambda: 0 < total(page) < whole)
    page.fill("#filter", "reward<1 or reward>2")
    page.wait_for_selector(".error:has-text('an exported page takes terms joined by spaces')")
    page.fill("#filter", "")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    for key, selector in zip("ctbs", TABS.values(), strict=False):
        page.keyboard.press(key)
        page.wait_for_selector(f".detail {selector}")
    for where, selector in (
        ("#failures", ".cause"),
        ("#curves", ".panel"),
        ("#timeline", ".e-call"),
        ("#compare", ".change"),
    ):
        page.evaluate("(where) => { location.hash = where; }", where)
        page.wait_for_selector(selector)


# -- keys, addresses and live runs


def test_the_keyboard_reaches_everything(page: Page, runs: list[Path]) -> None:
    def selected() -> str:
        return page.locator(".line[aria-selected=true]").get_attribute("aria-rowindex")

    with serving(*runs) as address:
        show(page, address)
        page.wait_for_selector(".line .c-reward")
        assert selected() == "1"
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("k")
        assert selected() == "2"
        page.keyboard.press("Shift+G")
        until(page, lambda: selected() == str(total(page)))
        page.keyboard.press("g")
        assert selected() == "1"
        page.keyboard.press("Enter")
        page.wait_for_selector(".detail .turn")
        page.keyboard.press("j")
        until(page, lambda: "jsonl%3A2" in page.url)
        page.keyboard.press("t")
        page.wait_for_selector(".detail .tok")
        page.keyboard.press("Escape")
        assert page.locator(".detail").is_hidden()
        page.keyboard.press("/")
        page.keyboard.type("stat")
        page.wait_for_selector(".suggestion:has-text('status')")
        page.keyboard.press("Tab")
        page.keyboard.type("=failed")
        page.keyboard.press("Enter")
        until(page, lambda: page.locator(".line:not([hidden])").first.get_attribute("data-status") == "failed")
        assert page.evaluate("document.activeElement.getAttribute('role')") == "grid"
        page.keyboard.press("Escape")
        until(page, lambda: page.input_value("#filter") == "")
        for key, name in VIEW_KEYS:
            page.keyboard.press(key)
            assert re.split("[#?]", page.url)[1] == name
        page.keyboard.press("?")
        assert page.locator("dialog[open]").count() == 1
        page.keyboard.press("Escape")
        assert page.locator("dialog[open]").count() == 0
    page.problems[:] = [each for each in page.problems if "400 (Bad Request)" not in each]  # while the filter was typed


def test_the_address_is_the_state_and_back_goes_back(page: Page, runs: list[Path]) -> None:
    with serving(*runs) as address:
        show(page, address)
        page.fill("#filter", "status=failed")
        page.wait_for_selector(".line[aria-rowindex='1'][data-status=failed]")
        page.click("button.sort:has-text('Tokens')")
        page.wait_for_selector("[aria-sort=descending]:has-text('Tokens')")
        page.locator(".line:not([hidden])").first.click()
        page.wait_for_selector(".detail .failure")
        page.keyboard.press("t")
        page.wait_for_selector(".detail .tok")
        where, title = page.url, page.inner_text(".detail h2")
        show(page, where)
        page.wait_for_selector(".detail .tok")
        assert (page.inner_text(".detail h2"), page.input_value("#filter")) == (title, "status=failed")
        page.click("nav >> text=Curves")
        page.wait_for_selector(".panel")
        page.go_back()
        page.wait_for_selector(".detail .tok")


def test_words_search_the_texts_and_any_number_can_be_sorted_by(page: Page, runs: list[Path]) -> None:
    with serving(runs[0]) as address:
        show(page, address)
        whole = total(page)
        page.fill("#filter", "IN MY HEAD")
        until(page, lambda: 0 < total(page) < whole)
        page.keyboard.press("Enter")
        until(page, lambda: page.input_value("#filter") == 'text~"(?i)IN\\s+MY\\s+HEAD"')
        page.keyboard.press("Escape")
        until(page, lambda: total(page) == whole)
        page.select_option(".order", "reward/correct")
        page.wait_for_selector(".sort[aria-sort=descending]:has-text('reward/correct')")
        until(page, lambda: page.locator(".line[aria-rowindex='1'] .c-sorted").inner_text() == "1")
        page.click(".sort:has-text('reward/correct')")
        until(page, lambda: page.locator(".line[aria-rowindex='1'] .c-sorted").inner_text() == "0")
        page.select_option(".order", "")
        page.wait_for_selector(".c-sorted", state="hidden")
        version = page.locator(".line[aria-rowindex='1'] .c-version")
        until(page, lambda: version.inner_text() == "7")


def test_a_row_shows_prompt_and_answer_and_a_cause_only_where_there_is_one(page: Page, tmp_path: Path) -> None:
    turns = [turn("prompt", CHAT), turn("assistant", "<think>so</think>It is 4<|im_end|>", stop_reason="length")]
    write(tmp_path / "r/t/rollout/3/7.jsonl", line(7, 0, turns=turns, reward=-12.345), failed(7, 1))
    with serving(tmp_path / "r" / "t") as address:
        show(page, address)
        first, second = page.locator(".line .c-text").all()[:2]
        assert first.inner_text().split("\n") == ["cut off", "What is 2+2?", "It is 4"]
        assert second.inner_text().split("\n")[0] == "TimeoutError: too slow"
        assert first.locator(".cause-of").count() == 0
        assert page.locator(".line[aria-rowindex='1'] .c-reward").inner_text() == "-12.345"


def test_a_slow_answer_shows_a_loading_sign(page: Page, runs: list[Path]) -> None:
    with serving(runs[0]) as address:
        show(page, address)
        assert page.locator("body[data-loading]").count() == 0
        page.route("**/api/summary*", lambda route: (page.wait_for_timeout(700), route.continue_()))
        page.evaluate("() => { location.hash = 'failures'; }")
        page.wait_for_selector("body[data-loading]")
        page.wait_for_selector("body:not([data-loading]) .cause")


def test_calls_in_a_system_prompt_are_text_and_json_of_the_environment_is_indented(page: Page, tmp_path: Path) -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    turns = [turn("prompt", CHAT.replace("Be brief", call)), turn("assistant", call, turn_idx=1, parent_idx=0)]
    turns += [turn("environment", '{"sum":4}', turn_idx=2, parent_idx=1)]
    write(tmp_path / "r/t/rollout/3/7.jsonl", line(7, 0, turns=turns))
    with serving(tmp_path / "r" / "t") as address:
        show(page, address, "#episodes?run=r%2Ft&id=rollout%2F3%2F7.jsonl%3A1")
        page.wait_for_selector(".turn")
        roles = page.locator(".turn:has(.frame.tool_call) .turn-role").all_inner_texts()
        assert roles == ["assistant"]
        assert page.locator(".turn").last.locator("pre").inner_text() == '{\n "sum": 4\n}'
        names = []
        for key, heads in (("c", ".turn-role"), ("t", ".toks-title b"), ("b", ".tree-facts b")):
            page.keyboard.press(key)
            page.wait_for_selector(f".detail-body {heads}")
            names.append(page.locator(heads).all_inner_texts())
        assert names == [["system", "user", *NAMES], ["system, user", *NAMES], ["system, user", *NAMES]]
        assert page.locator(".what").all_inner_texts() == ["calls add", "JSON of sum"]


CHAT = "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
NAMES = ["assistant", "environment"]


def test_what_the_run_stopped_is_no_failure(page: Page, tmp_path: Path) -> None:
    stopped = line(7, 1, status="cancelled", error_kind="cancelled", error="the run ended", reward=None)
    write(tmp_path / "r/t/rollout/3/7.jsonl", failed(7, 0), stopped, stopped | {"sample_idx": 2})
    with serving(tmp_path / "r" / "t") as address:
        show(page, address, "#failures")
        page.wait_for_selector("h2:has-text('Stopped by the run')")
        assert page.inner_text(".page > .quiet").startswith("1 sequence not accepted for 1 reason.")
        bars = [page.locator(f".cause[data-status={each}] .bar") for each in ("failed", "cancelled")]
        red, grey = (bar.evaluate("(each) => getComputedStyle(each).backgroundColor") for bar in bars)
        assert red != grey


def test_runs_without_a_row_in_common_say_what_to_do(page: Page, tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / name / "rollout/1/1.jsonl", line(1, turns=[turn("prompt", name, ids=[ord(name)])]))
    with serving(tmp_path) as address:
        show(page, address, "#compare")
        assert "let both evaluate the same held-out rows" in page.inner_text(".advice")


def test_a_timeline_tells_what_the_environment_said_between_calls(page: Page, runs: list[Path]) -> None:
    with serving(runs[0]) as address:
        show(page, address, "#timeline?filter=version%3C2")
        page.wait_for_selector(".e-seen")
        page.locator("rect.e-seen[data-call]").first.hover()
        until(page, lambda: "tool result" in page.inner_text(".strip"))
        assert "call, failed" in page.inner_text(".legend")


SCREENS = {
    **VIEWS,
    **{
        tab: (
            f"#episodes?filter=turns%3D4&run=calculator%2Ffirst&id=rollout%2F7%2F33.jsonl%3A1&tab={tab}",
            f".detail {find}",
        )
        for tab, find in TABS.items()
    },
}


@pytest.mark.parametrize("width", [390, 1024, 1920])
def test_every_view_fits_a_phone_a_laptop_and_a_large_screen(page: Page, runs: list[Path], width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844 if width < 600 else 768 if width < 1100 else 1080})
    with serving(*runs) as address:
        for name, (where, selector) in SCREENS.items():
            show(page, address, where)
            page.wait_for_selector(selector)
            picture(page, f"{name}-{width}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            cut = page.evaluate(_CUT)
            assert cut == [], name
            if name in TABS:
                assert page.locator(".detail").bounding_box()["width"] > min(width, 560) - 40


_CUT = """() => [...document.querySelectorAll(".c-reward, .brand, .c-run, .nav a, .tabs button, .big-reward")]
  .filter((each) => each.offsetParent)
  .filter((each) => each.scrollWidth > each.clientWidth + 1 || each.getBoundingClientRect().right > innerWidth)
  .map((each) => each.outerHTML)"""


def test_a_wrong_filter_says_why_and_keeps_the_rows(page: Page, runs: list[Path]) -> None:
    with serving(runs[0]) as address:
        show(page, address)
        before = page.locator(".line:not([hidden])").count()
        page.fill("#filter", "rewrd<0.5")
        page.wait_for_selector(".error:has-text(\"did you mean 'reward'?\")")
        assert page.locator(".line:not([hidden])").count() == before
        page.fill("#filter", "reward<0.5")
        page.wait_for_selector(".error", state="hidden")
    page.problems[:] = [each for each in page.problems if "400 (Bad Request)" not in each]


def test_a_run_that_writes_is_followed(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REFRESH_S", 0.1)
    root = write_run(tmp_path / "live" / "run", versions=1, groups=2)
    with serving(root) as address:
        show(page, address)
        page.wait_for_selector(".live[data-connected=true]", state="attached")
        assert page.inner_text(".live") == ""
        with (root / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            page.wait_for_selector(".live.on:has-text('live')")
        page.wait_for_selector(".live:not(.on)", state="attached")
        before = total(page)
        page.keyboard.press("f")
        timings = {"queued_s": 0.0, "run_s": 1.0, "finished_at": 2e9}
        write(root / "rollout/7/999.jsonl", line(999, status="cancelled", timings=timings))
        until(page, lambda: total(page) == before + 1)
        assert page.locator(".line[aria-rowindex='1'] .c-task").inner_text() == "999"
        page.wait_for_selector(".chip:has-text('cancelled')")


def test_a_run_that_begins_later_is_added(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REFRESH_S", 0.1)
    write_run(tmp_path / "live" / "first", versions=1, groups=2)
    with serving(tmp_path) as address:
        show(page, address, "#episodes?filter=status%3Daccepted")
        page.wait_for_selector(".live[data-connected=true]", state="attached")
        write_run(tmp_path / "live" / "second", versions=1, groups=2)
        page.wait_for_selector(".brand:has-text('2 runs')")
        assert page.input_value("#filter") == "status=accepted"


# -- 100,000 episodes


@pytest.mark.timeout(600)
def test_100_000_episodes_are_shown_filtered_and_scrolled_at_once(page: Page, tmp_path: Path) -> None:
    folder = Path(os.environ.get("AREAL_LITE_LARGE_RUN") or tmp_path / "large" / "run")
    if not folder.exists():
        write_large_run(folder, 100_000)
    with serving(folder) as address:
        page.goto(address)
        page.wait_for_selector(".line .c-reward")
        until(page, lambda: total(page) == 100_000)
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        rows = page.evaluate("performance.now()")
        page.wait_for_timeout(1500)  # the counts of the chips
        figures = {"first paint": paint, "rows and count": rows}
        for filter in ("reward<0.5", "status=failed error~Timeout", "turns>3 tokens>1000", "reward>0.9 version>=10"):
            figures[filter] = page.evaluate(_FILTER, filter)
        page.fill("#filter", "")
        until(page, lambda: total(page) == 100_000)
        frames = page.evaluate(_SCROLL)
        figures |= {"median frame": frames["median"], "95th percentile": frames["p95"]}
        figures["jump to row 77,000"] = page.evaluate(_JUMP)
        assert page.locator(".line").count() < 100
        print("\n100,000 episodes, milliseconds:", {name: round(value, 1) for name, value in figures.items()})
        assert figures["first paint"] < 10_000 and figures["median frame"] < 250


_FILTER = """async (filter) => {
  const input = document.querySelector("#filter");
  const total = document.querySelector(".total");
  const before = total.textContent;
  input.value = filter;
  const begin = performance.now();
  input.dispatchEvent(new Event("input"));
  while (total.textContent === before) await new Promise((done) => setTimeout(done, 2));
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
  return performance.now() - begin;
}"""
_SCROLL = """async () => {
  const body = document.querySelector(".list-body");
  const frames = [];
  let last = performance.now();
  for (let i = 0; i < 240; i += 1) {
    body.scrollTop += 180;
    await new Promise((done) => requestAnimationFrame(done));
    frames.push(performance.now() - last);
    last = performance.now();
  }
  frames.sort((a, b) => a - b);
  return { median: frames[120], p95: frames[228] };
}"""
_JUMP = """async () => {
  const body = document.querySelector(".list-body");
  const begin = performance.now();
  body.scrollTop = 77_000 * 28;
  await new Promise((done) => requestAnimationFrame(done));
  const cells = () => [...document.querySelectorAll(".line:not([hidden]) .c-status")];
  const shown = () => cells().every((each) => each.textContent !== "…");
  while (!shown()) await new Promise((done) => setTimeout(done, 2));
  return performance.now() - begin;
}"""
