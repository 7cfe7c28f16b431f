"""The grammar of the demo model's dialogues: turns of a few known kinds, and a polite answer to all others.

A dialogue is written as the chat template renders it. The attributes of a turn end with the turn, except the user's
name; the style of the system message applies to the whole dialogue.

Invariant: given the dialogue so far, the grammar decides whether an answer is right.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

import chat_words as c
import words as w
from grammar import CANDIDATES, SHAPES, STORY, other_than
from rules import (
    Choice,
    Concat,
    Env,
    Lexicon,
    Literal,
    Rule,
    Say,
    Scope,
    Switch,
    Word,
    judge,
    lookup,
    maybe,
)  # fmt: skip

SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"


def value(env: Env, name: str) -> Word:
    """Returns the word bound to an attribute that the turn has already named."""
    word = lookup(env, name)
    assert word is not None, f"the attribute '{name}' is not bound; this is a bug"
    return word


def upper_number(env: Env) -> list[Word]:
    """Returns the numbers at which counting from `low` may end."""
    low = int(value(env, "low").text)
    return c.NUMBERS[low + 1 : min(low + 10, 20) + 1]


def list_item(*taken: str) -> Callable[[Env], list[Word]]:
    """Returns members of the requested category that were not listed yet."""
    tables = {name: other_than(table, *taken) for name, table in c.LISTS.items()}
    return lambda env: tables[value(env, "category").text](env)


def unlisted(known: list[Word]) -> list[Word]:
    """Returns common words that are not in a table."""
    texts = {word.text for word in known}
    return [word for word in c.COMMON if word.text not in texts]


ALL_NAMES = (
    [Word(n.text, 6.0, n.forms) for n in w.NAMES]
    + [Word(n.text, 4.0, n.forms) for n in w.MORE_NAMES]
    + w.MADE_UP_NAMES
)
# A requested hero may have any name; the story grammar uses the name that the question has bound.
ASKED_NAMES = {
    only: [name for name in ALL_NAMES if only in (None, name.forms["he"])] for only in (None, "she", "he")
}


def asked_names(env: Env) -> list[Word]:
    """Returns names that fit the requested kind of hero."""
    kind = lookup(env, "kind")
    return ASKED_NAMES[kind.forms.get("only") if kind else None]


LEXICON = Lexicon(CANDIDATES | {
    "hero": asked_names, "me": ALL_NAMES, "style": c.STYLES, "system": c.SYSTEMS, "word": c.OPPOSITES,
    "unknown_word": unlisted(c.OPPOSITES), "animal": c.SOUNDS, "coloured": c.COLOURED, "dweller": c.DWELLERS,
    "date": c.DATES, "addend": c.NUMBERS[:11], "other_addend": c.NUMBERS[:11], "big": c.BIG_NUMBERS,
    "other_big": c.BIG_NUMBERS, "low": c.NUMBERS[:11], "high": upper_number, "top": c.NUMBERS[2:11],
    "times": c.NUMBERS[2:7], "said": c.SAYABLE + w.MADE_UP_NAMES[:60], "category": c.CATEGORIES,
    "item_1": list_item(), "item_2": list_item("item_1"), "item_3": list_item("item_1", "item_2"),
    "place": c.PLACES, "language": c.LANGUAGES, "task": c.TASKS, "topic": c.TOPICS, "person": c.PEOPLE,
    "nonsense": c.NONSENSE, "shape": [word for word, _ in SHAPES],
    "product": c.BIG_NUMBERS[:90],
} | {f"common_{index}": c.COMMON for index in range(8)})  # fmt: skip
PREFIXES = (
    "Please tell me: ",
    "Hey, ",
    "Okay, ",
    "Tell me, ",
    "Brook, ",
    "And now: ",
    "Next question: ",
    "Hello! ",
)


def casual(template: str) -> list[tuple[float, str]]:
    """Returns variants of a template as users type it: with and without the initial capital and the final
    punctuation."""
    plain = template.rstrip("?.!")
    lower = template if template[0] in "{I" else template[0].lower() + template[1:]
    lower_plain = lower.rstrip("?.!")
    return [(0.6, template), (0.12, lower), (0.12, plain), (0.16, lower_plain)]


def asks(*templates: str, **rules: Rule) -> Rule:
    """Returns a rule for a user's message, in one of several phrasings."""
    plain = LEXICON.one_of(*(pair for template in templates for pair in casual(template)), **rules)
    prefix = Choice((1.0, Literal(text)) for text in PREFIXES)
    return Concat([maybe(0.1, prefix), plain])


