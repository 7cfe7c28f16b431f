//! Tests on selected models: mixed device kinds, half-precision caches, device reports, and tokens outside
//! the vocabulary.

use super::*;
use mainstem::model::executor::{ExecutorReport, estimate_report};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;

/// The oracle implements every operation of a stage, and stages on different device kinds are compatible.
#[test]
fn stages_can_be_of_different_kinds() {
    for name in ["qwen2_moe", "invented_one", "t5"] {
        let model = family(name, "partitions-kinds");
        let source = open(&model.0);
        let script = script_of(&source, QuantType::F32);
        let layers = source.spec.layers();
        for kinds in [&["reference", "cpu"][..], &["cpu", "reference"], &["reference"]] {
            let counts = if kinds.len() == 2 { vec![1, layers - 1] } else { vec![layers] };
            let shares = vec![vec![1, 1]; kinds.len()];
            let mut partition = partition(&source.spec, &counts, &shares, ExpertSplit::Column);
            for (stage, kind) in partition.stages.iter_mut().zip(kinds) {
                stage.ranks.iter_mut().for_each(|rank| rank.device = format!("{kind}:0"));
            }
            let what = format!("{name} on {kinds:?}");
            let answers = play(&source, &partition, &script, EXCHANGED[1]);
            check(&what, &answers, &script.outputs, Near::Within(TOLERANCE));
        }
    }
}

/// The heads of a rank are laid out and copied like all heads.
#[test]
fn caches_can_be_in_half_precision() {
    for name in ["gqa", "families/gemma3", "families/t5"] {
        let played = check_partitions(name, &open(&fixture(name)), (QuantType::F16, HALF_TOLERANCE));
        assert!(played >= 12, "{name}: only {played} were played");
    }
}

#[test]
fn devices_that_load_at_once_report_their_own_bytes() {
    const MEMBERS: usize = 4;
    let source = open(&fixture("gqa"));
    let (limits, kv) =
        (script::limits(&source.spec), KvCacheConfig { ty: QuantType::F32, pages: 100, window_pages: 0 });
    let shards: Vec<Shard> = (0..MEMBERS)
        .map(|rank| Shard { rank, shares: vec![1, 3, 2, 1], ..Shard::whole(&source.spec) })
        .collect();
    let bytes = |report: ExecutorReport| {
        [report.weight_bytes, report.kv_bytes, report.activation_bytes, report.step_bytes]
    };
    let foretold = |shard| {
        bytes(estimate_report(cpu().sizes(), &source, shard, kv, limits).expect("the fixture is open"))
    };
    let foretold: Vec<_> = shards.iter().map(foretold).collect();
    // What is built concurrently differs.
    for _ in 0..10 {
        let all_are_there = Barrier::new(MEMBERS);
        let build = |shard, place| {
            all_are_there.wait();
            bytes(device("cpu", &source, shard, kv, Some(place)).report())
        };
        let reports: Vec<_> = thread::scope(|scope| {
            let places = local::create_ranks(MEMBERS, 1, &Abort::new());
            let build = &build;
            let threads: Vec<_> = shards
                .iter()
                .zip(places)
                .map(|(shard, place)| scope.spawn(move || build(shard, place)))
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("a member is built")).collect()
        });
        assert_eq!(reports, foretold);
    }
}

/// A device with a part of the vocabulary or without the embedding cannot distinguish a token of other
/// devices from an invalid one.
#[test]
fn a_token_that_there_is_not_is_a_fault_on_every_device() {
    let source = open(&fixture("gqa"));
    let script = script_of(&source, QuantType::F32);
    let mut batch = script.batches[0].clone();
    batch.tokens[0] = source.spec.vocab as u32;
    let partition = partition(&source.spec, &[1, 1], &[vec![1], vec![1]], ExpertSplit::Column);
    for shard in [Shard::whole(&source.spec), partition.shard(0, 0), partition.shard(1, 0)] {
        let mut device = device("cpu", &source, &shard, script.kv, None);
        let flow = HandoffPorts { input: Some(&ActivationHandoff::default()), ..HandoffPorts::default() };
        let ran = catch_unwind(AssertUnwindSafe(|| device.run(&batch, flow, &mut StepOutput::default())));
        let message = ran.expect_err("it is a fault");
        let message = message.downcast_ref::<String>().expect("it says why");
        assert!(message.contains("a token is not in the vocabulary of 263"), "{message}");
    }
}
