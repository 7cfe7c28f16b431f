//! A GGUF file, whole: its head, what it says of the model, its vocabulary and its template.

#![no_main]

use mainstem::cli::start;
use mainstem::formats::{ChatFiles, Checkpoint, Gguf};
use mainstem::model::gguf::GgufTable;
use mainstem::model::{ModelRef, ModelSource};
use mainstem::text::{GgufVocabulary, Tokenizer};
use mainstem_fuzz::{file, read_all, speak};

mainstem_fuzz::target!(parse);

fn parse(bytes: &[u8]) {
    let path = file("model.gguf", bytes);
    let Ok((mut checkpoint, gguf)) = Checkpoint::open_gguf(&path) else { return };
    read_all(&checkpoint);
    let _ = ChatFiles::from_gguf(&gguf);
    if let Some(vocabulary) = vocabulary(&gguf)
        && let Ok(tokenizer) = Tokenizer::from_gguf(&path, &vocabulary)
    {
        speak(tokenizer);
    }
    if GgufTable::shipped().config(&gguf, &mut checkpoint).is_ok()
        && let Ok(source) = ModelSource::open(&ModelRef::Path(path), None)
    {
        let _ = start::tokenizer(&source);
    }
}

/// What the file says of its vocabulary; `None` where a key is of another kind.
fn vocabulary(gguf: &Gguf) -> Option<GgufVocabulary> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let texts = |name| Some(gguf.opt_strings(&key(name)).ok()?.unwrap_or_default());
    let owned = |texts: Vec<&str>| texts.into_iter().map(str::to_owned).collect();
    let id = |name| gguf.opt_u32(&key(name)).ok();
    let switch = |name| gguf.opt_bool(&key(name)).ok();
    Some(GgufVocabulary {
        model: gguf.opt_str(&key("model")).ok()??.to_owned(),
        pre: gguf.opt_str(&key("pre")).ok()?.map(str::to_owned),
        tokens: owned(texts("tokens")?),
        scores: gguf.opt_f32s(&key("scores")).ok()?.unwrap_or_default(),
        token_type: gguf.i32s(&key("token_type")).unwrap_or_default(),
        merges: owned(texts("merges")?),
        bos_token_id: id("bos_token_id")?,
        eos_token_id: id("eos_token_id")?,
        unknown_token_id: id("unknown_token_id")?,
        separator_token_id: id("seperator_token_id")?,
        cls_token_id: id("cls_token_id")?,
        add_bos_token: switch("add_bos_token")?,
        add_eos_token: switch("add_eos_token")?,
        add_space_prefix: switch("add_space_prefix")?,
        remove_extra_whitespaces: switch("remove_extra_whitespaces")?,
        precompiled_charsmap: Vec::new(),
        lowercase: None,
        strip_accents: None,
    })
}
