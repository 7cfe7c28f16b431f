//! The model of a plan: a model with files, or only a shape.
//!
//! Invariant: no weights are read or generated.

use crate::cli::start;
use crate::config::{Config, ConfigError, ConfigSource};
use crate::model::shard::{HeadSplit, Shard};
use crate::model::source::{ModelRef, ModelSource};
use crate::model::spec::{Kind, SpecFile};
use crate::model::synthetic::SyntheticShape;
use crate::planner::shape::{FALCON_40B, UniformDecoder};
use crate::planner::{ModelShape, ShardLimit, model_source};
use crate::specs;
use anyhow::{Context, Result, ensure};
use mainstem_kernels::QuantType;

/// Name of the model measured by Shi et al. 2024.
const FALCON: &str = "falcon-40b";

/// Maximum layers of a shape.
const LAYERS_MAX: usize = 1_000;
/// Maximum of a shape's other sizes, so that a product of three does not overflow.
const SIZE_MAX: usize = 1_000_000;

/// The shape of a planned model, and the opened model if there is one.
pub struct PlannedModel {
    pub shape: ModelShape,
    source: Option<ModelSource>,
}

impl PlannedModel {
    /// Parses `shape`, or opens the configured model if there is none. Fails for an encoder-only model.
    pub fn open(shape: Option<&str>, config: &Config) -> Result<PlannedModel> {
        if let Some(text) = shape {
            return Ok(PlannedModel { shape: parse_shape(text, config.kv.ty)?, source: None });
        }
        let model = start::configured_model(&config.model)?;
        if let ModelRef::Synthetic(shape) = &model {
            return Ok(PlannedModel { shape: model_shape(shape, config.kv.ty)?, source: None });
        }
        let source = start::open_source(&model, &config.model)?;
        let is_encoder = source.spec.kind == Kind::Encoder;
        ensure!(!is_encoder, "{} is an encoder-only model, but plans predict decoding", source.name());
        Ok(PlannedModel { shape: model_source::shape(&source, config.kv.ty), source: Some(source) })
    }

    /// Checks that a shard is possible. For a shape, only its attention heads and their quantization blocks
    /// are checked.
    pub fn fits(&self, shard: &Shard) -> Result<(), ShardLimit> {
        if let Some(source) = &self.source {
            return model_source::check_shard(source, shard);
        }
        let units = self.shape.layer_costs();
        let Some(deal) = units.iter().filter_map(|unit| unit.head_split).min_by_key(HeadSplit::max_ranks)
        else {
            return Ok(());
        };
        let HeadSplit { heads, kv_heads, v_dim, block } = deal;
        let max_ranks = deal.max_ranks().max(1);
        if shard.rank_count() <= max_ranks {
            return Ok(());
        }
        let shared = if kv_heads < heads { format!(" on {kv_heads} KV heads") } else { String::new() };
        let blocks =
            if block > 1 { format!(" of {v_dim} values stored in blocks of {block}") } else { String::new() };
        Err(ShardLimit { reason: format!("its layers have {heads} heads{shared}{blocks}"), max_ranks })
    }
}

/// Parses a shape given by name or by sizes.
fn parse_shape(text: &str, kv: QuantType) -> Result<ModelShape> {
    if text.eq_ignore_ascii_case(FALCON) {
        return Ok(ModelShape::uniform(FALCON, &FALCON_40B));
    }
    if text.contains('=') {
        return Ok(parse_sizes(text, kv).map_err(usage)?);
    }
    let found = SyntheticShape::parse(text).map_err(|error| {
        usage(format!(
            "{error:#}; {FALCON} is also known, and sizes are given like \
             layers=40,hidden=5120,heads=40,ffn=13824,vocab=32000"
        ))
    });
    model_shape(&found?, kv)
}

fn model_shape(shape: &SyntheticShape, kv: QuantType) -> Result<ModelShape> {
    let file =
        SpecFile::for_model_type(specs::SYNTHETIC).context("the built-in specification cannot be read")?;
    Ok(ModelShape::from_spec(&shape.to_string(), &shape.resolve(file)?, |_| shape.ty, kv))
}

/// Parses sizes such as `layers=40,hidden=5120,heads=40,ffn=13824,vocab=32000`. `kv_heads`, `head_dim`,
/// `gated`, `tied` and `type` are optional, with the defaults of a plain Llama.
fn parse_sizes(text: &str, kv: QuantType) -> Result<ModelShape, String> {
    let mut shape = UniformDecoder {
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
        let (name, value) =
            pair.split_once('=').ok_or_else(|| format!("'{pair}' is not of the form SIZE=NUMBER"))?;
        let number = || {
            let most = if name.trim() == "layers" { LAYERS_MAX } else { SIZE_MAX };
            let number = value.parse().ok().filter(|number| (1..=most).contains(number));
            number.ok_or_else(|| format!("{name} must be a whole number from 1 to {most}"))
        };
        match name.trim() {
            "layers" => shape.layers = number()?,
            "hidden" => shape.hidden = number()?,
            "heads" => shape.heads = number()?,
            "kv_heads" => shape.kv_heads = number()?,
            "head_dim" => shape.head_dim = number()?,
            "ffn" => shape.ffn = number()?,
            "vocab" => shape.vocab = number()?,
            "gated" => shape.gated = parse_yes_no(name, value)?,
            "tied" => shape.tied = parse_yes_no(name, value)?,
            "type" => {
                shape.weights =
                    QuantType::by_name(value).ok_or_else(|| format!("there is no number format '{value}'"))?
            }
            other => return Err(format!("there is no size '{other}'")),
        }
    }
    fill_defaults(shape).map(|shape| ModelShape::uniform(text, &shape))
}