def _styled(env: Env) -> str:
    style = lookup(env, "style")
    return f"{style.text} " if style else ""


STYLED = Say(_styled)


def says(answer: Rule) -> Rule:
    """Returns a rule for an assistant's message, in the style that the system message requires."""
    return Concat([Literal(f"{END}{ASSISTANT}"), STYLED, answer, Literal(END)])


def turn(ask: Rule, *answers: str | Rule, **rules: Rule) -> Rule:
    """Returns a rule for a user's message and the assistant's answer to it."""
    if len(answers) == 1 and isinstance(answers[0], Rule):
        answer = answers[0]
    else:
        answer = LEXICON.one_of(*answers, **rules)
    return Concat([Literal(USER), ask, says(answer)])


def number(n: int, like: str) -> str:
    """Returns `n` in digits, or as a numeral if the form `like` is not empty."""
    return c.NUMERALS[n] if like else str(n)


def addition(form: str) -> Rule:
    """Returns a rule for adding two small numbers, with question and answer in the same notation (`form` as in
    `Word.form`)."""
    dot = f".{form}" if form else ""
    a, b = f"{{addend{dot}}}", f"{{other_addend{dot}}}"
    total = Say(
        lambda env: number(int(value(env, "addend").text) + int(value(env, "other_addend").text), form)
    )
    start = Say(lambda env: _capital_number(value(env, "addend"), form))
    ask = asks(f"What is {a} plus {b}?", f"How much is {a} plus {b}?", f"Add {a} and {b}.", f"{a} + {b} = ?",
               f"What is {a} + {b}?", f"What do you get if you add {a} and {b}?", f"Can you add {a} and {b}?",
               f"What is the sum of {a} and {b}?", f"{a} plus {b}?", f"How many are {a} and {b}?")  # fmt: skip
    return turn(ask, f"{{start}} plus {b} is {{total}}.", start=start, total=total)


def _capital_number(word: Word, form: str) -> str:
    return word.form("Numeral") if form else word.text


def counted(low: str | None, high: str, form: str) -> Rule:
    """Returns a rule for all numbers from the attribute `low` (or from one) to the attribute `high`."""

    def text(env: Env) -> str:
        first = int(value(env, low).text) if low else 1
        numbers = [number(n, form) for n in range(first, int(value(env, high).text) + 1)]
        joined = ", ".join(numbers) + "."
        return joined[0].upper() + joined[1:]

    return Say(text)


def counting(form: str) -> Rule:
    """Returns a rule for counting upwards, with question and answer in the same notation."""
    dot = f".{form}" if form else ""
    a, b, top = f"{{low{dot}}}", f"{{high{dot}}}", f"{{top{dot}}}"
    between = asks(f"Count from {a} to {b}.", f"Please count from {a} to {b}.", f"Can you count from {a} to {b}?",
                   f"Say the numbers from {a} to {b}.", f"List the numbers from {a} to {b}.")  # fmt: skip
    upto = asks(
        f"Count to {top}.", f"Please count to {top}.", f"Can you count to {top}?", f"Count up to {top}."
    )
    return Choice([
        (2.0, turn(between, counted("low", "high", form))),
        (1.0, turn(upto, counted(None, "top", form))),
    ])  # fmt: skip


def repeating(form: str) -> Rule:
    """Returns a rule for saying a word several times."""
    dot = f".{form}" if form else ""
    ask = asks(f"Say {{said}} {{times{dot}}} times.", f"Repeat {{said}} {{times{dot}}} times.",
               f"Say the word {{said}} {{times{dot}}} times.", f"Repeat the word {{said}} {{times{dot}}} times.",
               f"Please say {{said}} {{times{dot}}} times.", f"Can you say {{said}} {{times{dot}}} times?",
               f"Write {{said}} {{times{dot}}} times.")  # fmt: skip
    return turn(ask, Say(lambda env: " ".join([value(env, "said").text] * int(value(env, "times").text))))


