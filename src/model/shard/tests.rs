//! Tests of divisions computed by hand, and for every fixture that the ranks together have the whole model.

use super::heads::{HeadSplit, RankHeads, qk_splits};
use super::*;
use crate::model::spec::{LayerSpec, MlpSpec};
use crate::model::tensor_slices::read_slice;
use crate::model::tensors::required_slices;
use crate::model::{ModelRef, ModelSource};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn open(name: &str) -> ModelSource {
    ModelSource::open(&ModelRef::Path(fixtures().join(name)), None).unwrap()
}

/// Fixtures that do not open: their specification requires the vocabulary of a larger model.
const UNOPENABLE: [&str; 2] = ["families/baichuan2", "families/baichuan2_13b"];

/// Returns all fixture models with their names.
fn all_models() -> Vec<(String, ModelSource)> {
    let names = |folder: &str| {
        let entries = std::fs::read_dir(fixtures().join(folder)).unwrap().flatten();
        entries.map(|entry| format!("{folder}{}", entry.file_name().to_str().unwrap())).collect::<Vec<_>>()
    };
    let is_model =
        |name: &String| name.ends_with(".gguf") || fixtures().join(name).join("config.json").exists();
    let mut all = [names(""), names("families/"), names("gguf/")].concat();
    all.retain(|name| is_model(name) && !UNOPENABLE.contains(&name.as_str()));
    all.sort();
    assert!(all.len() >= 70, "only {} are there", all.len());
    all.into_iter().map(|name| (name.clone(), open(&name))).collect()
}

/// Returns the first fixture that meets the condition.
fn find_model(is_meant: impl Fn(&ModelSpec) -> bool) -> ModelSource {
    let mut all = all_models().into_iter().map(|(_, source)| source);
    all.find(|source| is_meant(&source.spec)).expect("there is a fixture like that")
}

/// Returns a model with two layers in each stack.
fn encoder_decoder_model() -> ModelSource {
    find_model(|spec| (Shard::whole(spec).encoder, Shard::whole(spec).decoder) == (0..2, 0..2))
}

/// Returns the shards of one stage with the whole model, by ranks with these shares.
fn stage_shards(spec: &ModelSpec, shares: &[u32], experts: ExpertSplit) -> Vec<Shard> {
    let of = |rank| Shard { rank, shares: shares.to_vec(), experts, ..Shard::whole(spec) };
    (0..shares.len()).map(of).collect()
}

#[test]
fn shares_are_rounded_by_the_largest_remainder_and_nobody_gets_nothing() {
    let lens = |units, granule, shares: &[u32]| -> Vec<usize> {
        split_by_shares(units, granule, shares).iter().map(Range::len).collect()
    };
    assert_eq!(lens(8, 1, &[1, 1]), [4, 4]);
    assert_eq!(lens(7, 1, &[1, 1, 1]), [3, 2, 2]);
    assert_eq!(lens(10, 1, &[2, 1]), [7, 3]);
    assert_eq!(lens(10, 1, &[1, 2]), [3, 7]);
    assert_eq!(lens(96, 32, &[1, 1]), [64, 32]);
    // The last granule is incomplete.
    assert_eq!(lens(80, 32, &[1, 1]), [64, 16]);
    assert_eq!(lens(4, 1, &[100, 1, 1, 1]), [1, 1, 1, 1]);
    assert_eq!(lens(9, 1, &[1, 1000, 1]), [1, 7, 1]);
    assert_eq!(lens(2, 1, &[1, 1, 1]), [1, 1, 0]);
    assert_eq!(lens(usize::MAX, 1, &[u32::MAX, u32::MAX]), [usize::MAX / 2 + 1, usize::MAX / 2]);
}

#[test]
fn shares_are_within_one_of_what_they_say_and_leave_nothing_out() {
    for units in [1, 5, 12, 97, 1000] {
        for shares in [&[1u32][..], &[1, 1, 1], &[5, 3], &[2, 3, 5, 7], &[9, 9, 1]] {
            let ranges = split_by_shares(units, 1, shares);
            let total = shares.iter().sum::<u32>();
            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert_eq!((ranges[0].start, ranges.last().unwrap().end), (0, units));
            for (range, share) in ranges.iter().zip(shares) {
                let exact = units as f64 * f64::from(*share) / f64::from(total);
                assert!((range.len() as f64 - exact).abs() < 1.0, "{units} by {shares:?}: {ranges:?}");
            }
        }
    }
}

