//! Models of CTranslate2: a folder with `model.bin`, `config.json`, and vocabularies as lists of tokens.
//!
//! The variables of `model.bin` are tensors (file.rs) or settings (settings.rs). Integers become the matrices
//! that they are divided to (encoded/divided.rs).
//!
//! Where the decoder starts from a zero embedding, which no token has, the vocabulary gets one more token for
//! it: a row of zeros in the embedding and the head, whose bias keeps it from being generated.
//! Invariant: tensors stay in the memory-mapped file.

mod file;
mod settings;
pub mod vocabulary;

#[cfg(test)]
mod tests;

use super::encoded::divided::{self, AppendedRow, StoredNumbers};
use super::{Checkpoint, Dtype, Folder, HubConfig, Layout, TensorEntry, Tensors};
use anyhow::{Context, Result};
use file::{ModelFile, Variable, VariableType};
use mainstem_kernels::QuantType;
use std::collections::BTreeMap;
use vocabulary::Vocabularies;

/// File name of the weights.
pub(crate) const FILE: &str = "model.bin";

/// The matrices with a row for each token of the target vocabulary, and the bias of the head.
const EMBEDDING: &str = "decoder/embeddings/weight";
const HEAD: &str = "decoder/projection/weight";
const HEAD_BIAS: &str = "decoder/projection/bias";

/// Whether the decoder starts from a zero embedding.
const ZERO_START: &str = "decoder/start_from_zero_embedding";

/// Bias of the start token, which F16 represents too. It makes the token's probability practically 0.
const NEVER: f32 = -60000.0;

/// Suffix of the name of a matrix's scale.
const SCALE: &str = "_scale";

impl Checkpoint {
    /// Whether the folder has weights of CTranslate2, and none of another format.
    pub fn is_ctranslate2(folder: &Folder) -> bool {
        folder.has(FILE) && !super::FOLDER_FORMATS.iter().any(|kind| kind.is_present_in(folder))
    }

    /// Whether the folder has weights of CTranslate2 by their content, too: other formats use this file name.
    pub fn has_ctranslate2_model(folder: &Folder) -> bool {
        let is_model = || folder.open(FILE).is_ok_and(|file| file::is_model_file(file.bytes()));
        Checkpoint::is_ctranslate2(folder) && is_model()
    }

    /// Opens a folder's `model.bin`, and returns its settings under the keys that settings.rs lists. Errors
    /// name the file, and the variable.
    pub fn open_ctranslate2(folder: &Folder) -> Result<(Checkpoint, HubConfig)> {
        let config = HubConfig::from_folder(folder)?;
        let bytes = folder.open(FILE)?;
        let named = || bytes.path().display().to_string();
        let file = ModelFile::read(bytes.bytes()).with_context(named)?;
        let weights = Weights::new(&file, bytes.bytes());
        let config_entries = config.entries().clone();
        let (shape, is_setting) = (|name: &str| weights.shape(name), |name: &str| !weights.is_scale(name));
        let mut entries =
            settings::entries(config_entries, &file, bytes.bytes(), shape, is_setting).with_context(named)?;
        let vocabularies = Vocabularies::read(folder, config.opt_str("unk_token")?)?;
        let vocabularies = vocabularies.with_context(|| {
            format!("{}: there is neither shared_vocabulary.json nor .txt", folder.path().display())
        })?;
        settings::add_token_ids(&config, &vocabularies.target, weights.start, &mut entries)?;
        let tensors = weights.tensors().with_context(named)?;
        let config = HubConfig::from_entries(config.file(), entries);
        Ok((Checkpoint { files: vec![bytes], tensors }, config))
    }
}

/// The variables that are weights.
struct Weights<'a> {
    file: &'a ModelFile,
    bytes: &'a [u8],
    /// Rows that are appended to variables.
    appended: BTreeMap<&'a str, AppendedRow>,
    /// Number of tokens of the target vocabulary, which is the id of the start token, if there is one more.
    start: Option<usize>,
}

