//! Byte-level BPE tokenizers, such as GPT-2's, in a folder without a `tokenizer.json`: `vocab.json` with the
//! tokens and their ids, and `merges.txt` with the merges in order of precedence.
//!
//! Invariant: a vocabulary without merges is rejected.

use super::added::resolve;
use super::byte_level::{ByteLevelVocabulary, UnicodeNormalization, WholeWordLookup};
use super::class::TokenizerClass;
use super::parts::{TokenizerParts, find_token_id};
use super::settings::TokenizerSettings;
use super::splits::{self, PrefixSpace};
use super::{DecodeMethod, LeadingSpaces, SurroundingTokens, Tokenizer, json};
use crate::formats::Folder;
use anyhow::{Context, Result, bail};

/// Name of the vocabulary file.
pub const VOCABULARY: &str = "vocab.json";
/// Name of the merges file.
pub const MERGES: &str = "merges.txt";

/// Reads the tokenizer of a folder with these files. `content` is that of `vocab.json`.
pub fn read(folder: &Folder, content: &[u8], mut settings: TokenizerSettings) -> Result<Tokenizer> {
    let class = settings.class_or(TokenizerClass::Gpt2);
    let name = |file| folder.file(file).display().to_string();
    if !matches!(class, TokenizerClass::Gpt2 | TokenizerClass::Roberta | TokenizerClass::Qwen2) {
        bail!(
            "{}: {class} cannot be built from this file and {MERGES}: it needs a {}",
            name(VOCABULARY),
            json::FILE
        );
    }
    let vocabulary = serde_json::from_slice(content).map_err(Into::into).and_then(ByteLevelVocabulary::new);
    let mut vocabulary = vocabulary.with_context(|| name(VOCABULARY))?;
    let Some(merges) = folder.read_text(MERGES)? else {
        bail!("{}: there is no {MERGES} beside it", name(VOCABULARY));
    };
    read_merges(&merges, &mut vocabulary).with_context(|| name(MERGES))?;
    tokenizer_parts(&class, &settings, vocabulary)
        .and_then(TokenizerParts::build)
        .with_context(|| name(VOCABULARY))
}

/// Parses a `merges.txt`: one merge per line, after an optional first line with the version.
fn read_merges(content: &str, vocabulary: &mut ByteLevelVocabulary) -> Result<()> {
    for (line, at) in content.lines().zip(1..).filter(|(line, _)| !line.is_empty()) {
        if at > 1 || !line.starts_with("#version") {
            vocabulary.push_merge(line).with_context(|| format!("line {at}"))?;
        }
    }
    Ok(())
}

fn tokenizer_parts(
    class: &TokenizerClass,
    settings: &TokenizerSettings,
    vocabulary: ByteLevelVocabulary,
) -> Result<TokenizerParts> {
    let added = resolve(settings.added()?, vocabulary.len(), |token| vocabulary.id(token))?;
    let id = |role| {
        settings
            .token_id(role, VOCABULARY, |token| find_token_id(&added, |token| vocabulary.id(token), token))
    };
    let (bos, eos) = (id("bos_token")?, id("eos_token")?);
    let wants = |key| settings.flag(key).map(|flag| flag == Some(true));
    let (add_bos, add_eos) = (wants("add_bos_token")?, wants("add_eos_token")?);
    let around = match class {
        TokenizerClass::Roberta => {
            let end = id("sep_token")?;
            let between = end.into_iter().collect();
            SurroundingTokens { between, ..SurroundingTokens::new(id("cls_token")?, end) }
        }
        _ => SurroundingTokens::new(bos.filter(|_| add_bos), eos.filter(|_| add_eos)),
    };
    let pieces = vocabulary.pieces();
    let stages = match class {
        TokenizerClass::Qwen2 => vocabulary.pipeline_parts(
            UnicodeNormalization::Nfc,
            splits::byte_level(&[splits::QWEN2]),
            WholeWordLookup::Disabled,
        )?,
        _ => {
            let prefix = if wants("add_prefix_space")? { PrefixSpace::Added } else { PrefixSpace::None };
            vocabulary.pipeline_parts(
                UnicodeNormalization::None,
                splits::gpt2(prefix),
                WholeWordLookup::Disabled,
            )?
        }
    };
    Ok(TokenizerParts {
        stages,
        decode_method: DecodeMethod::Bytes { leading_spaces: LeadingSpaces::Keep },
        pieces,
        added,
        bos,
        eos,
        surrounding: around,
    })
}
