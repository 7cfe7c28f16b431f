use super::super::hardware::{Link, SharedMemory, v100x4};
use super::super::shape::{FALCON_40B, SharedTable, StackShape};
use super::*;
use crate::model::partition::StageRank;
use crate::model::shard::{ExpertSplit, HeadSplit};

/// Returns a partition of n stages with m ranks, with the layers evenly split.
fn even(model: &ModelShape, stages: usize, ranks: usize) -> Partition {
    let each = model.layers() / stages;
    let rank = StageRank { device: "it".to_owned(), share: 1 };
    let stage = |number: usize| Stage {
        encoder: 0..0,
        decoder: number * each..(number + 1) * each,
        ranks: vec![rank.clone(); ranks],
    };
    Partition { stages: (0..stages).map(stage).collect(), experts: ExpertSplit::Column }
}

const ONE: Workload = Workload { batch: 1, context: 128, sequences: 4 };

/// Checks the orderings of Shi et al. 2024, Table 5, and prints the table with the forecast next to the
/// paper's figures.
#[test]
fn table_5() {
    let model = ModelShape::uniform("falcon-40b", &FALCON_40B);
    let ours = |stages, ranks| forecast(&model, &even(&model, stages, ranks), &v100x4(), ONE);
    let (layer, tensor, hybrid) = (ours(4, 1), ours(1, 4), ours(2, 2));
    println!("              throughput tok/s    decode tok/s");
    println!("               model   paper     model   paper");
    for (name, ours, paper) in
        [("layer-wise", &layer, (32, 8)), ("tensor-wise", &tensor, (12, 12)), ("hybrid", &hybrid, (24, 12))]
    {
        let (throughput, speed) = (ours.throughput_lanes, ours.decode_speed);
        println!("{name:<12} {throughput:>7.1} {:>7}   {speed:>7.1} {:>7}", paper.0, paper.1);
        assert!(ours.fits, "{name}: {:?}", ours.bytes);
    }
    assert!(layer.throughput_lanes > hybrid.throughput_lanes);
    assert!(hybrid.throughput_lanes > tensor.throughput_lanes);
    assert!(tensor.decode_speed >= hybrid.decode_speed && hybrid.decode_speed > layer.decode_speed);
    // With a single lane, all stages but one are idle.
    assert!(layer.throughput_one_lane < tensor.throughput_one_lane);
    let single = forecast(&model, &even(&model, 1, 1), &v100x4(), ONE);
    assert!(!single.fits, "80 GB do not fit into 32 GB");
}

/// Returns a stack of layers with this cost, without embedding and head.
fn of_layers(number: usize, divided: ResourceCost) -> StackShape {
    let layer = LayerCost { divided, ..LayerCost::default() };
    StackShape {
        embedding: ResourceCost::default(),
        layers: vec![layer; number],
        head: ResourceCost::default(),
    }
}

/// A model of two layers with 100 bytes and 10 multiplications each, on devices with 100 bytes and 1000
/// operations per second, for which times can be computed by hand.
fn by_hand() -> (ModelShape, Hardware) {
    let layer = ResourceCost {
        stored: 100.0,
        read: 100.0,
        read_max: 100.0,
        macs: 10.0,
        all_reduces: 2.0,
        ..ResourceCost::default()
    };
    let stack = of_layers(2, layer);
    let model = ModelShape {
        name: "it".to_owned(),
        hidden: 5,
        vocab: 0,
        encoder: None,
        decoder: Some(stack),
        shared_tables: Vec::new(),
    };
    let hardware = Hardware {
        name: "it".to_owned(),
        devices: vec![Device { bandwidth: 100.0, flops: 1000.0, memory: 150.0, op_seconds: 0.0 }],
        shared_memory: SharedMemory::UNLIMITED,
        intra_stage_link: Link { latency: 0.25, bandwidth: 80.0 },
        inter_stage_link: Link { latency: 0.5, bandwidth: 80.0 },
        overhead_seconds: 0.0,
    };
    (model, hardware)
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9
}

#[test]
fn times_are_those_worked_out_by_hand() {
    let (model, hardware) = by_hand();
    let load = Workload { batch: 1, context: 0, sequences: 1 };
    // Two seconds of reading; a message of 20 bytes takes 0.75 seconds between stages and 0.5 within one.
    let one = forecast(&model, &even(&model, 1, 1), &hardware, load);
    assert!(near(one.decode_speed, 0.5) && !one.fits, "{one:?}");
    let layers = forecast(&model, &even(&model, 2, 1), &hardware, load);
    assert!(near(layers.decode_speed, 1.0 / 2.75) && layers.fits, "{layers:?}");
    assert!(near(layers.stage_seconds[0], 1.75) && near(layers.stage_seconds[1], 1.0), "{layers:?}");
    assert!(near(layers.throughput_one_lane, 1.0 / 2.75) && near(layers.throughput_lanes, 1.0 / 1.75));
    // Half the reading, and four all-reduces of one message each; the vocabulary is empty, but its message is
    // still sent.
    let tensors = forecast(&model, &even(&model, 1, 2), &hardware, load);
    assert!(near(tensors.decode_speed, 1.0 / (1.0 + 4.0 * 0.5 + 0.25)), "{tensors:?}");
    assert!(near(tensors.throughput_lanes, tensors.throughput_one_lane));
    // A hundred rows: 1000 multiplications per layer, which are 2000 operations and take two seconds.
    let many = forecast(&model, &even(&model, 1, 1), &hardware, Workload { batch: 100, ..load });
    assert!(near(many.throughput_one_lane, 25.0), "{many:?}");
}

