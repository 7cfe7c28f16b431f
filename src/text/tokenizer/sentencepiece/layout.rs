//! Token ids and special tokens that a tokenizer class assigns to a sentencepiece model: the ids of its
//! pieces, the tokens after them, and the tokens around a text.
//!
//! Invariant: an unknown class changes nothing; a class that is known to change more than this module does is
//! rejected.

use super::vocabulary::{PieceKind, PieceVocabulary, VocabularyPiece};
use crate::formats::Folder;
use crate::text::tokenizer::byte_level::check_unique_ids;
use crate::text::tokenizer::class::TokenizerClass;
use crate::text::tokenizer::settings::TokenizerSettings;
use crate::text::tokenizer::vocab_json::VOCABULARY;
use crate::text::tokenizer::{SurroundingTokens, json as tokenizer_json};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::collections::HashMap;
use tokenizers::{AddedToken, NormalizerWrapper};

/// Unsupported classes, which change texts or ids in their own ways.
const REFUSED: [&str; 19] = [
    "BarthezTokenizer",
    "BertGenerationTokenizer",
    "BertJapaneseTokenizer",
    "BigBirdTokenizer",
    "CpmTokenizer",
    "ErnieMTokenizer",
    "FNetTokenizer",
    "GPTSw3Tokenizer",
    "MarianTokenizer",
    "PLBartTokenizer",
    "PegasusTokenizer",
    "RemBertTokenizer",
    "SeamlessM4TTokenizer",
    "Speech2TextTokenizer",
    "SpeechT5Tokenizer",
    "UdopTokenizer",
    "XLMProphetNetTokenizer",
    "XLMTokenizer",
    "XLNetTokenizer",
];

/// Maximum number of extra tokens in the settings.
const EXTRA_MAX: u32 = 1 << 16;

/// Arrangement of a model's pieces by a class.
#[derive(Debug, Default)]
pub struct PieceLayout {
    order: IdOrder,
    /// Tokens appended after the pieces and after the tokens that the settings add.
    pub appended: Vec<AddedToken>,
    /// Changes a text before the model's own normalization.
    pub preparation: Option<NormalizerWrapper>,
}

/// Ids of the pieces.
#[derive(Debug, Default)]
enum IdOrder {
    /// Their positions in the file.
    #[default]
    File,
    /// As in fairseq: tokens of its own, in place of the first pieces.
    Replaced(FirstTokens),
    /// The ids of another file; pieces that it lacks become the unknown token.
    Mapped(HashMap<String, u32>),
    /// The ids of another file, where most tokens that are not pieces are text of another language.
    Shared(HashMap<String, u32>),
}

/// Tokens with the first ids, and how many pieces they replace.
#[derive(Debug)]
struct FirstTokens {
    names: &'static [&'static str],
    replaced: usize,
}

/// First tokens of fairseq's vocabularies.
const FAIRSEQ: FirstTokens = FirstTokens { names: &["<s>", "<pad>", "</s>", "<unk>"], replaced: 3 };

/// First tokens of CamemBERT's vocabulary. The pieces that are called `<s>` and `</s>` come after them.
const CAMEMBERT: FirstTokens =
    FirstTokens { names: &["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED"], replaced: 1 };

impl PieceLayout {
    /// Returns the layout of a class. Fails if the class is unsupported.
    pub fn for_class(
        class: &TokenizerClass,
        settings: &TokenizerSettings,
        folder: &Folder,
    ) -> Result<PieceLayout> {
        let fairseq =
            |appended| PieceLayout { order: IdOrder::Replaced(FAIRSEQ), appended, preparation: None };
        let mask = || special_token("<mask>".to_owned());
        Ok(match class {
            TokenizerClass::Llama => PieceLayout::default(),
            TokenizerClass::Other(name) if !REFUSED.contains(&name.as_str()) => PieceLayout::default(),
            TokenizerClass::T5 => {
                let extra = settings.number("extra_ids")?.unwrap_or(100);
                ensure!(extra <= EXTRA_MAX, "extra_ids is {extra}: at most {EXTRA_MAX} are supported");
                let appended = (0..extra).rev().map(|i| special_token(format!("<extra_id_{i}>")));
                PieceLayout { appended: appended.collect(), ..PieceLayout::default() }
            }
            TokenizerClass::ChatGlm => {
                let names = ["[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"];
                let appended = names.map(|name| special_token(name.to_owned())).to_vec();
                PieceLayout { appended, ..PieceLayout::default() }
            }
            TokenizerClass::XlmRoberta
            | TokenizerClass::MBart
            | TokenizerClass::MBart50
            | TokenizerClass::Nllb => fairseq(vec![mask()]),
            TokenizerClass::Xglm => {
                fairseq((0..7).map(|i| special_token(format!("<madeupword{i}>"))).collect())
            }
            TokenizerClass::Camembert => {
                PieceLayout { order: IdOrder::Replaced(CAMEMBERT), ..fairseq(vec![mask()]) }
            }
            TokenizerClass::Albert => {
                PieceLayout { preparation: Some(plain_letters(settings)?), ..PieceLayout::default() }
            }
            TokenizerClass::DebertaV2 => {
                for key in ["do_lower_case", "split_by_punct"] {
                    ensure!(settings.flag(key)? != Some(true), "{key} is true, which is not supported");
                }
                let mask = special_token("[MASK]".to_owned());
                PieceLayout { appended: vec![mask], ..PieceLayout::default() }
            }
            TokenizerClass::M2m100 => {
                PieceLayout { order: IdOrder::Mapped(read_id_map(folder)?), ..PieceLayout::default() }
            }
            TokenizerClass::Gpt2
            | TokenizerClass::Roberta
            | TokenizerClass::Qwen2
            | TokenizerClass::Qwen
            | TokenizerClass::Bert
            | TokenizerClass::Other(_) => {
                bail!("{class} cannot be built from this file: it needs a {}", tokenizer_json::FILE)
            }
        })
    }

