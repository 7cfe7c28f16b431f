//! Small vocabularies for tests, and a random number generator to fill them and to pick ids.
//!
//! Invariant: the same seed gives the same vocabulary and the same numbers.

use crate::testing::Scratch;
use crate::text::tokenizer::Tokenizer;
use crate::text::tokenizer::byte_of_character;
use mainstem_kernels::random::philox;
use serde_json::{Map, Value, json};

/// Placeholder in a list of tokens: the id at this position is left out.
const NONE: &str = "";

/// A seeded random number generator.
pub(crate) struct Dice {
    seed: u32,
    thrown: u32,
}

impl Dice {
    pub(crate) fn new(seed: u32) -> Dice {
        Dice { seed, thrown: 0 }
    }

    /// Returns a number below `limit`.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.thrown += 1;
        philox([self.thrown, 0, 0, 0], [self.seed, 0])[0] as usize % limit
    }

    pub(crate) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}

/// Runs work that should take a second or two and returns its result. Panics if it takes minutes.
pub(crate) fn run_with_timeout<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(work()));
    receiver.recv_timeout(std::time::Duration::from_secs(100)).expect("the work takes seconds, not minutes")
}

/// A llama2.c vocabulary: control tokens, bytes, `letters`, and `merged` concatenated pieces with few
/// distinct scores.
pub(crate) fn scored_pieces(dice: &mut Dice, letters: &[&str], merged: usize) -> Vec<(f32, Vec<u8>)> {
    let controls = ["<unk>", "\n<s>\n", "\n</s>\n"].map(String::from);
    let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
    let mut pieces: Vec<(f32, Vec<u8>)> =
        controls.into_iter().chain(bytes).map(|p| (0.0, p.into_bytes())).collect();
    let first_letter = pieces.len();
    pieces.extend(letters.iter().map(|letter| (-100.0, letter.as_bytes().to_vec())));
    while pieces.len() < first_letter + letters.len() + merged {
        let [left, right] = [(); 2].map(|()| dice.pick(&pieces[first_letter..]).1.clone());
        let joint = [left, right].concat();
        if joint.len() <= 12 && !pieces.iter().any(|(_, piece)| *piece == joint) {
            pieces.push((-(dice.below(6) as f32), joint));
        }
    }
    pieces
}

/// Encodes the pieces as a `tokenizer.bin`.
pub(crate) fn scored_file(pieces: &[(f32, Vec<u8>)]) -> Vec<u8> {
    let longest = pieces.iter().map(|(_, piece)| piece.len()).max().unwrap_or(0);
    let mut content = (longest as i32).to_le_bytes().to_vec();
    for (score, piece) in pieces {
        content.extend(score.to_le_bytes());
        content.extend((piece.len() as i32).to_le_bytes());
        content.extend(piece);
    }
    content
}

/// A llama2.c tokenizer over a few letters.
pub(crate) fn llama2c() -> Tokenizer {
    let pieces = scored_pieces(&mut Dice::new(1), &[" ", "t", "h", "e", "é"], 30);
    let folder = Scratch::new();
    Tokenizer::from_llama2c(&folder.write("tokenizer.bin", &scored_file(&pieces)), pieces.len()).unwrap()
}

/// Loads a tokenizer from a folder with these files.
pub(crate) fn from_tokenizer_json(tokenizer: &Value, config: Option<Value>) -> anyhow::Result<Tokenizer> {
    let folder = Scratch::new();
    folder.write("tokenizer.json", tokenizer.to_string().as_bytes());
    if let Some(config) = config {
        folder.write("tokenizer_config.json", config.to_string().as_bytes());
    }
    Tokenizer::from_folder(&folder.folder())
}

/// A `tokenizer.json` like that of GPT-2: ids 0 and 1 are `<s>` and `</s>`, followed by the bytes.
pub(crate) fn byte_level() -> Value {
    let bytes: Vec<String> = (0..=255)
        .map(|byte| {
            (0..0x200)
                .filter_map(char::from_u32)
                .find(|c| byte_of_character(*c) == Some(byte))
                .unwrap()
                .into()
        })
        .collect();
    let merges = [["Ġ", "t"], ["h", "e"], ["Ġt", "he"], ["Ã", "©"], ["Ġ", "Ġ"], ["ð", "Ł"]];
    let tokens = ["<s>", "</s>"].map(String::from).into_iter().chain(bytes).chain(merges.map(|m| m.concat()));
    json!({
        "added_tokens": [special(0, "<s>"), special(1, "</s>"), added(264, "two words", false)],
        "pre_tokenizer":
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocabulary(tokens), "merges": merges},
    })
}

/// A `tokenizer.json` like that of Llama 2: `<unk>`, `<s>`, `</s>`, the bytes, and text with U+2581 for
/// spaces.
pub(crate) fn byte_fallback() -> Value {
    let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
    let letters = ["▁", "t", "h", "e", "é", "▁t", "he", "▁the", "▁▁", NONE, "the"].map(String::from);
    let tokens = ["<unk>", "<s>", "</s>"].map(String::from).into_iter().chain(bytes).chain(letters);
    json!({
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}}
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "BPE", "vocab": vocabulary(tokens), "byte_fallback": true, "unk_token": "<unk>",
            "fuse_unk": true, "merges": [["▁", "t"], ["h", "e"], ["▁t", "he"], ["▁", "▁"]]},
    })
}

/// A `tokenizer.json` like that of BERT.
pub(crate) fn word_piece() -> Value {
    let tokens =
        ["[UNK]", "[SEP]", "the", "##re", "re", "a", "##b", ".", "n", "'", "t", "##t"].map(String::from);
    json!({
        "added_tokens": [special(0, "[UNK]"), special(1, "[SEP]")],
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "vocab": vocabulary(tokens), "unk_token": "[UNK]",
            "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    })
}

/// A `tokenizer.json` like that of T5.
pub(crate) fn metaspace() -> Value {
    let tokens =
        ["<unk>", "</s>", "▁", "t", "h", "e", "▁t", "he", "▁the", "▁▁", NONE, "the"].map(String::from);
    let metaspace =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": false});
    json!({
        "added_tokens": [special(0, "<unk>"), special(1, "</s>")],
        "pre_tokenizer": metaspace,
        "decoder": metaspace,
        "model": {"type": "BPE", "vocab": vocabulary(tokens), "unk_token": "<unk>",
            "merges": [["▁", "t"], ["h", "e"], ["▁t", "he"], ["▁", "▁"]]},
    })
}

fn vocabulary(tokens: impl IntoIterator<Item = String>) -> Map<String, Value> {
    let numbered = tokens.into_iter().zip(0u32..).filter(|(token, _)| token != NONE);
    numbered.map(|(token, id)| (token, id.into())).collect()
}

fn special(id: u32, content: &str) -> Value {
    added(id, content, true)
}

fn added(id: u32, content: &str, special: bool) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": special})
}
