//! Tests of the common interface with tokenizers of every kind.

mod answers;

mod pair;

pub(in crate::text) mod damage;

pub(in crate::text) mod fixtures;

use super::*;
use crate::testing::Scratch;
use crate::testing::vocabularies::{
    Dice, byte_fallback, byte_level, from_tokenizer_json, llama2c, metaspace, word_piece,
};
use serde_json::{Value, json};

#[test]
fn our_decoding_is_the_librarys() {
    let mut dice = Dice::new(21);
    // The library replaces a whole run of bytes with one invalid byte by U+FFFD, including valid characters,
    // which our decoding keeps. So byte tokens are excluded where runs matter.
    for (sample, left_out) in [(byte_level(), 0..0), (byte_fallback(), 3..259)] {
        let tokenizer = from_tokenizer_json(&sample, None).unwrap();
        assert_ne!(tokenizer.joining(), DecodeMethod::Library);
        let known: Vec<u32> =
            (0..tokenizer.vocab_size() as u32 + 2).filter(|id| !left_out.contains(id)).collect();
        for _ in 0..500 {
            let ids: Vec<u32> = (0..dice.below(12)).map(|_| *dice.pick(&known)).collect();
            assert_eq!(
                tokenizer.decode(&ids, false).unwrap(),
                tokenizer.decode_with_library(&ids).unwrap(),
                "{ids:?}"
            );
            let Encoder::Pipeline(pipeline) = &tokenizer.encoder else { panic!("a hub tokenizer") };
            assert_eq!(
                tokenizer.decode(&ids, true).unwrap(),
                pipeline.library().decode(&ids, true).unwrap(),
                "{ids:?}"
            );
        }
    }
}

#[test]
fn text_survives_encoding_and_decoding() {
    let texts = ["", "the", " the", "  the  the ", "été\n", "日本 \u{1f600}e", "\0", "a \u{fffd} b"];
    for tokenizer in [
        from_tokenizer_json(&byte_level(), None).unwrap(),
        from_tokenizer_json(&byte_fallback(), None).unwrap(),
        llama2c(),
    ] {
        for text in texts {
            for add_special in [false, true] {
                let ids = tokenizer.encode(text, add_special).unwrap();
                assert_eq!(tokenizer.decode(&ids, true).unwrap(), text, "{tokenizer:?} {ids:?}");
            }
        }
    }
    for (sample, text) in [(word_piece(), "there ab."), (metaspace(), "the the")] {
        let tokenizer = from_tokenizer_json(&sample, None).unwrap();
        assert_eq!(tokenizer.joining(), DecodeMethod::Library);
        assert_eq!(tokenizer.decode(&tokenizer.encode(text, false).unwrap(), true).unwrap(), text);
    }
}

#[test]
fn tokens_are_found_by_name() {
    let fallback = from_tokenizer_json(&byte_fallback(), None).unwrap();
    assert_eq!((fallback.token_id("</s>"), fallback.token_id("the")), (Some(2), Some(266)));
    for name in ["<mask>", "", "the the"] {
        assert_eq!(fallback.token_id(name), None, "{name:?}");
    }
    // In such a vocabulary an unknown name is one token too: the unknown token.
    let words = from_tokenizer_json(&word_piece(), None).unwrap();
    assert_eq!((words.token_id("the"), words.token_id("zzz")), (Some(2), None));
}

#[test]
fn special_tokens_are_skipped_only_on_request() {
    let tokenizer = from_tokenizer_json(&byte_fallback(), None).unwrap();
    let ids = [1, 266, 2, 266];
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "the the");
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), "<s> the</s> the");
    assert!(tokenizer.is_special(2) && !tokenizer.is_special(266) && !tokenizer.is_special(9999));
    let tokenizer = llama2c();
    let ids = [&[1][..], &tokenizer.encode("the", false).unwrap(), &[2]].concat();
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), "<s> the</s>");
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "the");
    let tokenizer = from_tokenizer_json(&byte_level(), None).unwrap();
    assert!(!tokenizer.is_special(264));
    assert_eq!(tokenizer.decode(&[264, 0], true).unwrap(), "two words");
}

#[test]
fn a_token_alone_is_what_it_is_amid_others() {
    let byte_level = from_tokenizer_json(&byte_level(), None).unwrap();
    assert_eq!(byte_level.token_text(260), " the");
    assert_eq!(byte_level.token_text(261), "é");
    assert_eq!(
        (byte_level.token_bytes(2 + 0xc3), byte_level.token_text(2 + 0xc3)),
        (&[0xc3][..], "\u{fffd}".into())
    );
    assert_eq!(byte_level.token_text(1), "</s>");
    assert_eq!((byte_level.token_text(9999), byte_level.vocab_size()), (String::new(), 265));
    let fallback = from_tokenizer_json(&byte_fallback(), None).unwrap();
    assert_eq!((fallback.token_text(266), fallback.token_bytes(3 + 0xff)), (" the".into(), &[0xff][..]));
    assert_eq!((llama2c().token_text(1), llama2c().token_bytes(3 + 0x41)), ("<s>".into(), &b"A"[..]));
    let word_piece = from_tokenizer_json(&word_piece(), None).unwrap();
    assert_eq!((word_piece.token_text(2), word_piece.token_text(3)), (" the".into(), "re".into()));
    let metaspace = from_tokenizer_json(&metaspace(), None).unwrap();
    assert_eq!((metaspace.token_text(8), metaspace.token_text(7)), (" the".into(), "he".into()));
}

