//! Prompting defaults of a model beyond sampling, from its files, with the configuration overriding them.
//!
//! Invariant: each kind of model has what its endpoints need, and every token id is in the vocabulary.

use super::classifier;
use crate::config::ModelConfig;
use crate::decoding::DenseLayer;
use crate::formats::{PoolingConfig, Prompts, Similarity, UnsupportedSetting};
use crate::model::spec::Kind;
use crate::model::spec::classifier::ClassifierSpec;
use crate::model::{ModelSource, ModelSpec};
use crate::request::Pooling;
use anyhow::{Context, Result, ensure};

/// Prompting defaults, by kind of model.
#[derive(Clone, Debug, PartialEq)]
pub enum PromptingDefaults {
    /// A decoder-only model: continues a prompt, or embeds texts.
    Decoder(Option<EmbeddingDefaults>),
    /// An encoder-only model: computes embeddings, or fills masks.
    Encoder(EmbeddingDefaults),
    /// An encoder-decoder model: generates from an encoder input.
    EncoderDecoder(EncoderDecoderPrompting),
}

/// Defaults of a model that embeds texts, or fills masks.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddingDefaults {
    /// Length of the embedding vectors.
    pub dimensions: usize,
    /// Default pooling method. Requests that rely on it are refused if the model's files specify one that is
    /// not supported.
    pub pooling: PoolingConfig,
    /// Layers after pooling, unless a request chooses its own pooling.
    pub dense: Vec<DenseLayer>,
    /// Whether embeddings are L2-normalized by default.
    pub normalize: bool,
    pub prompts: Prompts,
    /// The function that compares embeddings.
    pub similarity: Similarity,
    /// Text preprocessing that the model's files specify and that is not supported.
    pub unsupported: Vec<UnsupportedSetting>,
    /// Candidate names of the mask token; the first that the tokenizer knows is used.
    pub mask_tokens: Vec<String>,
    /// The name of the padding token, if the model's files specify it.
    pub pad_token: Option<String>,
}

/// Defaults of an encoder-decoder model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncoderDecoderPrompting {
    /// The decoder start token.
    pub start_token: u32,
    /// The forced BOS token, which follows the start token unless a request says otherwise.
    pub forced_bos: Option<u32>,
    /// Names of special tokens, which are not language codes.
    pub special_tokens: Vec<String>,
}

/// Names of the mask token if the tokenizer's configuration specifies none.
const DEFAULT_MASK_TOKENS: [&str; 2] = ["[MASK]", "<mask>"];

const MASK_KEY: &str = "mask_token";
const PAD_KEY: &str = "pad_token";

impl PromptingDefaults {
    /// Determines the defaults of an opened model. Errors name the file and the key that would help.
    pub fn from_model(source: &ModelSource, config: &ModelConfig) -> Result<PromptingDefaults> {
        Ok(match source.spec.kind {
            Kind::Decoder if !embeds(source, config) => PromptingDefaults::Decoder(None),
            Kind::Decoder => PromptingDefaults::Decoder(Some(embedding_defaults(source, config)?)),
            Kind::Encoder => PromptingDefaults::Encoder(embedding_defaults(source, config)?),
            Kind::EncoderDecoder => PromptingDefaults::EncoderDecoder(encoder_decoder_defaults(source)?),
        })
    }

    /// Returns a warning about embedding settings in the model's files that are not supported, and what
    /// happens instead; `None` if all are supported.
    pub fn embedding_warning(source: &ModelSource, config: &ModelConfig) -> Option<String> {
        let instead = match config.pooling {
            Some(pooling) => format!("model.pooling overrides it: texts are pooled by {}", pooling.name()),
            None => {
                "embeddings are rejected unless a request or model.pooling (--pooling) specifies the pooling \
                     method"
                    .to_owned()
            }
        };
        let pooling = match &source.sentence.as_ref()?.pooling {
            PoolingConfig::Unsupported(unserved) => Some(format!("{unserved}; {instead}")),
            PoolingConfig::Supported(_) => None,
        };
        let texts = unsupported_text_settings(source).into_iter().map(|unserved| unserved.to_string());
        let warnings: Vec<String> = pooling.into_iter().chain(texts).collect();
        (!warnings.is_empty()).then(|| warnings.join("; "))
    }

