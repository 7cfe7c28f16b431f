//! Converts models of hub directories as llama.cpp's converter does: other names, other keys, and rearranged
//! tensors.
//!
//! The table of each family is in `conversions`; this module reads a directory and builds the file.

use super::writer::{Tensor, Written};
use crate::common::fixture;
use mainstem::formats::{Checkpoint, Folder};
use mainstem_kernels::QuantType;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// The conversion of a model family.
pub struct Conversion {
    /// Name of the fixture in `tests/fixtures/families`.
    pub fixture: &'static str,
    pub architecture: &'static str,
    /// Tensor names in the hub directory and in GGUF, without the part after the last dot. The first match
    /// applies.
    pub names: &'static [&'static [(&'static str, &'static str)]],
    /// GGUF keys after the architecture's name, in addition to [`KEYS`], and the keys of config.json.
    pub keys: &'static [(&'static str, &'static str)],
    /// Further changes.
    pub change: fn(&mut Converted),
}

/// Sizes that every file has: a GGUF key, and a key of config.json. The first one present applies.
const KEYS: &[(&str, &str)] = &[
    ("vocab_size", "vocab_size"),
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("feed_forward_length", "intermediate_size"),
    ("context_length", "max_position_embeddings"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.value_length", "head_dim"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.layer_norm_epsilon", "layer_norm_eps"),
    ("attention.layer_norm_epsilon", "layer_norm_epsilon"),
];

/// Name prefixes that are removed.
const PREFIXES: [&str; 3] = ["transformer.", "gpt_neox.", "bert."];

/// Name parts of tensors that the converter drops.
const DROPPED: [&str; 9] = [
    "inv_freq",
    "masked_bias",
    ".attn.bias",
    ".attention.bias",
    "position_ids",
    "pooler.",
    "cls.",
    "encoder.embed_tokens",
    "decoder.embed_tokens",
];

/// Tensors that are always F32, in addition to norms and vectors.
const SINGLE: [&str; 4] = ["ffn_gate_inp.", "ffn_gate_inp_shexp.", "position_embd.", "token_types."];

/// A model during conversion to GGUF.
pub struct Converted {
    pub config: Value,
    pub architecture: &'static str,
    pub tensors: BTreeMap<String, Matrix>,
    pub file: Written,
}

/// A tensor of any rank.
#[derive(Clone)]
pub struct Matrix {
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    pub numbers: Vec<f32>,
    ty: QuantType,
}

impl Conversion {
    /// Converts the fixture.
    pub fn written(&self) -> Written {
        self.of_folder(&fixture("families").join(self.fixture))
    }

    /// Converts a model in a directory.
    pub fn of_folder(&self, folder: &Path) -> Written {
        let config = std::fs::read(folder.join("config.json")).expect("the folder has one");
        let config = serde_json::from_slice(&config).expect("it is JSON");
        let (architecture, file) = (self.architecture, Written::new(self.architecture));
        let mut converted = Converted { config, architecture, tensors: self.tensors(folder), file };
        converted.file.set_string("tokenizer.ggml.model", "no_vocab");
        converted.take_keys(KEYS);
        converted.take_keys(self.keys);
        for (key, name) in [("eos_token_id", "eos_token_id"), ("bos_token_id", "bos_token_id")] {
            if let Some(id) = converted.config[name].as_u64() {
                converted.file.set_u32(&format!("tokenizer.ggml.{key}"), id as u32);
            }
        }
        (self.change)(&mut converted);
        converted.finish()
    }

    fn tensors(&self, folder: &Path) -> BTreeMap<String, Matrix> {
        let checkpoint = Checkpoint::open_folder(&Folder::disk(folder)).expect("its weights open");
        let mut tensors = BTreeMap::new();
        for tensor in checkpoint.tensors() {
            let Some(name) = self.name(tensor.name) else { continue };
            let ty = tensor.quant_type().expect("it is a number format");
            let mut numbers = vec![0.0; tensor.shape.iter().product()];
            ty.dequantize(&tensor.bytes(), &mut numbers);
            tensors.insert(name, Matrix { shape: tensor.shape.to_vec(), numbers, ty });
        }
        tensors
    }

