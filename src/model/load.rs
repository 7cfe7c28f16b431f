//! From a checkpoint's tensors to a model in a device's memory.
//!
//! Invariant: a matrix keeps the number format it is stored in, a vector becomes F32, and what was loaded is
//! recorded tensor by tensor.

use super::rope;
use super::shard::Shard;
use super::source::ModelSource;
use super::spec::{ModelSpec, TensorNames};
use super::tensors::{self, Needed, bias_name};
use crate::formats::Checkpoint;
use anyhow::{Context, Result, bail};
use mainstem_kernels::{Backend, Norm, QuantType, Rope, Weight};
use std::borrow::Cow;

/// The layers of one network in a device's memory. An encoder-decoder model has two.
pub struct Model<Buf> {
    pub spec: ModelSpec,
    pub encoder: Option<Stack<Buf>>,
    pub decoder: Option<Stack<Buf>>,
    /// What was loaded, in loading order.
    pub tensors: Vec<TensorRecord>,
}

/// One stack of layers with what stands before and after it.
pub struct Stack<Buf> {
    /// (vocabulary, hidden)
    pub embedding: Weight<Buf>,
    pub rope: Rope<Buf>,
    pub source: WeightSource<Buf>,
    pub norm: Norm<Buf>,
    pub head: Head<Buf>,
}

/// Hands out the weights of each layer.
pub enum WeightSource<Buf> {
    /// All layers lie in the device's memory.
    Resident(Vec<Block<Buf>>),
}

/// The weights of one layer.
pub struct Block<Buf> {
    pub attention_norm: Norm<Buf>,
    pub q: Linear<Buf>,
    pub k: Linear<Buf>,
    pub v: Linear<Buf>,
    pub o: Linear<Buf>,
    pub mlp_norm: Norm<Buf>,
    pub gate: Linear<Buf>,
    pub up: Linear<Buf>,
    pub down: Linear<Buf>,
}

/// y = x · Wᵀ (+ b)
pub struct Linear<Buf> {
    pub weight: Weight<Buf>,
    /// F32, (out).
    pub bias: Option<Buf>,
}

/// What turns the residual stream into logits.
pub enum Head<Buf> {
    /// The embedding's matrix again.
    Tied,
    /// A matrix of its own, (vocabulary, hidden).
    Own(Weight<Buf>),
}

/// What is known of a loaded tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorRecord {
    pub name: String,
    pub ty: QuantType,
    pub shape: Vec<usize>,
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

impl<Buf> WeightSource<Buf> {
    /// The weights of the layer with that index within the stage.
    pub fn layer(&self, index: usize) -> &Block<Buf> {
        match self {
            WeightSource::Resident(blocks) => &blocks[index],
        }
    }
}

impl<Buf> Stack<Buf> {
    /// The matrix that makes logits.
    pub fn head(&self) -> &Weight<Buf> {
        match &self.head {
            Head::Tied => &self.embedding,
            Head::Own(weight) => weight,
        }
    }
}

impl<Buf> Model<Buf> {
    /// The stack that generates. Every model served so far has one.
    pub fn decoder(&self) -> &Stack<Buf> {
        self.decoder.as_ref().expect("a decoder-only model has a decoder; this is a bug")
    }
}

/// Loads the shard's part of `source` into `backend`'s memory. `positions` is how far the tables of rotary
/// positions reach.
pub fn load<B: Backend>(
    backend: &mut B,
    source: &ModelSource,
    shard: &Shard,
    positions: usize,
) -> Result<Model<B::Buf>> {
    let mut loader =
        Loader { backend, checkpoint: &source.checkpoint, spec: &source.spec, tensors: Vec::new() };
    let decoder =
        loader.stack(shard, positions).with_context(|| format!("loading {}", source.path.display()))?;
    let tensors = loader.tensors;
    Ok(Model { spec: source.spec.clone(), encoder: None, decoder: Some(decoder), tensors })
}

const CHECKED: &str = "it was there at opening, and computable; anything else is a bug";

/// What [`load`] would record, in another order; none of the tensors' bytes is touched.
pub fn records(source: &ModelSource) -> Vec<TensorRecord> {
    let record = |needed: Needed| {
        let name = needed.name();
        let tensor = source.checkpoint.tensor(&name).expect(CHECKED);
        let ty = tensor.quant_type().expect(CHECKED);
        TensorRecord { ty, shape: needed.shape, bytes: tensor.bytes_len(), name }
    };
    tensors::needed(&source.spec).map(record).collect()
}

struct Loader<'a, B: Backend> {
    backend: &'a mut B,
    checkpoint: &'a Checkpoint,
    spec: &'a ModelSpec,
    tensors: Vec<TensorRecord>,
}

