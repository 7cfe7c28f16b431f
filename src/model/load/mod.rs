//! Loads a model from a checkpoint into a device's memory.
//!
//! Invariant: a matrix keeps its stored number format unless the source's rules change it, vectors become
//! F32, a matrix shared by embedding and head is loaded once, and every loaded slice is recorded. At most one
//! slice has a copy outside of the device's memory. The devices of a group load concurrently. What a device
//! would allocate is counted by the same code.

mod distances;

mod experts;

mod latent;

mod packed;
mod positions;

use self::packed::packed_layers;
pub use self::packed::write_store;
use super::load_target::{ByteCounter, LoadTarget};
use super::offload::{LayerMatrix, LayerNotes, OffloadReport, PackedLayers, TransferPath};
use super::shard::{Shard, StageRole};
use super::source::ModelSource;
use super::spec::{
    AttentionSpec, DenseSpec, EmbeddingSpec, HeadSpec, LayerSpec, LinearSpec, MlpSpec, ModelSpec, NormSpec,
    Norms, PositionEmbeddingSpec, StackSpec, TensorSlice,
};
use super::tensor_slices::{self, SliceData};
use super::weights::{
    Attention, Dense, Embedding, Head, LayerWeights, Linear, Mlp, Model, SharedLayers, Stack, SublayerNorms,
    TensorRecord, WeightSource,
};
use anyhow::{Context, Result};
use mainstem_kernels::reference::ReferenceSizes;
use mainstem_kernels::{Activation, DeviceSizes, Norm, QuantType, StepLimits, Weight, Xielu};
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

/// Loads the shard's part of `source`, described by `spec`, into `target`. Position tables are made for the
/// positions within `limits`. `path` is for matrices that are read for each step. Also returns the places of
/// the layers' matrices, if these come from a store.
pub fn load<T: LoadTarget>(
    target: &mut T,
    (source, path): (&ModelSource, &TransferPath),
    shard: &Shard,
    spec: ModelSpec,
    limits: &StepLimits,
) -> Result<(Model<T::Buf>, Option<OffloadReport>)> {
    if T::READS_DATA {
        source.progress.add_total(records(source, &spec).iter().map(|record| record.bytes).sum());
    }
    let types = &|piece: &TensorSlice| source.load_type(piece);
    let tensors = ModelTensors { types, data: T::READS_DATA.then_some(source), slab: usize::MAX };
    let stacks = [
        StackScope { first_layer: shard.encoder.start, positions: limits.encoder_positions },
        StackScope { first_layer: shard.decoder.start, positions: limits.positions },
    ];
    let load = |target: &mut T| {
        let Some(offload) = &source.offload else { return load_stacks(target, tensors, &spec, stacks, None) };
        let (packed, slab) = packed_layers(target, (source, path), &spec, offload)?;
        load_stacks(target, ModelTensors { slab, ..tensors }, &spec, stacks, Some(packed))
    };
    let LoadedStacks { encoder, decoder, tensors, offload, .. } =
        load(target).with_context(|| format!("loading {}", source.path.display()))?;
    let model = Model { role: StageRole::for_shard(&source.spec, shard), spec, encoder, decoder, tensors };
    Ok((model, offload))
}

/// Returns what [`load`] would record for the part of the model described by `spec`, without reading tensor
/// data.
pub fn records(source: &ModelSource, spec: &ModelSpec) -> Vec<TensorRecord> {
    count(spec, &|piece| source.load_type(piece)).tensors
}

/// Counts the bytes of the tensors of a model, or of a part of it, without the padding of any device. `types`
/// returns the number formats in which slices are loaded. Tables that are computed for the positions of a
/// step are empty.
pub fn count(spec: &ModelSpec, types: &dyn Fn(&TensorSlice) -> QuantType) -> LoadedStacks<usize> {
    count_on(&ReferenceSizes, spec, types, usize::MAX)
}

/// Counts as [`count`] does, for a device of these sizes, with matrices in parts of at most `slab` bytes.
fn count_on(
    sizes: &dyn DeviceSizes,
    spec: &ModelSpec,
    types: &dyn Fn(&TensorSlice) -> QuantType,
    slab: usize,
) -> LoadedStacks<usize> {
    let tensors = ModelTensors { types, data: None, slab };
    let counted = load_stacks(&mut ByteCounter::new(sizes), tensors, spec, Default::default(), None);
    counted.expect("counting reads and allocates nothing, so it does not fail; this is a bug")
}

