//! Vocabularies for tests, and random generation with them.

use crate::{Form, Grammar, GrammarError, Limits, Matcher, Spec, Token, Tokenize, Vocabulary};
use serde_json::Value;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

/// A random generator (xorshift), so that tests repeat.
pub struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 11) % limit as u64) as usize
    }
}

/// EOS of the toy vocabulary.
pub const EOS: u32 = 256;

/// A special token of the toy vocabulary that is not EOS.
pub const CALL: u32 = 257;

const WORDS: [&str; 60] = [
    "{\"", "\":", "\":\"", "\",\"", "\"}", "},", "[{", "}]", "null", "true", "false", "tr", "ue", "name",
    "age", "na", "me", "10", "00", "12", ".5", "-1", "e+", "  ", "\n ", ": ", ", ", "abc", "ab", "bc",
    "hello", " world", "é", "日本", "😀", "\\n", "\\\"", "\\u", "aa", "aaa", "a\"", "[1", "[]", "{}", "]]",
    "yes", "no", "ye", "s,", "x", "x", "foo", "bar", "<call>", "</call>", "get", "city", "-0", "0.", "::",
];

/// Single bytes, EOS, a special token, words (one of them twice, one the name of the special token), and an
/// unused token.
pub static TOY: LazyLock<Arc<Vocabulary>> = LazyLock::new(|| {
    let words = WORDS.map(|word| word.as_bytes().to_vec());
    let bytes = (0..=255u8).map(|byte| vec![byte]).collect::<Vec<_>>();
    let token = |id: u32| match id {
        0..256 => Token::Text(&bytes[id as usize]),
        EOS => Token::Special("<end>"),
        CALL => Token::Special("<call>"),
        _ => words.get(id as usize - 258).map_or(Token::Unused, |word| Token::Text(word)),
    };
    Arc::new(Vocabulary::new(258 + words.len() + 1, token, &[EOS], None).unwrap())
});

/// The bytes of the demo model's tokens; `None` for special ones.
pub fn demo_tokens() -> Vec<(String, Option<Vec<u8>>)> {
    let file: Value = serde_json::from_str(include_str!("../../../assets/demo/tokenizer.json")).unwrap();
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut characters: HashMap<char, u8> =
        (0..=255u8).filter(printable).map(|byte| (byte as char, byte)).collect();
    let others = (0..=255u8).filter(|byte| !printable(byte)).zip(256u32..);
    characters.extend(others.map(|(byte, code)| (char::from_u32(code).unwrap(), byte)));
    let mut tokens = HashMap::new();
    for (name, id) in file["model"]["vocab"].as_object().unwrap() {
        tokens.insert(
            id.as_u64().unwrap(),
            (name.clone(), name.chars().map(|c| characters.get(&c).copied()).collect()),
        );
    }
    for added in file["added_tokens"].as_array().unwrap() {
        tokens.insert(added["id"].as_u64().unwrap(), (added["content"].as_str().unwrap().to_owned(), None));
    }
    (0..tokens.len() as u64).map(|id| tokens[&id].clone()).collect()
}

/// The demo model's vocabulary. With `tokenize`, text is split into the longest tokens.
pub fn demo(canonical: bool) -> Arc<Vocabulary> {
    let tokens = demo_tokens();
    let end = tokens.iter().position(|(name, _)| name == "<|end|>").unwrap() as u32;
    let ids: HashMap<Vec<u8>, u32> =
        tokens.iter().zip(0u32..).filter_map(|((_, bytes), id)| Some((bytes.clone()?, id))).collect();
    let greedy: Tokenize = Box::new(move |text| {
        let mut rest = text.as_bytes();
        let mut found = Vec::new();
        while !rest.is_empty() {
            let len = (1..=rest.len()).rev().find(|len| ids.contains_key(&rest[..*len])).unwrap();
            found.push(ids[&rest[..len]]);
            rest = &rest[len..];
        }
        found
    });
    let token = |id: u32| match &tokens[id as usize] {
        (_, Some(bytes)) => Token::Text(bytes),
        (name, None) => Token::Special(name),
    };
    Arc::new(Vocabulary::new(tokens.len(), token, &[end], canonical.then_some(greedy)).unwrap())
}

pub static DEMO: LazyLock<Arc<Vocabulary>> = LazyLock::new(|| demo(true));

pub fn compile(form: Form) -> Result<Grammar, GrammarError> {
    Grammar::compile(&Spec::new(form), &TOY, &Limits::default())
}

pub fn schema(schema: &Value) -> Form {
    Form::JsonSchema(schema.to_string().into())
}

pub fn bits(mask: &[u32]) -> Vec<u32> {
    (0..mask.len() as u32 * 32).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
}

/// The bytes of a token.
pub fn text_of(vocabulary: &Vocabulary, id: u32) -> Vec<u8> {
    vocabulary.factory().tok_env().tok_trie().token(id).to_vec()
}

/// Draws tokens from the masks, uniformly but EOS more often, until the grammar ends the text. Returns its
/// bytes, or `None` after `limit` tokens.
pub fn generate(
    matcher: &mut Matcher,
    vocabulary: &Vocabulary,
    dice: &mut Dice,
    limit: usize,
) -> Option<Vec<u8>> {
    let mut mask = vec![0; vocabulary.mask_words()];
    let mut text = Vec::new();
    for _ in 0..limit {
        if matcher.is_complete() {
            return Some(text);
        }
        let only = matcher.mask(&mut mask).unwrap();
        let allowed = bits(&mask);
        assert_eq!(only, (allowed.len() == 1).then(|| allowed[0]));
        let eos = allowed.iter().find(|id| vocabulary.eos().contains(id));
        assert_eq!(eos.is_some(), matcher.is_accepting().unwrap());
        let token = match eos {
            Some(eos) if dice.below(2) == 0 => *eos,
            _ => allowed[dice.below(allowed.len())],
        };
        if !vocabulary.eos().contains(&token) {
            text.extend(text_of(vocabulary, token));
        }
        matcher.accept(token).unwrap();
    }
    matcher.is_complete().then_some(text)
}