    /// Returns the defaults of a model that embeds texts.
    pub fn embedding(&self) -> Option<&EmbeddingDefaults> {
        match self {
            PromptingDefaults::Encoder(defaults) | PromptingDefaults::Decoder(Some(defaults)) => {
                Some(defaults)
            }
            PromptingDefaults::Decoder(None) | PromptingDefaults::EncoderDecoder(_) => None,
        }
    }

    /// Returns the kind of model, in words.
    pub fn kind_name(&self) -> &'static str {
        match self {
            PromptingDefaults::Decoder(_) => "a decoder",
            PromptingDefaults::Encoder(_) => "an encoder",
            PromptingDefaults::EncoderDecoder(_) => "an encoder-decoder",
        }
    }
}

/// Returns whether a model embeds texts: an encoder, or a decoder whose files or configuration say how.
pub fn embeds(source: &ModelSource, config: &ModelConfig) -> bool {
    let spec = &source.spec;
    match spec.kind {
        Kind::Encoder => spec.classifier.is_none(),
        Kind::Decoder => source.sentence.is_some() || config.pooling.is_some() && spec.has_head(),
        Kind::EncoderDecoder => false,
    }
}

/// Defaults of a model that embeds texts.
fn embedding_defaults(source: &ModelSource, config: &ModelConfig) -> Result<EmbeddingDefaults> {
    ensure!(
        source.spec.kind == Kind::Encoder || config.pooling != Some(Pooling::Cls),
        "model.pooling is \"cls\", but {} is a decoder, whose first token knows nothing of the text",
        source.path.display()
    );
    let files = source.sentence.as_ref();
    let pooling = match (config.pooling, files.map(|files| &files.pooling)) {
        (Some(pooling), _) => PoolingConfig::Supported(pooling),
        (None, Some(pooling)) => pooling.clone(),
        (None, None) => PoolingConfig::Supported(Pooling::Mean),
    };
    let special_token = |key: &str| source.chat.special_tokens.get(key).cloned();
    let dense = match (files, source.folder()) {
        (Some(files), Some(folder)) => classifier::read_dense(&folder, &files.dense, source.spec.hidden)?,
        _ => Vec::new(),
    };
    Ok(EmbeddingDefaults {
        dimensions: dense.last().map_or(source.spec.hidden, |layer| layer.n),
        pooling,
        dense,
        prompts: files.map(|files| files.prompts.clone()).unwrap_or_default(),
        similarity: files.map(|files| files.similarity).unwrap_or_default(),
        normalize: config.normalize.or(files.map(|files| files.normalize)).unwrap_or(true),
        unsupported: unsupported_text_settings(source),
        mask_tokens: special_token(MASK_KEY)
            .into_iter()
            .chain(DEFAULT_MASK_TOKENS.map(str::to_owned))
            .collect(),
        pad_token: special_token(PAD_KEY),
    })
}

/// Text preprocessing that the model's files specify and that is not supported.
fn unsupported_text_settings(source: &ModelSource) -> Vec<UnsupportedSetting> {
    let texts = source.sentence.as_ref().and_then(|files| files.preprocessing.as_ref());
    texts.map(|texts| texts.unsupported(source.spec.context)).unwrap_or_default()
}

