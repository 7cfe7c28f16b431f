//! From a checkpoint's tensors to a model in a device's memory.
//!
//! Invariant: a matrix keeps the number format it is stored in but where the source's rules say otherwise, a vector becomes F32, a matrix that embeddings and heads
//! share is loaded once, and what was loaded is recorded piece by piece. Of a device's weights never more than one piece has
//! a copy beside the device's; devices of a group load at the same time.

use super::distance;
use super::importance::MatrixId;
use super::pieces::{self, Taken};
use super::rope;
use super::shard::{Seams, Shard};
use super::source::ModelSource;
use super::spec::{
    AddedSpec, AttentionSpec, DenseSpec, DistanceKind, DistanceSpec, EmbeddingSpec, HeadSpec, LayerSpec,
    LinearSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec, Norms, Piece, RopeSpec, Spread, StackSpec,
};
use super::tensors;
use crate::formats::Checkpoint;
use anyhow::{Context, Result};
use mainstem_kernels::{
    Activation, Backend, DistanceBias, Expert, MoeShape, Norm, QuantType, Rope, StepLimits, Weight,
};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// A model, or a member's part of one, in a device's memory. An encoder-decoder model has two stacks.
pub struct Model<Buf> {
    /// Of the part.
    pub spec: ModelSpec,
    pub seams: Seams,
    pub encoder: Option<Stack<Buf>>,
    pub decoder: Option<Stack<Buf>>,
    /// What was loaded, in loading order.
    pub tensors: Vec<TensorRecord>,
}

/// One stack of layers with what stands before and after it.
pub struct Stack<Buf> {
    /// Where the first layer is.
    pub embedding: Option<Embedding<Buf>>,
    /// Every kind of rotary positions that some layer has.
    pub ropes: Vec<Rope<Buf>>,
    /// What layers add to scores by distance.
    pub distance: Option<DistanceBias<Buf>>,
    pub source: WeightSource<Buf>,
    pub norm: Option<Norm<Buf>>,
    pub head: Option<Head<Buf>>,
}

/// From tokens to the residual stream.
pub struct Embedding<Buf> {
    /// (tokens, width)
    pub table: Arc<Weight<Buf>>,
    /// The token of the table's first row.
    pub first: usize,
    pub scale: f32,
    /// To the width of the residual stream.
    pub project_in: Option<Linear<Buf>>,
    /// Rows that are added by position, (positions, hidden), and the row of position 0.
    pub added: Option<(Weight<Buf>, usize)>,
    pub norm: Option<Norm<Buf>>,
}

/// Hands out the weights of each layer.
pub enum WeightSource<Buf> {
    /// All layers lie in the device's memory.
    Resident(Vec<Block<Buf>>),
}

/// The weights of one layer.
pub struct Block<Buf> {
    pub attention_norms: SublayerNorms<Buf>,
    pub attention: Attention<Buf>,
    /// To what the encoder made.
    pub cross: Option<(SublayerNorms<Buf>, Attention<Buf>)>,
    pub mlp_norms: SublayerNorms<Buf>,
    pub mlp: Mlp<Buf>,
}

/// The norms around a sub-layer: of what it reads, of what it gives, of the sum.
pub struct SublayerNorms<Buf> {
    pub pre: Option<Norm<Buf>>,
    pub out: Option<Norm<Buf>>,
    pub post: Option<Norm<Buf>>,
}

/// The projections around attention.
pub struct Attention<Buf> {
    pub q: Linear<Buf>,
    pub k: Linear<Buf>,
    pub v: Linear<Buf>,
    pub o: Linear<Buf>,
    /// Of queries and of keys.
    pub qk_norms: Option<(Norm<Buf>, Norm<Buf>)>,
    /// What of those is on other members.
    pub spread: Option<(Spread, Spread)>,
}

/// A feed-forward network.
pub enum Mlp<Buf> {
    Dense(Dense<Buf>),
    Experts(Box<Moe<Buf>>),
}

