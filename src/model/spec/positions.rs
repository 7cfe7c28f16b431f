//! Resolves the positions of a specification: position embeddings, relative position biases, and rotary
//! position embeddings.
//!
//! Invariant: equal rotary position embeddings are stored once, however many layers use them.

use super::context::ResolveContext;
use super::setting::Setting;
use super::tables::ScalingSetting;
use super::words::{PositionKind, RopeStyleName, SinusoidFrequencies, SinusoidLayout, StackName};
use super::{GrowthSpec, PositionEmbeddingSpec, RelativeBiasKind, RelativeBiasSpec, RopeSpec, TensorPart};
use crate::formats::{HubConfig, RopeConfig, RopeScaling};
use crate::model::provenance::Origin;
use anyhow::{Context, Result, bail, ensure};
use mainstem_kernels::RopeStyle;

/// Maximum context length and position offset.
const CONTEXT_MAX: usize = 1 << 24;

/// The positions of a stack, collected while its layers are resolved.
pub struct Positions {
    position_embedding: Option<PositionEmbeddingSpec>,
    relative_biases: Vec<RelativeBiasSpec>,
    ropes: Vec<RopeSpec>,
    context: usize,
}

impl Positions {
    /// Resolves the position embedding, which is outside of the layers and has `width` columns.
    pub(super) fn new(fill: &mut ResolveContext, context: usize, width: usize) -> Result<Positions> {
        super::check::check_sizes(&[("context", context)])?;
        let (table, names) = (&fill.tables.position, &fill.tables.tensors);
        let kind = fill.lookups.or_default("position.kind", &table.kind, PositionKind::None)?;
        let offset = fill.lookups.or_default("position.offset", &table.offset, 0)?;
        ensure!(offset <= CONTEXT_MAX, "the first position is {offset}, more than {CONTEXT_MAX}");
        let added = match kind {
            PositionKind::Learned => {
                let rows =
                    fill.lookups.or_default("position.rows", &table.rows, context.saturating_add(offset))?;
                ensure!(
                    rows >= context.saturating_add(offset),
                    "a context of {context} does not fit into {rows} learned positions with offset {offset}"
                );
                let shape = vec![rows, width];
                let table = fill.slice("positions", &names.positions, shape, TensorPart::Whole, None)?;
                Some(PositionEmbeddingSpec::Learned { table: Box::new(table), offset })
            }
            PositionKind::Sinusoidal => {
                let layout = fill.lookups.or_default(
                    "position.layout",
                    &table.layout,
                    SinusoidLayout::Concatenated,
                )?;
                let usual = match layout {
                    SinusoidLayout::Concatenated => SinusoidFrequencies::ToLast,
                    SinusoidLayout::Interleaved => SinusoidFrequencies::ByWidth,
                };
                let frequencies =
                    fill.lookups.or_default("position.frequencies", &table.frequencies, usual)?;
                let scale = fill.lookups.or_default("position.scale", &table.scale, 1.0)? as f32;
                ensure!(width.is_multiple_of(2), "sinusoidal positions need an even width, not {width}");
                Some(PositionEmbeddingSpec::Sinusoidal { layout, frequencies, offset, scale })
            }
            _ => None,
        };
        let (relative_biases, ropes) = Default::default();
        Ok(Positions { position_embedding: added, relative_biases, ropes, context })
    }

