//! The model that a plan is for: one with files, or only a shape.
//!
//! Invariant: no weight is read, and none is made up.

use crate::cli::start;
use crate::config::{Config, ConfigError, Source};
use crate::model::shard::{Deal, Shard};
use crate::model::source::{ModelRef, ModelSource};
use crate::model::spec::{Kind, SpecFile};
use crate::model::synthetic::Shape;
use crate::planner::shape::{FALCON_40B, Uniform};
use crate::planner::{ModelShape, Unfit, opened};
use crate::specs;
use anyhow::{Context, Result, ensure};
use mainstem_kernels::QuantType;

/// The paper's model.
const FALCON: &str = "falcon-40b";

/// Most layers of a shape, and the largest of its other sizes: products of three can be counted.
const LAYERS_MAX: usize = 1_000;
const SIZE_MAX: usize = 1_000_000;

/// A model to plan for.
pub struct Subject {
    pub shape: ModelShape,
    source: Option<ModelSource>,
}

impl Subject {
    /// The shape, or else the configured model.
    pub fn of(shape: Option<&str>, config: &Config) -> Result<Subject> {
        if let Some(text) = shape {
            return Ok(Subject { shape: named(text, config.kv.ty)?, source: None });
        }
        let model = ModelRef::parse(&config.model.path)?;
        if let ModelRef::Synthetic(shape) = &model {
            return Ok(Subject { shape: of_shape(shape, config.kv.ty)?, source: None });
        }
        let source = start::source(&model, &config.model)?;
        let is_encoder = source.spec.kind == Kind::Encoder;
        ensure!(!is_encoder, "{} is an encoder, and what a plan forecasts is decoding", source.name());
        Ok(Subject { shape: opened::shape(&source, config.kv.ty), source: Some(source) })
    }

    /// Whether such a shard can be made. Of a shape, no more is known than its heads and their blocks.
    pub fn fits(&self, shard: &Shard) -> Result<(), Unfit> {
        if let Some(source) = &self.source {
            return opened::fits(source, shard);
        }
        let units = self.shape.units();
        let Some(deal) = units.iter().filter_map(|unit| unit.deal).min_by_key(Deal::members_max) else {
            return Ok(());
        };
        let Deal { heads, kv_heads, v_dim, block } = deal;
        let members_max = deal.members_max().max(1);
        if shard.members() <= members_max {
            return Ok(());
        }
        let shared = if kv_heads < heads { format!(" on {kv_heads} KV heads") } else { String::new() };
        let blocks =
            if block > 1 { format!(" of {v_dim} values stored in blocks of {block}") } else { String::new() };
        Err(Unfit { reason: format!("its layers have {heads} heads{shared}{blocks}"), members_max })
    }
}

/// A shape by its name, or by its sizes.
fn named(text: &str, kv: QuantType) -> Result<ModelShape> {
    if text.eq_ignore_ascii_case(FALCON) {
        return Ok(ModelShape::uniform(FALCON, &FALCON_40B));
    }
    if text.contains('=') {
        return Ok(sizes(text, kv).map_err(usage)?);
    }
    let found = Shape::named(text).map_err(|error| {
        usage(format!(
            "{error:#}; {FALCON} is one too, and any is layers=40,hidden=5120,heads=40,ffn=13824,vocab=32000"
        ))
    });
    of_shape(&found?, kv)
}

fn of_shape(shape: &Shape, kv: QuantType) -> Result<ModelShape> {
    let file = SpecFile::for_model_type(specs::SYNTHETIC).context("the shipped specification is read")?;
    Ok(ModelShape::of_spec(&shape.to_string(), &shape.resolve(file)?, |_| shape.ty, kv))
}

/// `layers=40,hidden=5120,heads=40,ffn=13824,vocab=32000`, with `kv_heads`, `head_dim`, `gated`, `tied` and `type` if they
/// are not those of a plain Llama.
fn sizes(text: &str, kv: QuantType) -> Result<ModelShape, String> {
    let mut of = Uniform {
        layers: 0,
        hidden: 0,
        heads: 0,
        kv_heads: 0,
        head_dim: 0,
        ffn: 0,
        gated: true,
        vocab: 0,
        tied: false,
        weights: QuantType::F16,
        kv,
    };
    for pair in text.split(',') {
        let (name, value) = pair.split_once('=').ok_or_else(|| format!("'{pair}' is no size"))?;
        let number = || {
            let most = if name.trim() == "layers" { LAYERS_MAX } else { SIZE_MAX };
            let number = value.parse().ok().filter(|number| (1..=most).contains(number));
            number.ok_or_else(|| format!("{name} must be a whole number from 1 to {most}"))
        };
        match name.trim() {
            "layers" => of.layers = number()?,
            "hidden" => of.hidden = number()?,
            "heads" => of.heads = number()?,
            "kv_heads" => of.kv_heads = number()?,
            "head_dim" => of.head_dim = number()?,
            "ffn" => of.ffn = number()?,
            "vocab" => of.vocab = number()?,
            "gated" => of.gated = said(name, value)?,
            "tied" => of.tied = said(name, value)?,
            "type" => {
                of.weights =
                    QuantType::by_name(value).ok_or_else(|| format!("there is no number format '{value}'"))?
            }
            other => return Err(format!("there is no size '{other}'")),
        }
    }
    filled(of).map(|of| ModelShape::uniform(text, &of))
}

