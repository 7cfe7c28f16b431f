//! Loads a model from a checkpoint into a device's memory.
//!
//! Invariant: a matrix keeps its stored number format unless the source's rules change it, vectors become
//! F32, a matrix shared by embedding and head is loaded once, and every loaded slice is recorded. At most one
//! slice has a copy outside of the device's memory. The devices of a group load concurrently.

use super::relative_bias;
use super::rope;
use super::shard::{Shard, StageRole};
use super::source::ModelSource;
use super::spec::{
    AttentionSpec, DenseSpec, EmbeddingSpec, HeadSpec, LayerSpec, LinearSpec, MlpSpec, ModelSpec, MoeSpec,
    NormSpec, Norms, PositionEmbeddingSpec, RelativeBiasKind, RelativeBiasSpec, RopeSpec, StackSpec,
    TensorSlice,
};
use super::tensor_slices::{self, SliceData};
use super::tensors;
use super::weights::{
    Attention, Dense, Embedding, Head, LayerWeights, Linear, Mlp, Model, Moe, Stack, SublayerNorms,
    TensorRecord, WeightSource,
};
use crate::formats::Checkpoint;
use anyhow::{Context, Result};
use mainstem_kernels::{Backend, Expert, Norm, QuantType, RelativeBias, Rope, StepLimits, Weight};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Loads the shard's part of `source`, described by `spec`, into the memory of `backend`. Position tables are
/// made for the positions within `limits`.
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
        let encoder = encoder.map(|stack| loader.stack(stack, shard.encoder.start, limits.encoder_positions));
        let decoder = spec.decoder.as_ref();
        let decoder = decoder.map(|stack| loader.stack(stack, shard.decoder.start, limits.positions));
        Ok((encoder.transpose()?, decoder.transpose()?))
    };
    source.progress.add_total(records(source, &spec).iter().map(|record| record.bytes).sum());
    let (encoder, decoder) = stacks().with_context(|| format!("loading {}", source.path.display()))?;
    let tensors = loader.tensors;
    Ok(Model { role: StageRole::for_shard(&source.spec, shard), spec, encoder, decoder, tensors })
}

/// Returns what [`load`] would record for the part of the model described by `spec`, in another order,
/// without reading tensor data.
pub fn records(source: &ModelSource, spec: &ModelSpec) -> Vec<TensorRecord> {
    let normalized =
        spec.last_stack().head.as_ref().filter(|head| head.normalize_rows).map(|head| &head.table);
    let is_normalized = |piece: &TensorSlice| normalized.is_some_and(|table| std::ptr::eq(table, piece));
    let mut shared = HashSet::new();
    let mut all = tensors::required_slices(spec);
    // Tables are shared, and token types are merged into the position table.
    all.retain(|piece| match piece.role {
        _ if is_normalized(piece) => true,
        "embedding" | "head" => shared.insert(&piece.name),
        "token_types" => false,
        _ => true,
    });
    let record = |piece: &TensorSlice| {
        let record = tensor_slices::slice_record(piece, source.load_type(piece));
        let has_types = || spec.stacks().any(|stack| is_merged_with_token_types(stack, piece));
        if is_normalized(piece) || has_types() { record.in_f32() } else { record }
    };
    all.into_iter().map(record).collect()
}

/// Returns whether a slice is the stack's table of learned positions, into which token types are merged.
fn is_merged_with_token_types(stack: &StackSpec, piece: &TensorSlice) -> bool {
    let Some(PositionEmbeddingSpec::Learned { table, .. }) = &stack.position_embedding else { return false };
    std::ptr::eq(table, piece) && has_token_types(stack)
}

/// Returns whether the stack has a token type embedding.
fn has_token_types(stack: &StackSpec) -> bool {
    stack.embedding.as_ref().is_some_and(|embedding| embedding.token_types.is_some())
}

/// Returns the size of the tables computed from the specification, in bytes, for a model whose steps stay
/// within `limits`.
pub fn table_bytes(spec: &ModelSpec, limits: &StepLimits) -> usize {
    let of_stack = |stack: &StackSpec, positions: usize| {
        let rope = |rope: &RopeSpec| {
            rope::length_bounds(&rope.config).len() * rope::table_bytes(rope.dims, positions)
        };
        let sinusoids = match &stack.position_embedding {
            Some(PositionEmbeddingSpec::Sinusoidal { .. }) => positions * spec.hidden,
            None if has_token_types(stack) => positions * spec.hidden,
            Some(PositionEmbeddingSpec::Learned { .. }) | None => 0,
        };
        let heads = stack.relative_bias.as_ref().map_or(0, |bias| bias.local_heads.len());
        let biases = heads * (2 * positions).saturating_sub(1);
        stack.ropes.iter().map(rope).sum::<usize>() + (sinusoids + biases) * size_of::<f32>()
    };
    let encoder = spec.encoder.as_ref().map_or(0, |stack| of_stack(stack, limits.encoder_positions));
    encoder + spec.decoder.as_ref().map_or(0, |stack| of_stack(stack, limits.positions))
}