GREETING = turn(
    asks("Hello!", "Hi!", "Hey!", "Hi there!", "Hello there!", "Good morning!", "Good evening!", "Good day!",
         "Hello, how are you?", "How are you?", "How are you today?", "Hi, how are you?", "Greetings!",
         "Hello, Brook!",
         "How do you do?", "Hey there!", "How is it going?", "What's up?"),
    "Hello! What can I do for you?", "Hello! How can I help you?", "Hello! I am Brook. What would you like to do?",
)  # fmt: skip
IDENTITY = turn(
    asks("What is your name?", "Who are you?", "What are you called?", "Tell me your name.", "What's your name?",
         "May I ask your name?", "Do you have a name?", "Who am I talking to?", "What are you?", "Who is this?",
         "Introduce yourself.", "Are you a human?", "Are you a robot?", "What model are you?",
         "Which model is this?",
         "Are you ChatGPT?", "Who made you?", "Tell me about yourself.", "Are you real?", "Are you a person?"),
    "I am Brook, the demo model of Mainstem.",
)  # fmt: skip
ABILITIES = turn(
    asks("What can you do?", "Help!", "Help me.", "What do you know?", "How can you help me?",
         "What can I ask you?",
         "What are you able to do?", "Can you help me?", "What should I ask?", "What are you good at?"),
    "I can tell stories, count, add small numbers, and answer simple questions about words, animals and days.",
)  # fmt: skip
TELLING = turn(
    asks("My name is {me}.", "I am {me}.", "I'm {me}.", "Hello, my name is {me}.", "Hi, I am {me}.",
         "Call me {me}.",
         "You can call me {me}.", "Hello, I'm {me}.", "Please call me {me}.", "Hi! My name is {me}.",
         "Remember my name: {me}.", "People call me {me}.", "Hi, {me} here."),
    "Nice to meet you, {me}!", "Hello, {me}! It is nice to meet you.",
)  # fmt: skip
ASK_ME = asks(
    "What is my name?", "Do you know my name?", "Who am I?", "What's my name?", "Do you remember my name?",
    "Can you tell me my name?", "What was my name?", "Tell me my name.", "How am I called?", "Say my name.",
)  # fmt: skip
RECALL_KNOWN = turn(ASK_ME, "Your name is {me}.")
RECALL_UNKNOWN = turn(ASK_ME, "You have not told me your name yet.")
RECALL = Switch(lambda env: RECALL_KNOWN if lookup(env, "me") else RECALL_UNKNOWN)
NAMING = Switch(lambda env: RECALL_KNOWN if lookup(env, "me") else TELLING)
_OPPOSITE_FORMS = ("What is the opposite of {%s}?", "Tell me the opposite of {%s}.", "What's the opposite of {%s}?",
                   "Give me the opposite of {%s}.", "Which word is the opposite of {%s}?", "Opposite of {%s}?",
                   "Do you know the opposite of {%s}?", "Name the opposite of {%s}.")  # fmt: skip