    /// Returns the layout of pieces with the ids of a vocabulary that other texts share.
    pub fn shared(ids: HashMap<String, u32>) -> PieceLayout {
        PieceLayout { order: IdOrder::Shared(ids), ..PieceLayout::default() }
    }

    /// Returns the vocabulary that other texts share, by which all tokens have their ids.
    pub fn shared_ids(&self) -> Option<&HashMap<String, u32>> {
        match &self.order {
            IdOrder::Shared(ids) => Some(ids),
            IdOrder::File | IdOrder::Replaced(_) | IdOrder::Mapped(_) => None,
        }
    }

    /// Assigns the class's ids to the pieces.
    pub fn assign_ids(&self, vocabulary: PieceVocabulary) -> Result<PieceVocabulary> {
        let pieces = match &self.order {
            IdOrder::File => vocabulary.pieces,
            IdOrder::Replaced(first) => replaced_ids(vocabulary.pieces, first)?,
            IdOrder::Mapped(ids) => mapped_ids(vocabulary.pieces, ids, |_| PieceKind::Control)?,
            IdOrder::Shared(ids) => mapped_ids(vocabulary.pieces, ids, kind_of_other)?,
        };
        Ok(PieceVocabulary { pieces, ..vocabulary })
    }

    /// Returns the special tokens around a text.
    pub fn surrounding_tokens(
        &self,
        class: &TokenizerClass,
        settings: &TokenizerSettings,
        [bos, eos]: [Option<u32>; 2],
        id: impl Fn(&str) -> Option<u32>,
    ) -> Result<SurroundingTokens> {
        let needed = |name: &str| id(name).with_context(|| format!("it has no token '{name}'"));
        let around = |before: Vec<u32>, after: Vec<u32>| SurroundingTokens {
            before,
            after,
            ..SurroundingTokens::default()
        };
        let end = || eos.context("it has no EOS token");
        let language = |usual| needed(&language_token(class, settings, usual)?);
        Ok(match class {
            TokenizerClass::T5 => around(vec![], vec![end()?]),
            TokenizerClass::XlmRoberta | TokenizerClass::Camembert => SurroundingTokens {
                between: vec![needed("</s>")?],
                ..around(vec![needed("<s>")?], vec![needed("</s>")?])
            },
            TokenizerClass::DebertaV2 | TokenizerClass::Albert => {
                around(vec![needed("[CLS]")?], vec![needed("[SEP]")?])
            }
            TokenizerClass::Xglm => around(vec![end()?], vec![]),
            TokenizerClass::ChatGlm => around(vec![needed("[gMASK]")?, needed("sop")?], vec![]),
            TokenizerClass::MBart => around(vec![], vec![end()?, language("en_XX")?]),
            TokenizerClass::MBart50 => around(vec![language("en_XX")?], vec![end()?]),
            TokenizerClass::M2m100 => around(vec![language("en")?], vec![end()?]),
            TokenizerClass::Nllb if settings.flag("legacy_behaviour")? == Some(true) => {
                around(vec![], vec![end()?, language("eng_Latn")?])
            }
            TokenizerClass::Nllb => around(vec![language("eng_Latn")?], vec![end()?]),
            _ => {
                let add_bos = settings.flag("add_bos_token")?.unwrap_or(true);
                let add_eos = settings.flag("add_eos_token")?.unwrap_or(false);
                SurroundingTokens::new(bos.filter(|_| add_bos), eos.filter(|_| add_eos))
            }
        })
    }
}

fn special_token(name: String) -> AddedToken {
    AddedToken::from(name, true)
}

