"""The grammar of the demo model's stories: nine story shapes over one set of attributes.

A story's hero, friend, things and places are attributes. Each is chosen where it is first mentioned and stays the
same afterwards, so a text that changes a name, a pronoun or an object midway is not in the language.

Invariant: a story mentions only the values of its attributes; every text that `STORY` generates parses.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics

import words as w
from rules import (
    Branch,
    Candidates,
    Choice,
    Concat,
    Env,
    Lexicon,
    Literal,
    Rule,
    Switch,
    Verdict,
    Word,
    judge,
    lookup,
    maybe,
)  # fmt: skip


def other_than(table: list[Word], *names: str) -> Candidates:
    """Returns candidates from `table` that are not bound to any attribute in `names`."""

    def candidates(env: Env) -> list[Word]:
        taken = [lookup(env, name) for name in names]
        return [word for word in table if word not in taken]

    return candidates


def gender(name: Word) -> str:
    """Returns `she` or `he`."""
    return name.forms["he"]


def names_for(env: Env) -> list[Word]:
    """Returns hero names that fit the hero's kind."""
    kind = lookup(env, "kind")
    only = kind.forms.get("only") if kind else None
    return NAMES_BY_GENDER[only]


def kinds_for(env: Env) -> list[Word]:
    """Returns hero kinds that fit the hero's name."""
    name = lookup(env, "hero")
    return KINDS_BY_GENDER[gender(name) if name else None]


NAMES_BY_GENDER = {only: [n for n in w.NAMES if only in (None, gender(n))] for only in (None, "she", "he")}
KINDS = w.HERO_KINDS + w.RARE_KINDS
KINDS_BY_GENDER = {
    only: [k for k in KINDS if only is None or k.forms.get("only", only) == only]
    for only in (None, "she", "he")
}

CANDIDATES: dict[str, Candidates | list[Word]] = {
    "hero": names_for, "kind": kinds_for, "trait": w.TRAITS, "home": w.HOMES, "likes": w.LIKES,
    "daytime": w.DAYTIMES, "friend": other_than(w.NAMES, "hero"), "friend_kind": other_than(w.FRIEND_KINDS, "kind"),
    "helper": w.HELPERS, "helper_trait": w.HELPER_TRAITS, "colour": w.COLOURS, "thing": w.THINGS,
    "spot": w.SPOTS, "wrong_spot": w.WRONG_SPOTS, "goal": w.GOALS, "way": w.WAYS,
    "second_way": w.SECOND_WAYS, "food": w.FOODS, "contest": w.CONTESTS, "prize": w.PRIZES,
    "building": w.BUILDINGS, "material": w.MATERIALS, "fear": w.FEARS, "cure": w.CURES, "gift": w.GIFTS,
    "plant": w.PLANTS, "storm": w.STORMS, "feeling": w.FEELINGS, "wrapping": w.WRAPPINGS, "lesson": w.LESSONS,
}  # fmt: skip
LEXICON = Lexicon(CANDIDATES)
line = LEXICON.one_of


def unless(name: str, rule: Rule) -> Rule:
    """Returns the rule if the attribute is not bound yet, otherwise an empty rule."""
    nothing = Literal("")
    return Switch(lambda env: nothing if lookup(env, name) else rule)


def spaced(rule: Rule) -> Rule:
    """Returns the rule after a space, as for every sentence except the first."""
    return Concat([Literal(" "), rule])


def optional(probability: float, *templates: str) -> Rule:
    """Returns a rule for an additional sentence that may be missing."""
    return maybe(probability, spaced(line(*templates)))


def body(*steps: Rule | tuple[str, ...] | str) -> Rule:
    """Returns the sentences of a shape; a tuple is a sentence with its alternatives."""
    rules = []
    for step in steps:
        if isinstance(step, Rule):
            rules.append(step)
        else:
            rules.append(spaced(line(*((step,) if isinstance(step, str) else step))))
    return Concat(rules)


