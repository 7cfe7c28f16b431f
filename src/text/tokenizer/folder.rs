//! Selection of the tokenizer files of a folder with one tokenizer.
//!
//! Invariant: the first kind of file that exists is used; if it is damaged, that is an error rather than a
//! reason to try the next.

use super::settings::TokenizerSettings;
use super::{Tokenizer, json, sentencepiece, tiktoken, vocab_json, word_piece};
use crate::formats::Folder;
use anyhow::{Result, bail};

/// Name of a tiktoken rank file without the usual extension.
const RANKS: &str = "tiktoken.model";

/// Reads the tokenizer of a folder.
pub fn read_usual(folder: &Folder) -> Result<Tokenizer> {
    let settings = TokenizerSettings::read(folder)?;
    if let Some(content) = folder.read(json::FILE)? {
        return json::read(folder, json::FILE, &content, &settings);
    }
    for file in sentencepiece::FILES {
        if let Some(content) = folder.read(file)? {
            // Llama 3 has a rank file under the name of Llama 2's sentencepiece model.
            return match tiktoken::is_rank_file(&content) {
                true => tiktoken::read(folder, file, &content, settings),
                false => sentencepiece::read(folder, file, &content, settings),
            };
        }
    }
    if let Some((file, content)) = read_rank_file(folder)? {
        return tiktoken::read(folder, &file, &content, settings);
    }
    if let Some(content) = folder.read(vocab_json::VOCABULARY)? {
        return vocab_json::read(folder, &content, settings);
    }
    if let Some(content) = folder.read(word_piece::FILE)? {
        return word_piece::read(folder, &content, settings);
    }
    bail!(
        "{}: no tokenizer found: there is none of {}, {}, *{}, {} with {}, {}",
        folder.path().display(),
        json::FILE,
        sentencepiece::FILES.join(", "),
        tiktoken::EXTENSION,
        vocab_json::VOCABULARY,
        vocab_json::MERGES,
        word_piece::FILE
    )
}

/// A file's name and content.
type NamedFile = (String, std::borrow::Cow<'static, [u8]>);

/// Reads the rank file of a folder, if there is one. Several are an error.
fn read_rank_file(folder: &Folder) -> Result<Option<NamedFile>> {
    let mut names = folder.names()?;
    names.retain(|name| name == RANKS || name.ends_with(tiktoken::EXTENSION));
    if let [first, second, ..] = &names[..] {
        bail!("{}: both {first} and {second} are rank files", folder.path().display());
    }
    let Some(name) = names.pop() else { return Ok(None) };
    Ok(folder.read(&name)?.map(|content| (name, content)))
}
