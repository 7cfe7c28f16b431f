//! The word list of random text prompts.
//!
//! Invariant: the words are distinct and lower-case; the order must not change, because seeded prompts depend
//! on it.

/// Common English words, in the order used by seeded prompts.
pub(super) const WORDS: [&str; 714] = [
    "able", "about", "above", "across", "act", "add", "after", "again", "age", "ago", "agree", "air", "all",
    "along", "also", "always", "among", "amount", "animal", "answer", "any", "appear", "apple", "area",
    "arm", "around", "arrive", "art", "ask", "autumn", "away", "baby", "back", "bad", "bag", "ball", "bank",
    "base", "bath", "bear", "became", "become", "bed", "before", "began", "begin", "behind", "believe",
    "bell", "below", "beside", "best", "better", "between", "big", "bird", "black", "blood", "blow", "blue",
    "board", "boat", "body", "bone", "book", "both", "bottom", "bowl", "box", "boy", "branch", "bread",
    "break", "breath", "bridge", "bright", "bring", "broad", "brother", "brown", "build", "burn", "busy",
    "butter", "buy", "cake", "call", "came", "camp", "card", "care", "carry", "case", "cat", "catch",
    "cause", "center", "chair", "chance", "change", "cheap", "chest", "chief", "child", "choose", "circle",
    "city", "class", "clean", "clear", "clock", "close", "cloth", "cloud", "coat", "cold", "color", "come",
    "common", "cook", "cool", "copper", "corn", "corner", "cost", "cotton", "count", "country", "course",
    "cover", "cow", "cross", "crowd", "cry", "cup", "current", "cut", "dance", "danger", "dark", "day",
    "deal", "dear", "decide", "deep", "desk", "develop", "die", "differ", "dinner", "direct", "doctor",
    "dog", "door", "double", "doubt", "down", "draw", "dream", "dress", "drink", "drive", "drop", "dry",
    "during", "dust", "each", "ear", "early", "earth", "east", "easy", "eat", "edge", "eight", "either",
    "else", "end", "engine", "enough", "equal", "even", "evening", "event", "ever", "every", "example",
    "eye", "face", "fact", "fair", "fall", "family", "far", "farm", "fast", "father", "fear", "feed", "feel",
    "feet", "few", "field", "fight", "figure", "fill", "find", "fine", "finger", "finish", "fire", "first",
    "fish", "five", "flat", "floor", "flow", "flower", "fly", "fold", "follow", "food", "foot", "force",
    "forest", "forget", "form", "forward", "four", "free", "fresh", "friend", "from", "front", "fruit",
    "full", "game", "garden", "gather", "gave", "general", "gentle", "girl", "give", "glad", "glass", "gold",
    "good", "grass", "great", "green", "ground", "group", "grow", "guess", "guide", "hair", "half", "hall",
    "hand", "happen", "happy", "hard", "hat", "have", "head", "hear", "heart", "heat", "heavy", "help",
    "here", "high", "hill", "history", "hold", "hole", "home", "honey", "hope", "horse", "hot", "hour",
    "house", "how", "hundred", "hurry", "ice", "idea", "inch", "island", "job", "join", "journey", "judge",
    "jump", "just", "keep", "key", "kind", "king", "kitchen", "knee", "knife", "knock", "know", "lake",
    "lamp", "land", "large", "last", "late", "laugh", "law", "lay", "lead", "leaf", "learn", "leave", "left",
    "leg", "less", "letter", "level", "lie", "life", "lift", "light", "like", "line", "list", "listen",
    "little", "live", "long", "look", "lose", "lot", "loud", "love", "low", "machine", "main", "make",
    "many", "map", "mark", "market", "matter", "may", "meal", "mean", "measure", "meat", "meet", "member",
    "metal", "middle", "might", "mile", "milk", "mind", "minute", "miss", "mix", "modern", "moment", "money",
    "month", "moon", "more", "morning", "most", "mother", "mouth", "move", "much", "music", "must", "name",
    "narrow", "nation", "near", "neck", "need", "needle", "never", "new", "news", "next", "night", "nine",
    "noise", "none", "noon", "north", "nose", "note", "nothing", "notice", "now", "number", "ocean", "off",
    "offer", "office", "often", "oil", "old", "once", "one", "only", "open", "orange", "order", "other",
    "our", "outside", "oven", "over", "own", "page", "paint", "pair", "paper", "parent", "part", "party",
    "pass", "past", "path", "pay", "pen", "pencil", "people", "perhaps", "person", "picture", "piece",
    "place", "plain", "plan", "plane", "plant", "plate", "play", "please", "plenty", "pocket", "point",
    "poor", "pound", "power", "present", "press", "price", "problem", "produce", "public", "pull", "push",
    "put", "queen", "quick", "quiet", "quite", "rain", "raise", "ran", "rather", "reach", "read", "ready",
    "real", "reason", "record", "red", "repeat", "rest", "rice", "rich", "ride", "right", "ring", "rise",
    "river", "road", "rock", "roll", "roof", "room", "root", "rope", "round", "row", "rule", "run", "safe",
    "sail", "salt", "same", "sand", "save", "say", "scale", "school", "science", "sea", "season", "seat",
    "second", "seed", "seem", "sell", "send", "sense", "serve", "seven", "several", "shade", "shape",
    "share", "sharp", "sheep", "ship", "shirt", "shoe", "shop", "shore", "short", "show", "side", "sign",
    "silver", "simple", "since", "sing", "sister", "sit", "six", "size", "skill", "skin", "sky", "sleep",
    "slow", "small", "smell", "smile", "smoke", "smooth", "snow", "soft", "soil", "soldier", "some", "son",
    "song", "soon", "sound", "soup", "south", "space", "speak", "special", "spell", "spend", "spoon",
    "spring", "square", "stage", "stand", "star", "start", "state", "station", "stay", "steam", "step",
    "stick", "still", "stone", "stop", "store", "storm", "story", "strange", "street", "strong", "student",
    "study", "such", "sudden", "sugar", "suit", "summer", "sun", "supper", "sure", "surface", "sweet",
    "swim", "table", "tail", "take", "talk", "tall", "taste", "teach", "team", "tell", "ten", "test", "than",
    "thank", "that", "their", "them", "then", "there", "thick", "thin", "thing", "think", "third", "though",
    "thought", "thread", "three", "through", "throw", "ticket", "time", "tiny", "tone", "took", "top",
    "total", "touch", "toward", "town", "track", "trade", "train", "travel", "tree", "trip", "trouble",
    "true", "trust", "try", "turn", "twelve", "twenty", "two", "under", "until", "upon", "use", "usual",
    "valley", "value", "very", "village", "visit", "voice", "wait", "walk", "wall", "want", "warm", "wash",
    "watch", "water", "wave", "way", "weather", "week", "weight", "well", "west", "wheel", "when", "where",
    "while", "white", "whole", "why", "wide", "wild", "will", "wind", "window", "wing", "winter", "wire",
    "wish", "with", "without", "woman", "wonder", "wood", "wool", "word", "work", "world", "worth", "write",
    "wrong", "yard", "year", "yellow", "yet", "young",
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn words_are_distinct_and_plain() {
        assert_eq!(WORDS.iter().collect::<BTreeSet<_>>().len(), WORDS.len());
        assert!(
            WORDS.iter().all(|word| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_lowercase()))
        );
    }
}
