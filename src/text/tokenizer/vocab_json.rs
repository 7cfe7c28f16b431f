//! Byte-level BPE tokenizers, such as GPT-2's, in a folder without a `tokenizer.json`: `vocab.json` with the
//! tokens and their ids, and `merges.txt` with the merges in order of precedence.
//!
//! Invariant: a vocabulary without merges is rejected.

use super::added::resolve;
use super::byte_level::{ByteLevel, Composing, WholeWords};
use super::class::Class;
use super::draft::{Draft, id_of};
use super::settings::Settings;
use super::splits::{self, AddedSpace};
use super::{Around, Joining, Opening, Tokenizer, json};
use crate::formats::Folder;
use anyhow::{Context, Result, bail};

/// Name of the vocabulary file.
pub const VOCABULARY: &str = "vocab.json";
/// Name of the merges file.
pub const MERGES: &str = "merges.txt";

/// Reads the tokenizer of a folder with these files. `content` is that of `vocab.json`.
pub fn read(folder: &Folder, content: &[u8], mut settings: Settings) -> Result<Tokenizer> {
    let class = settings.class_or(Class::Gpt2);
    let name = |file| folder.file(file).display().to_string();
    if !matches!(class, Class::Gpt2 | Class::Roberta | Class::Qwen2) {
        bail!(
            "{}: {class} cannot be built from this file and {MERGES}: it needs a {}",
            name(VOCABULARY),
            json::FILE
        );
    }
    let vocabulary = serde_json::from_slice(content).map_err(Into::into).and_then(ByteLevel::new);
    let mut vocabulary = vocabulary.with_context(|| name(VOCABULARY))?;
    let Some(merges) = folder.read_text(MERGES)? else {
        bail!("{}: there is no {MERGES} beside it", name(VOCABULARY));
    };
    read_merges(&merges, &mut vocabulary).with_context(|| name(MERGES))?;
    draft(&class, &settings, vocabulary).and_then(Draft::finish).with_context(|| name(VOCABULARY))
}

/// Parses a `merges.txt`: one merge per line, after an optional first line with the version.
fn read_merges(content: &str, vocabulary: &mut ByteLevel) -> Result<()> {
    for (line, at) in content.lines().zip(1..).filter(|(line, _)| !line.is_empty()) {
        if at > 1 || !line.starts_with("#version") {
            vocabulary.push_merge(line).with_context(|| format!("line {at}"))?;
        }
    }
    Ok(())
}

fn draft(class: &Class, settings: &Settings, vocabulary: ByteLevel) -> Result<Draft> {
    let added = resolve(settings.added()?, vocabulary.len(), |token| vocabulary.id(token))?;
    let id = |role| {
        settings.token_id(role, VOCABULARY, |token| id_of(&added, |token| vocabulary.id(token), token))
    };
    let (bos, eos) = (id("bos_token")?, id("eos_token")?);
    let wants = |key| settings.flag(key).map(|flag| flag == Some(true));
    let (add_bos, add_eos) = (wants("add_bos_token")?, wants("add_eos_token")?);
    let around = match class {
        Class::Roberta => Around::of(id("cls_token")?, id("sep_token")?),
        _ => Around::of(bos.filter(|_| add_bos), eos.filter(|_| add_eos)),
    };
    let pieces = vocabulary.pieces();
    let stages = match class {
        Class::Qwen2 => {
            vocabulary.stages(Composing::Nfc, splits::byte_level(&[splits::QWEN2]), WholeWords::Merged)?
        }
        _ => {
            let prefix = if wants("add_prefix_space")? { AddedSpace::Before } else { AddedSpace::None };
            vocabulary.stages(Composing::None, splits::gpt2(prefix), WholeWords::Merged)?
        }
    };
    Ok(Draft { stages, joining: Joining::Bytes { opening: Opening::Kept }, pieces, added, bos, eos, around })
}
