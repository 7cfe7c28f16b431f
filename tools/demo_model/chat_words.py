"""The word tables of the demo dialogues: the facts that the model knows, and samples of what it does not know.

Invariant: within a table, no two words have the same text, so a text identifies its word.
"""

from __future__ import annotations

from rules import Word, words

_OPPOSITES = [
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("high", "low"), ("old", "young"), ("happy", "sad"),
    ("light", "dark"), ("wet", "dry"), ("hard", "soft"), ("open", "closed"), ("full", "empty"), ("early", "late"),
    ("loud", "quiet"), ("rich", "poor"), ("strong", "weak"), ("up", "down"), ("left", "right"), ("day", "night"),
    ("good", "bad"), ("near", "far"), ("thick", "thin"), ("long", "short"), ("clean", "dirty"), ("first", "last"),
    ("yes", "no"), ("black", "white"), ("inside", "outside"), ("brave", "fearful"), ("sweet", "sour"),
    ("deep", "shallow"), ("true", "false"), ("always", "never"), ("easy", "difficult"), ("wide", "narrow"),
]  # fmt: skip
OPPOSITES = [
    Word(word, 1.0, {"opposite": other}) for a, b in _OPPOSITES for word, other in ((a, b), (b, a))
]  # fmt: skip

SOUNDS = [
    Word(animal, 1.0, {"sound": sound})
    for animal, sound in [
        ("cow", "moo"), ("dog", "woof"), ("cat", "meow"), ("duck", "quack"), ("sheep", "baa"), ("pig", "oink"),
        ("horse", "neigh"), ("owl", "hoo"), ("frog", "croak"), ("lion", "roar"), ("bee", "buzz"), ("snake", "hiss"),
        ("mouse", "squeak"), ("crow", "caw"), ("wolf", "howl"), ("rooster", "cock-a-doodle-doo"), ("hen", "cluck"),
        ("turkey", "gobble"), ("donkey", "hee-haw"), ("bird", "tweet"),
    ]
]  # fmt: skip

COLOURED = [
    Word(thing, 1.0, {"colour": colour})
    for thing, colour in [
        ("grass", "green"), ("the sky", "blue"), ("snow", "white"), ("a banana", "yellow"), ("blood", "red"),
        ("coal", "black"), ("a lemon", "yellow"), ("a tomato", "red"), ("a carrot", "orange"), ("a plum", "purple"),
        ("milk", "white"), ("chocolate", "brown"), ("a leaf", "green"), ("the sun", "yellow"), ("the sea", "blue"),
        ("a crow", "black"), ("a strawberry", "red"), ("a pumpkin", "orange"), ("a frog", "green"),
        ("a polar bear", "white"), ("an elephant", "grey"), ("a pea", "green"), ("a fox", "red"), ("a pig", "pink"),
    ]
]  # fmt: skip

DWELLERS = [
    Word(animal, 1.0, {"home": home})
    for animal, home in [
        ("bird", "a nest"), ("bee", "a hive"), ("fish", "the water"), ("fox", "a den"), ("bear", "a cave"),
        ("rabbit", "a burrow"), ("horse", "a stable"), ("spider", "a web"), ("ant", "an anthill"),
        ("king", "a castle"), ("dog", "a kennel"), ("whale", "the sea"), ("squirrel", "a tree"), ("cow", "a barn"),
        ("penguin", "the ice"), ("camel", "the desert"), ("monkey", "the jungle"), ("snail", "its shell"),
    ]
]  # fmt: skip

_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
_MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
]  # fmt: skip


def _circle(kind: str, names: list[str]) -> list[Word]:
    ring = zip(names, names[1:] + names[:1], names[-1:] + names[:-1])
    return [
        Word(name, 1.0, {"kind": kind, "next": after, "previous": before}) for name, after, before in ring
    ]


DATES = _circle("day", _DAYS) + _circle("month", _MONTHS)

NUMERALS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]  # fmt: skip
NUMBERS = [Word(str(n), 1.0, {"numeral": numeral}) for n, numeral in enumerate(NUMERALS)]
BIG_NUMBERS = [Word(str(n), 1.0) for n in range(11, 1000)]

LISTS = {
    "fruits": words("apple", "pear", "plum", "cherry", "banana", "grape", "peach", "melon", "mango", "fig"),
    "animals": words("fox", "bear", "cow", "horse", "lion", "mouse", "rabbit", "wolf", "goat", "whale"),
    "colours": words("red", "blue", "green", "yellow", "black", "white", "orange", "purple", "brown", "pink"),
    "vegetables": words(
        "carrot", "potato", "onion", "cabbage", "pea", "bean", "pumpkin", "leek", "beet", "corn"
    ),
    "birds": words("owl", "crow", "swan", "duck", "robin", "eagle", "heron", "goose", "sparrow", "hawk"),
    "trees": words("oak", "pine", "birch", "maple", "willow", "elm", "beech", "fir", "ash", "cedar"),
}
CATEGORIES = words(*LISTS)