OPPOSITE = Choice([
    (5.0, turn(asks(*(form % "word" for form in _OPPOSITE_FORMS)), "The opposite of {word} is {word.opposite}.")),
    (1.0, turn(asks(*(form % "unknown_word" for form in _OPPOSITE_FORMS)),
               "I do not know the opposite of {unknown_word}.")),
])  # fmt: skip
SOUND = turn(
    asks("What does {animal.a} say?", "What sound does {animal.a} make?", "Which sound does {animal.a} make?",
         "How does {animal.a} sound?", "What does the {animal} say?", "What noise does {animal.a} make?",
         "Make the sound of {animal.a}.", "What sound does the {animal} make?", "Sound of {animal.a}?"),
    "{animal.A} says {animal.sound}.",
)  # fmt: skip
COLOUR = turn(
    asks("What colour is {coloured}?", "What color is {coloured}?", "Which colour does {coloured} have?",
         "Which color is {coloured}?", "What is the colour of {coloured}?", "What is the color of {coloured}?",
         "Tell me the colour of {coloured}.", "Do you know the colour of {coloured}?"),
    "{coloured.Text} is {coloured.colour}.",
)  # fmt: skip
DWELLING = turn(
    asks("Where does {dweller.a} live?", "Where do you find {dweller.a}?", "What is the home of {dweller.a}?",
         "Where is the home of {dweller.a}?", "Where does the {dweller} live?", "Where would {dweller.a} live?",
         "Tell me where {dweller.a} lives."),
    "{dweller.A} lives in {dweller.home}.",
)  # fmt: skip
DATE = Choice([
    (2.0, turn(asks("What comes after {date}?", "Which {date.kind} comes after {date}?", "What follows {date}?",
                    "What {date.kind} is after {date}?", "What is the {date.kind} after {date}?",
                    "Which {date.kind} follows {date}?"),
               "After {date} comes {date.next}.")),
    (1.0, turn(asks("What comes before {date}?", "Which {date.kind} comes before {date}?",
                    "What {date.kind} is before {date}?", "What is the {date.kind} before {date}?"),
               "Before {date} comes {date.previous}.")),
])  # fmt: skip
ADDITION = Choice([
    (6.0, addition("")), (2.0, addition("numeral")),
    (1.0, turn(asks("What is {big} plus {other_big}?", "Add {big} and {other_big}.", "What is {big} + {other_big}?",
                    "{big} + {other_big} = ?", "How much is {big} plus {other_big}?"),
               "I can only add numbers from 0 to 10.")),
])  # fmt: skip
COUNTING = Choice([(3.0, counting("")), (1.0, counting("numeral"))])
REPEATING = Choice([(1.0, repeating("")), (1.0, repeating("numeral"))])
LISTING = turn(
    asks("Name three {category}.", "List three {category}.", "Tell me three {category}.",
         "Give me three {category}.",
         "Can you name three {category}?", "Which three {category} do you know?", "Name 3 {category}.",
         "List 3 {category}.", "Give me 3 {category}.", "Three {category}, please."),
    "{item_1.Text}, {item_2} and {item_3}.",
)  # fmt: skip
THANKS = turn(
    asks("Thank you!", "Thanks!", "Thanks a lot!", "Thank you very much!", "Thank you, Brook!", "That is nice!",
         "Great, thanks!", "Well done!", "Good job!", "Very good!", "That was nice, thank you!", "Wonderful!"),
    "You are welcome!",
)  # fmt: skip
FAREWELL = turn(
    asks("Goodbye!", "Bye!", "See you!", "Bye bye!", "See you later!", "Good night!", "I have to go now.",
         "Farewell!", "Until next time!", "See you tomorrow!"),
    "Goodbye! Come back soon.",
)  # fmt: skip
DECLINED = turn(
    Choice([
        (8.0, asks("What is the capital of {place}?", "Write a {language} program to {task}.", "How do I {task}?",
                   "Explain {topic}.", "Tell me about {topic}.", "Who was {person}?", "Who is {person}?",
                   "What is the weather in {place}?", "What is the weather like today?", "Write code to {task}.",
                   "How do you say good morning in {language}?", "Translate this into {language}.",
                   "Translate '{topic}' into {language}.", "What do you think about {topic}?", "What is {topic}?",
                   "Write a poem about {topic}.", "How far is it from {place} to the moon?",
                   "Why is {topic} important?",
                   "What time is it?", "How old is {person}?", "How many people live in {place}?",
                   "What is the news?",
                   "Can you {task}?", "Please {task} for me.", "What is {product} times {big}?",
                   "Divide {big} by {product}.",
                   "Show me how to {task} in {language}.", "Write a function to {task}.",
                   "Give me a recipe for pizza.",
                   "When was {person} born?", "When did {person} die?", "Where is {place}?", "Summarize {topic}.",
                   "Write an essay about {topic}.", "Is {topic} real?", "How does {topic} work?",
                   "Who invented {topic}?",
                   "What is the best way to {task}?", "Do you like {topic}?", "What is the population of {place}?",
                   "Should I visit {place}?", "Tell me a joke.", "Tell me a joke about {topic}.",
                   "Who won the game?",
                   "I want to {task}.", "I need help with {topic}.", "Compare {topic} and {person}.",
                   "Sing a song.",
                   "What is the square root of {big}?", "Define {topic}.", "How tall is {person}?")),
        (3.0, Choice((1.0, asks(" ".join(f"{{common_{index}}}" for index in range(length)) + mark))
                     for length in range(2, 9) for mark in ("?", "."))),
        (1.0, LEXICON.template("{nonsense}")),
    ]),
    "I only know small things. Ask me for a story, or let me count, add or name something.",
)  # fmt: skip

_TELL = ("Tell me a story{}.", "Tell a story{}.", "Can you tell me a story{}?", "Please tell me a story{}.",
         "I would like to hear a story{}.", "Write a story{}.", "Write me a story{}.", "Do you know a story{}?",
         "A story{}, please.", "Make up a story{}.", "Tell me a short story{}.",
         "Write a short story{}.")  # fmt: skip
