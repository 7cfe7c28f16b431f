//! Resolves the positions of a specification: position embeddings, relative position biases, and rotary
//! position embeddings.
//!
//! Invariant: equal rotary position embeddings are stored once, however many layers use them.

use super::resolve::Fill;
use super::setting::Setting;
use super::tables::{PositionKind, RopeStyleName, ScalingSetting, SinusoidLayout, StackName};
use super::{AddedSpec, DistanceKind, DistanceSpec, Part, RopeSpec};
use crate::formats::{HubConfig, RopeConfig, RopeScaling};
use crate::model::provenance::Origin;
use anyhow::{Context, Result, bail, ensure};
use mainstem_kernels::RopeStyle;

/// Maximum context length and position offset.
const CONTEXT_MAX: usize = 1 << 24;

/// The positions of a stack, collected while its layers are resolved.
pub struct Positions {
    added: Option<AddedSpec>,
    distance: Option<DistanceSpec>,
    ropes: Vec<RopeSpec>,
    context: usize,
}

/// Returns the number if it is positive.
pub fn positive(number: f32) -> Option<f32> {
    (number > 0.0).then_some(number)
}

impl Positions {
    /// Resolves the position embedding, which is outside of the layers.
    pub(super) fn begin(fill: &mut Fill, context: usize) -> Result<Positions> {
        super::check::sizes(&[("context", context)])?;
        let (table, names) = (&fill.tables.position, &fill.tables.tensors);
        let kind = fill.look.or_neutral("position.kind", &table.kind, PositionKind::None)?;
        let offset = fill.look.or_neutral("position.offset", &table.offset, 0)?;
        ensure!(offset <= CONTEXT_MAX, "the first position is {offset}, more than {CONTEXT_MAX}");
        let added = match kind {
            PositionKind::Learned => {
                let rows =
                    fill.look.or_neutral("position.rows", &table.rows, context.saturating_add(offset))?;
                ensure!(
                    rows >= context.saturating_add(offset),
                    "a context of {context} does not fit into {rows} learned positions with offset {offset}"
                );
                let shape = vec![rows, fill.hidden];
                let table = fill.piece("positions", &names.positions, shape, Part::Whole, None)?;
                Some(AddedSpec::Learned { table, offset })
            }
            PositionKind::Sinusoidal => {
                let layout =
                    fill.look.or_neutral("position.layout", &table.layout, SinusoidLayout::Halves)?;
                let scale = fill.look.or_neutral("position.scale", &table.scale, 1.0)? as f32;
                ensure!(
                    fill.hidden.is_multiple_of(2),
                    "sinusoidal positions need an even width, not {}",
                    fill.hidden
                );
                Some(AddedSpec::Sinusoidal { layout, offset, scale })
            }
            _ => None,
        };
        Ok(Positions { added, distance: None, ropes: Vec::new(), context })
    }

    /// Resolves the positions of the current layer: the index of its rotary position embedding, and whether
    /// its scores have a relative position bias.
    pub(super) fn of_layer(
        &mut self,
        fill: &mut Fill,
        (heads, head_dim): (usize, usize),
    ) -> Result<(Option<usize>, bool)> {
        let table = &fill.tables.position;
        match fill.look.or_neutral("position.kind", &table.kind, PositionKind::None)? {
            PositionKind::Rope => {
                let rope = self.rope(fill, head_dim)?;
                let known = self.ropes.iter().position(|known| *known == rope);
                let index = known.unwrap_or(self.ropes.len());
                if known.is_none() {
                    self.ropes.push(rope);
                }
                Ok((Some(index), false))
            }
            PositionKind::Alibi => {
                let scale = fill.look.or_neutral("position.scale", &table.scale, 1.0)? as f32;
                self.settle(DistanceSpec { kind: DistanceKind::Alibi { scale }, heads, own: 0..heads })?;
                Ok((None, true))
            }
            PositionKind::Relative => {
                let relative_bias = relative(fill, heads)?;
                self.settle(relative_bias)?;
                Ok((None, true))
            }
            PositionKind::Learned | PositionKind::Sinusoidal if self.added.is_none() => {
                bail!("positions that are added to the embedding apply to all layers, not to some")
            }
            PositionKind::Learned | PositionKind::Sinusoidal | PositionKind::None => Ok((None, false)),
        }
    }

    /// Returns the position embedding, the relative position bias, the rotary position embeddings and the
    /// context length.
    pub fn finish(self) -> (Option<AddedSpec>, Option<DistanceSpec>, Vec<RopeSpec>, usize) {
        (self.added, self.distance, self.ropes, self.context)
    }

    /// Sets the relative position bias, which must be the same in all layers.
    fn settle(&mut self, relative_bias: DistanceSpec) -> Result<()> {
        let known = self.distance.get_or_insert_with(|| relative_bias.clone());
        ensure!(*known == relative_bias, "layers differ in their relative position bias");
        Ok(())
    }

