//! Opens models by the name that the user gives: a hub model's folder, a GGUF or llama2.c file, an embedded
//! demo, or a synthetic model with random weights.
//!
//! Invariant: after `open` all metadata of the model has been read and is consistent, including names and
//! shapes of tensors; none of its weights has been read yet.

use super::choose_spec::{folder_spec, given_or_shipped, read_spec, with_nearest};
use super::gguf::GgufTable;
use super::offload::{CacheOffload, FileMarks, Offload, Transfers};
use super::progress::Progress;
use super::shard::{self, Shard, ShardError};
use super::spec::{Kind, ModelSpec, TensorPart, TensorSlice};
use super::synthetic::{self, SyntheticShape};
use super::tensor_slices;
use super::tensors;
use crate::demo;
use crate::formats::{
    ChatConfig, Checkpoint, DecoderStart, Folder, GenerationConfig, Gguf, HubConfig, Llama2cHeader,
    ParamList, SentenceConfig, is_pytorch,
};
use crate::quantize::{RoundingPolicy, WeightRules};
use crate::specs;
use anyhow::{Context, Result, anyhow, bail, ensure};
use mainstem_kernels::QuantType;
use serde_json::{Map, Value};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Names of the demo model and of its draft model.
const DEMO: &str = "demo";
const DEMO_DRAFT: &str = "demo-draft";

/// Identifies a model to open.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelRef {
    /// The embedded demo model.
    Demo,
    /// The embedded draft model of the demo.
    DemoDraft,
    /// A folder or file.
    Path(PathBuf),
    /// A synthetic model with random weights.
    Synthetic(SyntheticShape),
}

impl ModelRef {
    /// Parses a model name: an empty name or `demo` is the demo, `demo-draft` its draft model,
    /// `synthetic:SHAPE` has random weights (see [`SyntheticShape::parse`]), and anything else is a path.
    pub fn parse(name: &str) -> Result<ModelRef> {
        match name.strip_prefix(synthetic::PREFIX) {
            Some(shape) => SyntheticShape::parse(shape).map(ModelRef::Synthetic),
            None if name.is_empty() || name == DEMO => Ok(ModelRef::Demo),
            None if name == DEMO_DRAFT => Ok(ModelRef::DemoDraft),
            None => Ok(ModelRef::Path(name.into())),
        }
    }
}

/// An opened model.
pub struct ModelSource {
    /// The folder or file, for error messages; for a model without one, its name.
    pub path: PathBuf,
    pub kind: SourceKind,
    pub spec: ModelSpec,
    pub checkpoint: Checkpoint,
    /// Tokens that end a sequence.
    pub eos: Vec<u32>,
    /// Default sampling parameters for requests.
    pub sampling_defaults: ParamList,
    /// Settings of generation_config.json that are not supported.
    pub unsupported_settings: Map<String, Value>,
    pub chat: ChatConfig,
    /// Tokenizer files in place of the model's own: of its input, and of its output.
    pub tokenizer_files: [Option<PathBuf>; 2],
    /// Decoder start tokens of an encoder-decoder model.
    pub decoder_start: DecoderStart,
    /// Settings for embedding texts; `None` if no file specifies them. A decoder with these has no head.
    pub sentence: Option<SentenceConfig>,
    /// Rules for the number formats in which matrices are loaded. By default they keep their stored format.
    pub weight_rules: WeightRules,
    /// Rounding of matrices that are converted to another format.
    pub rounding: RoundingPolicy,
    /// Settings of layers whose matrices do not all stay in memory; `None` if all do.
    pub offload: Option<Offload>,
    /// The KV caches that do not stay in memory; `None` for none.
    pub cache_offload: Option<CacheOffload>,
    /// Marks of the model's files, by which its stores are found.
    pub file_marks: FileMarks,
    /// Counts of what is read and written because of both.
    pub transfers: Arc<Transfers>,
    /// Bytes per second that are copied between each device and the host; `None` without a limit.
    pub link_rate: Option<f64>,
    /// The draft model for speculative decoding ([`ModelSource::attach_draft`]). The device that returns the
    /// results of the model holds all of it.
    pub draft: Option<Box<ModelSource>>,
    /// Progress of the devices that load the model.
    pub progress: Arc<Progress>,
}

