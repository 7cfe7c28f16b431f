//! Tiktoken rank files: one token per line, its bytes in base64 and its rank, which is its id. Bytes merge
//! into tokens, the lowest rank first.
//!
//! Rank files contain neither the pattern that splits a text nor the special tokens. These are built in for
//! Llama 3 and the first Qwen, and otherwise taken from `tokenizer_config.json`.
//!
//! Invariant: every byte is a token, so that every text can be encoded.

use super::added::{AddedTokenSpec, resolve};
use super::class::TokenizerClass;
use super::parts::{TokenizerParts, find_token_id};
use super::pipeline::{Algorithm, Normalizer, PieceAlgorithm, PieceEncoder, PipelineParts, UnknownText};
use super::scored_bpe::{Atoms, PieceFormation, ScoredBpe, ScoredPiece};
use super::settings::TokenizerSettings;
use super::splits;
use super::{DecodeMethod, LeadingSpaces, SurroundingTokens, Tokenizer, VOCAB_MAX, json};
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
pub fn is_rank_file(content: &[u8]) -> bool {
    let first = content.split(|byte| *byte == b'\n').next().unwrap_or_default();
    std::str::from_utf8(first).is_ok_and(|line| parse_line(line).is_ok())
}

/// Reads the tokenizer of a folder with this rank file.
pub fn read(
    folder: &Folder,
    file: &str,
    content: &[u8],
    mut settings: TokenizerSettings,
) -> Result<Tokenizer> {
    let name = || folder.file(file).display().to_string();
    let ranks = Ranks::read(content).with_context(name)?;
    let is_llama3 =
        ranks.len() == LLAMA3_RANKS && settings.class().is_none_or(|class| *class == TokenizerClass::Llama);
    let known = match settings.class_or(TokenizerClass::Llama) {
        TokenizerClass::Qwen => BuiltinDefaults::qwen(),
        _ if settings.text(PATTERN)?.is_some() => BuiltinDefaults::default(),
        TokenizerClass::Llama if is_llama3 => BuiltinDefaults::llama3(),
        TokenizerClass::Llama => BuiltinDefaults { pattern: splits::LLAMA3, ..BuiltinDefaults::default() },
        class => bail!(
            "{}: the split pattern of {class} is not known: set '{PATTERN}' in tokenizer_config.json, or \
             provide a {}",
            name(),
            json::FILE
        ),
    };
    tokenizer_parts(&settings, file, ranks, known).and_then(TokenizerParts::build).with_context(name)
}

/// Built-in settings of a model whose folder has only ranks.
#[derive(Default)]
struct BuiltinDefaults {
    pattern: &'static str,
    /// Whether texts are normalized to NFC.
    uses_nfc: bool,
    /// Special tokens, from the first free id on, if the settings have none.
    specials: Vec<String>,
    bos: Option<&'static str>,
    eos: Option<&'static str>,
    add_bos: bool,
}

impl BuiltinDefaults {
    fn llama3() -> BuiltinDefaults {
        let reserved = |from: u32, to: u32| (from..to).map(|i| format!("<|reserved_special_token_{i}|>"));
        let named = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let mut specials = named(&["<|begin_of_text|>", "<|end_of_text|>"]);
        specials.extend(reserved(0, 4));
        specials.extend(named(&["<|start_header_id|>", "<|end_header_id|>"]));
        specials.extend(reserved(4, 5));
        specials.extend(named(&["<|eot_id|>"]));
        specials.extend(reserved(5, 251));
        let (bos, eos) = (Some("<|begin_of_text|>"), Some("<|end_of_text|>"));
        BuiltinDefaults { pattern: splits::LLAMA3, uses_nfc: false, specials, bos, eos, add_bos: true }
    }

