//! The memory or disk of each matrix of the layers, and of each layer's KV cache: a device's own memory, the
//! host's, or a disk.
//!
//! Invariant: the same tiers follow from the same layouts, whether memory is counted or allocated.

use super::matrix::LayerMatrix;
use super::residency::Residency;
use anyhow::{Context, Result};
use regex::Regex;

/// A memory or disk that holds data of a device. A device without memory of its own has that of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// The memory of the device.
    Device,
    /// The memory of the host.
    Host,
    /// A file.
    Disk,
}

impl Tier {
    /// The tiers below the device, from which its data is copied before it is used.
    pub const BELOW: [Tier; 2] = [Tier::Host, Tier::Disk];

    /// Returns the name of the tier in the configuration, in metrics and reports.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Device => "device",
            Tier::Host => "host",
            Tier::Disk => "disk",
        }
    }
}

/// Allocates so many bytes of the host's memory, all zero. Fails if they are not there.
pub fn host_memory(bytes: usize) -> Result<Box<[u8]>> {
    let mut memory = Vec::new();
    let reserved = memory.try_reserve_exact(bytes);
    reserved.with_context(|| format!("cannot allocate {bytes} bytes of host memory"))?;
    memory.resize(bytes, 0);
    Ok(memory.into())
}

/// The way in which fractions of a model's matrices are spread over its layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpreadRule {
    /// By error diffusion over all matrices, so that each layer waits for about as many bytes.
    #[default]
    Even,
    /// FlexGen's rule (Sheng et al. 2023): within each attention block and each MLP, the first matrices are
    /// on disk, the next in host memory and the last on the device, by the positions of their middles.
    MidPoint,
}

/// A tier that is set for some matrices, whatever the fractions are.
#[derive(Clone, Debug)]
pub struct TierOverride {
    pub matrices: MatrixFilter,
    pub tier: Tier,
}

/// A choice among the matrices of layers.
#[derive(Clone, Debug)]
pub enum MatrixFilter {
    /// Matrices whose tensors have names that the expression matches anywhere.
    Name(Regex),
    /// Matrices of the experts of mixtures, without the experts that process every token.
    Experts,
}

impl MatrixFilter {
    /// Returns whether the filter matches a matrix, given its name and its role.
    pub fn matches(&self, name: &str, role: &str) -> bool {
        match self {
            MatrixFilter::Name(pattern) => pattern.is_match(name),
            MatrixFilter::Experts => role.starts_with("expert_"),
        }
    }
}

/// The settings that decide, with the fraction on the device, about the tier of each matrix.
#[derive(Clone, Debug, Default)]
pub struct TierRules {
    /// The fraction of the matrices without an override, by bytes, that is in host memory, from 0 to 1: of a
    /// device without memory of its own, none.
    pub host: f64,
    /// Whether some may be in host memory, even if the fraction is not decided yet.
    pub uses_host: bool,
    pub rule: SpreadRule,
    /// The first that matches a matrix counts.
    pub overrides: Vec<TierOverride>,
}

impl TierRules {
    /// Returns whether experts of mixtures are read when rows choose them, into a pool that takes the part of
    /// their bytes that may stay on the device. With parts in host memory, by the other rule, or with
    /// overrides for experts, they are like other matrices.
    pub fn pools_experts(&self, device: Residency, layers: &[Vec<LayerMatrix>]) -> bool {
        let is_fixed = |matrix: &LayerMatrix| {
            let LayerMatrix { name, role, .. } = matrix;
            self.overrides.iter().any(|rule| rule.matrices.matches(name, role))
        };
        let mut experts = layers.iter().flatten().filter(|matrix| matrix.expert.is_some()).peekable();
        let are_spread = device.0 < 1.0 && !self.uses_host && self.rule == SpreadRule::Even;
        are_spread && experts.peek().is_some() && !experts.any(is_fixed)
    }

