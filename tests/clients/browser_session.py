"""Checks of the web page in headless Chromium. Prints a line "ok NAME" or "FAILED NAME: WHY" for each check.

The servers are started by tests/clients/main.rs. With --screenshot FOLDER, pictures of the page are written there.
"""

import argparse
import json
import re
import threading
import urllib.request

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

from runner import run, title

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP mainstem.test 127.0.0.1",
]
VIEWS = ["chat", "completion", "inflight"]
RICH = """# A title

Some *text* with `code` and [a link](https://example.com).

1. one
2. two
   - nested

> a quote

```python
print("a line of code that is so long that it does not fit on a telephone", "and more of it")
```

| name | value |
|------|-------|
| a    | b     |
"""
CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


class Session:
    """A browser, with what its pages did wrong."""

    def __init__(self, browser, options):
        self.browser = browser
        self.options = options
        self.problems = []
        self.hosts = set()

    def page(self, url, **settings):
        context = self.browser.new_context(bypass_csp=settings.pop("bypass_csp", False), **settings)
        return self.tab(context, url)

    def tab(self, context, url):
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: message.type == "error" and self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        page.goto(url)
        return page


def answers(page):
    return page.locator(".message.assistant")


def ask(page, text):
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def finished(page, number=0):
    expect(answers(page).nth(number).locator("footer")).to_be_visible()


def scripted(page, deltas, finish="stop"):
    """Makes the server's next answers consist of these deltas."""
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))


def a_chat_streams_and_stops(session):
    page = session.page(session.options.slow)
    page.get_by_text("System prompt and parameters").click()
    page.get_by_label("Other parameters").fill('{"ignore_eos": true}')
    ask(page, "Tell me a story about a fox.")
    text = answers(page).locator(".text")
    expect(text).to_contain_text(" ")
    first = text.text_content().strip()
    expect(text).not_to_have_text(first)
    page.click("#stop")
    finished(page)
    expect(answers(page).locator("footer")).to_contain_text("stopped")
    assert text.text_content().startswith(first), (first, text.text_content())
    expect(page.locator("#send")).to_be_visible()


def answers_and_messages_have_versions(session):
    page = session.page(session.options.plain)
    ask(page, "Hello!")
    finished(page)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_label("Version 2 of 2")).to_be_visible()
    page.get_by_role("button", name="Previous version").click()
    expect(page.get_by_label("Version 1 of 2")).to_be_visible()
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("What is your name?")
    page.locator(".message .composer button[type=submit]").click()
    finished(page)
    expect(page.locator(".message.user .text")).to_have_text("What is your name?")
    page.get_by_role("button", name="Previous version").first.click()
    expect(page.locator(".message.user .text")).to_have_text("Hello!")


def conversations_are_kept_exported_and_imported(session):
    page = session.page(session.options.plain)
    ask(page, "Hello, who are you?")
    finished(page)
    answer = answers(page).locator(".text").text_content()
    page.reload()
    expect(answers(page).locator(".text")).to_have_text(answer)
    with page.expect_download() as download:
        page.get_by_role("button", name="JSON").click()
    file = download.value.path()
    with page.expect_download() as download:
        page.get_by_role("button", name="Markdown").click()
    assert answer.split("\n")[0] in open(download.value.path(), encoding="utf-8").read()
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()
    expect(page.locator(".message")).to_have_count(0)
    page.set_input_files("input[type=file]", file)
    expect(answers(page).locator(".text")).to_have_text(answer)
    page.set_input_files("input[type=file]", {"name": "x.json", "mimeType": "application/json", "buffer": b'{"a": 1}'})
    expect(page.get_by_role("alert").first).to_contain_text("x.json cannot be imported")


def hostile_text_stays_text(session):
    page = session.page(session.options.plain)
    links = "[a](javascript:window.hacked=1) [b](data:text/html,x) ![c](https://example.com/c.png) <https://x.y>"
    scripted(page, [{"content": HOSTILE + "\n\n" + links + "\n\n```html\n" + HOSTILE + "\n```\n\n| a |\n|--|\n| " + HOSTILE + " |"}])
    ask(page, HOSTILE)
    finished(page)
    text = answers(page).locator(".text")
    expect(text).to_contain_text("<script>window.hacked=1</script>")
    assert text.locator("img, script").count() == 0
    hrefs = text.locator("a").evaluate_all("links => links.map(link => link.protocol)")
    assert set(hrefs) <= {"https:", "http:"}, hrefs
    expect(page.locator(".conversations .title").first).to_contain_text("<img src=x")
    assert page.locator(".conversations img").count() == 0
    assert page.evaluate("window.hacked") is None


