//! Tests with valid and malformed files.
//!
//! Invariant: every file that a test writes has a unique name and is removed.

use tokenizers::{
    PaddingParams, PaddingStrategy, TruncationParams, models::wordlevel::WordLevel,
    pre_tokenizers::whitespace::WhitespaceSplit, processors::template::TemplateProcessing,
};

use super::*;
use crate::plan::files::TempFile;

fn read_as(
    name: &str,
    content: impl AsRef<[u8]>,
    tokenizer: Option<&Tokenizer>,
) -> anyhow::Result<Vec<PromptText>> {
    read(TempFile::new(name, content).path(), tokenizer)
}

/// Returns the prompts and lengths of a file read without a tokenizer.
fn read_lengths(name: &str, content: &str) -> Vec<(String, u32, Option<u32>)> {
    let texts = read_as(name, content, None).unwrap_or_else(|error| panic!("{error:#}"));
    texts.into_iter().map(|text| (text.prompt, text.prompt_len, text.output_len)).collect()
}

fn read_error(name: &str, content: impl AsRef<[u8]>) -> String {
    let error = format!("{:#}", read_as(name, content, None).unwrap_err());
    assert!(error.contains(name), "the file is named: {error}");
    error
}

/// Returns a tokenizer with four words that adds a BOS token to each text.
fn tokenizer() -> Tokenizer {
    let words = ["[UNK]", "[BOS]", "how", "are", "you", "fine"];
    let vocab = words.iter().zip(0..).map(|(word, id)| (word.to_string(), id)).collect();
    let model = WordLevel::builder().vocab(vocab).unk_token("[UNK]".into()).build().unwrap();
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(WhitespaceSplit));
    let template = TemplateProcessing::builder()
        .try_single("[BOS] $A")
        .unwrap()
        .special_tokens(vec![("[BOS]", 1)])
        .build()
        .unwrap();
    tokenizer.with_post_processor(Some(template));
    tokenizer
}

const SHARE_GPT: &str = r#"[
    {"id": "a", "conversations": [
        {"from": "human", "value": "how are you"}, {"from": "gpt", "value": "fine fine"},
        {"from": "human", "value": "later"}, {"from": "gpt", "value": "later"}
    ]},
    {"id": "begins with the model", "conversations": [
        {"from": "gpt", "value": "x"}, {"from": "human", "value": "y"}, {"from": "gpt", "value": "z"}
    ]},
    {"id": "no answer", "conversations": [{"from": "human", "value": "x"}]},
    {"id": "empty", "conversations": []},
    {"id": "no prompt", "conversations": [{"from": "human", "value": ""}, {"from": "gpt", "value": "z"}]},
    {"id": "not texts", "conversations": [{"from": "human", "value": 7}, {"from": "gpt", "value": null}]},
    {"id": "not turns", "conversations": [7, "human"]},
    {"id": "no conversation"},
    {"messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "how"}, {"role": "assistant", "content": ""}
    ]}
]"#;

#[test]
fn of_conversations_the_first_pair_counts_and_those_without_one_are_left_out() {
    let expected = [("how are you".to_string(), 3, Some(3)), ("how".to_string(), 1, Some(1))];
    assert_eq!(read_lengths("sharegpt.json", SHARE_GPT), expected);
    assert_eq!(read_lengths("sharegpt-bom.json", &format!("\u{feff}\n{SHARE_GPT}")), expected);
}

#[test]
fn a_tokenizer_counts_exactly_whatever_it_would_cut_or_pad() {
    let mut tokenizer = tokenizer();
    let counted = |tokenizer: &Tokenizer| {
        let texts = read_as("counted.json", SHARE_GPT, Some(tokenizer)).unwrap();
        texts.iter().map(|text| (text.prompt_len, text.output_len)).collect::<Vec<_>>()
    };
    // The prompt count includes the BOS token; the answer count does not, and an empty answer counts as one
    // token.
    assert_eq!(counted(&tokenizer), [(4, Some(2)), (2, Some(1))]);
    let truncation = TruncationParams { max_length: 2, ..Default::default() };
    tokenizer.with_truncation(Some(truncation)).unwrap();
    tokenizer.with_padding(Some(PaddingParams { strategy: PaddingStrategy::Fixed(9), ..Default::default() }));
    assert_eq!(counted(&tokenizer), [(4, Some(2)), (2, Some(1))]);
}

