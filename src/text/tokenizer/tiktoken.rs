//! Tiktoken rank files: one token per line, its bytes in base64 and its rank, which is its id. Bytes merge
//! into tokens, the lowest rank first.
//!
//! Rank files contain neither the pattern that splits a text nor the special tokens. These are built in for
//! Llama 3 and the first Qwen, and otherwise taken from `tokenizer_config.json`.
//!
//! Invariant: every byte is a token, so that every text can be encoded.

use super::added::{Added, resolve};
use super::class::Class;
use super::draft::{Draft, id_of};
use super::pipeline::{Algorithm, Cutter, Normalizer, Stages, Unknown, Way};
use super::scored_bpe::{Atoms, Kind, ScoredBpe, ScoredPiece};
use super::settings::Settings;
use super::splits;
use super::{Around, Joining, Opening, Tokenizer, VOCAB_MAX, json};
use crate::formats::Folder;
use anyhow::{Context, Result, anyhow, bail, ensure};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use std::collections::{BTreeMap, HashSet};
use tokenizers::normalizers::NFC;
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper};

/// Extension of rank files.
pub const EXTENSION: &str = ".tiktoken";

/// Number of ranks in Llama 3's file.
const LLAMA3_RANKS: u32 = 128_000;

/// Settings key of the regular expression that splits a text.
const PATTERN: &str = "pat_str";

/// Returns whether the first line of a file is that of a rank file.
pub fn is_it(content: &[u8]) -> bool {
    let first = content.split(|byte| *byte == b'\n').next().unwrap_or_default();
    std::str::from_utf8(first).is_ok_and(|line| rank(line).is_ok())
}

/// Reads the tokenizer of a folder with this rank file.
pub fn read(folder: &Folder, file: &str, content: &[u8], mut settings: Settings) -> Result<Tokenizer> {
    let name = || folder.file(file).display().to_string();
    let ranks = Ranks::read(content).with_context(name)?;
    let is_llama3 =
        ranks.len() == LLAMA3_RANKS && settings.class().is_none_or(|class| *class == Class::Llama);
    let known = match settings.class_or(Class::Llama) {
        Class::Qwen => Known::qwen(),
        _ if settings.text(PATTERN)?.is_some() => Known::default(),
        Class::Llama if is_llama3 => Known::llama3(),
        Class::Llama => Known { pattern: splits::LLAMA3, ..Known::default() },
        class => bail!(
            "{}: the split pattern of {class} is not known: set '{PATTERN}' in tokenizer_config.json, or \
             provide a {}",
            name(),
            json::FILE
        ),
    };
    draft(&settings, file, ranks, known).and_then(Draft::finish).with_context(name)
}

/// Built-in settings of a model whose folder has only ranks.
#[derive(Default)]
struct Known {
    pattern: &'static str,
    /// Whether texts are normalized to NFC.
    composes: bool,
    /// Special tokens, from the first free id on, if the settings have none.
    specials: Vec<String>,
    bos: Option<&'static str>,
    eos: Option<&'static str>,
    add_bos: bool,
}

impl Known {
    fn llama3() -> Known {
        let reserved = |from: u32, to: u32| (from..to).map(|i| format!("<|reserved_special_token_{i}|>"));
        let named = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let mut specials = named(&["<|begin_of_text|>", "<|end_of_text|>"]);
        specials.extend(reserved(0, 4));
        specials.extend(named(&["<|start_header_id|>", "<|end_header_id|>"]));
        specials.extend(reserved(4, 5));
        specials.extend(named(&["<|eot_id|>"]));
        specials.extend(reserved(5, 251));
        let (bos, eos) = (Some("<|begin_of_text|>"), Some("<|end_of_text|>"));
        Known { pattern: splits::LLAMA3, composes: false, specials, bos, eos, add_bos: true }
    }

    fn qwen() -> Known {
        let mut specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(String::from).to_vec();
        specials.extend((0..205).map(|i| format!("<|extra_{i}|>")));
        let eos = Some("<|endoftext|>");
        Known { pattern: splits::QWEN2, composes: true, specials, bos: None, eos, add_bos: false }
    }
}

/// Tokens' bytes by rank.
struct Ranks(BTreeMap<u32, Vec<u8>>);

