//! Pre-tokenizers of GGUF files by their names (`tokenizer.ggml.pre`).
//!
//! Invariant: an unknown name is rejected: its texts would be split differently from the model's training.

use crate::text::tokenizer::byte_level::{UnicodeNormalization, WholeWordLookup};
use crate::text::tokenizer::splits::{LLAMA3, QWEN2};
use anyhow::{Context, Result};

/// A pre-tokenizer with its names.
#[derive(Clone, Copy, Debug)]
pub struct PreTokenizerSpec {
    names: &'static [&'static str],
    /// Regular expressions that split a text, applied one after the other.
    pub patterns: &'static [&'static str],
    pub normalization: UnicodeNormalization,
    pub whole_word_lookup: WholeWordLookup,
    /// Whether BOS is added before a text if the file does not say.
    pub adds_bos: bool,
}

/// Name that is used for files without one, which are old.
const DEFAULT: &str = "default";

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";
const DEEPSEEK3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"##,
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
// Characters with a canonically equivalent form are written as escapes, since editors may normalize them.
const DEEPSEEK_LETTERS: &str = concat!(
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ",
    r"ἠ-ὅὈ-Ὅὐ-ὗὙὛὝ\x{1F5F}-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌ\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}ῠ-Ῥῲ-ῴ",
    r"ῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏",
    r"𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
);
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|",
    r"'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|",
    r"'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const QWEN35: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|",
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
);
const BAILING: &str =
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const SEED: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|",
    r"\s+(?!\S)|\s+"
);
const EXAONE_MOE: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
);
// Groups of three digits from the right. The well-known pattern looks ahead before every digit, which takes
// quadratic time.
const THREES_FROM_THE_RIGHT: &str = r"(?<!\d)\d{1,2}(?=(?:\d{3})+(?!\d))|\d{3}";
const BLOOM: &str = " ?[^(\\s|.,!?…。，、।۔،)]+";

/// Returns a pre-tokenizer with the usual settings: no normalization, merges are applied to whole words, no
/// BOS.
const fn with_defaults(
    names: &'static [&'static str],
    patterns: &'static [&'static str],
) -> PreTokenizerSpec {
    let (composing, whole_words) = (UnicodeNormalization::None, WholeWordLookup::Disabled);
    PreTokenizerSpec {
        names,
        patterns,
        normalization: composing,
        whole_word_lookup: whole_words,
        adds_bos: false,
    }
}

