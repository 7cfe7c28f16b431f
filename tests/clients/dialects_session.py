"""A scripted session: the official packages `anthropic` and `openai` (its Responses API) against running servers.

    dialects_session.py URL --keyed URL --key KEY

URL is a server's address without a path. The keyed server requires KEY and keeps responses. Prints one line per check:
"ok NAME", "FAILED NAME: why" or "skipped NAME: why". The exit status is 1 if a check failed.

The checks are valid for any model that has a chat template which shows tools: they compare shapes, and answers that
must be equal, but never the content of an answer.
"""

import argparse
import asyncio
import json
import sys
from importlib.metadata import version

import anthropic
import openai
import pydantic

from runner import check, run_checks

QUESTION = "Hello! Who are you?"
CHAT = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Ulm", "Bonn"]}},
    "required": ["city"],
    "additionalProperties": False,
}
# Parameters that the package does not have any more.
GREEDY = {"temperature": 0, "top_k": 40}
# Timeout of every wait.
PATIENCE_S = 120


class Server:
    """A running server and clients for it."""

    def __init__(self, url, key="none"):
        self.url = url.rstrip("/")
        self.options = {"api_key": key, "timeout": PATIENCE_S, "max_retries": 0}
        self.anthropic = anthropic.Anthropic(base_url=self.url, **self.options)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", **self.options)
        self.model = self.openai.models.list().data[0].id

    def message(self, messages=CHAT, **wish):
        wish = {"model": self.model, "max_tokens": 12, "extra_body": GREEDY, **wish}
        return self.anthropic.messages.create(messages=messages, **wish)

    def respond(self, input=QUESTION, **wish):
        wish = {"model": self.model, "max_output_tokens": 12, "temperature": 0, **wish}
        return self.openai.responses.create(input=input, **wish)


def claude_tool():
    return {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}


def function_tool():
    return {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}