/// Splits the heads of a layer with these sizes; returns query heads and KV heads by rank.
fn split_heads(
    (heads, kv_heads, v_dim, block): (usize, usize, usize, usize),
    shares: &[u32],
) -> Vec<(Range<usize>, Range<usize>)> {
    let mut attention = open("gqa").spec.decoder.unwrap().layers.swap_remove(0).attention;
    (attention.heads, attention.kv_heads, attention.v_dim) = (heads, kv_heads, v_dim);
    let deal = HeadSplit::for_attention(&attention, block);
    assert!(shares.len() <= deal.max_ranks(), "{deal:?}");
    deal.by_rank(shares).into_iter().map(|heads| (heads.query, heads.kv)).collect()
}

#[test]
fn heads_go_with_their_kv_heads_and_share_them_where_those_are_few() {
    assert_eq!(split_heads((12, 3, 8, 1), &[1, 1]), [(0..8, 0..2), (8..12, 2..3)]);
    assert_eq!(split_heads((12, 3, 8, 1), &[1, 2]), [(0..4, 0..1), (4..12, 1..3)]);
    assert_eq!(split_heads((8, 2, 8, 1), &[1, 1, 1]), [(0..4, 0..1), (4..6, 1..2), (6..8, 1..2)]);
    assert_eq!(split_heads((4, 1, 8, 1), &[3, 1]), [(0..3, 0..1), (3..4, 0..1)]);
    // Ranks with small shares share a KV head, and one with a large share has one alone.
    assert_eq!(split_heads((8, 2, 8, 1), &[1, 1, 4]), [(0..2, 0..1), (2..4, 0..1), (4..8, 1..2)]);
    assert_eq!(split_heads((8, 2, 8, 1), &[1, 1, 2]), [(0..2, 0..1), (2..4, 0..1), (4..8, 1..2)]);
    assert_eq!(split_heads((4, 2, 8, 1), &[1, 1, 9]), [(0..1, 0..1), (1..2, 0..1), (2..4, 1..2)]);
    let each = |head: usize| (head..head + 1, head / 2..head / 2 + 1);
    assert_eq!(split_heads((4, 2, 8, 1), &[1, 7, 1, 1]), [0, 1, 2, 3].map(each));
    // Two heads of width 16 fill a block of 32, and so do two query heads of one KV head.
    assert_eq!(split_heads((8, 8, 16, 32), &[1, 1, 1]), [(0..4, 0..4), (4..6, 4..6), (6..8, 6..8)]);
    assert_eq!(split_heads((8, 2, 16, 32), &[1, 1, 1]), [(0..4, 0..1), (4..6, 1..2), (6..8, 1..2)]);
    // Of layers with different numbers of heads, one may be smaller than a block.
    assert_eq!(split_heads((2, 1, 8, 32), &[1]), [(0..2, 0..1)]);
}

/// Returns every way to split `things` items into positive counts, in order.
fn compositions(things: usize) -> Vec<Vec<u32>> {
    let mut all = vec![vec![things as u32]];
    for first in 1..things {
        all.extend(
            compositions(things - first).into_iter().map(|rest| [&[first as u32][..], &rest].concat()),
        );
    }
    all
}

/// Shares that are met by whole heads are met exactly, with KV heads shared or not.
#[test]
fn shares_that_can_be_met_are_met() {
    let of_kv_heads = compositions(3);
    for (first, second) in
        of_kv_heads.iter().flat_map(|first| of_kv_heads.iter().map(move |second| (first, second)))
    {
        for third in &of_kv_heads {
            let shares = [&first[..], second, third].concat();
            let lens = split_heads((9, 3, 8, 1), &shares).into_iter().map(|(query, _)| query.len() as u32);
            assert_eq!(lens.collect::<Vec<_>>(), shares);
        }
    }
}

#[test]
fn heads_have_as_many_ranks_as_end_with_blocks() {
    let most = |heads, kv_heads, v_dim, block| {
        let mut attention = open("gqa").spec.decoder.unwrap().layers.swap_remove(0).attention;
        (attention.heads, attention.kv_heads, attention.v_dim) = (heads, kv_heads, v_dim);
        HeadSplit::for_attention(&attention, block).max_ranks()
    };
    assert_eq!(most(32, 8, 128, 32), 32);
    assert_eq!(most(32, 8, 128, 256), 16);
    assert_eq!(most(32, 32, 128, 256), 16);
    assert_eq!(most(8, 2, 16, 32), 4);
    assert_eq!(most(8, 4, 8, 32), 2);
    assert_eq!(most(71, 1, 64, 1), 71);
}