    /// Returns the name of a tensor in GGUF, or `None` if it is dropped.
    fn name(&self, hubs: &str) -> Option<String> {
        if DROPPED.iter().any(|part| hubs.contains(part)) {
            return None;
        }
        let bare = PREFIXES.iter().find_map(|prefix| hubs.strip_prefix(prefix)).unwrap_or(hubs);
        let (stem, end) = bare.rsplit_once('.').expect("a name has parts");
        let end = match end {
            "gamma" => "weight",
            "beta" => "bias",
            end => end,
        };
        let known = self.names.iter().copied().flatten();
        let found = known.filter_map(|(hub, gguf)| Some((*gguf, numbers(hub, stem)?))).next();
        let (pattern, [layer, expert]) = found.unwrap_or_else(|| panic!("{}: {hubs}", self.fixture));
        Some(format!("{}.{end}", pattern.replace("{i}", layer).replace("{e}", expert)))
    }
}

/// Returns the texts that a name has for `{i}` and `{e}`, if it matches the pattern.
fn numbers<'a>(pattern: &str, name: &'a str) -> Option<[&'a str; 2]> {
    let mut found = [""; 2];
    let (mut expected, mut parts) = (pattern.split('.'), name.split('.'));
    loop {
        match (expected.next(), parts.next()) {
            (None, None) => return Some(found),
            (Some("{i}"), Some(number)) => found[0] = number,
            (Some("{e}"), Some(number)) => found[1] = number,
            (expected, part) if expected == part => {}
            _ => return None,
        }
    }
}

impl Converted {
    /// Returns a number of config.json.
    pub fn size(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap_or_else(|| panic!("config.json has no {key}")) as usize
    }

    /// Sets a key of the architecture.
    pub fn set(&mut self, key: &str, value: &Value) {
        let key = format!("{}.{key}", self.architecture);
        let is_real = ["epsilon", "freq_base", "freq_base_swa", "softcapping", "factor"];
        match value {
            Value::Bool(flag) => self.file.set_bool(&key, *flag),
            number if is_real.iter().any(|end| key.ends_with(end)) => {
                self.file.set_f32(&key, number.as_f64().expect("a number") as f32);
            }
            number => self.file.set_u32(&key, number.as_u64().expect("a whole number") as u32),
        }
    }

    fn take_keys(&mut self, keys: &[(&str, &str)]) {
        for (key, name) in keys {
            match self.config[name].clone() {
                Value::Null => {}
                value => self.set(key, &value),
            }
        }
    }

    /// Returns the tensors whose name has this suffix.
    pub fn ending<'a>(&'a mut self, end: &'a str) -> impl Iterator<Item = &'a mut Matrix> {
        self.tensors.iter_mut().filter(move |(name, _)| name.ends_with(end)).map(|(_, tensor)| tensor)
    }

    /// Reorders the rows of the weight and bias of this name in all layers.
    pub fn reorder(&mut self, name: &str, order: &[usize]) {
        for end in ["weight", "bias"] {
            self.ending(&format!(".{name}.{end}")).for_each(|tensor| tensor.reorder(order));
        }
    }

    /// Adds a tensor that the directory lacks.
    pub fn add_vector(&mut self, name: &str, numbers: Vec<f32>) {
        let vector = Matrix { shape: vec![numbers.len()], numbers, ty: QuantType::F32 };
        self.tensors.insert(name.to_owned(), vector);
    }

    /// Stacks the tensors of all experts of a layer.
    pub fn stack_experts(&mut self) {
        for name in ["ffn_gate", "ffn_up", "ffn_down"] {
            for layer in 0..self.size("num_hidden_layers") {
                let stem = format!("blk.{layer}.{name}");
                let each = (0..).map_while(|expert| self.tensors.remove(&format!("{stem}.{expert}.weight")));
                let stacked = each.reduce(|all, next| all.and(next));
                self.tensors.extend(stacked.map(|stacked| (format!("{stem}_exps.weight"), stacked)));
            }
        }
    }

