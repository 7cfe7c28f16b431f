//! Token ids and special tokens that a tokenizer class assigns to a sentencepiece model: the ids of its
//! pieces, the tokens after them, and the tokens around a text.
//!
//! Invariant: an unknown class changes nothing; a class that is known to change more than this module does is
//! rejected.

use super::pieces::{Piece, PieceKind, Vocabulary};
use crate::formats::Folder;
use crate::text::tokenizer::byte_level::different_ids;
use crate::text::tokenizer::class::Class;
use crate::text::tokenizer::settings::Settings;
use crate::text::tokenizer::vocab_json::VOCABULARY;
use crate::text::tokenizer::{Around, json};
use anyhow::{Context, Result, bail, ensure};
use std::collections::HashMap;
use tokenizers::AddedToken;

/// Unsupported classes, which change texts or ids in their own ways.
const REFUSED: [&str; 22] = [
    "AlbertTokenizer",
    "BarthezTokenizer",
    "BertGenerationTokenizer",
    "BertJapaneseTokenizer",
    "BigBirdTokenizer",
    "CamembertTokenizer",
    "CpmTokenizer",
    "DebertaV2Tokenizer",
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
pub struct Layout {
    order: Order,
    /// Tokens appended after the pieces and after the tokens that the settings add.
    pub appended: Vec<AddedToken>,
}

/// Ids of the pieces.
#[derive(Debug, Default)]
enum Order {
    /// Their positions in the file.
    #[default]
    File,
    /// As in fairseq: the first three in another order, and one more among them.
    Fairseq,
    /// Those of another file; pieces that it lacks become the unknown token.
    Mapped(HashMap<String, u32>),
}

impl Layout {
    /// Returns the layout of a class. Fails if the class is unsupported.
    pub fn of(class: &Class, settings: &Settings, folder: &Folder) -> Result<Layout> {
        let fairseq = |appended| Layout { order: Order::Fairseq, appended };
        let mask = || special("<mask>".to_owned());
        Ok(match class {
            Class::Llama => Layout::default(),
            Class::Other(name) if !REFUSED.contains(&name.as_str()) => Layout::default(),
            Class::T5 => {
                let extra = settings.number("extra_ids")?.unwrap_or(100);
                ensure!(extra <= EXTRA_MAX, "extra_ids is {extra}: at most {EXTRA_MAX} are supported");
                let appended = (0..extra).rev().map(|i| special(format!("<extra_id_{i}>")));
                Layout { order: Order::File, appended: appended.collect() }
            }
            Class::ChatGlm => {
                let names = ["[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"];
                Layout { order: Order::File, appended: names.map(|name| special(name.to_owned())).to_vec() }
            }
            Class::XlmRoberta | Class::MBart | Class::MBart50 | Class::Nllb => fairseq(vec![mask()]),
            Class::Xglm => fairseq((0..7).map(|i| special(format!("<madeupword{i}>"))).collect()),
            Class::M2m100 => Layout { order: Order::Mapped(map(folder)?), appended: Vec::new() },
            Class::Gpt2 | Class::Roberta | Class::Qwen2 | Class::Qwen | Class::Bert | Class::Other(_) => {
                bail!("{class} cannot be built from this file: it needs a {}", json::FILE)
            }
        })
    }

    /// Assigns the class's ids to the pieces.
    pub fn arranged(&self, vocabulary: Vocabulary) -> Result<Vocabulary> {
        let pieces = match &self.order {
            Order::File => vocabulary.pieces,
            Order::Fairseq => fairseq(vocabulary.pieces)?,
            Order::Mapped(ids) => mapped(vocabulary.pieces, ids)?,
        };
        Ok(Vocabulary { pieces, ..vocabulary })
    }

    /// Returns the special tokens around a text.
    pub fn around(
        &self,
        class: &Class,
        settings: &Settings,
        [bos, eos]: [Option<u32>; 2],
        id: impl Fn(&str) -> Option<u32>,
    ) -> Result<Around> {
        let needed = |name: &str| id(name).with_context(|| format!("it has no token '{name}'"));
        let around = |before: Vec<u32>, after: Vec<u32>| Around { before, after, ..Around::default() };
        let end = || eos.context("it has no EOS token");
        let language = |usual| needed(&language(class, settings, usual)?);
        Ok(match class {
            Class::T5 => around(vec![], vec![end()?]),
            Class::XlmRoberta => around(vec![needed("<s>")?], vec![needed("</s>")?]),
            Class::Xglm => around(vec![end()?], vec![]),
            Class::ChatGlm => around(vec![needed("[gMASK]")?, needed("sop")?], vec![]),
            Class::MBart => around(vec![], vec![end()?, language("en_XX")?]),
            Class::MBart50 => around(vec![language("en_XX")?], vec![end()?]),
            Class::M2m100 => around(vec![language("en")?], vec![end()?]),
            Class::Nllb if settings.flag("legacy_behaviour")? == Some(true) => {
                around(vec![], vec![end()?, language("eng_Latn")?])
            }
            Class::Nllb => around(vec![language("eng_Latn")?], vec![end()?]),
            _ => {
                let add_bos = settings.flag("add_bos_token")?.unwrap_or(true);
                let add_eos = settings.flag("add_eos_token")?.unwrap_or(false);
                Around::of(bos.filter(|_| add_bos), eos.filter(|_| add_eos))
            }
        })
    }
}

fn special(name: String) -> AddedToken {
    AddedToken::from(name, true)
}

/// Returns the name of the language token.
fn language(class: &Class, settings: &Settings, usual: &str) -> Result<String> {
    let language = settings.text("src_lang")?.unwrap_or(usual);
    Ok(match class {
        Class::M2m100 => format!("__{language}__"),
        _ => language.to_owned(),
    })
}

/// Reads the ids of pieces from `vocab.json`.
fn map(folder: &Folder) -> Result<HashMap<String, u32>> {
    let content = folder.read_needed(VOCABULARY)?;
    let read = || {
        let ids: HashMap<String, u32> = serde_json::from_slice(&content)?;
        different_ids(&ids)?;
        anyhow::Ok(ids)
    };
    read().with_context(|| folder.file(VOCABULARY).display().to_string())
}

/// Assigns fairseq's ids.
fn fairseq(pieces: Vec<Piece>) -> Result<Vec<Piece>> {
    let kinds: Vec<PieceKind> = pieces.iter().take(3).map(|piece| piece.kind).collect();
    ensure!(
        kinds == [PieceKind::Unknown, PieceKind::Control, PieceKind::Control],
        "its first pieces must be the unknown token and two control tokens"
    );
    let first = ["<s>", "<pad>", "</s>", "<unk>"].into_iter().zip(0..).map(|(text, id)| {
        let kind = if text == "<unk>" { PieceKind::Unknown } else { PieceKind::Control };
        Piece { id, text: text.to_owned(), score: 0.0, kind }
    });
    Ok(first.chain(pieces.into_iter().skip(3).map(|piece| Piece { id: piece.id + 1, ..piece })).collect())
}

/// Assigns the ids of `vocab.json`; its tokens that are not pieces become control tokens.
fn mapped(pieces: Vec<Piece>, ids: &HashMap<String, u32>) -> Result<Vec<Piece>> {
    let unknown = pieces.iter().find(|piece| piece.kind == PieceKind::Unknown);
    let unknown = unknown.and_then(|piece| ids.get(&piece.text));
    let unknown = *unknown.with_context(|| format!("{VOCABULARY} has no unknown token"))?;
    let mut unseen: HashMap<&str, u32> = ids.iter().map(|(text, id)| (text.as_str(), *id)).collect();
    let mut mapped = Vec::with_capacity(ids.len());
    for piece in pieces {
        unseen.remove(piece.text.as_str());
        mapped.push(Piece { id: ids.get(&piece.text).copied().unwrap_or(unknown), ..piece });
    }
    let control =
        |(text, id): (&str, u32)| Piece { id, text: text.to_owned(), score: 0.0, kind: PieceKind::Control };
    mapped.extend(unseen.into_iter().map(control));
    Ok(mapped)
}
