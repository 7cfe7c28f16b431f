//! Sentencepiece models: `tokenizer.model`, `spiece.model`, `sentencepiece.bpe.model` and `spm.model`.
//!
//! Texts are split exactly as by the sentencepiece library, including ties. The tokenizer class determines
//! the special tokens around a text and the ids of the pieces.
//!
//! Invariant: a class that does more to a text than this module is rejected.

pub mod normalizer;

pub mod vocabulary;

pub mod charsmap;

mod layout;
mod proto;

use super::added::{AddedTokenSpec, resolve};
use super::class::TokenizerClass;
use super::parts::{TokenizerParts, find_token_id};
use super::settings::TokenizerSettings;
use super::{DecodeMethod, SurroundingTokens, Tokenizer, VOCAB_MAX};
use crate::formats::Folder;
use crate::formats::ctranslate2::vocabulary::Vocabulary;
use anyhow::{Context, Result, bail, ensure};
use layout::PieceLayout;
use normalizer::{SpaceHandling, SpacePrefix, SpaceSpelling};
use prost::Message;
use proto::{ModelProto, PieceProto};
use std::collections::{HashMap, HashSet};
use vocabulary::{PieceKind, PieceVocabulary, SplitAlgorithm, VocabularyPiece};

/// Names of sentencepiece model files, in order of precedence.
pub const FILES: [&str; 4] = ["tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model"];

/// Content of a model file.
struct ModelFile {
    vocabulary: PieceVocabulary,
    bos: Option<u32>,
    eos: Option<u32>,
}

/// Reads the tokenizer of a folder with this model file.
pub fn read(
    folder: &Folder,
    file: &str,
    content: &[u8],
    mut settings: TokenizerSettings,
) -> Result<Tokenizer> {
    let name = || folder.file(file).display().to_string();
    let model = ModelFile::read(content).with_context(name)?;
    let class = settings.class_or(TokenizerClass::Llama);
    let layout = PieceLayout::for_class(&class, &settings, folder).with_context(name)?;
    tokenizer_parts(file, &settings, model, &class, layout).and_then(TokenizerParts::build).with_context(name)
}

/// Reads a tokenizer whose tokens have the ids of a vocabulary. At least half of the pieces must be in it.
/// The special tokens around a text are those of the class, if the settings name one.
pub fn read_with_ids(content: &[u8], settings: &TokenizerSettings, of: &Vocabulary) -> Result<Tokenizer> {
    let ids: HashMap<String, u32> = of.ids().into_iter().map(|(token, id)| (token.to_owned(), id)).collect();
    let model = ModelFile::read(content)?;
    let missing = model.vocabulary.pieces.iter().filter(|piece| !ids.contains_key(&piece.text));
    let (first, count) = (missing.clone().next(), missing.count());
    if let Some(first) = first.filter(|_| count * 2 > model.vocabulary.pieces.len()) {
        bail!("the model's vocabulary has no token '{}', nor {} other pieces of it", first.text, count - 1);
    }
    let layout = PieceLayout::shared(ids);
    let class = settings.class().filter(|class| !matches!(class, TokenizerClass::Llama)).cloned();
    let none = TokenizerClass::Other(String::new());
    let class_or_none = class.as_ref().unwrap_or(&none);
    let mut parts = tokenizer_parts(&of.file, settings, model, class_or_none, layout)?;
    if matches!(class, None | Some(TokenizerClass::Other(_))) {
        parts.surrounding = SurroundingTokens::default();
    }
    parts.build()
}

impl ModelFile {
    fn read(content: &[u8]) -> Result<ModelFile> {
        let proto = ModelProto::decode(content).context("it is not a sentencepiece model")?;
        let trainer = proto.trainer_spec.unwrap_or_default();
        let spec = proto.normalizer_spec.unwrap_or_default();
        let cutting = match trainer.model_type.unwrap_or(1) {
            1 => SplitAlgorithm::Unigram,
            2 => SplitAlgorithm::Bpe,
            other => bail!("its model type {other} is not supported (supported: 1 (unigram), 2 (BPE))"),
        };
        ensure!(
            trainer.treat_whitespace_as_suffix != Some(true),
            "treat_whitespace_as_suffix is not supported"
        );
        let is_on = |switch: Option<bool>| switch.unwrap_or(true);
        let pieces = (0u32..)
            .zip(proto.pieces)
            .map(|(id, piece)| read_piece(id, piece).with_context(|| format!("piece {id}")));
        let vocabulary = PieceVocabulary {
            pieces: pieces.collect::<Result<_>>()?,
            algorithm: cutting,
            charsmap: spec.precompiled_charsmap.unwrap_or_default(),
            prefix: if is_on(spec.add_dummy_prefix) { SpacePrefix::Always } else { SpacePrefix::Never },
            spaces: if is_on(spec.remove_extra_whitespaces) {
                SpaceHandling::Merge
            } else {
                SpaceHandling::Keep
            },
            spelling: match is_on(spec.escape_whitespaces) {
                true => SpaceSpelling::Symbol,
                false => SpaceSpelling::Plain,
            },
        };
        let id = |id: Option<i32>, otherwise| u32::try_from(id.unwrap_or(otherwise)).ok();
        let is_there = |id: &u32| (*id as usize) < vocabulary.pieces.len();
        let bos = id(trainer.bos_id, 1).filter(is_there);
        let eos = id(trainer.eos_id, 2).filter(is_there);
        ensure!(!vocabulary.pieces.is_empty(), "it has no pieces");
        Ok(ModelFile { bos, eos, vocabulary })
    }
}