/// Defaults of an encoder-decoder model.
fn encoder_decoder_defaults(source: &ModelSource) -> Result<EncoderDecoderPrompting> {
    let path = source.path.display();
    let start = source.decoder_start.start.with_context(|| {
        format!(
            "{path}: the decoder start token is unknown: generation_config.json or config.json needs the key \
             'decoder_start_token_id'"
        )
    })?;
    for (key, id) in
        [("decoder_start_token_id", Some(start)), ("forced_bos_token_id", source.decoder_start.forced_bos)]
    {
        let vocab = source.spec.vocab;
        let is_known = id.is_none_or(|id| (id as usize) < vocab);
        ensure!(
            is_known,
            "{path}: {key} {} is not in the vocabulary of {vocab} tokens",
            id.unwrap_or_default()
        );
    }
    let special_tokens = source.chat.special_tokens.values().cloned().collect();
    Ok(EncoderDecoderPrompting {
        start_token: start,
        forced_bos: source.decoder_start.forced_bos,
        special_tokens,
    })
}

/// Returns the API endpoints that serve a model.
pub fn endpoints(source: &ModelSource, config: &ModelConfig) -> Vec<&'static str> {
    let spec = &source.spec;
    let from_head = match spec.kind {
        _ if !spec.has_head() => &[][..],
        Kind::Decoder => &["/v1/chat/completions", "/v1/completions"],
        Kind::EncoderDecoder => &["/v1/completions"],
        Kind::Encoder => &["/v1/fill-mask"],
    };
    let embeddings = embeds(source, config).then_some("/v1/embeddings");
    let of_texts = match &spec.classifier {
        Some(_) => classifier_endpoints(spec),
        None => SCORING.into_iter().filter(|_| embeddings.is_some()).collect(),
    };
    embeddings.into_iter().chain(from_head.iter().copied()).chain(of_texts).collect()
}

/// Endpoints that compare texts.
const SCORING: [&str; 2] = ["/v1/score", "/v1/rerank"];

