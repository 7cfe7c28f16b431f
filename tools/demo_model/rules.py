"""Combinators of a probabilistic grammar with attributes.

One set of rule objects does three things: it generates texts, it parses texts, and it computes the exact probability
of a text. A parse follows all derivations at once, as a map from state to log-probability. It adds the probabilities
of derivations that reach the same state, so that ambiguities are summed without backtracking.

Invariant: the probabilities of a rule, given its environment, sum to one over everything it can generate.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, eq=False)
class Word:
    """A value of an attribute: its text, further forms by name, and its weight among its candidates."""

    text: str
    weight: float = 1.0
    forms: Mapping[str, str] = field(default_factory=dict)

    def form(self, name: str) -> str:
        """Returns the form called `name`; `a` and `the` exist for every word, and `He` is `he` with a capital
        letter."""
        if name in ("", "text"):
            return self.text
        if name[0].isupper():
            return capital(self.form(name[0].lower() + name[1:]))
        if name in self.forms:
            return self.forms[name]
        if name == "a":
            return ("an " if self.text[0] in "aeiou" else "a ") + self.text
        if name == "the":
            return "the " + self.text
        raise KeyError(f"the word '{self.text}' has no form '{name}'")


def capital(text: str) -> str:
    """Returns `text` with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def words(*items: str | tuple[str, float], **forms: str) -> list[Word]:
    """Creates words from texts or (text, weight) pairs; all share `forms`."""
    return [Word(*((item, 1.0) if isinstance(item, str) else item), forms) for item in items]


Env = tuple[tuple[str, Word], ...]
State = tuple[int, Env]
States = dict[State, float]


def lookup(env: Env, name: str) -> Word | None:
    """Returns the value bound to `name`, or None."""
    for key, value in env:
        if key == name:
            return value
    return None


class Trail:
    """The furthest position in the text that any derivation reached, and the text that it expected there."""

    def __init__(self) -> None:
        self.position = 0
        self.wanted = ""

    def miss(self, text: str, position: int, wanted: str) -> None:
        """Records that `wanted` did not match at `position`."""
        reach = position
        while (
            reach < len(text) and reach - position < len(wanted) and text[reach] == wanted[reach - position]
        ):
            reach += 1
        if reach >= self.position:
            self.position, self.wanted = reach, wanted[reach - position :]


def add(states: States, state: State, logp: float) -> None:
    """Adds the probability exp(logp) to `state`."""
    before = states.get(state)
    if before is None:
        states[state] = logp
    else:
        high, low = max(before, logp), min(before, logp)
        states[state] = high + math.log1p(math.exp(low - high))


def match(wanted: str, text: str, state: State, logp: float, after: States, trail: Trail) -> None:
    """Adds to `after` the state after `wanted`, if `text` continues with it at `state`."""
    position, env = state
    if text.startswith(wanted, position):
        add(after, (position + len(wanted), env), logp)
    else:
        trail.miss(text, position, wanted)


class Rule:
    """Base class of everything that can be generated and parsed."""

    def generate(self, rng: random.Random, env: Env) -> tuple[str, Env]:
        """Generates a random text of the rule, and returns it with the environment after it."""
        raise NotImplementedError

    def parse(self, text: str, states: States, trail: Trail) -> States:
        """Returns the states after the rule, from each of `states`, each with its log-probability."""
        raise NotImplementedError


