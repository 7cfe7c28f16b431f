//! Selection of a model's tokenizers: one, or one for the encoder input and another for the output.
//!
//! | files | model |
//! |---|---|
//! | `target_tokenizer.json` beside `tokenizer.json` | any encoder-decoder |
//! | `source.spm`, `target.spm`, `vocab.json` | Marian; with `target_vocab.json` if the vocabularies differ |
//! | `shared_vocabulary`, or `source_vocabulary`, `target_vocabulary` | CTranslate2: the ids of all tokens |
//!
//! Invariant: ids are those of the model's vocabularies, if it has such files.

use super::folder::read_usual;
use super::settings::TokenizerSettings;
use super::vocab_json::VOCABULARY;
use super::{Tokenizer, json, sentencepiece};
use crate::formats::ctranslate2::vocabulary::{Vocabularies, Vocabulary};
use crate::formats::{Checkpoint, Folder, HubConfig};
use anyhow::{Context, Result, bail, ensure};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Tokenizer of the output, beside `tokenizer.json`.
const TARGET_JSON: &str = "target_tokenizer.json";

/// Sentencepiece models of Marian.
const SOURCE_PIECES: &str = "source.spm";
const TARGET_PIECES: &str = "target.spm";

/// The model type of Marian.
const MARIAN: &str = "marian";

/// Ids of the output's tokens of Marian, if they differ from those of the input.
const TARGET_VOCABULARY: &str = "target_vocab.json";

/// Tokenizer files that the configuration names, in place of the model's own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenizerFiles {
    /// A `tokenizer.json`, a sentencepiece model, or a folder with one of them.
    pub tokenizer: Option<PathBuf>,
    /// The file or folder of the output's tokenizer, if that is another one.
    pub target: Option<PathBuf>,
}

/// The place of a tokenizer.
#[derive(Clone)]
enum Place {
    /// The folder's first kind of file.
    Usual(Folder),
    /// A `tokenizer.json` of any name.
    Json(Folder, String),
    /// A sentencepiece model.
    Pieces(Folder, String),
}

/// Reads the tokenizers of a model's folder.
pub(super) fn read(folder: &Folder, files: &TokenizerFiles) -> Result<Tokenizer> {
    let config = HubConfig::read_if_present(folder, "config.json")?;
    let has_pieces = !folder.has(json::FILE) && folder.has(SOURCE_PIECES);
    let is_marian = has_pieces || is_marian_without_pieces(folder, config.as_ref())?;
    let source = match &files.tokenizer {
        Some(path) => Place::named(path).context("model.tokenizer")?,
        None if has_pieces => Place::Pieces(folder.clone(), SOURCE_PIECES.to_owned()),
        None => Place::Usual(folder.clone()),
    };
    let needs_pieces = has_pieces && files.tokenizer.is_none();
    let target = match &files.target {
        Some(path) => Some(Place::named(path).context("model.target_tokenizer")?),
        None if needs_pieces || is_marian && folder.has(TARGET_PIECES) => {
            Some(Place::Pieces(folder.clone(), TARGET_PIECES.to_owned()))
        }
        None => folder.has(TARGET_JSON).then(|| Place::Json(folder.clone(), TARGET_JSON.to_owned())),
    };
    let vocabularies = match read_lists(folder, config.as_ref())? {
        None if is_marian => Some(marian_vocabularies(folder)?),
        vocabularies => vocabularies,
    };
    let Some(Vocabularies { source: of_source, target: of_target }) = vocabularies else {
        let own = read_place(&source, None)?;
        return match target {
            None => Ok(own),
            Some(target) => Ok(read_place(&target, None)?.with_source(own)),
        };
    };
    let is_one = target.is_none() && of_source == of_target;
    let own = read_place(&source, Some(&of_source))?;
    let adds = |key| config.as_ref().map_or(Ok(None), |config| config.opt_bool(key));
    let token = |role: &str, usual: &str| {
        let name = config.as_ref().map_or(Ok(None), |config| config.opt_str(role))?;
        anyhow::Ok(of_source.id(name.unwrap_or(usual)))
    };
    let bos = if adds("add_source_bos")? == Some(true) { token("bos_token", "<s>")? } else { None };
    let adds_eos = is_marian || adds("add_source_eos")? == Some(true);
    let eos = if adds_eos { token("eos_token", "</s>")? } else { None };
    let own = own.with_surrounding(bos, eos)?;
    if is_one {
        return Ok(own);
    }
    Ok(read_place(target.as_ref().unwrap_or(&source), Some(&of_target))?.with_source(own))
}

