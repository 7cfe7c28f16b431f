//! Blocks taken apart: each number's code, without sign, and the bytes of scales and bases. For backends that store
//! them in another order.
//!
//! Invariant: `join` of what `split` gives is the block, byte for byte.

use super::affine::{self, Affine};
use super::{QuantType, blocks, group, superblocks};

/// How blocks of a format are taken apart.
#[derive(Clone, Copy)]
pub struct Parts {
    /// Bytes that are no codes.
    pub head: usize,
    /// (block, codes, head).
    pub split: fn(&[u8], &mut [u8], &mut [u8]),
    /// (codes, head, block).
    pub join: fn(&[u8], &[u8], &mut [u8]),
}

/// Those of a format, if it can be taken apart.
pub(super) fn of(ty: QuantType) -> Option<Parts> {
    use QuantType::*;
    Some(match ty {
        Q8_0 => Parts { head: 2, split: blocks::split_q8_0, join: blocks::join_q8_0 },
        Q4_0 => Parts { head: 2, split: blocks::split_q4::<2>, join: blocks::join_q4::<2> },
        Q4_1 => Parts { head: 4, split: blocks::split_q4::<4>, join: blocks::join_q4::<4> },
        Q4_K => superblocks::parts_k::<4>(),
        Q5_K => superblocks::parts_k::<5>(),
        Q6_K => superblocks::PARTS_6,
        Q6_B64T1 => of_affine::<affine::Q6B64T1>(),
        Q5_B64T1 => of_affine::<affine::Q5B64T1>(),
        Q4_B64T1 => of_affine::<affine::Q4B64T1>(),
        Q4_B32T1A => of_affine::<affine::Q4B32T1A>(),
        Q4_B32T1B => of_affine::<affine::Q4B32T1B>(),
        Q3H_B64T1 => of_affine::<affine::Q3HB64T1>(),
        G4_B64 => Parts { head: 4, split: group::split, join: group::join },
        _ => return None,
    })
}

fn of_affine<T: Affine>() -> Parts {
    Parts {
        head: T::HEAD,
        split: |block, codes, head| {
            head.copy_from_slice(&block[..T::HEAD]);
            T::unpack(&block[T::HEAD..], codes);
        },
        join: |codes, head, block| {
            block[..T::HEAD].copy_from_slice(head);
            T::pack(codes, &mut block[T::HEAD..]);
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::philox;

    #[test]
    fn blocks_survive_being_taken_apart() {
        for ty in QuantType::all() {
            let Some(Parts { head, split, join }) = of(ty) else { continue };
            let row = ty.row();
            for trial in 0..50 {
                // Written first: not every code of every format can be.
                let values: Vec<f32> = (0..row.block_elements as u32)
                    .map(|i| philox([i, trial, 0, 0], [9, 9])[0] as i32 as f32 / 1e9)
                    .collect();
                let mut block = vec![0; row.block_bytes];
                ty.quantize(&values, &mut block);
                let (mut codes, mut heads) = (vec![0; row.block_elements], vec![0; head]);
                split(&block, &mut codes, &mut heads);
                let mut back = vec![0xa5; row.block_bytes];
                join(&codes, &heads, &mut back);
                assert_eq!(back, block, "{ty}");
            }
        }
    }
}