/// down(act(gate(x)) * up(x)); without `up`, down(act(gate(x))).
pub struct Dense<Buf> {
    pub width: usize,
    pub activation: Activation,
    pub gate: Linear<Buf>,
    pub up: Option<Linear<Buf>>,
    pub down: Linear<Buf>,
}

/// A mixture of experts.
pub struct Moe<Buf> {
    pub shape: MoeShape,
    pub router: Linear<Buf>,
    pub experts: Vec<Expert<Buf>>,
    /// Every token goes through this one too.
    pub shared: Option<Dense<Buf>>,
    /// The sigmoid of this, (1, hidden), multiplies what that one gives.
    pub shared_router: Option<Linear<Buf>>,
    /// Of each expert that is here, those that read the layer's input.
    pub ids: Vec<Vec<MatrixId>>,
}

/// y = x · Wᵀ (+ b)
pub struct Linear<Buf> {
    pub id: MatrixId,
    pub weight: Weight<Buf>,
    /// F32, (out).
    pub bias: Option<Buf>,
}

/// What turns the residual stream into logits.
pub struct Head<Buf> {
    pub transform: Option<(Linear<Buf>, Activation, Norm<Buf>)>,
    /// To the width of the embedding.
    pub project_out: Option<Linear<Buf>>,
    pub id: MatrixId,
    /// (tokens, width); the embedding's, if it is tied.
    pub table: Arc<Weight<Buf>>,
    /// What of it is on other members.
    pub spread: Option<Spread>,
    /// F32, (tokens).
    pub bias: Option<Buf>,
    pub scale: f32,
    pub softcap: Option<f32>,
}

/// What is known of a loaded tensor, or part of one.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorRecord {
    pub name: String,
    pub ty: QuantType,
    /// (out, in), or the length of a vector, as loaded.
    pub shape: Vec<usize>,
    /// In that number format.
    pub bytes: usize,
}

impl TensorRecord {
    /// Bytes in the device's memory: vectors are widened.
    pub fn loaded_bytes(&self) -> usize {
        match self.shape.as_slice() {
            [width] => width * size_of::<f32>(),
            _ => self.bytes,
        }
    }
}

impl TensorRecord {
    /// The same in single precision.
    fn widened(self) -> TensorRecord {
        let bytes = self.shape.iter().product::<usize>() * size_of::<f32>();
        TensorRecord { ty: QuantType::F32, bytes, ..self }
    }
}

impl<Buf> WeightSource<Buf> {
    /// The weights of the layer with that index within the stage.
    pub fn layer(&self, index: usize) -> &Block<Buf> {
        match self {
            WeightSource::Resident(blocks) => &blocks[index],
        }
    }
}

/// Loads the shard's part of `source`, which `spec` describes, into `backend`'s memory. Tables by position reach as far as
/// steps within `limits` go.
pub fn load<B: Backend>(
    backend: &mut B,
    source: &ModelSource,
    shard: &Shard,
    spec: ModelSpec,
    limits: &StepLimits,
) -> Result<Model<B::Buf>> {
    let (checkpoint, tables, tensors) = (&source.checkpoint, HashMap::new(), Vec::new());
    let mut loader = Loader { backend, source, checkpoint, tables, tensors };
    let mut stacks = || -> Result<_> {
        let encoder = spec.encoder.as_ref();
        let encoder = encoder.map(|stack| loader.stack(stack, shard.encoder.start, limits.source_positions));
        let decoder = spec.decoder.as_ref();
        let decoder = decoder.map(|stack| loader.stack(stack, shard.decoder.start, limits.positions));
        Ok((encoder.transpose()?, decoder.transpose()?))
    };
    source.progress.expect(records(source, &spec).iter().map(|record| record.bytes).sum());
    let (encoder, decoder) = stacks().with_context(|| format!("loading {}", source.path.display()))?;
    let tensors = loader.tensors;
    Ok(Model { seams: Seams::of(&source.spec, shard), spec, encoder, decoder, tensors })
}

