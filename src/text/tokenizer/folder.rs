//! Which files of a folder make its tokenizer.
//!
//! Invariant: the first kind of the list that is there is taken, and one that is damaged is an error, never
//! passed over for the next.

use super::settings::Settings;
use super::{Tokenizer, json, sentencepiece, tiktoken, vocab_json, word_piece};
use crate::formats::Folder;
use anyhow::{Result, bail};

/// Names that a file of ranks has beside those with its own extension.
const RANKS: &str = "tiktoken.model";

/// The tokenizer of a folder.
pub fn read(folder: &Folder) -> Result<Tokenizer> {
    let settings = Settings::read(folder)?;
    if let Some(content) = folder.read(json::FILE)? {
        return json::read(folder, &content, &settings);
    }
    for file in sentencepiece::FILES {
        if let Some(content) = folder.read(file)? {
            // Llama 3 has ranks under the name that Llama 2 had pieces under.
            return match tiktoken::is_it(&content) {
                true => tiktoken::read(folder, file, &content, settings),
                false => sentencepiece::read(folder, file, &content, settings),
            };
        }
    }
    if let Some((file, content)) = ranks(folder)? {
        return tiktoken::read(folder, &file, &content, settings);
    }
    if let Some(content) = folder.read(vocab_json::VOCABULARY)? {
        return vocab_json::read(folder, &content, settings);
    }
    if let Some(content) = folder.read(word_piece::FILE)? {
        return word_piece::read(folder, &content, settings);
    }
    bail!(
        "{}: no tokenizer: it has none of {}, {}, *{}, {} with {}, {}",
        folder.path().display(),
        json::FILE,
        sentencepiece::FILES.join(", "),
        tiktoken::EXTENSION,
        vocab_json::VOCABULARY,
        vocab_json::MERGES,
        word_piece::FILE
    )
}

type Named = (String, std::borrow::Cow<'static, [u8]>);

/// The file of ranks, its name and content.
fn ranks(folder: &Folder) -> Result<Option<Named>> {
    let mut names = folder.names()?;
    names.retain(|name| name == RANKS || name.ends_with(tiktoken::EXTENSION));
    if let [first, second, ..] = &names[..] {
        bail!("{}: both {first} and {second} are files of ranks", folder.path().display());
    }
    let Some(name) = names.pop() else { return Ok(None) };
    Ok(folder.read(&name)?.map(|content| (name, content)))
}