/// All known pre-tokenizers.
static TABLE: [PreTokenizerSpec; 21] = [
    with_defaults(&[DEFAULT], &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
    with_defaults(
        &[
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "gigachat",
            "jina-v1-en",
            "jina-v2-code",
            "jina-v2-de",
            "jina-v2-es",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "roberta-bpe",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
        ],
        &[GPT2],
    ),
    PreTokenizerSpec {
        whole_word_lookup: WholeWordLookup::Enabled,
        adds_bos: true,
        ..with_defaults(
            &[
                "llama3",
                "llama-v3",
                "llama-bpe",
                "falcon3",
                "falcon-h1",
                "pixtral",
                "midm-2.0",
                "lfm2",
                "jina-v5-nano",
            ],
            &[LLAMA3],
        )
    },
    with_defaults(&["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], &[LLAMA3]),
    PreTokenizerSpec { normalization: UnicodeNormalization::Nfc, ..with_defaults(&["qwen2"], &[QWEN2]) },
    with_defaults(
        &["deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "hunyuan", "megrez", "grok-2", "solar-open"],
        &[QWEN2],
    ),
    PreTokenizerSpec { normalization: UnicodeNormalization::Nfc, ..with_defaults(&["qwen35"], &[QWEN35]) },
    with_defaults(
        &["deepseek-llm"],
        &[
            "[\r\n]",
            DEEPSEEK_LETTERS,
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-퟿]+",
            r"\p{N}+",
        ],
    ),
    with_defaults(&["deepseek-coder"], &["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"]),
    with_defaults(
        &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        &[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3],
    ),
    with_defaults(&["falcon"], &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
    with_defaults(
        &["starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"],
        &[r"\p{N}", GPT2],
    ),
    PreTokenizerSpec {
        whole_word_lookup: WholeWordLookup::Enabled,
        adds_bos: true,
        ..with_defaults(&["tekken"], &[TEKKEN])
    },
    with_defaults(&["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], &[GPT4O]),
    with_defaults(&["bloom", "poro-chat", "gpt3-finnish"], &[BLOOM]),
    with_defaults(&["viking"], &[BLOOM, r"\p{N}"]),
    with_defaults(&["bailingmoe", "bailingmoe2", "llada-moe"], &[BAILING]),
    with_defaults(&["seed-coder"], &[SEED]),
    with_defaults(&["exaone-moe"], &[EXAONE_MOE]),
    with_defaults(&["superbpe"], &[r"\p{N}+", THREES_FROM_THE_RIGHT]),
    PreTokenizerSpec {
        adds_bos: true,
        ..with_defaults(
            &["chameleon"],
            &[
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                GPT2,
            ],
        )
    },
];

impl PreTokenizerSpec {
    /// Name for files whose pre-tokenizer has no other.
    pub const DEFAULT: &str = DEFAULT;

    /// Returns the name of the pre-tokenizer that splits by these patterns; without any, that of GPT-2. Names
    /// differ also in whether BOS is added before a text.
    pub fn name_of(patterns: &[&str], adds_bos: bool) -> Option<&'static str> {
        let is_it = |pre: &&PreTokenizerSpec| match patterns {
            [] => pre.patterns == [GPT2],
            patterns => pre.patterns == patterns,
        };
        let found: Vec<&PreTokenizerSpec> = TABLE.iter().filter(is_it).collect();
        found.iter().find(|pre| pre.adds_bos == adds_bos).or(found.first()).map(|pre| pre.names[0])
    }

    /// Returns the pre-tokenizer with this name. No name is "default".
    pub fn from_name(name: Option<&str>) -> Result<PreTokenizerSpec> {
        let name = name.filter(|name| !name.is_empty()).unwrap_or(DEFAULT);
        let found = TABLE.iter().find(|pre| pre.names.contains(&name));
        let known = || TABLE.iter().flat_map(|pre| pre.names).copied().collect::<Vec<_>>().join(", ");
        found
            .copied()
            .with_context(|| format!("its pre-tokenizer '{name}' is not supported (supported: {})", known()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::vocabularies::run_with_timeout;
    use crate::text::tokenizer::splits;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, PreTokenizerWrapper};

    /// Splits a text into words.
    fn words(name: &str, text: &str) -> Vec<String> {
        let stages = splits::stages(PreTokenizerSpec::from_name(Some(name)).unwrap().patterns);
        let split = serde_json::json!({"type": "Sequence", "pretokenizers": stages});
        let split: PreTokenizerWrapper = serde_json::from_value(split).unwrap();
        let mut words = PreTokenizedString::from(text);
        split.pre_tokenize(&mut words).unwrap();
        let words = words.get_splits(OffsetReferential::Original, OffsetType::Byte);
        words.into_iter().map(|(word, ..)| word.to_owned()).collect()
    }

    #[test]
    fn names_are_unique_and_all_patterns_split() {
        let mut names: Vec<&str> = TABLE.iter().flat_map(|pre| pre.names).copied().collect();
        let text = "Hello  world,\n it's 12345 €☃ 日本語 ÉCOLE\u{301}   ";
        for name in &names {
            assert_eq!(words(name, text).concat(), text, "{name}");
        }
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
        let error = PreTokenizerSpec::from_name(Some("kimi")).unwrap_err().to_string();
        assert!(error.contains("'kimi' is not supported") && error.contains("llama-bpe"), "{error}");
        assert_eq!(words("default", text), words("", text));
    }

    #[test]
    fn digits_by_threes_from_the_right_are_found_in_one_pass() {
        for count in (1..20).chain([100_000]) {
            let digits: String = "1234567890".chars().cycle().take(count).collect();
            let threes = digits.as_bytes().rchunks(3).rev().map(|three| str::from_utf8(three).unwrap());
            let expected: Vec<&str> = ["a"].into_iter().chain(threes).chain(["b"]).collect();
            let text = format!("a{digits}b");
            assert_eq!(run_with_timeout(move || words("superbpe", &text)), expected, "{count}");
        }
        assert_eq!(words("superbpe", "12345½1234"), ["12", "345", "½", "1", "234"]);
    }

    #[test]
    fn families_split_digits_and_apostrophes_in_their_own_ways() {
        let cases: [(&str, &str, &[&str]); 9] = [
            ("gpt-2", "it's 1234 'S", &["it", "'s", " 1234", " '", "S"]),
            ("llama-bpe", "It'S 1234", &["It", "'S", " ", "123", "4"]),
            ("qwen2", "a 123", &["a", " ", "1", "2", "3"]),
            ("starcoder", "x=123", &["x", "=", "1", "2", "3"]),
            ("falcon", "a+12345", &["a", "+", "123", "45"]),
            ("deepseek-llm", "日本 ab!", &["日本", " ab", "!"]),
            ("tekken", "camelCase Words/", &["camel", "Case", " Words", "/"]),
            ("default", "a $ 12345", &["a", " ", "$", " ", "123", "45"]),
            ("bloom", "Hi, you", &["Hi", ",", " you"]),
        ];
        for (name, text, expected) in cases {
            assert_eq!(words(name, text), expected, "{name}");
        }
    }
}