/// What [`load`] would record of the part of a model that `spec` describes, in another order; none of the tensors' bytes
/// is touched.
pub fn records(source: &ModelSource, spec: &ModelSpec) -> Vec<TensorRecord> {
    let normalised = spec.last_stack().head.as_ref().filter(|head| head.normalised).map(|head| &head.table);
    let is_normalised = |piece: &Piece| normalised.is_some_and(|table| std::ptr::eq(table, piece));
    let mut shared = HashSet::new();
    let mut all = tensors::pieces(spec);
    // Tables are shared, and a row of token types becomes a part of each position's.
    all.retain(|piece| match piece.role {
        _ if is_normalised(piece) => true,
        "embedding" | "head" => shared.insert(&piece.name),
        "token_types" => false,
        _ => true,
    });
    let record = |piece: &Piece| {
        let record = pieces::record(piece, source.loaded_as(piece));
        let has_types = || spec.stacks().any(|stack| has_types_beside(stack, piece));
        if is_normalised(piece) || has_types() { record.widened() } else { record }
    };
    all.into_iter().map(record).collect()
}

/// Whether a piece is the stack's learned positions, to which a row of token types is added.
fn has_types_beside(stack: &StackSpec, piece: &Piece) -> bool {
    let is_table =
        matches!(&stack.added, Some(AddedSpec::Learned { table, .. }) if std::ptr::eq(table, piece));
    is_table && has_types(stack)
}

/// Whether a row is added to all embeddings.
fn has_types(stack: &StackSpec) -> bool {
    stack.embedding.as_ref().is_some_and(|embedding| embedding.token_types.is_some())
}

/// Bytes of the tables that are made from the specification, of a model whose steps stay within `limits`.
pub fn table_bytes(spec: &ModelSpec, limits: &StepLimits) -> usize {
    let of_stack = |stack: &StackSpec, positions: usize| {
        let rope =
            |rope: &RopeSpec| rope::bounds(&rope.config).len() * rope::table_bytes(rope.dims, positions);
        let sinusoids = match &stack.added {
            Some(AddedSpec::Sinusoidal { .. }) => positions * spec.hidden,
            None if has_types(stack) => positions * spec.hidden,
            Some(AddedSpec::Learned { .. }) | None => 0,
        };
        let heads = stack.distance.as_ref().map_or(0, |distance| distance.own.len());
        let distance = heads * (2 * positions).saturating_sub(1);
        stack.ropes.iter().map(rope).sum::<usize>() + (sinusoids + distance) * size_of::<f32>()
    };
    let encoder = spec.encoder.as_ref().map_or(0, |stack| of_stack(stack, limits.source_positions));
    encoder + spec.decoder.as_ref().map_or(0, |stack| of_stack(stack, limits.positions))
}

struct Loader<'a, B: Backend> {
    backend: &'a mut B,
    source: &'a ModelSource,
    checkpoint: &'a Checkpoint,
    /// Embeddings and heads by name: encoder, decoder and head may share one.
    tables: HashMap<String, Arc<Weight<B::Buf>>>,
    tensors: Vec<TensorRecord>,
}

impl<'a, B: Backend> Loader<'a, B> {
    /// Layers are called by their numbers in the whole model.
    fn stack(&mut self, spec: &StackSpec, first_layer: usize, positions: usize) -> Result<Stack<B::Buf>> {
        let embedding =
            spec.embedding.as_ref().map(|own| self.embedding(own, &spec.added, positions)).transpose()?;
        let distance = spec.distance.as_ref().map(|spec| self.distance(spec, positions)).transpose()?;
        let ropes = spec.ropes.iter().map(|spec| self.rope(spec, positions)).collect::<Result<_>>()?;
        let blocks = (first_layer..)
            .zip(&spec.layers)
            .map(|(number, layer)| self.block(layer).with_context(|| format!("layer {number}")))
            .collect::<Result<Vec<_>>>()?;
        let norm = self.opt_norm(&spec.norm)?;
        let head = spec.head.as_ref().map(|head| self.head(head)).transpose()?;
        Ok(Stack { embedding, ropes, distance, source: WeightSource::Resident(blocks), norm, head })
    }