fn parse_yes_no(name: &str, value: &str) -> Result<bool, String> {
    match value {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err(format!("{name} must be yes or no")),
    }
}

/// Checks that the required sizes are given and derives the optional ones.
fn fill_defaults(shape: UniformDecoder) -> Result<UniformDecoder, String> {
    let needed = [
        ("layers", shape.layers),
        ("hidden", shape.hidden),
        ("heads", shape.heads),
        ("ffn", shape.ffn),
        ("vocab", shape.vocab),
    ];
    if let Some((missing, _)) = needed.iter().find(|(_, size)| *size == 0) {
        return Err(format!("{missing} is missing"));
    }
    if shape.kv_heads > 0 && !shape.heads.is_multiple_of(shape.kv_heads) {
        return Err(format!("{} heads cannot share {} kv_heads evenly", shape.heads, shape.kv_heads));
    }
    let or = |size: usize, usual: usize| if size == 0 { usual } else { size };
    Ok(UniformDecoder {
        kv_heads: or(shape.kv_heads, shape.heads),
        head_dim: or(shape.head_dim, (shape.hidden / shape.heads).max(1)),
        ..shape
    })
}

fn usage(message: String) -> ConfigError {
    ConfigError { origin: ConfigSource::CommandLine, message: format!("--shape: {message}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_by_its_sizes_is_the_one_by_its_name() {
        let by_sizes = |text: &str| parse_sizes(text, QuantType::F16).unwrap();
        let falcon = by_sizes(
            "layers=60,hidden=8192,heads=128,kv_heads=8,ffn=32768,vocab=65024,gated=no,tied=yes,type=f16",
        );
        let named_so = parse_shape("Falcon-40B", QuantType::F16).unwrap();
        assert_eq!((falcon.decoder, falcon.shared_tables), (named_so.decoder, named_so.shared_tables));
        let seven = by_sizes("layers=32,hidden=4096,heads=32,ffn=11008,vocab=32000");
        let near = seven.stored() / parse_shape("7B", QuantType::F16).unwrap().stored();
        assert!((near - 1.0).abs() < 1e-3, "{near}");
    }

    /// Heads and quantization blocks are not divided: two heads of 48 values end at a boundary of blocks of
    /// 32.
    #[test]
    fn a_shape_has_at_most_as_many_ranks_as_its_heads_allow() {
        let most = |text: &str, ranks: usize| {
            let subject = PlannedModel { shape: parse_sizes(text, QuantType::F16).unwrap(), source: None };
            let shares = vec![1; ranks];
            let shard = Shard { encoder: 0..0, decoder: 0..1, rank: 0, shares, experts: Default::default() };
            subject.fits(&shard).map_err(|unfit| (unfit.max_ranks, unfit.reason))
        };
        let plain = "layers=1,hidden=192,heads=4,kv_heads=2,ffn=256,vocab=9";
        assert_eq!(most(plain, 4), Ok(()));
        assert_eq!(most(plain, 5), Err((4, "its layers have 4 heads on 2 KV heads".to_owned())));
        let blocks = "layers=1,hidden=192,heads=4,ffn=256,vocab=9,type=q8_0";
        assert_eq!(most(blocks, 2), Ok(()));
        let reason = "its layers have 4 heads of 48 values stored in blocks of 32";
        assert_eq!(most(blocks, 3), Err((2, reason.to_owned())));
        // One head is not a multiple of a block, but one device can have it.
        assert_eq!(most("layers=1,hidden=50,heads=1,ffn=64,vocab=9,type=q8_0", 1), Ok(()));
    }

    /// The largest allowed sizes do not overflow.
    #[test]
    fn the_largest_shape_is_finite() {
        let most = "layers=1000,hidden=1000000,heads=1000000,head_dim=1000000,ffn=1000000,vocab=1000000";
        assert!(parse_sizes(most, QuantType::F16).unwrap().stored() > 1e21);
    }

    #[test]
    fn an_invalid_shape_is_an_error_of_the_flag() {
        for (text, part) in [
            ("2B", "falcon-40b is also known"),
            ("layers=4", "hidden is missing"),
            ("layers=x", "layers must be a whole number from 1 to 1000"),
            ("layers=4000000000", "layers must be a whole number"),
            ("hidden=4294967295", "hidden must be a whole number from 1 to 1000000"),
            ("layers=1,hidden=8,heads=3,kv_heads=2,ffn=3,vocab=4", "3 heads cannot share 2 kv_heads"),
            ("rows=4", "there is no size 'rows'"),
            ("layers=1,hidden=8,heads=2,ffn=3,vocab=4,type=q1", "no number format 'q1'"),
        ] {
            let error = format!("{:#}", parse_shape(text, QuantType::F16).unwrap_err());
            assert!(error.starts_with("command line: --shape: ") && error.contains(part), "{error}");
        }
    }
}
