//! The configured rules for the tiers of weights, with the tensors that they are for.
//!
//! Invariant: each override matches a matrix of the model's layers.

use crate::config::{Config, HostTier, TierName, TierRule};
use crate::model::ModelSource;
use crate::model::offload::{MatrixFilter, SpreadRule, Tier, TierOverride, TierRules};
use crate::model::spec::TensorSlice;
use crate::model::tensors;
use anyhow::{Context, Result, ensure};
use regex::Regex;

/// Returns the rules of a configuration, with nothing in the memory of the host but what overrides say. Fails
/// if an override matches nothing.
pub(super) fn rules(config: &Config, source: &ModelSource) -> Result<TierRules> {
    let pieces = tensors::required_slices(&source.spec);
    let matrices: Vec<&TensorSlice> =
        pieces.into_iter().filter(|piece| piece.layer.is_some() && piece.shape.len() > 1).collect();
    let has_own = config.device.memory.is_some();
    let mut overrides = Vec::new();
    for rule in &config.tiers.overrides {
        let matrices_of = Regex::new(&rule.pattern).context("tiers.overrides")?;
        ensure!(
            matrices.iter().any(|piece| matrices_of.is_match(&piece.name)),
            "tiers.overrides: '{}' matches no matrix of the layers of {}; `mainstem inspect --tensors` lists \
             the names",
            rule.pattern,
            source.path.display()
        );
        let tier = match rule.tier {
            TierName::Host if has_own => Tier::Host,
            TierName::Device | TierName::Host => Tier::Device,
            TierName::Disk => Tier::Disk,
        };
        overrides.push(TierOverride { matrices: MatrixFilter::Name(matrices_of), tier });
    }
    if config.tiers.cpu_moe {
        let has_experts = matrices.iter().any(|piece| MatrixFilter::Experts.matches(&piece.name, piece.role));
        ensure!(has_experts, "tiers.cpu_moe: {} has no experts", source.path.display());
        overrides.push(TierOverride { matrices: MatrixFilter::Experts, tier: Tier::Host });
    }
    let rule = match config.tiers.rule {
        TierRule::Even => SpreadRule::Even,
        TierRule::MidPoint => SpreadRule::MidPoint,
    };
    let is_none = matches!(config.tiers.host, HostTier::Bytes(0) | HostTier::Fraction(0.0));
    Ok(TierRules { host: 0.0, uses_host: has_own && !is_none, rule, overrides })
}