class Literal(Rule):
    """Fixed text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def generate(self, rng: random.Random, env: Env) -> tuple[str, Env]:
        return self.text, env

    def parse(self, text: str, states: States, trail: Trail) -> States:
        after: States = {}
        for state, logp in states.items():
            match(self.text, text, state, logp, after, trail)
        return after


class Say(Rule):
    """Text that is determined by the environment."""

    def __init__(self, text_of: Callable[[Env], str]) -> None:
        self.text_of = text_of

    def generate(self, rng: random.Random, env: Env) -> tuple[str, Env]:
        return self.text_of(env), env

    def parse(self, text: str, states: States, trail: Trail) -> States:
        after: States = {}
        for (position, env), logp in states.items():
            match(self.text_of(env), text, (position, env), logp, after, trail)
        return after


Candidates = Callable[[Env], Sequence[Word]]


class Attribute(Rule):
    """A form of an attribute's value; an unbound attribute is first sampled from the candidates."""

    def __init__(self, name: str, form: str, candidates: Candidates) -> None:
        self.name, self.form, self.candidates = name, form, candidates

    def generate(self, rng: random.Random, env: Env) -> tuple[str, Env]:
        value = lookup(env, self.name)
        if value is None:
            choices = self.candidates(env)
            value = rng.choices(choices, [word.weight for word in choices])[0]
            env += ((self.name, value),)
        return value.form(self.form), env

    def parse(self, text: str, states: States, trail: Trail) -> States:
        after: States = {}
        for (position, env), logp in states.items():
            bound = lookup(env, self.name)
            if bound is not None:
                match(bound.form(self.form), text, (position, env), logp, after, trail)
                continue
            choices = self.candidates(env)
            total = math.log(sum(word.weight for word in choices))
            for word in choices:
                form = word.form(self.form)
                if text.startswith(form, position):
                    state = (position + len(form), env + ((self.name, word),))
                    add(after, state, logp + math.log(word.weight) - total)
            trail.miss(text, position, f"<{self.name}>")
        return after


class Concat(Rule):
    """A sequence of rules."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = list(rules)

    def generate(self, rng: random.Random, env: Env) -> tuple[str, Env]:
        parts = []
        for rule in self.rules:
            part, env = rule.generate(rng, env)
            parts.append(part)
        return "".join(parts), env

    def parse(self, text: str, states: States, trail: Trail) -> States:
        for rule in self.rules:
            if not states:
                break
            states = rule.parse(text, states, trail)
        return states


class Choice(Rule):
    """One of several rules, by weight."""

    def __init__(self, options: Iterable[tuple[float, Rule]]) -> None:
        self.options = list(options)
        self.weights = [weight for weight, _ in self.options]
        total = sum(self.weights)
        self.logps = [math.log(weight / total) for weight in self.weights]

    def generate(self, rng: random.Random, env: Env) -> tuple[str, Env]:
        return rng.choices(self.options, self.weights)[0][1].generate(rng, env)

    def parse(self, text: str, states: States, trail: Trail) -> States:
        after: States = {}
        for logp, (_, rule) in zip(self.logps, self.options):
            before = {state: before + logp for state, before in states.items()}
            for state, total in rule.parse(text, before, trail).items():
                add(after, state, total)
        return after


class Switch(Rule):
    """A rule that is selected by the environment."""

    def __init__(self, rule_of: Callable[[Env], Rule]) -> None:
        self.rule_of = rule_of

    def generate(self, rng: random.Random, env: Env) -> tuple[str, Env]:
        return self.rule_of(env).generate(rng, env)

    def parse(self, text: str, states: States, trail: Trail) -> States:
        after: States = {}
        for (position, env), logp in states.items():
            for state, total in self.rule_of(env).parse(text, {(position, env): logp}, trail).items():
                add(after, state, total)
        return after


class Branch(Rule):
    """A rule that is selected by an attribute's value, which is sampled without output if it is not bound yet."""

    def __init__(self, name: str, rules: Sequence[tuple[Word, Rule]]) -> None:
        self.name = name
        self.rules = {word: rule for word, rule in rules}
        bind = [(word.weight, Concat([Bind(name, word), rule])) for word, rule in rules]
        self.unbound = Choice(bind)
        self.switch = Switch(self._rule_of)

    def _rule_of(self, env: Env) -> Rule:
        value = lookup(env, self.name)
        return self.unbound if value is None else self.rules[value]

    def generate(self, rng: random.Random, env: Env) -> tuple[str, Env]:
        return self.switch.generate(rng, env)

    def parse(self, text: str, states: States, trail: Trail) -> States:
        return self.switch.parse(text, states, trail)


