"""The page as a real browser shows it."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest

from dvp_rl.contract.http import ReplicaState
from dvp_rl.monitor import runs
from dvp_rl.monitor.completions import MAX_STEPS
from dvp_rl.transport.broker import Broker
from dvp_rl.transport.embedded import EmbeddedBroker
from dvp_rl.transport.replicas import ReplicaBeat, ReplicaRegistry
from dvp_rl.transport.runs import purge_run
from tests.integration.monitor.process import HOSTILE, Monitor, bury, write_metrics
from tests.integration.transport.rig import Harness, Rig
from tests.kit.browser import LOW_CONTRAST, Browser, chromium, running
from tests.kit.records import write_completions
from tests.kit.tokens import TOKEN
from tests.kit.wait import WITHIN_S

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine (apt-get install chromium)")

LIVE = "document.getElementById('link')?.textContent === 'live'"
UNNAMED = """
[...document.querySelectorAll("button, [tabindex], svg[role=img], section")]
  .filter((node) => !node.hidden && !(node.getAttribute("aria-label") || node.getAttribute("aria-labelledby")
    || node.textContent.trim())).map((node) => node.outerHTML.slice(0, 80))
"""

GRIDS = """
[...document.querySelectorAll("#curves .plot")].filter((plot) => {
  const [rows, columns] = ["rows", "columns"].map((name) => plot.querySelectorAll(`.${name} span`).length);
  return rows < 2 || columns < 2 || plot.querySelectorAll(".grid").length !== rows + columns;
}).map((plot) => plot.innerText)
"""
CHOOSER = "document.getElementById('completions-step')"
NOTE = "document.getElementById('completions-note').textContent"
PROMPT = "document.querySelector('#completions .prompt')"
TEXT = "document.querySelector('#completions pre:not(.prompt)')?.textContent"
FAIL_ONCE = """
(() => {
  const real = window.fetch;
  window.fetch = () => { window.fetch = real; return Promise.reject(new Error("lost")); };
})()
"""
OVERLAPS = """
[...document.querySelectorAll("#curves .plot")].flatMap((plot) => {
  const labels = [...plot.querySelectorAll("span")].map((label) => [label.textContent, label.getBoundingClientRect()]);
  return labels.flatMap(([one, a], index) => labels.slice(index + 1)
    .filter(([, b]) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
    .map(([other]) => `${one} and ${other}`));
})
"""


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (400, False), (400, True)])
async def test_the_page_is_whole_legible_and_fits(
    staged: Rig, broker_url: str, tmp_path: Path, width: int, dark: bool
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    write_metrics(metrics, 200)
    beat = ReplicaBeat("replica-2", ReplicaState.SERVING, f"{staged.run_id}:7:ab", in_flight=0, wrong=HOSTILE)
    await ReplicaRegistry(staged.broker).beat(beat)
    with Monitor(tmp_path, broker_url, staged.run_id, "--metrics-file", str(metrics)) as monitor:
        await asyncio.to_thread(_look, monitor.url, staged.run_id, tmp_path, width, dark)


def _look(url: str, run_id: str, folder: Path, width: int, dark: bool) -> None:
    with running(folder) as browser:
        browser.open(url, width=width, dark=dark)
        browser.until(LIVE)
        browser.until("document.querySelectorAll('#curves figure').length === 11")
        text = browser.evaluate("document.body.innerText")
        expected = {
            run_id,
            "wrong weights",
            "replicas behind",
            "step 42",
            "replica-1",
            "1 (too old)",
            HOSTILE[:20],
            "KL",
        }
        expected.add("v7 (wrong)")
        assert {words for words in expected if words not in text} == set()
        assert browser.evaluate("document.getElementById('verdict').className") == "card warn"
        assert browser.evaluate("document.querySelectorAll('#letters img').length") == 0
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(19, 20, 23)" if dark else "rgb(247, 247, 245)"
        )
        histogram = "document.querySelector('#curves figure:last-child svg').getAttribute('aria-label')"
        units = "[...document.querySelectorAll('#curves .unit')].map((unit) => unit.textContent)"
        assert browser.evaluate(units)[:3] == ["reward", "nats per token", "share of sequences"]
        assert browser.evaluate(GRIDS) == []
        assert browser.evaluate(OVERLAPS) == []
        assert browser.evaluate(histogram) == "Staleness of trained groups: 86 % at 0; 13 % at 1; 2 % at 2"
        assert browser.evaluate(LOW_CONTRAST) == []
        assert browser.evaluate(UNNAMED) == []
        # Without a token nothing can be changed here, and the page says so.
        browser.until("document.getElementById('dead-note').textContent.includes('need a token of scope operate')")
        assert browser.evaluate("[...document.querySelectorAll('#letters button')].every((b) => b.hidden)") is True
        browser.screenshot(folder / "page.png")
        assert (folder / "page.png").stat().st_size > 10_000
        assert browser.problems == []


@pytest.mark.parametrize("width", [1200, 400])
async def test_a_run_with_episodes_has_a_box_for_them(staged: Rig, broker_url: str, tmp_path: Path, width: int) -> None:
    loop = asyncio.get_running_loop()

    async def play() -> None:
        await staged.submit_episodes(20, n=3)
        await Harness(staged.broker).taken()

    def look() -> None:
        with running(tmp_path) as browser:
            browser.open(monitor.url, width=width)
            browser.until(LIVE)
            browser.until("document.getElementById('jobs-sub').textContent !== ''")
            assert browser.evaluate("document.getElementById('episodes').getClientRects().length") == 0
            asyncio.run_coroutine_threadsafe(play(), loop).result(WITHIN_S)
            browser.until("document.getElementById('episodes-sub').textContent.includes('1 played')")
            text = browser.evaluate("document.getElementById('episodes').innerText").strip()
            assert re.fullmatch(r"Episodes\s+2\s+waiting · 1 played · oldest \d+ s · silent \d+ s", text)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.evaluate(LOW_CONTRAST) == []
            browser.screenshot(tmp_path / "episodes.png")
            assert browser.problems == []

    with Monitor(tmp_path, broker_url, staged.run_id) as monitor:
        await asyncio.to_thread(look)


async def test_letters_are_replayed_and_dropped_with_the_keyboard(staged: Rig, broker_url: str, tmp_path: Path) -> None:
    with Monitor(tmp_path, broker_url, staged.run_id, token=TOKEN) as monitor:
        await asyncio.to_thread(_mend, monitor)
    assert await staged.length(staged.broker.keys.dead) == 1
    assert (await staged.counter("replayed"), await staged.length(staged.broker.keys.jobs)) == (1, 7)


def _mend(monitor: Monitor) -> None:
    with running(monitor.folder) as browser:
        browser.open(f"http://operator:{TOKEN}@127.0.0.1:{monitor.port}/")
        browser.until(LIVE)
        cards = "document.querySelectorAll('#letters li').length"
        browser.until(f"{cards} === 3")
        browser.until("!document.querySelector('#letters button').hidden")
        assert browser.evaluate("document.getElementById('dead-note').textContent") == ""
        browser.evaluate("document.getElementById('link').focus()")
        for _ in range(3):
            browser.press("Tab")
            if browser.evaluate("document.activeElement.textContent") == "Replay":
                break
        assert browser.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Replay job ")
        browser.press("Enter")
        browser.until(f"{cards} === 2")
        browser.until("document.getElementById('dead-note').textContent.includes('is back in the queue')")
        browser.evaluate("document.querySelectorAll('#letters button')[1].focus()")
        browser.press("Enter")
        browser.until(f"{cards} === 1")
        browser.until("document.getElementById('dead-note').textContent.includes('is dropped')")
        assert browser.problems == []


async def test_completions_follow_the_newest_step(broker_url: str, run_id: str, tmp_path: Path) -> None:
    file = tmp_path / "completions.jsonl"
    prompt = f"{HOSTILE}\n" * 40
    write_completions(file, [1, 11], prompt)
    with Monitor(tmp_path, broker_url, run_id, "--completions-file", str(file)) as monitor:
        await asyncio.to_thread(_read_completions, monitor.url, file, prompt, tmp_path)


def _read_completions(url: str, file: Path, prompted: str, folder: Path) -> None:
    with running(folder) as browser:
        browser.open(url, width=400)
        browser.until(f"{TEXT} === 'The sum of step 11 is 95'")
        assert browser.evaluate(f"{PROMPT}.textContent") == prompted
        seen = f"{PROMPT}.firstChild.getBoundingClientRect().bottom <= {PROMPT}.getBoundingClientRect().bottom + 1"
        assert browser.evaluate(f"{PROMPT}.scrollHeight > {PROMPT}.clientHeight && {seen}"), (
            "a long prompt shows its end"
        )
        marks = "[...document.querySelectorAll('#completions mark')].map((mark) => mark.className)"
        assert browser.evaluate(marks) == ["p1", "p2", "p3"]
        legend = browser.evaluate("document.getElementById('completions-legend').textContent")
        assert legend.endswith("at least 0.1 % 1 % 10 % of the probability. In italics: given by the environment.")
        facts = browser.evaluate("document.querySelector('#completions dl').innerText")
        assert "advantage\n0.5" in facts
        assert "trained" in facts
        write_completions(file, [1, 11, 21])
        browser.until(f"{TEXT} === 'The sum of step 21 is 95'")
        browser.evaluate(f"{CHOOSER}.value = 1; {CHOOSER}.dispatchEvent(new Event('change'))")
        browser.until(f"{TEXT} === 'The sum of step 1 is 95'")
        write_completions(file, [1, 11, 21, 31])
        browser.until(f"{CHOOSER}.options.length === 4")
        assert browser.evaluate(f"{CHOOSER}.value") == "1", "it stays with the step that the reader has chosen"
        assert browser.evaluate(TEXT) == "The sum of step 1 is 95"
        assert browser.evaluate("document.documentElement.scrollWidth") <= 400
        assert browser.evaluate(LOW_CONTRAST) == []
        file.unlink()
        browser.until("document.getElementById('completions').children.length === 0")
        assert "No such file" in browser.evaluate(NOTE)
        write_completions(file, [1])
        browser.until(f"{TEXT} === 'The sum of step 1 is 95'")
        assert browser.problems == []


async def test_the_reader_changes_to_another_run(
    own_broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "LOOK_EVERY_S", 0.1)
    (tmp_path / "second").mkdir()
    write_metrics(tmp_path / "second" / "metrics.jsonl", 3)
    files = "--metrics-file", str(tmp_path / "{run}" / "metrics.jsonl")
    async with await Broker.connect(own_broker.url, "first"), await Broker.connect(own_broker.url, "second") as second:
        with Monitor(tmp_path, own_broker.url, "first", *files) as monitor, running(tmp_path) as browser:
            await asyncio.to_thread(_change_runs, browser, monitor.url)
            await purge_run(second, by="test")
            await asyncio.to_thread(_find_the_way_back, browser)


def _link(name: str) -> str:
    return f"document.querySelector('#runs a[href=\"?run={name}\"]')"


def _shows(name: str) -> str:
    return f"document.getElementById('run')?.textContent === '{name}'"


def _change_runs(browser: Browser, url: str) -> None:
    current = "document.querySelector('#runs a[aria-current]')?.textContent"
    browser.open(url, width=400)
    browser.until(f"{_link('second')} !== null && {current} === 'first'")
    browser.evaluate("document.querySelector('#runs summary').click()")
    row = browser.evaluate(f"{_link('second')}.closest('tr').innerText")
    assert row.split("\t") == ["second", "idle", "–", "–", "0", "0"]
    assert browser.evaluate("document.documentElement.scrollWidth") <= 400
    assert browser.evaluate(LOW_CONTRAST) == []
    assert browser.evaluate(UNNAMED) == []
    browser.evaluate(f"{_link('second')}.click()")
    browser.until(f"{_shows('second')} && {current} === 'second'")
    browser.until("document.querySelectorAll('#curves figure').length > 0")
    assert browser.problems == []


def _find_the_way_back(browser: Browser) -> None:
    """The run that the page shows was removed."""
    browser.until("document.getElementById('verdict').innerText.includes('this broker knows no such run')")
    assert browser.evaluate("document.getElementById('link').textContent") == "refused; trying again"
    browser.evaluate("document.querySelector('#home a').click()")
    browser.until(_shows("first"))
    assert browser.evaluate("document.getElementById('home').hidden") is True


async def test_the_list_of_runs_keeps_its_rows(
    own_broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "LOOK_EVERY_S", 0.1)
    async with await Broker.connect(own_broker.url, "first"), await Broker.connect(own_broker.url, "second") as second:
        with Monitor(tmp_path, own_broker.url, "another") as monitor, running(tmp_path) as browser:
            await asyncio.to_thread(_focus, browser, monitor.url)
            beat = {"at": int(1000 * time.time()), "step": 7, "version": "second:7:ab"}
            await second.redis.hset(second.keys.trainer, mapping=beat)
            await asyncio.to_thread(_still_there, browser)


def _focus(browser: Browser, url: str) -> None:
    browser.open(url)
    browser.until(f"{_link('first')} !== null")
    browser.evaluate("document.querySelector('#runs summary').click()")
    browser.evaluate(f"{_link('first')}.focus()")


def _still_there(browser: Browser) -> None:
    """The second run is now the one whose trainer was seen last."""
    browser.until(f"{_link('second')}.closest('tr').cells[3].innerText === '7'")
    assert browser.evaluate("document.activeElement.textContent") == "first"
    names = "[...document.querySelectorAll('#runs a')].map((link) => link.textContent)"
    assert browser.evaluate(names) == ["first", "second", "another"]
    assert browser.problems == []


async def test_the_page_shows_the_chosen_step_of_the_newest_file(broker_url: str, run_id: str, tmp_path: Path) -> None:
    file = tmp_path / "completions.jsonl"
    write_completions(file, range(1, MAX_STEPS + 2))
    with Monitor(tmp_path, broker_url, run_id, "--completions-file", str(file)) as monitor:
        await asyncio.to_thread(_choose_steps, monitor.url, file, tmp_path)


def _choose_steps(url: str, file: Path, folder: Path) -> None:
    with running(folder) as browser:
        browser.open(url)
        browser.until(f"{TEXT} === 'The sum of step {MAX_STEPS + 1} is 95'")
        browser.evaluate(f"{CHOOSER}.value = 2; {CHOOSER}.dispatchEvent(new Event('change'))")
        browser.until(f"{TEXT} === 'The sum of step 2 is 95'")
        with file.open("a") as end:
            write_completions(folder / "more", [MAX_STEPS + 2])
            end.write((folder / "more").read_text())
        browser.until(f"{CHOOSER}.options[0].value === '{MAX_STEPS + 2}'")
        assert browser.evaluate(f"[{CHOOSER}.value, {TEXT}]") == ["2", "The sum of step 2 is 95"], "no longer listed"
        write_completions(file, [1, 5], "another file")
        browser.until(f"{TEXT} === 'The sum of step 5 is 95' && {CHOOSER}.value === '5'")
        write_completions(file, [1, 5], "the same steps")
        browser.until(f"{PROMPT}?.textContent === 'the same steps'")
        browser.evaluate(FAIL_ONCE)
        write_completions(file, [1, 5, 10])
        browser.until(f"{NOTE}.includes('does not answer: lost')")
        browser.until(f"{TEXT} === 'The sum of step 10 is 95'")
        assert browser.evaluate(NOTE) == ""
        assert browser.problems == []


async def test_a_step_is_read_off_every_chart(own_broker: EmbeddedBroker, run_id: str, tmp_path: Path) -> None:
    """A broker without other runs, whose list would move the charts when it comes."""
    metrics = tmp_path / "metrics.jsonl"
    write_metrics(metrics, 200)
    with Monitor(tmp_path, own_broker.url, run_id, "--metrics-file", str(metrics)) as monitor:
        await asyncio.to_thread(_read_off, monitor.url, metrics, tmp_path)


def _read_off(url: str, metrics: Path, folder: Path) -> None:
    legends = "[...document.querySelectorAll('#curves .legend')].map((legend) => legend.innerText).join(' ')"
    whens = "[...new Set([...document.querySelectorAll('#curves .plot + p')].map((when) => when.textContent))]"
    with running(folder) as browser:
        browser.open(url)
        browser.until("document.querySelectorAll('#curves .plot').length === 10")
        browser.until(LIVE)  # curves may come before the first picture, which moves them down
        (last,) = browser.evaluate(whens)
        assert re.fullmatch(r"last: step 199 · \d+ \w+, \d\d:\d\d:\d\d", last)
        box = browser.evaluate(
            "(({left, top, width}) => [left, top, width])(document.querySelector('.plot svg').getBoundingClientRect())"
        )
        browser.move(box[0] + box[2] * 100 / 199, box[1] + 5)
        browser.until(f"{whens}[0].startsWith('step 100 · ')")
        assert browser.evaluate(f"{whens}.length") == 1, "all charts show the same step"
        assert "KL 0.0012" in browser.evaluate(legends)
        browser.move(0, 0)
        browser.until(f"{whens}[0] === {last!r}")
        browser.evaluate("document.querySelector('.plot').focus()")
        browser.press("ArrowLeft")
        browser.until(f"{whens}[0].startsWith('step 198 · ')")
        assert "held-out 0.9375 at step 175" in browser.evaluate(legends)
        browser.press("Tab")
        browser.until("document.activeElement === document.querySelectorAll('.plot')[1]")
        assert browser.evaluate(whens)[0].startswith("step 198 · "), "it is read off the next chart"
        browser.evaluate("document.querySelector('.plot').focus()")
        write_metrics(metrics, 300)
        browser.until("document.querySelector('.columns').innerText.includes('200')")
        assert browser.evaluate("document.activeElement === document.querySelector('.plot')") is True
        assert browser.evaluate(whens)[0].startswith("step 198 · ")
        assert browser.evaluate("document.getElementById('curves-note').textContent").endswith("mean of up to 2 steps")
        browser.press("Home")
        browser.until(f"{whens}[0].startsWith('step 0 · ')")
        assert browser.evaluate("document.activeElement.ariaValueText").startswith("step 0 · ")
        browser.press("Escape")
        browser.until(f"{whens}[0].startsWith('last: step 299')")
        assert browser.problems == []


async def test_equal_dead_letters_are_one_card(rig: Rig, broker_url: str, tmp_path: Path) -> None:
    await rig.submit(12)
    await bury(rig, ["CUDA error"] * 8 + ["no space left"])
    with Monitor(tmp_path, broker_url, rig.run_id, token=TOKEN) as monitor:
        await asyncio.to_thread(_replay_together, monitor)
    assert await rig.length(rig.broker.keys.dead) == 1


def _replay_together(monitor: Monitor) -> None:
    cards = "[...document.querySelectorAll('#letters > li > div > strong')].map((name) => name.textContent)"
    with running(monitor.folder) as browser:
        browser.open(f"http://operator:{TOKEN}@127.0.0.1:{monitor.port}/")
        browser.until(LIVE)
        browser.until("!document.querySelector('#letters button').hidden")
        assert browser.evaluate(cards)[1] == "8 jobs"
        assert len(browser.evaluate(cards)) == 2
        sections = "[...document.querySelectorAll('h2')].map((title) => title.id)"
        assert browser.evaluate(f"{sections}.indexOf('replicas-title') < {sections}.indexOf('dead-title')") is True
        browser.evaluate("document.querySelectorAll('#letters details')[1].open = true")
        rows = "document.querySelectorAll('#letters details li').length"
        assert browser.evaluate(rows) == 8
        browser.evaluate("document.querySelector('#letters details li button').click()")
        browser.until(f"{rows} === 7")
        assert browser.evaluate("document.querySelectorAll('#letters details')[1].open") is True, "it stays open"
        replay = "[...document.querySelectorAll('#letters > li > .buttons button:first-child')]"
        assert browser.evaluate(f"{replay}[1].ariaLabel") == "Replay 7 jobs with the error CUDA error"
        # The second click of a double click hits the card that has moved up.
        browser.evaluate(f"{replay}[0].dispatchEvent(new MouseEvent('click', {{ detail: 2 }}))")
        browser.evaluate(f"{replay}[1].click()")
        browser.until("document.getElementById('dead-note').textContent === '7 jobs are back in the queue.'")
        browser.until(f"{cards}.length === 1")
        assert browser.problems == []


async def test_no_card_moves_away_from_the_focus(rig: Rig, broker_url: str, tmp_path: Path) -> None:
    await rig.submit(6)
    await bury(rig, ["CUDA error", "CUDA error", "no space left"])
    with Monitor(tmp_path, broker_url, rig.run_id, token=TOKEN) as monitor, running(tmp_path) as browser:
        cards = "[...document.querySelectorAll('#letters > li > div > strong')].map((name) => name.textContent).join()"
        await asyncio.to_thread(browser.open, f"http://operator:{TOKEN}@127.0.0.1:{monitor.port}/")
        await asyncio.to_thread(browser.until, "document.querySelector('#letters button')?.hidden === false")
        await asyncio.to_thread(browser.until, f"{cards}.endsWith(',2 jobs')")
        browser.evaluate("document.querySelector('#letters > li:nth-child(2) > .buttons button').focus()")
        await bury(rig, ["CUDA error", "out of memory"])
        await asyncio.to_thread(browser.until, f"/^[^ ]+,[^ ]+,3 jobs$/.test({cards})")
        focused = browser.evaluate("document.activeElement.ariaLabel")
        assert focused == "Replay 3 jobs with the error CUDA error"
        assert browser.problems == []


async def test_the_page_says_that_the_broker_is_away_and_comes_back(
    own_broker: EmbeddedBroker, run_id: str, tmp_path: Path
) -> None:
    with Monitor(tmp_path, own_broker.url, run_id) as monitor:
        await asyncio.to_thread(_outage, monitor, own_broker)


def _outage(monitor: Monitor, broker: EmbeddedBroker) -> None:
    verdict = "(document.getElementById('verdict')?.innerText ?? '')"
    with running(monitor.folder) as browser:
        browser.open(monitor.url)
        browser.until(f"{verdict}.includes('idle')")
        broker.kill()
        browser.until(f"{verdict}.includes('broker does not answer')")
        broker.start()
        browser.until(f"{verdict}.includes('idle')")
        assert browser.problems == []
