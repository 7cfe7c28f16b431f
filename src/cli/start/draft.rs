//! The draft model for speculative decoding.
//!
//! Invariant: a token id means the same for a model and its draft model, because drafts are ids.

use super::{fetch_folder, open_tokenizer};
use crate::config::{HubSettings, SpeculationConfig};
use crate::hub::HubReference;
use crate::model::source::{ModelRef, ModelSource};
use crate::text::Tokenizer;
use anyhow::{Context, Result, bail};

/// Fetches a draft model from a hub, if it is used, and returns the configuration with its local folder.
/// Other draft models are returned as they are. Blocks.
pub fn fetch_draft(mut config: SpeculationConfig, settings: &HubSettings) -> Result<SpeculationConfig> {
    let is_hubs = |name: &&str| HubReference::has_prefix(name);
    if let Some(name) = config.draft_model().filter(is_hubs) {
        config.draft = fetch_folder(&HubReference::parse(name)?, settings)?;
    }
    Ok(config)
}

/// Opens the configured draft model, if it is used, and attaches it to `source`. It is loaded in its stored
/// number formats. Fails if its tokens are not those of `source`, which `tokenizer` has.
pub fn attach_draft(
    config: &SpeculationConfig,
    source: &mut ModelSource,
    tokenizer: &Tokenizer,
) -> Result<()> {
    let Some(name) = config.draft_model() else { return Ok(()) };
    let open = || {
        let draft = ModelSource::open(&ModelRef::parse(name)?, None)?;
        let tokenizer = open_tokenizer(&draft)?;
        anyhow::Ok((draft, tokenizer))
    };
    let (draft, drafts_tokenizer) = open().context("cannot open the draft model")?;
    let names = [source.name(), draft.name()];
    source.attach_draft(draft)?;
    check_tokens((&names[0], tokenizer), (&names[1], &drafts_tokenizer))
}

/// Fails if a token id has different meanings for a model and its draft model, each with its name.
fn check_tokens(model: (&str, &Tokenizer), draft: (&str, &Tokenizer)) -> Result<()> {
    let Some(id) = model.1.first_difference(draft.1) else { return Ok(()) };
    let token = |(name, tokenizer): (&str, &Tokenizer)| {
        let special = if tokenizer.is_special(id) { ", a special token," } else { "" };
        format!("{:?}{special} in {name}", tokenizer.token_text(id))
    };
    bail!(
        "the draft model has another tokenizer than the model: token {id} is {} and {}",
        token(model),
        token(draft)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Overrides};
    use crate::testing::Scratch;
    use std::path::{Path, PathBuf};

    fn on_disk(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
    }

    /// Opens the model `path` with a draft model.
    fn open(path: &Path, draft: &str) -> Result<ModelSource> {
        let mut flags = Overrides::default();
        flags.set("speculation.draft", Some(draft));
        let config = Config::load(None, flags).unwrap().speculation;
        let mut source = ModelSource::open(&ModelRef::Path(path.to_owned()), None)?;
        let tokenizer = open_tokenizer(&source)?;
        attach_draft(&config, &mut source, &tokenizer).map(|()| source)
    }

    /// Returns a copy of the demo model's draft, with an edited tokenizer.
    fn with_tokenizer(edit: impl FnOnce(&mut serde_json::Value)) -> Scratch {
        let folder = Scratch::new();
        for entry in on_disk("assets/demo-draft").read_dir().unwrap().flatten() {
            folder.write(&entry.file_name().to_string_lossy(), &std::fs::read(entry.path()).unwrap());
        }
        let file = std::fs::read(on_disk("assets/demo/tokenizer.json")).unwrap();
        let mut tokenizer = serde_json::from_slice(&file).unwrap();
        edit(&mut tokenizer);
        folder.write("tokenizer.json", tokenizer.to_string().as_bytes());
        folder.write(
            "tokenizer_config.json",
            &std::fs::read(on_disk("assets/demo/tokenizer_config.json")).unwrap(),
        );
        folder
    }

    fn error(draft: &Scratch) -> String {
        let opened = open(&on_disk("assets/demo"), draft.path().to_str().unwrap());
        format!("{:#}", opened.err().expect("the tokenizers differ"))
    }

    #[test]
    fn the_demo_has_a_draft_model() {
        let source = open(&on_disk("assets/demo"), "demo-draft").unwrap();
        assert_eq!(source.draft.unwrap().name(), "mainstem-demo-draft");
    }

    /// More tokens are padding, or tokens that are never proposed.
    #[test]
    fn a_draft_model_may_have_more_or_fewer_tokens() {
        let added = |id: u32| {
            serde_json::json!({"id": id, "content": "<|more|>", "single_word": false, "lstrip": false,
                               "rstrip": false, "normalized": false, "special": true})
        };
        let more = with_tokenizer(|it| it["added_tokens"].as_array_mut().unwrap().push(added(2048)));
        let fewer = with_tokenizer(|it| {
            let merges = it["model"]["merges"].as_array_mut().unwrap();
            merges.pop();
            let last = |(_, id): &(&String, &serde_json::Value)| id.as_u64() == Some(2047);
            let vocab = it["model"]["vocab"].as_object_mut().unwrap();
            let last = vocab.iter().find(last).unwrap().0.clone();
            vocab.remove(&last);
        });
        for draft in [more, fewer] {
            let opened = open(&on_disk("assets/demo"), draft.path().to_str().unwrap());
            assert!(opened.is_ok(), "{:#}", opened.err().unwrap());
        }
    }

    #[test]
    fn a_draft_model_with_other_tokens_is_refused() {
        let swapped = with_tokenizer(|it| {
            let vocab = &mut it["model"]["vocab"];
            (vocab["!"], vocab["$"]) = (8.into(), 5.into());
        });
        let name = |folder: &Scratch| folder.path().file_name().unwrap().to_str().unwrap().to_owned();
        assert_eq!(
            error(&swapped),
            format!(
                "the draft model has another tokenizer than the model: token 5 is \"!\" in demo and \"$\" \
                 in {}",
                name(&swapped)
            )
        );
        let ordinary = with_tokenizer(|it| it["added_tokens"][3]["special"] = false.into());
        let error = error(&ordinary);
        assert!(
            error.contains("token 3 is \"<|user|>\", a special token, in demo and \"<|user|>\" in "),
            "{error}"
        );
    }

    #[test]
    fn a_model_with_an_encoder_has_no_draft_model() {
        let draft = || ModelSource::open(&ModelRef::DemoDraft, None).unwrap();
        for name in ["bart", "bert"] {
            let fixture = ModelRef::Path(on_disk("tests/fixtures/families").join(name));
            let mut source = ModelSource::open(&fixture, None).unwrap();
            let error = format!("{:#}", source.attach_draft(draft()).unwrap_err());
            assert!(error.contains("only a decoder-only model can have a draft model"), "{error}");
        }
    }
}