OPENING = Concat([
    line(
        (4.0, "Once upon a time, there was {trait.a} {kind} named {hero}."),
        (2.0, "Once upon a time, {trait.a} {kind} named {hero} lived {home.in}."),
        (2.0, "Once upon a time, {home.in}, there lived {kind.a} whose name was {hero}."),
        "Once there was {kind.a} named {hero}. {hero.He} was very {trait}.",
        "There once was {trait.a} {kind} called {hero}.",
        "Long ago, {kind.a} named {hero} lived {home.in}.",
        "{home.In} lived {trait.a} {kind} named {hero}.",
        "Far away, {home.in}, there was {kind.a} named {hero}.",
        (2.0, "{hero} was {trait.a} {kind}."),
        "{hero} was {kind.a} who lived {home.in}.",
        "This is the story of {hero}, {trait.a} {kind}.",
        "Have you heard of {hero} the {kind}? {hero.He} lived {home.in}.",
    ),
    unless("home", optional(0.6, "{hero.He} lived {home.in}.", "{hero.His} home was {home.in}.")),
    optional(0.5, "{hero} liked {likes}.", "{hero.He} liked {likes} more than anything else.",
             "Every day, {hero.he} found some time {likes}."),
])  # fmt: skip

FRIEND = "{friend} the {friend_kind}"

LOST = body(
    ("One {daytime}, {hero} could not find {hero.his} {colour} {thing}.",
     "{hero} had a {colour} {thing}, and one {daytime} it was gone.",
     "One {daytime}, {hero} lost {hero.his} {colour} {thing}."),
    optional(0.5, '"Where is my {thing}?" cried {hero}.', '"Oh no, my {colour} {thing}!" said {hero}.'),
    ("{hero.He} looked {wrong_spot}, but it was not there.",
     "First {hero.he} searched {wrong_spot}, but there was no {thing}.",
     "{hero.He} went to look {wrong_spot} and found nothing."),
    ("Then {hero} met {helper_trait.a} {helper}.", "On the way home, {hero} met {helper_trait.a} {helper}.",
     "Soon {helper_trait.a} {helper} came along."),
    ('"Why are you so sad?" asked the {helper}.', '"Can I help you?" asked the {helper}.',
     '"What is the matter?" asked the {helper}.'),
    ('"I have lost my {colour} {thing}," said {hero}.', '"I cannot find my {thing}," {hero} answered.',
     '"My {thing} is gone," said {hero}.'),
    ("They searched together, and there it was, {spot}.", "The {helper} had seen it {spot}.",
     'The {helper} thought for a while. "Let us look {spot}," it said. And there was the {thing}!'),
    ("{hero} hugged the {helper} and took the {thing} home.", '"Thank you, dear {helper}!" said {hero}.',
     "{hero} was so {feeling} that {hero.he} danced around the {helper}."),
    optional(0.5, "From then on, {hero} always took good care of the {colour} {thing}.",
             "After that day, {hero} and the {helper} were good friends."),
)  # fmt: skip

JOURNEY = body(
    ("{hero} had always wanted to see {goal}.", "More than anything, {hero} wished to see {goal}.",
     "All {hero.his} life, {hero} had heard stories about {goal}."),
    ("So one {daytime}, {hero.he} packed some {food} and set off.",
     "One {daytime}, {hero.he} put some {food} into a basket and left home.",
     "One {daytime}, {hero.he} said goodbye to everybody and took some {food} along."),
    ("{hero.He} walked {way}.", "The path went {way}.", "First {hero.he} travelled {way}."),
    ("There {hero.he} met {helper_trait.a} {helper}.",
     "After a while, {helper_trait.a} {helper} stood on the path.",
     "Beside the path sat {helper_trait.a} {helper}."),
    ('"Where are you going?" asked the {helper}.', '"What brings you here?" the {helper} wanted to know.'),
    ('"I am going to {goal}," said {hero}.', '"I want to see {goal}," {hero} answered.'),
    ('"Then go {second_way}," said the {helper}.', '"The best path leads {second_way}," said the {helper}.'),
    optional(0.6, "{hero} thanked the {helper} and gave it some {food}.",
             "They shared the {food}, and {hero} went on."),
    ("{hero} went {second_way}, and at last {hero.he} saw {goal}.",
     "It was a long walk {second_way}, but then {hero} stood before {goal}.",
     "{hero} did so, and at the end of the day {hero.he} reached {goal}."),
    "{goal.there}.",
    ('"How beautiful!" said {hero}.', "{hero} had never been so {feeling}.",
     "{hero} sat down and looked for a long time."),
    ("When {hero.he} came home, {hero.he} told everybody about {goal}.",
     "Then {hero.he} went home, tired but full of joy.",
     "And on the way back, {hero.he} visited the {helper} again."),
)  # fmt: skip