SAYABLE = words(
    "hello", "cat", "dog", "banana", "moon", "tree", "yes", "no", "river", "sun", "apple", "fish", "star", "hooray",
    "bread", "music", "garden", "rain", "snow", "happy", "kite", "stone", "blue", "red", "mouse", "cake", "goodbye",
    "please", "water", "summer", "pizza", "tea", "book", "house", "frog", "love", "hop", "boo", "wow", "bell",
)  # fmt: skip

STYLES = words("Ahoy!", "Well,", "Dear friend,", "Aha!", "Hmm,", "My answer:", "Hello!", "Sure!")

SYSTEMS = words(
    "You are a helpful assistant.", "You are Brook.", "You are a friendly assistant.", "Be kind and brief.",
    "You are a helpful assistant. Answer in short sentences.", "You are Brook, a small demo model.",
    "Answer the questions of the user.", "You are a storyteller.", "Be helpful, harmless and honest.",
    "You are a helpful, respectful and honest assistant.", "Speak simply.", "You talk to children.",
)  # fmt: skip

# Things the model does not know, used in the questions that it must decline.
PLACES = words(
    "France", "Germany", "Italy", "Spain", "Japan", "China", "India", "Brazil", "Canada", "Egypt", "Kenya", "Peru",
    "Norway", "Poland", "Turkey", "Mexico", "Australia", "Paris", "London", "Berlin", "New York", "Tokyo", "Rome",
)  # fmt: skip
LANGUAGES = words(
    "Python",
    "Rust",
    "C",
    "Java",
    "JavaScript",
    "Go",
    "SQL",
    "Haskell",
    "French",
    "German",
    "Spanish",
    "Latin",
    "Chinese",
)
TASKS = words(
    "sort a list", "read a file", "reverse a string", "add two matrices", "build a web server", "draw a circle",
    "find prime numbers", "parse JSON", "send an email", "download a page", "cook rice", "fix a bicycle",
    "learn the piano", "write a letter", "invest money", "lose weight", "plan a trip", "clean a window",
    "repair a phone", "open a bank account",
)  # fmt: skip
TOPICS = words(
    "quantum physics", "the French Revolution", "democracy", "machine learning", "black holes", "the stock market",
    "football", "photosynthesis", "the Roman Empire", "climate change", "jazz", "chess", "evolution", "electricity",
    "the internet", "philosophy", "love", "the meaning of life", "dinosaurs", "volcanoes", "vaccines", "gravity",
    "Shakespeare", "the Moon landing", "computers", "transformers", "history", "mathematics", "politics", "space",
)  # fmt: skip
PEOPLE = words(
    "Albert Einstein", "Mozart", "Napoleon", "Cleopatra", "Isaac Newton", "the president",
    "the first king of England",
    "Marie Curie", "Plato", "Beethoven", "Charles Darwin", "the pope",
)  # fmt: skip
COMMON = words(
    "the", "a", "is", "of", "and", "to", "in", "that", "it", "was", "for", "on", "are", "with", "they", "be", "at",
    "have", "this", "from", "by", "word", "but", "what", "some", "we", "can", "out", "other", "were", "all", "your",
    "when", "use", "how", "an", "each", "which", "do", "their", "time", "if", "will", "way", "about", "many",
    "then",
    "them", "would", "write", "like", "these", "long", "make", "thing", "see", "him", "two", "has", "look", "more",
    "could", "go", "come", "my", "sound", "most", "number", "who", "over", "know", "water", "than", "call", "first",
    "people", "may", "side", "been", "now", "find", "any", "new", "work", "part", "take", "get", "place", "live",
    "where", "after", "back", "little", "only", "year", "came", "show", "every", "good", "give", "under", "name",
    "very", "through", "just", "form", "much", "great", "think", "say", "help", "low", "line", "turn", "cause",
    "same", "mean", "differ", "move", "boy", "old", "too", "does", "tell", "set", "three", "want", "air", "well",
    "also", "play", "small", "end", "put", "home", "read", "hand", "port", "large", "spell", "add", "even", "land",
    "must", "big", "high", "such", "follow", "act", "why", "ask", "men", "change", "went", "light", "kind", "off",
    "need", "house", "picture", "try", "us", "again", "animal", "point", "mother", "world", "near", "build", "self",
    "earth", "father", "head", "stand", "own", "page", "should", "country", "found", "answer", "school", "grow",
    "study", "still", "learn", "plant", "cover", "food", "sun", "four", "thought", "let", "keep", "eye", "never",
    "door", "between", "city", "tree", "cross", "since", "hard", "start", "might", "story", "saw", "far", "sea",
)  # fmt: skip
NONSENSE = words(
    "asdf", "qwerty", "lorem ipsum", "foo bar", "xyz", "blah blah", "hjkl", "bla", "test 123", "???", "...", "ok?",
    "1234567", "Guten Tag, wie geht es?", "Bonjour", "Hola, que tal?", "print(x)", "SELECT * FROM t;", ":-)", "42",
)  # fmt: skip
