//! How a model wants to be asked, beyond sampling: what its files say, under what the configuration says.
//!
//! Invariant: each kind of model has what its own endpoints need, and every id is in its vocabulary.

use crate::config::ModelConfig;
use crate::formats::{FoundPooling, Unserved};
use crate::model::spec::Kind;
use crate::model::{ModelSource, ModelSpec};
use crate::request::Pooling;
use anyhow::{Context, Result, ensure};

/// By the kind of model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Conventions {
    /// A prompt is continued.
    Decoder,
    /// A text becomes a vector, or its masks are filled.
    Encoder(EncoderConventions),
    /// A source is answered.
    EncoderDecoder(DecoderConventions),
}

/// Of a lone encoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncoderConventions {
    /// Numbers of a vector.
    pub dimensions: usize,
    /// For requests that do not say; those are refused if what the files say is not served.
    pub pooling: FoundPooling,
    /// The same, of bringing vectors to length 1.
    pub normalize: bool,
    /// What the files say of texts and is not done.
    pub unserved: Vec<Unserved>,
    /// Names that the token of a place to fill may have; the first that the tokenizer knows is it.
    pub masks: Vec<String>,
    /// The name of the token that fills up batches elsewhere.
    pub pad: Option<String>,
}

/// Of a decoder behind an encoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecoderConventions {
    /// The decoder's first token.
    pub start: u32,
    /// The one after it, for requests that do not say.
    pub forced_bos: Option<u32>,
    /// Names of tokens that stand around a text and are no language's.
    pub roles: Vec<String>,
}

/// What masks are called where the tokenizer's settings do not say.
const USUAL_MASKS: [&str; 2] = ["[MASK]", "<mask>"];

const MASK: &str = "mask_token";
const PAD: &str = "pad_token";

impl Conventions {
    /// Those of an opened model. An error names the file and the key that would help.
    pub fn of(source: &ModelSource, config: &ModelConfig) -> Result<Conventions> {
        Ok(match source.spec.kind {
            Kind::Decoder => Conventions::Decoder,
            Kind::Encoder => Conventions::Encoder(encoder(source, config)),
            Kind::EncoderDecoder => Conventions::EncoderDecoder(decoder(source)?),
        })
    }

    /// What the files say of vectors and is not served, and what happens instead, if there is something.
    pub fn caution(source: &ModelSource, config: &ModelConfig) -> Option<String> {
        let instead = match config.pooling {
            Some(pooling) => format!("model.pooling goes before it: texts are pooled by {}", pooling.name()),
            None => "embeddings are refused unless a request, or model.pooling (--pooling), says how to pool"
                .to_owned(),
        };
        let pooling = match &source.sentence.as_ref()?.pooling {
            FoundPooling::Unserved(unserved) => Some(format!("{unserved}; {instead}")),
            FoundPooling::Served(_) => None,
        };
        let texts = unserved_of_texts(source).into_iter().map(|unserved| unserved.to_string());
        let cautions: Vec<String> = pooling.into_iter().chain(texts).collect();
        (!cautions.is_empty()).then(|| cautions.join("; "))
    }

    /// The kind of model, in words.
    pub fn name(&self) -> &'static str {
        match self {
            Conventions::Decoder => "a decoder",
            Conventions::Encoder(_) => "an encoder",
            Conventions::EncoderDecoder(_) => "an encoder-decoder",
        }
    }
}

fn encoder(source: &ModelSource, config: &ModelConfig) -> EncoderConventions {
    let files = source.sentence.as_ref();
    let pooling = match (config.pooling, files.map(|files| &files.pooling)) {
        (Some(pooling), _) => FoundPooling::Served(pooling),
        (None, Some(pooling)) => pooling.clone(),
        (None, None) => FoundPooling::Served(Pooling::Mean),
    };
    let named = |part: &str| source.chat.special_tokens.get(part).cloned();
    EncoderConventions {
        dimensions: source.spec.hidden,
        pooling,
        normalize: config.normalize.or(files.map(|files| files.normalize)).unwrap_or(true),
        unserved: unserved_of_texts(source),
        masks: named(MASK).into_iter().chain(USUAL_MASKS.map(str::to_owned)).collect(),
        pad: named(PAD),
    }
}

