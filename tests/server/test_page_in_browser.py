"""The page in a headless Chromium: chats, errors in words, foreign words that stay words, slots as lanes."""

from __future__ import annotations

import base64
import io
import json
import random
import threading
import wave
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

import cbatch
from cbatch import Engine
from cbatch.backend.fake import FakeBackend
from cbatch.server import create_app
from tests.runtime.backends import PATIENCE_S, GatedBackend
from tests.server.browser import FOUND, Browser
from tests.server.clients import fake_app, running, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from starlette.requests import Request

    from tests.server.browser import Tab

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(FOUND is None, reason="no Chromium on the path, and none named in CHROMIUM"),
]

EVIL = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>"
"""What would be seen if any text became markup."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


class Script:
    """Answers of `/v1/chat/completions` as a test wants them, in front of an application on a fake backend."""

    def __init__(self, inner: Starlette) -> None:
        self.answers: list[Response] = []
        self.asked: list[dict[str, Any]] = []
        self.slots: Any = None
        routes: list[Any] = [Route("/v1/chat/completions", self._chat, methods=["POST"])]
        routes += [Route("/slots", self._slots), Mount("/", inner)]
        self.app = Starlette(routes=routes)
        self.app.state.desk = inner.state.desk
        self._inner = inner

    async def _chat(self, request: Request) -> Response:
        self.asked.append(await request.json())
        return self.answers.pop(0)

    async def _slots(self, request: Request) -> Response:
        return JSONResponse(self.slots if self.slots is not None else [])


def chunk(delta: Any = None, index: int = 0, end: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": delta or {}, "finish_reason": end}
    return {"choices": [choice], **more}


def stream(*events: Any, is_whole: bool = True) -> Response:
    """A stream of these events."""
    frames = [f"data: {json.dumps(event)}\n\n" for event in events]
    return Response(
        "".join(frames + ["data: [DONE]\n\n"] * is_whole), media_type="text/event-stream"
    )


def says(text: str) -> Response:
    """A stream that says a text."""
    return stream(chunk({"content": text}), chunk(end="stop"))


def fails(status: int, code: str | None, message: str, **more: Any) -> Response:
    return JSONResponse({"error": {"message": message, "code": code, **more}}, status)


@contextmanager
def scripted(browser: Browser, *answers: Response, **settings: Any) -> Iterator[tuple[Script, Tab]]:
    """A tab with the page over a script; nothing in it may go wrong unheard."""
    with ExitStack() as stack:
        script = Script(stack.enter_context(fake_app(2, 512, **settings)))
        script.answers = [*answers]
        server = stack.enter_context(running(script.app))
        tab = stack.enter_context(browser.tab())
        tab.open(f"{server.url}/")
        tab.until_text("#status", "connected")
        yield script, tab
        assert tab.complaints == []


@contextmanager
def paged(browser: Browser, app: Starlette, **more: Any) -> Iterator[Tab]:
    """A tab with the page of an application."""
    with running(app) as server, browser.tab(**more) as tab:
        tab.open(f"{server.url}/")
        yield tab


def ask(tab: Tab, text: str = "Hi") -> None:
    """Ask as a user does: by the keyboard."""
    tab.fill("#question", text)
    tab.press("Enter")


def wait_for_answers(tab: Tab, n: int) -> None:
    """Wait until so many answers are complete."""
    tab.until(f"document.querySelectorAll('.answer[data-state=done]').length === {n}")


# ---- chats ----


def test_chat_has_its_history_prompt_and_options(browser: Browser) -> None:
    with scripted(browser, says("one **two**"), says("three")) as (script, tab):
        tab.click("[data-view=settings]")
        tab.fill("#system", "Be brief.")
        tab.fill("#temperature", "0.25")
        tab.fill("#top_k", "7")
        tab.fill("#stop", "END\nSTOP")
        ask(tab, "First?")
        wait_for_answers(tab, 1)
        assert tab.js("document.querySelector('.answer strong').textContent") == "two"
        ask(tab, "Second?")
        wait_for_answers(tab, 2)
        last = script.asked[-1]
        assert (last["temperature"], last["top_k"], last["stop"]) == (0.25, 7, ["END", "STOP"])
        assert [(m["role"], m["content"]) for m in last["messages"]] == [
            ("system", "Be brief."),
            ("user", "First?"),
            ("assistant", "one **two**"),
            ("user", "Second?"),
        ]


DROP = """
(async () => {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [%d, %d];
  canvas.getContext("2d").fillRect(0, 0, 9, 9);
  const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([blob], "a.png", { type: "image/png" }));
  document.querySelector("#chat").dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true }));
})(); 1
"""


def test_dropped_pictures_go_with_the_question(browser: Browser) -> None:
    backend = FakeBackend(2, 512)
    backend.vocab.picture_refusal = ""
    with scripted(browser, says("one"), says("two"), engine=Engine(backend)) as (script, tab):
        tab.until("!document.querySelector('#attach').hidden")
        for n, size in enumerate([(40, 30), (5000, 100)], 1):
            tab.js(DROP % size)
            tab.until(f"document.querySelectorAll('#media img').length === {n}")
        ask(tab, "What?")
        wait_for_answers(tab, 1)
        assert tab.js("document.querySelector('#media').hidden")
        assert tab.js("document.querySelectorAll('.seen img').length") == 2
        *shown, text = script.asked[0]["messages"][0]["content"]
        assert text == {"type": "text", "text": "What?"}
        urls = [part["image_url"]["url"] for part in shown]
        assert urls[0].startswith("data:image/png;base64,")
        assert urls[1].startswith("data:image/jpeg;base64,")  # it was made smaller
        tab.js(DROP % (20, 20))
        tab.until("document.querySelectorAll('#media img').length === 1")
        tab.click("#media .icon")
        ask(tab, "And now?")
        wait_for_answers(tab, 2)
        assert script.asked[1]["messages"][0]["content"] == [*shown, text]
        assert script.asked[1]["messages"][-1]["content"] == "And now?"


DROP_SOUND = """
{
  const data = Uint8Array.from(atob("%s"), (c) => c.charCodeAt(0));
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([data], "a.wav", { type: "audio/wav" }));
  document.querySelector("#chat").dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true }));
}; 1
"""


def silence() -> str:
    """A file of half a second, in base64."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(bytes(8000))
    return base64.b64encode(file.getvalue()).decode()


