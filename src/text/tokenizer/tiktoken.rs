//! Files of ranks, as tiktoken reads them: a token a line, its bytes in base 64 and its rank, which is its
//! id. Bytes merge into tokens, those of the lowest rank first.
//!
//! What splits a text, and which tokens are special, no such file says. They are known of Llama 3 and the
//! first Qwen, and else taken from `tokenizer_config.json`.
//!
//! Invariant: every byte is a token, so that every text has ids.

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

/// How the files end that can be nothing else.
pub const EXTENSION: &str = ".tiktoken";

/// How many ranks the file of Llama 3 has.
const LLAMA3_RANKS: u32 = 128_000;

/// The key for what splits a text, a regular expression.
const PATTERN: &str = "pat_str";

/// Whether a file's content may be one of ranks: it begins with a line of one.
pub fn is_it(content: &[u8]) -> bool {
    let first = content.split(|byte| *byte == b'\n').next().unwrap_or_default();
    std::str::from_utf8(first).is_ok_and(|line| rank(line).is_ok())
}

/// The tokenizer of a folder with this file.
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
            "{}: what splits the texts of {class} is not known; give it as '{PATTERN}' in tokenizer_config.json, \
             or have a {}",
            name(),
            json::FILE
        ),
    };
    draft(&settings, file, ranks, known).and_then(Draft::finish).with_context(name)
}

/// What the program knows of a model that brings ranks alone.
#[derive(Default)]
struct Known {
    pattern: &'static str,
    composes: bool,
    /// Special tokens from the first free id on, if the settings give none.
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

/// Tokens by rank.
struct Ranks(BTreeMap<u32, Vec<u8>>);

impl Ranks {
    fn read(content: &[u8]) -> Result<Ranks> {
        let text = std::str::from_utf8(content)?;
        let mut ranks = BTreeMap::new();
        let mut tokens = HashSet::new();
        for (line, at) in text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty()) {
            let (token, rank) = rank(line).with_context(|| format!("line {at}"))?;
            ensure!(tokens.insert(token.clone()), "line {at}: its token is that of a line before");
            ensure!(
                ranks.insert(rank, token).is_none(),
                "line {at}: its rank {rank} is that of a line before"
            );
        }
        let missing = (0..=u8::MAX).find(|byte| !tokens.contains(&[*byte][..]));
        ensure!(missing.is_none(), "it has no token for the byte {:#04x}", missing.unwrap_or_default());
        Ok(Ranks(ranks))
    }

    /// One more than the largest rank.
    fn len(&self) -> u32 {
        self.0.last_key_value().map_or(0, |(rank, _)| rank + 1)
    }

    fn cutter(&self) -> Cutter {
        // Ranks are below 2^24, up to where single precision has every whole number.
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

/// The token and the rank of a line.
fn rank(line: &str) -> Result<(Vec<u8>, u32)> {
    let parts = line.trim_end().split_once(' ').context("it is not a token in base 64 and a rank")?;
    let token = BASE64_STANDARD.decode(parts.0).with_context(|| format!("'{}' is no base 64", parts.0))?;
    ensure!(!token.is_empty(), "its token is empty");
    let rank: u32 = parts.1.parse().with_context(|| format!("'{}' is no rank", parts.1))?;
    ensure!(rank < VOCAB_MAX, "its rank is {rank}: ranks must be below {VOCAB_MAX}");
    Ok((token, rank))
}

fn draft(settings: &Settings, file: &str, ranks: Ranks, known: Known) -> Result<Draft> {
    // Text never spells a token's bytes by a name.
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
