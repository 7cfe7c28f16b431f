//! Dense modules of sentence-transformers: linear layers after pooling, each in a folder of its own.
//!
//! Invariant: the matrix has the shape that the settings say.

use super::{CONFIG, module_file};
use crate::formats::{Checkpoint, Folder, HubConfig};
use anyhow::{Context, Result, anyhow, ensure};
use mainstem_kernels::Activation;

/// The settings of a dense module.
#[derive(Clone, Debug, PartialEq)]
pub struct DenseConfig {
    /// Name of its folder, beside the list of modules.
    path: String,
    /// Widths of the vectors that it reads and gives.
    pub inputs: usize,
    pub outputs: usize,
    /// Whether the settings require a bias.
    needs_bias: bool,
    pub activation: Option<Activation>,
}

/// The numbers of a dense module.
#[derive(Debug)]
pub struct DenseWeights {
    /// (outputs, inputs)
    pub matrix: Vec<f32>,
    /// (outputs), if it has one.
    pub bias: Option<Vec<f32>>,
}

impl DenseConfig {
    /// Reads the settings of the module at `path`. The inner error says why it is not supported.
    pub(super) fn open(folder: &Folder, path: &str) -> Result<Result<DenseConfig, String>> {
        let name = module_file(folder, path, CONFIG)?;
        let missing = || anyhow!("{}: no such file", folder.file(&name).display());
        let settings = HubConfig::read_if_present(folder, &name)?.ok_or_else(missing)?;
        let function = settings.opt_str("activation_function")?.unwrap_or("Tanh");
        let activation = match function.rsplit('.').next().unwrap_or_default() {
            "Identity" => None,
            "Tanh" => Some(Activation::Tanh),
            "GELU" => Some(Activation::Gelu),
            "ReLU" => Some(Activation::Relu),
            "SiLU" => Some(Activation::Silu),
            _ => return Ok(Err(format!("{name}: the activation_function {function} is not supported"))),
        };
        let states = |key| settings.opt_str(key).map(|name| name.unwrap_or("sentence_embedding").to_owned());
        for key in ["module_input_name", "module_output_name"] {
            if states(key)? != "sentence_embedding" {
                return Ok(Err(format!("{name}: {key} is not sentence_embedding, which is not supported")));
            }
        }
        let (inputs, outputs) = (settings.usize("in_features")?, settings.usize("out_features")?);
        if inputs == 0 || outputs == 0 {
            return Ok(Err(format!("{name}: in_features or out_features is 0")));
        }
        let needs_bias = settings.opt_bool("bias")? == Some(true);
        Ok(Ok(DenseConfig { path: path.to_owned(), inputs, outputs, needs_bias, activation }))
    }

    /// Reads the numbers, from safetensors or PyTorch's format. Errors name the file.
    pub fn read(&self, folder: &Folder) -> Result<DenseWeights> {
        let Folder::Disk(own) = folder else {
            return Err(anyhow!("{}: it has no dense modules", folder.path().display()));
        };
        let own = Folder::disk(&own.join(&self.path));
        let checkpoint = Checkpoint::open_folder(&own)?;
        let read = |name: &str, shape: &[usize]| -> Result<Option<Vec<f32>>> {
            let Some(tensor) = checkpoint.tensor(name) else { return Ok(None) };
            ensure!(
                tensor.shape == shape,
                "{}: tensor '{name}' has shape {:?}, but {CONFIG} requires {shape:?}",
                tensor.file.display(),
                tensor.shape
            );
            let mut numbers = vec![0.0; shape.iter().product()];
            tensor.quant_type()?.dequantize(&tensor.bytes(), &mut numbers);
            Ok(Some(numbers))
        };
        let missing = || format!("{}: tensor 'linear.weight' is missing", own.path().display());
        let matrix = read("linear.weight", &[self.outputs, self.inputs])?.with_context(missing)?;
        let bias = read("linear.bias", &[self.outputs])?;
        let has_bias = bias.is_some() || !self.needs_bias;
        ensure!(has_bias, "{}: tensor 'linear.bias' is missing", own.path().display());
        Ok(DenseWeights { matrix, bias })
    }

    /// Returns the paths of the module's files within the folder of the model.
    pub(super) fn files(folder: &Folder, path: &str) -> Vec<String> {
        let names = [CONFIG, "model.safetensors", "pytorch_model.bin"];
        names.into_iter().filter_map(|name| module_file(folder, path, name).ok()).collect()
    }
}
