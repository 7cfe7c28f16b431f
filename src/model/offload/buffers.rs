//! The buffers for matrices of layers that are read ahead of use.
//!
//! Invariant: there are buffers for at least one layer.

use super::direct::to_blocks;

/// Bytes that the buffers are for: what a fast disk reads while a step ends and the next one begins. More
/// would only take memory from matrices that could stay.
const AHEAD: usize = 128 << 20;

/// Returns the number of layers that the buffers are for, given the bytes to read of each: one that computes,
/// and one or more that are read, up to a quarter of all; only one without overlap.
fn layers_ahead(layers: &[Vec<usize>], overlaps: bool) -> usize {
    let bytes: usize = layers.iter().flatten().sum();
    let wanted = (AHEAD * layers.len()).div_ceil(bytes.max(1));
    if overlaps { wanted.min(layers.len() / 4).max(2) } else { 1 }
}

/// Sizes of the buffers for matrices of `bytes`, given by layer, of which only those to read count: each size
/// with the number of buffers.
pub fn buffer_sizes(layers: &[Vec<usize>], overlaps: bool) -> Vec<(usize, usize)> {
    let mut sizes: Vec<usize> = layers.iter().flatten().map(|bytes| to_blocks(*bytes)).collect();
    let (all, layers_ahead) = (sizes.clone(), layers_ahead(layers, overlaps));
    sizes.sort_unstable();
    sizes.dedup();
    let count = |size: usize| {
        let of_layer = |layer: &Vec<usize>| layer.iter().filter(|bytes| to_blocks(**bytes) == size).count();
        let most = layers.iter().map(of_layer).max().unwrap_or(0);
        (layers_ahead * most).min(all.iter().filter(|other| **other == size).count())
    };
    sizes.into_iter().map(|size| (size, count(size))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_for_at_least_two_layers_and_for_more_if_layers_are_small() {
        let model = |layers: usize, kib: usize| vec![vec![kib << 10, 2 * (kib << 10)]; layers];
        let layers = |model: &[Vec<usize>]| {
            let sizes = buffer_sizes(model, true);
            assert_eq!(sizes.iter().map(|(size, _)| *size).collect::<Vec<_>>(), model[0]);
            sizes.into_iter().map(|(_, count)| count).collect::<Vec<_>>()
        };
        assert_eq!(layers(&model(40, 100 << 10)), [2, 2], "300 MiB each");
        assert_eq!(layers(&model(40, 10 << 10)), [5, 5], "30 MiB each");
        assert_eq!(layers(&model(40, 4)), [10, 10], "no more than a quarter");
        assert_eq!(layers(&model(1, 4)), [1, 1], "one layer needs no second buffer");
        let sizes = |overlaps| buffer_sizes(&[vec![5000], vec![], vec![4096, 8192]], overlaps);
        assert_eq!((sizes(true), sizes(false)), (vec![(4096, 1), (8192, 2)], vec![(4096, 1), (8192, 1)]));
    }
}
