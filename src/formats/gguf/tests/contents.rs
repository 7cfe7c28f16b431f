//! Reading valid files.

use super::*;

#[test]
fn every_kind_of_value_comes_back_in_every_version() {
    for version in 1..=3 {
        let (_folder, opened) = open_made(&GgufBuilder::sample(version).bytes());
        let (_, gguf) = opened.unwrap();
        assert_eq!(gguf.str("general.architecture").unwrap(), "llama");
        assert_eq!(["a.u8", "a.u16", "a.u32"].map(|key| gguf.u32(key).unwrap()), [200, 65535, 70_000]);
        assert_eq!(gguf.value("a.i8"), Some(&GgufValue::Signed(-128)));
        assert_eq!(gguf.value("a.i16"), Some(&GgufValue::Signed(-2)));
        assert_eq!(gguf.value("a.i32"), Some(&GgufValue::Signed(-70_000)));
        assert_eq!(gguf.value("a.u64"), Some(&GgufValue::Unsigned(1 << 40)));
        assert_eq!(gguf.value("a.i64"), Some(&GgufValue::Signed(-1)));
        assert_eq!(["a.f32", "a.f64"].map(|key| gguf.f32(key).unwrap()), [1.5, 0.25]);
        assert!(gguf.bool("a.bool").unwrap());
        assert_eq!(gguf.strings("a.strings").unwrap(), ["x", "é"]);
        assert_eq!(gguf.i32s("a.i32s").unwrap(), [1, -2, 3]);
        assert_eq!(gguf.f32s("a.f32s").unwrap(), [0.5, -4.0]);
        assert!(matches!(gguf.value("a.nested"), Some(GgufValue::Array(GgufArray { len: 1, .. }))));
        assert_eq!(gguf.keys().count(), 17);
    }
}

#[test]
fn a_value_of_another_kind_is_an_error_by_file_and_key() {
    let (folder, opened) = open_made(&GgufBuilder::sample(3).bytes());
    let (_, gguf) = opened.unwrap();
    for (result, reason) in [
        (gguf.str("a.u8").map(drop), "key 'a.u8': 200 is not a string"),
        (gguf.str("gone").map(drop), "key 'gone': it is missing"),
        (gguf.u32("a.u64").map(drop), "key 'a.u64': 1099511627776 is not a non-negative 32-bit integer"),
        (gguf.u32("a.i8").map(drop), "key 'a.i8': -128 is not"),
        (gguf.f32("a.u8").map(drop), "key 'a.u8': 200 is not a floating-point number"),
        (gguf.bool("a.u8").map(drop), "key 'a.u8': 200 is not true or false"),
        (gguf.strings("a.i32s").map(drop), "key 'a.i32s': an array of 3 I32 is not an array of strings"),
        (gguf.i32s("a.f32s").map(drop), "key 'a.f32s': an array of 2 F32 is not an array of 32-bit integers"),
        (gguf.f32s("a.nested").map(drop), "key 'a.nested'"),
        (gguf.strings("a.bool").map(drop), "key 'a.bool': true is not an array"),
    ] {
        let error = format!("{:#}", result.unwrap_err());
        assert!(error.contains(reason) && error.starts_with(gguf.path().to_str().unwrap()), "{error}");
    }
    assert_eq!((gguf.opt_u32("gone").unwrap(), gguf.opt_strings("gone").unwrap()), (None, None));
    assert_eq!(gguf.folder().path(), folder.path());
}

#[test]
fn text_that_is_no_text_is_an_error_where_it_is_read() {
    let broken = GgufBuilder::sample(2).with(|made| {
        made.entries[0].1 = text(2, "\u{7f}l");
        made.entries[12].1[24] = 0xff;
    });
    let (_folder, opened) = open_made(&broken);
    let error = format!("{:#}", opened.unwrap().1.strings("a.strings").unwrap_err());
    assert!(error.contains("key 'a.strings'") && error.contains("utf-8"), "{error}");
}

