//! Layers that the host applies to the vector of a text, or of a token, after the model: those of
//! classifiers, and the dense modules of embedding models.
//!
//! Invariant: batch-invariant: sums are added in a fixed order, whatever other vectors there are.

use super::pooling::Pooling;
use mainstem_kernels::Activation;
use mainstem_kernels::reference::apply_activation;

/// Number of partial sums of a dot product.
const LANES: usize = 16;

/// A linear layer, y = f(x · Wᵀ + b), with a norm of its results.
#[derive(Clone, Debug, PartialEq)]
pub struct DenseLayer {
    /// (n, k)
    pub weight: Vec<f32>,
    pub n: usize,
    pub k: usize,
    /// (n), if it has one.
    pub bias: Option<Vec<f32>>,
    pub activation: Option<Activation>,
    pub norm: Option<LayerNorm>,
}

/// A norm of the vector that a layer gives.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerNorm {
    pub weight: Vec<f32>,
    pub bias: Option<Vec<f32>>,
    /// Whether the mean is subtracted first.
    pub centered: bool,
    pub eps: f32,
}

/// The function from logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputFunction {
    /// Over all labels.
    Softmax,
    /// Of each label separately.
    Sigmoid,
    /// None: the scores are the logits.
    Identity,
}

/// Maps the hidden states of a text to a score for each label.
#[derive(Clone, Debug, PartialEq)]
pub struct Classifier {
    /// Reduction of the hidden states to the vector that is classified; `None` classifies each token.
    pub pooling: Option<Pooling>,
    /// The layers, of which the last has a number for each label.
    pub layers: Vec<DenseLayer>,
    /// Names of the labels.
    pub labels: Vec<String>,
    pub function: OutputFunction,
}

impl Classifier {
    /// Returns the logits of the labels for a vector.
    pub fn logits(&self, vector: &[f32]) -> Vec<f32> {
        apply_all(&self.layers, vector.to_vec())
    }
}

/// Applies layers to a vector, one after another.
pub fn apply_all(layers: &[DenseLayer], vector: Vec<f32>) -> Vec<f32> {
    layers.iter().fold(vector, |vector, layer| layer.apply(&vector))
}

impl DenseLayer {
    /// Applies the layer to a vector of `k` numbers, which gives one of `n`.
    pub fn apply(&self, x: &[f32]) -> Vec<f32> {
        assert_eq!(x.len(), self.k, "the vector is as wide as the layer's input");
        let mut y: Vec<f32> = self.weight.chunks_exact(self.k).map(|row| dot(row, x)).collect();
        if let Some(bias) = &self.bias {
            y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
        }
        if let Some(activation) = self.activation {
            y.iter_mut().for_each(|y| *y = apply_activation(activation, f64::from(*y)) as f32);
        }
        if let Some(norm) = &self.norm {
            norm.apply(&mut y);
        }
        y
    }
}

impl LayerNorm {
    fn apply(&self, x: &mut [f32]) {
        let mean_of =
            |numbers: &mut dyn Iterator<Item = f64>| numbers.sum::<f64>() / self.weight.len() as f64;
        let mean = if self.centered { mean_of(&mut x.iter().map(|x| f64::from(*x))) } else { 0.0 };
        let variance = mean_of(&mut x.iter().map(|x| (f64::from(*x) - mean).powi(2)));
        let factor = 1.0 / (variance + f64::from(self.eps)).sqrt();
        for (i, (x, weight)) in x.iter_mut().zip(&self.weight).enumerate() {
            let bias = self.bias.as_ref().map_or(0.0, |bias| bias[i]);
            *x = ((f64::from(*x) - mean) * factor) as f32 * weight + bias;
        }
    }
}

impl OutputFunction {
    /// Turns logits into scores.
    pub fn apply(self, logits: &mut [f32]) {
        match self {
            OutputFunction::Identity => {}
            OutputFunction::Sigmoid => {
                logits.iter_mut().for_each(|x| *x = (1.0 / (1.0 + f64::from(-*x).exp())) as f32);
            }
            OutputFunction::Softmax => {
                let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let weight = |x: f32| f64::from(x - largest).exp();
                let sum: f64 = logits.iter().map(|x| weight(*x)).sum();
                logits.iter_mut().for_each(|x| *x = (weight(*x) / sum) as f32);
            }
        }
    }
}

/// Returns the dot product of two vectors.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(k: usize, weight: &[f32]) -> DenseLayer {
        let n = weight.len() / k;
        DenseLayer { weight: weight.to_vec(), n, k, bias: None, activation: None, norm: None }
    }

    #[test]
    fn a_layer_multiplies_adds_activates_and_normalizes_in_this_order() {
        let plain = layer(3, &[1.0, 2.0, 0.0, -1.0, 0.0, 1.0]);
        assert_eq!(plain.apply(&[1.0, 1.0, -4.0]), [3.0, -5.0]);
        let biased = DenseLayer { bias: Some(vec![0.5, 1.0]), ..plain };
        assert_eq!(biased.apply(&[1.0, 1.0, -4.0]), [3.5, -4.0]);
        let active = DenseLayer { activation: Some(Activation::Relu), ..biased };
        assert_eq!(active.apply(&[1.0, 1.0, -4.0]), [3.5, 0.0]);
        let norm = LayerNorm { weight: vec![2.0, 1.0], bias: Some(vec![0.0, 1.0]), centered: true, eps: 0.0 };
        let normed = DenseLayer { norm: Some(norm.clone()), ..active.clone() };
        assert_eq!(normed.apply(&[1.0, 1.0, -4.0]), [2.0, 0.0]);
        let rms = DenseLayer { norm: Some(LayerNorm { centered: false, bias: None, ..norm }), ..active };
        assert_eq!(rms.apply(&[1.0, 1.0, -4.0]), [2.0 * 2f32.sqrt(), 0.0]);
    }

    #[test]
    fn long_products_count_every_element() {
        let (a, b): (Vec<f32>, Vec<f32>) = (1..=35).map(|i| (i as f32, 1.0 + (i % 2) as f32)).unzip();
        assert_eq!(dot(&a, &b), (1..=35).map(|i| (i * (1 + i % 2)) as f32).sum::<f32>());
    }

    #[test]
    fn scores_are_finite_for_any_logits() {
        for (function, expected) in [
            (OutputFunction::Softmax, [1.0, 0.0]),
            (OutputFunction::Sigmoid, [1.0, 0.0]),
            (OutputFunction::Identity, [3e38, -3e38]),
        ] {
            let mut logits = [3e38, -3e38];
            function.apply(&mut logits);
            assert_eq!(logits, expected, "{function:?}");
        }
        let mut even = [7.0; 4];
        OutputFunction::Softmax.apply(&mut even);
        assert_eq!(even, [0.25; 4]);
    }
}