def test_dropped_sound_can_be_heard_and_goes_with_the_question(browser: Browser) -> None:
    backend, data = FakeBackend(2, 512), silence()
    backend.vocab.sound_refusal = ""
    with scripted(browser, says("one"), engine=Engine(backend)) as (script, tab):
        tab.until_text("#attach", "Add sound")
        tab.js(DROP % (20, 20))  # which this model does not take
        tab.js(DROP_SOUND % data)
        tab.until("document.querySelector('#media audio').duration === 0.5")
        ask(tab, "What?")
        wait_for_answers(tab, 1)
        assert tab.js("document.querySelectorAll('.seen audio').length") == 1
        assert script.asked[0]["messages"][0]["content"] == [
            {"type": "input_audio", "input_audio": {"data": data}},
            {"type": "text", "text": "What?"},
        ]


def test_settings_and_chat_outlive_a_reload(browser: Browser) -> None:
    with scripted(browser, says("kept")) as (_, tab):
        tab.click("[data-view=settings]")
        tab.fill("#top_k", "7")
        ask(tab)
        wait_for_answers(tab, 1)
        tab.open(tab.js("location.href"))
        assert tab.text(".answer .body") == "kept"
        assert tab.js("document.querySelector('#top_k').value") == "7"
        assert "top_k" not in tab.js("Object.values({...localStorage}).join()")
        assert tab.js("document.cookie") == ""


TITLES = "[...document.querySelectorAll('.open-chat span:first-child')].map((s) => s.innerText)"
KEPT = "JSON.parse(Object.values({...localStorage})[0] ?? '[]')"


def test_chats_outlive_their_tab_until_they_are_deleted(browser: Browser) -> None:
    with scripted(browser, says("red"), says("blue"), says("again")) as (script, tab):
        assert tab.js("document.querySelector('#chats-open').hidden")
        for word in ("red", EVIL):
            ask(tab, f"Say {word}.")
            wait_for_answers(tab, 1)
            tab.click("#new-chat")
            wait_for_answers(tab, 0)
        tab.open(tab.js("location.href"))
        tab.click("#chats-open")
        assert tab.js(TITLES) == [f"Say {EVIL}.", "Say red."]
        tab.click("li:last-child .open-chat")
        tab.until_text(".answer .body", "red")
        ask(tab, "And?")
        wait_for_answers(tab, 2)
        assert [m["content"] for m in script.asked[2]["messages"]] == ["Say red.", "red", "And?"]
        tab.until(f"{KEPT}[0].turns.length === 4")
        tab.click("#chats-open")
        assert tab.js(TITLES) == ["Say red.", f"Say {EVIL}."]
        tab.click("li:last-child [aria-label^=Delete]")
        assert tab.js(TITLES) == ["Say red."]
        wait_for_answers(tab, 2)
        tab.click("#chats-delete")
        assert tab.text("#chats-delete") == "Delete 1 permanently?"
        tab.click("#chats-delete")
        assert tab.js(TITLES) == []
        wait_for_answers(tab, 0)
        tab.open(tab.js("location.href"))
        assert tab.js("localStorage.length") == 0
        assert tab.js("window.hacked") is None


def test_chats_that_are_kept_are_few_and_short(browser: Browser) -> None:
    with scripted(browser) as (_, tab):
        keep = (
            "import('./page/kept.js').then((kept) => {{ for (let i = 0; i < {0}; i += 1) {{"
            " kept.goOn({{id: `c${{i}}`}}); kept.keep([{{role: 'user', text: `${{i}}`.padEnd({1})}}]); }} }})"
        )
        tab.js(keep.format(25, 10))
        assert tab.js(f"{KEPT}.map(({{id}}) => id)") == [f"c{i}" for i in range(24, 4, -1)]
        tab.js(keep.format(5, 900_000))
        assert tab.js(f"{KEPT}.map(({{id}}) => id)")[:2] == ["c4", "c3"]
        assert tab.js("Object.values({...localStorage})[0].length") < 2_000_100


