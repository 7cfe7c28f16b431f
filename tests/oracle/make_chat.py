"""Writes transformers' output for the chat templates in tests/fixtures/chat.

    python tests/oracle/make_chat.py

For each NAME.jinja there, NAME.json contains conversations with the rendered text, or with the message of
raise_exception; expressions.json contains the text of every line of expressions.txt. Needs transformers and jinja2.
The clock is fixed at NOW. Conversations that fail for other reasons than raise_exception are recorded as failed,
without a message.

Invariant: the library renders everything; this script does not know the expected output of any template.
"""

import json
from datetime import datetime as real_datetime
from pathlib import Path

import jinja2
from transformers.utils import chat_template_utils

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "chat"
NOW = real_datetime(2025, 3, 4, 15, 6, 7)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


class Clock:
    """A clock that does not advance."""

    @staticmethod
    def now():
        return NOW


chat_template_utils.datetime = Clock


def said(role: str, content, **more) -> dict:
    return {"role": role, "content": content, **more}


def parts(*texts: str) -> list[dict]:
    return [{"type": "text", "text": text} for text in texts]


def call(name: str, **arguments) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


HELLO = [said("user", "Hello there")]
PAIR = [*HELLO, said("assistant", "  Hi, friend!  "), said("user", "How are you?")]
LED = [said("system", "  Be kind.\nAlways. "), *PAIR]
TWICE = [said("user", "one"), said("user", "two")]
WORDS = [said("user", "Grüße, 世界! 😀 \"quoted\" 'single' <b>&amp;</b> \\n {{ not code }} \t|")]
ENDS = [*HELLO, said("assistant", "Once upon a time")]
TRAILS = [*HELLO, said("assistant", "Once upon a time,  ")]
NAMED = [said("user", "I am here", name="Ann"), said("assistant", "Welcome")]
MANY = [said("system", "s"), said("user", "a"), said("assistant", "b"), said("user", "c"), said("tool", "d")]
ENOUGH = [said("user", "x"), said("user", "enough"), said("assistant", "y")]
CALLS = [
    *HELLO,
    said("assistant", None, tool_calls=[call("look_up", word="tree", limit=3, exact=True, zones=["b", "a"])]),
    said("tool", "wood"),
    said("assistant", "A tree is wood."),
]
TOOLS = [
    {
        "type": "function",
        "strict": True,
        "function": {
            "name": "look_up",
            "description": "Looks a word up",
            "parameters": {
                "type": "object",
                "description": "What to\nfind",
                "properties": {
                    "word": {"type": "string", "description": "Mot \"clé\""},
                    "limit": {"type": ["integer", "null"], "enum": [1, 2, None, "é"]},
                    "deep": {"properties": {"inner": {"type": "number"}}, "required": ["inner"]},
                },
                "required": ["word"],
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "parameters": {}}},
    {"type": "other"},
]
THOUGHT = [
    said("user", "2+2?"),
    said("assistant", "<think>\nadd\n</think>\n\n4"),
    said("user", "And 3+3?"),
    said("assistant", "<think>\nadd again\n</think>\n\n6"),
    said("tool", "checked"),
    said("tool", "twice"),
    said("assistant", "Six.", reasoning_content="surely"),
]
TYPED = [said("user", parts("first", "second")), said("assistant", parts("answer"))]


def case(messages, prompt=True, cut=False, **kwargs) -> dict:
    return {
        "messages": messages,
        "add_generation_prompt": prompt,
        "continue_final_message": cut,
        "kwargs": kwargs,
    }


# Cases for every template.
COMMON = [case(HELLO), case(PAIR), case(PAIR, False), case(LED), case(TWICE), case(WORDS), case(ENDS, False, True)]
CASES = {
    "chatml": [case(NAMED), case(TRAILS, False, True), case(TYPED)],
    "folded": [case([said("user", "q"), said("assistant", "a"), said("assistant", "b")]), case(TRAILS, False, True)],
    "dated": [
        case(CALLS),
        case(LED, custom_tools=TOOLS),
        case(HELLO, date_string="1 Jan 1970", tools=[{"b": 1, "a": 2}]),
        case(HELLO, custom_tools=TOOLS, tools_in_user_message=True),
        case([said("tool", "x"), said("ipython", "y")]),
        case([said("assistant", "", tool_calls=[call("a"), call("b")])]),
        case(TRAILS, False, True),
    ],
    "renamed": [case(TRAILS, False, True), case([said("user", "a"), said("model", "b")])],
    "either": [case(TYPED), case([said("assistant", None)]), case(TYPED, False, True)],
    "typed": [case(TYPED), case(TYPED, False, True)],
    "tools": [case(CALLS, tools=TOOLS), case(CALLS), case(HELLO, documents=[{"title": "t"}], papers=1)],
    "thinking": [
        case(THOUGHT),
        case(THOUGHT[:4]),
        case(THOUGHT[:3], enable_thinking=False),
        case(THOUGHT[:6], enable_thinking=True),
        case([*HELLO, said("assistant", None)]),
    ],
    "loops": [case(MANY), case(ENOUGH), case([said("system", "s")])],
    "spaces": [],
    "generation": [],
}


def typed(messages: list[dict]) -> list[dict]:
    """Returns the messages for a template that supports only lists of parts."""
    lists = lambda content: parts(content) if isinstance(content, str) else content
    return [{**message, "content": lists(message["content"])} for message in messages]


def joined(messages: list[dict]) -> list[dict]:
    """Returns the messages for a template that supports only texts."""
    text = lambda content: "\n".join(p["text"] for p in content) if isinstance(content, list) else content
    return [{**message, "content": text(message["content"])} for message in messages]


# The form of content that a template supports; if it is not listed, texts only.
CONTENT = {"typed": typed, "either": lambda messages: messages}


def outcome(template: str, case: dict, content=joined) -> dict:
    """Returns the rendered text, or how rendering failed."""
    try:
        rendered, _ = chat_template_utils.render_jinja_template(
            conversations=[content(case["messages"])],
            chat_template=template,
            add_generation_prompt=case["add_generation_prompt"],
            continue_final_message=case["continue_final_message"],
            **{**SPECIAL, **case["kwargs"]},
        )
        return {"text": rendered[0]}
    except jinja2.TemplateError as error:
        # raise_exception raises this class itself; the library's own errors are subclasses.
        return {"refused": str(error)} if type(error) is jinja2.TemplateError else {"failed": True}
    except (TypeError, ValueError, LookupError, AttributeError):
        return {"failed": True}


def write(name: str, value) -> None:
    (FIXTURES / f"{name}.json").write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def main() -> None:
    for path in sorted(FIXTURES.glob("*.jinja")):
        template = path.read_text()
        content = CONTENT.get(path.stem, joined)
        cases = [{**case, **outcome(template, case, content)} for case in COMMON + CASES[path.stem]]
        write(path.stem, {"special": SPECIAL, "cases": cases})
    lines = (FIXTURES / "expressions.txt").read_text().splitlines()
    expressions = [line for line in lines if line and not line.startswith("# ")]
    table = [{"expression": e, **outcome("{{ " + e + " }}", case(LED))} for e in expressions]
    write("expressions", {"special": SPECIAL, "messages": LED, "expressions": table})


if __name__ == "__main__":
    main()