/// The keys of a KV head on several ranks are contributed by the first.
#[test]
fn keys_that_several_have_are_put_together_once() {
    let heads = |query: Range<usize>, kv: Range<usize>| RankHeads { query, kv };
    let by_rank = [heads(0..4, 0..1), heads(4..6, 1..2), heads(6..8, 1..2)];
    let (q, k) = qk_splits(&by_rank, 2, 10);
    assert_eq!((q.widths, q.local), (vec![40, 20, 20], 60..80));
    assert_eq!((k.widths, k.local), (vec![10, 10, 0], 10..20));
}

#[test]
fn the_part_of_a_model_that_is_all_of_it_is_the_model() {
    for (name, source) in all_models() {
        assert_eq!(source.shard_spec(&Shard::whole(&source.spec)).unwrap(), source.spec, "{name}");
    }
}

/// Returns whether tensors with this role are replicated on every rank.
fn is_replicated(role: &str) -> bool {
    let small = [
        "router",
        "router bias",
        "router_correction",
        "shared_router",
        "positions",
        "token_types",
        "relative_bias",
        "distances",
    ];
    let between = ["project_in", "project_out", "head_transform", "q_a", "kv_a"];
    role.contains("norm")
        || role.starts_with("xielu")
        || small.contains(&role)
        || between.contains(&role.trim_end_matches(" bias"))
}

