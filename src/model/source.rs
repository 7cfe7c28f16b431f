//! A model as the user names it: a hub's model folder, a GGUF or llama2.c file, one that is part of the program,
//! or one of random numbers.
//!
//! Invariant: after `open` everything that was said about the model is read and consistent, tensors' names
//! and shapes included; none of its weights has been touched yet.

use super::gguf::GgufTable;
use super::importance::{Choice, Observations};
use super::pieces;
use super::progress::Progress;
use super::shard::{self, Refusal, Shard};
use super::spec::{Kind, ModelSpec, Piece, SpecFile};
use super::synthetic::Shape;
use super::tensors;
use super::weights::Weights;
use crate::demo;
use crate::formats::{
    ChatFiles, Checkpoint, DecoderOpening, Folder, GenerationConfig, Gguf, HubConfig, Llama2cHeader,
    SamplingDefaults, SentenceFiles, is_pytorch,
};
use crate::specs;
use anyhow::{Context, Result, bail, ensure};
use mainstem_kernels::QuantType;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What the demo is called.
const DEMO: &str = "demo";

/// What a name of a synthetic model begins with.
pub(super) const SYNTHETIC: &str = "synthetic:";

/// Which model is meant.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelRef {
    /// The one that is part of the program.
    Demo,
    /// Its draft, part of the program too.
    DemoDraft,
    /// A folder or a file.
    Path(PathBuf),
    /// Random weights.
    Synthetic(Shape),
}

impl ModelRef {
    /// The model that a user names: nothing or `demo` is the demo, `synthetic:SHAPE` is random weights (see
    /// [`Shape::named`]), and anything else is a path.
    pub fn parse(name: &str) -> Result<ModelRef> {
        match name.strip_prefix(SYNTHETIC) {
            Some(shape) => Shape::named(shape).map(ModelRef::Synthetic),
            None if name.is_empty() || name == DEMO => Ok(ModelRef::Demo),
            None => Ok(ModelRef::Path(name.into())),
        }
    }
}

/// An opened model.
pub struct ModelSource {
    /// The folder or file, to name in errors. Of a model that has none, what stands for it.
    pub path: PathBuf,
    pub kind: SourceKind,
    pub spec: ModelSpec,
    pub checkpoint: Checkpoint,
    /// Tokens that end a sequence.
    pub eos: Vec<u32>,
    /// How tokens are drawn for requests that do not say.
    pub defaults: SamplingDefaults,
    /// What generation_config.json wants beside, and is not served.
    pub unserved: Map<String, Value>,
    pub chat: ChatFiles,
    /// What a decoder behind an encoder begins with.
    pub opening: DecoderOpening,
    /// How a text becomes a vector; `None` where nothing says so, and for models with a decoder.
    pub sentence: Option<SentenceFiles>,
    /// In which number formats matrices are loaded; at first, as they are stored.
    pub weights: Weights,
    /// How codes are chosen for those that get another.
    pub codes: Choice,
    /// What devices that run it note their products' inputs in, if somebody wants to know.
    pub observations: Option<Arc<Observations>>,
    /// How far devices that load it are.
    pub progress: Arc<Progress>,
}

/// How the model lies on disk, or in the program.
#[derive(Clone, Debug)]
pub enum SourceKind {
    /// A folder with config.json, tokenizer.json and safetensors, or what PyTorch saved.
    HubFolder(Folder),
    /// A GGUF file, or several, by what it says.
    Gguf(Arc<Gguf>),
    /// A llama2.c checkpoint, its tokenizer beside it.
    Llama2c,
    /// Random weights, without a tokenizer.
    Synthetic,
}

/// A folder's settings, and its own specification.
const CONFIG: &str = "config.json";
pub(super) const OWN_SPEC: &str = "spec.toml";

/// llama2.c ends a text with the BOS token of the next one; EOS is there for good measure.
const LLAMA2C_EOS: [u32; 2] = [1, 2];