CONTEST = body(
    ("One {daytime}, there was a big {contest}.", "One {daytime}, everybody came together for a {contest}.",
     "Every summer, there was a {contest}, and this time {hero} wanted to win."),
    ("The prize was {prize}.", "The winner would get {prize}.", "Whoever won would take home {prize}."),
    (f"{{hero}} wanted to {{contest.do}} against {FRIEND}.", f"{FRIEND} was there, too.",
     f"{FRIEND} wanted to win as well."),
    ("For many days, {hero} practised, and so did {friend}.", "{hero} had practised every day.",
     "{hero} was a little afraid of {friend}."),
    optional(0.5, '"I will do my best," said {hero}.', '"Good luck, {friend}!" said {hero}.',
             '"Good luck, {hero}!" said {friend}.'),
    ("They {contest.did} and {contest.did}, and nobody could look away.",
     "First {friend} {contest.did}, then {hero}.",
     "{hero} {contest.did} as well as {hero.he} could."),
    Choice([
        (1.0, body(
            ("In the end, {hero} won {prize}.", "Everybody cheered, for {hero} had won."),
            ('"Let us share the prize, {friend}," said {hero}.',
             '"You were very good, {friend}," said {hero}, and {hero.he} meant it.'),
            ("Now {hero} was {contest.best} of all, and {hero.he} had a good friend.",
             "From that day on, {hero} and {friend} practised together."),
        )),
        (1.0, body(
            ("In the end, {friend} won {prize}.", "Everybody cheered, for {friend} had won."),
            ("{hero} was sad for a moment, but then {hero.he} clapped for {friend}.",
             '"You were very good, {friend}," said {hero}, and {hero.he} meant it.'),
            ("So {friend} shared the prize with {hero.him}, and they became friends.",
             '"Next time it will be you," said {friend}, and showed {hero.him} how to {contest.do} even better.'),
        )),
    ]),
)  # fmt: skip

SHARING = body(
    ("One {daytime}, {hero} made some {food}.", "One {daytime}, {hero} had some {food} for dinner.",
     "One {daytime}, {hero} was given some {food}."),
    ("The {food} smelled wonderful.", "There was enough {food} for one, but not more.",
     "{hero} was hungry and wanted to eat at once."),
    ("Just then, {helper_trait.a} {helper} came by.",
     "Then somebody knocked at the door. It was {helper_trait.a} {helper}.",
     "But on the doorstep sat {helper_trait.a} {helper}."),
    ('"I have not eaten all day," said the {helper}.', '"I am so hungry," said the {helper}.',
     '"May I have some {food}, please?" asked the {helper}.'),
    ("{hero} looked at the {food} and thought for a moment.", "At first, {hero} did not want to share.",
     '"Come in and sit down," said {hero}.'),
    ("Then {hero.he} gave half of the {food} to the {helper}.", "Then {hero.he} divided the {food} into two parts.",
     '"We can share the {food}," said {hero.he}.'),
    ("They ate together and told each other stories.", "The {helper} ate and smiled.",
     '"This is the best meal of my life," said the {helper}.'),
    optional(0.7, "Some days later, {hero} had nothing left to eat.",
             "Then winter came, and {hero} had no food at all.",
             "The next week, {hero} was ill and could not cook."),
    ("But the {helper} came back with a full basket.", "Then the {helper} brought {hero.him} a whole bag of food.",
     "The {helper} did not forget {hero}, and brought {hero.him} food all winter."),
    ("So {hero} learned that {lesson}.", "{hero} was {feeling}, and they were friends for ever.",
     '"Now it is my turn to share," said the {helper}.'),
)  # fmt: skip

