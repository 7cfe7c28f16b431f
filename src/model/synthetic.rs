//! Synthetic models of named shapes with random weights, for benchmarks: as fast as real ones, and as large
//! once they are on a device.
//!
//! All matrices are windows onto one buffer: a block of random numbers, repeated up to the size of the
//! largest matrix. So a model of any size opens at once and takes the memory of its largest matrix, until a
//! device copies each tensor. The block's length is prime, so that rows differ, and each tensor begins at a
//! different offset, so that layers differ.
//!
//! Invariant: a shape's weights are the same each time.

use super::spec::{ModelSpec, SpecFile};
use super::tensors;
use crate::formats::{Checkpoint, HubConfig};
use anyhow::{Context, Result, bail};
use mainstem_kernels::QuantType;
use mainstem_kernels::random::philox;
use serde_json::json;
use std::fmt;
use std::path::{Path, PathBuf};

/// Prefix of the names of synthetic models.
pub const PREFIX: &str = "synthetic:";

/// Length of the random block; a prime.
const BLOCK_LEN: usize = 1_000_003;

/// Distance in the block between the starts of consecutive tensors; not a divisor of [`BLOCK_LEN`].
const STRIDE: usize = 7_919;

/// Standard deviation of the random numbers, which are uniformly distributed.
const STD: f32 = 0.02;

const KEY: [u32; 2] = [0x5eed, 0];

/// The sizes of a Llama-like model. Heads have a width of `hidden / heads`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SyntheticShape {
    /// Name of the shape, a number of parameters.
    pub name: &'static str,
    /// Width of the residual stream.
    pub hidden: usize,
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of the feed-forward network.
    pub ffn: usize,
    pub vocab: usize,
    /// Longest sequence, in tokens.
    pub context: usize,
    pub rope_theta: f64,
    /// Whether the head's matrix is the embedding table.
    pub tied: bool,
    /// Number format of the weights.
    pub ty: QuantType,
}

const LLAMA_2_7B: SyntheticShape = SyntheticShape {
    name: "7B",
    hidden: 4_096,
    layers: 32,
    heads: 32,
    kv_heads: 32,
    ffn: 11_008,
    vocab: 32_000,
    context: 4_096,
    rope_theta: 10_000.0,
    tied: false,
    ty: QuantType::F16,
};
const STORIES_110M: SyntheticShape = SyntheticShape {
    name: "110M",
    hidden: 768,
    layers: 12,
    heads: 12,
    kv_heads: 12,
    ffn: 2_048,
    context: 2_048,
    ..LLAMA_2_7B
};
const TINY_LLAMA_1_1B: SyntheticShape = SyntheticShape {
    name: "1.1B",
    hidden: 2_048,
    layers: 22,
    kv_heads: 4,
    ffn: 5_632,
    context: 2_048,
    ..LLAMA_2_7B
};
const LLAMA_3_1_8B: SyntheticShape = SyntheticShape {
    name: "8B",
    kv_heads: 8,
    ffn: 14_336,
    vocab: 128_256,
    context: 131_072,
    rope_theta: 500_000.0,
    ..LLAMA_2_7B
};
const LLAMA_3_2_1B: SyntheticShape =
    SyntheticShape { name: "1B", hidden: 2_048, layers: 16, ffn: 8_192, tied: true, ..LLAMA_3_1_8B };
const LLAMA_3_2_3B: SyntheticShape = SyntheticShape {
    name: "3B",
    hidden: 3_072,
    layers: 28,
    heads: 24,
    ffn: 8_192,
    tied: true,
    ..LLAMA_3_1_8B
};

/// All named shapes. Contexts that do not fit into a machine's memory are limited by configuration.
pub const SHAPES: [SyntheticShape; 6] =
    [STORIES_110M, TINY_LLAMA_1_1B, LLAMA_3_2_1B, LLAMA_3_2_3B, LLAMA_2_7B, LLAMA_3_1_8B];

