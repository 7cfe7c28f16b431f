//! Pooling settings in a GGUF file.
//!
//! Invariant: an unsupported pooling type is recorded by its key and number.

use super::Gguf;
use crate::formats::sentence::{FoundPooling, SentenceFiles, Unserved};
use crate::request::Pooling;
use anyhow::Result;

impl SentenceFiles {
    /// Reads the pooling settings, or returns `None` if the file has none. Embeddings are L2-normalized, as
    /// other programs do for such files.
    pub fn from_gguf(gguf: &Gguf) -> Result<Option<SentenceFiles>> {
        let key = format!("{}.pooling_type", gguf.str("general.architecture")?);
        let Some(number) = gguf.opt_u32(&key)? else { return Ok(None) };
        let pooling = match number {
            1 => FoundPooling::Served(Pooling::Mean),
            2 => FoundPooling::Served(Pooling::Cls),
            3 => FoundPooling::Served(Pooling::Last),
            _ => {
                let meaning = if number == 0 { "means no pooling" } else { "is not supported" };
                let why = format!("the key '{key}' is {number}, which {meaning}");
                FoundPooling::Unserved(Unserved { file: gguf.path().display().to_string(), why })
            }
        };
        Ok(Some(SentenceFiles { pooling, normalize: true, texts: None }))
    }
}
