//! Tests of whole engines on several devices: for every partition and number of lanes, clients get the same
//! answers as from one device, even if other clients disconnect.

use crate::common::{
    Outcome, all_home, complete_all, config, engine, greedy, outcome, prompt, sampled, submit,
};
use crate::families::family;
use futures_util::future::{join, join_all};
use mainstem::actors::TokenStream;
use mainstem::actors::device::ExecutorFactory;
use mainstem::actors::engine::start as start_engine;
use mainstem::cli::start::{self, PreparedModel};
use mainstem::model::ModelRef;
use mainstem::model::executor::{Executor, ExecutorReport};
use mainstem::request::{FinishReason, Request, Token};
use mainstem_kernels::{Aborted, Collective, DeviceError, HandoffPorts, StepBatch, StepOutput};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use toml::Value;

/// Tolerance of log-probabilities if sums are computed in another order.
const TOLERANCE: f32 = 1e-4;

/// Values of `--devices` for models of two layers: layer-wise, tensor-wise, hybrid, uneven, and with two
/// device kinds.
const PARTITIONS: [&str; 6] = [
    "cpu:0;cpu:1",
    "cpu:0&cpu:1",
    "cpu:0&cpu:1;cpu:2&cpu:3",
    "cpu:0;cpu:1&cpu:2",
    "cpu:0&cpu:1;cpu:2",
    "cpu:0;reference:0",
];

/// Values of `--devices` for models of four layers.
const LONGER: [&str; 5] = [
    "cpu:0;cpu:1;cpu:2",
    "cpu:0;cpu:1;cpu:2;cpu:3",
    "cpu:0;cpu:1&cpu:2;cpu:3",
    "cpu:0&cpu:1&cpu:2",
    "cpu:0&cpu:1&cpu:2&cpu:3",
];