/// Whether a folder has the ids of Marian's pieces, whose files are elsewhere.
fn is_marian_without_pieces(folder: &Folder, config: Option<&HubConfig>) -> Result<bool> {
    let kind = config.map_or(Ok(None), |config| config.opt_str("model_type"))?;
    Ok(kind == Some(MARIAN) && folder.has(VOCABULARY) && !folder.has(json::FILE))
}

/// Reads the vocabularies of a model of CTranslate2.
fn read_lists(folder: &Folder, config: Option<&HubConfig>) -> Result<Option<Vocabularies>> {
    if !Checkpoint::has_ctranslate2_model(folder) {
        return Ok(None);
    }
    let unknown = config.map_or(Ok(None), |config| config.opt_str("unk_token"))?;
    Vocabularies::read(folder, unknown)
}

impl Place {
    /// Returns the place that a configured path names.
    fn named(path: &Path) -> Result<Place> {
        let shown = path.display();
        ensure!(path.exists(), "{shown}: no such file");
        if path.is_dir() {
            return Ok(Place::Usual(Folder::disk(path)));
        }
        let name = path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
        let name = name.with_context(|| format!("{shown}: its name is not UTF-8"))?;
        let folder = Folder::disk(path.parent().filter(|path| path.is_dir()).unwrap_or(Path::new(".")));
        match name.ends_with(".json") {
            true => Ok(Place::Json(folder, name)),
            false => Ok(Place::Pieces(folder, name)),
        }
    }
}

/// Reads one tokenizer, with the ids of a vocabulary if one is given.
fn read_place(place: &Place, vocabulary: Option<&Vocabulary>) -> Result<Tokenizer> {
    let (folder, file) = match (place, vocabulary) {
        (Place::Usual(folder), None) => return read_usual(folder),
        (Place::Usual(folder), Some(_)) if folder.has(json::FILE) => (folder, json::FILE),
        (Place::Usual(folder), Some(vocabulary)) => {
            let found = sentencepiece::FILES.into_iter().find(|file| folder.has(file));
            let missing = || {
                let files = sentencepiece::FILES.join(", ");
                format!(
                    "{}: no tokenizer found for {}: there is none of {}, {files}, {SOURCE_PIECES}",
                    folder.path().display(),
                    vocabulary.file,
                    json::FILE
                )
            };
            (folder, found.with_context(missing)?)
        }
        (Place::Json(folder, file) | Place::Pieces(folder, file), _) => (folder, file.as_str()),
    };
    let (settings, content) = (TokenizerSettings::read(folder)?, folder.read_required(file)?);
    let name = || folder.file(file).display().to_string();
    if !file.ends_with(".json") {
        return match vocabulary {
            None => sentencepiece::read(folder, file, &content, settings),
            Some(vocabulary) => {
                sentencepiece::read_with_ids(&content, &settings, vocabulary).with_context(name)
            }
        };
    }
    let tokenizer = json::read(folder, file, &content, &settings)?;
    match vocabulary {
        None => Ok(tokenizer),
        Some(vocabulary) => tokenizer.renumbered(vocabulary).with_context(name),
    }
}

/// Reads the vocabularies of Marian.
fn marian_vocabularies(folder: &Folder) -> Result<Vocabularies> {
    let source = marian_vocabulary(folder, VOCABULARY)?;
    let target = match folder.has(TARGET_VOCABULARY) {
        true => marian_vocabulary(folder, TARGET_VOCABULARY)?,
        false => source.clone(),
    };
    Ok(Vocabularies { source, target })
}

fn marian_vocabulary(folder: &Folder, file: &str) -> Result<Vocabulary> {
    let name = || folder.file(file).display().to_string();
    let ids: HashMap<String, u32> =
        serde_json::from_slice(&folder.read_required(file)?).with_context(name)?;
    let mut tokens = vec![None; ids.len()];
    for (token, id) in ids {
        match tokens.get_mut(id as usize) {
            Some(place @ None) => *place = Some(token),
            Some(Some(other)) => bail!("{}: the tokens '{token}' and '{other}' both have id {id}", name()),
            None => {
                bail!("{}: the token '{token}' has id {id}, but there are {} tokens", name(), tokens.len())
            }
        }
    }
    Ok(Vocabulary::new(file, tokens.into_iter().flatten().collect(), None))
}