/// Devices that share a memory are together not faster than that memory.
#[test]
fn a_shared_memory_bounds_all_that_read_at_once() {
    let (model, hardware) = by_hand();
    let load = Workload { batch: 1, context: 0, sequences: 1 };
    let shared = Hardware { shared_memory: SharedMemory { bandwidth: 100.0, memory: 150.0 }, ..hardware };
    let layers = forecast(&model, &even(&model, 2, 1), &shared, load);
    assert!(!layers.fits, "each part fits, but not both in one memory");
    // Alone, each stage has full speed; with both busy, each has half the speed.
    assert!(near(layers.decode_speed, 1.0 / 2.75), "{layers:?}");
    assert!(near(layers.throughput_lanes, 1.0 / 2.75), "{layers:?}");
    let tensors = forecast(&model, &even(&model, 1, 2), &shared, load);
    assert!(near(tensors.decode_speed, 1.0 / (2.0 + 4.0 * 0.5 + 0.25)), "{tensors:?}");
}

#[test]
fn what_is_held_is_weights_and_cache() {
    let (mut model, hardware) = by_hand();
    for layer in &mut model.decoder.as_mut().unwrap().layers {
        layer.divided.kv = 4.0;
    }
    let load = Workload { batch: 1, context: 10, sequences: 2 };
    let mut partition = even(&model, 1, 2);
    partition.stages[0].ranks[0].share = 3;
    let forecast = forecast(&model, &partition, &hardware, load);
    // 2 x (100 + 4 x 20), three quarters of it on the first device.
    assert_eq!(forecast.bytes, [[270.0, 90.0]]);
    assert!(!forecast.fits);
}

/// Fast devices share the bandwidth that slow ones do not use.
#[test]
fn slow_devices_leave_the_shared_memory_to_fast_ones() {
    let (model, hardware) = by_hand();
    let load = Workload { batch: 1, context: 0, sequences: 1 };
    let device = hardware.devices[0];
    let mixed = Hardware {
        devices: vec![device, Device { bandwidth: 20.0, ..device }],
        shared_memory: SharedMemory { bandwidth: 120.0, memory: f64::INFINITY },
        inter_stage_link: Link { latency: 0.0, bandwidth: f64::INFINITY },
        ..hardware
    };
    // 100 bytes at 100 and at 20 bytes per second, as each device would alone.
    let layers = forecast(&model, &even(&model, 2, 1), &mixed, load);
    assert!(near(layers.throughput_lanes, 0.2) && near(layers.decode_speed, 1.0 / 6.0), "{layers:?}");
    // 80 of 100 bytes per second are left for the first device.
    let narrow =
        Hardware { shared_memory: SharedMemory { bandwidth: 100.0, ..mixed.shared_memory }, ..mixed };
    let partition = even(&model, 2, 1);
    let machine = Estimator {
        model: &model,
        partition: &partition,
        hardware: &narrow,
        costs: rank_costs(&model, &partition),
    };
    assert!(near(machine.bandwidth_each(0..2), 80.0));
}

/// Four heads are split over three ranks as two, one and one, and all ranks wait for the first. With shares
/// 1:1:4, eight heads on two KV heads are split as two, two and four, and each rank has one KV head.
#[test]
fn ranks_have_whole_heads() {
    let (mut model, hardware) = by_hand();
    let mut dealt = |kv_heads| {
        for layer in &mut model.decoder.as_mut().unwrap().layers {
            layer.divided =
                ResourceCost { stored: 60.0, read: 60.0, read_max: 60.0, ..ResourceCost::default() };
            layer.query_heads =
                ResourceCost { stored: 40.0, read: 40.0, read_max: 40.0, ..ResourceCost::default() };
            layer.kv_heads = ResourceCost { stored: 8.0, kv: 4.0, ..ResourceCost::default() };
            layer.head_split = Some(HeadSplit { heads: 4 * kv_heads, kv_heads, v_dim: 1, block: 1 });
        }
        model.clone()
    };
    let free = Link { latency: 0.0, bandwidth: f64::INFINITY };
    let hardware = Hardware { intra_stage_link: free, ..hardware };
    let (model, load) = (dealt(1), Workload { batch: 1, context: 0, sequences: 1 });
    let three = forecast(&model, &even(&model, 1, 3), &hardware, load);
    // 2 x (60 / 3 + 40 / 2 + 8)
    assert_eq!(three.bytes, [[96.0, 76.0, 76.0]]);
    assert!(near(three.decode_speed, 100.0 / 80.0), "{three:?}");
    let model = dealt(2);
    let mut partition = even(&model, 1, 3);
    partition.stages[0].ranks[2].share = 4;
    let by_shares = forecast(&model, &partition, &hardware, Workload { context: 10, ..load });
    // 2 x (60 / 6 + 40 / 4 + 8 / 2 + 40 / 2), and 2 x (60 x 4 / 6 + 40 / 2 + 8 / 2 + 40 / 2)
    assert_eq!(by_shares.bytes, [[88.0, 88.0, 168.0]]);
}