fn unserved_of_texts(source: &ModelSource) -> Vec<Unserved> {
    let texts = source.sentence.as_ref().and_then(|files| files.texts.as_ref());
    texts.map(|texts| texts.unserved(source.spec.context)).unwrap_or_default()
}

fn decoder(source: &ModelSource) -> Result<DecoderConventions> {
    let path = source.path.display();
    let start = source.opening.start.with_context(|| {
        format!(
            "{path}: nothing says what the decoder begins with: generation_config.json or config.json needs \
             the key 'decoder_start_token_id'"
        )
    })?;
    for (key, id) in
        [("decoder_start_token_id", Some(start)), ("forced_bos_token_id", source.opening.forced_bos)]
    {
        let vocab = source.spec.vocab;
        let is_known = id.is_none_or(|id| (id as usize) < vocab);
        ensure!(is_known, "{path}: {key} {} is not in the vocabulary of {vocab}", id.unwrap_or_default());
    }
    let roles = source.chat.special_tokens.values().cloned().collect();
    Ok(DecoderConventions { start, forced_bos: source.opening.forced_bos, roles })
}

/// What a model can be asked for, by endpoint.
pub fn endpoints(spec: &ModelSpec) -> Vec<&'static str> {
    match spec.kind {
        Kind::Decoder => vec!["/v1/chat/completions", "/v1/completions"],
        Kind::EncoderDecoder => vec!["/v1/completions"],
        Kind::Encoder if spec.has_head() => vec!["/v1/embeddings", "/v1/fill-mask"],
        Kind::Encoder => vec!["/v1/embeddings"],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Overrides};
    use crate::model::ModelRef;
    use crate::testing::Scratch;
    use serde_json::{Value, json};
    use std::path::Path;

    /// A family's fixture with these files beside it, and these settings.
    fn opened(
        family: &str,
        files: &[(&str, Value)],
        settings: &[(&'static str, &str)],
    ) -> Result<(ModelSource, ModelConfig)> {
        let folder = Scratch::new();
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families").join(family);
        for name in ["config.json", "model.safetensors"] {
            folder.write(name, &std::fs::read(fixture.join(name)).unwrap());
        }
        std::fs::create_dir(folder.path().join("1_Pooling")).unwrap();
        files.iter().for_each(|(name, content)| _ = folder.write(name, content.to_string().as_bytes()));
        let mut flags = Overrides::default();
        settings.iter().for_each(|(key, value)| flags.set(key, Some(*value)));
        let source = ModelSource::open(&ModelRef::Path(folder.path().to_owned()), None)?;
        Ok((source, Config::load(None, flags)?.model))
    }

    fn of(family: &str, files: &[(&str, Value)], settings: &[(&'static str, &str)]) -> Result<Conventions> {
        let (source, config) = opened(family, files, settings)?;
        Conventions::of(&source, &config)
    }

    fn caution_of(files: &[(&str, Value)], settings: &[(&'static str, &str)]) -> Option<String> {
        let (source, config) = opened("bert_gamma", files, settings).unwrap();
        Conventions::caution(&source, &config)
    }

    fn encoder_of(files: &[(&str, Value)], settings: &[(&'static str, &str)]) -> Result<EncoderConventions> {
        match of("bert_gamma", files, settings)? {
            Conventions::Encoder(conventions) => Ok(conventions),
            other => panic!("{other:?}"),
        }
    }

    /// The files of sentence-transformers with this pooling mode.
    fn sentence(mode: &str, more: &[&str]) -> [(&'static str, Value); 2] {
        let module = |class: &str| {
            let path = if class == "Pooling" { "1_Pooling" } else { "" };
            json!({"path": path, "type": format!("sentence_transformers.models.{class}")})
        };
        let classes = ["Transformer", "Pooling"].iter().chain(more);
        let mut switches = json!({"word_embedding_dimension": 32});
        switches[format!("pooling_mode_{mode}")] = true.into();
        [("modules.json", classes.map(|class| module(class)).collect()), ("1_Pooling/config.json", switches)]
    }

    #[test]
    fn vectors_are_made_as_the_configuration_says_else_the_files_else_by_the_mean() {
        use Pooling::{Cls, Last, Mean};
        let (bare, unit) = (sentence("cls_token", &[]), sentence("cls_token", &["Normalize"]));
        for (files, settings, pooling, normalize) in [
            (&[][..], &[][..], Mean, true),
            (&bare[..], &[], Cls, false),
            (&unit[..], &[], Cls, true),
            (&unit[..], &[("model.pooling", "last"), ("model.normalize", "no")], Last, false),
            (&bare[..], &[("model.normalize", "yes")], Cls, true),
            (&sentence("max_tokens", &[])[..], &[("model.pooling", "mean")], Mean, false),
        ] {
            let found = encoder_of(files, settings).unwrap();
            let pooling = FoundPooling::Served(pooling);
            assert_eq!((found.pooling, found.normalize, found.dimensions), (pooling, normalize, 32));
        }
    }

    #[test]
    fn what_is_not_served_is_kept_and_said_at_the_start() {
        let [max, dense] = [sentence("max_tokens", &[]), sentence("cls_token", &["Dense", "Normalize"])];
        let mode = "1_Pooling/config.json: the pooling mode is max_tokens";
        for (files, named) in [(&max, mode), (&dense, "modules.json: a module of the type Dense")] {
            let found = encoder_of(files, &[]).unwrap();
            let FoundPooling::Unserved(unserved) = found.pooling else { panic!("{named} is served") };
            assert!(unserved.to_string().contains(named), "{unserved}");
            let caution = caution_of(files, &[]).expect("it is said");
            assert!(caution.contains(named) && caution.contains("--pooling"), "{caution}");
            let caution = caution_of(files, &[("model.pooling", "mean")]).expect("it is said");
            assert!(caution.contains(named) && caution.contains("by mean"), "{caution}");
        }
        let overridden = encoder_of(&dense, &[("model.pooling", "mean")]).unwrap();
        assert_eq!((overridden.pooling, overridden.normalize), (FoundPooling::Served(Pooling::Mean), true));
        assert_eq!(caution_of(&sentence("cls_token", &[]), &[]), None);
    }

    /// The fixture reads 40 tokens.
    #[test]
    fn texts_that_would_be_cut_or_changed_elsewhere_are_told_and_served() {
        let [list, pooling] = sentence("cls_token", &[]);
        let texts = ("sentence_bert_config.json", json!({"max_seq_length": 39, "do_lower_case": true}));
        let files = [list, pooling, texts];
        let found = encoder_of(&files, &[]).unwrap();
        assert_eq!((found.unserved.len(), found.pooling), (2, FoundPooling::Served(Pooling::Cls)));
        let caution = caution_of(&files, &[]).expect("it is said");
        for part in ["do_lower_case is true", "max_seq_length is 39", "up to 40 tokens"] {
            assert!(caution.contains(part), "{caution}");
        }
    }

    #[test]
    fn a_mask_is_what_the_tokenizer_says_before_what_is_usual() {
        let named = [("tokenizer_config.json", json!({"mask_token": {"content": "<m>"}}))];
        assert_eq!(encoder_of(&named, &[]).unwrap().masks, ["<m>", "[MASK]", "<mask>"]);
        assert_eq!(encoder_of(&[], &[]).unwrap().masks, ["[MASK]", "<mask>"]);
    }

    #[test]
    fn a_decoder_needs_a_token_to_begin_with() {
        let settings = |value: Value| [("generation_config.json", value)];
        let decoder = |files: &[(&str, Value)]| of("m2m100", files, &[]);
        let start = |start, forced_bos| {
            Conventions::EncoderDecoder(DecoderConventions { start, forced_bos, roles: vec![] })
        };
        assert_eq!(decoder(&[]).unwrap(), start(2, None));
        assert_eq!(decoder(&settings(json!({"forced_bos_token_id": 6}))).unwrap(), start(2, Some(6)));
        for (wish, named) in [
            (json!({"decoder_start_token_id": 97}), "decoder_start_token_id 97"),
            (json!({"forced_bos_token_id": 1000}), "forced_bos_token_id 1000"),
        ] {
            let error = format!("{:#}", decoder(&settings(wish)).unwrap_err());
            assert!(error.contains(named) && error.contains("vocabulary of 97"), "{error}");
        }
        let fixture =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families/m2m100/config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(fixture).unwrap()).unwrap();
        for key in ["decoder_start_token_id", "bos_token_id"] {
            config.as_object_mut().unwrap().remove(key);
        }
        let error = format!("{:#}", decoder(&[("config.json", config)]).unwrap_err());
        assert!(
            error.contains("'decoder_start_token_id'") && error.contains("generation_config.json"),
            "{error}"
        );
    }
}
