//! Special tokens that the API reads or writes: the mask token, language tokens, and markers of tool calls
//! and reasoning.
//!
//! Invariant: they are looked up once, when the server is created; only tokens that a request names are
//! looked up per request.

use crate::actors::PromptingDefaults;
use crate::text::Tokenizer;
use crate::text::output::OutputFormats;
use std::sync::Arc;

/// Special tokens of the served model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Mask token, which marks a position to fill.
    pub mask: Option<u32>,
    /// Padding token.
    pub pad: Option<u32>,
    /// Special tokens that mark tool calls and reasoning in the output, by name.
    output_markers: Vec<(&'static str, u32)>,
    language: LanguagePosition,
    /// Special tokens that are not language tokens, such as BOS and EOS.
    non_language: Vec<u32>,
    /// Special tokens of the encoder input's tokenizer that are not language tokens.
    source_non_language: Vec<u32>,
}

/// Position of the language token in an encoder input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum LanguagePosition {
    /// Before all other tokens; the tokenizer adds no language token itself.
    #[default]
    Prepend,
    /// First token, in place of this language token that the tokenizer adds.
    ReplaceFirst(u32),
    /// Last token, in place of this language token that the tokenizer adds.
    ReplaceLast(u32),
}

impl SpecialTokens {
    /// Looks up the special tokens of a model with these prompting defaults.
    pub fn new(
        tokenizer: &Tokenizer,
        prompting: &PromptingDefaults,
        formats: &OutputFormats,
    ) -> SpecialTokens {
        match prompting {
            PromptingDefaults::Decoder(_) => {
                let markers = formats.markers().filter_map(|name| Some((name, tokenizer.token_id(name)?)));
                let output_markers = markers.filter(|(_, id)| tokenizer.is_special(*id)).collect();
                SpecialTokens { output_markers, ..SpecialTokens::default() }
            }
            PromptingDefaults::Encoder(prompting) => {
                let mask = prompting.mask_tokens.iter().find_map(|name| tokenizer.token_id(name));
                let pad = prompting.pad_token.as_ref().and_then(|name| tokenizer.token_id(name));
                SpecialTokens { mask, pad, ..SpecialTokens::default() }
            }
            PromptingDefaults::EncoderDecoder(prompting) => {
                let roles = |tokenizer: &Tokenizer| -> Vec<u32> {
                    let named = prompting.special_tokens.iter().filter_map(|role| tokenizer.token_id(role));
                    named.chain(tokenizer.bos_id()).chain(tokenizer.eos_id()).collect()
                };
                let of_source = roles(tokenizer.source());
                SpecialTokens {
                    language: find_language_position(tokenizer.source(), &of_source),
                    non_language: roles(tokenizer),
                    source_non_language: of_source,
                    ..SpecialTokens::default()
                }
            }
        }
    }

    /// Returns the special tokens that the parsers of these formats must see, which are among the model's.
    pub fn markers_of(&self, formats: &OutputFormats) -> Arc<[u32]> {
        let id = |name| self.output_markers.iter().find(|marker| marker.0 == name).map(|marker| marker.1);
        formats.markers().filter_map(id).collect()
    }

    /// Returns the language token with this name, or `__name__`. Tokens in angle brackets are not language
    /// tokens: they mark positions and ends.
    pub fn language(&self, tokenizer: &Tokenizer, name: &str) -> Option<u32> {
        find_language(tokenizer, name, &self.non_language)
    }

    /// Returns the language token with this name, or `__name__`, of encoder inputs. `tokenizer` is theirs.
    pub fn source_language(&self, tokenizer: &Tokenizer, name: &str) -> Option<u32> {
        find_language(tokenizer, name, &self.source_non_language)
    }

    /// Adds a language token to an encoder input, replacing the one that the tokenizer added.
    pub fn with_language(&self, mut ids: Vec<u32>, language: u32) -> Vec<u32> {
        let slot = match self.language {
            LanguagePosition::Prepend => None,
            LanguagePosition::ReplaceFirst(own) => ids.first_mut().filter(|id| **id == own),
            LanguagePosition::ReplaceLast(own) => ids.last_mut().filter(|id| **id == own),
        };
        match slot {
            Some(slot) => *slot = language,
            None => ids.insert(0, language),
        }
        ids
    }
}

fn find_language(tokenizer: &Tokenizer, name: &str, non_language: &[u32]) -> Option<u32> {
    let is_bracketed = name.starts_with('<') && name.ends_with('>');
    let is_language = |id: &u32| !is_bracketed && tokenizer.is_special(*id) && !non_language.contains(id);
    let special = |name: &str| tokenizer.token_id(name).filter(is_language);
    special(name).or_else(|| special(&format!("__{name}__")))
}

/// Determines the position of the language token: the special token around a text that has no other role.
fn find_language_position(tokenizer: &Tokenizer, roles: &[u32]) -> LanguagePosition {
    let around = tokenizer.encode("", true).unwrap_or_default();
    let is_language = |id: &&u32| tokenizer.is_special(**id) && !roles.contains(id);
    match (around.first().filter(is_language), around.last().filter(is_language)) {
        (Some(first), _) => LanguagePosition::ReplaceFirst(*first),
        (None, Some(last)) => LanguagePosition::ReplaceLast(*last),
        (None, None) => LanguagePosition::Prepend,
    }
}