/// Identifies a slice of the whole model: tensor, part, and role.
type SliceKey = (String, String, &'static str);

fn key(piece: &TensorSlice) -> SliceKey {
    (piece.name.clone(), format!("{:?} of {:?}", piece.part, piece.plane), piece.role)
}

/// Counts on how many parts each element of a slice's matrix is: (rows, columns, counts).
fn count_elements(
    source: &ModelSource,
    parts: &[ModelSpec],
) -> BTreeMap<SliceKey, (usize, usize, Vec<usize>)> {
    let mut counts = BTreeMap::new();
    for piece in required_slices(&source.spec) {
        let taken = read_slice(&source.checkpoint, piece).unwrap();
        counts.insert(key(piece), (taken.n(), taken.k(), vec![0; taken.n() * taken.k()]));
    }
    for part in parts {
        let mut seen = BTreeSet::new();
        for piece in required_slices(part)
            .into_iter()
            .filter(|piece| seen.insert((key(piece), format!("{:?}", piece.bounds))))
        {
            let (rows, columns, counts) = counts.get_mut(&key(piece)).unwrap();
            for row in piece.bounds.rows.clone().unwrap_or(0..*rows) {
                for column in piece.bounds.columns.clone().unwrap_or(0..*columns) {
                    counts[row * *columns + column] += 1;
                }
            }
        }
    }
    counts
}

/// Returns whether a slice holds keys or values, which are on all ranks that need them. In fused tensors,
/// queries come first.
fn is_kv((_, part, role): &SliceKey) -> bool {
    let role = role.trim_end_matches(" bias").trim_start_matches("cross_");
    role == "k" || role == "v" || role == "qkv" && !part.contains("first: 0")
}

/// Returns whether a slice has weights of one head, which are on the ranks that have the head.
fn is_of_head((name, part, role): &SliceKey) -> bool {
    ["q_norm", "k_norm"].contains(role) && (part != "Whole" || name.contains(".norms."))
}

#[test]
fn ranks_have_everything_together_and_nothing_twice() {
    let mut tried = 0;
    for (name, source) in all_models() {
        for (shares, experts) in [
            (&[1, 1][..], ExpertSplit::Column),
            (&[1, 1], ExpertSplit::Expert),
            (&[3, 1], ExpertSplit::Column),
            (&[1, 2, 1], ExpertSplit::Expert),
            (&[2, 1, 1, 2], ExpertSplit::Column),
        ] {
            let shards = stage_shards(&source.spec, shares, experts);
            let parts = shards.iter().map(|shard| source.shard_spec(shard)).collect::<Result<Vec<_>, _>>();
            let most = source.max_ranks(&shards[0]);
            // The rows of its matrices, of 32 columns, are one block each.
            let is_one_block = name.ends_with("ctranslate2_marian");
            assert!(is_one_block || most >= 2, "{name}: two ranks can share every other fixture");
            let parts = match parts {
                Ok(parts) if shares.len() <= most => parts,
                Err(ShardError::TooManyRanks { most: allowed, .. })
                    if shares.len() > most && allowed == most =>
                {
                    continue;
                }
                other => panic!("{name} by {shares:?}, at most {most}: {other:?}"),
            };
            tried += 1;
            for (key, (.., counts)) in count_elements(&source, &parts) {
                let what = format!("{name} by {shares:?}: {key:?}");
                match (is_replicated(key.2) && !is_of_head(&key), is_kv(&key) || is_of_head(&key)) {
                    (true, _) => assert!(counts.iter().all(|count| *count == shares.len()), "{what}"),
                    (_, true) => assert!(counts.iter().all(|count| *count >= 1), "{what}"),
                    _ => assert!(counts.iter().all(|count| *count == 1), "{what}"),
                }
            }
        }
    }
    assert!(tried > 200, "only {tried} were tried");
}

/// Stages have each layer once, the embedding at one end and the head at the other.
#[test]
fn stages_have_everything_together_and_nothing_twice() {
    for (name, source) in all_models().into_iter().filter(|(_, source)| source.spec.layers() >= 2) {
        let (whole, layers) = (Shard::whole(&source.spec), source.spec.layers());
        let of_encoder = whole.encoder.len();
        let stacks = source.spec.encoder.iter().chain(&source.spec.decoder);
        let mut layers_of = stacks.into_iter().map(|stack| &stack.layers);
        let has_equal_layers =
            layers_of.any(|layers| layers.iter().enumerate().any(|(at, layer)| layers[..at].contains(layer)));
        for cut in 1..layers {
            let (first, second) = ((0..cut.min(of_encoder)), (cut.min(of_encoder)..of_encoder));
            let decoder = cut.saturating_sub(of_encoder);
            let shards = [
                Shard { encoder: first, decoder: 0..decoder, ..whole.clone() },
                Shard { encoder: second, decoder: decoder..whole.decoder.end, ..whole.clone() },
            ];
            let parts = shards.each_ref().map(|shard| source.shard_spec(shard).unwrap());
            for (key, (.., counts)) in count_elements(&source, &parts) {
                // What both ends or stacks use is on both stages, and so are layers with the same tensors.
                let shared = ["embedding", "positions", "relative_bias", "distances", "distance_norm"];
                let is_shared = shared.contains(&key.2) || has_equal_layers;
                let most = if is_shared { 2 } else { 1 };
                assert!(counts.iter().all(|count| (1..=most).contains(count)), "{name} at {cut}: {key:?}");
            }
        }
    }
}

/// A stage has the rotary tables that its layers use, and each layer refers to its own.
#[test]
fn a_stage_has_the_rotary_positions_of_its_layers() {
    let source = open("families/gemma3");
    let whole = source.spec.decoder.as_ref().unwrap();
    assert_eq!(whole.ropes.len(), 2);
    let mut fewer = 0;
    for layers in (0..whole.layers.len()).flat_map(|at| [at..at + 1, 0..at + 1]) {
        let shard = Shard { decoder: layers.clone(), ..Shard::whole(&source.spec) };
        let part = source.shard_spec(&shard).unwrap().decoder.unwrap();
        let mut used: Vec<usize> = part.layers.iter().filter_map(|layer| layer.attention.rope).collect();
        for (own, layer) in part.layers.iter().zip(&whole.layers[layers]) {
            let (own, meant) = (own.attention.rope.unwrap(), layer.attention.rope.unwrap());
            assert_eq!(part.ropes[own], whole.ropes[meant]);
        }
        used.sort_unstable();
        used.dedup();
        assert_eq!(used, (0..part.ropes.len()).collect::<Vec<_>>());
        fewer += usize::from(part.ropes.len() < whole.ropes.len());
    }
    assert!(fewer > whole.layers.len() + 1, "a layer alone, and some of the first ones together");
}

#[test]
fn who_answers_and_who_hands_on_follows_from_the_layers() {
    let source = encoder_decoder_model();
    let whole = Shard::whole(&source.spec);
    let seams = |encoder, decoder, rank| {
        let shard = Shard { encoder, decoder, rank, shares: vec![1, 1], ..whole.clone() };
        let StageRole { returns_output: answers, ends_encoder, ends_decoder, forwards_encoder_output } =
            StageRole::for_shard(&source.spec, &shard);
        [answers, ends_encoder, ends_decoder, forwards_encoder_output]
    };
    assert_eq!(seams(0..1, 0..0, 0), [false, false, false, true]);
    assert_eq!(seams(1..2, 0..1, 0), [false, true, false, true]);
    assert_eq!(seams(2..2, 1..2, 0), [true, false, true, false]);
    assert_eq!(seams(2..2, 1..2, 1), [false, false, true, false]);
    assert_eq!(seams(0..2, 0..2, 0), [true, true, true, false]);
}

/// Experts that are too narrow to be split are distributed as a whole, as they are if that is configured.
#[test]
fn experts_are_cut_or_dealt_out() {
    let of_width_24 =
        |layer: &LayerSpec| matches!(&layer.mlp, MlpSpec::Experts(moe) if moe.experts[0].width == 24);
    let source = find_model(|spec| spec.cached_layers().first().is_some_and(of_width_24));
    let split = |experts, ty: QuantType| {
        let types = |piece: &TensorSlice| if piece.role == "expert_down" { ty } else { QuantType::F32 };
        let shards = stage_shards(&source.spec, &[2, 1], experts);
        let parts = shards.iter().map(|shard| shard_spec(&source.spec, shard, &types).unwrap());
        let moe = |part: ModelSpec| match &part.decoder.unwrap().layers[0].mlp {
            MlpSpec::Experts(moe) => {
                (moe.first_expert, moe.experts.len(), moe.experts[0].width, moe.shape().experts)
            }
            MlpSpec::Dense(_) => unreachable!("the fixture has experts"),
        };
        parts.map(moe).collect::<Vec<_>>()
    };
    let all = split(ExpertSplit::Expert, QuantType::F32);
    let (experts, width) = (all[0].1 + all[1].1, all[0].2);
    let first = (experts * 2 + 1) / 3;
    assert_eq!(all, [(0, first, width, experts), (first, experts - first, width, experts)]);
    assert_eq!(split(ExpertSplit::Column, QuantType::Q8_0), all);
    let by_column = split(ExpertSplit::Column, QuantType::F32);
    assert_eq!(by_column, [(0, experts, 16, experts), (0, experts, 8, experts)]);
}

#[test]
fn blocks_of_numbers_are_not_cut() {
    let source = open("gguf/q8_0.gguf");
    let shards = stage_shards(&source.spec, &[1, 1], ExpertSplit::Column);
    assert_eq!(source.max_ranks(&shards[0]), 2);
    for shard in &shards {
        let part = source.shard_spec(shard).unwrap();
        for piece in required_slices(&part) {
            let ty = source.checkpoint.tensor(&piece.name).unwrap().quant_type().unwrap();
            let columns = piece.bounds.columns.clone().unwrap_or(0..0);
            let is_whole = |at: usize| at.is_multiple_of(ty.row().block_elements);
            assert!(is_whole(columns.start) && is_whole(columns.end), "{piece:?}");
            read_slice(&source.checkpoint, piece).unwrap();
        }
    }
    let refused =
        source.shard_spec(&stage_shards(&source.spec, &[1, 1, 1], ExpertSplit::Column)[1]).unwrap_err();
    let ShardError::TooManyRanks { ranks: 3, most: 2, reason } = refused else { panic!("{refused:?}") };
    assert!(reason.contains("blocks of 32"), "{reason}");
}

#[test]
fn what_cannot_be_split_is_refused_with_the_reason_and_the_most_that_can() {
    let source = open("gqa");
    let whole = Shard::whole(&source.spec);
    let refused = |shard: Shard| source.shard_spec(&shard).unwrap_err().to_string();
    let of_nine = Shard { shares: vec![1; 9], ..whole.clone() };
    assert_eq!(
        refused(of_nine),
        "a stage cannot have 9 ranks: layer 0 of the decoder has 8 heads on 2 KV heads, so at most 8 can \
         share it"
    );
    assert!(source.shard_spec(&Shard { shares: vec![1; 8], rank: 7, ..whole.clone() }).is_ok());
    assert_eq!(refused(Shard { shares: vec![1, 0], ..whole.clone() }), "the share of rank 1 of a stage is 0");
    assert_eq!(refused(Shard { decoder: 1..1, ..whole.clone() }), "a stage has no layers");
    assert_eq!(
        refused(Shard { decoder: 1..3, ..whole }),
        "layers 1..3 of the decoder are out of range, because it has 2"
    );
    let source = encoder_decoder_model();
    let early = Shard { encoder: 0..1, ..Shard::whole(&source.spec) };
    assert_eq!(
        source.shard_spec(&early).unwrap_err().to_string(),
        "a stage has layers of the decoder before the encoder's last"
    );
}
