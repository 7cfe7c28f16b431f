use super::super::shape::{FALCON_40B, LayerCost, ResourceCost, SharedTable, StackShape, UniformDecoder};
use super::*;
use crate::config::{Config, Overrides};
use crate::model::shard::HeadSplit;
use mainstem_kernels::QuantType;

/// The model of Shi et al. 2024, Table 4: 40 layers with 32 heads.
const TABLE_4: UniformDecoder = UniformDecoder {
    layers: 40,
    hidden: 4096,
    heads: 32,
    kv_heads: 32,
    head_dim: 128,
    ffn: 11_008,
    gated: true,
    vocab: 32_000,
    tied: false,
    weights: QuantType::F16,
    kv: QuantType::F16,
};

fn device(settings: &[(&'static str, &str)]) -> DeviceConfig {
    let mut flags = Overrides::default();
    for (key, value) in settings {
        flags.set(key, Some(*value));
    }
    Config::load(None, flags).unwrap().device
}

fn alike(_: &DeviceName) -> DeviceCapacity {
    DeviceCapacity { speed: 1.0, memory: f64::INFINITY }
}

/// Allows as many ranks as there are heads.
fn heads(heads: usize) -> impl Fn(&Shard) -> Result<(), ShardLimit> {
    move |shard| match shard.rank_count() <= heads {
        true => Ok(()),
        false => Err(ShardLimit { reason: format!("the layers have {heads} heads"), max_ranks: heads }),
    }
}

fn split(model: &UniformDecoder, settings: &[(&'static str, &str)]) -> Result<Partition, PartitionError> {
    partition(&device(settings), &ModelShape::uniform("it", model), alike, heads(model.heads))
}

fn layers_of(partition: &Partition) -> Vec<usize> {
    partition.stages.iter().map(|stage| stage.encoder.len() + stage.decoder.len()).collect()
}

fn refused(settings: &[(&'static str, &str)]) -> String {
    split(&UniformDecoder { layers: 4, heads: 2, kv_heads: 2, ..TABLE_4 }, settings).unwrap_err().to_string()
}

#[test]
fn table_4_is_what_the_paper_draws() {
    let partition = split(&TABLE_4, &[("device.groups", "0&1;2&3")]).unwrap();
    assert_eq!((partition.stages[0].decoder.clone(), partition.stages[1].decoder.clone()), (0..20, 20..40));
    let ranks = |stage: usize| {
        partition.stages[stage].ranks.iter().map(|m| (m.device.as_str(), m.share)).collect::<Vec<_>>()
    };
    assert_eq!(ranks(0), [("cpu:0", 1), ("cpu:1", 1)]);
    assert_eq!(ranks(1), [("cpu:2", 1), ("cpu:3", 1)]);
}

#[test]
fn every_split_has_every_layer_once_and_in_order() {
    for sizes in [vec![1], vec![2, 1], vec![1, 2, 1], vec![1; 7], vec![3, 1, 1, 2]] {
        let mut numbers = 0..;
        let mut stage = |ranks: &usize| -> Vec<String> {
            numbers.by_ref().take(*ranks).map(|number: usize| number.to_string()).collect()
        };
        let stages: Vec<String> = sizes.iter().map(|ranks| stage(ranks).join("&")).collect();
        let partition = split(&FALCON_40B, &[("device.groups", &stages.join(";"))]).unwrap();
        let mut next = 0;
        for (stage, ranks) in partition.stages.iter().zip(&sizes) {
            assert!(stage.decoder.start == next && !stage.decoder.is_empty(), "{partition:?}");
            assert_eq!((stage.ranks.len(), stage.encoder.clone()), (*ranks, 0..0));
            next = stage.decoder.end;
        }
        assert_eq!(next, 60);
    }
}

/// Two ranks are as fast as two stages. The head costs almost as much as a layer, and is with the last one.
#[test]
fn stages_get_layers_by_their_speed() {
    let headless = UniformDecoder { vocab: 1, ..TABLE_4 };
    assert_eq!(
        layers_of(&split(&UniformDecoder { layers: 60, ..headless }, &[("device.groups", "0&1;2")]).unwrap()),
        [40, 20]
    );
    assert_eq!(layers_of(&split(&FALCON_40B, &[("device.groups", "0&1;2")]).unwrap()), [41, 19]);
    let config = device(&[("device.groups", "0;reference:0")]);
    let place = |device: &DeviceName| DeviceCapacity {
        speed: if device.kind.name() == "cpu" { 3.0 } else { 1.0 },
        ..alike(device)
    };
    let shape = ModelShape::uniform("it", &headless);
    let found = partition(&config, &shape, place, heads(32)).unwrap();
    assert_eq!(layers_of(&found), [30, 10]);
    // Only a third fits on the fast device.
    let held: f64 = shape.layer_costs().iter().map(|unit| unit.total().stored).sum();
    let small = |device: &DeviceName| match device.kind.name() {
        "cpu" => DeviceCapacity { memory: held / 3.0, ..place(device) },
        _ => place(device),
    };
    assert_eq!(layers_of(&partition(&config, &shape, small, heads(32)).unwrap()), [13, 27]);
    let tiny = |device: &DeviceName| DeviceCapacity { memory: held / 3.0, ..place(device) };
    let error = partition(&config, &shape, tiny, heads(32)).unwrap_err().to_string();
    assert!(error.contains("no split of the model's 40 layers into cpu:0;reference:0 fits"), "{error}");
}

/// With three quarters of a stage on one of two equal ranks, the stage is as slow as that rank.
#[test]
fn unequal_shares_slow_a_stage_down() {
    let settings = [("device.groups", "0&1;2&3"), ("device.shares", "3&1;1&1")];
    assert_eq!(layers_of(&split(&FALCON_40B, &settings).unwrap()), [24, 36]);
}

#[test]
fn an_encoders_layers_come_before_the_decoders() {
    let part = ResourceCost { stored: 1.0, read: 1.0, read_max: 1.0, ..ResourceCost::default() };
    let unit = LayerCost { divided: part, ..LayerCost::default() };
    let stack = |layers| StackShape {
        embedding: ResourceCost::default(),
        layers: vec![unit; layers],
        head: ResourceCost::default(),
    };
    let shape = ModelShape {
        encoder: Some(stack(4)),
        decoder: Some(stack(5)),
        ..ModelShape::uniform("it", &TABLE_4)
    };
    let found = partition(&device(&[("device.groups", "0;1;2")]), &shape, alike, heads(32)).unwrap();
    let ranges: Vec<_> =
        found.stages.iter().map(|stage| (stage.encoder.clone(), stage.decoder.clone())).collect();
    assert_eq!(ranges, [(0..3, 0..0), (3..4, 0..2), (4..4, 2..5)]);
}

#[test]
fn refusals_give_the_reason_and_the_nearest_possible() {
    for (settings, message) in [
        (
            vec![("device.groups", "0;1;2;3;4")],
            "device.groups: cpu:0;cpu:1;cpu:2;cpu:3;cpu:4 makes 5 stages, but the model has 4 layers; \
             the nearest possible is cpu:0;cpu:1;cpu:2;cpu:3",
        ),
        (
            vec![("device.groups", "0;1&2&3")],
            "device.groups: stage 2 of cpu:0;cpu:1&cpu:2&cpu:3 has 3 ranks, but the layers have 2 heads; \
             the nearest possible is cpu:0;cpu:1&cpu:2;cpu:3",
        ),
        (
            vec![("device.groups", "0;1;2;3;4"), ("device.layers", "1,1,1,1,1")],
            "device.groups: cpu:0;cpu:1;cpu:2;cpu:3;cpu:4 makes 5 stages, but the model has 4 layers; \
             the nearest possible is cpu:0;cpu:1;cpu:2;cpu:3, with device.layers = []",
        ),
        (
            vec![("device.groups", "0&1&2"), ("device.layers", "4"), ("device.shares", "1&1&1")],
            "device.groups: stage 1 of cpu:0&cpu:1&cpu:2 has 3 ranks, but the layers have 2 heads; \
             the nearest possible is cpu:0&cpu:1;cpu:2, with device.layers = [] and device.shares = []",
        ),
        (
            vec![("device.groups", "0;1"), ("device.layers", "3,2")],
            "device.layers: [3, 2] adds up to 5 layers, but the model has 4; the nearest possible is [2, 2]",
        ),
        (
            vec![("device.groups", "0;1"), ("device.layers", "20,1")],
            "device.layers: [20, 1] adds up to 21 layers, but the model has 4; \
             the nearest possible is [3, 1]",
        ),
    ] {
        assert_eq!(refused(&settings), message);
    }
}

#[test]
fn the_nearest_counts_sum_up_and_leave_nobody_without() {
    for (requested, layers, nearest) in [
        (vec![1, 1, 1], 7, vec![3, 2, 2]),
        (vec![100, 1, 1], 5, vec![3, 1, 1]),
        (vec![1, 9], 2, vec![1, 1]),
        (vec![2, 1], 9, vec![6, 3]),
    ] {
        assert_eq!(rescale_counts(&requested, layers), nearest, "{requested:?} for {layers}");
    }
}

/// If two ranks cannot share the last layer, only the stage that has it is split.
#[test]
fn only_stages_beyond_their_own_bound_are_parted() {
    let fits = |shard: &Shard| match (shard.decoder.end == 6, shard.rank_count()) {
        (true, 2..) => Err(ShardLimit { reason: "the last layer has 1 head".to_owned(), max_ranks: 1 }),
        _ => Ok(()),
    };
    let model = ModelShape::uniform("it", &UniformDecoder { layers: 6, ..TABLE_4 });
    let refusal = |groups: &str| {
        let refusal = partition(&device(&[("device.groups", groups)]), &model, alike, fits).unwrap_err();
        refusal.to_string()
    };
    let nearest = |groups| refusal(groups).split_once("nearest possible is ").unwrap().1.to_owned();
    assert_eq!(nearest("0&1&2;3&4"), "cpu:0&cpu:1&cpu:2;cpu:3;cpu:4");
    assert_eq!(nearest("0&1&2"), "cpu:0;cpu:1;cpu:2");
    // If there are more stages than layers, the last stages are dropped, and another one has the last layer.
    assert_eq!(nearest("0;1;2;3;4;5&6"), "cpu:0;cpu:1;cpu:2;cpu:3;cpu:4;cpu:5");
    // Proportional counts do not help if two ranks would still share the last layer.
    let counts = |groups, layers| {
        let config = device(&[("device.groups", groups), ("device.layers", layers)]);
        partition(&config, &model, alike, fits).unwrap_err().to_string()
    };
    let error = counts("0;1&2", "3,4");
    assert!(error.starts_with("device.layers: [3, 4] adds up to 7 layers, "), "{error}");
    assert!(error.ends_with("nearest possible is cpu:0;cpu:1;cpu:2, with device.layers = []"), "{error}");
    assert!(counts("0&1;2", "3,4").ends_with("nearest possible is [3, 3]"));
}

/// If memory or a single rank is the obstacle, the error suggests nothing.
#[test]
fn nothing_is_called_near_that_is_refused_too() {
    let model = ModelShape::uniform("it", &UniformDecoder { layers: 4, ..TABLE_4 });
    let too_many = device(&[("device.groups", "0;1;2;3;4")]);
    let tiny = |_: &DeviceName| DeviceCapacity { speed: 1.0, memory: 1.0 };
    let error = partition(&too_many, &model, tiny, heads(32)).unwrap_err().to_string();
    assert!(
        error.ends_with("but the model has 4 layers; there is no similar split that is possible"),
        "{error}"
    );
    let nobody = |_: &Shard| Err(ShardLimit { reason: "there is nothing to share".to_owned(), max_ranks: 1 });
    let error = partition(&device(&[]), &model, alike, nobody).unwrap_err().to_string();
    assert!(
        error.ends_with("but there is nothing to share; there is no similar split that is possible"),
        "{error}"
    );
}

fn stored(bytes: f64) -> ResourceCost {
    ResourceCost { stored: bytes, read: bytes, read_max: bytes, ..ResourceCost::default() }
}

fn of_units(layers: usize, unit: LayerCost) -> StackShape {
    StackShape {
        embedding: ResourceCost::default(),
        layers: vec![unit; layers],
        head: ResourceCost::default(),
    }
}

/// With four heads on three ranks one has two: the stage is as fast as two devices.
#[test]
fn a_stage_is_as_fast_as_the_rank_with_most_heads() {
    let deal = Some(HeadSplit { heads: 4, kv_heads: 4, v_dim: 1, block: 1 });
    let unit = LayerCost { query_heads: stored(1.0), head_split: deal, ..LayerCost::default() };
    let shape = ModelShape { decoder: Some(of_units(12, unit)), ..ModelShape::uniform("it", &TABLE_4) };
    let found = partition(&device(&[("device.groups", "0&1&2;3")]), &shape, alike, heads(4)).unwrap();
    assert_eq!(layers_of(&found), [8, 4]);
}

/// Both ranks have a copy of the only KV head.
#[test]
fn ranks_need_room_for_a_kv_head_that_both_have() {
    let deal = Some(HeadSplit { heads: 2, kv_heads: 1, v_dim: 1, block: 1 });
    let unit =
        LayerCost { divided: stored(10.0), kv_heads: stored(10.0), head_split: deal, ..LayerCost::default() };
    let shape = ModelShape {
        decoder: Some(of_units(1, unit)),
        shared_tables: Vec::new(),
        ..ModelShape::uniform("it", &TABLE_4)
    };
    let of = |memory: f64| {
        let place = |_: &DeviceName| DeviceCapacity { speed: 1.0, memory };
        partition(&device(&[("device.groups", "0&1")]), &shape, place, heads(2))
    };
    assert!(of(15.0).is_ok() && of(14.9).is_err());
}

/// The embeddings of encoder and decoder and the head share one table: the decoder's device holds it once.
#[test]
fn each_stage_needs_room_for_a_shared_table_once() {
    let unit = LayerCost { divided: stored(10.0), ..LayerCost::default() };
    let encoder = StackShape { embedding: stored(100.0), ..of_units(2, unit) };
    let shape = ModelShape {
        decoder: Some(StackShape { head: stored(100.0), ..encoder.clone() }),
        encoder: Some(encoder),
        shared_tables: [(0, 2), (2, 3)]
            .map(|(first, last)| SharedTable { first, last, stored: 100.0 })
            .to_vec(),
        ..ModelShape::uniform("it", &TABLE_4)
    };
    let of = |memory: f64| {
        let place = |_: &DeviceName| DeviceCapacity { speed: 1.0, memory };
        partition(&device(&[("device.groups", "0;1")]), &shape, place, heads(32))
    };
    assert_eq!(layers_of(&of(125.0).unwrap()), [2, 2]);
    assert!(of(119.0).is_err());
}

/// A table that both ends of the model share is held once if one stage has both ends.
#[test]
fn one_stage_needs_room_for_a_shared_table_once() {
    let shape = ModelShape::uniform("it", &UniformDecoder { tied: true, ..TABLE_4 });
    let one = device(&[("device.groups", "0")]);
    let of = |memory: f64| partition(&one, &shape, |_| DeviceCapacity { speed: 1.0, memory }, heads(32));
    assert!(of(shape.stored() * 1.001).is_ok() && of(shape.stored() * 0.999).is_err());
}