class Bind(Rule):
    """No text; binds an attribute to a value."""

    def __init__(self, name: str, value: Word) -> None:
        self.name, self.value = name, value

    def generate(self, rng: random.Random, env: Env) -> tuple[str, Env]:
        return "", env + ((self.name, self.value),)

    def parse(self, text: str, states: States, trail: Trail) -> States:
        return {
            (position, env + ((self.name, self.value),)): logp for (position, env), logp in states.items()
        }


class Scope(Rule):
    """A rule whose bindings end with it, except those in `keep`."""

    def __init__(self, rule: Rule, keep: Iterable[str] = ()) -> None:
        self.rule, self.keep = rule, frozenset(keep)

    def _close(self, before: Env, after: Env) -> Env:
        return before + tuple(pair for pair in after[len(before) :] if pair[0] in self.keep)

    def generate(self, rng: random.Random, env: Env) -> tuple[str, Env]:
        text, after = self.rule.generate(rng, env)
        return text, self._close(env, after)

    def parse(self, text: str, states: States, trail: Trail) -> States:
        after: States = {}
        for (position, env), logp in states.items():
            for (end, inner), total in self.rule.parse(text, {(position, env): logp}, trail).items():
                add(after, (end, self._close(env, inner)), total)
        return after


class Lexicon:
    """The attributes that templates may name, each with its candidates."""

    def __init__(self, candidates: Mapping[str, Candidates | Sequence[Word]]) -> None:
        self.candidates = {name: _function(value) for name, value in candidates.items()}

    def template(self, text: str, **rules: Rule) -> Rule:
        """Returns a sequence from a text in which `{name}` or `{name.form}` stands for an attribute, or for a rule in
        `rules`."""
        parts: list[Rule] = []
        for index, part in enumerate(re.split(r"\{([^}]*)\}", text)):
            if index % 2 == 0:
                parts += [Literal(part)] if part else []
            elif part in rules:
                parts.append(rules[part])
            else:
                name, _, form = part.partition(".")
                parts.append(Attribute(name, form, self.candidates[name]))
        return parts[0] if len(parts) == 1 else Concat(parts)

    def one_of(self, *templates: str | tuple[float, str], **rules: Rule) -> Rule:
        """Returns a choice among templates, each of weight one unless given as (weight, template)."""
        pairs = [(1.0, item) if isinstance(item, str) else item for item in templates]
        if len(pairs) == 1:
            return self.template(pairs[0][1], **rules)
        return Choice((weight, self.template(text, **rules)) for weight, text in pairs)


def _function(value: Candidates | Sequence[Word]) -> Candidates:
    if callable(value):
        return value
    fixed = list(value)
    return lambda env: fixed


def maybe(probability: float, rule: Rule) -> Rule:
    """Returns the rule with `probability`, and otherwise nothing."""
    return Choice([(probability, rule), (1.0 - probability, Literal(""))])


@dataclass(frozen=True)
class Verdict:
    """The result of a parse: whether the text is in the language, its log-probability, or the position where it
    stopped."""

    ok: bool
    logp: float
    position: int
    wanted: str


def judge(rule: Rule, text: str, env: Env = ()) -> Verdict:
    """Returns whether all of `text` is a sentence of `rule`, and the log-probability (nats) of that sentence."""
    trail = Trail()
    ends: States = {}
    for (position, _), logp in rule.parse(text, {(0, env): 0.0}, trail).items():
        if position == len(text):
            add(ends, (position, ()), logp)
        elif position >= trail.position:
            trail.position, trail.wanted = position, "<end>"
    if ends:
        return Verdict(True, ends[(len(text), ())], len(text), "")
    return Verdict(False, -math.inf, trail.position, trail.wanted)