/// The stacks of a model in the memory of a device, or their sizes.
pub struct LoadedStacks<Buf> {
    pub encoder: Option<Stack<Buf>>,
    pub decoder: Option<Stack<Buf>>,
    /// The loaded tensors, in loading order.
    pub tensors: Vec<TensorRecord>,
    /// The matrices of each layer, in loading order.
    pub layer_matrices: Vec<Vec<LayerMatrix>>,
    /// The places of these matrices, if they are loaded from a store.
    pub offload: Option<OffloadReport>,
}

/// The tensors to load.
#[derive(Clone, Copy)]
struct ModelTensors<'a> {
    /// Returns the number format in which a slice is loaded.
    types: &'a dyn Fn(&TensorSlice) -> QuantType,
    /// The model with the data; `None` to count only.
    data: Option<&'a ModelSource>,
    /// Largest size of a layer's weight in bytes, above which ranges of its rows are weights of their own.
    slab: usize,
}

/// The part of a stack to load.
#[derive(Clone, Copy, Default)]
struct StackScope {
    /// Number of the first layer in the whole model, for error messages.
    first_layer: usize,
    /// Positions that tables are made for.
    positions: usize,
}

/// Loads the encoder and the decoder of `spec`.
fn load_stacks<T: LoadTarget>(
    target: &mut T,
    tensors: ModelTensors,
    spec: &ModelSpec,
    [encoder, decoder]: [StackScope; 2],
    packed: Option<PackedLayers>,
) -> Result<LoadedStacks<T::Buf>> {
    let mut loader = Loader::new(target, tensors, packed);
    let encoder = spec.encoder.as_ref().map(|stack| loader.stack(stack, encoder)).transpose()?;
    let decoder = spec.decoder.as_ref().map(|stack| loader.stack(stack, decoder)).transpose()?;
    Ok(LoadedStacks {
        encoder,
        decoder,
        tensors: loader.records,
        offload: loader.layers.packed.as_ref().map(PackedLayers::report),
        layer_matrices: loader.layers.matrices,
    })
}

struct Loader<'a, T: LoadTarget> {
    target: &'a mut T,
    tensors: ModelTensors<'a>,
    /// Embeddings and heads by name, which encoder, decoder and head may share.
    tables: HashMap<String, Arc<Weight<T::Buf>>>,
    records: Vec<TensorRecord>,
    layers: LayerNotes,
    /// Positions that tables of the current stack are made for.
    positions: usize,
}