/// Returns a normalizer that makes all space alike, and letters lower and without accents unless the settings
/// keep these.
fn plain_letters(settings: &TokenizerSettings) -> Result<NormalizerWrapper> {
    let replace =
        |pattern: Value, content: &str| json!({ "type": "Replace", "pattern": pattern, "content": content });
    let quote = |written: &str| replace(json!({ "String": written }), "\"");
    let mut stages = vec![quote("``"), quote("''")];
    if settings.flag("keep_accents")? != Some(true) {
        stages.extend([json!({ "type": "NFKD" }), json!({ "type": "StripAccents" })]);
    }
    if settings.flag("do_lower_case")? != Some(false) {
        stages.push(json!({ "type": "Lowercase" }));
    }
    stages.push(replace(json!({ "Regex": r"\s+" }), " "));
    Ok(serde_json::from_value(json!({ "type": "Sequence", "normalizers": stages }))?)
}

/// Returns the name of the language token.
fn language_token(class: &TokenizerClass, settings: &TokenizerSettings, usual: &str) -> Result<String> {
    let language = settings.text("src_lang")?.unwrap_or(usual);
    Ok(match class {
        TokenizerClass::M2m100 => format!("__{language}__"),
        _ => language.to_owned(),
    })
}

/// Reads the ids of pieces from `vocab.json`.
fn read_id_map(folder: &Folder) -> Result<HashMap<String, u32>> {
    let content = folder.read_required(VOCABULARY)?;
    let read = || {
        let ids: HashMap<String, u32> = serde_json::from_slice(&content)?;
        check_unique_ids(&ids)?;
        anyhow::Ok(ids)
    };
    read().with_context(|| folder.file(VOCABULARY).display().to_string())
}

/// Assigns the ids after the first tokens, which replace some pieces, to the others.
fn replaced_ids(pieces: Vec<VocabularyPiece>, first: &FirstTokens) -> Result<Vec<VocabularyPiece>> {
    let FirstTokens { names, replaced } = *first;
    let kinds: Vec<PieceKind> = pieces.iter().take(3).map(|piece| piece.kind).collect();
    ensure!(
        kinds == [PieceKind::Unknown, PieceKind::Control, PieceKind::Control],
        "its first pieces must be the unknown token and two control tokens"
    );
    let first = names.iter().zip(0..).map(|(text, id)| {
        let kind = if *text == "<unk>" { PieceKind::Unknown } else { PieceKind::Control };
        VocabularyPiece { id, text: (*text).to_owned(), score: 0.0, kind }
    });
    let moved = (names.len() - replaced) as u32;
    let others = pieces.into_iter().skip(replaced);
    Ok(first.chain(others.map(|piece| VocabularyPiece { id: piece.id + moved, ..piece })).collect())
}

/// Returns the kind of a token that is not a piece: a control token by its form, such as `>>fra<<`, `<pad>`,
/// `__en__` or `eng_Latn`, or else text.
fn kind_of_other(token: &str) -> PieceKind {
    let is_between = |begin: &str, end: &str| token.starts_with(begin) && token.ends_with(end);
    let is_code = token.split_once('_').is_some_and(|(language, script)| {
        (2..4).contains(&language.len())
            && (2..5).contains(&script.len())
            && language.bytes().all(|byte| byte.is_ascii_lowercase())
            && script.bytes().all(|byte| byte.is_ascii_alphabetic())
            && script.starts_with(|first: char| first.is_ascii_uppercase())
    });
    let is_control = is_between(">>", "<<") || is_between("<", ">") || is_between("__", "__") || is_code;
    if is_control { PieceKind::Control } else { PieceKind::Foreign }
}

/// Assigns the ids of a vocabulary. Its tokens that are not pieces get the kind that `other` returns.
fn mapped_ids(
    pieces: Vec<VocabularyPiece>,
    ids: &HashMap<String, u32>,
    other: impl Fn(&str) -> PieceKind,
) -> Result<Vec<VocabularyPiece>> {
    let unknown = pieces.iter().find(|piece| piece.kind == PieceKind::Unknown);
    let unknown = unknown.and_then(|piece| ids.get(&piece.text));
    let unknown = *unknown.context("the vocabulary has no unknown token")?;
    let mut unseen: HashMap<&str, u32> = ids.iter().map(|(text, id)| (text.as_str(), *id)).collect();
    let mut mapped = Vec::with_capacity(ids.len());
    for piece in pieces {
        let is_listed = unseen.remove(piece.text.as_str()).is_some();
        if !is_listed && piece.kind == PieceKind::Control {
            continue; // The model has no such token.
        }
        mapped.push(VocabularyPiece { id: ids.get(&piece.text).copied().unwrap_or(unknown), ..piece });
    }
    let unseen = unseen.into_iter().map(|(text, id)| VocabularyPiece {
        id,
        text: text.to_owned(),
        score: 0.0,
        kind: other(text),
    });
    mapped.extend(unseen);
    Ok(mapped)
}