/// The storage of a model.
#[derive(Clone, Debug)]
pub enum SourceKind {
    /// A folder with config.json, tokenizer.json, and safetensors or PyTorch weights.
    HubFolder(Folder),
    /// A GGUF file, or several split files.
    Gguf(Arc<Gguf>),
    /// A llama2.c checkpoint with its tokenizer beside it.
    Llama2c,
    /// A synthetic model with random weights, without a tokenizer.
    Synthetic,
}

/// File name of a folder's settings.
const CONFIG: &str = "config.json";

/// Name of the folder of stores in a model's folder, and ending of the one beside a model's file.
pub(crate) const STORES: &str = "mainstem-store";

/// llama2.c ends a text with the BOS token of the next one; EOS is included for safety.
const LLAMA2C_EOS: [u32; 2] = [1, 2];

impl ModelSource {
    /// Opens a model. `spec_file` replaces the shipped specification, as a folder's own `spec.toml` does.
    pub fn open(model: &ModelRef, spec_file: Option<&Path>) -> Result<ModelSource> {
        let source = match model {
            ModelRef::Demo => open_folder(Folder::Embedded(&demo::DEMO), spec_file),
            ModelRef::DemoDraft => open_folder(Folder::Embedded(&demo::DRAFT), spec_file),
            ModelRef::Path(path) => open_path(path, spec_file),
            ModelRef::Synthetic(shape) => open_synthetic(shape, spec_file),
        }?;
        tensors::check(&source.path, &source.spec, &source.checkpoint)?;
        for id in &source.eos {
            ensure!(
                (*id as usize) < source.spec.vocab,
                "{}: eos_token_id {id} is not in the vocabulary of {} tokens",
                source.path.display(),
                source.spec.vocab
            );
        }
        Ok(source)
    }

    /// Adds a draft model, with the same tokens. It may have fewer of them, or more, which it never proposes.
    /// Fails if one of them is not a decoder-only model, or the draft model has no head.
    pub fn attach_draft(&mut self, mut draft: ModelSource) -> Result<()> {
        let path = draft.path.display();
        ensure!(draft.spec.kind == Kind::Decoder, "{path} cannot be a draft model: it has an encoder");
        ensure!(draft.spec.has_head(), "{path} cannot be a draft model: it has no output head");
        ensure!(
            self.spec.kind == Kind::Decoder,
            "{}: only a decoder-only model can have a draft model",
            self.path.display()
        );
        draft.progress = self.progress.clone();
        self.draft = Some(Box::new(draft));
        Ok(())
    }

    /// Returns the specification of a shard. Fails if the model cannot be split like that.
    pub fn shard_spec(&self, shard: &Shard) -> Result<ModelSpec, ShardError> {
        shard::shard_spec(&self.spec, shard, &|piece| self.larger_block_type(piece))
    }

    /// Returns the maximum number of ranks that can share the shard's layers, whatever number the shard has.
    pub fn max_ranks(&self, shard: &Shard) -> usize {
        shard::max_ranks(&self.spec, shard, &|piece| self.larger_block_type(piece))
    }

    /// Returns the number format in which a slice is loaded.
    pub fn load_type(&self, piece: &TensorSlice) -> QuantType {
        match self.is_normalized(piece) {
            true => QuantType::F32,
            false => self.weight_rules.load_type(
                &piece.names(),
                self.default_type(piece),
                &tensor_slices::full_shape(piece),
            ),
        }
    }

    /// Returns the number format in which a slice is written so that it loads as under the rules: the load
    /// format, except for matrices whose rows are normalized at loading.
    pub(crate) fn write_type(&self, piece: &TensorSlice) -> QuantType {
        if self.is_normalized(piece) { self.stored_type(piece) } else { self.load_type(piece) }
    }