impl<'a, T: LoadTarget> Loader<'a, T> {
    fn new(target: &'a mut T, tensors: ModelTensors<'a>, packed: Option<PackedLayers>) -> Loader<'a, T> {
        let layers = LayerNotes::new(packed);
        Loader { target, tensors, tables: HashMap::new(), records: Vec::new(), layers, positions: 0 }
    }

    /// Loads a stack. Errors number layers as in the whole model.
    fn stack(&mut self, spec: &StackSpec, scope: StackScope) -> Result<Stack<T::Buf>> {
        let StackScope { first_layer, positions } = scope;
        self.positions = positions;
        let embedding = spec
            .embedding
            .as_ref()
            .map(|own| self.embedding(own, &spec.position_embedding, positions))
            .transpose()?;
        let relative_biases = spec.relative_biases.iter().map(|spec| self.relative_bias(spec, positions));
        let relative_biases = relative_biases.collect::<Result<_>>()?;
        let ropes = spec.ropes.iter().map(|spec| self.rope(spec, positions)).collect::<Result<_>>()?;
        let weights = self.layers(&spec.layers, first_layer)?;
        let norm = self.opt_norm(&spec.norm)?;
        let head = spec.head.as_ref().map(|head| self.head(head)).transpose()?;
        Ok(Stack { embedding, ropes, relative_biases, weights, norm, head })
    }

    fn embedding(
        &mut self,
        spec: &EmbeddingSpec,
        added: &Option<PositionEmbeddingSpec>,
        positions: usize,
    ) -> Result<Embedding<T::Buf>> {
        let EmbeddingSpec { table, scale, project_in, projects_last, token_types, norm, norm_first } = spec;
        let first_projection = project_in.as_ref().filter(|_| !projects_last);
        let width = first_projection.map_or(table.shape[1], |linear| linear.n);
        Ok(Embedding {
            table: self.table(table, false)?,
            first_token: table.bounds.rows.as_ref().map_or(0, |rows| rows.start),
            scale: *scale,
            project_in: project_in.as_ref().map(|linear| self.linear(linear)).transpose()?,
            projects_last: *projects_last,
            position_table: self.position_table(added, token_types.as_ref(), (positions, width))?,
            norm: self.opt_norm(norm)?,
            norm_first: *norm_first,
        })
    }

    /// Loads layers, which are numbered from `first`. Those with the same tensors share their weights, unless
    /// these come from a store.
    fn layers(&mut self, specs: &[LayerSpec], first: usize) -> Result<Box<dyn WeightSource<T::Buf>>> {
        let (mut layers, mut places, first_noted) = (Vec::new(), Vec::new(), self.layers.matrices.len());
        for (index, spec) in specs.iter().enumerate() {
            let is_shared = |earlier: &usize| self.layers.packed.is_none() && specs[*earlier] == *spec;
            if let Some(earlier) = (0..index).find(is_shared) {
                places.push(places[earlier]);
                self.layers.matrices.push(self.layers.matrices[first_noted + earlier].clone());
                continue;
            }
            places.push(layers.len());
            layers.push(self.block(spec).with_context(|| format!("layer {}", first + index))?);
        }
        Ok(match &mut self.layers.packed {
            Some(packed) => packed.weight_source(self.target, layers)?,
            None if layers.len() < places.len() => Box::new(SharedLayers { layers, places }),
            None => Box::new(layers),
        })
    }

    fn block(&mut self, spec: &LayerSpec) -> Result<LayerWeights<T::Buf>> {
        self.layers.begin();
        let layer = self.layer(spec);
        self.layers.end();
        layer
    }

    fn layer(&mut self, spec: &LayerSpec) -> Result<LayerWeights<T::Buf>> {
        Ok(LayerWeights {
            attention_norms: self.sublayer_norms(&spec.attention_norms)?,
            attention: self.attention(&spec.attention)?,
            cross: match &spec.cross {
                Some((norms, attention)) => Some((self.sublayer_norms(norms)?, self.attention(attention)?)),
                None => None,
            },
            mlp_norms: self.sublayer_norms(&spec.mlp_norms)?,
            mlp: match &spec.mlp {
                MlpSpec::Dense(dense) => Mlp::Dense(Box::new(self.dense(dense)?)),
                MlpSpec::Experts(moe) => Mlp::Experts(Box::new(self.moe(moe)?)),
            },
        })
    }

    fn attention(&mut self, spec: &AttentionSpec) -> Result<Attention<T::Buf>> {
        let [q, k] = [&spec.q, &spec.k].map(|linear| self.divided_linear(linear));
        let v = match spec.latent {
            Some(_) => self.head_linear(spec.heads, &spec.v),
            None => self.divided_linear(&spec.v),
        };
        let o = self.divided_linear(&spec.o);
        let qk_norms = match &spec.qk_norms {
            Some((q, k)) => Some((self.norm(q)?, self.norm(k)?)),
            None => None,
        };
        let sinks = spec.sinks.as_ref().map(|piece| self.vector(piece, 0.0)).transpose()?;
        let latent = spec.latent.as_ref().map(|latent| self.latent(spec.heads, latent)).transpose()?;
        let (q, k, v, o, qk_split) = (q?, k?, v?, o?, spec.qk_split.clone());
        let distances =
            spec.distances.as_ref().map(|spec_of| self.distances(spec_of, spec.k_dim)).transpose()?;
        Ok(Attention { q, k, v, o, qk_norms, sinks, qk_split, latent, distances })
    }

    fn dense(&mut self, spec: &DenseSpec) -> Result<Dense<T::Buf>> {
        let gate = self.divided_linear(&spec.gate)?;
        let up = spec.up.as_ref().map(|up| self.divided_linear(up)).transpose()?;
        let down = self.divided_linear(&spec.down)?;
        Ok(Dense { width: spec.width, activation: self.activation(spec)?, gate, up, down })
    }

    /// Returns the activation with its learned numbers, if it has some and data is read.
    fn activation(&mut self, spec: &DenseSpec) -> Result<Activation> {
        let mut numbers = Vec::new();
        for piece in &spec.activation_numbers {
            numbers.extend(self.read_vector(piece, 0.0)?.1.into_iter().flatten());
        }
        Ok(match numbers[..] {
            [positive, negative, linear, bound] => {
                let softplus = |x: f32| f64::from(x).max(0.0) + (-f64::from(x).abs()).exp().ln_1p();
                let negative = (f64::from(linear) + softplus(negative)) as f32;
                Activation::Xielu(Xielu { positive: softplus(positive) as f32, negative, linear, bound })
            }
            _ => spec.activation,
        })
    }

    fn head(&mut self, spec: &HeadSpec) -> Result<Head<T::Buf>> {
        let transform = match &spec.transform {
            Some((linear, activation, norm)) => Some((self.linear(linear)?, *activation, self.norm(norm)?)),
            None => None,
        };
        Ok(Head {
            transform,
            project_out: spec.project_out.as_ref().map(|linear| self.linear(linear)).transpose()?,
            table: self.table(&spec.table, spec.normalize_rows)?,
            vocab_split: spec.vocab_split.clone(),
            bias: spec.bias.as_ref().map(|bias| self.vector(bias, 0.0)).transpose()?,
            scale: spec.scale,
            softcap: spec.softcap,
        })
    }

    fn sublayer_norms(&mut self, spec: &Norms) -> Result<SublayerNorms<T::Buf>> {
        let [pre, out, post] = [&spec.pre, &spec.out, &spec.post].map(|norm| self.opt_norm(norm));
        Ok(SublayerNorms { pre: pre?, out: out?, post: post? })
    }

    fn opt_norm(&mut self, spec: &Option<NormSpec>) -> Result<Option<Norm<T::Buf>>> {
        spec.as_ref().map(|norm| self.norm(norm)).transpose()
    }

    fn norm(&mut self, spec: &NormSpec) -> Result<Norm<T::Buf>> {
        let NormSpec { kind, width, eps, offset, .. } = *spec;
        let (weight, bias) = (self.vectors(&spec.weights, offset)?, self.vectors(&spec.biases, 0.0)?);
        Ok(Norm { kind, weight, bias, sets: spec.weights.len().max(1), width, eps })
    }

    fn linear(&mut self, spec: &LinearSpec) -> Result<Linear<T::Buf>> {
        self.linear_of_parts(spec, 1)
    }

    /// Loads a linear layer of a block, whose rows may be divided among several weights.
    fn divided_linear(&mut self, spec: &LinearSpec) -> Result<Linear<T::Buf>> {
        let layout =
            self.target.device_sizes().packed_layout((self.tensors.types)(&spec.weight), spec.n, spec.k);
        self.linear_of_parts(spec, layout.bytes.div_ceil(self.tensors.slab))
    }

    fn linear_of_parts(&mut self, spec: &LinearSpec, parts: usize) -> Result<Linear<T::Buf>> {
        let (parts, first) = (tensor_slices::divide_rows(&spec.weight, spec.n, parts), self.records.len());
        let mut weights = parts.iter().map(|part| self.matrix(part, false)).collect::<Result<Vec<_>>>()?;
        // A tensor in parts is one.
        let whole = tensor_slices::slice_record(&spec.weight, (self.tensors.types)(&spec.weight));
        self.records.splice(first.., [whole]);
        let bias = spec.bias.as_ref().map(|bias| self.vector(bias, 0.0)).transpose()?;
        Ok(Linear { weight: weights.remove(0), rest: weights, bias })
    }

    /// Loads a matrix that may be shared.
    fn table(&mut self, piece: &TensorSlice, normalized: bool) -> Result<Arc<Weight<T::Buf>>> {
        // The matrix with normalized rows is a different one.
        let key = if normalized { format!("{} (normalized)", piece.name) } else { piece.name.clone() };
        if let Some(known) = self.tables.get(&key) {
            return Ok(known.clone());
        }
        let table = Arc::new(self.matrix(piece, normalized)?);
        self.tables.insert(key, table.clone());
        Ok(table)
    }

    /// Loads a matrix in its load format. Normalized ones are F32.
    fn matrix(&mut self, piece: &TensorSlice, normalized: bool) -> Result<Weight<T::Buf>> {
        let ty = if normalized { QuantType::F32 } else { (self.tensors.types)(piece) };
        if let Some(weight) = self.layer_matrix(piece, ty)? {
            return Ok(weight);
        }
        let (record, stored) = self.read(piece, ty)?;
        let data = match (stored, self.tensors.data) {
            (Some(stored), _) if normalized => tensor_slices::l2_normalize_rows(stored).bytes,
            (Some(stored), Some(source)) => {
                stored
                    .requantize(ty, piece.rounding(&source.rounding), self.target.threads())
                    .with_context(|| format!("tensor '{}'", piece.name))?
                    .bytes
            }
            _ => Cow::default(),
        };
        let uploaded = self.target.upload_weight(ty, record.n(), record.k(), &data);
        let mut uploaded =
            uploaded.with_context(|| format!("tensor '{}' of {} bytes", piece.name, record.bytes))?;
        uploaded.id = Some(piece.matrix_id());
        self.layers.pack(self.target, &mut uploaded)?;
        if let Some(source) = self.tensors.data {
            // A copy read from disk is not needed any more.
            source.checkpoint.release(&piece.name);
        }
        Ok(uploaded)
    }

    /// Notes a matrix of a layer, and loads it if it comes from a store.
    fn layer_matrix(&mut self, piece: &TensorSlice, ty: QuantType) -> Result<Option<Weight<T::Buf>>> {
        let record = tensor_slices::slice_record(piece, ty);
        let loaded = self.layers.load(self.target, piece, (ty, record.n(), record.k()));
        let Some(buf) = loaded.with_context(|| format!("tensor '{}'", piece.name))? else { return Ok(None) };
        if let Some(source) = self.tensors.data {
            source.progress.advance(record.bytes)?;
        }
        let weight = Weight { id: Some(piece.matrix_id()), buf, ty, n: record.n(), k: record.k() };
        self.records.push(record);
        Ok(Some(weight))
    }

    /// Loads a vector in F32, with `offset` added.
    fn vector(&mut self, piece: &TensorSlice, offset: f32) -> Result<T::Buf> {
        let (len, values) = self.read_vector(piece, offset)?;
        self.upload(len, values).with_context(|| format!("tensor '{}'", piece.name))
    }

    /// Loads vectors one after another in F32, with `offset` added, or nothing if there are none.
    fn vectors(&mut self, pieces: &[TensorSlice], offset: f32) -> Result<Option<T::Buf>> {
        let Some(first) = pieces.first() else { return Ok(None) };
        let all = pieces.iter().map(|piece| self.read_vector(piece, offset)).collect::<Result<Vec<_>>>()?;
        let len = all.iter().map(|(len, _)| len).sum();
        let values = self.tensors.data.map(|_| all.into_iter().filter_map(|(_, values)| values).flatten());
        let uploaded = self.upload(len, values.map(Iterator::collect));
        Ok(Some(uploaded.with_context(|| format!("tensor '{}'", first.name))?))
    }

    /// Reads a vector, or a row of a matrix, in F32 with `offset` added. Returns it with its length.
    fn read_vector(&mut self, piece: &TensorSlice, offset: f32) -> Result<(usize, Option<Vec<f32>>)> {
        let (record, stored) = self.read(piece, (self.tensors.types)(piece))?;
        let mut values = stored.map(|stored| stored.to_f32());
        values.iter_mut().flatten().for_each(|value| *value += offset);
        Ok((record.n() * record.k(), values))
    }

    /// Uploads `len` values, which are given if data is read.
    fn upload(&mut self, len: usize, values: Option<Vec<f32>>) -> Result<T::Buf> {
        self.upload_bytes(len * size_of::<f32>(), values.map(|values| little_endian(&values)))
    }

    fn upload_bytes(&mut self, len: usize, bytes: Option<Vec<u8>>) -> Result<T::Buf> {
        let mut buf = self.target.alloc(len)?;
        if let Some(bytes) = bytes {
            assert_eq!(bytes.len(), len, "the size of a buffer is known in advance; this is a bug");
            self.target.upload(&mut buf, &bytes);
        }
        Ok(buf)
    }

    /// Records a slice that is loaded in the format `ty`. Reads its stored data, unless it is only counted.
    fn read(&mut self, piece: &TensorSlice, ty: QuantType) -> Result<(TensorRecord, Option<SliceData<'a>>)> {
        let record = tensor_slices::slice_record(piece, ty);
        self.records.push(record.clone());
        let Some(source) = self.tensors.data else { return Ok((record, None)) };
        let stored = tensor_slices::read_slice(&source.checkpoint, piece)?;
        tensor_slices::check_finite(piece, &stored)?;
        source.progress.advance(record.bytes)?;
        Ok((record, Some(stored)))
    }
}

fn little_endian(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