    fn rope(&mut self, fill: &mut Fill, head_dim: usize) -> Result<RopeSpec> {
        let table = &fill.tables.position;
        let style = match fill.look.or_neutral("position.style", &table.style, RopeStyleName::Halves)? {
            RopeStyleName::Halves => RopeStyle::Halves,
            RopeStyleName::Interleaved => RopeStyle::Interleaved,
        };
        let config = rope_config(fill)?;
        let (fraction, origin) = share_of_head(fill.look.config)?;
        let dims = match &table.dims {
            Some(_) => fill.look.or("position.dims", &table.dims, "attention.head_dim", head_dim)?,
            None => fill.look.record("position.dims", (head_dim as f64 * fraction) as usize, origin),
        };
        ensure!(
            dims.is_multiple_of(2) && dims > 0,
            "rotary positions need an even number of dimensions of a head, not {dims}"
        );
        ensure!(dims <= head_dim, "rotary positions rotate {dims} dimensions, but heads have {head_dim}");
        for (key, factors) in config.scaling.by_pair() {
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
        Ok(RopeSpec { style, dims, config })
    }
}

/// Returns the fraction of a head's dimensions that is rotated, and its origin.
fn share_of_head(config: &HubConfig) -> Result<(f64, Origin)> {
    for key in [
        "partial_rotary_factor",
        "rope_parameters.partial_rotary_factor",
        "rope_scaling.partial_rotary_factor",
    ] {
        let Some(value) = config.at(key) else { continue };
        let fraction = value.as_f64().filter(|fraction| *fraction > 0.0 && *fraction <= 1.0);
        let wrong = || config.wrong(key, format_args!("{value} is not in the range (0, 1]"));
        return Ok((fraction.with_context(wrong)?, Origin::Config(vec![key.to_owned()])));
    }
    Ok((1.0, Origin::Derived("attention.head_dim")))
}

/// Resolves base and scaling: from the specification, otherwise from config.json.
fn rope_config(fill: &mut Fill) -> Result<RopeConfig> {
    let (table, config) = (&fill.tables.position, fill.look.config);
    let origin = |keys: Vec<String>| if keys.is_empty() { Origin::Format } else { Origin::Config(keys) };
    let usual = match (&table.theta, &table.scaling) {
        (Some(_), Some(_)) => None,
        _ => Some((RopeConfig::from_config(config)?, RopeConfig::keys(config)?)),
    };
    let theta = match (&table.theta, &usual) {
        (None, Some((usual, keys))) => {
            fill.look.record("position.theta", usual.theta, origin(keys.theta.clone()))
        }
        _ => fill.look.needed("position.theta", &table.theta as &Option<Setting<f64>>)?,
    };
    ensure!(theta > 0.0, "{}: the base of the rotary positions is {theta}", config.file().display());
    let (scaling, origin) = match (&table.scaling, usual) {
        (None, Some((usual, keys))) => (usual.scaling, origin(keys.scaling)),
        (Some(ScalingSetting::Sought { key }), _) => {
            let Some((key, _)) = fill.look.first(key) else {
                return Ok(no_scaling(fill, theta, Origin::Format));
            };
            let section =
                config.section_at(key)?.with_context(|| config.wrong(key, "it is not an object"))?;
            (RopeScaling::from_section(&section, config)?, Origin::Config(vec![key.clone()]))
        }
        _ => return Ok(no_scaling(fill, theta, Origin::Specification)),
    };
    fill.look.record_json("position.scaling", scaling.to_json(), origin);
    Ok(RopeConfig { theta, scaling })
}

fn no_scaling(fill: &mut Fill, theta: f64, origin: Origin) -> RopeConfig {
    fill.look.record_json("position.scaling", RopeScaling::None.to_json(), origin);
    RopeConfig { theta, scaling: RopeScaling::None }
}

fn relative(fill: &mut Fill, heads: usize) -> Result<DistanceSpec> {
    let (table, names) = (&fill.tables.position, &fill.tables.tensors.relative_bias);
    let buckets = fill.look.needed("position.buckets", &table.buckets)?;
    let max_distance = fill.look.needed("position.max_distance", &table.max_distance)?;
    let both_ways = fill.stack == StackName::Encoder;
    super::check::sizes(&[("number of buckets", buckets), ("largest distance", max_distance)])?;
    let exact = buckets / if both_ways { 4 } else { 2 };
    ensure!(
        exact > 0 && max_distance > exact,
        "{buckets} buckets cannot distinguish distances up to {max_distance}"
    );
    let table = Box::new(fill.piece("relative_bias", names, vec![buckets, heads], Part::Whole, None)?);
    let kind = DistanceKind::Relative { table, buckets, max_distance, both_ways };
    Ok(DistanceSpec { kind, heads, own: 0..heads })
}