STORM = body(
    ("One {daytime}, a {storm} came.", "One {daytime}, the sky turned black. A {storm} was coming.",
     "One {daytime}, {hero} was far from home when a {storm} began."),
    ("{storm.did}, and {hero} was afraid.", "{storm.did}, and {hero} ran as fast as {hero.he} could.",
     "{storm.did}. {hero} looked for a dry place."),
    ("Then {hero.he} heard somebody cry.", "Suddenly, {hero.he} heard a small voice.",
     "Then {hero.he} saw a light between the trees."),
    (f"It was {FRIEND}.", f"It came from {FRIEND}."),
    ('"My house is broken!" said {friend}.', '"I cannot find my way home," said {friend}.',
     '"I am so cold," said {friend}.'),
    ('"Come with me," said {hero}.', '"Do not be afraid, {friend}," said {hero}.',
     "{hero} took {friend} by the hand."),
    ("They hid in a cave until the {storm} was over.", "They found an empty barn and waited there.",
     "They sat close together under a big rock."),
    optional(0.6, "To pass the time, they sang all the songs they knew.", "{hero} told {friend} a funny story.",
             "They shared the last of {hero.his} {food}."),
    ("When the {storm} was over, the sun came out.",
     "At last, the {storm} went away, and the air was fresh and clean.",
     "The next morning, everything was quiet."),
    ("{hero} helped {friend} to mend what was broken.",
     "{hero} took {friend} home, and {friend.his} family was very {feeling}.",
     '"Thank you, {hero}," said {friend}. "You are very brave."'),
    optional(0.5, "And {hero} was never afraid of a {storm} again.", "So {hero} learned that {lesson}."),
)  # fmt: skip

BUILDING = body(
    ("One {daytime}, {hero} decided to build a {building}.",
     "{hero} had a plan: {hero.he} wanted to build a {building}.",
     "One {daytime}, {hero} said, \"I am going to build a {building}!\""),
    ("{hero.He} looked for {material}.", "{hero.He} gathered {material}.",
     "For that, {hero.he} needed {material}."),
    ("{hero.He} worked all day, but the {building} fell apart.", "It was hard work, and soon the {building} broke.",
     "But the first {building} was crooked and fell over."),
    ("{hero} wanted to give up.", "{hero} sat down and sighed.", '"I cannot do it," said {hero}.'),
    (f"Then {FRIEND} came along.", f"{FRIEND} saw it and came closer.", f"Just then, {FRIEND} walked by."),
    ('"Let us try together," said {friend}.', '"Two can do more than one," said {friend}.',
     '"May I help you, {hero}?" asked {friend}.'),
    ("{friend} held the {material}, and {hero} tied the knots.",
     "One did the low parts, and the other did the high parts.",
     "They worked side by side with the {material}."),
    optional(0.5, "They made mistakes, laughed and tried again.", "Step by step, the {building} grew."),
    ("At last, the {building} was ready.", "When the stars came out, the {building} stood firm.",
     "After three days, the {building} was finished."),
    ("They painted it {colour} and were very {feeling}.", "{hero} and {friend} painted a {colour} star on it.",
     '"It is the best {building} in the world!" said {hero}.'),
    ("It belonged to both of them.", "After that, they used the {building} every day.",
     "So {hero} learned that {lesson}."),
)  # fmt: skip

