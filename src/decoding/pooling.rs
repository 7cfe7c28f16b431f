//! Pooling: one vector from the hidden states of a text's tokens.
//!
//! Invariant: batch-invariant: only the text's own rows count, in their order, so the vector does not depend
//! on the other sequences of the batch.

/// The method that reduces the hidden states of a text to one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The mean of all hidden states.
    Mean,
    /// The first token's hidden state.
    Cls,
    /// The last token's hidden state.
    Last,
}

impl Pooling {
    /// All pooling methods.
    pub const ALL: [Pooling; 3] = [Pooling::Mean, Pooling::Cls, Pooling::Last];

    /// Returns the name used in the configuration and in requests.
    pub fn name(self) -> &'static str {
        match self {
            Pooling::Mean => "mean",
            Pooling::Cls => "cls",
            Pooling::Last => "last",
        }
    }
}

/// The mean of rows that arrive one after another, summed in double precision, so that long texts lose no
/// accuracy.
#[derive(Clone, Debug, Default)]
pub struct RowMean {
    sums: Vec<f64>,
    count: usize,
}

impl RowMean {
    /// Adds rows of `width` numbers.
    pub fn add(&mut self, rows: &[f32], width: usize) {
        self.sums.resize(width, 0.0);
        for row in rows.chunks_exact(width) {
            self.sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
            self.count += 1;
        }
    }

    /// Returns the mean of all rows, of which there is at least one, and begins anew.
    pub fn take(&mut self) -> Vec<f32> {
        let RowMean { sums, count } = std::mem::take(self);
        sums.into_iter().map(|sum| (sum / count as f64) as f32).collect()
    }
}

/// Pools the hidden states `rows` of a text, (tokens, width), with at least one token, to a vector of `width`
/// numbers.
pub fn pool(pooling: Pooling, rows: &[f32], width: usize) -> Vec<f32> {
    assert!(
        !rows.is_empty() && rows.len().is_multiple_of(width),
        "a text has at least one token, and each token a row"
    );
    match pooling {
        Pooling::Mean => {
            let mut mean = RowMean::default();
            mean.add(rows, width);
            mean.take()
        }
        Pooling::Cls => rows[..width].to_vec(),
        Pooling::Last => rows[rows.len() - width..].to_vec(),
    }
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
            assert_eq!(pool(pooling, &rows[..3], 3), rows[..3], "the vector of one token is its own row");
        }
    }

    /// In single precision, a large sum would absorb the small terms after it.
    #[test]
    fn the_mean_of_many_rows_keeps_the_small_ones() {
        let mut rows = vec![1.0; 20_001];
        rows[0] = 20_000_000.0;
        assert_eq!(pool(Pooling::Mean, &rows, 1), [(20_020_000.0 / 20_001.0) as f32]);
    }
}