impl Ranks {
    fn read(content: &[u8]) -> Result<Ranks> {
        let text = std::str::from_utf8(content)?;
        let mut ranks = BTreeMap::new();
        let mut tokens = HashSet::new();
        for (line, at) in text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty()) {
            let (token, rank) = rank(line).with_context(|| format!("line {at}"))?;
            ensure!(tokens.insert(token.clone()), "line {at}: its token is a duplicate");
            ensure!(ranks.insert(rank, token).is_none(), "line {at}: its rank {rank} is a duplicate");
        }
        let missing = (0..=u8::MAX).find(|byte| !tokens.contains(&[*byte][..]));
        ensure!(missing.is_none(), "it has no token for the byte {:#04x}", missing.unwrap_or_default());
        Ok(Ranks(ranks))
    }

    /// Returns the largest rank plus one.
    fn len(&self) -> u32 {
        self.0.last_key_value().map_or(0, |(rank, _)| rank + 1)
    }

    /// Creates the encoder.
    fn cutter(&self) -> Cutter {
        // Ranks are below 2^24, and single precision represents all integers up to there.
        let score = |rank: u32| -(rank as f32);
        let ranked = self.0.iter();
        let pieces: Vec<ScoredPiece> = ranked
            .map(|(id, bytes)| ScoredPiece { id: *id, bytes, score: score(*id), kind: Kind::Merged })
            .collect();
        let mut bytes = Box::new([0; 256]);
        for (id, token) in &self.0 {
            if let [byte] = token[..] {
                bytes[usize::from(byte)] = *id;
            }
        }
        Cutter { way: Way::Bpe(ScoredBpe::new(&pieces, Atoms::Bytes)), unknown: Unknown::Bytes(bytes) }
    }
}

/// Parses a line: a token's bytes and its rank.
fn rank(line: &str) -> Result<(Vec<u8>, u32)> {
    let parts = line.trim_end().split_once(' ').context("expected a token in base64 and a rank")?;
    let token = BASE64_STANDARD.decode(parts.0).with_context(|| format!("'{}' is not base64", parts.0))?;
    ensure!(!token.is_empty(), "its token is empty");
    let rank: u32 = parts.1.parse().with_context(|| format!("'{}' is not a rank", parts.1))?;
    ensure!(rank < VOCAB_MAX, "its rank is {rank}: ranks must be below {VOCAB_MAX}");
    Ok((token, rank))
}

fn draft(settings: &Settings, file: &str, ranks: Ranks, known: Known) -> Result<Draft> {
    // Tokens of a rank file have bytes only, no names.
    let nothing = |_: &str| None;
    let mut all = settings.added()?;
    if all.iter().all(|token| token.id().is_none()) {
        all.extend(known.specials.iter().map(|name| Added::appended(AddedToken::from(name, true))));
    }
    let added = resolve(all, ranks.len(), nothing)?;
    let id = |role| settings.token_id(role, file, |token| id_of(&added, nothing, token));
    let or_known = |id: Option<u32>, name: Option<&str>| id.or_else(|| id_of(&added, nothing, name?));
    let bos = or_known(id("bos_token")?, known.bos);
    let eos = or_known(id("eos_token")?, known.eos);
    let add_bos = settings.flag("add_bos_token")?.unwrap_or(known.add_bos);
    let add_eos = settings.flag("add_eos_token")?.unwrap_or(false);
    Ok(Draft {
        stages: stages(settings, &ranks, &known)?,
        joining: Joining::Bytes { opening: Opening::Kept },
        pieces: ranks.0,
        added,
        bos,
        eos,
        around: Around::of(bos.filter(|_| add_bos), eos.filter(|_| add_eos)),
    })
}

fn stages(settings: &Settings, ranks: &Ranks, known: &Known) -> Result<Stages> {
    let pattern = settings.text(PATTERN)?.unwrap_or(known.pattern);
    let split = serde_json::json!({"type": "Sequence", "pretokenizers": splits::stages(&[pattern])});
    let split = serde_json::from_value::<PreTokenizerWrapper>(split);
    let nfc = || Normalizer::Library(NormalizerWrapper::NFC(NFC));
    Ok(Stages {
        algorithm: Algorithm::Pieces(ranks.cutter()),
        normalizer: known.composes.then(nfc),
        pre_tokenizer: Some(split.map_err(|e| anyhow!("the pattern '{pattern}': {e}"))?),
        decoder: None,
    })
}