    fn embedding(
        &mut self,
        spec: &EmbeddingSpec,
        added: &Option<AddedSpec>,
        positions: usize,
    ) -> Result<Embedding<B::Buf>> {
        let EmbeddingSpec { table, scale, project_in, token_types, norm } = spec;
        let hidden = project_in.as_ref().map_or(table.shape[1], |linear| linear.out);
        let types = token_types.as_ref().map(|piece| self.first_row(piece)).transpose()?;
        let added = match added {
            // What is the same for all tokens is added to each position's row.
            Some(AddedSpec::Learned { table, offset }) => {
                Some((self.positions(table, types.as_deref())?, *offset))
            }
            Some(AddedSpec::Sinusoidal { layout, offset, scale }) => {
                let rows = distance::sinusoids(*layout, hidden, positions, *offset, *scale);
                Some((self.made(rows, hidden, types.as_deref())?, 0))
            }
            None => match &types {
                Some(_) => Some((self.made(vec![0.0; positions * hidden], hidden, types.as_deref())?, 0)),
                None => None,
            },
        };
        Ok(Embedding {
            table: self.table(table, false)?,
            first: table.cut.rows.as_ref().map_or(0, |rows| rows.start),
            scale: *scale,
            project_in: project_in.as_ref().map(|linear| self.linear(linear)).transpose()?,
            added,
            norm: self.opt_norm(norm)?,
        })
    }

    fn block(&mut self, spec: &LayerSpec) -> Result<Block<B::Buf>> {
        let cross = match &spec.cross {
            Some((norms, attention)) => Some((self.sublayer_norms(norms)?, self.attention(attention)?)),
            None => None,
        };
        Ok(Block {
            attention_norms: self.sublayer_norms(&spec.attention_norms)?,
            attention: self.attention(&spec.attention)?,
            cross,
            mlp_norms: self.sublayer_norms(&spec.mlp_norms)?,
            mlp: match &spec.mlp {
                MlpSpec::Dense(dense) => Mlp::Dense(self.dense(dense)?),
                MlpSpec::Experts(moe) => Mlp::Experts(Box::new(self.moe(moe)?)),
            },
        })
    }

    fn attention(&mut self, spec: &AttentionSpec) -> Result<Attention<B::Buf>> {
        let qk_norms = match &spec.qk_norms {
            Some((q, k)) => Some((self.norm(q)?, self.norm(k)?)),
            None => None,
        };
        let [q, k, v, o] = [&spec.q, &spec.k, &spec.v, &spec.o].map(|linear| self.linear(linear));
        Ok(Attention { q: q?, k: k?, v: v?, o: o?, qk_norms, spread: spec.spread.clone() })
    }

    fn dense(&mut self, spec: &DenseSpec) -> Result<Dense<B::Buf>> {
        let DenseSpec { width, activation, .. } = *spec;
        let up = spec.up.as_ref().map(|up| self.linear(up)).transpose()?;
        Ok(Dense { width, activation, gate: self.linear(&spec.gate)?, up, down: self.linear(&spec.down)? })
    }

