//! Parameters of completions by encoder-decoder models: the decoder start tokens, and the language of the
//! encoder input. The prompt itself is the encoder input.
//!
//! Invariant: the decoder starts with its start token and the forced BOS token, unless the request gives all
//! start ids itself.

use super::ServeParts;
use super::error::ApiError;
use super::fields::{Fields, shorten};
use super::prompt_ids::{
    PromptIds, check_source_vocabulary, check_text_len, check_vocabulary, encode, encode_text,
};
use super::prompts::{Prompt, parse_prompt, parse_token_id};
use crate::actors::EncoderDecoderPrompting;
use crate::request::RequestError;
use serde_json::Value;
use std::sync::Arc;

const DECODER_PROMPT: &str = "decoder_prompt";
const FORCED_TOKEN: &str = "forced_bos_token";
const FORCED_ID: &str = "forced_bos_token_id";
const SOURCE_LANG: &str = "source_lang";

/// The decoder start and language parameters of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DecoderStartParams {
    /// Text or ids that the generated text starts with.
    decoder_prompt: Option<Prompt>,
    forced_bos: Option<ForcedBos>,
    source_lang: Option<String>,
}

/// The forced BOS token, which follows the decoder start token.
#[derive(Clone, Debug, PartialEq)]
enum ForcedBos {
    Named(String),
    Id(u32),
}

impl DecoderStartParams {
    /// Takes the parameters out of a request body. `vocab` is the vocabulary size.
    pub fn parse(fields: &mut Fields, vocab: usize) -> Result<DecoderStartParams, ApiError> {
        let decoder_prompt = fields.take(DECODER_PROMPT);
        let decoder_prompt =
            decoder_prompt.map(|value| parse_prompt(DECODER_PROMPT, value, vocab)).transpose()?;
        let id =
            |value: Value| parse_token_id(&value, vocab).map_err(|why| ApiError::invalid(FORCED_ID, why));
        let forced = match (fields.take_string(FORCED_TOKEN)?, fields.take(FORCED_ID).map(id).transpose()?) {
            (Some(_), Some(_)) => {
                let message = format!("'{FORCED_ID}' and '{FORCED_TOKEN}' are mutually exclusive");
                return Err(ApiError::invalid(FORCED_ID, message));
            }
            (Some(name), None) => Some(ForcedBos::Named(name)),
            (None, id) => id.map(ForcedBos::Id),
        };
        Ok(DecoderStartParams {
            decoder_prompt,
            forced_bos: forced,
            source_lang: fields.take_string(SOURCE_LANG)?,
        })
    }

    /// Returns an error if any parameter is given; for models without an encoder.
    pub fn reject_if_given(&self) -> Result<(), ApiError> {
        let forced = match self.forced_bos {
            Some(ForcedBos::Id(_)) => FORCED_ID,
            _ => FORCED_TOKEN,
        };
        let given = [
            (DECODER_PROMPT, self.decoder_prompt.is_some()),
            (forced, self.forced_bos.is_some()),
            (SOURCE_LANG, self.source_lang.is_some()),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((name, _)) => {
                let message =
                    format!("'{name}' is only for encoder-decoder models, and this model is a decoder");
                Err(ApiError::unsupported(*name, message))
            }
            None => Ok(()),
        }
    }

    /// Returns the encoder input and the decoder start ids for each prompt.
    pub fn prompt_ids(
        &self,
        parts: &ServeParts,
        prompting: &EncoderDecoderPrompting,
        prompts: Vec<Prompt>,
        add_special: bool,
    ) -> Result<Vec<PromptIds>, ApiError> {
        let (start_ids, forced_tokens) = self.start_ids(parts, prompting)?;
        let start_ids: Arc<[u32]> = start_ids.into();
        check_start_ids(parts, &start_ids)?;
        let language = self.source_language_id(parts)?;
        let several = prompts.len() > 1;
        let prompt_ids = prompts.into_iter().enumerate().map(|(index, prompt)| {
            let name = if several { format!("'prompt[{index}]'") } else { "'prompt'".to_owned() };
            let encoder_input = encoder_input_ids(parts, prompt, &name, language, add_special)?;
            Ok(PromptIds { encoder_input: encoder_input.into(), prompt: start_ids.clone(), forced_tokens })
        });
        prompt_ids.collect()
    }

