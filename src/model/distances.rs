//! Disentangled attention: the buckets of distances, and the products of queries and keys with the vectors of
//! distances. See [`super::spec::distances`].
//!
//! Invariant: the vectors of distances follow from the weights alone, so that a step only multiplies by them.

use super::weights::Distances;
use mainstem_kernels::{Backend, DistanceScores, OutputColumns};

/// Returns the bucket of each distance of less than `reach`, a key's position minus the query's, in ascending
/// order. Of `count` buckets, the middle one is that of a position itself; positions before the query have
/// later ones. With `growth_end`, buckets of more than a quarter of `count` positions away grow
/// logarithmically up to that distance. What is farther has the first or the last bucket.
pub fn buckets(count: usize, growth_end: Option<usize>, reach: usize) -> Vec<f32> {
    let far = reach as i64 - 1;
    let middle = (count / 2) as i64;
    let place = |back: i64| match growth_end {
        Some(end) => growing_bucket(back, count / 2, end),
        None => back,
    };
    (-far..=far).map(|ahead| (middle + place(-ahead)).clamp(0, count as i64 - 1) as f32).collect()
}

/// Returns the bucket of a distance, the query's position minus the key's, with `side` buckets on either side
/// of 0: half of them for one distance each.
fn growing_bucket(back: i64, side: usize, end: usize) -> i64 {
    let exact = side / 2;
    if back.unsigned_abs() as usize <= exact {
        return back;
    }
    // In F32, as in the reference implementation: bucket boundaries depend on it.
    let far = (back.unsigned_abs() as f32 / exact as f32).ln();
    let farthest = (((end - 1) as f64 / exact as f64) as f32).ln();
    let grown = (far / farthest * (exact - 1) as f32).ceil() + exact as f32;
    back.signum() * grown as i64
}

/// Computes the products of queries and of keys (rows, heads, k_dim) with the vectors of distances, into the
/// buffers `to`.
pub fn scores<'a, B: Backend>(
    b: &mut B,
    (rows, heads): (usize, usize),
    distances: &'a Distances<B::Buf>,
    [q, k]: [&B::Buf; 2],
    to: &'a mut [B::Buf; 2],
) -> DistanceScores<'a, B::Buf> {
    let columns = OutputColumns::all(distances.buckets.count);
    let [of_queries, of_keys] = to;
    b.matmul_heads(rows, heads, (&distances.keys, columns), q, of_queries);
    b.matmul_heads(rows, heads, (&distances.queries, columns), k, of_keys);
    DistanceScores { of_queries, of_keys, buckets: &distances.buckets }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_distances_have_buckets_of_their_own_and_far_ones_share_the_last() {
        assert_eq!(buckets(6, None, 6), [5.0, 5.0, 5.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0, 0.0, 0.0]);
    }

    /// The buckets of `make_log_bucket_position` of Hugging Face transformers, with 8 buckets and 20
    /// positions.
    #[test]
    fn buckets_grow_logarithmically() {
        let back: Vec<i64> = (0..24).map(|back| growing_bucket(back, 8, 20)).collect();
        assert_eq!(back, BACK);
        assert!((0..24).all(|back| growing_bucket(-back, 8, 20) == -BACK[back as usize]));
        let of_reach = buckets(16, Some(20), 24);
        assert_eq!((of_reach.len(), of_reach[23], of_reach[22], of_reach[24]), (47, 8.0, 9.0, 7.0));
        assert_eq!((of_reach[0], of_reach[46]), (15.0, 0.0));
    }

    const BACK: [i64; 24] = [0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7, 8, 8, 8, 8];
}