fn said(name: &str, value: &str) -> Result<bool, String> {
    match value {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err(format!("{name} must be yes or no")),
    }
}

/// What is needed must be there; the rest follows.
fn filled(of: Uniform) -> Result<Uniform, String> {
    let needed = [
        ("layers", of.layers),
        ("hidden", of.hidden),
        ("heads", of.heads),
        ("ffn", of.ffn),
        ("vocab", of.vocab),
    ];
    if let Some((missing, _)) = needed.iter().find(|(_, size)| *size == 0) {
        return Err(format!("{missing} is missing"));
    }
    if of.kv_heads > 0 && !of.heads.is_multiple_of(of.kv_heads) {
        return Err(format!("{} heads cannot share {} kv_heads evenly", of.heads, of.kv_heads));
    }
    let or = |size: usize, usual: usize| if size == 0 { usual } else { size };
    Ok(Uniform {
        kv_heads: or(of.kv_heads, of.heads),
        head_dim: or(of.head_dim, (of.hidden / of.heads).max(1)),
        ..of
    })
}

fn usage(message: String) -> ConfigError {
    ConfigError { origin: Source::CommandLine, message: format!("--shape: {message}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_by_its_sizes_is_the_one_by_its_name() {
        let by_sizes = |text: &str| sizes(text, QuantType::F16).unwrap();
        let falcon = by_sizes(
            "layers=60,hidden=8192,heads=128,kv_heads=8,ffn=32768,vocab=65024,gated=no,tied=yes,type=f16",
        );
        let named_so = named("Falcon-40B", QuantType::F16).unwrap();
        assert_eq!((falcon.decoder, falcon.tables), (named_so.decoder, named_so.tables));
        let seven = by_sizes("layers=32,hidden=4096,heads=32,ffn=11008,vocab=32000");
        let near = seven.stored() / named("7B", QuantType::F16).unwrap().stored();
        assert!((near - 1.0).abs() < 1e-3, "{near}");
    }

    /// Heads are not cut, and neither are blocks: two heads of 48 values end with one of 32 numbers.
    #[test]
    fn members_of_a_shape_are_as_many_as_can_have_heads() {
        let most = |text: &str, members: usize| {
            let subject = Subject { shape: sizes(text, QuantType::F16).unwrap(), source: None };
            let shares = vec![1; members];
            let shard = Shard { encoder: 0..0, decoder: 0..1, rank: 0, shares, experts: Default::default() };
            subject.fits(&shard).map_err(|unfit| (unfit.members_max, unfit.reason))
        };
        let plain = "layers=1,hidden=192,heads=4,kv_heads=2,ffn=256,vocab=9";
        assert_eq!(most(plain, 4), Ok(()));
        assert_eq!(most(plain, 5), Err((4, "its layers have 4 heads on 2 KV heads".to_owned())));
        let blocks = "layers=1,hidden=192,heads=4,ffn=256,vocab=9,type=q8_0";
        assert_eq!(most(blocks, 2), Ok(()));
        let reason = "its layers have 4 heads of 48 values stored in blocks of 32";
        assert_eq!(most(blocks, 3), Err((2, reason.to_owned())));
        // One head is no multiple of a block, and one device has it all the same.
        assert_eq!(most("layers=1,hidden=50,heads=1,ffn=64,vocab=9,type=q8_0", 1), Ok(()));
    }

    /// The largest sizes there may be are counted without overflow.
    #[test]
    fn the_largest_shape_is_finite() {
        let most = "layers=1000,hidden=1000000,heads=1000000,head_dim=1000000,ffn=1000000,vocab=1000000";
        assert!(sizes(most, QuantType::F16).unwrap().stored() > 1e21);
    }

    #[test]
    fn what_is_no_shape_is_said_to_be_the_flags_fault() {
        for (text, part) in [
            ("2B", "falcon-40b is one too"),
            ("layers=4", "hidden is missing"),
            ("layers=x", "layers must be a whole number from 1 to 1000"),
            ("layers=4000000000", "layers must be a whole number"),
            ("hidden=4294967295", "hidden must be a whole number from 1 to 1000000"),
            ("layers=1,hidden=8,heads=3,kv_heads=2,ffn=3,vocab=4", "3 heads cannot share 2 kv_heads"),
            ("rows=4", "there is no size 'rows'"),
            ("layers=1,hidden=8,heads=2,ffn=3,vocab=4,type=q1", "no number format 'q1'"),
        ] {
            let error = format!("{:#}", named(text, QuantType::F16).unwrap_err());
            assert!(error.starts_with("command line: --shape: ") && error.contains(part), "{error}");
        }
    }
}