_TWO_TABS = """Promise.all([import('./page/kept.js'), import('./page/kept.js?of-another-tab')]).then(([a, b]) => {
  const turns = (...texts) => texts.map((text) => ({ role: 'user', text }));
  const told = [];
  const tell = () => told.push(a.all().map((chat) => chat.turns.map(({ text }) => text).join('')).sort().join(' '));
  a.goOn(); a.keep(turns('x')); b.goOn(a.ownChat()); b.keep(turns('x')); tell();
  a.keep(turns('x', 'a')); b.keep(turns('x', 'b')); a.keep(turns('x', 'a')); a.keep(turns('x', 'a', 'c')); tell();
  for (const { id } of b.all()) b.remove(id);
  a.keep(turns('x', 'a', 'c')); tell();
  a.keep(turns('x', 'a', 'c', 'd')); tell();
  return told;
})"""


def test_duplicated_tab_has_a_chat_of_its_own_and_deleted_ones_stay_away(browser: Browser) -> None:
    with scripted(browser) as (_, tab):
        tab.js("new Promise((done) => setTimeout(done, 400))")  # the page's own save
        assert tab.js(_TWO_TABS) == ["x", "xac xb", "", "xacd"]


def test_text_that_is_slow_to_show_is_shown_a_fifth_of_the_time(browser: Browser) -> None:
    async def slowly() -> AsyncIterator[str]:
        for _ in range(30):
            yield f"data: {json.dumps(chunk({'content': 'a'}))}\n\n"
            await anyio.sleep(0.03)
        yield "data: [DONE]\n\n"
        has_ended.set()

    has_ended = threading.Event()
    answer = StreamingResponse(slowly(), media_type="text/event-stream")
    with scripted(browser, answer) as (_, tab):
        tab.js(
            "import('./page/markdown.js').then(({ MarkdownView: { prototype } }) => {"
            " const [now, { update }] = [performance.now.bind(performance), prototype]; window.n_shown = 0;"
            " performance.now = () => now() + 60000 * n_shown;"  # each time takes a minute
            " prototype.update = function (text) { n_shown += 1; update.call(this, text); }; })"
        )
        ask(tab)
        assert has_ended.wait(PATIENCE_S)
        assert 1 <= tab.js("window.n_shown") < 12  # of 30 pieces


def test_answers_side_by_side_and_the_chosen_one_goes_on(browser: Browser) -> None:
    three = stream(
        *(chunk({"content": f"text {i}"}, i) for i in (2, 0, 1)),
        *(chunk(None, i, "stop") for i in range(3)),
    )
    with scripted(browser, three, says("on")) as (script, tab):
        tab.click("[data-view=settings]")
        tab.fill("#n", "3")
        ask(tab)
        wait_for_answers(tab, 3)
        assert script.asked[0]["n"] == 3
        texts = "[...document.querySelectorAll('.answer .body')].map(b => b.innerText)"
        assert tab.js(texts) == ["text 0", "text 1", "text 2"]
        tab.click(".answer:nth-child(3) .choice")
        tab.click(".answer:nth-child(1) .choice")
        tab.press("ArrowDown")  # one choice of three
        tab.fill("#n", "1")
        ask(tab, "More")
        wait_for_answers(tab, 4)
        assert [m["content"] for m in script.asked[1]["messages"]] == ["Hi", "text 1", "More"]


def test_temperatures_are_compared_in_calls_of_their_own(browser: Browser) -> None:
    with scripted(browser, says("a"), says("b")) as (script, tab):
        tab.click("[data-view=settings]")
        tab.choose("#vary", "temperature")
        tab.fill("#temperatures", "0, 1.5")
        ask(tab)
        wait_for_answers(tab, 2)
        assert sorted(asked["temperature"] for asked in script.asked) == [0, 1.5]
        assert tab.text(".answer:nth-child(2) .choice") == "temperature 1.5"


def test_wrong_setting_is_told_before_anything_is_asked(browser: Browser) -> None:
    wrong = {
        "#temperature": ("-1", "temperature must be a number from 0"),
        "#top_k": ("1.5", "top_k must be a whole number"),
        "#n": ("9", "Answers must be a whole number from 1 to 8"),
        "#tools": ("{", "The tools must be a list in JSON"),
        "#schema": ("[]", "The schema must be an object"),
    }
    with scripted(browser) as (script, tab):
        tab.click("[data-view=settings]")
        tab.js("for (const d of document.querySelectorAll('#settings details')) d.open = true")
        for field, (value, words) in wrong.items():
            before = tab.js(f"document.querySelector('{field}').value")
            tab.fill(field, value)
            ask(tab, "kept")
            tab.until_text("#settings-problem", words)
            assert tab.js(f"document.activeElement === document.querySelector('{field}')")
            assert tab.js("document.querySelector('#question').value") == "kept"
            tab.js(f"document.querySelector('{field}').value = '{before}'")
        assert script.asked == []