    /// Resolves the positions of the current layer: the indices of its rotary position embedding and of its
    /// relative position bias.
    pub(super) fn resolve_layer(
        &mut self,
        fill: &mut ResolveContext,
        (heads, head_dim): (usize, usize),
    ) -> Result<(Option<usize>, Option<usize>)> {
        let table = &fill.tables.position;
        match fill.lookups.or_default("position.kind", &table.kind, PositionKind::None)? {
            PositionKind::Rope => {
                let rope = self.rope(fill, head_dim)?;
                Ok((Some(index_of(&mut self.ropes, rope)), None))
            }
            PositionKind::Alibi => {
                let scale = fill.lookups.or_default("position.scale", &table.scale, 1.0)? as f32;
                let max = fill.lookups.or_default("position.alibi_max", &table.alibi_max, 8.0)? as f32;
                let kind = RelativeBiasKind::Alibi { scale, max };
                let relative_bias = RelativeBiasSpec { kind, heads, local_heads: 0..heads };
                Ok((None, Some(index_of(&mut self.relative_biases, relative_bias))))
            }
            PositionKind::RelativeBias => {
                let relative_bias = learned_relative_bias(fill, heads)?;
                Ok((None, Some(index_of(&mut self.relative_biases, relative_bias))))
            }
            PositionKind::Learned | PositionKind::Sinusoidal if self.position_embedding.is_none() => {
                bail!(
                    "learned and sinusoidal positions are added to the embedding, so they cannot be set for \
                     some layers only"
                )
            }
            PositionKind::Learned
            | PositionKind::Sinusoidal
            | PositionKind::Disentangled
            | PositionKind::None => Ok((None, None)),
        }
    }

    /// Returns the factor of scores that the scaling of a rotary position embedding asks for.
    pub(super) fn score_factor(&self, rope: usize) -> f64 {
        match self.ropes[rope].config.scaling {
            RopeScaling::Yarn { score_factor, .. } => score_factor,
            _ => 1.0,
        }
    }

    /// Resolves the growth of the current layer's queries with their positions, and returns its index among
    /// the rotary position embeddings.
    pub(super) fn growth(&mut self, fill: &mut ResolveContext, head_dim: usize) -> Result<Option<usize>> {
        let (table, look) = (&fill.tables.attention, &mut *fill.lookups);
        let factor = look.or_default("attention.growth", &table.growth, 0.0)? as f32;
        if factor == 0.0 {
            return Ok(None);
        }
        let interval = look.required("attention.growth_interval", &table.growth_interval)? as f32;
        ensure!(
            factor.is_finite() && interval.is_finite() && interval > 0.0,
            "'attention.growth' is {factor} for intervals of {interval} positions"
        );
        ensure!(head_dim.is_multiple_of(2), "'attention.growth' needs heads of even width, not {head_dim}");
        let (style, config) = (RopeStyle::NeoX, RopeConfig { theta: 1.0, scaling: RopeScaling::None });
        let growth = Some(GrowthSpec { factor, interval });
        Ok(Some(index_of(&mut self.ropes, RopeSpec { style, dims: head_dim, config, growth })))
    }

    /// Returns the position embedding, the relative position biases, the rotary position embeddings and the
    /// context length.
    pub fn finish(self) -> (Option<PositionEmbeddingSpec>, Vec<RelativeBiasSpec>, Vec<RopeSpec>, usize) {
        (self.position_embedding, self.relative_biases, self.ropes, self.context)
    }

    fn rope(&mut self, fill: &mut ResolveContext, head_dim: usize) -> Result<RopeSpec> {
        let table = &fill.tables.position;
        let style = match fill.lookups.or_default("position.style", &table.style, RopeStyleName::NeoX)? {
            RopeStyleName::NeoX => RopeStyle::NeoX,
            RopeStyleName::GptJ => RopeStyle::GptJ,
        };
        let config = rope_config(fill)?;
        let (fraction, origin) = rotary_fraction(fill.lookups.config)?;
        let dims = match &table.dims {
            Some(_) => {
                fill.lookups.or_derived("position.dims", &table.dims, "attention.head_dim", head_dim)?
            }
            None => fill.lookups.record("position.dims", (head_dim as f64 * fraction) as usize, origin),
        };
        ensure!(
            dims.is_multiple_of(2) && dims > 0,
            "rotary positions need an even number of dimensions of a head, not {dims}"
        );
        ensure!(dims <= head_dim, "rotary positions rotate {dims} dimensions, but heads have {head_dim}");
        for (key, factors) in config.scaling.per_pair_factors() {
            ensure!(
                factors == dims / 2,
                "'{key}' has {factors} values, but there are {} rotary pairs",
                dims / 2
            );
        }
        if let RopeScaling::Dynamic { factor, context } = config.scaling {
            // Stretching the base extends the context by the same factor.
            self.context = self.context.max((context as f64 * factor) as usize).min(CONTEXT_MAX);
        }
        Ok(RopeSpec { style, dims, config, growth: None })
    }
}