struct Loader<'a, B: Backend> {
    backend: &'a mut B,
    source: &'a ModelSource,
    checkpoint: &'a Checkpoint,
    /// Embeddings and heads by name, which encoder, decoder and head may share.
    tables: HashMap<String, Arc<Weight<B::Buf>>>,
    tensors: Vec<TensorRecord>,
}

impl<'a, B: Backend> Loader<'a, B> {
    /// Loads a stack. Errors number layers as in the whole model, starting with `first_layer`.
    fn stack(&mut self, spec: &StackSpec, first_layer: usize, positions: usize) -> Result<Stack<B::Buf>> {
        let embedding = spec
            .embedding
            .as_ref()
            .map(|own| self.embedding(own, &spec.position_embedding, positions))
            .transpose()?;
        let relative_bias =
            spec.relative_bias.as_ref().map(|spec| self.relative_bias(spec, positions)).transpose()?;
        let ropes = spec.ropes.iter().map(|spec| self.rope(spec, positions)).collect::<Result<_>>()?;
        let blocks = (first_layer..)
            .zip(&spec.layers)
            .map(|(number, layer)| self.block(layer).with_context(|| format!("layer {number}")))
            .collect::<Result<Vec<_>>>()?;
        let norm = self.opt_norm(&spec.norm)?;
        let head = spec.head.as_ref().map(|head| self.head(head)).transpose()?;
        Ok(Stack { embedding, ropes, relative_bias, weights: WeightSource::Resident(blocks), norm, head })
    }

    fn embedding(
        &mut self,
        spec: &EmbeddingSpec,
        added: &Option<PositionEmbeddingSpec>,
        positions: usize,
    ) -> Result<Embedding<B::Buf>> {
        let EmbeddingSpec { table, scale, project_in, token_types, norm } = spec;
        let hidden = project_in.as_ref().map_or(table.shape[1], |linear| linear.n);
        let types = token_types.as_ref().map(|piece| self.first_row(piece)).transpose()?;
        let added = match added {
            // The token type embedding is the same for all tokens, so it is added to each position's row.
            Some(PositionEmbeddingSpec::Learned { table, offset }) => {
                Some((self.positions(table, types.as_deref())?, *offset))
            }
            Some(PositionEmbeddingSpec::Sinusoidal { layout, offset, scale }) => {
                let rows = relative_bias::sinusoids(*layout, hidden, positions, *offset, *scale);
                Some((self.upload_rows(rows, hidden, types.as_deref())?, 0))
            }
            None => match &types {
                Some(_) => {
                    Some((self.upload_rows(vec![0.0; positions * hidden], hidden, types.as_deref())?, 0))
                }
                None => None,
            },
        };
        Ok(Embedding {
            table: self.table(table, false)?,
            first_token: table.bounds.rows.as_ref().map_or(0, |rows| rows.start),
            scale: *scale,
            project_in: project_in.as_ref().map(|linear| self.linear(linear)).transpose()?,
            position_table: added,
            norm: self.opt_norm(norm)?,
        })
    }