#[test]
fn bos_stands_before_a_text_once_if_the_files_say_so() {
    let named =
        json!({"add_bos_token": true, "bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}});
    let cases = [
        (byte_level(), Some(named.clone()), Some(0), Some(1), vec![0, 2 + 0x61]),
        (byte_level(), Some(json!({"add_bos_token": true})), None, None, vec![2 + 0x61]),
        (byte_level(), Some(json!({"bos_token": "<s>", "eos_token": null})), Some(0), None, vec![2 + 0x61]),
        (byte_level(), None, None, None, vec![2 + 0x61]),
        (byte_fallback(), Some(named), Some(1), Some(2), vec![1, 259, 3 + 0x61]),
        (byte_fallback(), None, None, None, vec![1, 259, 3 + 0x61]),
        (
            byte_fallback(),
            Some(json!({"add_bos_token": false, "bos_token": "<s>"})),
            Some(1),
            None,
            vec![259, 3 + 0x61],
        ),
    ];
    for (sample, config, bos, eos, ids) in cases {
        let tokenizer = from_tokenizer_json(&sample, config.clone()).unwrap();
        assert_eq!((tokenizer.bos_id(), tokenizer.eos_id()), (bos, eos), "{config:?}");
        assert_eq!(tokenizer.encode("a", true).unwrap(), ids, "{config:?}");
        let special_len = ids.len() - tokenizer.encode("a", false).unwrap().len();
        assert_eq!(tokenizer.encode("a", false).unwrap(), ids[special_len..], "{config:?}");
    }
    let tokenizer = llama2c();
    assert_eq!((tokenizer.bos_id(), tokenizer.eos_id()), (Some(1), Some(2)));
    assert_eq!(tokenizer.encode("", true).unwrap(), [1]);
    assert_eq!(tokenizer.encode("A", true).unwrap(), [1, 259, 3 + 0x41]);
    assert_eq!(tokenizer.encode("A", false).unwrap(), [259, 3 + 0x41]);
}

#[test]
fn bytes_stand_in_for_a_tokenizer() {
    assert!(Tokenizer::bytes(255).is_err());
    let tokenizer = Tokenizer::bytes(300).unwrap();
    assert_eq!((tokenizer.vocab_size(), tokenizer.bos_id(), tokenizer.eos_id()), (300, None, None));
    let text = "a\0 \u{1f600}\u{fffd}";
    let ids = tokenizer.encode(text, true).unwrap();
    assert!(ids.iter().copied().eq(text.bytes().map(u32::from)));
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
    assert_eq!(tokenizer.decode(&[97, 299, 256, 300, 98], true).unwrap(), "a 299 256b");
    assert!((0..300).all(|id| tokenizer.has_text(id, true)));
}

#[test]
fn a_tokenizer_is_shared_between_threads() {
    fn shared<T: Send + Sync>(_: &T) {}
    shared(&llama2c());
}

#[test]
fn truncation_and_padding_in_the_file_are_left_out() {
    let mut sample = byte_level();
    sample["truncation"] =
        json!({"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"});
    sample["padding"] = json!({"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"});
    assert_eq!(from_tokenizer_json(&sample, None).unwrap().encode("abcd", true).unwrap().len(), 4);
}

#[test]
fn invalid_files_are_rejected_by_name() {
    let with = |key: &str, value: Value| {
        let mut sample = byte_level();
        *sample.pointer_mut(key).unwrap() = value;
        sample
    };
    let bpe = |id: u32| json!({"type": "BPE", "vocab": {"a": id}, "merges": []});
    let good = byte_level;
    let mut beyond = byte_fallback();
    beyond["post_processor"]["special_tokens"]["<s>"]["ids"] = json!([270]);
    let cases = [
        (json!([]), None, "tokenizer.json"),
        (json!({"model": {"type": "Nonsense"}}), None, "tokenizer.json"),
        (with("/model/merges", json!([["Ġ", "absent"]])), None, "absent"),
        (with("/model/merges", json!([["two words", "two words"]])), None, "tokenizer.json"),
        (with("/model/merges", json!([["</s>", "</s>"]])), None, "its components are inconsistent"),
        (with("/model", bpe(1 << 24)), None, "ids must be below"),
        (with("/model", bpe(u32::MAX)), None, "tokenizer.json"),
        (beyond, None, "tokenizer.json: it adds token 270 around a text, but has 270 tokens"),
        (good(), Some(json!({"bos_token": "<bos>"})), "key 'bos_token': tokenizer.json has no token '<bos>'"),
        (good(), Some(json!({"eos_token": {"content": "<e>"}})), "key 'eos_token': tokenizer.json has no"),
        (good(), Some(json!({"eos_token": 2})), "tokenizer_config.json"),
        (good(), Some(json!("text")), "tokenizer_config.json"),
    ];
    for (tokenizer, config, reason) in cases {
        let error = format!("{:#}", from_tokenizer_json(&tokenizer, config).unwrap_err());
        assert!(error.contains(reason), "{error}\nexpected: {reason}");
    }
    let folder = Scratch::new();
    let error = format!("{:#}", Tokenizer::from_folder(&folder.folder()).unwrap_err());
    assert!(error.contains(json::FILE), "{error}");
    let bin = folder.write("tokenizer.bin", &[1, 2]);
    let error = format!("{:#}", Tokenizer::from_llama2c(&bin, 300).unwrap_err());
    assert!(error.contains("tokenizer.bin") && error.contains("truncated"), "{error}");
}