impl<'a, B: Backend> Loader<'a, B> {
    fn stack(&mut self, shard: &Shard, positions: usize) -> Result<Stack<B::Buf>> {
        let spec = self.spec;
        let embedding = self.matrix(&spec.tensors.embedding, spec.vocab, spec.hidden)?;
        let blocks = shard.layers.clone().map(|layer| self.block(layer)).collect::<Result<_>>()?;
        let norm = self.norm(&spec.tensors.norm)?;
        let head = match spec.tied_head {
            true => Head::Tied,
            false => Head::Own(self.matrix(&spec.tensors.head, spec.vocab, spec.hidden)?),
        };
        let rope = self.rope(positions)?;
        Ok(Stack { embedding, rope, source: WeightSource::Resident(blocks), norm, head })
    }

    fn block(&mut self, layer: usize) -> Result<Block<B::Buf>> {
        let spec = self.spec;
        let (hidden, q, kv, mlp) = (spec.hidden, spec.q_width(), spec.kv_width(), spec.mlp.width);
        let name = |pattern: &str| TensorNames::in_layer(pattern, layer);
        let names = &spec.tensors;
        Ok(Block {
            attention_norm: self.norm(&name(&names.attention_norm))?,
            q: self.linear(&name(&names.q), q, hidden, spec.attention.bias)?,
            k: self.linear(&name(&names.k), kv, hidden, spec.attention.bias)?,
            v: self.linear(&name(&names.v), kv, hidden, spec.attention.bias)?,
            o: self.linear(&name(&names.o), hidden, q, spec.attention.bias)?,
            mlp_norm: self.norm(&name(&names.mlp_norm))?,
            gate: self.linear(&name(&names.gate), mlp, hidden, spec.mlp.bias)?,
            up: self.linear(&name(&names.up), mlp, hidden, spec.mlp.bias)?,
            down: self.linear(&name(&names.down), hidden, mlp, spec.mlp.bias)?,
        })
    }

    fn linear(&mut self, name: &str, out: usize, inp: usize, bias: bool) -> Result<Linear<B::Buf>> {
        let weight = self.matrix(name, out, inp)?;
        let bias = bias.then(|| self.vector(&bias_name(name), out)).transpose()?;
        Ok(Linear { weight, bias })
    }

    fn norm(&mut self, name: &str) -> Result<Norm<B::Buf>> {
        let width = self.spec.hidden;
        Ok(Norm { weight: self.vector(name, width)?, width, eps: self.spec.norm_eps })
    }

    /// A matrix, kept in the type it is stored in.
    fn matrix(&mut self, name: &str, out: usize, inp: usize) -> Result<Weight<B::Buf>> {
        let (ty, bytes) = self.take(name, &[out, inp])?;
        self.backend
            .upload_weight(ty, out, inp, &bytes)
            .with_context(|| format!("tensor '{name}' of {} bytes", bytes.len()))
    }

    /// A vector, widened to F32.
    fn vector(&mut self, name: &str, width: usize) -> Result<B::Buf> {
        let (ty, bytes) = self.take(name, &[width])?;
        let mut values = vec![0f32; width];
        (ty.row().dequantize)(&bytes, &mut values);
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.upload(&bytes).with_context(|| format!("tensor '{name}'"))
    }

    fn rope(&mut self, positions: usize) -> Result<Rope<B::Buf>> {
        let rope = &self.spec.rope;
        let cos_sin = self
            .upload(&rope::table(&rope.config, rope.dims, positions))
            .context("the table of rotary positions")?;
        Ok(Rope { cos_sin, positions, dims: rope.dims, style: rope.style })
    }

    fn upload(&mut self, bytes: &[u8]) -> Result<B::Buf> {
        let mut buf = self.backend.alloc(bytes.len())?;
        self.backend.upload(&mut buf, 0, bytes);
        Ok(buf)
    }

    /// The numbers of the tensor of that name, if it has that shape; records that it was used.
    fn take(&mut self, name: &str, shape: &[usize]) -> Result<(QuantType, Cow<'a, [u8]>)> {
        let checkpoint = self.checkpoint;
        let tensor = checkpoint.tensor(name).with_context(|| format!("tensor '{name}' is missing"))?;
        if tensor.shape != shape {
            bail!(
                "{}: tensor '{name}' has shape {:?}, but config and specification make it {shape:?}",
                tensor.file.display(),
                tensor.shape
            );
        }
        let (ty, bytes) = (tensor.quant_type()?, tensor.bytes());
        let record = TensorRecord { name: name.to_owned(), ty, shape: shape.to_vec(), bytes: bytes.len() };
        self.tensors.push(record);
        Ok((ty, bytes))
    }
}