    /// Returns the decoder start ids, and the number of forced tokens at their end.
    fn start_ids(
        &self,
        parts: &ServeParts,
        prompting: &EncoderDecoderPrompting,
    ) -> Result<(Vec<u32>, u32), ApiError> {
        let text = match &self.decoder_prompt {
            Some(Prompt::Ids(ids)) => return Ok((self.explicit_start_ids(ids)?, 0)),
            Some(Prompt::Text(text)) => encode(parts, text, false, DECODER_PROMPT)?,
            None => Vec::new(),
        };
        let forced = match &self.forced_bos {
            Some(ForcedBos::Id(id)) => Some(*id),
            Some(ForcedBos::Named(name)) => Some(forced_token_id(parts, name)?),
            None => prompting.forced_bos,
        };
        let forced_tokens = u32::from(forced.is_some() && text.is_empty());
        Ok(([prompting.start_token].into_iter().chain(forced).chain(text).collect(), forced_tokens))
    }

    /// Checks decoder start ids that the request gives itself, which are used unchanged.
    fn explicit_start_ids(&self, ids: &[u32]) -> Result<Vec<u32>, ApiError> {
        let wrong = |message: &str| Err(ApiError::invalid(DECODER_PROMPT, message));
        match (ids, &self.forced_bos) {
            ([], _) => wrong("'decoder_prompt' must contain at least one token id"),
            (_, Some(_)) => wrong(
                "token ids in 'decoder_prompt' cannot be combined with a forced token: add it to the ids",
            ),
            (ids, None) => Ok(ids.to_vec()),
        }
    }

    /// Returns the token id of the encoder input's language, if `source_lang` is given.
    fn source_language_id(&self, parts: &ServeParts) -> Result<Option<u32>, ApiError> {
        let Some(name) = &self.source_lang else { return Ok(None) };
        let unknown = || {
            let name = shorten(name);
            ApiError::invalid(SOURCE_LANG, format!("the tokenizer has no language token for '{name}'"))
        };
        let id = parts.special_tokens.source_language(parts.tokenizer.source(), name).ok_or_else(unknown)?;
        check_source_vocabulary(parts, SOURCE_LANG, "'source_lang'", &[id])?;
        Ok(Some(id))
    }
}

/// Returns an error if the decoder start ids exceed the decoder's context.
fn check_start_ids(parts: &ServeParts, start_ids: &[u32]) -> Result<(), ApiError> {
    check_vocabulary(parts, DECODER_PROMPT, "'decoder_prompt'", start_ids)?;
    let (prompt_tokens, context) = (start_ids.len(), parts.model.context);
    match prompt_tokens > context {
        true => Err(RequestError::PromptTooLong { prompt: DECODER_PROMPT, prompt_tokens, context }.into()),
        false => Ok(()),
    }
}

/// Returns the id of the forced BOS token with this name or language code.
fn forced_token_id(parts: &ServeParts, name: &str) -> Result<u32, ApiError> {
    let tokenizer = &parts.tokenizer;
    let id = parts.special_tokens.language(tokenizer, name).or_else(|| tokenizer.token_id(name)).ok_or_else(
        || {
            let name = shorten(name);
            ApiError::invalid(FORCED_TOKEN, format!("the vocabulary has no token '{name}'"))
        },
    )?;
    check_vocabulary(parts, FORCED_TOKEN, "'forced_bos_token'", &[id])?;
    Ok(id)
}

/// Returns the token ids of an encoder input. `name` is what error messages call it.
fn encoder_input_ids(
    parts: &ServeParts,
    prompt: Prompt,
    name: &str,
    language: Option<u32>,
    add_special: bool,
) -> Result<Vec<u32>, ApiError> {
    let ids = match (prompt, language) {
        (Prompt::Ids(_), Some(_)) => {
            let message =
                "'source_lang' cannot be combined with token ids: add the language token to the ids";
            return Err(ApiError::invalid(SOURCE_LANG, message));
        }
        (Prompt::Ids(ids), None) => ids,
        (Prompt::Text(text), None) => encode_text(parts, &text, add_special, "prompt", name)?,
        (Prompt::Text(text), Some(language)) => {
            let ids = encode_text(parts, &text, add_special, "prompt", name)?;
            parts.special_tokens.with_language(ids, language)
        }
    };
    if ids.is_empty() {
        let message = format!("{name} is empty, and the encoder needs at least one token");
        return Err(ApiError::invalid("prompt", message));
    }
    check_text_len(parts, "prompt", name, ids.len())?;
    check_source_vocabulary(parts, "prompt", name, &ids)?;
    Ok(ids)
}