fn read_piece(id: u32, piece: PieceProto) -> Result<VocabularyPiece> {
    let kind = PieceKind::from_number(piece.kind.unwrap_or(1).into())?;
    Ok(VocabularyPiece {
        id,
        text: piece.piece.unwrap_or_default(),
        score: piece.score.unwrap_or_default(),
        kind,
    })
}

fn tokenizer_parts(
    file: &str,
    settings: &TokenizerSettings,
    model: ModelFile,
    class: &TokenizerClass,
    layout: PieceLayout,
) -> Result<TokenizerParts> {
    let name = |id: Option<u32>| Some(model.vocabulary.pieces.get(id? as usize)?.text.clone());
    let (bos, eos) = (name(model.bos), name(model.eos));
    let mut vocabulary = layout.assign_ids(model.vocabulary)?;
    vocabulary.check()?;
    vocabulary.prefix = space_prefix(settings, vocabulary.prefix)?;
    let by_text: HashMap<&str, u32> =
        vocabulary.pieces.iter().map(|piece| (piece.text.as_str(), piece.id)).collect();
    // Pieces that a shared vocabulary lacks have the id of the unknown token.
    let find = |token: &str| match layout.shared_ids() {
        Some(ids) => ids.get(token).copied(),
        None => by_text.get(token).copied(),
    };
    let token_bytes = vocabulary.token_bytes();
    let len = token_bytes.last_key_value().map_or(0, |(largest, _)| largest + 1);
    let added = resolve(added_tokens(settings, &vocabulary, &layout)?, len, find)?;
    let id = |name: &str| find_token_id(&added, find, name);
    let role = |role, own: Option<&str>| {
        // A shared vocabulary need not have the tokens that the settings name.
        let absent = layout.shared_ids().map(|_| VOCAB_MAX);
        let named = settings.token_id(role, file, |name| id(name).or(absent))?;
        anyhow::Ok(named.filter(|id| *id < VOCAB_MAX).or_else(|| id(own?)))
    };
    let (bos, eos) = (role("bos_token", bos.as_deref())?, role("eos_token", eos.as_deref())?);
    let around = layout.surrounding_tokens(class, settings, [bos, eos], id)?;
    let joining = DecodeMethod::Bytes { leading_spaces: vocabulary.leading_spaces() };
    let mut stages = vocabulary.pipeline_parts()?;
    if let Some(preparation) = layout.preparation {
        stages.normalizer = stages.normalizer.map(|own| own.after(preparation));
    }
    Ok(TokenizerParts {
        stages,
        decode_method: joining,
        pieces: token_bytes,
        added,
        bos,
        eos,
        surrounding: around,
    })
}

/// Collects the added tokens: those of the settings, the model's special tokens unless the settings have
/// others at their ids, and those of the class. Those of the settings have the ids of a shared vocabulary, if
/// it has them.
fn added_tokens(
    settings: &TokenizerSettings,
    vocabulary: &PieceVocabulary,
    layout: &PieceLayout,
) -> Result<Vec<AddedTokenSpec>> {
    let mut added = settings.added()?;
    if layout.shared_ids().is_some() {
        added = added.into_iter().map(AddedTokenSpec::looked_up).collect();
    }
    let taken: HashSet<u32> = added.iter().filter_map(AddedTokenSpec::id).collect();
    let own = vocabulary.special_tokens().filter(|(id, _)| !taken.contains(id));
    added.extend(own.map(|(id, token)| AddedTokenSpec::with_id(id, token)));
    added.extend(layout.appended.iter().cloned().map(AddedTokenSpec::appended));
    Ok(added)
}

