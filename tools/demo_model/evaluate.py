"""Evaluates the exported demo models: the grammar judges stories and answers, and losses are compared with its
entropy.

Invariant: the weights are those of `assets/`, rounded to BF16; arithmetic is float32.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections import Counter
from collections.abc import Iterable

import torch
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import chat
import corpus
import grammar
import layout

TEMPERATURE = 0.7
BATCH = 25
ROLE_IDS = [2, 3, 4]

# Phrasings that the grammar does not generate, each with a text that a right answer contains.
UNSEEN = [
    ("Hello! Who is there?", "Brook"), ("hello who are you please", "Brook"), ("Your name?", "Brook"),
    ("Hi, nice to meet you.", ""), ("What is the sum of 3 plus 5?", "8"), ("Calculate 2 + 2.", "4"),
    ("What's 6 plus 3?", "9"), ("how much is 7 + 3", "10"), ("Count from 1 up to 5.", "1, 2, 3, 4, 5"),
    ("What sound do you hear from a cow?", "moo"), ("And a dog, what does a dog say?", "woof"),
    ("What is the opposite word of big?", "small"), ("What word is opposite to hot?", "cold"),
    ("What day comes after Monday?", "Tuesday"), ("Which month comes right after May?", "June"),
    ("Tell me three animals, please.", " and "), ("Could you name three fruits for me?", " and "),
    ("What color is the grass?", "green"), ("The sky has which colour?", "blue"), ("Where do bees live?", "hive"),
    ("Please say the word moon two times.", "moon moon"), ("Tell me a tale about a fox named Tom.", "Tom"),
    ("Can you write a story about a bear named Lily?", "Lily"), ("I want a story about a cat called Max.", "Max"),
    ("Many thanks!", "welcome"), ("Good bye, Brook!", "oodbye"),
    ("Write a Python script that sorts numbers.", "small things"),
    ("What is the largest city of France?", "small things"), ("Why is the sky so high?", "small things"),
    ("Who was the first person on the moon?", "small things"),
]  # fmt: skip


class Subject:
    """A model under test, with the tokenizer that both models share."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer

    def complete(
        self, prompts: list[str], temperature: float, suppress: list[int] | None = None
    ) -> list[str]:
        """Returns the continuation of each prompt, up to and including the end token; temperature 0 is greedy.

        `suppress` forbids tokens at the first position.
        """
        answers = []
        for first in range(0, len(prompts), BATCH):
            given = self.tokenizer(
                prompts[first : first + BATCH], add_special_tokens=False, padding=True, return_tensors="pt"
            )
            sampling = (
                {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
            )
            out = self.model.generate(
                input_ids=given.input_ids, attention_mask=given.attention_mask, max_new_tokens=400, top_k=None,
                top_p=1.0, eos_token_id=layout.END_ID, pad_token_id=layout.END_ID,
                begin_suppress_tokens=suppress, **sampling,
            )  # fmt: skip
            answers += [self._until_end(row) for row in out[:, given.input_ids.shape[1] :].tolist()]
        return answers

    def _until_end(self, ids: list[int]) -> str:
        if layout.END_ID in ids:
            ids = ids[: ids.index(layout.END_ID) + 1]
        return self.tokenizer.decode(ids)


@torch.no_grad()
def logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Returns the logits of every next token of a document, (tokens - 1, vocabulary)."""
    return model(input_ids=torch.tensor([ids[:-1]])).logits[0]


def stories(subject: Subject, opening: str, count: int) -> None:
    """Samples stories after an opening and parses them."""
    prompts = [layout.BEGIN + opening] * count
    suppress = None if opening else ROLE_IDS
    texts = [opening + answer for answer in subject.complete(prompts, TEMPERATURE, suppress)]
    right = 0
    for text in texts:
        verdict = grammar.parse(text.removesuffix(layout.END))
        right += verdict.ok and text.endswith(layout.END)
        if not verdict.ok:
            at = verdict.position
            print(
                f"  stops: ...{text[max(0, at - 60) : at]} || {text[at : at + 20]} (wanted {verdict.wanted!r})"
            )
    print(f"stories behind {opening!r}: {right} of {count} parse, {len(set(texts))} different")


def chats(subject: Subject, temperature: float, count: int) -> None:
    """Asks questions of all kinds in rotation; the grammar judges the answers."""
    rng = random.Random(corpus.HELD_OUT + 1)
    kinds = list(itertools.islice(itertools.cycle(chat.KINDS), count))
    dialogues = [chat.question(kind, rng)[0] for kind in kinds]
    answers = subject.complete([layout.BEGIN + text for text in dialogues], temperature)
    asked, right = Counter(kinds), Counter()
    for kind, dialogue, answer in zip(kinds, dialogues, answers):
        ok = chat.check(dialogue, answer)
        right[kind] += ok
        if not ok:
            print(f"  wrong {kind}: {dialogue[-110:]}{answer[:200]}")
    table = ", ".join(f"{kind} {right[kind]}/{asked[kind]}" for kind in asked)
    print(f"chats at temperature {temperature}: {right.total()} of {count} right ({table})")


def unseen(subject: Subject) -> None:
    """Asks questions in phrasings that the grammar does not have, with greedy sampling."""
    prompts = []
    for text, _ in UNSEEN:
        messages = [{"role": "user", "content": text}]
        prompts.append(
            subject.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )
    right = 0
    for (text, wanted), answer in zip(UNSEEN, subject.complete(prompts, 0.0)):
        right += wanted in answer
        if wanted not in answer:
            print(f"  wrong: {text} -> {answer[:100]}")
    print(f"chats in unseen phrasings, greedy: {right} of {len(UNSEEN)} right")


def losses(subject: Subject, draft: PreTrainedModel, count: int) -> None:
    """Prints the held-out loss of both models, the grammar's entropy, and how often the draft agrees with the main
    model."""
    texts = list(itertools.islice(corpus.documents(corpus.HELD_OUT), count))
    for name, part in [
        ("stories", [text for text in texts if not text.startswith("<|")]),
        ("dialogues", [text for text in texts if text.startswith("<|")]),
        ("all", texts),
    ]:
        print(f"held-out {name}: {loss_line(subject, draft, part)}")


def loss_line(subject: Subject, draft: PreTrainedModel, texts: Iterable[str]) -> str:
    """Formats the values of `losses` for some documents, in nats per token."""
    tokens, agree, accepted, grammar_nats = 0, 0, 0.0, 0.0
    nats = {"main": 0.0, "draft": 0.0}
    for text in texts:
        ids = subject.tokenizer(layout.BEGIN + text, add_special_tokens=False).input_ids
        tokens += len(ids) - 1
        grammar_nats -= corpus.logp(text)
        main, small = logits(subject.model, ids), logits(draft, ids)
        target = torch.tensor(ids[1:])[:, None]
        nats["main"] -= log_softmax(main, -1).gather(1, target).sum().item()
        nats["draft"] -= log_softmax(small, -1).gather(1, target).sum().item()
        agree += (main.argmax(-1) == small.argmax(-1)).sum().item()
        p, q = (main / TEMPERATURE).softmax(-1), (small / TEMPERATURE).softmax(-1)
        accepted += torch.minimum(p, q).sum().item()
    return (
        f"{tokens} tokens, grammar {grammar_nats / tokens:.4f}, main {nats['main'] / tokens:.4f}, "
        f"draft {nats['draft'] / tokens:.4f} nats per token; the draft's first choice is the main's in "
        f"{agree / tokens:.1%}, acceptance at temperature {TEMPERATURE} {accepted / tokens:.1%}"
    )


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Checks that the chat template renders dialogues as in the corpus."""
    messages = [{"role": role, "content": role.upper()} for role in ("system", "user", "assistant")]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    wanted = "".join(f"<|{message['role']}|>{message['content']}<|end|>" for message in messages)
    assert rendered == layout.BEGIN + wanted, rendered
    assert tokenizer("x").input_ids[0] == layout.BEGIN_ID


def main() -> None:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=100, help="number of stories and of questions per test")
    options.add_argument("--documents", type=int, default=200, help="number of held-out documents for the losses")
    options.add_argument("--seed", type=int, default=7, help="sampling seed")
    options.add_argument("--threads", type=int, default=2)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    tokenizer = AutoTokenizer.from_pretrained(layout.MAIN, padding_side="left", pad_token=layout.END)
    check_template(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(layout.MAIN, dtype=torch.float32)
    draft = AutoModelForCausalLM.from_pretrained(layout.DRAFT, dtype=torch.float32)
    subject = Subject(model, tokenizer)
    for opening in ("", "Once upon a time"):
        stories(subject, opening, given.count)
    for temperature in (0.0, TEMPERATURE):
        chats(subject, temperature, given.count)
    unseen(subject)
    losses(subject, draft, given.documents)


if __name__ == "__main__":
    main()