/// A decoded token has no rows in encoder stages, so their messages are empty.
#[test]
fn an_encoders_stage_hands_on_nothing_of_a_token() {
    let (decoder, hardware) = by_hand();
    let both = ModelShape { encoder: Some(of_layers(1, ResourceCost::default())), ..decoder };
    let mut partition = even(&both, 3, 1);
    for (stage, (encoder, decoder)) in [(0..1, 0..0), (1..1, 0..1), (1..1, 1..2)].into_iter().enumerate() {
        (partition.stages[stage].encoder, partition.stages[stage].decoder) = (encoder, decoder);
    }
    let forecast = forecast(&both, &partition, &hardware, Workload { batch: 1, context: 0, sequences: 1 });
    // The latency alone; one second of reading, the latency and 20 bytes; one second.
    let stages = [0.5, 1.75, 1.0];
    assert!(forecast.stage_seconds.iter().zip(stages).all(|(a, b)| near(*a, b)), "{forecast:?}");
    // Two ranks synchronize over one value.
    partition.stages[0].ranks.push(StageRank { device: "cpu:3".into(), share: 1 });
    let met = self::forecast(&both, &partition, &hardware, Workload { batch: 1, context: 0, sequences: 1 });
    assert!(near(met.stage_seconds[0], 0.5 + hardware.intra_stage_link.seconds(4.0)), "{met:?}");
    assert!(hardware.intra_stage_link.seconds(4.0) > 0.0);
}

/// An encoder takes memory, but decoded tokens do not pass through it.
#[test]
fn tokens_go_through_the_decoder_alone() {
    let (decoder, hardware) = by_hand();
    let load = Workload { batch: 1, context: 0, sequences: 1 };
    let encoder = Some(of_layers(
        3,
        ResourceCost { stored: 50.0, read: 50.0, read_max: 50.0, ..ResourceCost::default() },
    ));
    let both = ModelShape { encoder: encoder.clone(), ..decoder.clone() };
    let partition = |encoder: Range<usize>, decoder: Range<usize>| {
        let mut single = even(&both, 1, 1);
        (single.stages[0].encoder, single.stages[0].decoder) = (encoder, decoder);
        single
    };
    let with = forecast(&both, &partition(0..3, 0..2), &hardware, load);
    let without = forecast(&decoder, &partition(0..0, 0..2), &hardware, load);
    assert_eq!(with.decode_speed, without.decode_speed);
    assert_eq!((&with.bytes[0], &without.bytes[0]), (&vec![350.0], &vec![200.0]));
    let alone = ModelShape { encoder, decoder: None, ..decoder };
    let alone = forecast(&alone, &partition(0..3, 0..0), &hardware, load);
    assert!(near(alone.decode_speed, 1.0 / 1.5), "{alone:?}");
}

/// Both ends of a model share a table of 30 bytes: one device holds it once, and two ranks hold half of it
/// each.
#[test]
fn a_shared_table_is_held_once() {
    let (mut model, hardware) = by_hand();
    let stack = model.decoder.as_mut().unwrap();
    let table = ResourceCost { stored: 30.0, ..ResourceCost::default() };
    (stack.embedding, stack.head) = (table, table);
    model.shared_tables.push(SharedTable { first: 0, last: 1, stored: 30.0 });
    let load = Workload { batch: 1, context: 0, sequences: 1 };
    let bytes = |stages, ranks| forecast(&model, &even(&model, stages, ranks), &hardware, load).bytes;
    assert_eq!(bytes(1, 1), [[230.0]]);
    assert_eq!(bytes(1, 2), [[115.0, 115.0]]);
    assert_eq!(bytes(2, 1), [[130.0], [130.0]]);
}

/// One KV head on four ranks: each has a copy, with its cache and reads.
#[test]
fn replicated_kv_heads_are_held_by_all_ranks() {
    let (mut model, hardware) = by_hand();
    for layer in &mut model.decoder.as_mut().unwrap().layers {
        layer.kv_heads = ResourceCost { stored: 8.0, kv: 4.0, ..ResourceCost::default() };
        layer.head_split = Some(HeadSplit { heads: 4, kv_heads: 1, v_dim: 1, block: 1 });
    }
    let load = Workload { batch: 1, context: 10, sequences: 1 };
    let forecast = forecast(&model, &even(&model, 1, 4), &hardware, load);
    // 2 x (100 / 4 + 8 + 4 x 10)
    assert_eq!(forecast.bytes, [[146.0; 4]]);
}