    fn finish(mut self) -> Written {
        for (name, mut tensor) in self.tensors {
            let is_single = SINGLE.iter().any(|part| name.contains(part)) || name.ends_with("_norm.weight");
            if is_single || tensor.shape.len() == 1 {
                tensor.ty = QuantType::F32;
            }
            self.file.tensors.push(tensor.written(&name));
        }
        self.file
    }
}

impl Matrix {
    fn reorder(&mut self, order: &[usize]) {
        let width = self.numbers.len() / self.shape[0];
        assert_eq!(self.shape[0], order.len());
        let row = |row: &usize| self.numbers[row * width..][..width].to_vec();
        self.numbers = order.iter().flat_map(row).collect();
    }

    pub fn transpose(&mut self) {
        let [rows, columns] = self.shape[..] else { panic!("it is no matrix") };
        let at = |at: usize| self.numbers[at % rows * columns + at / rows];
        (self.numbers, self.shape) = ((0..rows * columns).map(at).collect(), vec![columns, rows]);
    }

    /// Divides the rows of each head, of which the first ones are transposed: (heads, columns, first) and
    /// (heads, others, columns).
    pub fn divided(self, heads: usize, first: usize) -> (Matrix, Matrix) {
        let [rows, columns] = self.shape[..] else { panic!("it is no matrix") };
        let others = rows / heads - first;
        let mut parts = [Vec::new(), Vec::new()];
        for head in self.numbers.chunks(rows / heads * columns) {
            let (keys, values) = head.split_at(first * columns);
            let column = |column: usize| keys.iter().skip(column).step_by(columns);
            parts[0].extend((0..columns).flat_map(column));
            parts[1].extend_from_slice(values);
        }
        let [keys, values] = parts;
        let part = |shape, numbers| Matrix { shape, numbers, ty: self.ty };
        (part(vec![heads, columns, first], keys), part(vec![heads, others, columns], values))
    }

    pub fn add(&mut self, number: f32) {
        self.numbers.iter_mut().for_each(|x| *x += number);
    }

    /// Multiplies all values, converting them to F32.
    pub fn scale(&mut self, number: f32) {
        self.numbers.iter_mut().for_each(|x| *x *= number);
        self.ty = QuantType::F32;
    }

    /// Appends another matrix.
    fn and(mut self, next: Matrix) -> Matrix {
        if self.shape.len() == next.shape.len() {
            self.shape.insert(0, 1);
        }
        self.shape[0] += 1;
        self.numbers.extend(next.numbers);
        self
    }

    fn written(&self, name: &str) -> Tensor {
        let mut bytes = vec![0; self.ty.bytes(self.numbers.len()).expect("whole numbers")];
        self.ty.quantize(&self.numbers, &mut bytes);
        let id = match self.ty {
            QuantType::F32 => 0,
            QuantType::F16 => 1,
            QuantType::BF16 => 30,
            other => panic!("no fixture is in {other}"),
        };
        Tensor::new(name, &self.shape, id, bytes)
    }
}

/// Returns the permutation to Meta's order of rotated rows, in which the two rows of a pair are adjacent.
pub fn in_pairs(heads: usize, dim: usize) -> Vec<usize> {
    (0..heads * dim).map(|row| row / dim * dim + row % dim / 2 + row % 2 * (dim / 2)).collect()
}

/// Returns the permutation from groups of queries, key and value to all queries, all keys, all values.
pub fn in_blocks(groups: usize, queries: usize, dim: usize) -> Vec<usize> {
    let heads = |first: usize, count: usize| {
        (0..groups).flat_map(move |group| (0..count).map(move |at| group * (queries + 2) + first + at))
    };
    let all = heads(0, queries).chain(heads(queries, 1)).chain(heads(queries + 1, 1));
    all.flat_map(|head| head * dim..(head + 1) * dim).collect()
}
