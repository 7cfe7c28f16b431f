//! Splitting of blocks into unsigned quants and parameter bytes (scales and minima), for backends that store
//! them in another order.
//!
//! Invariant: joining the result of a split gives the original block, byte for byte.

use super::affine::{self, AffineFormat};
use super::superblocks::{join_q4_k, join_q6_k, split_q4_k, split_q6_k};
use super::{QuantType, blocks, group};

/// Functions that split the blocks of a format and join them again. A quant is an unsigned byte, in the order
/// of the elements.
#[derive(Clone, Copy)]
pub struct BlockSplit {
    /// Bytes of a block that are not quants: scales and minima.
    pub param_bytes: usize,
    /// Splits a block: (block, quants, parameters).
    pub split: fn(&[u8], &mut [u8], &mut [u8]),
    /// Joins a block: (quants, parameters, block).
    pub join: fn(&[u8], &[u8], &mut [u8]),
}

/// Returns the functions for a format, if it can be split.
pub(super) fn block_split(ty: QuantType) -> Option<BlockSplit> {
    use QuantType::*;
    Some(match ty {
        Q8_0 => BlockSplit { param_bytes: 2, split: blocks::split_q8_0, join: blocks::join_q8_0 },
        Q4_0 => BlockSplit { param_bytes: 2, split: blocks::split_q4::<2>, join: blocks::join_q4::<2> },
        Q4_1 => BlockSplit { param_bytes: 4, split: blocks::split_q4::<4>, join: blocks::join_q4::<4> },
        Q4_K => BlockSplit { param_bytes: 16, split: split_q4_k::<4>, join: join_q4_k::<4> },
        Q5_K => BlockSplit { param_bytes: 16, split: split_q4_k::<5>, join: join_q4_k::<5> },
        Q6_K => BlockSplit { param_bytes: 18, split: split_q6_k, join: join_q6_k },
        Q6_B64T1 => affine_split::<affine::Q6B64T1>(),
        Q5_B64T1 => affine_split::<affine::Q5B64T1>(),
        Q4_B64T1 => affine_split::<affine::Q4B64T1>(),
        Q4_B32T1A => affine_split::<affine::Q4B32T1A>(),
        Q4_B32T1B => affine_split::<affine::Q4B32T1B>(),
        Q3H_B64T1 => affine_split::<affine::Q3HB64T1>(),
        G4_B64 => BlockSplit { param_bytes: 4, split: group::split, join: group::join },
        _ => return None,
    })
}

/// Returns the functions for a format of Inferflow.
fn affine_split<T: AffineFormat>() -> BlockSplit {
    BlockSplit {
        param_bytes: T::PARAM_BYTES,
        split: |block, quants, params| {
            params.copy_from_slice(&block[..T::PARAM_BYTES]);
            T::unpack(&block[T::PARAM_BYTES..], quants);
        },
        join: |quants, params, block| {
            block[..T::PARAM_BYTES].copy_from_slice(params);
            T::pack(quants, &mut block[T::PARAM_BYTES..]);
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::philox;

    #[test]
    fn blocks_survive_split_and_join() {
        for ty in QuantType::all() {
            let Some(BlockSplit { param_bytes: head, split, join }) = block_split(ty) else { continue };
            let row = ty.row();
            for trial in 0..50 {
                // Quantized first, because not every combination of bytes is valid in every format.
                let values: Vec<f32> = (0..row.block_elements as u32)
                    .map(|i| philox([i, trial, 0, 0], [9, 9])[0] as i32 as f32 / 1e9)
                    .collect();
                let mut block = vec![0; row.block_bytes];
                ty.quantize(&values, &mut block);
                let (mut quants, mut params) = (vec![0; row.block_elements], vec![0; head]);
                split(&block, &mut quants, &mut params);
                let mut back = vec![0xa5; row.block_bytes];
                join(&quants, &params, &mut back);
                assert_eq!(back, block, "{ty}");
            }
        }
    }
}