impl SyntheticShape {
    /// Parses the name of a shape, optionally with a number format: `name:f32`, `name:bf16`. Default: F16.
    pub fn parse(name: &str) -> Result<SyntheticShape> {
        let (shape, ty) = match name.split_once(':') {
            Some((shape, ty)) => (shape, Some(ty)),
            None => (name, None),
        };
        let Some(found) = SHAPES.iter().find(|known| known.name.eq_ignore_ascii_case(shape)) else {
            let known = SHAPES.map(|shape| shape.name).join(", ");
            bail!("unknown synthetic model '{shape}' (known: {known})");
        };
        let ty = match ty {
            None => found.ty,
            Some(ty) => QuantType::by_name(ty).filter(|ty| !ty.is_blocked()).with_context(|| {
                let known = QuantType::unblocked().map(QuantType::name).collect::<Vec<_>>().join(", ");
                format!("unknown number format '{ty}' for a synthetic model (known: {known})")
            })?,
        };
        Ok(SyntheticShape { ty, ..*found })
    }

    /// Returns the model's name in place of a path, for error messages.
    pub fn path(&self) -> PathBuf {
        self.to_string().into()
    }

    /// Resolves the specification `file` with the sizes of this shape.
    pub fn resolve(&self, file: SpecFile) -> Result<ModelSpec> {
        file.resolve(&self.config(&self.path()), &|_| true)
    }

    /// Returns a checkpoint with random matrices and vectors of ones for all tensors that `spec` requires.
    pub fn checkpoint(&self, spec: &ModelSpec) -> Checkpoint {
        let needed: Vec<_> = tensors::required_tensors(spec)
            .into_iter()
            .map(|piece| (piece.name.clone(), piece.shape.clone()))
            .collect();
        let matrices = needed.iter().filter(|(_, shape)| shape.len() > 1);
        let largest = matrices.map(|(_, shape)| shape.iter().product()).max().unwrap_or(0);
        let ones_begin = BLOCK_LEN + largest;
        let width_max = needed.iter().filter(|(_, shape)| shape.len() == 1).map(|(_, shape)| shape[0]).max();
        let buffer = self.fill_buffer(ones_begin, width_max.unwrap_or(0));
        let tensors = needed.into_iter().enumerate().map(|(number, (name, shape))| {
            let begin = if shape.len() == 1 { ones_begin } else { number * STRIDE % BLOCK_LEN };
            (name, shape, self.bytes(begin))
        });
        Checkpoint::from_buffer(&self.path(), buffer, self.ty, tensors)
    }

    /// Returns the sizes under the names that config.json uses.
    fn config(&self, path: &Path) -> HubConfig {
        let entries = json!({
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.context,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied,
        });
        let serde_json::Value::Object(entries) = entries else { unreachable!("it is written as an object") };
        HubConfig::from_entries(path, entries)
    }

    /// Returns the buffer: the block repeated to `random` numbers, followed by `ones` ones.
    fn fill_buffer(&self, random: usize, ones: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes(random + ones)];
        let (random_bytes, one_bytes) = bytes.split_at_mut(self.bytes(random));
        let block_bytes = self.bytes(BLOCK_LEN);
        self.ty.quantize(&random_block(), &mut random_bytes[..block_bytes]);
        let (block, rest) = random_bytes.split_at_mut(block_bytes);
        for piece in rest.chunks_mut(block_bytes) {
            piece.copy_from_slice(&block[..piece.len()]);
        }
        self.ty.quantize(&vec![1.0; ones], one_bytes);
        bytes
    }

    fn bytes(&self, numbers: usize) -> usize {
        self.ty.bytes(numbers).expect("the shape's sizes do not overflow; this is a bug")
    }
}

impl fmt::Display for SyntheticShape {
    /// Writes the name that [`super::ModelRef::parse`] accepts.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}:{}", PREFIX, self.name, self.ty)
    }
}

