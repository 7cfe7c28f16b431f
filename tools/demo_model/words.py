"""The word tables of the demo grammar.

Invariant: within a table, no two words have the same text, so a text identifies its word.
"""

from __future__ import annotations

import random

from rules import Word, words

SHE = {"he": "she", "him": "her", "his": "her", "himself": "herself"}
HE = {"he": "he", "him": "him", "his": "his", "himself": "himself"}

NAMES = words(
    "Anna", "Lily", "Mia", "Nora", "Ella", "Rosa", "Ivy", "Clara", "Ruby", "Lena", "Maya", "Wren", "Hazel",
    "Daisy", "Tilda", "Edith", "Poppy", "June", "Greta", "Sana", **SHE,
) + words(
    "Tom", "Ben", "Max", "Leo", "Sam", "Finn", "Hugo", "Otto", "Jack", "Oscar", "Milo", "Theo", "Emil", "Noah",
    "Ravi", "Omar", "Toby", "Pip", "Karl", "Felix", **HE,
)  # fmt: skip

MORE_NAMES = words(
    "Alice", "Amy", "Beth", "Carla", "Chloe", "Diana", "Elena", "Emma", "Eva", "Fatima", "Grace", "Hannah",
    "Irene", "Julia", "Kate", "Laura", "Linda", "Maria", "Mary", "Nina", "Olivia", "Paula", "Rachel", "Sara",
    "Sophie", "Susan", "Tina", "Vera", "Yuki", "Zoe", "Priya", "Zelda", "Luna", "Bella", **SHE,
) + words(
    "Adam", "Alex", "Ali", "Andrew", "Anton", "Bob", "Carlos", "Chris", "Daniel", "David", "Eric", "Frank",
    "George", "Hans", "Henry", "Ivan", "James", "John", "Kevin", "Liam", "Lucas", "Mark", "Martin", "Nick",
    "Paul", "Peter", "Robert", "Simon", "Steve", "Thomas", "Victor", "Will", "Bruno", "Rex", **HE,
)  # fmt: skip


def made_up_names(count: int) -> list[Word]:
    """Returns names of random syllables, so that the model learns to copy names and not only the list. Names that end
    in `a` or `i` are female."""
    rng = random.Random(17)
    known = {word.text for word in NAMES + MORE_NAMES}
    heads = [
        "B",
        "D",
        "F",
        "G",
        "H",
        "J",
        "K",
        "L",
        "M",
        "N",
        "P",
        "R",
        "S",
        "T",
        "V",
        "Z",
        "Br",
        "Ch",
        "Tr",
        "W",
    ]
    middles = ["b", "d", "l", "m", "n", "r", "s", "t", "v", "nd", "rt", "ll", "x", "k"]
    vowels = ["a", "e", "i", "o", "u", "ai", "ee"]
    tails = ["a", "i", "o", "an", "en", "el", "or", "us", "ix", "ert"]
    made: dict[str, Word] = {}
    while len(made) < count:
        body = "".join(rng.choice(vowels) + rng.choice(middles) for _ in range(rng.choice([1, 1, 2])))
        name = rng.choice(heads) + body + rng.choice(tails)
        if name not in known:
            made[name] = Word(name, 1.0, SHE if name[-1] in "ai" else HE)
    return list(made.values())


MADE_UP_NAMES = made_up_names(600)

GIRL, BOY = words("girl", "boy")
HERO_KINDS = [Word(word.text, 3.0) for word in words(
    "fox", "rabbit", "bear", "mouse", "hedgehog", "squirrel", "cat", "dog", "duck", "frog", "goat", "deer",
    "badger", "otter", "dragon", "robot",
)] + [Word("girl", 5.0, {"only": "she"}), Word("boy", 5.0, {"only": "he"})]  # fmt: skip
RARE_KINDS = words(
    "penguin", "lion", "tiger", "wolf", "pig", "elephant", "monkey", "panda", "koala", "sheep", "unicorn",
    "kangaroo", "pirate", "giant", "snail", "ant", "bee", "seal", "camel", "knight",
) + [Word("princess", 1.0, {"only": "she"}), Word("queen", 1.0, {"only": "she"}),
     Word("prince", 1.0, {"only": "he"}), Word("king", 1.0, {"only": "he"})]  # fmt: skip
FRIEND_KINDS = HERO_KINDS[:14]
HELPERS = words("owl", "crow", "turtle", "beaver", "swan", "horse", "donkey", "mole", "heron", "goose")
HELPER_TRAITS = words("old", "wise", "friendly", "grey", "sleepy", "gentle")