    fn moe(&mut self, spec: &MoeSpec) -> Result<Moe<B::Buf>> {
        let shape = spec.shape();
        self.backend.prepare_moe(&shape, spec.router.inp)?;
        let expert = |dense: &DenseSpec, loader: &mut Self| {
            let up = dense.up.as_ref().map(|up| loader.linear(up)).transpose()?.map(|up| up.weight);
            let (gate, down) = (loader.linear(&dense.gate)?.weight, loader.linear(&dense.down)?.weight);
            anyhow::Ok(Expert { gate, up, down })
        };
        let reading = |dense: &DenseSpec| {
            [&dense.gate].into_iter().chain(&dense.up).map(|linear| MatrixId::of(&linear.weight)).collect()
        };
        Ok(Moe {
            shape,
            ids: spec.experts.iter().map(reading).collect(),
            router: self.linear(&spec.router)?,
            experts: spec.experts.iter().map(|dense| expert(dense, self)).collect::<Result<_>>()?,
            shared: spec.shared.as_ref().map(|dense| self.dense(dense)).transpose()?,
            shared_router: spec.shared_router.as_ref().map(|linear| self.linear(linear)).transpose()?,
        })
    }

    fn head(&mut self, spec: &HeadSpec) -> Result<Head<B::Buf>> {
        let transform = match &spec.transform {
            Some((linear, activation, norm)) => Some((self.linear(linear)?, *activation, self.norm(norm)?)),
            None => None,
        };
        Ok(Head {
            transform,
            project_out: spec.project_out.as_ref().map(|linear| self.linear(linear)).transpose()?,
            id: MatrixId::of(&spec.table),
            table: self.table(&spec.table, spec.normalised)?,
            spread: spec.spread.clone(),
            bias: spec.bias.as_ref().map(|bias| self.vector(bias, 0.0)).transpose()?,
            scale: spec.scale,
            softcap: spec.softcap,
        })
    }

    fn sublayer_norms(&mut self, spec: &Norms) -> Result<SublayerNorms<B::Buf>> {
        let [pre, out, post] = [&spec.pre, &spec.out, &spec.post].map(|norm| self.opt_norm(norm));
        Ok(SublayerNorms { pre: pre?, out: out?, post: post? })
    }

    fn opt_norm(&mut self, spec: &Option<NormSpec>) -> Result<Option<Norm<B::Buf>>> {
        spec.as_ref().map(|norm| self.norm(norm)).transpose()
    }

    fn norm(&mut self, spec: &NormSpec) -> Result<Norm<B::Buf>> {
        let NormSpec { kind, width, eps, offset, .. } = *spec;
        let weight = Some(self.vector(&spec.weight, offset)?);
        let bias = spec.bias.as_ref().map(|bias| self.vector(bias, 0.0)).transpose()?;
        Ok(Norm { kind, weight, bias, width, eps })
    }

    fn linear(&mut self, spec: &LinearSpec) -> Result<Linear<B::Buf>> {
        let weight = self.matrix(&spec.weight, false)?;
        let bias = spec.bias.as_ref().map(|bias| self.vector(bias, 0.0)).transpose()?;
        Ok(Linear { id: MatrixId::of(&spec.weight), weight, bias })
    }

    /// A matrix that may be shared.
    fn table(&mut self, piece: &Piece, normalised: bool) -> Result<Arc<Weight<B::Buf>>> {
        // Rows of length 1 are another matrix.
        let key = if normalised { format!("{} (normalised)", piece.name) } else { piece.name.clone() };
        if let Some(known) = self.tables.get(&key) {
            return Ok(known.clone());
        }
        let table = Arc::new(self.matrix(piece, normalised)?);
        self.tables.insert(key, table.clone());
        Ok(table)
    }

    /// A matrix, in the type that it is to be loaded in. Normalised ones are F32.
    fn matrix(&mut self, piece: &Piece, normalised: bool) -> Result<Weight<B::Buf>> {
        let taken = pieces::take(self.checkpoint, piece)?;
        let taken = match normalised {
            true => pieces::normalised(taken),
            false => taken
                .recoded(self.source.loaded_as(piece), self.source.codes.of(piece), self.backend.threads())
                .with_context(|| format!("tensor '{}'", piece.name))?,
        };
        self.record(taken.record(&piece.name))?;
        let (out, inp) = (taken.out(), taken.inp());
        let uploaded = self.backend.upload_weight(taken.ty, out, inp, &taken.bytes);
        let uploaded =
            uploaded.with_context(|| format!("tensor '{}' of {} bytes", piece.name, taken.bytes.len()))?;
        // Read from the disk, it was a copy as long as it was needed.
        self.checkpoint.let_go(&piece.name);
        Ok(uploaded)
    }