/// Returns the block of random numbers.
fn random_block() -> Vec<f32> {
    let bound = STD * 3f32.sqrt();
    let number = |word: u32| bound * (2.0 * (word >> 8) as f32 / (1 << 24) as f32 - 1.0);
    let words = (0u32..).flat_map(|count| philox([count, 0, 0, 0], KEY));
    words.map(number).take(BLOCK_LEN).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ModelRef, ModelSource};

    const TINY: SyntheticShape = SyntheticShape {
        name: "tiny",
        hidden: 32,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        ffn: 48,
        vocab: 300,
        context: 64,
        ..LLAMA_2_7B
    };

    fn open(shape: SyntheticShape) -> ModelSource {
        ModelSource::open(&ModelRef::Synthetic(shape), None).unwrap()
    }

    #[test]
    fn names_and_number_formats_are_read_and_unknown_ones_refused_with_a_list() {
        assert_eq!(SyntheticShape::parse("1.1B").unwrap(), SHAPES[1]);
        assert_eq!(
            SyntheticShape::parse("8b:BF16").unwrap(),
            SyntheticShape { ty: QuantType::BF16, ..SHAPES[5] }
        );
        for shape in SHAPES {
            let shown = shape.to_string();
            assert_eq!(SyntheticShape::parse(shown.strip_prefix("synthetic:").unwrap()).unwrap(), shape);
        }
        let cases = [("2B", "'2B' (known: 110M, 1.1B, 1B, 3B, 7B, 8B)"), ("8B:q8_0", "'q8_0'"), ("", "''")];
        for (name, reason) in cases {
            let error = SyntheticShape::parse(name).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }

    /// Parameter counts in billions. The models after which 110M and 1B are named count a shared matrix once,
    /// or not at all.
    #[test]
    fn shapes_have_the_parameters_that_their_names_say() {
        let counts = [0.134, 1.100, 1.236, 3.213, 6.738, 8.030];
        for (shape, billions) in SHAPES.iter().zip(counts) {
            let spec = shape.resolve(SpecFile::for_model_type(crate::specs::SYNTHETIC).unwrap()).unwrap();
            let count: usize = tensors::required_tensors(&spec)
                .into_iter()
                .map(|tensor| tensor.shape.iter().product::<usize>())
                .sum();
            assert!((count as f64 / 1e9 - billions).abs() < 0.0006, "{shape}: {count}");
        }
    }

    #[test]
    fn weights_are_random_norms_are_one_and_no_two_layers_are_equal() {
        for ty in QuantType::unblocked() {
            let source = open(SyntheticShape { ty, ..TINY });
            let numbers = |name: &str| {
                let tensor = source.checkpoint.tensor(name).unwrap();
                let mut values = vec![0.0; tensor.shape.iter().product()];
                ty.dequantize(&tensor.bytes(), &mut values);
                values
            };
            assert_eq!(numbers("model.norm.weight"), [1.0; 32]);
            let up = numbers("model.layers.0.mlp.up_proj.weight");
            assert_ne!(up, numbers("model.layers.1.mlp.up_proj.weight"));
            assert_ne!(up[..32], up[32..64]);
            let mean = up.iter().sum::<f32>() / up.len() as f32;
            let std = (up.iter().map(|x| x * x).sum::<f32>() / up.len() as f32).sqrt();
            assert!(mean.abs() < 0.002 && (std - STD).abs() < 0.002, "{mean} {std}");
            assert_eq!(source.checkpoint.total_bytes(), ty.bytes(34_720).unwrap());
        }
    }

    #[test]
    fn matrices_larger_than_the_block_are_filled() {
        let source = open(SyntheticShape { vocab: 32_003, ..TINY });
        let embedding = source.checkpoint.tensor("model.embed_tokens.weight").unwrap();
        let [first, last] = [0, 32_002].map(|row| embedding.bytes()[row * 64..][..64].to_vec());
        assert!(first != last && last.iter().any(|byte| *byte != 0));
    }
}
