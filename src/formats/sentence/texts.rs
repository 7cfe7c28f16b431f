//! What sentence-transformers does to a text before the model reads it: `sentence_bert_config.json`.
//!
//! Invariant: nothing of it is done here; what would make a difference is told.

use super::{Unserved, module_file};
use crate::formats::{Folder, HubConfig};
use anyhow::Result;

/// The settings of the module that reads texts.
pub const TEXT_CONFIG: &str = "sentence_bert_config.json";

/// What is done to a text before the model reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextSettings {
    /// The file that says so, with its path.
    file: String,
    lowercase: bool,
    /// Tokens that longer texts are cut to.
    max_tokens: Option<usize>,
}

impl TextSettings {
    /// Those of the module at `path`, which is the model's own folder if that is empty; `None` without such a file.
    pub(super) fn read(folder: &Folder, path: &str) -> Result<Option<TextSettings>> {
        let name = match path {
            "" => TEXT_CONFIG.to_owned(),
            path => module_file(folder, path, TEXT_CONFIG)?,
        };
        let Some(settings) = HubConfig::read_if_present(folder, &name)? else { return Ok(None) };
        Ok(Some(TextSettings {
            file: settings.file().display().to_string(),
            lowercase: settings.opt_bool("do_lower_case")?.unwrap_or(false),
            max_tokens: settings.opt_usize("max_seq_length")?,
        }))
    }

    /// What of it is not done where texts of up to `context` tokens are read.
    pub fn unserved(&self, context: usize) -> Vec<Unserved> {
        let lowercase = self.lowercase.then(|| {
            "do_lower_case is true: texts are put into small letters only if the tokenizer does so".to_owned()
        });
        let cut = self.max_tokens.filter(|most| *most < context).map(|most| {
            format!("max_seq_length is {most}: texts are not cut to that, but read up to {context} tokens")
        });
        lowercase.into_iter().chain(cut).map(|why| Unserved { file: self.file.clone(), why }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;
    use serde_json::json;

    #[test]
    fn what_would_be_done_to_texts_is_told_where_it_makes_a_difference() {
        let folder = Scratch::new();
        for (settings, context, told) in [
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
            let texts = TextSettings::read(&folder.folder(), "").unwrap().unwrap();
            let unserved: Vec<String> = texts.unserved(context).iter().map(Unserved::to_string).collect();
            assert_eq!(unserved.len(), told.len(), "{unserved:?}");
            let is_told = |(said, told): (&String, &&str)| said.contains(TEXT_CONFIG) && said.contains(told);
            assert!(unserved.iter().zip(told).all(is_told), "{unserved:?}");
        }
    }
}