TRAITS = words(
    "small",
    "kind",
    "brave",
    "clever",
    "shy",
    "cheerful",
    "quiet",
    "curious",
    "young",
    "merry",
    "little",
    "lively",
)
HOMES = [
    Word(text, 1.0, {"in": f"{preposition} a {text}", "the": f"the {noun}"})
    for preposition, text, noun in [
        ("in", "quiet forest", "forest"), ("in", "green valley", "valley"), ("in", "village by the sea", "village"),
        ("on", "farm near a river", "farm"), ("in", "small town", "town"), ("in", "cottage on a hill", "cottage"),
        ("on", "small island", "island"), ("in", "house beside a lake", "house"),
    ]
]  # fmt: skip
LIKES = words(
    "to sing", "to paint", "to read", "to climb trees", "to look at the stars", "to help others", "to dance",
    "to tell jokes", "to walk in the rain", "to bake cakes",
)  # fmt: skip
DAYTIMES = words("morning", "day", "afternoon", "evening")
COLOURS = words("red", "blue", "green", "yellow", "silver", "purple", "orange", "white")
THINGS = words(
    "ball", "kite", "hat", "scarf", "drum", "lantern", "bell", "cup", "button", "ribbon", "spoon", "key"
)
# Places where a thing is not, and places where it is; also the first and the second part of a journey.
WRONG_SPOTS = words(
    "under a bush", "behind the well", "near the bridge", "in the tall grass", "under the old bench"
)
SPOTS = words("beside the path", "behind a big rock", "in the garden", "at the foot of an oak", "by the pond")
GOALS = [
    Word(text, 1.0, {"there": there})
    for text, there in [
        ("the sea", "The waves were as loud as drums"), ("the high mountain", "The air was cold and clear"),
        ("the big city", "The streets were full of music"), ("the lighthouse", "Its lamp shone far over the water"),
        ("the castle", "Its towers were taller than trees"), ("the waterfall", "The water fell like silver hair"),
        ("the moon garden", "White flowers glowed in the dark"),
    ]
]  # fmt: skip
WAYS = words("through a dark wood", "over a wooden bridge", "across a wide field", "along a winding river")
SECOND_WAYS = words("up a steep hill", "past an old mill", "through a deep valley", "around a still lake")
FOODS = [
    Word(text, 1.0, {"it": it, "was": was})
    for text, it, was in [
        ("bread", "it", "was"), ("apple pie", "it", "was"), ("soup", "it", "was"), ("berries", "them", "were"),
        ("cheese", "it", "was"), ("nuts", "them", "were"), ("pancakes", "them", "were"), ("honey", "it", "was"),
    ]
]  # fmt: skip
CONTESTS = [
    Word(text, 1.0, {"do": do, "did": did, "best": best})
    for text, do, did, best in [
        ("race", "run", "ran", "the fastest runner"), ("singing contest", "sing", "sang", "the finest singer"),
        ("swimming contest", "swim", "swam", "the strongest swimmer"),
        ("jumping contest", "jump", "jumped", "the highest jumper"),
        ("dancing contest", "dance", "danced", "the best dancer"),
        ("painting contest", "paint", "painted", "the best painter"),
    ]
]  # fmt: skip
PRIZES = words("a golden cup", "a basket of plums", "a big cake", "a crown of flowers", "a jar of honey")
BUILDINGS = words("boat", "treehouse", "bridge", "cart", "tower", "swing", "shed", "raft")
MATERIALS = words(
    "branches and rope", "old planks", "stones and clay", "long reeds", "boards and nails", "logs and vines"
)
FEARS = [
    Word(text, 1.0, {"when": when, "now": now})
    for text, when, now in [
        ("the dark", "When the sun went down", "looked up at the night sky and smiled"),
        ("deep water", "When the others went swimming", "swam all the way across the pond"),
        ("thunder", "When the clouds rumbled", "counted the thunderclaps and laughed"),
        ("high places", "When the others climbed trees", "sat on the highest branch and waved"),
        ("loud noises", "When somebody dropped a pot", "played a drum as loudly as possible"),
    ]
]  # fmt: skip
CURES = words(
    "take one slow breath after another", "hum a quiet tune", "think of somebody kind", "count slowly to ten",
    "hold a smooth stone in one hand",
)  # fmt: skip
GIFTS = words(
    "a wooden flute", "a warm scarf", "a paper star", "a clay bowl", "a little book", "a string of beads"
)
WRAPPINGS = words("paper", "cloth", "silk")
PLANTS = [
    Word(text, 1.0, {"grew": grew, "gave": gave})
    for text, grew, gave in [
        ("sunflower", "a tall sunflower", "seeds"), ("apple", "a fine apple tree", "apples"),
        ("pumpkin", "a round pumpkin", "soup"), ("bean", "a long bean plant", "beans"),
        ("pear", "a young pear tree", "pears"), ("strawberry", "a strawberry plant", "strawberries"),
    ]
]  # fmt: skip
STORMS = [
    Word(text, 1.0, {"did": did})
    for text, did in [
        ("storm", "The wind howled"), ("heavy rain", "Water ran down every path"),
        ("snowstorm", "Snow covered every path"),
        ("thunderstorm", "Lightning flashed"), ("hailstorm", "Ice fell like pebbles"),
    ]
]  # fmt: skip
FEELINGS = words("happy", "glad", "proud", "cheerful", "content")
LESSONS = words(
    "a good friend is worth more than gold", "sharing makes every meal better", "small steps go a long way",
    "it is brave to ask for help", "kind words cost nothing", "patience brings good things",
)  # fmt: skip