def reasoning_and_calls_are_folded(session):
    page = session.page(session.options.plain)
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":'}}
    rest = {"index": 0, "function": {"arguments": ' "Oslo"}'}}
    scripted(page, [{"reasoning_content": "I should look."}, {"tool_calls": [call]}, {"tool_calls": [rest]}], "tool_calls")
    ask(page, "How is the weather in Oslo?")
    finished(page)
    expect(page.locator("details.reasoning")).not_to_have_attribute("open", "")
    page.locator("details.call summary").click()
    expect(page.locator("details.call pre")).to_contain_text('"city": "Oslo"')
    page.unroute("**/v1/chat/completions")
    sent = {}

    def answer(route):
        sent.update(json.loads(route.request.post_data))
        route.fulfill(content_type="text/event-stream", body='data: {"choices": [{"delta": {"content": "Sunny."}}]}\n\ndata: [DONE]\n\n')

    page.route("**/v1/chat/completions", answer)
    page.get_by_label("Result of weather").fill("sunny")
    page.get_by_role("button", name="Send results").click()
    expect(answers(page).nth(1).locator(".text")).to_have_text("Sunny.")
    assert sent["messages"][-1] == {"role": "tool", "content": "sunny", "tool_call_id": "call_1"}, sent
    assert sent["messages"][-2]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'


def parameters_reach_the_server(session):
    page = session.page(session.options.plain)
    page.get_by_text("System prompt and parameters").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Other parameters").fill("{")
    ask(page, "Hi")
    expect(page.get_by_role("alert").first).to_contain_text("Other parameters: this is not valid JSON")
    page.get_by_label("Other parameters").fill('{"top_k": 3}')
    with page.expect_request("**/v1/chat/completions") as request:
        page.get_by_role("button", name="Answer").click()
    body = json.loads(request.value.post_data)
    assert (body["temperature"], body["top_k"]) == (0.5, 3) and body["messages"][0]["content"] == "Be brief.", body
    finished(page)
    page.get_by_label("Temperature").fill("-1")
    ask(page, "Hi")
    expect(page.get_by_role("alert").first).to_contain_text("temperature")


def tokens_show_their_probabilities(session):
    page = session.page(session.options.plain + "#completion")
    page.fill("#completion-prompt", "Once upon a time")
    page.get_by_role("button", name="Complete", exact=True).click()
    tokens = page.locator("#completion-output .token")
    expect(tokens).to_have_count(64)
    tokens.nth(3).hover()
    expect(page.locator(".details tr.chosen th")).to_have_count(1)
    # The drawn token may be none of the five most probable ones.
    assert page.locator(".details tr").count() in (5, 6)
    page.focus("#completion-output")
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(4)).to_have_class("token selected")
    page.get_by_role("button", name="Count tokens").click()
    expect(page.locator("#view-completion .row small")).to_have_text(re.compile(r"^\d+ tokens$"))