/// Returns the index of `item` in the list, to which it is added if it is not there.
fn index_of<T: PartialEq>(all: &mut Vec<T>, item: T) -> usize {
    all.iter().position(|known| *known == item).unwrap_or_else(|| {
        all.push(item);
        all.len() - 1
    })
}

/// Returns the fraction of a head's dimensions that is rotated, and its origin.
fn rotary_fraction(config: &HubConfig) -> Result<(f64, Origin)> {
    for key in [
        "partial_rotary_factor",
        "rope_parameters.partial_rotary_factor",
        "rope_scaling.partial_rotary_factor",
    ] {
        let Some(value) = config.at(key) else { continue };
        let fraction = value.as_f64().filter(|fraction| *fraction > 0.0 && *fraction <= 1.0);
        let wrong = || config.key_error(key, format_args!("{value} is not in the range (0, 1]"));
        return Ok((fraction.with_context(wrong)?, Origin::Config(vec![key.to_owned()])));
    }
    Ok((1.0, Origin::Derived("attention.head_dim")))
}

/// Resolves base and scaling: from the specification, otherwise from config.json.
fn rope_config(fill: &mut ResolveContext) -> Result<RopeConfig> {
    let (table, config) = (&fill.tables.position, fill.lookups.config);
    let origin = |keys: Vec<String>| if keys.is_empty() { Origin::Format } else { Origin::Config(keys) };
    let usual = match (&table.theta, &table.scaling) {
        (Some(_), Some(_)) => None,
        _ => Some((RopeConfig::from_config(config)?, RopeConfig::keys(config)?)),
    };
    let theta = match (&table.theta, &usual) {
        (None, Some((usual, keys))) => {
            fill.lookups.record("position.theta", usual.theta, origin(keys.theta.clone()))
        }
        _ => fill.lookups.required("position.theta", &table.theta as &Option<Setting<f64>>)?,
    };
    ensure!(theta > 0.0, "{}: the base of the rotary positions is {theta}", config.file().display());
    let (scaling, origin) = match (&table.scaling, usual) {
        (None, Some((usual, keys))) => (usual.scaling, origin(keys.scaling)),
        (Some(ScalingSetting::Sought { key }), _) => {
            let Some((key, _)) = fill.lookups.first_present(key) else {
                return Ok(no_scaling(fill, theta, Origin::Format));
            };
            let section =
                config.section_at(key)?.with_context(|| config.key_error(key, "it is not an object"))?;
            (RopeScaling::from_section(&section, config)?, Origin::Config(vec![key.clone()]))
        }
        _ => return Ok(no_scaling(fill, theta, Origin::Specification)),
    };
    fill.lookups.record_json("position.scaling", scaling.to_json(), origin);
    Ok(RopeConfig { theta, scaling })
}

fn no_scaling(fill: &mut ResolveContext, theta: f64, origin: Origin) -> RopeConfig {
    fill.lookups.record_json("position.scaling", RopeScaling::None.to_json(), origin);
    RopeConfig { theta, scaling: RopeScaling::None }
}

fn learned_relative_bias(fill: &mut ResolveContext, heads: usize) -> Result<RelativeBiasSpec> {
    let (table, names) = (&fill.tables.position, &fill.tables.tensors.relative_bias);
    let buckets = fill.lookups.required("position.buckets", &table.buckets)?;
    let max_distance = fill.lookups.required("position.max_distance", &table.max_distance)?;
    let both_ways = fill.stack == StackName::Encoder;
    super::check::check_sizes(&[("number of buckets", buckets), ("largest distance", max_distance)])?;
    let exact = buckets / if both_ways { 4 } else { 2 };
    ensure!(
        exact > 0 && max_distance > exact,
        "{buckets} buckets cannot distinguish distances up to {max_distance}"
    );
    let table =
        Box::new(fill.slice("relative_bias", names, vec![buckets, heads], TensorPart::Whole, None)?);
    let kind = RelativeBiasKind::Learned { table, buckets, max_distance, bidirectional: both_ways };
    Ok(RelativeBiasSpec { kind, heads, local_heads: 0..heads })
}