/// Returns the endpoints that serve a model's classifier. One with a single label scores pairs of texts, too.
fn classifier_endpoints(spec: &ModelSpec) -> Vec<&'static str> {
    let scores_pairs = spec.classifier.as_ref().is_some_and(ClassifierSpec::scores_pairs);
    ["/v1/classify"].into_iter().chain(SCORING.into_iter().filter(|_| scores_pairs)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Overrides};
    use crate::model::ModelRef;
    use crate::testing::Scratch;
    use serde_json::{Value, json};
    use std::path::Path;

    /// Opens a family's fixture with additional `files`, and with `settings` of the configuration.
    fn open_fixture(
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

    fn defaults_of(
        family: &str,
        files: &[(&str, Value)],
        settings: &[(&'static str, &str)],
    ) -> Result<PromptingDefaults> {
        let (source, config) = open_fixture(family, files, settings)?;
        PromptingDefaults::from_model(&source, &config)
    }

    fn warning_of(files: &[(&str, Value)], settings: &[(&'static str, &str)]) -> Option<String> {
        let (source, config) = open_fixture("bert_gamma", files, settings).unwrap();
        PromptingDefaults::embedding_warning(&source, &config)
    }

    fn encoder_defaults_of(
        files: &[(&str, Value)],
        settings: &[(&'static str, &str)],
    ) -> Result<EmbeddingDefaults> {
        match defaults_of("bert_gamma", files, settings)? {
            PromptingDefaults::Encoder(prompting) => Ok(prompting),
            other => panic!("{other:?}"),
        }
    }

    /// The sentence-transformers files that specify a pooling mode, and `more` modules.
    fn sentence_files(mode: &str, more: &[&str]) -> [(&'static str, Value); 2] {
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
    fn pooling_is_from_the_configuration_else_the_files_else_mean() {
        use Pooling::{Cls, Last, Mean};
        let (bare, unit) = (sentence_files("cls_token", &[]), sentence_files("cls_token", &["Normalize"]));
        for (files, settings, pooling, normalize) in [
            (&[][..], &[][..], Mean, true),
            (&bare[..], &[], Cls, false),
            (&unit[..], &[], Cls, true),
            (&unit[..], &[("model.pooling", "last"), ("model.normalize", "no")], Last, false),
            (&bare[..], &[("model.normalize", "yes")], Cls, true),
            (&sentence_files("max_tokens", &[])[..], &[("model.pooling", "mean")], Mean, false),
        ] {
            let found = encoder_defaults_of(files, settings).unwrap();
            let pooling = PoolingConfig::Supported(pooling);
            assert_eq!((found.pooling, found.normalize, found.dimensions), (pooling, normalize, 32));
        }
    }

    #[test]
    fn unsupported_pooling_is_kept_and_warned_about() {
        let [max, dense] =
            [sentence_files("max_tokens", &[]), sentence_files("cls_token", &["CNN", "Normalize"])];
        let mode = "1_Pooling/config.json: the pooling mode is max_tokens";
        for (files, named) in [(&max, mode), (&dense, "modules.json: modules of type CNN")] {
            let found = encoder_defaults_of(files, &[]).unwrap();
            let PoolingConfig::Unsupported(unserved) = found.pooling else { panic!("{named} is served") };
            assert!(unserved.to_string().contains(named), "{unserved}");
            let warning = warning_of(files, &[]).expect("there is a warning");
            assert!(warning.contains(named) && warning.contains("--pooling"), "{warning}");
            let warning = warning_of(files, &[("model.pooling", "mean")]).expect("there is a warning");
            assert!(warning.contains(named) && warning.contains("by mean"), "{warning}");
        }
        let overridden = encoder_defaults_of(&dense, &[("model.pooling", "mean")]).unwrap();
        assert_eq!(
            (overridden.pooling, overridden.normalize),
            (PoolingConfig::Supported(Pooling::Mean), true)
        );
        assert_eq!(warning_of(&sentence_files("cls_token", &[]), &[]), None);
    }

    /// The fixture's context is 40 tokens.
    #[test]
    fn unsupported_text_settings_are_warned_about() {
        let [list, pooling] = sentence_files("cls_token", &[]);
        let texts = ("sentence_bert_config.json", json!({"max_seq_length": 39, "do_lower_case": true}));
        let files = [list, pooling, texts];
        let found = encoder_defaults_of(&files, &[]).unwrap();
        assert_eq!((found.unsupported.len(), found.pooling), (2, PoolingConfig::Supported(Pooling::Cls)));
        let warning = warning_of(&files, &[]).expect("there is a warning");
        for part in ["do_lower_case is true", "max_seq_length is 39", "up to 40 tokens"] {
            assert!(warning.contains(part), "{warning}");
        }
    }

    #[test]
    fn the_tokenizers_mask_token_comes_before_the_defaults() {
        let named = [("tokenizer_config.json", json!({"mask_token": {"content": "<m>"}}))];
        assert_eq!(encoder_defaults_of(&named, &[]).unwrap().mask_tokens, ["<m>", "[MASK]", "<mask>"]);
        assert_eq!(encoder_defaults_of(&[], &[]).unwrap().mask_tokens, ["[MASK]", "<mask>"]);
    }

    #[test]
    fn an_encoder_decoder_needs_a_start_token() {
        let settings = |value: Value| [("generation_config.json", value)];
        let decoder = |files: &[(&str, Value)]| defaults_of("m2m100", files, &[]);
        let start = |start, forced_bos| {
            PromptingDefaults::EncoderDecoder(EncoderDecoderPrompting {
                start_token: start,
                forced_bos,
                special_tokens: vec![],
            })
        };
        assert_eq!(decoder(&[]).unwrap(), start(2, None));
        assert_eq!(decoder(&settings(json!({"forced_bos_token_id": 6}))).unwrap(), start(2, Some(6)));
        for (settings_json, named) in [
            (json!({"decoder_start_token_id": 97}), "decoder_start_token_id 97"),
            (json!({"forced_bos_token_id": 1000}), "forced_bos_token_id 1000"),
        ] {
            let error = format!("{:#}", decoder(&settings(settings_json)).unwrap_err());
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