impl ModelSource {
    /// Opens a model; `spec_file` takes the place of the shipped specification (a folder's own `spec.toml`
    /// does too).
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
                "{}: eos_token_id {id} is not in the vocabulary of {}",
                source.path.display(),
                source.spec.vocab
            );
        }
        Ok(source)
    }

    /// The specification of what a member holds. Refuses a split that cannot be done.
    pub fn part(&self, shard: &Shard) -> Result<ModelSpec, Refusal> {
        shard::cut(&self.spec, shard, &|piece| self.coarser(piece))
    }

    /// The most members that can share the shard's layers, whatever number of them it names.
    pub fn members_max(&self, shard: &Shard) -> usize {
        shard::members_max(&self.spec, shard, &|piece| self.coarser(piece))
    }

    /// The number format that a piece is loaded in.
    pub fn loaded_as(&self, piece: &Piece) -> QuantType {
        match self.is_normalised(piece) {
            true => QuantType::F32,
            false => self.weights.of(piece, self.usual(piece), &pieces::whole(piece)),
        }
    }

    /// The one that a part is written in, so that it is loaded as by the rules: but for those whose rows are changed at
    /// loading, the one it is loaded in.
    pub(super) fn written_as(&self, piece: &Piece) -> QuantType {
        if self.is_normalised(piece) { self.stored_as(piece) } else { self.loaded_as(piece) }
    }

    /// Whether rows are brought to length 1 when it is loaded.
    fn is_normalised(&self, piece: &Piece) -> bool {
        let head = self.spec.last_stack().head.as_ref();
        head.is_some_and(|head| head.normalised && head.table.name == piece.name)
    }

    /// Of the formats it is stored and loaded in, that of the larger blocks: neither's are cut.
    fn coarser(&self, piece: &Piece) -> QuantType {
        let (stored, loaded) = (self.stored_as(piece), self.loaded_as(piece));
        if loaded.row().block_elements > stored.row().block_elements { loaded } else { stored }
    }

    /// The one it is loaded in where no rule says.
    fn usual(&self, piece: &Piece) -> QuantType {
        let tensor = self.checkpoint.tensor(&piece.name).map(|tensor| tensor.usual_type());
        tensor.and_then(Result::ok).expect("tensors were checked when the model was opened; this is a bug")
    }

    pub(super) fn stored_as(&self, piece: &Piece) -> QuantType {
        let tensor = self.checkpoint.tensor(&piece.name).map(|tensor| tensor.quant_type());
        tensor.and_then(Result::ok).expect("tensors were checked when the model was opened; this is a bug")
    }

    /// The folder where its settings may lie beside its weights.
    pub fn folder(&self) -> Option<Folder> {
        match &self.kind {
            SourceKind::HubFolder(folder) => Some(folder.clone()),
            SourceKind::Gguf(gguf) => Some(gguf.folder()),
            SourceKind::Llama2c | SourceKind::Synthetic => None,
        }
    }

    /// What the model is called unless the user says: the last part of the path, without a file's extension.
    pub fn name(&self) -> String {
        let part = match &self.kind {
            SourceKind::HubFolder(Folder::Embedded(folder)) => return folder.name.to_owned(),
            SourceKind::HubFolder(folder @ Folder::Memory(_)) => return folder.path().display().to_string(),
            SourceKind::Synthetic => return self.path.display().to_string(),
            SourceKind::HubFolder(Folder::Disk(path)) => whole(path).file_name().map(ToOwned::to_owned),
            SourceKind::Gguf(gguf) => return gguf.stem().unwrap_or_else(|| "model".to_owned()),
            SourceKind::Llama2c => whole(&self.path).file_stem().map(ToOwned::to_owned),
        };
        part.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
    }
}