    /// Returns whether the rows of a slice are L2-normalized at loading.
    fn is_normalized(&self, piece: &TensorSlice) -> bool {
        let head = self.spec.last_stack().head.as_ref();
        head.is_some_and(|head| head.normalize_rows && head.table.name == piece.name)
    }

    /// Returns the stored or loaded format, whichever has larger blocks: shards must not split blocks of
    /// either.
    fn larger_block_type(&self, piece: &TensorSlice) -> QuantType {
        let (stored, loaded) = (self.stored_type(piece), self.load_type(piece));
        if loaded.row().block_elements > stored.row().block_elements { loaded } else { stored }
    }

    /// Returns the number format in which a slice is loaded if no rule matches.
    fn default_type(&self, piece: &TensorSlice) -> QuantType {
        let tensor = self.checkpoint.tensor(&piece.name).map(|tensor| tensor.default_load_type());
        let ty = tensor
            .and_then(Result::ok)
            .expect("tensors were checked when the model was opened; this is a bug");
        // Blocks cannot be transposed, so their numbers are.
        let is_turned = matches!(piece.part, TensorPart::TurnedRows { .. });
        if is_turned && ty.is_blocked() { QuantType::BF16 } else { ty }
    }

    pub(super) fn stored_type(&self, piece: &TensorSlice) -> QuantType {
        let tensor = self.checkpoint.tensor(&piece.name).map(|tensor| tensor.quant_type());
        tensor.and_then(Result::ok).expect("tensors were checked when the model was opened; this is a bug")
    }

    /// Returns the folder with the settings that accompany the weights.
    pub fn folder(&self) -> Option<Folder> {
        match &self.kind {
            SourceKind::HubFolder(folder) => Some(folder.clone()),
            SourceKind::Gguf(gguf) => Some(gguf.folder()),
            SourceKind::Llama2c | SourceKind::Synthetic => None,
        }
    }

    /// Returns the folder of the stores beside the model: in the model's folder, or beside its file. `None`
    /// for a model without files.
    pub fn stores_beside(&self) -> Option<PathBuf> {
        match &self.kind {
            SourceKind::HubFolder(Folder::Disk(path)) => Some(path.join(STORES)),
            SourceKind::Gguf(_) | SourceKind::Llama2c => {
                let name = self.path.file_name()?.to_string_lossy();
                Some(self.path.with_file_name(format!("{name}.{STORES}")))
            }
            SourceKind::HubFolder(_) | SourceKind::Synthetic => None,
        }
    }

    /// Returns the model's default name: the last component of its path, without a file extension.
    pub fn name(&self) -> String {
        let part = match &self.kind {
            SourceKind::HubFolder(Folder::Embedded(folder)) => return folder.name.to_owned(),
            SourceKind::HubFolder(folder @ Folder::Memory(_)) => return folder.path().display().to_string(),
            SourceKind::Synthetic => return self.path.display().to_string(),
            SourceKind::HubFolder(Folder::Disk(path)) => canonical(path).file_name().map(ToOwned::to_owned),
            SourceKind::Gguf(gguf) => return gguf.stem().unwrap_or_else(|| "model".to_owned()),
            SourceKind::Llama2c => canonical(&self.path).file_stem().map(ToOwned::to_owned),
        };
        part.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
    }
}