#[test]
fn tensors_have_their_shapes_and_bytes_wherever_they_lie() {
    for version in 1..=3 {
        for alignment in [32usize, 64, 8] {
            let mut made = GgufBuilder::sample(version);
            made.alignment = alignment;
            made.entries.push(("general.alignment", tagged(4, &(alignment as u32).to_le_bytes())));
            let (_folder, opened) = open_made(&made.bytes());
            let (checkpoint, _) = opened.unwrap();
            let tensor = |name| checkpoint.tensor(name).unwrap();
            assert_eq!((tensor("m").shape, &tensor("m").bytes()[..]), (&[2, 3][..], &[7; 24][..]));
            assert_eq!((tensor("q").shape, &tensor("q").bytes()[..]), (&[1, 32][..], &[9; 34][..]));
            assert_eq!((tensor("v").shape, &tensor("v").bytes()[..]), (&[3][..], &[1, 0, 2, 0, 3, 0][..]));
            let types = ["m", "q", "v"].map(|name| tensor(name).quant_type().unwrap());
            assert_eq!(types, [QuantType::F32, QuantType::Q8_0, QuantType::F16]);
        }
    }
}

#[test]
fn types_that_cannot_be_computed_with_are_reported_by_their_names() {
    for (id, name) in [(16, "iq2_xxs"), (17, "iq2_xs"), (99, "type 99")] {
        let (_folder, opened) = open_made(&GgufBuilder::sample(3).with(|made| {
            made.tensors[0] = ("m", vec![256], id, 192);
            made.data.resize(192 + 256, 0);
        }));
        let (checkpoint, _) = opened.unwrap();
        let tensor = checkpoint.tensor("m").unwrap();
        assert_eq!(tensor.dtype, &Dtype::Unsupported(name.to_owned()));
        let error = tensor.quant_type().unwrap_err().to_string();
        let expected =
            format!("tensor 'm': its dtype {name} is not supported yet (supported: f32, f16, bf16, q8_0");
        assert!(error.contains(&expected), "{error}");
    }
}

/// A file that has only a vocabulary ends after its metadata.
#[test]
fn a_file_without_tensors_needs_no_data() {
    let made = GgufBuilder { tensors: Vec::new(), ..GgufBuilder::sample(3) };
    let (_folder, opened) = open_made(&made.head());
    let (checkpoint, gguf) = opened.unwrap();
    assert_eq!((checkpoint.names().count(), gguf.u32("a.u8").unwrap()), (0, 200));
}

#[test]
fn chats_are_as_the_file_says_and_then_as_its_folder() {
    let folder = Scratch::new();
    let mut made = GgufBuilder::sample(3);
    let tokens = ["<unk>", "<s>", "</s>"].map(|token| string(3, token)).concat();
    made.entries.extend([
        ("tokenizer.ggml.tokens", array(3, 8, 3, &tokens)),
        ("tokenizer.ggml.bos_token_id", tagged(4, &1u32.to_le_bytes())),
        ("tokenizer.ggml.eos_token_id", tagged(4, &7u32.to_le_bytes())),
    ]);
    folder.write("chat_template.jinja", b"of the folder");
    folder.write("tokenizer_config.json", br#"{"bos_token": "<other>", "pad_token": "<pad>"}"#);
    let chat = |made: &GgufBuilder| {
        let (_, gguf) = Checkpoint::open_gguf(&folder.write("model.gguf", &made.bytes())).unwrap();
        ChatConfig::from_gguf(&gguf).unwrap()
    };
    let found = chat(&made);
    assert_eq!(found.template.unwrap().text, "of the folder");
    let special: Vec<_> = found.special_tokens.into_iter().collect();
    let expected = [("bos_token", "<s>"), ("pad_token", "<pad>")];
    assert_eq!(special, expected.map(|(name, token)| (name.to_owned(), token.to_owned())));
    made.entries.push(("tokenizer.chat_template", text(3, "of the file")));
    assert_eq!(chat(&made).template.unwrap().text, "of the file");
}