/// The path without links and dots, as far as it can be had.
fn whole(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

fn open_path(path: &Path, spec_file: Option<&Path>) -> Result<ModelSource> {
    let found = path.metadata().with_context(|| format!("cannot open the model {}", path.display()))?;
    if found.is_dir() {
        return open_any_folder(path, spec_file);
    }
    if is_pytorch(path)? {
        bail!(
            "{}: PyTorch's weights are opened by their folder: name the one that has them as pytorch_model.bin, \
             with config.json and tokenizer.json beside them",
            path.display()
        );
    }
    match Gguf::is_meant(path)? {
        true => open_gguf(path, spec_file),
        false => open_llama2c(path, spec_file),
    }
}

/// A folder with a GGUF file is that file's model, unless it has what a hub's model is made of. Without settings beside
/// them, safetensors are that file's tensors.
fn open_any_folder(path: &Path, spec_file: Option<&Path>) -> Result<ModelSource> {
    let folder = Folder::disk(path);
    let is_hubs = Checkpoint::is_in_folder(&folder) && folder.has(CONFIG);
    let gguf = if is_hubs { None } else { Gguf::in_folder(path)? };
    match gguf {
        Some(file) => open_gguf(&file, spec_file),
        None => open_folder(folder, spec_file),
    }
}

fn open_folder(folder: Folder, spec_file: Option<&Path>) -> Result<ModelSource> {
    let config = HubConfig::from_folder(&folder)?;
    let spec = folder_spec(&folder, &config, spec_file)?;
    let checkpoint = Checkpoint::open_folder(&folder)?;
    let spec = spec.resolve(&config, &|name| checkpoint.tensor(name).is_some())?;
    let generation = GenerationConfig::from_folder(&folder, &config)?;
    let (generation, sentence) = match spec.kind {
        Kind::Decoder => (generation, None),
        Kind::EncoderDecoder => (generation.behind_an_encoder(), None),
        Kind::Encoder => (generation, SentenceFiles::from_folder(&folder)?),
    };
    let opening = opening(spec.kind, &folder, &config)?;
    Ok(ModelSource {
        path: folder.path(),
        spec,
        checkpoint,
        eos: generation.eos,
        defaults: generation.sampling,
        unserved: generation.unserved,
        chat: ChatFiles::from_folder(&folder)?,
        opening,
        sentence,
        weights: Weights::default(),
        codes: Choice::default(),
        observations: None,
        progress: Arc::default(),
        kind: SourceKind::HubFolder(folder),
    })
}

/// What a decoder begins with, where that is not the prompt.
fn opening(kind: Kind, folder: &Folder, config: &HubConfig) -> Result<DecoderOpening> {
    match kind {
        Kind::EncoderDecoder => DecoderOpening::from_folder(folder, config),
        Kind::Decoder | Kind::Encoder => Ok(DecoderOpening::default()),
    }
}

/// The specification that is given, else the folder's own, else the shipped one for its type.
fn folder_spec(folder: &Folder, config: &HubConfig, spec_file: Option<&Path>) -> Result<SpecFile> {
    if let Some(file) = spec_file {
        return read_spec(file);
    }
    if let Some(own) = folder.read_text(OWN_SPEC)? {
        return SpecFile::parse(&folder.file(OWN_SPEC).display().to_string(), &own);
    }
    let file = || config.file().display().to_string();
    let model_type = config
        .opt_str("model_type")?
        .with_context(|| format!("{}: the key 'model_type' is missing", file()))?;
    SpecFile::for_model_type(model_type).with_context(file)
}

/// A specification that is given describes the file as it is: its tensors have the names they have there.
fn open_gguf(path: &Path, spec_file: Option<&Path>) -> Result<ModelSource> {
    let (mut checkpoint, gguf) = Checkpoint::open_gguf(path)?;
    let table = GgufTable::shipped();
    let spec = match spec_file {
        Some(file) => read_spec(file)?,
        None => table.specification(&gguf)?,
    };
    let config = table.config(&gguf, &mut checkpoint, &spec)?;
    let generation = GenerationConfig::from_folder(&gguf.folder(), &config)?;
    let spec = spec.resolve(&config, &|name| checkpoint.tensor(name).is_some())?;
    let sentence = match spec.kind {
        Kind::Encoder => SentenceFiles::from_gguf(&gguf)?,
        Kind::Decoder | Kind::EncoderDecoder => None,
    };
    Ok(ModelSource {
        path: gguf.path().to_owned(),
        opening: opening(spec.kind, &gguf.folder(), &config)?,
        spec,
        checkpoint,
        eos: generation.eos,
        defaults: generation.sampling,
        unserved: generation.unserved,
        chat: ChatFiles::from_gguf(&gguf)?,
        sentence,
        weights: Weights::default(),
        codes: Choice::default(),
        observations: None,
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
        spec: spec.resolve(&as_config(path, &header), &|name| checkpoint.tensor(name).is_some())?,
        checkpoint,
        eos: LLAMA2C_EOS.into_iter().filter(|id| (*id as usize) < header.vocab).collect(),
        defaults: SamplingDefaults::default(),
        unserved: Map::new(),
        chat: ChatFiles::default(),
        opening: DecoderOpening::default(),
        sentence: None,
        weights: Weights::default(),
        codes: Choice::default(),
        observations: None,
        progress: Arc::default(),
    })
}

/// Random numbers end no text: no token is one that ends it.
fn open_synthetic(shape: &Shape, spec_file: Option<&Path>) -> Result<ModelSource> {
    let spec = shape.resolve(given_or_shipped(spec_file, specs::SYNTHETIC)?)?;
    Ok(ModelSource {
        path: shape.path(),
        kind: SourceKind::Synthetic,
        checkpoint: shape.checkpoint(&spec),
        spec,
        eos: Vec::new(),
        defaults: SamplingDefaults::default(),
        unserved: Map::new(),
        chat: ChatFiles::default(),
        opening: DecoderOpening::default(),
        sentence: None,
        weights: Weights::default(),
        codes: Choice::default(),
        observations: None,
        progress: Arc::default(),
    })
}

fn given_or_shipped(spec_file: Option<&Path>, model_type: &str) -> Result<SpecFile> {
    match spec_file {
        Some(file) => read_spec(file),
        None => SpecFile::for_model_type(model_type),
    }
}

fn read_spec(file: &Path) -> Result<SpecFile> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    SpecFile::parse(&file.display().to_string(), &text)
}