    fn qwen() -> BuiltinDefaults {
        let mut specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(String::from).to_vec();
        specials.extend((0..205).map(|i| format!("<|extra_{i}|>")));
        let eos = Some("<|endoftext|>");
        BuiltinDefaults { pattern: splits::QWEN2, uses_nfc: true, specials, bos: None, eos, add_bos: false }
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
            let (token, rank) = parse_line(line).with_context(|| format!("line {at}"))?;
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
    fn encoder(&self) -> PieceEncoder {
        // Ranks are below 2^24, and single precision represents all integers up to there.
        let score = |rank: u32| -(rank as f32);
        let ranked = self.0.iter();
        let pieces: Vec<ScoredPiece> = ranked
            .map(|(id, bytes)| ScoredPiece {
                id: *id,
                bytes,
                score: score(*id),
                kind: PieceFormation::Merged,
            })
            .collect();
        let mut bytes = Box::new([0; 256]);
        for (id, token) in &self.0 {
            if let [byte] = token[..] {
                bytes[usize::from(byte)] = *id;
            }
        }
        PieceEncoder {
            algorithm: PieceAlgorithm::Bpe(ScoredBpe::new(&pieces, Atoms::Bytes)),
            unknown: UnknownText::Bytes(bytes),
        }
    }
}

/// Parses a line: a token's bytes and its rank.
fn parse_line(line: &str) -> Result<(Vec<u8>, u32)> {
    let parts = line.trim_end().split_once(' ').context("expected a token in base64 and a rank")?;
    let token = BASE64_STANDARD.decode(parts.0).with_context(|| format!("'{}' is not base64", parts.0))?;
    ensure!(!token.is_empty(), "its token is empty");
    let rank: u32 = parts.1.parse().with_context(|| format!("'{}' is not a rank", parts.1))?;
    ensure!(rank < VOCAB_MAX, "its rank is {rank}: ranks must be below {VOCAB_MAX}");
    Ok((token, rank))
}

fn tokenizer_parts(
    settings: &TokenizerSettings,
    file: &str,
    ranks: Ranks,
    known: BuiltinDefaults,
) -> Result<TokenizerParts> {
    // Tokens of a rank file have bytes only, no names.
    let nothing = |_: &str| None;
    let mut all = settings.added()?;
    if all.iter().all(|token| token.id().is_none()) {
        all.extend(known.specials.iter().map(|name| AddedTokenSpec::appended(AddedToken::from(name, true))));
    }
    let added = resolve(all, ranks.len(), nothing)?;
    let id = |role| settings.token_id(role, file, |token| find_token_id(&added, nothing, token));
    let or_known = |id: Option<u32>, name: Option<&str>| id.or_else(|| find_token_id(&added, nothing, name?));
    let bos = or_known(id("bos_token")?, known.bos);
    let eos = or_known(id("eos_token")?, known.eos);
    let add_bos = settings.flag("add_bos_token")?.unwrap_or(known.add_bos);
    let add_eos = settings.flag("add_eos_token")?.unwrap_or(false);
    Ok(TokenizerParts {
        stages: pipeline_parts(settings, &ranks, &known)?,
        decode_method: DecodeMethod::Bytes { leading_spaces: LeadingSpaces::Keep },
        pieces: ranks.0,
        added,
        bos,
        eos,
        surrounding: SurroundingTokens::new(bos.filter(|_| add_bos), eos.filter(|_| add_eos)),
    })
}

fn pipeline_parts(
    settings: &TokenizerSettings,
    ranks: &Ranks,
    known: &BuiltinDefaults,
) -> Result<PipelineParts> {
    let pattern = settings.text(PATTERN)?.unwrap_or(known.pattern);
    let split = serde_json::json!({"type": "Sequence", "pretokenizers": splits::stages(&[pattern])});
    let split = serde_json::from_value::<PreTokenizerWrapper>(split);
    let nfc = || Normalizer::Library(NormalizerWrapper::NFC(NFC));
    Ok(PipelineParts {
        algorithm: Algorithm::Pieces(ranks.encoder()),
        normalizer: known.uses_nfc.then(nfc),
        pre_tokenizer: Some(split.map_err(|e| anyhow!("the pattern '{pattern}': {e}"))?),
        decoder: None,
    })
}