type Settings = Vec<(&'static str, Value)>;

fn settings(devices: &str, lanes: i64, shuffle: &str) -> Settings {
    let mut settings = vec![
        ("scheduler.lanes", lanes.into()),
        ("scheduler.shuffle", shuffle.into()),
        // Prompts are processed in chunks.
        ("scheduler.token_budget", 12.into()),
        ("device.threads", 1.into()),
        // Partial sums of tensor-parallel ranks would be rounded differently with BF16 weights.
        ("device.activations", "f32".into()),
    ];
    if !devices.is_empty() {
        settings.push(("device.groups", devices.into()));
    }
    settings
}

/// Returns token ids that exist in every vocabulary used here.
fn words(number: usize, len: usize) -> Vec<u32> {
    prompt(number, len).into_iter().map(|id| 8 + id % 88).collect()
}

/// Returns more requests than slots, of many lengths; only greedy ones if results may differ in rounding.
fn requests(exact: bool, with_encoder: bool) -> Vec<Request> {
    let request = |i: usize| {
        let request = match exact && i % 2 == 1 {
            true => sampled(&words(i, 4 + 4 * i), 4 + i as u32, i as u64),
            false => greedy(&words(i, 4 + 4 * i), 4 + i as u32),
        };
        // Some encoder inputs are longer than the budget of a step.
        let encoder_input =
            if with_encoder { words(40 + i, 3 + 2 * i).into() } else { request.encoder_input.clone() };
        Request {
            encoder_input,
            prompt_logprobs: i.is_multiple_of(3).then_some(i as u8),
            logprobs: Some(0),
            ..request
        }
    };
    (0..10).map(request).collect()
}

/// Reads this many events, then disconnects.
async fn leave(mut stream: TokenStream, events: usize) {
    for _ in 0..events {
        stream.next().await;
    }
}

/// Returns the outcomes of the requests. Between any two is one whose client disconnects at once, during its
/// prompt, or during its answer.
async fn answers(model: &str, settings: &Settings, requests: Vec<Request>) -> Vec<Outcome> {
    let engine = engine(model, settings).await;
    let (mut staying, mut leaving) = (Vec::new(), Vec::new());
    for (number, request) in requests.into_iter().enumerate() {
        let long = greedy(&words(20 + number, 5 + 7 * (number % 4)), 20);
        let long = Request { encoder_input: request.encoder_input.clone(), ..long };
        leaving.push(leave(submit(&engine, long).await.expect("there is room"), number % 5));
        staying.push(outcome(submit(&engine, request).await.expect("there is room")));
    }
    let (answers, _) = join(join_all(staying), join_all(leaving)).await;
    all_home(&engine, 4).await;
    engine.stop();
    answers
}

fn check(what: &str, exact: bool, got: &[Outcome], right: &[Outcome]) {
    for (number, (got, right)) in got.iter().zip(right).enumerate() {
        assert_eq!(right.end, Some(Ok(FinishReason::Length)));
        assert_eq!((&got.end, got.ids()), (&right.end, right.ids()), "{what}, request {number}");
        if exact {
            assert_eq!(
                (&got.tokens, &got.prompt),
                (&right.tokens, &right.prompt),
                "{what}, request {number}"
            );
            continue;
        }
        let near = |(a, b): (&Token, &Token)| match (a.logprob, b.logprob) {
            (Some(a), Some(b)) => (a - b).abs() <= TOLERANCE,
            (a, b) => a == b,
        };
        let tokens = |outcome: &Outcome| [&outcome.prompt[..], &outcome.tokens[..]].concat();
        assert_eq!(tokens(got).len(), tokens(right).len());
        assert!(tokens(got).iter().zip(&tokens(right)).all(near), "{what}, request {number}");
    }
}

/// Checks each of these partitions with one lane, with several, and with more lanes than stages.
async fn check_all(model: &str, with_encoder: bool, partitions: &[&str], more: &Settings) {
    for exact in [true, false] {
        let right = answers(model, &settings("", 1, "on"), requests(exact, with_encoder)).await;
        for devices in partitions {
            // Sums over ranks and on other device kinds are rounded differently.
            if exact == (devices.contains('&') || devices.contains("reference")) {
                continue;
            }
            for (lanes, shuffle) in [(1, "on"), (2, "on"), (4, "off")] {
                let settings = [settings(devices, lanes, shuffle), more.clone()].concat();
                let got = answers(model, &settings, requests(exact, with_encoder)).await;
                let what = format!("{model} on {devices}, {lanes} lanes, shuffle {shuffle}, {more:?}");
                check(&what, exact, &got, &right);
            }
        }
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("the folder's name is text")
}

#[actix::test]
async fn clients_get_the_same_whatever_the_partition_and_the_lanes() {
    for model in ["gqa", "mqa", "biased"] {
        check_all(model, false, &PARTITIONS, &Vec::new()).await;
    }
    check_all("tied", false, &["cpu:0;cpu:1;cpu:2", "cpu:0;cpu:1&cpu:2;cpu:3"], &Vec::new()).await;
}

#[actix::test]
async fn experts_are_shared_in_either_way() {
    let model = family("qwen2_moe", "parted");
    check_all(text(&model.0), false, &LONGER, &Vec::new()).await;
    let by_expert = vec![("device.experts", Value::from("expert"))];
    check_all(text(&model.0), false, &LONGER[2..], &by_expert).await;
}

/// The last stage of the encoder passes on the encoder output that all decoder stages cache.
#[actix::test]
async fn encoder_outputs_reach_every_stage_that_attends_to_them() {
    let model = family("m2m100", "parted");
    check_all(text(&model.0), true, &PARTITIONS[..5], &Vec::new()).await;
    check_all(text(&model.0), true, &LONGER, &Vec::new()).await;
    let model = family("t5", "parted");
    check_all(text(&model.0), true, &LONGER[1..3], &Vec::new()).await;
}

/// A collective that counts the exchanges of a device.
struct Meeting {
    inner: Box<dyn Collective>,
    meetings: Arc<AtomicU64>,
}

impl Collective for Meeting {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn rank_count(&self) -> usize {
        self.inner.rank_count()
    }

    fn all_reduce(&mut self, x: &mut [f32]) -> Result<(), Aborted> {
        self.meetings.fetch_add(1, Ordering::Relaxed);
        self.inner.all_reduce(x)
    }

    fn all_gather(
        &mut self,
        rows: usize,
        widths: &[usize],
        own: &[f32],
        all: &mut [f32],
    ) -> Result<(), Aborted> {
        self.meetings.fetch_add(1, Ordering::Relaxed);
        self.inner.all_gather(rows, widths, own, all)
    }
}

/// A device that checks that every step includes an exchange with the other ranks.
struct Sociable {
    inner: Box<dyn Executor>,
    meetings: Arc<AtomicU64>,
    ranks: usize,
}

impl Executor for Sociable {
    fn run(
        &mut self,
        batch: &StepBatch,
        flow: HandoffPorts<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        let before = self.meetings.load(Ordering::Relaxed);
        self.inner.run(batch, flow, out)?;
        let met = self.ranks == 1 || self.meetings.load(Ordering::Relaxed) > before;
        assert!(met, "step {} passes a stage without all its ranks", batch.step);
        Ok(())
    }

    fn report(&self) -> ExecutorReport {
        self.inner.report()
    }
}

fn with_exchange_check(mut factory: ExecutorFactory) -> ExecutorFactory {
    Box::new(move |inner| {
        let (ranks, meetings) = (inner.rank_count(), Arc::new(AtomicU64::new(0)));
        let inner = factory(Box::new(Meeting { inner, meetings: meetings.clone() }))?;
        Ok(Box::new(Sociable { inner, meetings, ranks }))
    })
}

/// Also in steps that have no rows for any layer of the stage. Buffers and boxes go by that.
#[actix::test]
async fn the_ranks_of_a_stage_meet_in_every_step() {
    let model = family("m2m100", "meeting");
    for (devices, layers) in [
        ("cpu:0;cpu:1&cpu:2;cpu:3", &[1, 1, 2][..]),
        ("cpu:0&cpu:1;cpu:2&cpu:3", &[2, 2]),
        ("reference:0&reference:1;cpu:0", &[1, 3]),
        ("cpu:0;cpu:1&cpu:2", &[3, 1]),
        ("fake:0&fake:1;fake:2&fake:3", &[2, 2]),
    ] {
        let layers = Value::from(layers.to_vec());
        let settings = [settings(devices, 2, "on"), vec![("device.layers", layers)]].concat();
        let config = config(&model.0, &settings);
        let prepared =
            PreparedModel::open(&config, &ModelRef::Path(model.0.clone())).expect("the fixture opens");
        let PreparedModel { setup, source, tokenizer, device, .. } = prepared;
        let factories = start::factories(&device, &source, &tokenizer, &setup).into_iter();
        let factories = factories.map(|stage| stage.into_iter().map(with_exchange_check).collect()).collect();
        let engine = start_engine(setup, tokenizer, factories).await.expect("it starts");
        for outcome in complete_all(&engine, requests(false, true)).await {
            assert_eq!(outcome.end, Some(Ok(FinishReason::Length)), "{devices}");
        }
        engine.stop();
    }
}

/// Boxes of a stage of two, and buffers between two stages for two lanes.
#[actix::test]
async fn the_start_report_counts_what_lies_between_devices() {
    for (devices, bytes) in [("", None), ("cpu:0&cpu:1;cpu:2", Some(2 * 2 * (4 << 15) + 3 * 4100 * 48 * 4))] {
        let settings = [settings(devices, 2, "on"), vec![("scheduler.token_budget", 4096.into())]].concat();
        let engine = engine("gqa", &settings).await;
        let report = engine.report();
        let line = report.lines().find(|line| line.starts_with("exchanges"));
        let mib = bytes.map(|bytes: usize| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)));
        assert_eq!(line.is_some(), bytes.is_some(), "{report}");
        assert!(line.zip(mib).is_none_or(|(line, mib)| line.contains(&mib)), "{line:?}");
        engine.stop();
    }
}