/// The header's sizes under the names that config.json has for them.
fn as_config(path: &Path, header: &Llama2cHeader) -> HubConfig {
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
    use crate::formats::ChatSource;
    use crate::testing::Scratch;
    use serde_json::json;

    fn on_disk(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
    }

    /// The embedded models, each with the folder it comes from.
    fn embedded() -> [(ModelRef, PathBuf); 2] {
        [(ModelRef::Demo, on_disk("assets/demo")), (ModelRef::DemoDraft, on_disk("assets/demo-draft"))]
    }

    #[test]
    fn a_models_name_says_where_it_is() {
        assert_eq!(ModelRef::parse("").unwrap(), ModelRef::Demo);
        assert_eq!(ModelRef::parse("a/model").unwrap(), ModelRef::Path("a/model".into()));
        let shape = Shape::named("3B:bf16").unwrap();
        assert_eq!(ModelRef::parse("synthetic:3B:bf16").unwrap(), ModelRef::Synthetic(shape));
        assert!(ModelRef::parse("synthetic:").is_err());
    }

    #[test]
    fn embedded_models_are_those_on_disk() {
        for (model, folder) in embedded() {
            let mut program = ModelSource::open(&model, None).unwrap();
            let mut disk = ModelSource::open(&ModelRef::Path(folder), None).unwrap();
            // All is the same but where it is.
            for source in [&mut program, &mut disk] {
                source.spec.provenance.config = PathBuf::new();
            }
            assert_eq!(
                (&program.spec, &program.eos, program.defaults),
                (&disk.spec, &disk.eos, disk.defaults)
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

    /// A copy of a fixture, with a file of `content` put into it.
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
        let expected = SamplingDefaults { temperature: Some(0.25), top_k: Some(7), ..Default::default() };
        assert_eq!(source.unwrap().defaults, expected);

        let (folder, source) = with_file("chat_template.jinja", b"{{ bos_token }}");
        let origin = folder.path().join("chat_template.jinja").display().to_string();
        let chat = source.unwrap().chat;
        assert_eq!(chat.template, Some(ChatSource { origin, text: "{{ bos_token }}".to_owned() }));
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
    fn a_pytorch_file_by_itself_is_told_to_come_with_its_folder() {
        for container in ["zip", "stream"] {
            let weights = on_disk("tests/fixtures/pickle").join(container).join("pytorch_model.bin");
            let folder = Scratch::new();
            for name in ["model.pt", "model.pth", "pytorch_model.bin"] {
                let path = folder.write(name, &std::fs::read(&weights).unwrap());
                let error =
                    format!("{:#}", ModelSource::open(&ModelRef::Path(path.clone()), None).err().unwrap());
                let expected = format!("{}: PyTorch's weights are opened by their folder", path.display());
                assert!(error.starts_with(&expected), "{error}");
            }
        }
    }

    /// The fixture's weights with an edited header.
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
