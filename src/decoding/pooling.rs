//! One vector for a text: what is made of the hidden states of its tokens.
//!
//! Invariant: only the text's own rows count, in their order, so that a text gives the same vector in any company.

use crate::request::Pooling;

/// The vector of a text whose hidden states are `rows`, (tokens, width), of at least one token.
pub fn pool(pooling: Pooling, rows: &[f32], width: usize) -> Vec<f32> {
    assert!(!rows.is_empty() && rows.len().is_multiple_of(width), "a text has a token, and each token a row");
    match pooling {
        Pooling::Mean => mean(rows, width),
        Pooling::Cls => rows[..width].to_vec(),
        Pooling::Last => rows[rows.len() - width..].to_vec(),
    }
}

/// In double precision, so that a long text loses nothing.
fn mean(rows: &[f32], width: usize) -> Vec<f32> {
    let mut sums = vec![0.0; width];
    for row in rows.chunks_exact(width) {
        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
    }
    let count = (rows.len() / width) as f64;
    sums.into_iter().map(|sum| (sum / count) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_last_and_mean_are_those_of_the_rows() {
        let rows = [1.0, -2.0, 4.0, 6.0, 1.0, 5.0];
        let pooled = [Pooling::Cls, Pooling::Last, Pooling::Mean].map(|pooling| pool(pooling, &rows, 2));
        assert_eq!(pooled, [[1.0, -2.0], [1.0, 5.0], [2.0, 3.0]]);
        for pooling in [Pooling::Cls, Pooling::Last, Pooling::Mean] {
            assert_eq!(pool(pooling, &rows[..3], 3), rows[..3], "of one token it is that token's");
        }
    }

    /// In single precision a sum that has grown swallows what comes after.
    #[test]
    fn the_mean_of_many_rows_keeps_the_small_ones() {
        let mut rows = vec![1.0; 20_001];
        rows[0] = 20_000_000.0;
        assert_eq!(pool(Pooling::Mean, &rows, 1), [(20_020_000.0 / 20_001.0) as f32]);
    }
}
