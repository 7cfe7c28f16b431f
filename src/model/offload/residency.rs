//! Which matrices of the layers stay in a device's memory.
//!
//! Invariant: what stays is spread evenly over the layers, so that every layer waits for as many bytes.

/// The fraction of the matrices of a model's layers, by bytes, that may stay in memory, from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Residency(pub f64);

impl Residency {
    /// Returns for each matrix, given their bytes in the order of use, whether it stays: as many as the
    /// fraction allows, by error diffusion.
    pub fn choose(self, bytes: &[usize]) -> Vec<bool> {
        let (mut seen, mut kept) = (0.0, 0.0);
        let choose = |bytes: &usize| {
            let bytes = *bytes as f64;
            seen += bytes;
            // A tolerance, so that everything stays with a fraction of 1.
            let stays = kept + bytes <= self.0 * seen + 0.5;
            kept += if stays { bytes } else { 0.0 };
            stays
        };
        bytes.iter().map(choose).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stays_is_within_the_fraction_and_spread_over_all_layers() {
        let layer = [4096, 1024, 1024, 4096, 11264, 11264, 11264];
        let all: Vec<usize> = std::iter::repeat_n(layer, 22).flatten().collect();
        let total: usize = all.iter().sum();
        for percent in 0..=100 {
            let wanted = f64::from(percent) / 100.0;
            let chosen = Residency(wanted).choose(&all);
            let kept = |range: std::ops::Range<usize>| {
                range.filter(|at| chosen[*at]).map(|at| all[at]).sum::<usize>() as f64
            };
            let share = kept(0..all.len()) / total as f64;
            assert!(share <= wanted + 1e-9 && share > wanted - 0.012, "{percent} %: {share}");
            for first in 0..20 {
                let of_two = kept(7 * first..7 * first + 14) / (total as f64 / 11.0);
                assert!((of_two - wanted).abs() < 0.26, "{percent} %, layers {first}: {of_two}");
            }
        }
        assert!(Residency(0.0).choose(&all).iter().all(|stays| !stays));
        assert!(Residency(1.0).choose(&all).iter().all(|stays| *stays));
    }
}