def test_adapter_may_be_chosen_and_a_model_of_text_takes_no_file(browser: Browser) -> None:
    backend = FakeBackend(2, 512)
    backend.adapters = (EVIL, "b")
    given: dict[str, Any] = {"engine": Engine(backend), "model_name": "m"}
    with scripted(browser, says("x"), says("y"), **given) as (script, tab):
        tab.js(DROP % (20, 20))
        tab.js(DROP_SOUND % silence())
        assert tab.js("document.querySelector('#attach').hidden")
        assert tab.js("document.querySelectorAll('#media > *').length") == 0
        ask(tab)
        wait_for_answers(tab, 1)
        names = tab.js("[...document.querySelector('#model').options].map(o => o.text)")
        assert names == ["m", EVIL, "b"]
        tab.choose("#model", "b")
        tab.until_text("#model-name", "m · b")
        ask(tab)
        wait_for_answers(tab, 2)
        assert [asked["model"] for asked in script.asked] == ["m", "b"]


def test_message_is_edited_and_answered_anew(browser: Browser) -> None:
    with scripted(browser, says("one"), says("two"), says("three")) as (script, tab):
        ask(tab, "Frist")
        wait_for_answers(tab, 1)
        tab.click(".user [aria-label='Edit message']")
        tab.fill(".editor textarea", "First")
        tab.click(".editor .main")
        tab.until_text(".answer .body", "two")
        tab.click("[aria-label='Answer anew']")
        tab.until_text(".answer .body", "three")
        asked = [[m["content"] for m in each["messages"]] for each in script.asked]
        assert asked == [["Frist"], ["First"], ["First"]]


def test_cut_answer_goes_on_where_it_ended_and_its_thoughts_are_folded(browser: Browser) -> None:
    thoughts = [chunk({"reasoning_content": text}) for text in ("let me ", "see")]
    cut = stream(*thoughts, chunk({"content": "one "}), chunk(end="length"))
    with scripted(browser, cut, says("two")) as (script, tab):
        ask(tab)
        tab.until_text(".foot .stats", "cut at max_tokens")
        assert tab.text(".answer .body").strip() == "one"
        assert not tab.js("document.querySelector('.thoughts').open")
        tab.click(".thoughts summary")
        assert tab.text(".thoughts pre") == "let me see"
        tab.click("[aria-label='Go on writing']")
        tab.until_text(".answer .body", "one two")
        wait_for_answers(tab, 1)
        assert script.asked[1]["messages"][-1] == {"role": "assistant", "content": "one "}


