//! Completions with a suffix: the prompt in the form that models for filling in the middle are trained on.
//!
//! Invariant: the tokens that mark the parts of the prompt are those of the model's vocabulary; a model
//! without them rejects a suffix.

use super::ServeParts;
use super::error::ApiError;
use super::prompt_ids::encode;
use super::prompts::Prompt;
use crate::actors::PromptingDefaults;
use crate::text::Tokenizer;
use std::sync::Arc;

/// Names of the tokens of a family of models.
struct MarkerNames {
    prefix: &'static str,
    suffix: &'static str,
    /// Starts the generated text. If there is none, the suffix comes first, and the generated text follows
    /// the prefix.
    middle: Option<&'static str>,
    /// Ends the generated text, if this is not the end-of-sequence token.
    end: Option<&'static str>,
}

const fn markers(prefix: &'static str, suffix: &'static str, middle: &'static str) -> MarkerNames {
    MarkerNames { prefix, suffix, middle: Some(middle), end: None }
}

/// The known families. The first of which the tokenizer has all tokens is used.
const FAMILIES: [MarkerNames; 6] = [
    // Qwen Coder, CodeGemma.
    markers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    // StarCoder, Granite Code.
    markers("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    // SantaCoder.
    markers("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    // DeepSeek Coder.
    markers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    // Code Llama.
    MarkerNames { end: Some("▁<EOT>"), ..markers("▁<PRE>", "▁<SUF>", "▁<MID>") },
    // Codestral.
    MarkerNames { prefix: "[PREFIX]", suffix: "[SUFFIX]", middle: None, end: None },
];

/// A suffix, and the tokens that mark the parts of a prompt.
pub struct FillInTheMiddle {
    prefix: u32,
    suffix: u32,
    middle: Option<u32>,
    end: Option<u32>,
    suffix_text: Vec<u32>,
}

impl FillInTheMiddle {
    /// Prepares completions before `suffix`. Fails if the model cannot fill in the middle, or with `echo`.
    pub fn new(parts: &ServeParts, suffix: String, echo: bool) -> Result<FillInTheMiddle, ApiError> {
        if echo {
            return Err(ApiError::invalid("suffix", "'suffix' and 'echo' are mutually exclusive"));
        }
        let family = find_family(parts).ok_or_else(|| {
            let message = "'suffix' is not supported by this model, whose vocabulary has no tokens for \
                           filling in the middle";
            ApiError::unsupported("suffix", message)
        })?;
        Ok(FillInTheMiddle { suffix_text: encode(parts, &suffix, false, "suffix")?, ..family })
    }

    /// Returns the token ids of a prompt with the suffix.
    pub fn prompt_ids(
        &self,
        parts: &ServeParts,
        prompt: Prompt,
        add_special: bool,
    ) -> Result<Arc<[u32]>, ApiError> {
        let Prompt::Text(text) = prompt else {
            return Err(ApiError::invalid("suffix", "'suffix' requires a 'prompt' that is a text"));
        };
        let prompt = encode(parts, &text, false, "prompt")?;
        let bos = parts.tokenizer.bos_id().filter(|bos| {
            let around = || parts.tokenizer.encode("", true).unwrap_or_default();
            add_special && around().first() == Some(bos)
        });
        let (prefix, suffix) = ([self.prefix], [self.suffix]);
        let ordered = match &self.middle {
            Some(middle) => [&prefix[..], &prompt, &suffix, &self.suffix_text, std::slice::from_ref(middle)],
            None => [&suffix[..], &self.suffix_text, &prefix, &prompt, &[]],
        };
        Ok(bos.into_iter().chain(ordered.concat()).collect())
    }
}

/// Returns the token that ends the generated text, if the model can fill in the middle and has one.
pub fn end_token(parts: &ServeParts) -> Option<u32> {
    find_family(parts)?.end
}

/// Looks up the tokens of the model's family; `None` if it cannot fill in the middle.
fn find_family(parts: &ServeParts) -> Option<FillInTheMiddle> {
    let is_decoder = matches!(parts.model.prompting, PromptingDefaults::Decoder(_));
    FAMILIES.iter().filter(|_| is_decoder).find_map(|names| find_markers(&parts.tokenizer, names))
}

/// Looks up the tokens of a family; `None` if the tokenizer lacks one.
fn find_markers(tokenizer: &Tokenizer, names: &MarkerNames) -> Option<FillInTheMiddle> {
    let middle = match names.middle {
        Some(name) => Some(tokenizer.token_id(name)?),
        None => None,
    };
    Some(FillInTheMiddle {
        prefix: tokenizer.token_id(names.prefix)?,
        suffix: tokenizer.token_id(names.suffix)?,
        middle,
        end: names.end.and_then(|name| tokenizer.token_id(name)),
        suffix_text: Vec::new(),
    })
}
