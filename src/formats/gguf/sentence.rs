//! Pooling settings in a GGUF file.
//!
//! Invariant: an unsupported pooling type is recorded by its key and number.

use super::Gguf;
use crate::formats::sentence::{PoolingConfig, SentenceConfig, UnsupportedSetting};
use crate::request::Pooling;
use anyhow::Result;

impl SentenceConfig {
    /// Reads the pooling settings of a decoder, or returns `None` if it generates text.
    pub fn of_gguf_decoder(gguf: &Gguf) -> Result<Option<SentenceConfig>> {
        let key = format!("{}.pooling_type", gguf.str("general.architecture")?);
        match gguf.opt_u32(&key)? {
            Some(1..=3) => Ok(SentenceConfig::from_gguf(gguf)?.map(SentenceConfig::for_decoder)),
            _ => Ok(None),
        }
    }

    /// Reads the pooling settings, or returns `None` if the file has none. Embeddings are L2-normalized, as
    /// other programs do for such files.
    pub fn from_gguf(gguf: &Gguf) -> Result<Option<SentenceConfig>> {
        let key = format!("{}.pooling_type", gguf.str("general.architecture")?);
        let Some(number) = gguf.opt_u32(&key)? else { return Ok(None) };
        let pooling = match number {
            1 => PoolingConfig::Supported(Pooling::Mean),
            2 => PoolingConfig::Supported(Pooling::Cls),
            3 => PoolingConfig::Supported(Pooling::Last),
            _ => {
                let meaning = if number == 0 { "means no pooling" } else { "is not supported" };
                let why = format!("the key '{key}' is {number}, which {meaning}");
                PoolingConfig::Unsupported(UnsupportedSetting {
                    file: gguf.path().display().to_string(),
                    reason: why,
                })
            }
        };
        Ok(Some(SentenceConfig {
            file: gguf.path().display().to_string(),
            pooling,
            dense: Vec::new(),
            normalize: true,
            prompts: Default::default(),
            similarity: Default::default(),
            preprocessing: None,
        }))
    }
}