def test_tool_call_is_shown_and_its_result_goes_back(browser: Browser) -> None:
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    made = {"id": "c1", "type": "function", "function": function}
    offered = {"name": "weather", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": offered}]
    called = stream(chunk({"tool_calls": [{"index": 0, **made}]}), chunk(end="tool_calls"))
    with scripted(browser, called, says("It rains.")) as (script, tab):
        tab.click("[data-view=settings]")
        tab.js("for (const d of document.querySelectorAll('#settings details')) d.open = true")
        tab.fill("#tools", json.dumps(tools))
        ask(tab)
        tab.until_text(".call", '"city": "Rome"')
        tab.fill(".results textarea", "rain")
        tab.click(".results .main")
        tab.until_text(".turn:last-child .body", "It rains.")
        assert script.asked[0]["tools"] == tools
        *_, call, result = script.asked[1]["messages"]
        assert call["tool_calls"] == [made]
        assert result == {"role": "tool", "tool_call_id": "c1", "content": "rain"}


def test_stop_frees_the_slot(browser: Browser) -> None:
    backend = GatedBackend(1, 4096, hold_at=3)
    engine = Engine(backend, options={"ignore_eos": True})
    with fake_app(engine=engine) as app, paged(browser, app) as tab:
        tab.until_text("#status", "connected")
        tab.click("[data-view=engine]")  # which is not to wait for the engine
        ask(tab)
        backend.wait_until_held()
        assert app.state.desk.n_in_flight == 1
        backend.release_when_asked()
        tab.click("#stop-button")
        wait_until(lambda: app.state.desk.n_in_flight == 0)
        tab.until("document.querySelector('.answer').dataset.state === 'stopped'")
        wait_until(lambda: app.state.desk.engine.stats().n_running == 0)
        assert app.state.desk.engine.slots()[0].status == "free"
        assert tab.js("document.activeElement.id") == "question"


def test_model_that_ships_answers_in_the_page(browser: Browser, test_model: Path) -> None:
    with (
        cbatch.load(test_model, parallel=2, n_threads=1) as engine,
        paged(browser, create_app(engine)) as tab,
    ):
        tab.click("[data-view=settings]")
        tab.fill("#temperature", "0")
        tab.fill("#n", "2")
        ask(tab, "What is 2+3?")
        wait_for_answers(tab, 2)
        texts = "[...document.querySelectorAll('.answer .body')].map(b => b.innerText)"
        assert tab.js(texts) == ["5", "5"]
        assert tab.js("document.querySelector('#min_p').placeholder") == "0.05"
        assert tab.complaints == []


# ---- foreign words ----

TEXT = f"""{EVIL}

# {EVIL}
- [a](javascript:window.hacked=1) [b](https://good.example/?q="><b>) [c](data:text/html,x)
- ![p](https://evil.example/p.png) <javascript:window.hacked=1>

| {EVIL} | b |
|---|:-:|
| `{EVIL}` | **{EVIL}** |

> {EVIL}

```{EVIL}
{EVIL}
```
"""


def test_words_of_others_stay_words(browser: Browser) -> None:
    function = {"name": EVIL, "arguments": EVIL}
    called = stream(
        chunk({"reasoning_content": EVIL}),
        chunk({"content": TEXT}),
        chunk({"tool_calls": [{"index": 0, "id": EVIL, "function": function}]}),
        chunk(end="tool_calls", cbatch={"warnings": [EVIL], "finish_reasons": [EVIL]}),
    )
    failed = fails(400, EVIL, EVIL)
    with scripted(browser, called, says("x"), failed, model_name=EVIL) as (script, tab):
        script.slots = [slot(0, id_task=EVIL, status=EVIL)]
        ask(tab, EVIL)
        wait_for_answers(tab, 1)
        tab.click(".thoughts summary")
        tab.fill(".results textarea", EVIL)
        tab.click(".results .main")
        wait_for_answers(tab, 2)
        ask(tab, EVIL)
        tab.until("document.querySelector('.answer[data-state=failed]')")
        tab.until("document.querySelectorAll('.lane').length")
        assert tab.text("#model-name") == EVIL
        assert tab.text(".user .said") == EVIL
        assert EVIL in tab.text(".thoughts pre")
        assert EVIL in tab.text(".call")
        assert EVIL in tab.text(".answer[data-state=failed] .problem")
        assert tab.js("window.hacked") is None
        foreign = (
            "img, script:not([src]), iframe, object, embed, form[action], [onerror], base, style"
        )
        assert tab.js(f"document.querySelectorAll({json.dumps(foreign)}).length") == 0
        links = tab.js("[...document.querySelectorAll('#turns a')].map(a => [a.href, a.rel])")
        addresses = ["https://good.example/?q=%22%3E%3Cb%3E", "https://evil.example/p.png"]
        assert links == [[address, "noopener noreferrer nofollow"] for address in addresses]


LINK = '<a href="{0}" target="_blank" rel="noopener noreferrer nofollow" title="{0}">{1}</a>'
TABLE = (
    '<div class="scroll" tabindex="0"><table><thead><tr><th data-align="center">a</th>'
    '<th data-align="right">b</th></tr></thead><tbody><tr><td data-align="center"><em>c</em></td>'
    '<td data-align="right">d|e</td></tr></tbody></table></div><p>f</p>'
)
MARKDOWN = {
    "a *b* **c** ~~d~~ `e*f`": "<p>a <em>b</em> <strong>c</strong> <del>d</del> <code>e*f</code></p>",
    "2 * 3 * 4 and a_b_c \\*d\\*": "<p>2 * 3 * 4 and a_b_c *d*</p>",
    "a\nb  \nc\\\nd\n\ne": "<p>a\nb\nc\nd</p><p>e</p>",
    "## T ##\n---\n# C#": "<h4>T</h4><hr><h3>C#</h3>",
    "1. a\n   - b\n2. c": '<ol start="1"><li>a<ul><li>b</li></ul></li><li>c</li></ol>',
    "> a\n> - b": "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>",
    "**a *b* c**": "<p><strong>a <em>b</em> c</strong></p>",
    "- [x] a\n- [ ] b": "<ul><li>☑ a</li><li>☐ b</li></ul>",
    "|a|b|\n|:-:|--:|\n|*c*|d\\|e|\n\nf": TABLE,
    "a\n***b***": "<p>a\n<em><strong>b</strong></em></p>",
    ".\n1.\n|-<": "<p>.\n1.\n|-&lt;</p>",
    "- a\n\nb\n\n- c\n\n-d": "<ul><li>a</li></ul><p>b</p><ul><li>c</li></ul><p>-d</p>",
    "- a\n  > 2. b\n  c": '<ul><li>a<blockquote><ol start="2"><li>b\nc</li></ol></blockquote></li></ul>',
    "[a][b]\n\n[b]: /c": "<p>[a][b]</p><p>[b]: /c</p>",
    "a\r\n\r\n## b": "<p>a</p><h4>b</h4>",
    "<b>*a*</b>\n<!-- c -->": "<p>&lt;b&gt;<em>a</em>&lt;/b&gt;\n&lt;!-- c --&gt;</p>",
    "see https://a.example/b_c). [x](https://y.example)": (
        f"<p>see {LINK.format('https://a.example/b_c', 'https://a.example/b_c')})."
        f" {LINK.format('https://y.example/', 'x')}</p>"
    ),
}
LONG = [
    *("1. a\n\n   ```py\n   x\n   ```\n2. b", "|\n    >\n-", "<p\n\ta\n - b", "```\nopen *a*"),
    *("*" * 5000, "[" * 5000 + "](" * 5000, "> " * 5000, "- " * 5000, "> - " * 5000),
    *("`" * 5001 + "*a " * 9000, "# a" + " " * 200_000 + "b #", "_a*" * 20_000, "_a*" * 6_000),
    *("- " + "*a " * 100_000, "http://[." * 2000 + "." * 2000, "[a](b" * 4000),
    *("[" * 9000 + "x" * 9000 + "](y)", "|\n-" + " " * 200_000 + "x"),
    "\n".join(f"{'  ' * depth}- a" for depth in range(300)),
]
"""What is shown alike at once and as it comes, and in a time that anyone waits."""
PARTS = [
    *("<", ">", "&", "<b onclick=x>", "</p>", "<script>", "javascript:", "https://a.example/", "x"),
    *(" ", "é", "\n", "\n\n", "\n  ", "`", "```", "*", "**", "_", "__", "~~", "[", "](", ")", "|"),
    *("|-|", "#", "# ", "- ", "1. ", "> ", "\\", "    ", "\t", "2)", "=", "---", "\n \n"),
]
OWN = {
    *("DIV", "SPAN", "BUTTON", "svg", "path", "P", "H3", "H4", "H5", "H6", "HR", "PRE", "CODE"),
    *("UL", "OL", "LI", "A", "BLOCKQUOTE", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD"),
    *("STRONG", "EM", "DEL"),
}


SHOW = """
import('./page/markdown.js').then(({MarkdownView}) => {
  window.shown = (texts) => {
    const node = document.createElement('div');
    const view = new MarkdownView(node);
    for (const text of texts) view.update(text);
    return node.outerHTML;
  };
  window.shownIn = (node, texts) => {
    for (const text of texts) {
      const inner = node.appendChild(document.createElement('div'));
      new MarkdownView(inner).update(text);
    }
    return node;
  };
  window.everything = (selector) => [...shownIn(document.createElement('div'), texts).querySelectorAll(selector)];
})
"""


def test_markdown_becomes_elements(browser: Browser) -> None:
    with scripted(browser) as (_, tab):
        tab.js(SHOW)
        for source, expected in {**MARKDOWN, **dict.fromkeys(LONG)}.items():
            said, steps = json.dumps(source), "[s.slice(0, -1)]"
            if len(source) < 200:
                steps = "[...s].map((_, i) => s.slice(0, i))"
            shown = tab.js(f"((s) => shown([...{steps}, s]))({said})")
            assert shown == tab.js(f"shown([{said}])")
            assert expected is None or shown == f"<div>{expected}</div>"


def test_markdown_of_any_text_has_known_elements_alone(browser: Browser) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    with scripted(browser) as (_, tab):
        tab.js(SHOW)
        texts = ["".join(rng.choices(PARTS, k=rng.randrange(40))) for _ in range(1000)]
        tab.js(
            f"window.texts = {json.dumps(texts)}; window.shots = texts.map((t) => shown([t])); 0"
        )
        again = "texts.findIndex((t, i) => shown([...t].map((_, i) => t.slice(0, i)).concat(t)) !== shots[i])"
        assert tab.js(again) == -1, seed
        assert {*tab.js("everything('*').map((e) => e.tagName)")} <= OWN, seed
        assert {*tab.js("everything('a').map((a) => a.protocol)")} == {"https:"}, seed
        assert tab.js("everything('[onclick], [style], [src]').length") == 0, seed


# ---- errors in words ----


FAILURES = [
    (fails(429, "rate_limit_exceeded", "7 requests wait already"), ["queue is full", "7 requests"]),
    (fails(503, "shutting_down", "the server is shutting down"), ["shutting down"]),
    (
        fails(400, "context_length_exceeded", "x", n_prompt_tokens=5000, n_ctx=4096),
        ["too long", "5,000 tokens", "4,096"],
    ),
    (fails(400, "invalid_grammar", "no such rule"), ["refuses", "no such rule"]),
    (fails(500, "worker_died", "x"), ["process ended"]),
    (fails(504, "timeout", "x"), ["time is over"]),
    (Response("<h1>Bad Gateway</h1>", 502), ["does not answer"]),
    (stream(chunk({"content": "half"}), is_whole=False), ["was cut"]),
    (stream({"error": {"message": "x", "code": "worker_died"}}), ["process ended"]),
    (stream(EVIL, is_whole=False), ["was cut"]),
]  # fmt: skip


def test_error_is_told_in_words_and_may_be_tried_again(browser: Browser) -> None:
    with scripted(browser) as (script, tab):
        for answer, words in FAILURES:
            script.answers = [answer, says("fine")]
            ask(tab)
            for word in words:
                tab.until_text(".answer .problem", word)
                assert word in tab.text("#said") or word not in words[:1]
            tab.click(".answer .problem button")
            tab.until_text(".answer .body", "fine")
            wait_for_answers(tab, 1)
            assert tab.js("document.querySelector('.answer .problem').hidden")
            tab.click("#new-chat")
            wait_for_answers(tab, 0)


# ---- the key ----


def test_key_is_asked_for_and_kept_in_the_tab(browser: Browser) -> None:
    with fake_app(api_keys=["good"]) as app, paged(browser, app) as tab:
        tab.until("document.querySelector('#key-dialog').open")
        assert tab.js("document.activeElement.id") == "key"
        for wrong, words in (("bad", "does not take"), ("ключ", "ASCII"), ("", "Write the key")):
            tab.fill("#key", wrong)
            tab.press("Enter")
            tab.until_text("#key-problem", words)
        tab.write("good")
        tab.press("Enter")
        tab.until_text("#status", "connected")
        ask(tab)
        wait_for_answers(tab, 1)
        assert "good" not in tab.js("Object.values({...localStorage}).join()")
        assert tab.js("[document.cookie, location.href.includes('good')]") == ["", False]
        assert "good" in tab.js("Object.values({...sessionStorage}).join()")
        tab.open(tab.js("location.href"))
        tab.until_text("#status", "connected")


# ---- where it is, and whether it is there ----


def test_page_works_below_a_prefix(app: Starlette, browser: Browser) -> None:
    outer = Starlette(routes=[Mount("/a/b", app)])
    outer.state.desk = app.state.desk
    with running(outer) as server, browser.tab() as tab:
        tab.open(f"{server.url}/a/b/")
        tab.until_text("#status", "connected")
        ask(tab)
        wait_for_answers(tab, 1)
        assert tab.complaints == []


def test_server_may_go_away_and_return(browser: Browser) -> None:
    with Engine(FakeBackend(2, 512)) as engine, browser.tab() as tab:
        with running(create_app(engine)) as server:
            port = int(server.url.rpartition(":")[2])
            tab.open(f"{server.url}/")
            tab.until_text("#status", "connected")
        tab.until_text("#status", "unreachable")
        ask(tab)
        tab.until_text(".answer .problem", "does not answer")
        with running(create_app(engine), port=port):
            tab.until_text("#status", "connected")
            tab.click(".answer .problem button")
            wait_for_answers(tab, 1)
            assert "complete" in tab.text("#said")


TRACK = """
window.untracked = setTimeout.bind(window);
window.timers = new Set();
window.nFetching = 0;
const clear = clearTimeout.bind(window), ask = fetch.bind(window);
window.setTimeout = (work, ms) => {
  const id = untracked(() => { timers.delete(id); work(); }, ms);
  timers.add(id);
  return id;
};
window.clearTimeout = (id) => { timers.delete(id); clear(id); };
window.fetch = (...given) => {
  nFetching += 1;
  return ask(...given).finally(() => untracked(() => { nFetching -= 1; }, 0));
};
"""
"""Knows which timers are set and how many calls are on their way."""


def test_hidden_page_asks_nothing_of_the_server(browser: Browser) -> None:
    with fake_app() as app, paged(browser, app, early=TRACK) as tab:
        tab.until_text("#status", "connected")
        tab.js(
            "window.hide = (is) => { Object.defineProperty(document, 'hidden',"
            " {configurable: true, get: () => is}); document.dispatchEvent(new Event('visibilitychange')); }"
        )
        # the timer of the next look is set, and then it is not
        tab.until("timers.size === 1 && !nFetching && (hide(true), timers.size === 0)")
        tab.js("hide(false)")
        tab.until("timers.size === 1 && !nFetching")


# ---- the engine ----


def slot(id: int, **more: Any) -> dict[str, Any]:
    found = {
        "id": id, "id_task": None, "n_ctx": 1024, "is_processing": False, "status": "free", "n_cells": 0,
        "n_prompt_tokens": 0, "n_prompt_tokens_processed": 0, "n_prompt_tokens_cache": 0,
        "next_token": [{"has_next_token": False, "n_remain": 0, "n_decoded": 0}],
    }  # fmt: skip
    return {**found, **more}


def test_slots_are_lanes_with_what_each_does(browser: Browser) -> None:
    with scripted(browser) as (script, tab):
        runs: dict[str, Any] = {"is_processing": True, "status": "running", "id_task": "r"}
        prompt = {"n_prompt_tokens": 200}
        prompt |= {"n_prompt_tokens_processed": 60, "n_prompt_tokens_cache": 40}
        decoded = [{"has_next_token": True, "n_remain": 9, "n_decoded": 5}]
        script.slots = [
            slot(0),
            slot(1, n_cells=100, **runs, **prompt),
            slot(2, n_cells=512, **runs, **prompt | {"n_prompt_tokens": 100}, next_token=decoded),
            slot(3, status="paused", n_cells=9),
            slot(4, n_cells=77),
        ]
        tab.until("document.querySelectorAll('.lane').length === 5")
        lanes = tab.js(
            "[...document.querySelectorAll('.lane')].map(l => [l.dataset.phase, l.innerText.replace(/\\s+/g, ' ')])"
        )
        assert [phase for phase, _ in lanes] == ["idle", "prefill", "decode", "paused", "kept"]
        assert "prefill 50 %" in lanes[1][1]
        assert "512 / 1,024" in lanes[2][1]
        assert tab.text("#slots-sum") == "3 of 5 busy"


def test_figures_of_the_engine_are_those_of_its_metrics(browser: Browser) -> None:
    with fake_app(2, 512) as app, paged(browser, app) as tab:
        tab.until("document.querySelectorAll('.curve').length === 4")
        ask(tab)
        wait_for_answers(tab, 1)
        stats = app.state.desk.engine.stats()
        tab.until_text("#sums", f"Tokens written\n{stats.n_output_tokens}")
        assert f"Prompt tokens computed\n{stats.n_prompt_tokens}" in tab.text("#sums")
        assert tab.text("#queue-sum") == "0 running · 0 waiting"
        tab.until("document.querySelector('.curve:last-child .now').textContent.includes('ms')")
        routes = {route for route, _ in app.state.desk.meters.n_http}
        assert "/chat/completions" in routes
        assert not {"/slots", "/metrics"} & routes


def test_lanes_have_room_for_a_minute_and_a_narrow_page_has_one_part(browser: Browser) -> None:
    with scripted(browser) as (script, tab):
        script.slots = [slot(0), slot(1)]
        for width, least in ((1280, 350), (1000, 350), (390, 300)):
            tab.resize(width, 800)
            tab.js(
                "new Promise((tell) => requestAnimationFrame(tell))"
            )  # the page has seen its width
            if not tab.js("document.querySelector('#engine').checkVisibility()"):
                tab.click("[data-view=engine]")
            tab.until("document.querySelectorAll('.strip').length === 2")
            assert tab.js("document.querySelector('.strip').clientWidth") >= least
            assert tab.js("document.documentElement.scrollWidth") == width
        parts = "['settings', 'chat', 'engine'].filter((id) => document.getElementById(id).checkVisibility())"
        for view in ("chat", "settings", "engine", "chat"):  # one at a time where it is narrow
            tab.click(f"[data-view={view}]")
            assert tab.js(parts) == [view]
            assert tab.js("document.documentElement.scrollWidth") == 390


def test_curves_have_axes(browser: Browser) -> None:
    with scripted(browser) as (_, tab):
        top = "import('./page/live.js').then(({{roundTop}}) => {}.map((n) => roundTop(n, {})))"
        assert tab.js(top.format([0, 0.4, 1, 17, 554, 9e5], "false")) == [1, 0.4, 1, 20, 600, 1e6]
        assert tab.js(top.format([0, 1, 3, 7], "true")) == [2, 2, 4, 8]
        tab.until("document.querySelectorAll('.curve').length === 4")
        ask(tab)
        marks = (
            "[...document.querySelectorAll('.curve:nth-child(3) .{} span')].map((s) => s.innerText)"
        )
        assert tab.js(marks.format("times")) == ["−5 min", "−4", "−3", "−2", "−1", "now"]
        assert tab.js(marks.format("levels"))[2] == "0"


# ---- everybody ----


def test_buttons_of_the_head_do_not_touch(browser: Browser) -> None:
    boxes = (
        "[...document.querySelectorAll('.top button, .views button')].filter((b) => b.checkVisibility())"
        ".map((b) => b.getBoundingClientRect()).map(({left, right}) => [left, right])"
    )
    with scripted(browser, says("x")) as (_, tab):
        ask(tab)
        tab.until("!document.querySelector('#chats-open').hidden")
        tab.js("document.querySelector('#key-open').hidden = false")
        for width in (1280, 1000, 760):
            tab.resize(width, 800)
            found = tab.js(boxes)
            assert len(found) == 5
            assert all(left - right >= 8 for (_, right), (left, _) in pairwise(found))


def test_all_can_be_done_by_keyboard_and_has_a_name(browser: Browser) -> None:
    with scripted(browser, says("`a`\n\n```py\nb\n```"), says("c")) as (_, tab):
        assert tab.js("document.activeElement.id") == "question"
        tab.write("Hi")
        tab.press("Enter")
        wait_for_answers(tab, 1)
        tab.js("document.querySelector('.skip').focus()")
        seen = []
        for _ in range(40):
            seen.append(
                tab.js("document.activeElement.ariaLabel ?? document.activeElement.innerText")
            )
            tab.press("Tab")
        for name in ("Settings", "Engine", "New chat", "Copy message", "Copy code", "Answer anew"):
            assert name in seen, seen
        tab.click("[data-view=settings]")
        nodes = tab.ask("Accessibility.getFullAXTree")["nodes"]
        for node in nodes:
            role = node.get("role", {}).get("value")
            if role in ("button", "textbox", "spinbutton", "combobox", "radio", "link", "dialog"):
                assert node["name"]["value"], node