def complete(url, number):
    body = json.dumps({"prompt": f"Once upon a time {number}", "max_tokens": 300 + 20 * number, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        urllib.request.urlopen(request, timeout=60).read()
    except OSError:
        pass  # The server is stopped before all of them have ended.


def streams_in_flight_are_drawn(session):
    page = session.page(session.options.slow + "#inflight", color_scheme="dark")
    expect(page.locator(".card")).to_contain_text("layers")
    requests = [threading.Thread(target=complete, args=(session.options.slow, n), daemon=True) for n in range(32)]
    for request in requests:
        request.start()
    bars = page.locator(".bar")
    expect(bars).to_have_count(32)
    slots = bars.locator(".slot").all_text_contents()
    assert sorted(map(int, slots)) == list(range(32)), slots
    count = bars.first.locator(".count")
    before = count.text_content()
    expect(count).not_to_have_text(before)
    if session.options.screenshot:
        # Long enough for the charts to have a shape.
        expect(count).to_have_text(re.compile(r"^1[5-9]\d/"), timeout=60_000)
        page.screenshot(path=f"{session.options.screenshot}/inflight.png")


def a_key_is_asked_for(session):
    page = session.page(session.options.keyed)
    expect(page.get_by_role("dialog")).to_be_visible()
    page.fill("#key-input", "wrong")
    page.get_by_role("button", name="Use key").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    page.fill("#key-input", session.options.key)
    page.get_by_role("button", name="Use key").click()
    ask(page, "Hello!")
    finished(page)
    assert session.options.key not in page.evaluate("JSON.stringify({...localStorage})")
    # What the browser reports of refused requests is no mistake of the page.
    session.problems[:] = [problem for problem in session.problems if "401" not in problem]


def accessible(page, what):
    found = Axe().run(page).response["violations"]
    summary = [(it["id"], [node["html"][:100] for node in it["nodes"]]) for it in found]
    assert not found, f"{what}: {summary}"


def the_page_is_accessible(session):
    for scheme in ["light", "dark"]:
        page = session.page(session.options.keyed, color_scheme=scheme, bypass_csp=True)
        expect(page.get_by_role("dialog")).to_be_visible()
        accessible(page, f"the dialog, {scheme}")
        page.close()
        session.problems[:] = [problem for problem in session.problems if "401" not in problem]
        page = session.page(session.options.slow, color_scheme=scheme, bypass_csp=True)
        scripted(page, [{"reasoning_content": "I think."}, {"content": RICH}, {"tool_calls": [CALL]}], "tool_calls")
        ask(page, "Hello!")
        finished(page)
        for fold in page.locator(".message summary").all():
            fold.click()
        ask(page, "An error")
        expect(page.get_by_role("alert").first).to_be_visible()
        page.get_by_text("System prompt and parameters").click()
        for view in VIEWS:
            page.click(f"a[data-view={view}]")
            expect(page.locator(f"#view-{view}")).to_be_visible()
            if view == "inflight":
                expect(page.locator(".card")).to_contain_text("layers")
            accessible(page, f"{view}, {scheme}")


def a_phone_needs_no_sideways_scrolling(session):
    page = session.page(session.options.plain, viewport={"width": 360, "height": 740})
    scripted(page, [{"content": RICH}])
    ask(page, "Hello!")
    finished(page)
    for view in VIEWS:
        page.click(f"a[data-view={view}]")
        expect(page.locator(f"#view-{view}")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view


def the_keyboard_is_enough(session):
    page = session.page(session.options.plain)
    page.wait_for_selector("#prompt")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.dataset.view || ''"))
    assert {"prompt", "send", "new-chat", *VIEWS} <= seen, seen


def views_keep_what_they_show(session):
    page = session.page(session.options.plain + "#completion")
    page.fill("#completion-prompt", "Once")
    page.click("a[data-view=inflight]")
    page.click("a[data-view=completion]")
    expect(page.locator("#completion-prompt")).to_have_value("Once")


def a_deleted_conversation_stays_deleted(session):
    page = session.page(session.options.slow)
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_text("System prompt and parameters").click()
    page.get_by_label("Other parameters").fill('{"ignore_eos": true}')
    ask(page, "Tell me a story about a fox.")
    expect(answers(page).locator(".text")).to_contain_text(" ")
    page.get_by_role("button", name="Delete").click()
    expect(page.locator(".message")).to_have_count(0)
    page.reload()
    expect(page.locator(".conversations .title")).to_have_text(["New chat"])


def tabs_show_each_others_changes(session):
    first = session.page(session.options.plain)
    second = session.tab(first.context, session.options.plain)
    expect(second.locator("#prompt")).to_be_visible()
    scripted(first, [{"content": "From the first tab."}])
    ask(first, "One")
    finished(first)
    second.get_by_role("button", name="One", exact=True).click()
    expect(answers(second).locator(".text")).to_have_text("From the first tab.")
    scripted(second, [{"content": "From the second tab."}])
    ask(second, "Two")
    expect(answers(first).locator(".text")).to_have_text(["From the first tab.", "From the second tab."])
    first.get_by_text("System prompt and parameters").click()
    first.get_by_label("System prompt").fill("Be brief.")
    expect(second.get_by_label("System prompt")).to_have_value("Be brief.")
    first.on("dialog", lambda dialog: dialog.accept())
    first.get_by_role("button", name="Delete").click()
    expect(second.get_by_role("alert").first).to_contain_text('"One" was deleted in another tab')
    expect(second.locator(".message")).to_have_count(0)


def tabs_keep_what_both_have_written(session):
    first = session.page(session.options.plain)
    ask(first, "Hello!")
    finished(first)
    second = session.tab(first.context, session.options.plain)
    expect(answers(second)).to_have_count(1)
    # So neither tab knows of the other's message until it keeps its own.
    for page in [first, second]:
        page.evaluate("BroadcastChannel.prototype.postMessage = () => {}")
    for page, text in [(first, "left"), (second, "right")]:
        scripted(page, [{"content": f"The {text} answer."}])
        ask(page, text)
        finished(page, 1)
    expect(second.get_by_label("Version 2 of 2")).to_be_visible()
    first.reload()
    shown = first.locator(".message .text")
    expect(shown.nth(2)).to_have_text("right")
    expect(shown.nth(3)).to_have_text("The right answer.")
    first.get_by_role("button", name="Previous version").click()
    expect(shown.nth(2)).to_have_text("left")
    expect(shown.nth(3)).to_have_text("The left answer.")


def a_save_that_fails_loses_nothing(session):
    page = session.page(session.options.plain)
    ask(page, "Hello!")
    finished(page)
    # Saves fail after the browser has taken them, as they do when the disk is full.
    page.evaluate("""() => {
        const put = IDBObjectStore.prototype.put;
        IDBObjectStore.prototype.put = function (value) {
            const request = put.call(this, value);
            this.transaction.abort();
            return request;
        };
        window.mendSaves = () => { IDBObjectStore.prototype.put = put; };
    }""")
    scripted(page, [{"content": "The first answer."}])
    ask(page, "More?")
    finished(page, 1)
    page.evaluate("window.mendSaves()")
    scripted(page, [{"content": "The second answer."}])
    ask(page, "And?")
    finished(page, 2)
    page.reload()
    shown = page.locator(".message .text")
    expect(shown.nth(3)).to_have_text("The first answer.")
    expect(shown.nth(5)).to_have_text("The second answer.")


def an_answer_grows_while_another_tab_writes(session):
    first = session.page(session.options.slow)
    first.get_by_text("System prompt and parameters").click()
    first.get_by_label("Other parameters").fill('{"ignore_eos": true}')
    ask(first, "Tell me a story about a fox.")
    expect(answers(first).locator(".text")).to_contain_text(" ")
    second = session.tab(first.context, session.options.slow)
    second.on("dialog", lambda dialog: dialog.accept("A fox"))
    # The answer is kept from time to time, so the other tab has a part of it.
    expect(answers(second).locator(".text")).to_contain_text(" ")
    second.get_by_role("button", name="Rename").click()
    expect(first.locator(".conversations .open .title")).to_have_text("A fox")
    first.click("#stop")
    finished(first)
    text = answers(first).locator(".text").text_content()
    expect(answers(second).locator(".text")).to_have_text(text)
    expect(answers(second).locator("footer")).to_contain_text("stopped")
    for page in [first, second]:
        page.reload()
        expect(answers(page).locator(".text")).to_have_text(text)
        expect(page.locator(".conversations .open .title")).to_have_text("A fox")


def an_answer_that_is_cut_off_is_reported(session):
    page = session.page(session.options.plain)
    body = 'data: {"choices": [{"index": 0, "delta": {"content": "Half of"}}]}\n\n'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    ask(page, "Hello!")
    finished(page)
    expect(page.get_by_role("alert").first).to_contain_text("The connection ended")
    expect(answers(page).locator(".text")).to_have_text("Half of")


def an_address_without_tls_will_do(session):
    # Browsers trust 127.0.0.1 as they do TLS, but not this name, which the browser's arguments map to it.
    page = session.page(session.options.slow.replace("127.0.0.1", "mainstem.test"))
    ask(page, "Hello!")
    finished(page)
    session.hosts = {host.replace("mainstem.test", "127.0.0.1") for host in session.hosts}


CHECKS = [
    a_chat_streams_and_stops,
    answers_and_messages_have_versions,
    conversations_are_kept_exported_and_imported,
    hostile_text_stays_text,
    reasoning_and_calls_are_folded,
    parameters_reach_the_server,
    tokens_show_their_probabilities,
    streams_in_flight_are_drawn,
    a_key_is_asked_for,
    the_page_is_accessible,
    a_phone_needs_no_sideways_scrolling,
    the_keyboard_is_enough,
    views_keep_what_they_show,
    a_deleted_conversation_stays_deleted,
    tabs_show_each_others_changes,
    tabs_keep_what_both_have_written,
    a_save_that_fails_loses_nothing,
    an_answer_grows_while_another_tab_writes,
    an_answer_that_is_cut_off_is_reported,
    an_address_without_tls_will_do,
]


def complete_check(session, check, own):
    """Runs a check, after which the page must have done nothing wrong and asked only its own hosts."""
    check(session)
    expected = "400" if check is parameters_reach_the_server else None
    problems = [it for it in session.problems if expected is None or expected not in it]
    assert not problems, f"errors in the console: {problems}"
    assert session.hosts <= own, f"requests to {session.hosts - own}"


def main():
    parser = argparse.ArgumentParser()
    for name in ["plain", "slow", "keyed", "key", "chromium"]:
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--screenshot")
    parser.add_argument("--only", default="", help="run only checks whose name contains this text")
    options = parser.parse_args()
    own = {url.split("/")[2] for url in [options.plain, options.slow, options.keyed]}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=ARGUMENTS)
        for check in CHECKS:
            if options.only not in title(check):
                continue
            session = Session(browser, options)
            run(f"the web page: {title(check)}", complete_check, session, check, own)
            for context in browser.contexts:
                context.close()
        browser.close()


if __name__ == "__main__":
    main()
