//! Quantization by weighted least squares: slower and more accurate than [`QuantType::quantize`].
//!
//! Round-to-nearest looks only at the range of a block. The search here minimizes the sum of squared errors,
//! each weighted by the importance of its element. Formats that store numbers directly have nothing to search
//! for.
//!
//! Invariant: the weighted error is never larger than that of [`QuantType::quantize`], because the better of
//! the two results is kept. A block with a number outside of the range of F16, and a block whose elements are
//! all equal, keep the result of [`QuantType::quantize`].

use super::grid_search::{self, G4B64, ScaleAndMinimum, ScaleOnly};
use super::{QuantType, affine, superblocks};
use half::f16;

/// A function that writes a block: (values, weights, bytes).
type BlockSearch = fn(&[f32], &[f32], &mut [u8]);

/// Elements of the longest block, and bytes of the largest one.
const MAX_BLOCK_LEN: usize = superblocks::SUPERBLOCK_LEN;
const MAX_BLOCK_BYTES: usize = superblocks::Q6_K_BYTES;

impl QuantType {
    /// Quantizes whole blocks with a small squared error. The format is not a read-only one. `importance`
    /// weights the squared error of each value with a number of at least 0; without it, and in blocks where
    /// it is 0 throughout, all errors count equally.
    pub fn quantize_least_squares(self, values: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
        self.quantize(values, out);
        let Some(search) = search_function(self) else { return };
        let row = self.row();
        let mut candidate = [0; MAX_BLOCK_BYTES];
        let candidate = &mut candidate[..row.block_bytes];
        let blocks = values.chunks_exact(row.block_elements).zip(out.chunks_exact_mut(row.block_bytes));
        for (number, (values, out)) in blocks.enumerate() {
            if !is_searchable(values) {
                continue;
            }
            let importance =
                importance.map(|importance| &importance[number * row.block_elements..][..values.len()]);
            let weights = normalized_weights(importance);
            let weights = &weights[..values.len()];
            candidate.copy_from_slice(out);
            search(values, weights, candidate);
            if self.weighted_error(values, weights, candidate) < self.weighted_error(values, weights, out) {
                out.copy_from_slice(candidate);
            }
        }
    }

    /// Returns the weighted squared error of a block.
    fn weighted_error(self, values: &[f32], weights: &[f32], block: &[u8]) -> f64 {
        let mut back = [0f32; MAX_BLOCK_LEN];
        let back = &mut back[..values.len()];
        self.dequantize(block, back);
        let weighted_square = |((value, back), weight): ((&f32, &f32), &f32)| {
            f64::from(*weight) * (f64::from(*value) - f64::from(*back)).powi(2)
        };
        values.iter().zip(&*back).zip(weights).map(weighted_square).sum()
    }
}

/// Returns the search function of a format, if it has one.
fn search_function(ty: QuantType) -> Option<BlockSearch> {
    use QuantType::*;
    Some(match ty {
        Q8_0 => grid_search::search_block::<ScaleOnly<254, 127>>,
        Q4_0 => grid_search::search_block::<ScaleOnly<15, 8>>,
        Q5_0 => grid_search::search_block::<ScaleOnly<31, 16>>,
        Q4_1 => grid_search::search_block::<ScaleAndMinimum<15>>,
        Q5_1 => grid_search::search_block::<ScaleAndMinimum<31>>,
        Q2_K => superblocks::fit_q2_k,
        Q3_K => superblocks::fit_q3_k,
        Q4_K => superblocks::fit_q4_k,
        Q5_K => superblocks::fit_q5_k,
        Q6_K => superblocks::fit_q6_k,
        Q8_B32T1 => grid_search::search_block::<affine::Q8B32T1>,
        Q6_B64T1 => grid_search::search_block::<affine::Q6B64T1>,
        Q5_B64T1 => grid_search::search_block::<affine::Q5B64T1>,
        Q4_B64T1 => grid_search::search_block::<affine::Q4B64T1>,
        Q4_B32T1A => grid_search::search_block::<affine::Q4B32T1A>,
        Q4_B32T1B => grid_search::search_block::<affine::Q4B32T1B>,
        Q4_B16 => grid_search::search_block::<affine::Q4B16>,
        Q3H_B64T1 => grid_search::search_block::<affine::Q3HB64T1>,
        Q3_B32T1A => grid_search::search_block::<affine::Q3B32T1A>,
        Q3_B32T1B => grid_search::search_block::<affine::Q3B32T1B>,
        Q2_B32T1A => grid_search::search_block::<affine::Q2B32T1A>,
        Q2_B32T1B => grid_search::search_block::<affine::Q2B32T1B>,
        G4_B64 => grid_search::search_block::<G4B64>,
        F32 | F16 | BF16 | IQ4_NL | IQ4_XS | TQ1_0 | TQ2_0 | MXFP4 => return None,
    })
}

/// Returns whether all values are within the range of F16 and at least two differ.
fn is_searchable(values: &[f32]) -> bool {
    let holds = |value: &f32| value.abs() <= f16::MAX.to_f32();
    values.iter().all(holds) && values.iter().any(|value| *value != values[0])
}

/// Returns the weights of the elements of a block, normalized to a mean of 1.
fn normalized_weights(importance: Option<&[f32]>) -> [f32; MAX_BLOCK_LEN] {
    let mut weights = [1.0; MAX_BLOCK_LEN];
    let Some(importance) = importance else { return weights };
    let mean = importance.iter().map(|x| f64::from(*x)).sum::<f64>() / importance.len() as f64;
    if mean > 0.0 {
        for (weight, importance) in weights.iter_mut().zip(importance) {
            *weight = (f64::from(*importance) / mean) as f32;
        }
    }
    weights
}

#[cfg(test)]
mod tests;