/// Returns the canonical path, or the path itself if it cannot be resolved.
fn canonical(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

fn open_path(path: &Path, spec_file: Option<&Path>) -> Result<ModelSource> {
    let found = path.metadata().with_context(|| format!("cannot open the model {}", path.display()))?;
    if found.is_dir() {
        return open_any_folder(path, spec_file);
    }
    if is_pytorch(path)? {
        bail!(
            "{}: PyTorch weights are opened by their folder: specify the folder that contains \
             pytorch_model.bin, config.json and tokenizer.json",
            path.display()
        );
    }
    let has_ending = |ending: &str| path.extension().is_some_and(|found| found == ending);
    if has_ending("safetensors") {
        bail!(
            "{}: safetensors are opened by their folder: specify the folder that contains them, config.json \
             and tokenizer.json",
            path.display()
        );
    }
    match Gguf::is_gguf_path(path)? {
        true => open_gguf(path, spec_file),
        false if has_ending("bin") => open_llama2c(path, spec_file).map_err(|error| not_llama2c(path, error)),
        false => open_llama2c(path, spec_file),
    }
}

/// Returns the error of opening a file as one of llama2.c; for a file of CTranslate2, whose names end alike,
/// one that says so.
fn not_llama2c(path: &Path, error: anyhow::Error) -> anyhow::Error {
    let mut begin = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(64).read_to_end(&mut begin));
    match read.is_ok() && begin.windows(5).any(|part| part == b"Spec\0") {
        true => anyhow!(
            "{}: models of CTranslate2 are opened by their folder: specify the folder that contains \
             model.bin, config.json and the vocabularies",
            path.display()
        ),
        false => error.context("it is neither a GGUF file nor a llama2.c file"),
    }
}

/// Opens a folder. A folder with a GGUF file is opened as that GGUF model, unless it has the files of a hub
/// model. Safetensors without a config.json are the tensors of the GGUF file.
fn open_any_folder(path: &Path, spec_file: Option<&Path>) -> Result<ModelSource> {
    let folder = Folder::disk(path);
    let is_hubs = Checkpoint::is_in_folder(&folder) && folder.has(CONFIG);
    let gguf = if is_hubs { None } else { Gguf::find_in_folder(path)? };
    match gguf {
        Some(file) => open_gguf(&file, spec_file),
        None => open_folder(folder, spec_file),
    }
}

fn open_folder(folder: Folder, spec_file: Option<&Path>) -> Result<ModelSource> {
    let (config, checkpoint) = read_folder(&folder)?;
    let spec = folder_spec(&folder, &config, spec_file)
        .map_err(|error| with_nearest(error, &folder, &config, &checkpoint))?;
    let mut spec = spec.resolve(&config, &|name| checkpoint.tensor(name).is_some())?;
    let generation = GenerationConfig::from_folder(&folder, &config)?;
    let (generation, sentence) = match spec.kind {
        Kind::Decoder => (generation, SentenceConfig::of_decoder(&folder)?),
        Kind::EncoderDecoder => (generation.for_encoder_decoder(), None),
        Kind::Encoder => (generation, SentenceConfig::from_folder(&folder)?),
    };
    if sentence.is_some() {
        spec.drop_head();
    }
    let decoder_start = decoder_start(spec.kind, &folder, &config)?;
    Ok(ModelSource {
        path: folder.path(),
        spec,
        checkpoint,
        eos: generation.eos,
        sampling_defaults: generation.sampling,
        unsupported_settings: generation.unsupported,
        chat: ChatConfig::from_folder(&folder)?,
        decoder_start,
        sentence,
        tokenizer_files: [None, None],
        weight_rules: WeightRules::default(),
        rounding: RoundingPolicy::default(),
        offload: None,
        cache_offload: None,
        link_rate: None,
        file_marks: FileMarks::default(),
        transfers: Arc::default(),
        draft: None,
        progress: Arc::default(),
        kind: SourceKind::HubFolder(folder),
    })
}

/// Returns the decoder start tokens of an encoder-decoder model.
fn decoder_start(kind: Kind, folder: &Folder, config: &HubConfig) -> Result<DecoderStart> {
    match kind {
        Kind::EncoderDecoder => DecoderStart::from_folder(folder, config),
        Kind::Decoder | Kind::Encoder => Ok(DecoderStart::default()),
    }
}

/// Returns the settings of a folder, and its tensors.
pub(super) fn read_folder(folder: &Folder) -> Result<(HubConfig, Checkpoint)> {
    if Checkpoint::is_ctranslate2(folder) {
        return Checkpoint::open_ctranslate2(folder).map(|(checkpoint, config)| (config, checkpoint));
    }
    Ok((HubConfig::from_folder(folder)?, Checkpoint::open_folder(folder)?))
}