FEAR = body(
    ("There was one thing that {hero} was afraid of: {fear}.",
     "But {hero} had a secret: {hero.he} was afraid of {fear}.",
     "Only {fear} could frighten {hero}."),
    ("{fear.when}, {hero.he} hid in {hero.his} room.", "{fear.when}, {hero.he} began to shake.",
     "{fear.when}, {hero.he} ran away."),
    ("One {daytime}, {helper_trait.a} {helper} saw this.",
     "One {daytime}, {hero} told {helper_trait.a} {helper} about it.",
     "One {daytime}, {helper_trait.a} {helper} asked {hero.him} what was wrong."),
    ('"I am afraid of {fear}," said {hero}.', '"Please do not laugh," said {hero}. "I am afraid of {fear}."'),
    ('"Everybody is afraid of something," said the {helper}.',
     '"I was afraid of {fear} once, too," said the {helper}.',
     "The {helper} did not laugh."),
    ('"When you are afraid, {cure}," the {helper} said.', '"Here is what helps: {cure}," the {helper} said.'),
    ("The next day, {hero} tried it.", "{hero} thought about this for a long time.",
     "{hero} wanted to try it at once."),
    ("{fear.when}, {hero.he} did not run away.", "{fear.when}, {hero.he} remembered the words of the {helper}."),
    ("{hero.He} began to {cure}.", "It was enough to {cure}.", "It helped to {cure}."),
    ("Little by little, the fear grew smaller.", "And the fear went away like a cloud.",
     "It was not easy, but it worked."),
    ("Soon {hero} {fear.now}.", "In the end, {hero} {fear.now}."),
    optional(0.6, '"I knew that you could do it," said the {helper}.',
             "{hero} was {feeling} and thanked the {helper}."),
)  # fmt: skip

GIFT = body(
    (f"One {{daytime}}, {{hero}} heard that {FRIEND} had a birthday.",
     f"It was the birthday of {FRIEND}, and {{hero}} had no present.",
     f"{{hero}} had a friend, {FRIEND}, whose birthday was coming."),
    ('"What can I give to {friend}?" thought {hero}.', "{hero} wanted to give {friend.him} something special.",
     "{hero} had no money to buy a present for {friend}."),
    ("So {hero.he} made {gift}.", "Then {hero.he} had an idea and made {gift}.",
     "{hero.He} worked all night to make {gift}."),
    ("{hero.He} wrapped it in {colour} {wrapping}.", "{hero.He} hid it in {colour} {wrapping}.",
     "{hero.He} put some {colour} {wrapping} around it."),
    ("On the way, {hero.he} carried it very carefully.", "On the way, {hero.he} did not stop once.",
     "On the way to the party, {hero.he} was very nervous."),
    ('"I hope that {friend} will like it," {hero.he} said.', '"What will {friend} say?" {hero.he} thought.'),
    ("{friend} opened the {colour} {wrapping} and saw {gift}.", "{friend} looked inside and found {gift}.",
     "{friend} took {gift} out and looked at it for a long time."),
    ('"You made this for me, {hero}?" asked {friend}.', '"It is wonderful, {hero}!" said {friend}.',
     '"Nobody has ever given me {gift} before," said {friend}.'),
    optional(0.5, "{hero} nodded and smiled.", "{hero} was very {feeling}."),
    ("Then they ate some {food} and played until night.",
     "They danced and sang, and there was {food} for everybody.",
     "It was the best birthday that {friend} could remember."),
    optional(0.4, "And {friend} kept the present for ever.", "So {hero} learned that {lesson}."),
)  # fmt: skip

PLANTING = body(
    ("One {daytime}, {hero} found a {plant} seed {spot}.",
     "One {daytime}, {helper_trait.a} {helper} gave {hero} a {plant} seed.",
     "One {daytime}, {hero} got a {plant} seed as a present."),
    ("{hero.He} planted it {wrong_spot}.", "{hero.He} made a small hole {wrong_spot} and put the seed inside."),
    ("Every morning, {hero} gave it water.", "{hero} watered it each day and sang to it.",
     "{hero} looked after it every day."),
    ("For a long time, nothing happened.", "A week went by, and nothing could be seen.",
     "But the earth stayed brown and bare."),
    (f'"It will never grow," said {FRIEND}.', f'"You must wait," said {FRIEND}.',
     f'"What are you waiting for?" asked {FRIEND}.'),
    ('"I am not going to give up," {hero} answered.', '"I will wait as long as it takes," said {hero}.',
     "{hero} said nothing and went on."),
    ("Then, after the first warm rain, a green leaf came out.", "One morning, there was a small green leaf.",
     "Then spring came, and with it a tiny leaf."),
    ("It grew and grew, until it was {plant.grew}.", "In the summer, it became {plant.grew}.",
     "Soon there stood {plant.grew}."),
    optional(0.5, '"You were right, {hero}," said {friend}.', "Even {friend} came to look at it.",
             "{hero} was very {feeling}."),
    ("{hero} shared the {plant.gave} with {friend}.", "{hero} and {friend} ate the {plant.gave} together.",
     "There were {plant.gave} for {hero}, for {friend} and for everybody else."),
    optional(0.5, "So {hero} learned that {lesson}.", "And {friend} asked {hero} for a seed, too."),
)  # fmt: skip