    fn block(&mut self, spec: &LayerSpec) -> Result<LayerWeights<B::Buf>> {
        let cross = match &spec.cross {
            Some((norms, attention)) => Some((self.sublayer_norms(norms)?, self.attention(attention)?)),
            None => None,
        };
        Ok(LayerWeights {
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
        Ok(Attention { q: q?, k: k?, v: v?, o: o?, qk_norms, qk_split: spec.qk_split.clone() })
    }

    fn dense(&mut self, spec: &DenseSpec) -> Result<Dense<B::Buf>> {
        let DenseSpec { width, activation, .. } = *spec;
        let up = spec.up.as_ref().map(|up| self.linear(up)).transpose()?;
        Ok(Dense { width, activation, gate: self.linear(&spec.gate)?, up, down: self.linear(&spec.down)? })
    }

    fn moe(&mut self, spec: &MoeSpec) -> Result<Moe<B::Buf>> {
        let shape = spec.shape();
        self.backend.prepare_moe(&shape, spec.router.k)?;
        let expert = |dense: &DenseSpec, loader: &mut Self| {
            let up = dense.up.as_ref().map(|up| loader.linear(up)).transpose()?.map(|up| up.weight);
            let (gate, down) = (loader.linear(&dense.gate)?.weight, loader.linear(&dense.down)?.weight);
            anyhow::Ok(Expert { gate, up, down })
        };
        Ok(Moe {
            shape,
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
            table: self.table(&spec.table, spec.normalize_rows)?,
            vocab_split: spec.vocab_split.clone(),
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
        Ok(Linear { weight, bias })
    }

    /// Loads a matrix that may be shared.
    fn table(&mut self, piece: &TensorSlice, normalized: bool) -> Result<Arc<Weight<B::Buf>>> {
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
    fn matrix(&mut self, piece: &TensorSlice, normalized: bool) -> Result<Weight<B::Buf>> {
        let taken = tensor_slices::read_slice(self.checkpoint, piece)?;
        let taken = match normalized {
            true => tensor_slices::l2_normalize_rows(taken),
            false => taken
                .requantize(
                    self.source.load_type(piece),
                    piece.rounding(&self.source.rounding),
                    self.backend.threads(),
                )
                .with_context(|| format!("tensor '{}'", piece.name))?,
        };
        self.record(taken.record(&piece.name))?;
        let (n, k) = (taken.n(), taken.k());
        let uploaded = self.backend.upload_weight(taken.ty, n, k, &taken.bytes);
        let mut uploaded =
            uploaded.with_context(|| format!("tensor '{}' of {} bytes", piece.name, taken.bytes.len()))?;
        uploaded.id = Some(piece.matrix_id());
        // A copy read from disk is not needed any more.
        self.checkpoint.release(&piece.name);
        Ok(uploaded)
    }

    /// Loads a vector in F32, with `offset` added.
    fn vector(&mut self, piece: &TensorSlice, offset: f32) -> Result<B::Buf> {
        let mut values = self.read_slice(piece)?.to_f32();
        values.iter_mut().for_each(|value| *value += offset);
        self.upload(&values).with_context(|| format!("tensor '{}'", piece.name))
    }

    /// Loads a table of learned positions, adding `row` to each of its rows if there is one.
    fn positions(&mut self, piece: &TensorSlice, row: Option<&[f32]>) -> Result<Weight<B::Buf>> {
        match row {
            None => self.matrix(piece, false),
            Some(_) => {
                let taken = tensor_slices::read_slice(self.checkpoint, piece)?;
                self.record(taken.record(&piece.name).in_f32())?;
                self.upload_rows(taken.to_f32(), taken.k(), row)
            }
        }
    }

    /// Reads the first row of a matrix.
    fn first_row(&mut self, piece: &TensorSlice) -> Result<Vec<f32>> {
        let taken = tensor_slices::read_slice(self.checkpoint, piece)?;
        let mut rows = taken.to_f32();
        rows.truncate(taken.k());
        Ok(rows)
    }

    /// Uploads a computed matrix, adding `row` to each of its rows if there is one.
    fn upload_rows(
        &mut self,
        mut rows: Vec<f32>,
        width: usize,
        row: Option<&[f32]>,
    ) -> Result<Weight<B::Buf>> {
        for (value, added) in rows.iter_mut().zip(row.into_iter().flatten().cycle()) {
            *value += added;
        }
        let n = rows.len() / width;
        let bytes: Vec<u8> = rows.iter().flat_map(|value| value.to_le_bytes()).collect();
        Ok(self.backend.upload_weight(QuantType::F32, n, width, &bytes)?)
    }

    fn rope(&mut self, spec: &RopeSpec, positions: usize) -> Result<Rope<B::Buf>> {
        let mut tables = Vec::new();
        for bound in rope::length_bounds(&spec.config) {
            let table = rope::table(&spec.config, spec.dims, positions, bound);
            tables.push((bound, self.upload_bytes(&table).context("allocating the rotary position table")?));
        }
        Ok(Rope {
            tables,
            positions,
            dims: spec.dims,
            style: spec.style,
            dynamic_ntk: rope::dynamic_stretch(&spec.config),
        })
    }

    fn relative_bias(&mut self, spec: &RelativeBiasSpec, reach: usize) -> Result<RelativeBias<B::Buf>> {
        let RelativeBiasSpec { kind, heads, local_heads: own } = spec;
        let table = match kind {
            RelativeBiasKind::Alibi { scale } => {
                relative_bias::alibi_biases(*heads, own.clone(), *scale, reach)
            }
            RelativeBiasKind::Learned { table, buckets, max_distance, bidirectional: both_ways } => {
                let learned = self.read_slice(table)?.to_f32();
                let heads = (*heads, own.clone());
                relative_bias::learned_biases(&learned, heads, *buckets, *max_distance, *both_ways, reach)
            }
        };
        let (table, heads) =
            (self.upload(&table).context("allocating the relative position bias")?, own.len());
        Ok(RelativeBias { table, heads, reach })
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

    /// Reads the data of a slice and records it.
    fn read_slice(&mut self, piece: &TensorSlice) -> Result<SliceData<'a>> {
        let taken = tensor_slices::read_slice(self.checkpoint, piece)?;
        self.record(taken.record(&piece.name))?;
        Ok(taken)
    }

    fn record(&mut self, record: TensorRecord) -> Result<()> {
        self.source.progress.advance(record.bytes)?;
        self.tensors.push(record);
        Ok(())
    }
}