/// Opens a GGUF file. A given specification must use the tensor names of the file.
fn open_gguf(path: &Path, spec_file: Option<&Path>) -> Result<ModelSource> {
    let (mut checkpoint, gguf) = Checkpoint::open_gguf(path)?;
    let table = GgufTable::shipped();
    let spec = match spec_file {
        Some(file) => read_spec(file)?,
        None => table.specification(&gguf)?,
    };
    let config = table.config(&gguf, &mut checkpoint, &spec)?;
    let generation = GenerationConfig::from_folder(&gguf.folder(), &config)?;
    let mut spec = spec.resolve(&config, &|name| checkpoint.tensor(name).is_some())?;
    let sentence = match spec.kind {
        Kind::Encoder => SentenceConfig::from_gguf(&gguf)?,
        Kind::Decoder => SentenceConfig::of_gguf_decoder(&gguf)?,
        Kind::EncoderDecoder => None,
    };
    if sentence.is_some() {
        spec.drop_head();
    }
    Ok(ModelSource {
        path: gguf.path().to_owned(),
        decoder_start: decoder_start(spec.kind, &gguf.folder(), &config)?,
        spec,
        checkpoint,
        eos: generation.eos,
        sampling_defaults: generation.sampling,
        unsupported_settings: generation.unsupported,
        chat: ChatConfig::from_gguf(&gguf)?,
        sentence,
        tokenizer_files: [None, None],
        weight_rules: WeightRules::default(),
        rounding: RoundingPolicy::default(),
        offload: None,
        cache_offload: None,
        link_rate: None,
        file_marks: FileMarks::default(),
        transfers: Arc::default(),
        draft: None,
        progress: Arc::default(),
        kind: SourceKind::Gguf(Arc::new(gguf)),
    })
}

fn open_llama2c(path: &Path, spec_file: Option<&Path>) -> Result<ModelSource> {
    let (checkpoint, header) = Checkpoint::open_llama2c(path)?;
    let spec = given_or_shipped(spec_file, specs::LLAMA2C)?;
    Ok(ModelSource {
        path: path.to_owned(),
        kind: SourceKind::Llama2c,
        spec: spec.resolve(&llama2c_config(path, &header), &|name| checkpoint.tensor(name).is_some())?,
        checkpoint,
        eos: LLAMA2C_EOS.into_iter().filter(|id| (*id as usize) < header.vocab).collect(),
        sampling_defaults: ParamList::default(),
        unsupported_settings: Map::new(),
        chat: ChatConfig::default(),
        decoder_start: DecoderStart::default(),
        sentence: None,
        tokenizer_files: [None, None],
        weight_rules: WeightRules::default(),
        rounding: RoundingPolicy::default(),
        offload: None,
        cache_offload: None,
        link_rate: None,
        file_marks: FileMarks::default(),
        transfers: Arc::default(),
        draft: None,
        progress: Arc::default(),
    })
}

/// Opens a synthetic model. It has no end-of-sequence token.
fn open_synthetic(shape: &SyntheticShape, spec_file: Option<&Path>) -> Result<ModelSource> {
    let spec = shape.resolve(given_or_shipped(spec_file, specs::SYNTHETIC)?)?;
    Ok(ModelSource {
        path: shape.path(),
        kind: SourceKind::Synthetic,
        checkpoint: shape.checkpoint(&spec),
        spec,
        eos: Vec::new(),
        sampling_defaults: ParamList::default(),
        unsupported_settings: Map::new(),
        chat: ChatConfig::default(),
        decoder_start: DecoderStart::default(),
        sentence: None,
        tokenizer_files: [None, None],
        weight_rules: WeightRules::default(),
        rounding: RoundingPolicy::default(),
        offload: None,
        cache_offload: None,
        link_rate: None,
        file_marks: FileMarks::default(),
        transfers: Arc::default(),
        draft: None,
        progress: Arc::default(),
    })
}