impl<'a> Weights<'a> {
    fn new(file: &'a ModelFile, bytes: &'a [u8]) -> Weights<'a> {
        let flag = file.variables.get(ZERO_START).map(|flag| &bytes[flag.bytes.clone()]);
        let embedding = file.resolve(EMBEDDING).map(|(_, variable)| variable.shape.clone());
        let start = embedding
            .and_then(|shape| shape.first().copied())
            .filter(|_| flag.is_some_and(|flag| flag.iter().any(|byte| *byte != 0)));
        let rows = [(EMBEDDING, 0.0), (HEAD, 0.0), (HEAD_BIAS, NEVER)];
        let rows = rows.into_iter().filter(|_| start.is_some());
        let named = |(name, value)| Some((file.resolve(name)?.0, AppendedRow { value }));
        Weights { file, bytes, appended: rows.filter_map(named).collect(), start }
    }

    /// Returns the shape of a matrix, with its appended row.
    fn shape(&self, name: &str) -> Option<[usize; 2]> {
        let (name, variable) = self.file.resolve(name)?;
        let [rows, columns] = variable.shape[..] else { return None };
        Some([rows + usize::from(self.appended.contains_key(name)), columns])
    }

    /// Returns all weights, also under their other names.
    fn tensors(&self) -> Result<Tensors> {
        let mut tensors = Tensors::new();
        let mut names = BTreeMap::<&str, Vec<&str>>::new();
        for name in self.file.variables.keys().chain(self.file.aliases.keys()) {
            let Some((of, _)) = self.file.resolve(name) else { continue };
            names.entry(of).or_default().push(name);
        }
        for (of, variable) in &self.file.variables {
            if variable.shape.is_empty() || self.is_scale(of) {
                continue;
            }
            // Looks at all scales, which is done once for all names.
            let scale = self.scale(of);
            let is_precise =
                scale.is_some_and(|(_, scale)| divided::are_precise(&self.bytes[scale.bytes.clone()]));
            for name in names.get(of.as_str()).into_iter().flatten() {
                let entry = self.entry((of, variable), is_precise);
                tensors.insert((*name).to_owned(), entry.with_context(|| format!("variable '{of}'"))?);
            }
        }
        if let Some(tokens) = self.start.filter(|_| !tensors.contains_key(HEAD_BIAS)) {
            let none = StoredNumbers {
                name: HEAD_BIAS.to_owned(),
                dtype: VariableType::F32.name(),
                shape: vec![0],
                bytes: 0..0,
            };
            let bias = divided::zeros_and(NEVER, tokens + 1, none);
            tensors.insert(HEAD_BIAS.to_owned(), TensorEntry::encoded(vec![tokens + 1], bias));
        }
        Ok(tensors)
    }

    /// Whether a variable has the scales of integers.
    fn is_scale(&self, name: &str) -> bool {
        let scaled = name.strip_suffix(SCALE).and_then(|scaled| self.file.variables.get(scaled));
        scaled.is_some_and(|scaled| scaled.ty.is_integer())
    }

    /// Returns the scales of a variable with integers, and their name.
    fn scale(&self, name: &str) -> Option<(String, &Variable)> {
        let scale = format!("{name}{SCALE}");
        let variable = self.file.variables.get(&scale).filter(|_| self.is_scale(&scale))?;
        Some((scale, variable))
    }

    /// Returns the tensor of a variable. `is_precise` says whether F16 represents its scales.
    fn entry(&self, (name, variable): (&str, &Variable), is_precise: bool) -> Result<TensorEntry> {
        let known = match variable.ty {
            VariableType::F32 => Some(QuantType::F32),
            VariableType::F16 => Some(QuantType::F16),
            VariableType::BF16 => Some(QuantType::BF16),
            VariableType::I8 | VariableType::I16 | VariableType::I32 => None,
        };
        let scale = self.scale(name);
        let appended = self.appended.get(name).copied();
        let (shape, bytes) = (variable.shape.clone(), variable.bytes.clone());
        if let (None, None) = (appended, &scale) {
            let dtype = known.map_or_else(|| Dtype::Unsupported(variable.ty.name().to_owned()), Dtype::Known);
            return Ok(TensorEntry { dtype, shape, file: 0, bytes, layout: Layout::Dense });
        }
        let stored = |name: String, variable: &Variable| StoredNumbers {
            name,
            dtype: variable.ty.name(),
            shape: variable.shape.clone(),
            bytes: variable.bytes.clone(),
        };
        let scales = scale.map(|(name, scale)| stored(name, scale));
        let numbers = stored(name.to_owned(), variable);
        let (shape, encoded) = divided::encoded(numbers, scales, is_precise, appended)?;
        Ok(TensorEntry::encoded(shape, encoded))
    }
}
