//! Text preprocessing of sentence-transformers: `sentence_bert_config.json`.
//!
//! Invariant: no preprocessing is done here; settings that would make a difference are reported.

use super::{UnsupportedSetting, module_file};
use crate::formats::{Folder, HubConfig};
use anyhow::Result;

/// Settings file of the Transformer module.
pub const TEXT_CONFIG: &str = "sentence_bert_config.json";

/// Text preprocessing before tokenization.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextPreprocessing {
    /// The settings file, with its path.
    file: String,
    lowercase: bool,
    /// Maximum length in tokens; longer texts are truncated.
    max_tokens: Option<usize>,
}

impl TextPreprocessing {
    /// Reads the settings of the module at `path`, or of the model folder itself if `path` is empty. Returns
    /// `None` if the file does not exist.
    pub(super) fn read(folder: &Folder, path: &str) -> Result<Option<TextPreprocessing>> {
        let name = match path {
            "" => TEXT_CONFIG.to_owned(),
            path => module_file(folder, path, TEXT_CONFIG)?,
        };
        let Some(settings) = HubConfig::read_if_present(folder, &name)? else { return Ok(None) };
        Ok(Some(TextPreprocessing {
            file: settings.file().display().to_string(),
            lowercase: settings.opt_bool("do_lower_case")?.unwrap_or(false),
            max_tokens: settings.opt_usize("max_seq_length")?,
        }))
    }

    /// Returns the settings that are not applied, for a model with a context of `context` tokens.
    pub fn unsupported(&self, context: usize) -> Vec<UnsupportedSetting> {
        let lowercase = self.lowercase.then(|| {
            "do_lower_case is true, but texts are lowercased only if the tokenizer does so".to_owned()
        });
        let cut = self.max_tokens.filter(|most| *most < context).map(|most| {
            format!("max_seq_length is {most}, but texts of up to {context} tokens are used in full")
        });
        lowercase
            .into_iter()
            .chain(cut)
            .map(|why| UnsupportedSetting { file: self.file.clone(), reason: why })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;
    use serde_json::json;

    #[test]
    fn unsupported_preprocessing_is_reported_where_it_makes_a_difference() {
        let folder = Scratch::new();
        for (settings, context, expected) in [
            (json!({"max_seq_length": 128, "do_lower_case": false}), 512, &["max_seq_length is 128"][..]),
            (json!({"max_seq_length": 512}), 512, &[]),
            (json!({"max_seq_length": null}), 512, &[]),
            (
                json!({"max_seq_length": 8, "do_lower_case": true}),
                9,
                &["do_lower_case", "max_seq_length is 8"],
            ),
        ] {
            folder.write(TEXT_CONFIG, settings.to_string().as_bytes());
            let texts = TextPreprocessing::read(&folder.folder(), "").unwrap().unwrap();
            let unserved: Vec<String> =
                texts.unsupported(context).iter().map(UnsupportedSetting::to_string).collect();
            assert_eq!(unserved.len(), expected.len(), "{unserved:?}");
            let is_expected =
                |(shown, part): (&String, &&str)| shown.contains(TEXT_CONFIG) && shown.contains(part);
            assert!(unserved.iter().zip(expected).all(is_expected), "{unserved:?}");
        }
    }
}