/// Determines where a space is added: the model's setting `own`, which the folder's settings may override.
fn space_prefix(settings: &TokenizerSettings, own: SpacePrefix) -> Result<SpacePrefix> {
    let legacy = settings.flag("legacy")?.unwrap_or(true);
    Ok(match (settings.flag("add_prefix_space")?, own) {
        (Some(false), _) | (None, SpacePrefix::Never) => SpacePrefix::Never,
        _ if legacy => SpacePrefix::Always,
        _ => SpacePrefix::First,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::{NormalizerSpec, TrainerSpec};

    fn piece(text: &str, score: f32, kind: i32) -> PieceProto {
        PieceProto { piece: Some(text.to_owned()), score: Some(score), kind: Some(kind) }
    }

    fn good() -> ModelProto {
        ModelProto {
            pieces: vec![
                piece("<unk>", 0.0, 2),
                piece("<s>", 0.0, 3),
                piece("</s>", 0.0, 3),
                piece("\u{2581}a", -1.0, 1),
            ],
            trainer_spec: Some(TrainerSpec::default()),
            normalizer_spec: Some(NormalizerSpec::default()),
        }
    }

    /// Returns the error for a folder with this model.
    fn refusal(model: &ModelProto, config: &str) -> String {
        let scratch = crate::testing::Scratch::new();
        scratch.write("spiece.model", &model.encode_to_vec());
        scratch.write("tokenizer_config.json", config.as_bytes());
        match Tokenizer::from_folder(&scratch.folder()) {
            Ok(_) => "it was read".to_owned(),
            Err(error) => format!("{error:#}"),
        }
    }

    #[test]
    fn defaults_are_those_of_the_format() {
        let model = ModelFile::read(&good().encode_to_vec()).unwrap();
        assert_eq!((model.bos, model.eos), (Some(1), Some(2)));
        let PieceVocabulary { algorithm: cutting, prefix, spaces, spelling, .. } = model.vocabulary;
        assert_eq!(
            (cutting, prefix, spaces),
            (SplitAlgorithm::Unigram, SpacePrefix::Always, SpaceHandling::Merge)
        );
        assert_eq!(spelling, SpaceSpelling::Symbol);
        assert_eq!(refusal(&good(), "{}"), "it was read");
    }

    #[test]
    fn invalid_models_are_rejected_with_the_piece() {
        let with = |change: &dyn Fn(&mut ModelProto)| {
            let mut model = good();
            change(&mut model);
            refusal(&model, "{}")
        };
        type Change<'a> = &'a dyn Fn(&mut ModelProto);
        let cases: [(Change, &str); 11] = [
            (&|m| m.pieces[3].score = Some(f32::NAN), "spiece.model: piece 3: its score is NaN"),
            (&|m| m.pieces[3].score = Some(f32::INFINITY), "piece 3: its score is inf"),
            (&|m| m.pieces[3].piece = None, "piece 3: it is empty"),
            (&|m| m.pieces[3].piece = Some("x".repeat(8000)), "piece 3: it has 8000 bytes"),
            (&|m| m.pieces[3].kind = Some(7), "piece 3: its type 7 is unknown"),
            (&|m| m.pieces.push(piece("\u{2581}a", 0.0, 1)), "pieces 3 and 4 are both '\u{2581}a'"),
            (&|m| m.pieces.push(piece("<0x41>", 0.0, 6)), "it has pieces for bytes, but none for 0x00"),
            (&|m| m.pieces[0].kind = Some(1), "it has no unknown piece"),
            (&|m| m.pieces.clear(), "it has no pieces"),
            (
                &|m| m.trainer_spec.as_mut().unwrap().model_type = Some(3),
                "its model type 3 is not supported (supported: 1 (unigram), 2 (BPE))",
            ),
            (
                &|m| m.trainer_spec.as_mut().unwrap().treat_whitespace_as_suffix = Some(true),
                "treat_whitespace_as_suffix is not supported",
            ),
        ];
        for (change, reason) in cases {
            assert!(with(change).contains(reason), "{}\nexpected: {reason}", with(change));
        }
    }

    #[test]
    fn lengths_beyond_the_file_are_rejected() {
        // A piece, the trainer spec and the normalizer spec of 2^63 - 1 bytes each, and nested fields of that
        // length.
        let length = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f];
        for before in [&[0x0a][..], &[0x12], &[0x1a], &[0x0a, 0x0a, 0x0a], &[0x1a, 0x0a, 0x12]] {
            let error = format!("{:#}", ModelFile::read(&[before, &length].concat()).err().unwrap());
            assert!(error.contains("it is not a sentencepiece model"), "{error}");
        }
    }

    #[test]
    fn unsupported_classes_and_missing_special_tokens_are_rejected() {
        let cases = [
            (
                r#"{"tokenizer_class": "BigBirdTokenizerFast"}"#,
                "BigBirdTokenizer cannot be built from this file",
            ),
            (r#"{"tokenizer_class": "GPT2Tokenizer"}"#, "GPT2Tokenizer cannot be built from this file"),
            (r#"{"tokenizer_class": "NllbTokenizer"}"#, "it has no token 'eng_Latn'"),
            (r#"{"tokenizer_class": "M2M100Tokenizer"}"#, "vocab.json: no such file"),
            (
                r#"{"tokenizer_class": "T5Tokenizer", "extra_ids": 4294967295}"#,
                "extra_ids is 4294967295: at most",
            ),
        ];
        for (config, reason) in cases {
            let error = refusal(&good(), config);
            assert!(error.contains(reason), "{error}\nexpected: {reason}");
        }
        let mut bare = good();
        bare.pieces.swap(0, 1);
        let error = refusal(&bare, r#"{"tokenizer_class": "XLMRobertaTokenizer"}"#);
        assert!(
            error.contains("its first pieces must be the unknown token and two control tokens"),
            "{error}"
        );
    }
}