def raises(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


@check("plain", "keyed")
def anthropic_messages_have_their_shape(plain, _):
    message = plain.message(system="Be brief.", metadata={"user_id": "me"})
    assert (message.type, message.role, message.model) == ("message", "assistant", plain.model)
    assert message.id.startswith("msg_") and message.stop_reason in ("max_tokens", "end_turn")
    assert [block.type for block in message.content] == ["text"]
    assert 0 < message.usage.output_tokens <= 12 and message.usage.input_tokens >= 0
    listed = plain.message([{"role": "user", "content": [{"type": "text", "text": QUESTION}]}])
    assert listed.content[0].text == plain.message().content[0].text


@check("plain", "keyed")
def anthropic_streams_are_the_whole_answer(plain, _):
    whole = plain.message()
    with plain.anthropic.messages.stream(
        model=plain.model, max_tokens=12, messages=CHAT, extra_body=GREEDY
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    kinds = [event.type for event in plain.message(stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"], kinds
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"], kinds
    assert set(kinds[2:-3]) == {"content_block_delta"}, kinds


@check("plain", "keyed")
def anthropic_streams_asynchronously(plain, _):
    async def talk():
        client = anthropic.AsyncAnthropic(base_url=plain.url, **plain.options)
        async with client.messages.stream(
            model=plain.model, max_tokens=12, messages=CHAT, extra_body=GREEDY
        ) as stream:
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(talk()) == plain.message().content[0].text


@check("plain", "keyed")
def anthropic_tools_are_called_and_answered(plain, _):
    wish = {"tools": [claude_tool()], "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 100}
    message = plain.message(**wish)
    assert message.stop_reason == "tool_use", message
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert call.name == "weather" and call.input["city"] in ("Ulm", "Bonn"), call
    with plain.anthropic.messages.stream(
        model=plain.model, messages=CHAT, extra_body=GREEDY, **wish
    ) as stream:
        deltas = [event.delta.partial_json for event in stream if event.type == "content_block_delta"
                  and event.delta.type == "input_json_delta"]
        final = stream.get_final_message()
    (streamed,) = [block for block in final.content if block.type == "tool_use"]
    assert streamed.input == call.input == json.loads("".join(deltas))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [*CHAT, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = plain.message(turns, tools=[claude_tool()], tool_choice={"type": "none"})
    assert answer.stop_reason in ("max_tokens", "end_turn"), answer


@check("plain", "keyed")
def anthropic_stop_sequences_end_an_answer(plain, _):
    text = plain.message(max_tokens=30).content[0].text
    stop = text[len(text) // 2 :][:3]
    message = plain.message(max_tokens=30, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop), message
    shown = "".join(block.text for block in message.content)
    assert shown == text[: text.index(stop)]


@check("plain", "keyed")
def anthropic_counts_the_tokens_of_a_prompt(plain, _):
    count = plain.anthropic.messages.count_tokens(model=plain.model, messages=CHAT).input_tokens
    usage = plain.message().usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens
    longer = plain.anthropic.messages.count_tokens(
        model=plain.model, messages=CHAT, system="Be brief.", tools=[claude_tool()]
    )
    assert longer.input_tokens > count


@check("plain", "keyed")
def anthropic_errors_have_their_classes(plain, keyed):
    error = raises(anthropic.BadRequestError, lambda: plain.message(max_tokens=0))
    assert error.body["error"]["type"] == "invalid_request_error" and "max_tokens" in error.message, error
    image = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}]
    error = raises(anthropic.BadRequestError, lambda: plain.message([{"role": "user", "content": image}]))
    assert "image" in error.message, error
    raises(anthropic.NotFoundError, lambda: plain.message(model="another"))
    raises(anthropic.BadRequestError, lambda: plain.message(max_tokens=10**6))
    stranger = anthropic.Anthropic(base_url=keyed.url, **{**keyed.options, "api_key": "wrong"})
    error = raises(
        anthropic.AuthenticationError,
        lambda: stranger.messages.create(model=keyed.model, max_tokens=1, messages=CHAT),
    )
    assert error.body["error"]["type"] == "authentication_error", error
    assert keyed.message().content


@check("plain", "keyed")
def responses_have_their_shape(plain, _):
    response = plain.respond(instructions="Be brief.", metadata={"a": "b"})
    assert (response.object, response.model, response.metadata) == ("response", plain.model, {"a": "b"})
    assert response.status in ("completed", "incomplete") and response.error is None
    (item,) = response.output
    assert (item.type, item.role, item.content[0].type) == ("message", "assistant", "output_text")
    assert response.output_text == item.content[0].text
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    listed = plain.respond([{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}])
    assert listed.output_text == plain.respond().output_text


@check("plain", "keyed")
def responses_stream_their_events(plain, _):
    whole = plain.respond()
    events = list(plain.respond(stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == f"response.{whole.status}", last
    assert text == last.response.output_text == whole.output_text
    # The helper of the package, which assembles the response of the events.
    with plain.openai.responses.stream(model=plain.model, input=QUESTION, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed" and final.output_text, kinds


@check("plain", "keyed")
def responses_call_functions(plain, _):
    wish = {"tools": [function_tool()], "tool_choice": {"type": "function", "name": "weather"}}
    response = plain.respond(**wish, max_output_tokens=100)
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("Ulm", "Bonn"), call
    with plain.openai.responses.stream(model=plain.model, input=QUESTION, temperature=0, **wish) as stream:
        done = [event for event in stream if event.type == "response.function_call_arguments.done"]
        final = stream.get_final_response()
    (streamed,) = [item for item in final.output if item.type == "function_call"]
    assert streamed.arguments == call.arguments == done[0].arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer = plain.respond([*CHAT, *response.output, result], tools=[function_tool()], tool_choice="none")
    assert answer.output_text, answer


@check("plain", "keyed")
def responses_are_parsed_by_a_schema(plain, _):
    class Place(pydantic.BaseModel):
        is_large: bool

    response = plain.openai.responses.parse(model=plain.model, input=QUESTION, text_format=Place)
    assert isinstance(response.output_parsed, Place), response


@check("plain", "keyed")
def responses_are_kept_and_continued(plain, keyed):
    first = keyed.respond()
    second = keyed.respond("Why?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    said = [*CHAT, *first.output, {"role": "user", "content": "Why?"}]
    assert keyed.respond(said, store=False).output_text == second.output_text
    streamed = list(keyed.respond("Why?", previous_response_id=first.id, stream=True))[-1].response
    assert streamed.output_text == second.output_text
    kept = keyed.openai.responses.retrieve(streamed.id)
    assert kept.to_dict() == streamed.to_dict()
    items = list(keyed.openai.responses.input_items.list(second.id, order="asc"))
    assert [item.content[0].text for item in items] == ["Why?"]
    keyed.openai.responses.delete(first.id)
    raises(openai.NotFoundError, lambda: keyed.openai.responses.retrieve(first.id))
    error = raises(openai.BadRequestError, lambda: keyed.respond("Why?", previous_response_id=first.id))
    assert error.code == "previous_response_not_found", error
    raises(openai.BadRequestError, lambda: plain.respond(store=True))


@check("plain", "keyed")
def responses_name_what_is_wrong(plain, _):
    for param, wish in [
        ("max_output_tokens", {"max_output_tokens": 10**6}),
        ("background", {"background": True}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("text.format.type", {"text": {"format": {"type": "xml"}}}),
    ]:
        error = raises(openai.BadRequestError, lambda: plain.respond(**wish))
        assert error.param == param and param in error.message, error


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--keyed", required=True)
    parser.add_argument("--key", required=True)
    arguments = parser.parse_args()
    passed = run_checks({"plain": Server(arguments.url), "keyed": Server(arguments.keyed, arguments.key)})
    if passed:
        print(f"client anthropic (Python) {version('anthropic')}: messages, streams with events, tools, thinking, count_tokens, errors", flush=True)
        print(f"client openai (Python), Responses API {version('openai')}: responses, streams with events, tools, `text.format`, kept conversations, errors", flush=True)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
