"""A scripted session: the official `openai` package against running servers.

    openai_session.py URL [--keyed URL --key KEY] [--slow URL] [--encoder URL] [--translator URL]

URL is a server's address without a path. The keyed server requires KEY. The slow server has one slot and no queue,
and its answers take so long that other requests arrive meanwhile. The encoder serves a model with a mask, <mask>; the
translator serves an encoder-decoder model with languages __de__ and __fr__. Prints one line per check: "ok NAME",
"FAILED NAME: why" or "skipped NAME: why". The exit status is 1 if a check failed.

The checks are valid for any model that has a chat template and preserves the text of a prompt, or is of these kinds:
they compare shapes, and answers that must be equal, but never the content of an answer.
"""

import argparse
import asyncio
import json
import re
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

import openai
import pydantic

from runner import check, run_checks

STORY = "Once upon a time, there was a"
CHAT = [{"role": "user", "content": "Hello! Who are you?"}]
# Timeout of every wait.
PATIENCE_S = 120


class Server:
    """A running server and a client for it."""

    def __init__(self, url, key="none"):
        self.url = url.rstrip("/")
        self.options = {"base_url": f"{self.url}/v1", "api_key": key, "timeout": PATIENCE_S, "max_retries": 0}
        self.client = openai.OpenAI(**self.options)
        self.model = self.client.models.list().data[0].id

    def async_client(self, **options):
        return openai.AsyncOpenAI(**{**self.options, **options})

    def complete(self, prompt=STORY, *, client=None, **wish):
        return (client or self.client).completions.create(**self.wish(wish), prompt=prompt)

    def chat(self, messages=CHAT, *, client=None, **wish):
        return (client or self.client).chat.completions.create(**self.wish(wish), messages=messages)

    def wish(self, wish):
        """Returns request parameters, by default greedy and short."""
        return {"model": self.model, "temperature": 0, "max_tokens": 24, **wish}

    def metric(self, name, **labels):
        """Returns the sum of the metric's series that have the labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE_S) as page:
            lines = page.read().decode().splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        series = [line for line in lines if re.match(rf"{name}[{{ ]", line)]
        assert series, f"/metrics has no {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in series if all(label in line for label in wanted))

    def until(self, reached, name, **labels):
        """Reads the metric until `reached` is true for its value."""
        deadline = time.monotonic() + PATIENCE_S
        while not reached(value := self.metric(name, **labels)):
            assert time.monotonic() < deadline, f"{name} stays at {value}"

    def until_idle(self):
        self.until(lambda running: running == 0, "mainstem_num_requests_running")


class Streamed:
    """The concatenated choices of a stream, and its usage."""

    def __init__(self, chunks):
        self.texts, self.finishes, self.ids, self.usage, self.ids_seen = {}, {}, {}, None, set()
        for chunk in chunks:
            self.add(chunk)

    def add(self, chunk):
        assert self.usage is None, f"a chunk follows the one with the usage: {chunk}"
        self.ids_seen.add(chunk.id)
        for choice in chunk.choices:
            index = choice.index
            assert index not in self.finishes, f"choice {index} continues after its finish: {choice}"
            text = choice.delta.content if hasattr(choice, "delta") else choice.text
            self.texts[index] = self.texts.get(index, "") + (text or "")
            self.ids.setdefault(index, []).extend(extra(choice, "token_ids") or [])
            if choice.finish_reason is not None:
                self.finishes[index] = choice.finish_reason
        if not chunk.choices:
            self.usage = chunk.usage
            assert self.usage is not None, f"a chunk with neither choice nor usage: {chunk}"


def extra(choice, name):
    """Returns a member that the package does not know."""
    return (choice.model_extra or {}).get(name)


def equal(got, wanted, what):
    assert got == wanted, f"{what}: {got!r} instead of {wanted!r}"


def refused(kind, call, **members):
    """Calls `call` and returns the error that it raises, which must be of this kind and have these members."""
    try:
        answer = call()
    except kind as error:
        for name, wanted in members.items():
            equal(getattr(error, name), wanted, f"{name} of {error}")
        assert error.message, "an error has a message"
        return error
    raise AssertionError(f"not rejected with {kind.__name__}: {answer}")


def same_streamed(whole, chunks, what):
    """Checks that a stream and a complete response have the same content."""
    streamed = Streamed(chunks)
    texts = {
        choice.index: choice.message.content if hasattr(choice, "message") else choice.text
        for choice in whole.choices
    }
    equal(streamed.texts, texts, f"{what}, streamed")
    equal(
        streamed.finishes,
        {choice.index: choice.finish_reason for choice in whole.choices},
        f"finishes of {what}",
    )
    equal(len(streamed.ids_seen), 1, f"ids within {what}")
    return streamed


@check("plain")
def models(server):
    listed = server.client.models.list().data
    equal(len(listed), 1, "models")
    one = server.client.models.retrieve(server.model)
    equal((one.id, one.object), (server.model, "model"), "the model retrieved")
    assert one.model_extra["max_model_len"] > 0, "max_model_len is there"
    refused(openai.NotFoundError, lambda: server.client.models.retrieve("no-such-model"))


@check("plain")
def files_and_batches_need_a_folder(server):
    refused(openai.InternalServerError, lambda: server.client.files.list(), status_code=501, code="batches_disabled")


@check("keyed")
def a_batch_of_chats(server):
    bodies = {"said": server.wish({"messages": CHAT}), "refused": {"messages": CHAT, "top_p": 7}}
    lines = [
        json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})
        for name, body in bodies.items()
    ]
    files, batches = server.client.files, server.client.batches
    requests = files.create(file=("chats.jsonl", "\n".join(lines).encode()), purpose="batch")
    equal((requests.filename, requests.purpose, requests.bytes), ("chats.jsonl", "batch", len("\n".join(lines))), "file")
    batch = batches.create(
        input_file_id=requests.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"of": "a test"},
    )
    deadline = time.monotonic() + PATIENCE_S
    while (batch := batches.retrieve(batch.id)).status in ("validating", "in_progress", "finalizing"):
        assert time.monotonic() < deadline, f"the batch stays {batch.status}"
    equal((batch.status, batch.metadata), ("completed", {"of": "a test"}), "the batch")
    counts = batch.request_counts
    equal((counts.total, counts.completed, counts.failed), (2, 1, 1), "its requests")
    answer, failure = (json.loads(files.content(file).text) for file in (batch.output_file_id, batch.error_file_id))
    said = answer["response"]["body"]["choices"][0]["message"]["content"]
    equal((answer["custom_id"], said), ("said", answer_to_chat(server)), "the answer")
    equal((failure["custom_id"], failure["response"]["status_code"]), ("refused", 400), "the error")
    equal([one.id for one in batches.list(limit=1)][0], batch.id, "the newest batch")
    assert requests.id in [one.id for one in files.list(purpose="batch", limit=1)], "the file is in a page of the list"
    refused(openai.ConflictError, lambda: batches.cancel(batch.id))
    assert files.delete(requests.id).deleted, "the file is deleted"
    refused(openai.NotFoundError, lambda: files.retrieve(requests.id))


@check("plain")
def completion_streamed_or_not(server):
    whole = server.complete()
    equal((whole.object, whole.model), ("text_completion", server.model), "the envelope")
    assert whole.id.startswith("cmpl-") and whole.choices[0].text, f"an answer: {whole}"
    same_streamed(whole, server.complete(stream=True), "a completion")


@check("plain")
def chat_streamed_or_not(server):
    whole = server.chat()
    equal((whole.object, whole.model), ("chat.completion", server.model), "the envelope")
    message = whole.choices[0].message
    assert (
        whole.id.startswith("chatcmpl-") and message.role == "assistant" and message.content
    ), f"an answer: {whole}"
    chunks = list(server.chat(stream=True))
    same_streamed(whole, chunks, "a chat")
    roles = [choice.delta.role for chunk in chunks for choice in chunk.choices]
    equal((roles[0], set(roles[1:])), ("assistant", {None}), "the role opens the answer")


def answer_to_chat(server):
    said = server.chat().choices[0].message.content
    assert len(said) > 5, f"an answer to stop in the middle of: {said!r}"
    return said


@check("plain")
def chat_through_the_stream_helper(server):
    said = answer_to_chat(server)
    # The helper rejects answers that were cut off by max_tokens.
    stop = said[2:5]
    with server.client.chat.completions.stream(**server.wish({"stop": stop}), messages=CHAT) as stream:
        final = stream.get_final_completion()
    equal(final.choices[0].message.content, said[: said.find(stop)], "the helper's answer")


@check("plain")
def chat_of_several_turns_and_parts(server):
    turns = CHAT + [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Tell me a story."}]
    longer = server.chat(turns)
    assert longer.usage.prompt_tokens > server.chat().usage.prompt_tokens, "turns are in the prompt"
    in_parts = [{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}]
    equal(
        server.chat(in_parts).choices[0].message.content,
        server.chat().choices[0].message.content,
        "a text part",
    )
    # An answer can be sent back unchanged.
    answer = server.chat().choices[0].message
    assert server.chat(CHAT + [answer, CHAT[0]]).choices[0].finish_reason, "the answer's own message is taken"


@check("plain")
def usage(server):
    for ask in (server.complete, server.chat):
        whole = ask().usage
        equal(whole.total_tokens, whole.prompt_tokens + whole.completion_tokens, "total_tokens")
        assert 0 < whole.completion_tokens <= 24 and whole.prompt_tokens > 0, f"tokens: {whole}"
        asked = Streamed(ask(stream=True, stream_options={"include_usage": True}))
        equal(asked.usage.model_dump(), whole.model_dump(), "usage of a stream")
        equal(Streamed(ask(stream=True)).usage, None, "usage that nobody asked for")


@check("plain")
def max_tokens(server):
    for limit in (1, 7):
        answer = server.complete(max_tokens=limit, extra_body={"ignore_eos": True})
        equal(
            (answer.choices[0].finish_reason, answer.usage.completion_tokens),
            ("length", limit),
            "the end at max_tokens",
        )
    new_name = server.chat(max_tokens=None, max_completion_tokens=2, extra_body={"ignore_eos": True})
    equal(new_name.usage.completion_tokens, 2, "max_completion_tokens")


@check("plain")
def completion_logprobs(server):
    for echo in (False, True):
        whole = server.complete(logprobs=2, echo=echo, extra_body={"return_token_ids": True})
        choice, scores = whole.choices[0], whole.choices[0].logprobs
        lists = (scores.tokens, scores.token_logprobs, scores.top_logprobs, scores.text_offset)
        tokens = whole.usage.completion_tokens + (whole.usage.prompt_tokens if echo else 0)
        equal([len(entries) for entries in lists], [tokens] * 4, "entries of the four lists")
        begin = extra(choice, "prompt_token_ids")[: 1 if echo else 0]
        for number, (token, logprob, top, offset) in enumerate(zip(*lists)):
            if number < len(begin):
                equal((logprob, top), (None, None), "scores of a prompt's first token")
                continue
            equal(choice.text[offset : offset + len(token)], token, f"the text at offset {offset}")
            assert (
                logprob <= 0 and top[token] == logprob and 2 <= len(top) <= 3
            ), f"scores of {token!r}: {logprob}, {top}"
        drawn = list(zip(scores.token_logprobs, scores.top_logprobs))[-whole.usage.completion_tokens :]
        assert all(own == max(top.values()) for own, top in drawn), "the greedy token is the most likely"
        equal(choice.text.startswith(STORY), echo, "echo")


@check("plain")
def chat_logprobs(server):
    whole = server.chat(logprobs=True, top_logprobs=3)
    entries = whole.choices[0].logprobs.content
    equal(len(entries), whole.usage.completion_tokens, "entries")
    # The end token has an entry, but no text.
    ended = whole.choices[0].finish_reason == "stop"
    texts = entries[:-1] if ended else entries
    spelled = b"".join(bytes(entry.bytes) for entry in texts).decode(errors="replace")
    equal(spelled, whole.choices[0].message.content, "the bytes of the entries")
    for entry in entries:
        ranked = [top.logprob for top in entry.top_logprobs]
        equal(
            (len(ranked), ranked), (3, sorted(ranked, reverse=True)), f"top_logprobs beside {entry.token!r}"
        )
        equal((entry.token, entry.logprob), (entry.top_logprobs[0].token, ranked[0]), "the greedy token")
    chunks = list(server.chat(logprobs=True, top_logprobs=3, stream=True))
    scored = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    equal([entry for scores in scored for entry in scores.content], entries, "entries of a stream")


@check("plain")
def choices_of_a_seed(server):
    wish = {"n": 3, "seed": 7, "temperature": 4, "top_p": 1, "extra_body": {"return_token_ids": True}}
    for ask in (server.complete, server.chat):
        whole = ask(**wish)
        equal([choice.index for choice in whole.choices], [0, 1, 2], "indices")
        again = [choice.model_dump() for choice in ask(**wish).choices]
        equal(again, [choice.model_dump() for choice in whole.choices], "the same seed again")
        streamed = same_streamed(whole, ask(**wish, stream=True), "three choices")
        assert len(set(streamed.texts.values())) > 1, "choices differ from each other"
        drawn = sum(len(ids) for ids in streamed.ids.values())
        equal(whole.usage.completion_tokens, drawn, "usage of all choices")
        equal(whole.usage.prompt_tokens, ask().usage.prompt_tokens, "the prompt counts once")


@check("plain")
def stop_strings(server):
    whole = server.complete(logprobs=0).choices[0]
    text, starts = whole.text, whole.logprobs.text_offset
    # From the middle of one token into the one after the next.
    middle = len(starts) // 2
    across = text[(starts[middle] + starts[middle + 1]) // 2 : starts[middle + 2] + 1]
    for stop, first in ((across, across), (["never said", across], across), ([across, text[3:5]], text[3:5])):
        answer = server.complete(stop=stop)
        choice = answer.choices[0]
        equal(
            (choice.text, choice.finish_reason),
            (text[: text.find(first)], "stop"),
            f"the text before {stop!r}",
        )
        equal(extra(choice, "stop_reason"), first, "stop_reason")
        same_streamed(answer, server.complete(stop=stop, stream=True), f"an answer with the stop {stop!r}")
    kept = server.complete(stop=across, extra_body={"include_stop_str_in_output": True}).choices[0].text
    equal(kept, text[: text.find(across) + len(across)], "the text with the stop string kept")
    unused = server.complete(stop="never said").choices[0]
    equal(
        (unused.text, extra(unused, "stop_reason")), (text, None), "the text with a stop that does not come"
    )
    said = answer_to_chat(server)
    stopped = server.chat(stop=said[2:5])
    equal(stopped.choices[0].message.content, said[: said.find(said[2:5])], "a chat up to its stop")
    same_streamed(stopped, server.chat(stop=said[2:5], stream=True), "a chat with a stop")


@check("plain")
def stop_tokens_and_least_lengths(server):
    wish = {"return_token_ids": True, "ignore_eos": True}
    ids = extra(server.complete(extra_body=wish).choices[0], "token_ids")
    stop = ids[5]
    choice = server.complete(extra_body={**wish, "stop_token_ids": [stop]}).choices[0]
    equal(extra(choice, "token_ids"), ids[: ids.index(stop) + 1], "tokens up to the stop token")
    equal(
        (choice.finish_reason, extra(choice, "stop_reason")), ("stop", stop), "the stop token as the reason"
    )
    least = server.complete(extra_body={**wish, "stop_token_ids": [stop], "min_tokens": 9})
    assert least.usage.completion_tokens >= 9, f"min_tokens: {least.usage}"
    assert (
        stop not in extra(least.choices[0], "token_ids")[:9]
    ), "the stop token is not sampled before min_tokens"


@check("plain")
def sampling_extensions(server):
    greedy = server.complete().choices[0].text
    equal(server.complete(temperature=1, extra_body={"top_k": 1}).choices[0].text, greedy, "top_k 1")
    equal(server.complete(temperature=1, top_p=1e-6).choices[0].text, greedy, "a tiny top_p")
    equal(server.complete(temperature=1, extra_body={"min_p": 1}).choices[0].text, greedy, "min_p 1")
    first = extra(
        server.complete(max_tokens=1, extra_body={"return_token_ids": True}).choices[0], "token_ids"
    )[0]
    banned = server.complete(
        max_tokens=1, logit_bias={str(first): -100}, extra_body={"return_token_ids": True}
    )
    assert extra(banned.choices[0], "token_ids") != [first], "a token with the bias -100 is not sampled"


@check("plain")
def token_ids(server):
    whole = server.complete(extra_body={"return_token_ids": True})
    choice = whole.choices[0]
    prompt, ids = extra(choice, "prompt_token_ids"), extra(choice, "token_ids")
    equal(
        (len(prompt), len(ids)), (whole.usage.prompt_tokens, whole.usage.completion_tokens), "ids and usage"
    )
    streamed = Streamed(server.complete(stream=True, extra_body={"return_token_ids": True}))
    equal(streamed.ids, {0: ids}, "ids of a stream")
    by_ids = server.complete(prompt)
    equal((by_ids.choices[0].text, by_ids.usage), (choice.text, whole.usage), "the prompt as ids")
    tokens = server.client.post("/tokenize", cast_to=object, body={"model": server.model, "prompt": STORY})
    equal((tokens["tokens"], tokens["count"]), (prompt, len(prompt)), "/v1/tokenize")
    text = server.client.post("/detokenize", cast_to=object, body={"model": server.model, "tokens": ids})
    equal(text["prompt"], choice.text, "/v1/detokenize")


@check("plain")
def batches_of_prompts(server):
    prompts = [STORY, "The dog", "One day"]
    singles = [server.complete(prompt) for prompt in prompts]
    ids = [
        extra(server.complete(prompt, extra_body={"return_token_ids": True}).choices[0], "prompt_token_ids")
        for prompt in prompts
    ]
    for batch in (prompts, ids):
        whole = server.complete(batch)
        equal([choice.index for choice in whole.choices], [0, 1, 2], "indices")
        equal(
            [choice.text for choice in whole.choices],
            [single.choices[0].text for single in singles],
            "a batch",
        )
        equal(
            whole.usage.total_tokens, sum(single.usage.total_tokens for single in singles), "usage of a batch"
        )
        same_streamed(whole, server.complete(batch, stream=True), "a batch")
    equal(len(server.complete(prompts, n=2).choices), 6, "choices of three prompts, two for each")


@check("plain")
def bad_requests(server):
    bad = openai.BadRequestError
    refused(
        bad,
        lambda: server.complete(temperature=-1),
        status_code=400,
        param="temperature",
        code="invalid_value",
    )
    refused(bad, lambda: server.complete(n=0), param="n", code="invalid_value")
    refused(
        bad,
        lambda: server.complete(extra_body={"length_penalty": 0.5}),
        param="length_penalty",
        code="invalid_value",
    )
    refused(
        bad,
        lambda: server.complete(extra_body={"lora_path": "somewhere"}),
        param="lora_path",
        code="unsupported_parameter",
    )
    completions = server.client.completions.with_raw_response
    misspelt = completions.create(**server.wish({"extra_body": {"tempreature": 1}}), prompt=STORY)
    equal(misspelt.headers.get("x-mainstem-ignored"), "tempreature", "the header with ignored fields")
    refused(bad, lambda: server.complete([10**9]), param="prompt", code="invalid_value")
    refused(bad, lambda: server.chat([]), param="messages", code="invalid_value")
    refused(bad, lambda: server.chat(top_logprobs=2), param="top_logprobs", code="invalid_value")
    picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    refused(
        bad, lambda: server.chat([{"role": "user", "content": picture}]), param="messages[0].content[0].type"
    )
    wrong_model = {"param": "model", "code": "model_not_found", "status_code": 404}
    refused(openai.NotFoundError, lambda: server.complete(model="no-such-model"), **wrong_model)
    refused(openai.NotFoundError, lambda: server.chat(model="no-such-model"), **wrong_model)
    refused(bad, lambda: list(server.complete(stream=True, temperature=-1)), param="temperature")


@check("plain")
def longer_than_the_context(server):
    context = server.client.models.retrieve(server.model).model_extra["max_model_len"]
    ids = extra(server.complete(extra_body={"return_token_ids": True}).choices[0], "prompt_token_ids")
    too_long = (ids * context)[: context + 5]
    for call, param, number in (
        (lambda: server.complete(too_long), "prompt", context + 5),
        (lambda: server.complete(max_tokens=context), "max_tokens", context),
    ):
        error = refused(openai.BadRequestError, call, param=param, code="context_length_exceeded")
        numbers = re.findall(r"\d+", error.message)
        assert {str(number), str(context)} <= set(numbers), f"both numbers: {error.message}"
    words = [{"role": "user", "content": "word " * context}]
    refused(
        openai.BadRequestError, lambda: server.chat(words), param="messages", code="context_length_exceeded"
    )


@check("plain")
def request_ids(server):
    raw = server.client.completions.with_raw_response.create(
        **server.wish({}), prompt=STORY, extra_headers={"X-Request-Id": "session-1"}
    )
    equal(raw.headers["x-request-id"], "session-1", "the id that was sent")
    first, second = server.complete(), server.complete()
    assert first._request_id and first._request_id != second._request_id, "generated ids differ"


@check("plain")
def fifty_streams_at_once(server):
    def wish(seed):
        return {**server.wish({"temperature": 1, "max_tokens": 16, "seed": seed}), "prompt": STORY}

    async def one(client, seed):
        streamed = Streamed([])
        async for chunk in await client.completions.create(**wish(seed), stream=True):
            streamed.add(chunk)
        assert streamed.finishes.keys() == {0}, f"stream {seed} did not finish"
        return streamed.texts[0]

    async def all_at_once():
        async with server.async_client() as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(50)))

    alone = [server.client.completions.create(**wish(seed)).choices[0].text for seed in range(50)]
    equal(asyncio.run(all_at_once()), alone, "fifty texts, concurrently and alone")
    server.until_idle()


@check("keyed")
def keys(server):
    assert server.complete().choices[0].text, "the correct key is accepted"
    for key in ("wrong", "none"):
        client = openai.OpenAI(**{**server.options, "api_key": key})
        for call in (client.models.list, lambda: server.complete(client=client)):
            error = refused(openai.AuthenticationError, call, status_code=401, code="invalid_api_key")
            assert server.options["api_key"] not in str(error), "the error does not contain the key"
    assert (
        server.metric("mainstem_admission_rejections_total", reason="unauthorized") >= 4
    ), "rejections are counted"
    with urllib.request.urlopen(f"{server.url}/health", timeout=PATIENCE_S) as health:
        equal(health.status, 200, "/health needs no key")


def long_answer(server):
    """Returns parameters of a request that occupies the slow server's slot longer than any of the checks below
    takes."""
    context = server.client.models.retrieve(server.model).model_extra["max_model_len"]
    return {"max_tokens": context * 3 // 4, "extra_body": {"ignore_eos": True}}


@check("slow")
def hanging_up_in_mid_stream(server):
    aborted = server.metric("mainstem_request_success_total", finished_reason="abort")
    stream = server.complete(stream=True, **long_answer(server))
    next(iter(stream))
    equal(server.metric("mainstem_num_requests_running"), 1, "requests running")
    stream.close()
    server.until_idle()
    server.until(lambda count: count > aborted, "mainstem_request_success_total", finished_reason="abort")
    assert server.complete(max_tokens=1).choices[0].finish_reason == "length", "the slot is free again"


@check("slow")
def client_timeouts(server):
    async def impatient(call):
        async with server.async_client(timeout=0.5) as client:
            await call(client)

    async def whole(client):
        await client.completions.create(**server.wish(long_answer(server)), prompt=STORY)

    async def cancelled(client):
        task = asyncio.create_task(whole(client.with_options(timeout=PATIENCE_S)))
        await asyncio.to_thread(server.until, lambda running: running == 1, "mainstem_num_requests_running")
        task.cancel()
        await task

    for call, kind in ((whole, openai.APITimeoutError), (cancelled, asyncio.CancelledError)):
        try:
            asyncio.run(impatient(call))
        except kind:
            server.until_idle()
        else:
            raise AssertionError(f"no {kind.__name__}")


@check("slow")
def busy_and_retries(server):
    holder = server.complete(stream=True, **long_answer(server))
    next(iter(holder))
    error = refused(
        openai.RateLimitError, lambda: server.complete(max_tokens=1), status_code=429, code="server_busy"
    )
    pause_s = int(error.response.headers["retry-after"])
    assert (
        pause_s > 0 and len(re.findall(r"\d+", error.message)) >= 2
    ), f"queue depth and limit: {error.message}"
    refusals = server.metric("mainstem_admission_rejections_total", reason="busy")

    def patient():
        began = time.monotonic()
        create = server.client.with_options(max_retries=10).completions.with_raw_response.create
        return create(**server.wish({"max_tokens": 1}), prompt=STORY), time.monotonic() - began

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(patient)
        server.until(lambda count: count > refusals, "mainstem_admission_rejections_total", reason="busy")
        holder.close()
        answer, took_s = waiting.result(PATIENCE_S)
    equal(answer.parse().choices[0].finish_reason, "length", "the answer after retries")
    assert answer.retries_taken >= 1, "it was rejected first"
    assert (
        took_s >= pause_s * answer.retries_taken
    ), f"{answer.retries_taken} retries took {took_s} s, not {pause_s} s each"


@check("encoder")
def embeddings(server):
    def embed(texts, **wish):
        return server.client.embeddings.create(model=server.model, input=texts, **wish)

    texts = ["the rain", "a river of oil", "look"]
    # The package requests base64 by default, and returns numbers.
    whole = embed(texts)
    equal((whole.object, whole.model), ("list", server.model), "the envelope")
    equal([one.index for one in whole.data], [0, 1, 2], "indices")
    vectors = [one.embedding for one in whole.data]
    card = server.client.models.retrieve(server.model).model_extra
    equal((card["kind"], "/v1/embeddings" in card["endpoints"]), ("encoder", True), "kind and endpoints")
    for vector in vectors:
        equal(len(vector), card["dimensions"], "dimensions")
        assert abs(sum(x * x for x in vector) - 1) < 1e-5, "vectors have length 1"
    close(embed(texts, encoding_format="float"), vectors, "floats")
    for index, text in enumerate(texts):
        close(embed(text), vectors[index : index + 1], f"{text!r} alone")
    asyncio.run(embed_at_once(server, texts, vectors))
    cut = embed(texts[0], dimensions=4).data[0].embedding
    length = sum(x * x for x in vectors[0][:4]) ** 0.5
    close(embed(texts[0], dimensions=4), [[x / length for x in vectors[0][:4]]], "a cut vector")
    equal(len(cut), 4, "requested dimensions")
    assert whole.usage.prompt_tokens == whole.usage.total_tokens > 0, f"tokens: {whole.usage}"
    refused(openai.BadRequestError, lambda: embed(""), param="input")
    refused(openai.BadRequestError, lambda: embed(texts, dimensions=card["dimensions"] + 1), param="dimensions")
    error = refused(openai.BadRequestError, lambda: server.chat(), code="wrong_endpoint", param="model")
    assert "/v1/embeddings" in error.message, error.message


def close(answer, vectors, what):
    got = [one.embedding for one in answer.data]
    equal(len(got), len(vectors), what)
    for ours, theirs in zip(got, vectors):
        assert all(abs(a - b) < 1e-6 for a, b in zip(ours, theirs, strict=True)), f"{what}: {ours}, not {theirs}"


async def embed_at_once(server, texts, vectors):
    async with server.async_client() as client:
        asked = [client.embeddings.create(model=server.model, input=texts) for _ in range(20)]
        for answer in await asyncio.gather(*asked):
            close(answer, vectors, "concurrent vectors")


@check("encoder")
def masks(server):
    body = {"model": server.model, "input": ["the rain in <mask>", "a <mask> of <mask>"], "top_k": 3}
    answer = server.client.post("/fill-mask", cast_to=object, body=body)
    equal([len(text["masks"]) for text in answer["data"]], [1, 2], "masks")
    for mask in (mask for text in answer["data"] for mask in text["masks"]):
        scores = [candidate["score"] for candidate in mask["candidates"]]
        equal((len(scores), scores), (3, sorted(scores, reverse=True)), "candidates, most likely first")


@check("translator")
def sources(server):
    def translate(prompt, **wish):
        wish = {"ignore_eos": True, "return_token_ids": True, "skip_special_tokens": False, **wish}
        return server.complete(prompt, extra_body=wish)

    texts = ["the rain", "a river of oil", "look"]
    whole = translate(texts, forced_bos_token="de")
    for index, text in enumerate(texts):
        alone = translate(text, forced_bos_token="__de__").choices[0]
        equal(alone.text, whole.choices[index].text, f"{text!r} alone")
    opening = extra(whole.choices[0], "decoder_prompt_token_ids")
    equal(translate(texts, decoder_prompt=opening).choices, whole.choices, "the decoder prompt as ids")
    french = translate(texts[0], forced_bos_token="fr").choices[0]
    assert extra(french, "decoder_prompt_token_ids") != opening, "another language has another decoder prompt"
    wish = {"ignore_eos": True, "forced_bos_token": "de", "skip_special_tokens": False}
    streamed = Streamed(server.complete(texts, stream=True, extra_body=wish))
    equal(streamed.texts, {choice.index: choice.text for choice in whole.choices}, "the texts, streamed")
    error = refused(openai.BadRequestError, lambda: server.chat(), code="wrong_endpoint", param="model")
    assert "/v1/completions" in error.message, error.message


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Rome", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@check("plain")
def a_pydantic_model_as_the_response_format(server):
    class Cat(pydantic.BaseModel):
        color: Literal["black", "white", "red"]
        age: Annotated[int, pydantic.Field(ge=0, le=30)]
        names: Annotated[list[Literal["Tom", "Kit"]], pydantic.Field(max_length=3)]

    wish = server.wish({"max_tokens": 200, "n": 2, "temperature": 1, "seed": 5})
    answer = server.client.chat.completions.parse(**wish, messages=CHAT, response_format=Cat)
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Cat), f"the model's instance: {choice.message}"
        equal(choice.finish_reason, "stop", "the end of a constrained answer")
    error = refused(
        openai.BadRequestError,
        lambda: server.chat(stop="x", response_format={"type": "json_object"}),
        param="stop",
    )
    assert "response_format" in error.message, error.message


@check("plain")
def required_calls_streamed_or_not(server):
    wish = {"tools": [WEATHER], "max_tokens": 120, "n": 2, "temperature": 1, "seed": 3}
    wish["parallel_tool_calls"] = False
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, reason in (("required", "tool_calls"), (named, "stop")):
        whole = server.chat(**wish, tool_choice=choice)
        equal([end.finish_reason for end in whole.choices], [reason] * 2, f"the ends of calls with {choice}")
        written = {}
        for chunk in server.chat(**wish, tool_choice=choice, stream=True):
            for piece in chunk.choices:
                for call in piece.delta.tool_calls or []:
                    name, arguments = written.get(piece.index, ("", ""))
                    name, arguments = name + (call.function.name or ""), arguments + (call.function.arguments or "")
                    written[piece.index] = (name, arguments)
        for end in whole.choices:
            function = end.message.tool_calls[0].function
            equal(written[end.index], (function.name, function.arguments), "a streamed call")
            equal(function.name, "weather", "the name")
            arguments = json.loads(function.arguments)
            assert arguments["city"] in ("Rome", "Oslo") and 1 <= arguments["days"] <= 9, f"arguments: {arguments}"
        # The call goes back with its result.
        said = whole.choices[0].message
        result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "sunny"}
        after = server.chat(CHAT + [said, result], tools=[WEATHER])
        assert after.choices[0].finish_reason, "an answer follows the result"


def main():
    parser = argparse.ArgumentParser(description="A scripted session with the openai package.")
    parser.add_argument("plain")
    parser.add_argument("--keyed")
    parser.add_argument("--key", default="none")
    parser.add_argument("--slow")
    parser.add_argument("--encoder")
    parser.add_argument("--translator")
    parser.add_argument("--only", default="", help="run only checks whose name contains this text")
    args = parser.parse_args()
    servers = {
        "plain": Server(args.plain),
        "keyed": args.keyed and Server(args.keyed, args.key),
        "slow": args.slow and Server(args.slow),
        "encoder": args.encoder and Server(args.encoder),
        "translator": args.translator and Server(args.translator),
    }
    passed = run_checks(servers, args.only)
    if passed:
        print(f"client openai (Python) {openai.__version__}: every path and parameter of the API, in detail", flush=True)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