    /// A vector, widened to F32, `offset` added.
    fn vector(&mut self, piece: &Piece, offset: f32) -> Result<B::Buf> {
        let mut values = self.take(piece)?.widened();
        values.iter_mut().for_each(|value| *value += offset);
        self.upload(&values).with_context(|| format!("tensor '{}'", piece.name))
    }

    /// Learned positions, with a row added to each if there is one.
    fn positions(&mut self, piece: &Piece, row: Option<&[f32]>) -> Result<Weight<B::Buf>> {
        match row {
            None => self.matrix(piece, false),
            Some(_) => {
                let taken = pieces::take(self.checkpoint, piece)?;
                self.record(taken.record(&piece.name).widened())?;
                self.made(taken.widened(), taken.inp(), row)
            }
        }
    }

    /// The first row of a matrix.
    fn first_row(&mut self, piece: &Piece) -> Result<Vec<f32>> {
        let taken = pieces::take(self.checkpoint, piece)?;
        let mut rows = taken.widened();
        rows.truncate(taken.inp());
        Ok(rows)
    }

    /// A matrix of numbers that were made here, with a row added to each of its own if there is one.
    fn made(&mut self, mut rows: Vec<f32>, width: usize, row: Option<&[f32]>) -> Result<Weight<B::Buf>> {
        for (value, added) in rows.iter_mut().zip(row.into_iter().flatten().cycle()) {
            *value += added;
        }
        let out = rows.len() / width;
        let bytes: Vec<u8> = rows.iter().flat_map(|value| value.to_le_bytes()).collect();
        Ok(self.backend.upload_weight(QuantType::F32, out, width, &bytes)?)
    }

    fn rope(&mut self, spec: &RopeSpec, positions: usize) -> Result<Rope<B::Buf>> {
        let mut tables = Vec::new();
        for bound in rope::bounds(&spec.config) {
            let table = rope::table(&spec.config, spec.dims, positions, bound);
            tables.push((bound, self.upload_bytes(&table).context("the table of rotary positions")?));
        }
        Ok(Rope {
            tables,
            positions,
            dims: spec.dims,
            style: spec.style,
            stretch: rope::stretch(&spec.config),
        })
    }

    fn distance(&mut self, spec: &DistanceSpec, reach: usize) -> Result<DistanceBias<B::Buf>> {
        let DistanceSpec { kind, heads, own } = spec;
        let table = match kind {
            DistanceKind::Alibi { scale } => distance::alibi(*heads, own.clone(), *scale, reach),
            DistanceKind::Relative { table, buckets, max_distance, both_ways } => {
                let learned = self.take(table)?.widened();
                let heads = (*heads, own.clone());
                distance::relative(&learned, heads, *buckets, *max_distance, *both_ways, reach)
            }
        };
        let (table, heads) = (self.upload(&table).context("biases by distance")?, own.len());
        Ok(DistanceBias { table, heads, reach })
    }

    fn upload(&mut self, values: &[f32]) -> Result<B::Buf> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.upload_bytes(&bytes)
    }

    fn upload_bytes(&mut self, bytes: &[u8]) -> Result<B::Buf> {
        let mut buf = self.backend.alloc(bytes.len())?;
        self.backend.upload(&mut buf, 0, bytes);
        Ok(buf)
    }

    /// The numbers of a piece; records that it was used.
    fn take(&mut self, piece: &Piece) -> Result<Taken<'a>> {
        let taken = pieces::take(self.checkpoint, piece)?;
        self.record(taken.record(&piece.name))?;
        Ok(taken)
    }

    fn record(&mut self, record: TensorRecord) -> Result<()> {
        self.source.progress.advance(record.bytes)?;
        self.tensors.push(record);
        Ok(())
    }
}