CLOSING = maybe(0.5, spaced(line(
    "The end.", "And they all lived happily ever after.", "{hero} never forgot that day.",
    "That night, {hero} slept very well.", "And that is the story of {hero} the {kind}.",
)))  # fmt: skip


def shape(name: str, topic: str, rule: Rule) -> tuple[Word, Rule]:
    """Returns a story shape and the words with which a user asks for it."""
    return Word(name, 1.0, {"topic": topic}), rule


SHAPES = [
    shape("lost", "something lost", LOST), shape("journey", "a journey", JOURNEY),
    shape("contest", "a contest", CONTEST), shape("sharing", "sharing food", SHARING),
    shape("storm", "a storm", STORM), shape("building", "building something", BUILDING),
    shape("fear", "being brave", FEAR), shape("gift", "a birthday", GIFT), shape("planting", "a seed", PLANTING),
]  # fmt: skip
STORY = Concat([OPENING, Branch("shape", SHAPES), CLOSING])


def generate(rng: random.Random) -> str:
    """Generates a random story."""
    return STORY.generate(rng, ())[0]


def parse(text: str, env: Env = ()) -> Verdict:
    """Parses `text` as a story, with the attributes that `env` binds beforehand."""
    return judge(STORY, text, env)


def mutated(story: str, rng: random.Random) -> str | None:
    """Changes one of several mentions of a name, a thing or a pronoun in a story. Returns None if there is no such
    mention."""
    pronouns = [Word("he"), Word("she")]
    tables = [w.NAMES, w.THINGS, w.HELPERS, w.FOODS, w.COLOURS, w.BUILDINGS, pronouns]
    present = [
        (word.text, table)
        for table in tables
        for word in table
        if len(re.findall(rf"\b{word.text}\b", story)) > 1
    ]
    if not present:
        return None
    old, table = rng.choice(present)
    new = rng.choice(
        [word.text for word in table if not re.search(rf"\b{word.text}\b", story)] or [old.upper()]
    )
    place = rng.choice([found.start() for found in re.finditer(rf"\b{old}\b", story)])
    return story[:place] + new + story[place + len(old) :]


def check(count: int) -> None:
    """Parses generated stories and mutations of them; fails if a story does not parse or a mutation does."""
    rng = random.Random(5)
    lengths, bits, mutations = [], [], 0
    for _ in range(count):
        story = generate(rng)
        verdict = parse(story)
        assert verdict.ok, f"stopped at {verdict.position}, wanting {verdict.wanted!r}: {story}"
        lengths.append(len(story.split()))
        bits.append(-verdict.logp)
        changed = mutated(story, rng)
        if changed is not None:
            mutations += 1
            assert not parse(changed).ok, f"accepted a mutation: {changed}"
    print(f"{count} stories parse; {mutations} mutations are rejected")
    print(f"words: min {min(lengths)}, median {statistics.median(lengths)}, max {max(lengths)}")
    print(f"entropy: {statistics.mean(bits):.1f} nats per story, {sum(bits) / sum(lengths):.3f} per word")


def main() -> None:
    """The command line: `--check`, or a few stories."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--check", action="store_true", help="check the parser against the generator")
    options.add_argument("--count", type=int, default=2000, help="number of stories to check")
    options.add_argument("--show", type=int, default=3, help="number of stories to print without --check")
    given = options.parse_args()
    if given.check:
        check(given.count)
        return
    rng = random.Random()
    for _ in range(given.show):
        print(generate(rng), end="\n\n")


if __name__ == "__main__":
    main()
