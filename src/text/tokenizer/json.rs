//! `tokenizer.json`, the file format of the `tokenizers` library.
//!
//! Invariant: a decoder that only concatenates bytes is recognized as such; with any other the library
//! decodes.

use super::pipeline::Pipeline;
use super::settings::TokenizerSettings;
use super::spelling::ByteSpelling;
use super::token_bytes::TokenBytes;
use super::{DecodeMethod, Encoder, SurroundingTokens, Tokenizer, VOCAB_MAX};
use crate::formats::Folder;
use anyhow::{Context, Result, ensure};

/// Name of the file.
pub const FILE: &str = "tokenizer.json";

/// Reads the tokenizer of a folder with a `tokenizer.json` called `file`, whose content is given.
pub fn read(folder: &Folder, file: &str, content: &[u8], settings: &TokenizerSettings) -> Result<Tokenizer> {
    let name = || folder.file(file).display().to_string();
    let pipeline = Pipeline::from_json(content).with_context(name)?;
    let (joining, pieces) = read_token_bytes(&pipeline).with_context(name)?;
    let added = pipeline.library().get_added_tokens_decoder();
    let special = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
    let id = |role| settings.token_id(role, file, |token| pipeline.library().token_to_id(token));
    let (bos, eos) = (id("bos_token")?, id("eos_token")?);
    let wanted = [settings.flag("add_bos_token")?, settings.flag("add_eos_token")?];
    let given = pipeline.encode("", true, usize::MAX).with_context(name)?.unwrap_or_default();
    for id in &given {
        let is_there = (*id as usize) < pieces.len();
        ensure!(is_there, "{}: it adds token {id} around a text, but has {} tokens", name(), pieces.len());
    }
    let around = surrounding_tokens(&given, [bos, eos], wanted);
    let encoder = Encoder::Pipeline(Box::new(pipeline));
    Ok(Tokenizer::new(encoder, joining, pieces, special, [bos, eos], around))
}

/// Determines which tokens to add around a text or to drop, if the pipeline itself adds `given` to an empty
/// text.
fn surrounding_tokens(
    given: &[u32],
    [bos, eos]: [Option<u32>; 2],
    [add_bos, add_eos]: [Option<bool>; 2],
) -> SurroundingTokens {
    let opens = bos.is_some() && given.first() == bos.as_ref();
    let closes = eos.is_some() && given[usize::from(opens)..].last() == eos.as_ref();
    let added = |token: Option<u32>, wanted: Option<bool>, is_there: bool| {
        token.filter(|_| wanted == Some(true) && !is_there).into_iter().collect()
    };
    SurroundingTokens {
        before: added(bos, add_bos, opens),
        after: added(eos, add_eos, closes),
        between: Vec::new(),
        drop_first: opens && add_bos == Some(false),
        drop_last: closes && add_eos == Some(false),
    }
}

/// Determines how token ids are decoded, and the bytes of each token.
fn read_token_bytes(pipeline: &Pipeline) -> Result<(DecodeMethod, TokenBytes)> {
    let library = pipeline.library();
    let largest = library.get_vocab(true).into_values().max().context("its vocabulary is empty")?;
    ensure!(largest < VOCAB_MAX, "its largest token id is {largest}: ids must be below {VOCAB_MAX}");
    let decoder = serde_json::to_value(library.get_decoder())?;
    let Some((spelling, leading_spaces)) = ByteSpelling::from_decoder(&decoder) else {
        return Ok((DecodeMethod::Library, library_token_bytes(pipeline, largest)?));
    };
    let bytes = |id| library.id_to_token(id).map(|token| spelling.bytes(&token)).unwrap_or_default();
    Ok((DecodeMethod::Bytes { leading_spaces }, (0..=largest).map(bytes).collect()))
}

/// Returns the bytes of all tokens up to `largest`, as the library decodes them.
pub fn library_token_bytes(pipeline: &Pipeline, largest: u32) -> Result<TokenBytes> {
    let piece = |id| match pipeline.library().id_to_token(id) {
        Some(_) => library_token_text(pipeline, id).map(String::into_bytes),
        None => Ok(Vec::new()),
    };
    (0..=largest).map(piece).collect()
}

/// Returns a token's text after another token: the text that its second occurrence adds, or if that is empty,
/// the text of the token alone.
fn library_token_text(pipeline: &Pipeline, id: u32) -> Result<String> {
    let decode =
        |ids: &[u32]| pipeline.decode(ids).with_context(|| format!("its decoder cannot decode token {id}"));
    let (once, twice) = (decode(&[id])?, decode(&[id, id])?);
    let added = twice.strip_prefix(&once).filter(|added| !added.is_empty());
    Ok(added.unwrap_or(&once).to_owned())
}