    /// Returns the tier of each matrix, given by layer in the order of use.
    pub fn choose(&self, device: Residency, layers: &[Vec<LayerMatrix>]) -> Vec<Tier> {
        let fixed = |matrix: &LayerMatrix| {
            let LayerMatrix { name, role, .. } = matrix;
            self.overrides.iter().find(|rule| rule.matrices.matches(name, role)).map(|rule| rule.tier)
        };
        let pools = self.pools_experts(device, layers);
        // Experts in a pool are on disk, and are none of those that the fractions are about.
        let fixed = |matrix: &LayerMatrix| {
            if pools && matrix.expert.is_some() { Some(Tier::Disk) } else { fixed(matrix) }
        };
        let mut tiers: Vec<Option<Tier>> = layers.iter().flatten().map(fixed).collect();
        let all: Vec<&LayerMatrix> = layers.iter().flatten().collect();
        let free: Vec<usize> = (0..all.len()).filter(|at| tiers[*at].is_none()).collect();
        let chosen = match self.rule {
            SpreadRule::Even => {
                let bytes: Vec<usize> = free.iter().map(|at| all[*at].layout.bytes).collect();
                spread(&bytes, device, self.host)
            }
            SpreadRule::MidPoint => {
                let numbers = layers.iter().enumerate().flat_map(|(at, layer)| layer.iter().map(move |_| at));
                let numbers: Vec<usize> = numbers.collect();
                let block = |at: &usize| (numbers[*at], all[*at].block());
                let blocks = free.chunk_by(|a, b| block(a) == block(b));
                let of_block = |block: &[usize]| {
                    let elements: Vec<usize> =
                        block.iter().map(|at| all[*at].layout.n * all[*at].layout.k).collect();
                    mid_points(&elements, device.0, self.host)
                };
                blocks.flat_map(of_block).collect()
            }
        };
        free.into_iter().zip(chosen).for_each(|(at, tier)| tiers[at] = Some(tier));
        tiers.into_iter().map(|tier| tier.unwrap_or(Tier::Disk)).collect()
    }
}

/// Returns the tier of each of the parts of these sizes: a fraction `device` stays on the device, and a
/// fraction `host` of all is in host memory, or all that is left if the fractions sum to 1. Each is spread
/// evenly.
pub fn spread(bytes: &[usize], device: Residency, host: f64) -> Vec<Tier> {
    let stays = device.choose(bytes);
    let sum = |bytes: &mut dyn Iterator<Item = usize>| bytes.sum::<usize>() as f64;
    let below: Vec<usize> =
        bytes.iter().zip(&stays).filter(|(_, stays)| !**stays).map(|(bytes, _)| *bytes).collect();
    let wanted = host * sum(&mut bytes.iter().copied());
    let fraction = match device.0 + host >= 1.0 - 1e-9 {
        true => 1.0,
        false => (wanted / sum(&mut below.iter().copied()).max(1.0)).min(1.0),
    };
    let mut in_host = Residency(fraction).choose(&below).into_iter();
    let tier = |stays: bool| match stays {
        true => Tier::Device,
        false if in_host.next() == Some(true) => Tier::Host,
        false => Tier::Disk,
    };
    stays.into_iter().map(tier).collect()
}

