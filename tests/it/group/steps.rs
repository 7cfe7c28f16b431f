//! Tests of a group alone: steps in flight, links, and failing builds.

use super::SHAPES;
use super::rank::{Failure, Fault, Moment, Script, Shape};
use crate::common::{PATIENCE, within};
use mainstem::actors::Status;
use mainstem::actors::device::{ExecutorFactory, Step, StepResult};
use mainstem::actors::group::link::{self, Link};
use mainstem::actors::group::{Devices, Group, GroupConfig, SentStep, StepFuture};
use mainstem_kernels::{
    Aborted, ActivationHandoff, Collective, Fraction, SamplingParams, Span, SpanModel, SpanOutput, SpanStack,
    SpanTable, SpanTokens, StepBatch, StepLimits,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub(super) const LIMITS: StepLimits = StepLimits {
    slots: 4,
    rows: 40,
    batch_rows: usize::MAX,
    logit_rows: 4,
    positions: 64,
    encoder_positions: 0,
    page_positions: 32,
    window: None,
    top_logprobs: 0,
    vocab: 200,
    hidden: 0,
    drafts: 0,
    draft_logits: false,
    counts_tokens: false,
    opening_rows: 0,
    attended_fraction: Fraction::ONE,
};

pub(super) fn config(shape: Shape) -> GroupConfig {
    let name = |stage, rank| format!("t{stage}:{rank}");
    let names = (0..shape.0).map(|stage| (0..shape.1).map(|rank| name(stage, rank)).collect());
    GroupConfig::new(names.collect(), LIMITS, 4)
}

/// Returns the prompt of sequence `number`.
pub(super) fn step(number: u32) -> Box<Step> {
    let span = Span {
        model: SpanModel::Target,
        stack: SpanStack::Decoder,
        slot: number % 4,
        start: 0,
        tokens: SpanTokens::Given { at: 0, len: 1 + number % 30 },
        table: SpanTable::Own,
        reserved: 40,
        encoder_len: 0,
        output: SpanOutput::Last,
    };
    let mut step = Box::new(Step::with_capacity(&LIMITS));
    step.batch.spans.push(span);
    step.batch.tokens.extend(0..1 + number % 30);
    step.batch.sampling.push(SamplingParams { position: number, ..SamplingParams::GREEDY });
    step
}

/// Sends a step that starts a sequence.
pub(super) fn send(group: &Group, number: u32) -> StepFuture {
    loop {
        // A fault between the two is as good as one before.
        if let Ok(running) = group.send(step(number), group.epoch()) {
            return running.into_future();
        }
    }
}

/// Sends this many steps at once and returns their results.
pub(super) async fn run(group: &Group, steps: u32) -> Vec<Result<u32, String>> {
    let running: Vec<_> = (0..steps).map(|number| send(group, number)).collect();
    let mut outcomes = Vec::new();
    for ran in running {
        let StepResult { step, result } = within(ran).await;
        outcomes.push(result.map(|()| step.output.tokens[0].token).map_err(|fault| fault.to_string()));
    }
    outcomes
}

#[actix::test]
async fn steps_in_flight_come_back_in_order_with_their_own_results() {
    let mut right = None;
    for shape in SHAPES {
        let script = Script::new(shape, []);
        let (group, reports) =
            Group::start(script.factories(LIMITS), config(shape)).await.expect("it starts");
        let last = shape.0 * shape.1 - 1;
        assert_eq!(reports[shape.0 - 1][shape.1 - 1].device, format!("device {last}"));
        assert_eq!(group.count(), last + 1);
        for _ in 0..3 {
            let outcomes = run(&group, 50).await;
            assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
            assert_eq!(*right.get_or_insert(outcomes.clone()), outcomes);
        }
        group.stop();
        script.threads_end();
    }
}

/// The device that returns results hangs after its signal, so that the next step is sent while the first one
/// runs, and waits until then.
#[actix::test]
async fn a_step_signals_its_last_layer_before_its_result() {
    for shape in SHAPES {
        let device = (shape.0 - 1) * shape.1;
        let hangs = Failure { device, at_step: 0, fault: Fault::Stall, moment: Moment::End };
        let fails = Failure { device, at_step: 2, fault: Fault::Error, moment: Moment::Begin };
        let script = Script::new(shape, [hangs, fails]);
        let (group, _) = Group::start(script.factories(LIMITS), config(shape)).await.expect("it starts");
        let SentStep { result, last_layer } = group.send(step(0), group.epoch()).expect("nothing failed");
        assert_eq!(within(last_layer).await, Ok(()));
        let next = send(&group, 1);
        script.release();
        for result in [result, next] {
            assert!(within(result).await.result.is_ok());
        }
        let SentStep { result, last_layer } = group.send(step(2), group.epoch()).expect("nothing failed");
        assert!(within(last_layer).await.is_err(), "a step that fails before sends no signal");
        assert!(within(result).await.result.is_err());
        group.stop();
        script.threads_end();
    }
}

/// The steps before the fault succeed; the others get the same error.
#[actix::test]
async fn a_fault_ends_every_step_in_flight_and_no_other() {
    for shape in SHAPES {
        for device in 0..shape.0 * shape.1 {
            let failure = Failure { device, at_step: 7, fault: Fault::Error, moment: Moment::Middle };
            let script = Script::new(shape, [failure]);
            let started = Group::start(script.factories(LIMITS), config(shape)).await;
            let (group, _) = started.expect("it starts");
            let before = group.epoch();
            let outcomes = run(&group, 20).await;
            let (stage, rank) = (device / shape.1, device % shape.1);
            let fault = Err(format!("device fault: t{stage}:{rank}: the test's device fails"));
            let answered = outcomes.iter().take_while(|outcome| outcome.is_ok()).count();
            // Stages behind the one that fails may not have got so far.
            assert!(
                answered <= 7 && (answered == 7 || stage + 1 < shape.0),
                "{shape:?}, {device}: {answered}"
            );
            // Who comes late, behind the fault, is served by the group as it is then.
            let failed = outcomes[answered..].iter().take_while(|outcome| **outcome == fault).count();
            assert!(failed >= 1 && outcomes[answered + failed..].iter().all(Result::is_ok), "{outcomes:?}");
            let stale = group.send(step(0), before).err().map(|fault| fault.to_string());
            assert_eq!(stale, fault.err(), "who has not heard of it goes on from nothing");
            assert!(run(&group, 20).await.iter().all(Result::is_ok));
            group.stop();
            script.threads_end();
        }
    }
}

/// A link that passes everything as byte messages.
struct Serial {
    inner: Box<dyn Link>,
    room: ActivationHandoff,
}

impl Link for Serial {
    fn buffer(&mut self) -> &mut ActivationHandoff {
        &mut self.room
    }

    fn send(&mut self, batch: &Arc<StepBatch>) {
        let message = postcard::to_allocvec(&(&**batch, &self.room)).expect("it has a form");
        let (batch, carried): (StepBatch, ActivationHandoff) =
            postcard::from_bytes(&message).expect("it comes back");
        *self.inner.buffer() = carried;
        self.inner.send(&Arc::new(batch));
    }
}

/// A collective that exchanges values instead of shared memory.
struct ByMessage(Box<dyn Collective>);

impl Collective for ByMessage {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn rank_count(&self) -> usize {
        self.0.rank_count()
    }

    fn all_reduce(&mut self, x: &mut [f32]) -> Result<(), Aborted> {
        let message: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut own: Vec<f32> = floats(&message).collect();
        self.0.all_reduce(&mut own)?;
        x.copy_from_slice(&own);
        Ok(())
    }

    fn all_gather(
        &mut self,
        rows: usize,
        widths: &[usize],
        own: &[f32],
        all: &mut [f32],
    ) -> Result<(), Aborted> {
        let message: Vec<u8> = own.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut gathered = vec![0.0; all.len()];
        self.0.all_gather(rows, widths, &floats(&message).collect::<Vec<_>>(), &mut gathered)?;
        all.copy_from_slice(&gathered);
        Ok(())
    }
}

fn floats(message: &[u8]) -> impl Iterator<Item = f32> + '_ {
    message.chunks_exact(4).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

#[actix::test]
async fn devices_need_no_memory_in_common() {
    for shape in SHAPES {
        let script = Script::new(shape, []);
        let by_message = |mut factory: ExecutorFactory| {
            let wrapped: ExecutorFactory = Box::new(move |stage| factory(Box::new(ByMessage(stage))));
            wrapped
        };
        let factories = script.factories(LIMITS).into_iter();
        let factories = factories.map(|stage| stage.into_iter().map(by_message).collect()).collect();
        let link_factory: link::LinkFactory = Arc::new(|posts, room| {
            Box::new(Serial { inner: link::local(posts, room), room: room.new_handoff() })
        });
        let (group, _) =
            Group::start(factories, GroupConfig { link_factory, ..config(shape) }).await.expect("it starts");
        let outcomes = run(&group, 30).await;
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        group.stop();
    }
}

/// Returns the factory of one device that fails at given builds.
fn failing_builds(script: &Arc<Script>, device: usize, at: &'static [u64]) -> Vec<Vec<ExecutorFactory>> {
    let mut factories = script.factories(LIMITS);
    let Shape(_, ranks) = script.shape;
    let place = &mut factories[device / ranks][device % ranks];
    let mut inner = std::mem::replace(place, Box::new(|_| unreachable!("it is replaced at once")));
    let builds = AtomicU64::new(0);
    *place = Box::new(move |stage| match at.contains(&builds.fetch_add(1, Ordering::SeqCst)) {
        true => anyhow::bail!("the test's device stays away"),
        false => inner(stage),
    });
    factories
}

#[actix::test]
async fn a_group_that_cannot_be_built_does_not_start() {
    for shape in SHAPES {
        for device in 0..shape.0 * shape.1 {
            let script = Script::new(shape, []);
            let started = Group::start(failing_builds(&script, device, &[0]), config(shape)).await;
            let error = format!("{:#}", started.err().expect("it does not start"));
            let (stage, rank) = (device / shape.1, device % shape.1);
            assert_eq!(error, format!("building the device t{stage}:{rank}: the test's device stays away"));
            script.threads_end();
        }
    }
}

/// Two rebuilds fail: the one after the fault, and one for a step that arrived before it completed, if any.
#[actix::test]
async fn a_group_that_cannot_be_rebuilt_is_tried_again() {
    for shape in SHAPES {
        let failure = Failure { device: 0, at_step: 0, fault: Fault::Panic, moment: Moment::Begin };
        let script = Script::new(shape, [failure]);
        let last = shape.0 * shape.1 - 1;
        let started = Group::start(failing_builds(&script, last, &[1, 2]), config(shape)).await;
        let (group, _) = started.expect("it starts");
        let first = run(&group, 1).await;
        assert_eq!(first, [Err("device fault: t0:0: the test's device fails".to_owned())]);
        let mut failures = 0;
        while let [Err(why)] = &run(&group, 1).await[..] {
            assert!(why.contains("the test's device stays away"), "{why}");
            failures += 1;
            assert!(failures <= 2, "the group does not come back");
        }
        assert!(failures >= 1);
        group.stop();
        script.threads_end();
    }
}

/// Without requests, which `/health` keeps away, devices must still be rebuilt.
#[actix::test]
async fn a_group_that_cannot_be_rebuilt_shows_in_the_status_and_is_tried_again_unasked() {
    let failure = Failure { device: 0, at_step: 0, fault: Fault::Error, moment: Moment::Begin };
    let script = Script::new(Shape(1, 2), [failure]);
    let status = Arc::new(Status::new(Duration::ZERO, 0));
    let config = GroupConfig { status: status.clone(), ..config(script.shape) };
    let (group, _) = Group::start(failing_builds(&script, 1, &[1, 2, 3]), config).await.expect("it starts");
    assert!(run(&group, 1).await[0].is_err());
    let began = Instant::now();
    for stalls in [true, false] {
        while status.stalled_for().is_zero() == stalls {
            assert!(began.elapsed() < PATIENCE, "stalled: {stalls}?");
            tokio::task::yield_now().await;
        }
    }
    assert!(script.builds[0].load(Ordering::SeqCst) >= 3);
    assert!(run(&group, 5).await.iter().all(Result::is_ok));
    group.stop();
    script.threads_end();
}

#[actix::test]
async fn a_stopped_group_leaves_no_step_and_no_thread() {
    for shape in SHAPES {
        let script = Script::new(shape, []);
        let (group, _) = Group::start(script.factories(LIMITS), config(shape)).await.expect("it starts");
        let running: Vec<_> = (0..50).map(|number| send(&group, number)).collect();
        group.stop();
        script.threads_end();
        for ran in running.into_iter().chain([send(&group, 0)]) {
            if let Err(fault) = within(ran).await.result {
                assert_eq!(fault.to_string(), "device fault: the group is stopped");
            }
        }
    }
}

/// A broken link is a failure of its own device only.
struct Breaking {
    inner: Box<dyn Link>,
    left: Arc<AtomicU64>,
}

impl Link for Breaking {
    fn buffer(&mut self) -> &mut ActivationHandoff {
        self.inner.buffer()
    }

    fn send(&mut self, batch: &Arc<StepBatch>) {
        assert_ne!(self.left.fetch_sub(1, Ordering::SeqCst), 0, "the link is cut");
        self.inner.send(batch);
    }
}

#[actix::test]
async fn a_link_that_breaks_is_named_with_its_device() {
    for shape in [Shape(2, 1), Shape(2, 2), Shape(3, 1)] {
        let script = Script::new(shape, []);
        let left = Arc::new(AtomicU64::new(4));
        let link_factory: link::LinkFactory = Arc::new(move |posts, room| {
            Box::new(Breaking { inner: link::local(posts, room), left: left.clone() })
        });
        let config = GroupConfig { link_factory, ..config(shape) };
        let (group, _) = Group::start(script.factories(LIMITS), config).await.expect("it starts");
        let error = run(&group, 10).await.into_iter().find_map(Result::err).expect("it breaks");
        assert!(
            error.starts_with("device fault: t")
                && error.contains(":0: ")
                && error.contains("the link is cut"),
            "{error}"
        );
        assert!(run(&group, 10).await.iter().all(Result::is_ok));
        group.stop();
        script.threads_end();
    }
}