#[test]
fn lines_of_json_are_prompts_or_conversations() {
    let content = r#"
{"prompt": "12345678", "output_len": 40}

{"prompt": "123456789", "output_tokens": 0, "other": [1]}
{"prompt": "ü", "completion": "12345"}
{"prompt": "four", "output_len": null}
{"prompt": ""}
{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
    let expected = [
        ("12345678", 2, Some(40)),
        ("123456789", 3, Some(1)),
        ("ü", 1, Some(2)),
        ("four", 1, None),
        ("a", 1, Some(1)),
    ];
    let expected = expected.map(|(prompt, len, output)| (prompt.to_string(), len, output));
    assert_eq!(read_lengths("lines.jsonl", content), expected);
    assert_eq!(read_lengths("lines-crlf.jsonl", &content.replace('\n', "\r\n")), expected);
}

#[test]
fn plain_text_is_its_paragraphs() {
    let content = "\r\nOne line\r\nand another.  \r\n \r\n\r\nThe second,\n  indented\n";
    let expected = [("One line\nand another.", 6, None), ("The second,\n  indented", 6, None)];
    let expected = expected.map(|(prompt, len, output)| (prompt.to_string(), len, output));
    for name in ["plain.txt", "plain", "plain.md"] {
        assert_eq!(read_lengths(name, content), expected);
    }
    // A `.txt` file is never parsed as JSON, whatever it begins with.
    assert_eq!(read_lengths("brackets.TXT", "[1] a\n\n{b}").len(), 2);
    assert!(read_error("brackets.md", "[1] a").contains("entry 1: expected an object at line 1"));
}

#[test]
fn a_file_without_a_prompt_is_refused() {
    for (name, content) in [
        ("none.json", "[]"),
        ("none-2.json", r#"[{"a": 1}, {"conversations": []}]"#),
        ("none.jsonl", "{\"text\": \"a\"}\n{}"),
        ("none.txt", " \n\n"),
        ("none", ""),
    ] {
        assert!(read_error(name, content).contains("the file contains no prompt"), "{name}");
    }
}

#[test]
fn what_is_wrong_is_reported_with_its_place() {
    let deep = format!("[{{\"prompt\": \"a\"}},\n{}", "[".repeat(1_000_000));
    let long = r#"{"prompt": "a", "output_len": 10000001}"#;
    for (name, content, expected) in [
        ("cut.json", "[{\"prompt\": \"a\"},\n {\"pro", "EOF while parsing a string at line 2 column 6"),
        ("after.json", "[{\"prompt\": \"a\"}]\n]", "trailing characters at line 2 column 1"),
        ("deep.json", deep.as_str(), "recursion limit exceeded at line 2"),
        (
            "number.json",
            "[{\"prompt\": \"a\"},\n{\"prompt\": 5}]",
            "entry 2: prompt is not a string at line 2",
        ),
        ("item.json", "[\n7]", "entry 1: expected an object at line 2"),
        ("cut.jsonl", "{\"prompt\": \"a\"}\n{\"prompt\"", "line 2, column 9: EOF while parsing an object"),
        ("list.jsonl", "{\"prompt\": \"a\"}\n\n[]", "line 3: expected an object"),
        ("completion.jsonl", "{\"prompt\": \"a\", \"completion\": 1}", "line 1: completion is not a string"),
        (
            "negative.jsonl",
            "{\"prompt\": \"a\", \"output_len\": -1}",
            "line 1: output_len is not a number of tokens",
        ),
        (
            "fraction.jsonl",
            "{\"prompt\": \"a\", \"output_tokens\": 1.5}",
            "line 1: output_tokens is not a number",
        ),
        ("nan.jsonl", "{\"prompt\": \"a\", \"output_len\": NaN}", "line 1, column 31: expected value"),
        (
            "huge.jsonl",
            "{\"prompt\": \"a\", \"output_len\": 1e400}",
            "line 1, column 35: number out of range",
        ),
        ("long.jsonl", long, "line 1: output_len is not a number of tokens up to 10000000"),
        ("surrogate.jsonl", r#"{"prompt": "\ud800"}"#, "line 1, column 19:"),
    ] {
        let error = read_error(name, content);
        assert!(error.contains(expected), "{name}: {error}");
    }
    assert!(read_error("latin.txt", b"a\nsch\xf6n").contains("line 2: not UTF-8"));
    let missing = read(Path::new("/nowhere/to/be/found.json"), None).unwrap_err();
    assert!(format!("{missing:#}").starts_with("/nowhere/to/be/found.json: cannot be opened"));
}