/// Returns the tiers of the matrices of a block with so many elements, by FlexGen's rule: the first of disk,
/// host and device whose cumulative fraction exceeds the position of the matrix's middle.
fn mid_points(elements: &[usize], device: f64, host: f64) -> Vec<Tier> {
    let all = elements.iter().sum::<usize>() as f64;
    let mut end = 0.0;
    let tier = |elements: &usize| {
        end += *elements as f64;
        let middle = (end - *elements as f64 / 2.0) / all;
        // What rounding adds to the sum of the fractions.
        match 1.0 - device {
            below if middle >= below - 1e-9 => Tier::Device,
            below if middle >= below - host - 1e-9 => Tier::Host,
            _ => Tier::Disk,
        }
    };
    elements.iter().map(tier).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::offload::matrix::tests::matrix;

    const HIDDEN: usize = 4096;

    /// Returns layers of attention and an MLP without a gate, as FlexGen's models have them.
    fn layers(count: usize) -> Vec<Vec<LayerMatrix>> {
        let layer = |layer: usize| {
            let square = |role: &'static str| matrix(&format!("h.{layer}.{role}"), role, HIDDEN, HIDDEN);
            let mut layer: Vec<LayerMatrix> = ["q", "k", "v", "o"].map(square).into();
            layer.push(matrix(&format!("h.{}.up", layer.len()), "up", 4 * HIDDEN, HIDDEN));
            layer.push(matrix(&format!("h.{}.down", layer.len()), "down", HIDDEN, 4 * HIDDEN));
            layer
        };
        (0..count).map(layer).collect()
    }

    /// The table of the placements that FlexGen's `init_weight_list` makes.
    #[test]
    fn the_mid_point_rule_places_as_flexgen_does() {
        use Tier::{Device as G, Disk as D, Host as C};
        for (device, host, attention, mlp) in [
            (0.2, 0.8, [C, C, C, G], [C, C]),
            (0.5, 0.5, [C, C, G, G], [C, G]),
            (0.3, 0.4, [D, C, C, G], [D, G]),
            (0.0, 0.5, [D, D, C, C], [D, C]),
            (1.0, 0.0, [G; 4], [G; 2]),
            (0.0, 1.0, [C; 4], [C; 2]),
            (0.0, 0.0, [D; 4], [D; 2]),
        ] {
            let rules =
                TierRules { host, uses_host: true, rule: SpreadRule::MidPoint, overrides: Vec::new() };
            let expected = [&attention[..], &mlp[..]].concat().repeat(2);
            assert_eq!(rules.choose(Residency(device), &layers(2)), expected, "{device}/{host}");
        }
    }

    #[test]
    fn fractions_are_kept_and_spread_over_all_layers() {
        let bytes: Vec<usize> = layers(24).iter().flatten().map(|matrix| matrix.layout.bytes).collect();
        for (device, host) in [(0.0, 0.3), (0.2, 0.8), (0.3, 0.4), (0.5, 0.0), (0.7, 0.7), (1.0, 0.0)] {
            let tiers = spread(&bytes, Residency(device), host);
            let share = |tier: Tier, range: std::ops::Range<usize>| {
                let of_tier =
                    range.clone().filter(|at| tiers[*at] == tier).map(|at| bytes[at]).sum::<usize>();
                of_tier as f64 / bytes[range].iter().sum::<usize>() as f64
            };
            let rest = 1.0 - share(Tier::Device, 0..bytes.len());
            let wanted_in_host = if device + host >= 1.0 { rest } else { host };
            for (tier, wanted) in [(Tier::Device, device), (Tier::Host, wanted_in_host)] {
                let found = share(tier, 0..bytes.len());
                assert!(found <= wanted + 1e-6 && found > wanted - 0.02, "{device}/{host}: {tier:?} {found}");
                for first in (0..bytes.len() - 24).step_by(6) {
                    let found = share(tier, first..first + 24);
                    assert!(
                        (found - wanted).abs() < 0.26,
                        "{device}/{host}: {tier:?} {found} of four layers"
                    );
                }
            }
        }
    }

    /// The first override that matches counts, and the fractions are of the other matrices.
    #[test]
    fn overrides_come_before_fractions() {
        let name = |pattern: &str, tier| TierOverride {
            matrices: MatrixFilter::Name(Regex::new(pattern).unwrap()),
            tier,
        };
        let rules = TierRules {
            host: 1.0,
            uses_host: true,
            rule: SpreadRule::Even,
            overrides: vec![name(r"h\.0\.[qk]$", Tier::Disk), name(r"\.q$", Tier::Device)],
        };
        let model = layers(2);
        let tiers = rules.choose(Residency(0.0), &model);
        for (matrix, tier) in model.iter().flatten().zip(tiers) {
            let expected = match &*matrix.name {
                "h.0.q" | "h.0.k" => Tier::Disk,
                "h.1.q" => Tier::Device,
                _ => Tier::Host,
            };
            assert_eq!(tier, expected, "{}", matrix.name);
        }
        let rules = TierRules {
            overrides: vec![TierOverride { matrices: MatrixFilter::Experts, tier: Tier::Host }],
            ..TierRules::default()
        };
        let roles = ["router", "expert_gate", "expert_down", "shared_up"];
        let layer = roles.map(|role| matrix(role, role, HIDDEN, HIDDEN)).into();
        let tiers = rules.choose(Residency(1.0), &[layer]);
        assert_eq!(tiers, [Tier::Device, Tier::Host, Tier::Host, Tier::Device]);
    }
}