/// Returns the sizes of the header under the names that config.json uses.
fn llama2c_config(path: &Path, header: &Llama2cHeader) -> HubConfig {
    let sizes = [
        ("vocab_size", header.vocab),
        ("hidden_size", header.dim),
        ("intermediate_size", header.hidden_dim),
        ("num_hidden_layers", header.layers),
        ("num_attention_heads", header.heads),
        ("num_key_value_heads", header.kv_heads),
        ("max_position_embeddings", header.seq_len),
    ];
    let mut map: Map<String, Value> =
        sizes.into_iter().map(|(key, value)| (key.to_owned(), value.into())).collect();
    map.insert("tie_word_embeddings".to_owned(), header.shared_classifier.into());
    HubConfig::from_entries(path, map)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::ChatTemplateSource;
    use crate::testing::Scratch;
    use serde_json::json;

    fn on_disk(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
    }

    /// Returns the embedded models, each with the folder it comes from.
    fn embedded() -> [(ModelRef, PathBuf); 2] {
        [(ModelRef::Demo, on_disk("assets/demo")), (ModelRef::DemoDraft, on_disk("assets/demo-draft"))]
    }

    #[test]
    fn a_models_name_says_where_it_is() {
        assert_eq!(ModelRef::parse("").unwrap(), ModelRef::Demo);
        assert_eq!(ModelRef::parse("demo-draft").unwrap(), ModelRef::DemoDraft);
        assert_eq!(ModelRef::parse("a/model").unwrap(), ModelRef::Path("a/model".into()));
        let shape = SyntheticShape::parse("3B:bf16").unwrap();
        assert_eq!(ModelRef::parse("synthetic:3B:bf16").unwrap(), ModelRef::Synthetic(shape));
        assert!(ModelRef::parse("synthetic:").is_err());
    }

    /// Returns the folders with a config.json under `folder`.
    fn model_folders(folder: &Path) -> Vec<PathBuf> {
        let inner =
            folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
        let mut all: Vec<PathBuf> = inner.flat_map(|path| model_folders(&path)).collect();
        all.extend(folder.join(CONFIG).exists().then(|| folder.to_owned()));
        all
    }

    /// No family has a key that changes what is computed and is not read, and every key is known.
    #[test]
    fn every_key_of_the_fixtures_configurations_is_read_or_known_to_change_nothing() {
        let folders =
            [on_disk("tests/fixtures"), on_disk("assets")].map(|folder| model_folders(&folder)).concat();
        assert!(folders.len() > 60, "{}", folders.len());
        let mut wrong = Vec::new();
        let is_module =
            |path: &Path| path.ends_with("1_Pooling") || path.to_string_lossy().ends_with("_Dense");
        for path in folders.into_iter().filter(|path| !is_module(path)) {
            match ModelSource::open(&ModelRef::Path(path.clone()), None) {
                Ok(source) if source.spec.provenance.unread_keys.is_empty() => {}
                Ok(source) => {
                    wrong.push(format!("{}: {:?}", path.display(), source.spec.provenance.unread_keys));
                }
                Err(error) => wrong.push(format!("{error:#}")),
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    #[test]
    fn embedded_models_are_those_on_disk() {
        for (model, folder) in embedded() {
            let mut program = ModelSource::open(&model, None).unwrap();
            let mut disk = ModelSource::open(&ModelRef::Path(folder), None).unwrap();
            // Only the origin differs.
            for source in [&mut program, &mut disk] {
                source.spec.provenance.config = PathBuf::new();
            }
            assert_eq!(
                (&program.spec, &program.eos, program.sampling_defaults),
                (&disk.spec, &disk.eos, disk.sampling_defaults)
            );
            assert!(program.checkpoint.names().eq(disk.checkpoint.names()));
            for (ours, theirs) in program.checkpoint.tensors().zip(disk.checkpoint.tensors()) {
                assert_eq!((ours.dtype, ours.shape), (theirs.dtype, theirs.shape), "{}", ours.name);
                assert!(ours.bytes() == theirs.bytes(), "{}", ours.name);
            }
        }
    }

    #[test]
    fn the_demo_and_its_draft_speak_the_same_tokens() {
        let [demo, draft] = embedded().map(|(model, _)| ModelSource::open(&model, None).unwrap());
        assert_eq!((demo.name().as_str(), draft.name().as_str()), ("mainstem-demo", "mainstem-demo-draft"));
        let text = |source: &ModelSource| source.chat.template.clone().map(|template| template.text);
        let tokens = |source: &ModelSource| {
            (source.spec.vocab, source.eos.clone(), source.chat.special_tokens.clone())
        };
        assert_eq!((tokens(&demo), text(&demo)), (tokens(&draft), text(&draft)));
        assert!(text(&demo).is_some());
    }

    #[test]
    fn the_demos_weights_are_used_where_the_program_has_them() {
        let source = ModelSource::open(&ModelRef::Demo, None).unwrap();
        let (_, weights) = demo::DEMO.files.iter().find(|(name, _)| *name == "model.safetensors").unwrap();
        for tensor in source.checkpoint.tensors() {
            assert!(weights.as_ptr_range().contains(&tensor.bytes().as_ptr()), "{}", tensor.name);
        }
    }

    /// Opens a copy of a fixture with the added or replaced file `name`.
    fn with_file(name: &str, content: &[u8]) -> (Scratch, Result<ModelSource>) {
        let folder = Scratch::new();
        for entry in on_disk("tests/fixtures/gqa").read_dir().unwrap().flatten() {
            folder.write(&entry.file_name().to_string_lossy(), &std::fs::read(entry.path()).unwrap());
        }
        folder.write(name, content);
        let source = ModelSource::open(&ModelRef::Path(folder.path().to_owned()), None);
        (folder, source)
    }

    #[test]
    fn defaults_and_chat_template_come_from_the_folder() {
        let settings = br#"{"temperature": 0.25, "top_k": 7, "do_sample": true}"#;
        let (_folder, source) = with_file("generation_config.json", settings);
        let expected = ParamList::parse_text("temperature=0.25,top_k=7").unwrap();
        assert_eq!(source.unwrap().sampling_defaults, expected);

        let (folder, source) = with_file("chat_template.jinja", b"{{ bos_token }}");
        let origin = folder.path().join("chat_template.jinja").display().to_string();
        let chat = source.unwrap().chat;
        assert_eq!(chat.template, Some(ChatTemplateSource { origin, text: "{{ bos_token }}".to_owned() }));
        assert_eq!(chat.special_tokens["bos_token"], "<s>");

        let (folder, source) = with_file("generation_config.json", br#"{"min_p": 2}"#);
        let error = format!("{:#}", source.err().unwrap());
        let file = folder.path().join("generation_config.json");
        assert!(error.contains(file.to_str().unwrap()) && error.contains("'min_p'"), "{error}");
    }

    #[test]
    fn safetensors_come_first_and_a_folder_without_weights_says_what_it_looked_for() {
        let (_folder, source) = with_file("pytorch_model.bin", b"not looked at");
        assert!(source.is_ok());

        let (_folder, source) = with_file("model.gguf", b"not looked at");
        assert!(source.is_ok());

        let (folder, _) = with_file("pytorch_model.bin", b"looked at");
        folder.write("model.gguf", b"looked at only when that is gone");
        std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
        let refused = || {
            let source = ModelSource::open(&ModelRef::Path(folder.path().to_owned()), None);
            format!("{:#}", source.err().unwrap())
        };
        for name in ["pytorch_model.bin", "model.gguf"] {
            let file = folder.path().join(name);
            assert!(refused().starts_with(file.to_str().unwrap()), "{}", refused());
            std::fs::remove_file(file).unwrap();
        }
        let names = ["model.safetensors", "pytorch_model.bin"];
        let error = refused();
        for name in names {
            assert!(error.contains(&format!("{name} or {name}.index.json")), "{error}");
        }
    }

    #[test]
    fn a_specification_of_another_family_is_refused_with_what_to_do() {
        let (_, shipped) = specs::ALL[0];
        let (_, rest) = shipped.split_once("\nmodel_types = ").unwrap();
        let (own, rest) = rest.split_once('\n').unwrap();
        let scratch = Scratch::new();
        let opened = |types: &str| {
            let file = scratch.write("mine.toml", format!("model_types = {types}\n{rest}").as_bytes());
            ModelSource::open(&ModelRef::Path(on_disk("tests/fixtures/gqa")), Some(&file))
        };
        let error = format!("{:#}", opened("[\"one\", \"another\"]").err().unwrap());
        assert!(error.contains("key 'model_type': "), "{error}");
        assert!(error.contains("mine.toml is a specification of one, another, not of '"), "{error}");
        assert!(opened(own).is_ok());
    }

    /// A file of another format was read as one of llama2.c, whose numbers made no sense.
    #[test]
    fn files_of_other_formats_are_refused_by_their_format() {
        let scratch = Scratch::new();
        let refused = |name: &str, content: &[u8]| {
            let path = scratch.write(name, content);
            format!("{:#}", ModelSource::open(&ModelRef::Path(path), None).err().unwrap())
        };
        let error = refused("model.safetensors", &weights(|_, _| ()));
        assert!(error.contains("model.safetensors: safetensors are opened by their folder"), "{error}");
        let error = refused("model.bin", b"\x06\0\0\0\x10\0TransformerSpec\0\x07\0\0\0");
        assert!(error.contains("CTranslate2"), "{error}");
        let error = refused("other.bin", &[7; 99]);
        assert!(error.contains("neither a GGUF file nor a llama2.c file"), "{error}");
    }

    #[test]
    fn a_pytorch_file_by_itself_is_refused_without_its_folder() {
        for container in ["zip", "stream"] {
            let weights = on_disk("tests/fixtures/pickle").join(container).join("pytorch_model.bin");
            let folder = Scratch::new();
            for name in ["model.pt", "model.pth", "pytorch_model.bin"] {
                let path = folder.write(name, &std::fs::read(&weights).unwrap());
                let error =
                    format!("{:#}", ModelSource::open(&ModelRef::Path(path.clone()), None).err().unwrap());
                let expected = format!("{}: PyTorch weights are opened by their folder", path.display());
                assert!(error.starts_with(&expected), "{error}");
            }
        }
    }

    /// Returns the fixture's weights with an edited header.
    fn weights(edit: impl FnOnce(&mut serde_json::Value, usize)) -> Vec<u8> {
        let file = std::fs::read(on_disk("tests/fixtures/gqa/model.safetensors")).unwrap();
        let (length, rest) = file.split_first_chunk::<8>().unwrap();
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let mut header = serde_json::from_slice(header).unwrap();
        edit(&mut header, data.len());
        let header = header.to_string();
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
    }

    #[test]
    fn a_foreign_dtype_counts_only_in_a_tensor_that_is_needed() {
        let needed = "model.layers.1.mlp.up_proj.weight";
        let foreign = weights(|header, _| header[needed]["dtype"] = "I32".into());
        let (folder, source) = with_file("model.safetensors", &foreign);
        let error = format!("{:#}", source.err().unwrap());
        let file = folder.path().join("model.safetensors");
        let expected = format!("{}: tensor '{needed}': its dtype I32 is not supported", file.display());
        assert!(error.starts_with(&expected), "{error}");

        let ignored = weights(|header, end| {
            let nothing = json!({"dtype": "I64", "shape": [0], "data_offsets": [end, end]});
            header["model.rotary_emb.inv_freq"] = nothing;
        });
        let (_folder, source) = with_file("model.safetensors", &ignored);
        assert!(source.is_ok());
    }
}