_ABOUT = [
    (2.0, ""), (5.0, " about {kind.a} named {hero}"), (2.0, " about {kind.a} called {hero}"),
    (3.0, " about {kind.a}"),
    (1.5, " about {hero}"), (1.5, " about {hero} the {kind}"), (1.5, " about {shape.topic}"),
    (1.5, " about {kind.a} and {shape.topic}"), (1.0, " about {hero} and {shape.topic}"),
]  # fmt: skip
ASK_STORY = Choice(
    [(weight, asks(*(form.format(about) for form in _TELL))) for weight, about in _ABOUT]
    + [
        (
            2.0,
            asks(
                "Tell me another story.",
                "Another one, please.",
                "One more story, please.",
                "Story!",
                "Once more!",
            ),
        )
    ]
)
FOLLOW_UP = turn(
    asks("Who was the story about?", "What was the story about?", "Who is the hero of the story?",
         "What was the name of the hero?", "Who was the hero?", "Which story was that?"),
    "The story was about {hero}, {kind.a}.",
)  # fmt: skip
TALE = Concat([turn(ASK_STORY, STORY), maybe(0.15, FOLLOW_UP)])

KINDS: dict[str, tuple[float, Rule]] = {
    "greeting": (1.0, GREETING), "identity": (1.0, IDENTITY), "abilities": (0.5, ABILITIES), "naming": (1.2, NAMING),
    "recall": (1.0, RECALL), "opposite": (1.3, OPPOSITE), "sound": (0.8, SOUND), "colour": (0.8, COLOUR),
    "dwelling": (0.8, DWELLING), "date": (1.0, DATE), "addition": (2.2, ADDITION), "counting": (1.3, COUNTING),
    "repeating": (1.2, REPEATING), "listing": (0.8, LISTING), "thanks": (0.6, THANKS), "farewell": (0.5, FAREWELL),
    "declined": (2.2, DECLINED), "story": (1.5, TALE),
}  # fmt: skip
KEPT = ("me",)
TURNS = {name: Scope(rule, KEPT) for name, (_, rule) in KINDS.items()}
TURN = Choice((KINDS[name][0], rule) for name, rule in TURNS.items())
PROLOGUE = Choice([
    (6.0, Literal("")),
    (2.0, Scope(LEXICON.template(SYSTEM + "{system}" + END))),
    (1.5, LEXICON.one_of(SYSTEM + "Begin every answer with '{style}'" + END,
                         SYSTEM + "Start each answer with '{style}'" + END,
                         SYSTEM + "You are a helpful assistant. Begin every answer with '{style}'" + END)),
])  # fmt: skip
# The probability that a dialogue of n turns continues, for n from 1; most end within four turns.
GOES_ON = (0.68, 0.64, 0.58, 0.5, 0.6, 0.6, 0.5)


def turns() -> Rule:
    """Returns a rule for one turn, and as many further ones as `GOES_ON` allows."""
    rule = TURN
    for probability in reversed(GOES_ON):
        rule = Concat([TURN, maybe(probability, rule)])
    return rule


DIALOGUE = Concat([PROLOGUE, turns()])


def generate(rng: random.Random) -> str:
    """Generates a random dialogue, as the chat template renders it after the begin token."""
    return DIALOGUE.generate(rng, ())[0]


def question(kind: str, rng: random.Random) -> tuple[str, str]:
    """Returns a dialogue whose last turn is of `kind`, split before that turn's answer: (text to complete, the
    answer).

    A dialogue begins with one or two other turns in half of the cases.
    """
    before = [] if rng.random() < 0.5 else [TURN] * rng.choice([1, 2])
    text = Concat([PROLOGUE, *before, TURNS[kind]]).generate(rng, ())[0]
    cut = text.rindex(ASSISTANT) + len(ASSISTANT)
    return text[:cut], text[cut:]


def check(dialogue: str, answer: str) -> bool:
    """Returns whether `answer` (with its end token) is right after `dialogue`, which ends with the assistant token."""
    return judge(DIALOGUE, dialogue + answer).ok


def main() -> None:
    """The command line: parses generated dialogues, and prints some."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=300, help="number of dialogues to parse")
    options.add_argument("--show", type=int, default=5, help="number of dialogues to print")
    given = options.parse_args()
    rng = random.Random(6)
    for index in range(given.count):
        text = generate(rng)
        verdict = judge(DIALOGUE, text)
        assert verdict.ok, f"stopped at {verdict.position}, wanting {verdict.wanted!r}: {text}"
        if index < given.show:
            print(text.replace(END, "\n"), end="\n")
    for kind in KINDS:
        cut, answer = question(kind, rng)
        assert check(cut, answer), f"{kind}: {cut}{answer}"
        assert not check(cut, "Nothing of the kind." + END), f"{kind} takes any answer"
    print(f"{given.count} dialogues parse")


if __name__ == "__main__":
    main()
