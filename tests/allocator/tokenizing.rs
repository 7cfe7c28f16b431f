//! Tests that tokenizing a text takes no more memory than requests count for it.

use mainstem::formats::Folder;
use mainstem::text::Tokenizer;
use serde_json::{Map, Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that are allocated, and the most that there were.
static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

const BYTES: usize = 60_000;

/// Counts an allocation of `bytes` bytes.
pub fn allocated(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(live, Ordering::Relaxed);
}

/// Counts the end of an allocation of `bytes` bytes.
pub fn freed(bytes: usize) {
    LIVE.fetch_sub(bytes, Ordering::Relaxed);
}

/// Returns a tokenizer whose tokens are bytes.
fn tokenizer(normalizer: &Value, pre_tokenizer: &Value, model: &Value) -> Tokenizer {
    let file = json!({
        "version": "1.0", "added_tokens": [], "post_processor": null, "decoder": null,
        "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": model
    });
    let folder = std::env::temp_dir().join(format!("mainstem-tokenizing-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder can be made");
    std::fs::write(folder.join("tokenizer.json"), file.to_string()).expect("it is written");
    let tokenizer = Tokenizer::from_folder(&Folder::Disk(folder.clone())).expect("it is a tokenizer");
    std::fs::remove_dir_all(folder).expect("it is removed");
    tokenizer
}

/// Texts of short words, of spaces and of characters that are decomposed take most.
pub fn texts_take_no_more_than_is_counted() {
    let printable = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let others = (0..256).filter(|byte| !printable(byte)).zip(256..).map(|(_, other)| other);
    let characters = (0..256).filter(printable).chain(others).filter_map(char::from_u32);
    let byte_level: Map<String, Value> =
        characters.zip(0..).map(|(character, id)| (character.to_string(), json!(id))).collect();
    let byte_level = json!({ "type": "BPE", "vocab": byte_level, "merges": [] });
    let names = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let fallback: Map<String, Value> =
        names.chain(["<unk>".to_owned()]).zip(0..).map(|(name, id)| (name, json!(id))).collect();
    let fallback = json!({
        "type": "BPE", "unk_token": "<unk>", "byte_fallback": true, "vocab": fallback, "merges": []
    });
    let words = json!({
        "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100, "vocab": { "[UNK]": 0, "a": 1, "##a": 2 }
    });
    let splits = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true
    });
    let marks = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" });
    let lowers = json!({
        "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null,
        "lowercase": true
    });
    for (normalizer, pre_tokenizer, model) in [
        (Value::Null, splits.clone(), &byte_level),
        (json!({ "type": "NFC" }), splits.clone(), &byte_level),
        (json!({ "type": "NFD" }), splits.clone(), &byte_level),
        (json!({ "type": "NFKC" }), splits.clone(), &byte_level),
        (json!({ "type": "NFKD" }), splits, &byte_level),
        (
            json!({ "type": "Sequence", "normalizers": [{ "type": "NFKD" }, marks.clone()] }),
            Value::Null,
            &fallback,
        ),
        (marks, Value::Null, &fallback),
        (lowers, json!({ "type": "BertPreTokenizer" }), &words),
    ] {
        let tokenizer = tokenizer(&normalizer, &pre_tokenizer, model);
        for unit in ["a", "a ", "a.", " ", "\u{e9}", "\u{4e2d}", "\u{1d160}", "\u{390}", "\u{fdfa}"] {
            let text = unit.repeat(BYTES / unit.len());
            // What the first text needs is not its own.
            tokenizer.encode("a. ", false).expect("it is encoded");
            let before = LIVE.load(Ordering::Relaxed);
            PEAK.store(before, Ordering::Relaxed);
            tokenizer.encode(&text, false).expect("it is encoded");
            let taken = PEAK.load(Ordering::Relaxed) - before;
            let counted = text.len() * tokenizer.memory_per_byte();
            assert!(taken <= counted, "{normalizer} {unit:?}: {taken} bytes, of which {counted} are counted");
        }
    }
}
