//! Tests of the content of each step, observed by a device that waits for the test before it runs a step.

use crate::common::{all_home, engine_with, free_permits, greedy, outcome, prompt, submit, within};
use mainstem::actors::{Engine, TokenStream};
use mainstem::model::executor::{Executor, ExecutorReport};
use mainstem::request::{FinishReason, RequestError, TokenEvent};
use mainstem_kernels::{DeviceError, HandoffPorts, SpanTable, StepBatch, StepOutput};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use tokio::sync::mpsc as tokio_mpsc;
use toml::Value;

/// A device that publishes each step and waits for permission to run it. If the gate is dropped, it runs
/// freely.
struct Gated {
    inner: Box<dyn Executor>,
    entered: tokio_mpsc::UnboundedSender<StepBatch>,
    leave: mpsc::Receiver<()>,
}

impl Executor for Gated {
    fn run(
        &mut self,
        batch: &StepBatch,
        flow: HandoffPorts<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        let _ = self.entered.send(batch.clone());
        let _ = self.leave.recv();
        self.inner.run(batch, flow, out)
    }

    fn report(&self) -> ExecutorReport {
        self.inner.report()
    }
}

/// The test's side of the gate.
struct Gate {
    slots: usize,
    entered: tokio_mpsc::UnboundedReceiver<StepBatch>,
    leave: mpsc::Sender<()>,
}

impl Gate {
    /// Waits for the step at the gate.
    async fn next(&mut self) -> StepBatch {
        within(self.entered.recv()).await.expect("the device is there")
    }

    fn pass(&self) {
        let _ = self.leave.send(());
    }

    /// Opens the gate for all further steps and returns those that have passed.
    async fn open(self, engine: &Engine) -> Vec<StepBatch> {
        let Gate { slots, mut entered, leave } = self;
        drop(leave);
        all_home(engine, slots).await;
        let mut steps = Vec::new();
        while let Ok(step) = entered.try_recv() {
            steps.push(step);
        }
        steps
    }
}

async fn gated(settings: &[(&'static str, Value)]) -> (Engine, Gate) {
    gated_slots(4, settings).await
}

async fn gated_slots(slots: usize, settings: &[(&'static str, Value)]) -> (Engine, Gate) {
    let mut settings = settings.to_vec();
    settings.push(("scheduler.slots", Value::from(slots as i64)));
    let (entered_tx, entered) = tokio_mpsc::unbounded_channel();
    let (leave, leave_rx) = mpsc::channel();
    let mut door = Some((entered_tx, leave_rx));
    let engine = engine_with("gqa", &settings, |mut factory| {
        Box::new(move |stage| {
            let (entered, leave) = door.take().expect("this device is built once");
            Ok(Box::new(Gated { inner: factory(stage)?, entered, leave }))
        })
    })
    .await;
    (engine, Gate { slots, entered, leave })
}

async fn begin(engine: &Engine, number: usize, len: usize, max_tokens: u32) -> TokenStream {
    submit(engine, greedy(&prompt(number, len), max_tokens)).await.expect("it is taken in")
}

/// Waits until prefill has queued the requests that were accepted.
async fn ready(engine: &Engine) {
    // Each is a turn of the control thread, in which its actors handle what was sent to them.
    for _ in 0..4 {
        within(free_permits(&engine.actors.intake)).await;
    }
}

#[actix::test]
async fn who_arrives_during_a_step_is_in_the_next() {
    let (engine, mut gate) = gated(&[]).await;
    let first = begin(&engine, 0, 5, 20).await;
    assert_eq!(gate.next().await.rows(), 5);
    gate.pass();
    assert_eq!(gate.next().await.rows(), 1);
    // Inferflow's Figure 2: the step is at the gate when the second request arrives.
    let second = begin(&engine, 1, 7, 3).await;
    ready(&engine).await;
    gate.pass();
    let joined = gate.next().await;
    assert_eq!((joined.spans.len(), joined.rows()), (2, 1 + 7));
    let (_, first, second) = tokio::join!(gate.open(&engine), outcome(first), outcome(second));
    assert_eq!((first.tokens.len(), second.tokens.len()), (20, 3));
    engine.stop();
}

#[actix::test]
async fn a_long_prompt_keeps_to_the_budget_and_stalls_nobody() {
    let (engine, mut gate) = gated(&[("scheduler.token_budget", 16.into())]).await;
    let short = begin(&engine, 0, 4, 12).await;
    gate.next().await;
    gate.pass();
    gate.next().await;
    let long = begin(&engine, 1, 100, 2).await;
    ready(&engine).await;
    gate.pass();
    let mut prompt_rows = 0;
    while prompt_rows < 100 {
        let step = gate.next().await;
        assert!(step.rows() <= 16, "{} rows", step.rows());
        assert_eq!(step.spans[0].len(), 1, "the decoding row comes first");
        prompt_rows += step.spans[1].len();
        gate.pass();
    }
    assert_eq!(prompt_rows, 100);
    tokio::join!(gate.open(&engine), outcome(short), outcome(long));
    engine.stop();
}

fn holes(step: &StepBatch) -> usize {
    step.spans.iter().filter(|span| span.table == SpanTable::Null).count()
}

/// Eight requests of different lengths on four slots: with the shuffle, the slots of each step are
/// contiguous; without it, no sequence moves, and holes are computed.
#[actix::test]
async fn slots_are_contiguous_or_their_holes_are_computed() {
    for shuffle in ["on", "off"] {
        let (engine, gate) = gated(&[("scheduler.shuffle", shuffle.into())]).await;
        let mut streams = Vec::new();
        for (number, tokens) in [14, 3, 9, 5, 4, 11, 2, 8].into_iter().enumerate() {
            streams.push(begin(&engine, number, 3 + number, tokens).await);
        }
        let outcomes = futures_util::future::join_all(streams.into_iter().map(outcome));
        let (steps, _) = tokio::join!(gate.open(&engine), outcomes);
        for step in &steps {
            let slots: BTreeSet<u32> = step.spans.iter().map(|span| span.slot).collect();
            assert_eq!(slots.len(), step.spans.len(), "one span for each slot");
            let (low, high) = (slots.first().unwrap(), slots.last().unwrap());
            assert_eq!((high - low + 1) as usize, slots.len(), "shuffle {shuffle}: {slots:?}");
            match shuffle {
                "on" => assert_eq!(holes(step), 0),
                _ => assert_eq!(step.moves.len(), 0),
            }
        }
        engine.stop();
    }
}

#[actix::test]
async fn a_client_that_leaves_during_its_prompt_costs_one_more_step_at_most() {
    let (engine, mut gate) = gated(&[("scheduler.token_budget", 8.into())]).await;
    let stream = begin(&engine, 0, 100, 5).await;
    gate.next().await;
    gate.pass();
    gate.next().await;
    drop(stream);
    let steps = {
        gate.pass();
        gate.open(&engine).await
    };
    assert!(steps.is_empty(), "nothing is computed for nobody, but {} steps were", steps.len());
    engine.stop();
}

#[actix::test]
async fn the_waiting_room_is_bounded_and_who_left_does_not_count() {
    let (engine, gate) = gated(&[("scheduler.max_waiting", 2.into())]).await;
    let mut running = Vec::new();
    for number in 0..4 {
        running.push(begin(&engine, number, 3, 4).await);
    }
    assert_eq!(free_permits(&engine.actors.intake).await, 0);
    let waiting = begin(&engine, 4, 3, 4).await;
    let leaving = begin(&engine, 5, 3, 4).await;
    let refused = submit(&engine, greedy(&prompt(6, 3), 4)).await.map(drop);
    assert_eq!(refused, Err(RequestError::Busy { coming: 1, waiting: 2, limit: 2, retry_after_s: 0 }));
    drop(leaving);
    let replacing = begin(&engine, 6, 3, 4).await;
    running.extend([waiting, replacing]);
    let outcomes = futures_util::future::join_all(running.into_iter().map(outcome));
    let (_, outcomes) = tokio::join!(gate.open(&engine), outcomes);
    assert!(outcomes.iter().all(|outcome| outcome.end == Some(Ok(FinishReason::Length))));
    engine.stop();
}

#[actix::test]
async fn draining_refuses_what_comes_and_finishes_what_runs() {
    let (engine, mut gate) = gated(&[]).await;
    let mut running = begin(&engine, 0, 3, 6).await;
    gate.next().await;
    engine.status.draining.store(true, Ordering::Relaxed);
    let refused = submit(&engine, greedy(&prompt(1, 3), 4)).await.map(drop);
    assert_eq!(refused, Err(RequestError::Draining));
    gate.pass();
    assert!(matches!(within(running.next()).await, Some(TokenEvent::Started { .. })));
    assert!(matches!(within(running.next()).await, Some(TokenEvent::Token(_))));
    let (_, rest) = tokio::join!(gate.open(&engine), outcome(running));
    assert_eq!((rest.tokens.len(), rest.end), (5, Some(Ok(FinishReason::Length))));
    engine.stop();
}

#[actix::test]
async fn what_can_never_fit_is_refused_with_its_numbers() {
    let (engine, _gate) = gated(&[("kv.size", "64 tokens".into())]).await;
    let refusal = async |prompt: &[u32], max_tokens| {
        submit(&engine, greedy(prompt, max_tokens)).await.map(drop).expect_err("it cannot be served")
    };
    let context = engine.model.context;
    let too_long =
        RequestError::TooLong { prompt: "prompt", prompt_tokens: 100, max_tokens: context, context };
    assert_eq!(refusal(&prompt(0, 100), context as u32).await, too_long);
    assert_eq!(
        refusal(&prompt(0, 40), 25).await,
        RequestError::TooLarge { param: "max_tokens", what: "prompt and max_tokens", needed: 3, pages: 2 }
    );
    let stranger = refusal(&[5, engine.model.vocab as u32], 4).await;
    assert!(matches!(&stranger, RequestError::Invalid { param: "prompt", .. }), "{stranger:?}");
    assert!(matches!(refusal(&[], 4).await, RequestError::Invalid { param: "prompt", .. }));
    let mut bad = greedy(&[5], 4);
    bad.sampling.top_p = 0.0;
    let refused = submit(&engine, bad).await.map(drop);
    assert!(matches!(refused, Err(RequestError::Invalid { param: "top_p", .. })));
    engine.stop();
}

/// Returns the number of spans that start a prompt.
fn joining(step: &StepBatch) -> usize {
    step.spans.iter().filter(|span| span.start == 0 && span.table == SpanTable::Own).count()
}

/// Returns the steps after the one in which all requests of `max_tokens` tokens joined. They arrive together,
/// while the only step of another request is at the gate.
async fn together(shuffle: &'static str, max_tokens: &[u32]) -> Vec<StepBatch> {
    let settings = [("scheduler.shuffle", shuffle.into())];
    let (engine, mut gate) = gated_slots(max_tokens.len() + 1, &settings).await;
    let first = begin(&engine, 0, 3, 1).await;
    gate.next().await;
    let mut streams = vec![first];
    for (number, tokens) in max_tokens.iter().enumerate() {
        streams.push(begin(&engine, 1 + number, 6, *tokens).await);
    }
    ready(&engine).await;
    gate.pass();
    let joined = gate.next().await;
    assert_eq!((joining(&joined), joined.rows()), (max_tokens.len(), 6 * max_tokens.len()));
    let outcomes = futures_util::future::join_all(streams.into_iter().map(outcome));
    let (steps, outcomes) = tokio::join!(gate.open(&engine), outcomes);
    for (outcome, tokens) in outcomes[1..].iter().zip(max_tokens) {
        assert_eq!(outcome.tokens.len(), *tokens as usize);
    }
    engine.stop();
    steps
}

#[actix::test]
async fn one_pass_over_the_weights_serves_all() {
    let alone = together("on", &[20]).await;
    let four = together("on", &[20; 4]).await;
    assert_eq!((alone.len(), four.len()), (19, 19));
    assert!(alone.iter().all(|step| step.rows() == 1) && four.iter().all(|step| step.rows() == 4));
}

/// The two shortest requests leave holes. Each is closed by one move, or computed until the batch shrinks
/// past it.
#[actix::test]
async fn a_step_has_no_row_for_who_is_through() {
    let rows = |steps: &[StepBatch]| steps.iter().map(StepBatch::rows).collect::<Vec<_>>();
    let lengths = [9, 3, 6, 4];
    let shuffled = together("on", &lengths).await;
    assert_eq!(rows(&shuffled), [4, 4, 3, 2, 2, 1, 1, 1]);
    let moves: Vec<usize> = shuffled.iter().map(|step| step.moves.len()).collect();
    assert_eq!((moves, shuffled.iter().map(holes).sum::<usize>()), (vec![0, 0, 1, 1, 0, 0, 0, 0], 0));
    let left = together("off", &lengths).await;
    assert_eq!(rows(&left), [4, 4, 4, 3, 3, 1, 1, 1]);
    assert_eq!(left.iter().map(holes).collect::<Vec<_>>(), [0, 0, 1, 1, 1, 0, 0, 0]);
    assert!(left.iter().all(|step| step.moves.is_empty()));
}

#[actix::test]
async fn a_client_that_leaves_while_decoding_takes_its_row_along() {
    let (engine, mut gate) = gated(&[]).await;
    let staying = begin(&engine, 0, 5, 12).await;
    gate.next().await;
    let leaving = begin(&engine, 1, 5, 12).await;
    ready(&engine).await;
    for _ in 0..2 {
        gate.pass();
        gate.next().await;
    }
    // Both are decoding, and their second step is at the gate.
    drop(leaving);
    gate.pass();
    let next = gate.next().await;
    assert_eq!((next.spans.len(), next.rows()), (1, 1));
    within(async {
        while free_permits(&engine.actors.intake).await < 3 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let (_, staying) = tokio::join!(gate.open(&engine), outcome(staying));
    assert_eq!((staying.tokens.len(), staying.end), (12, Some(Ok(FinishReason::Length))));
    engine.stop();
}

#[actix::test]
async fn concurrent_requests_step_alone_and_all_in_every_iteration() {
    let (engine, mut gate) = gated(&[("scheduler.policy", "concurrent".into())]).await;
    let mut streams = vec![begin(&engine, 0, 5, 10).await];
    gate.next().await;
    for number in 1..3 {
        streams.push(begin(&engine, number, 5, 10).await);
    }
    ready(&engine).await;
    for iteration in 0..5 {
        let mut slots = BTreeSet::new();
        for _ in 0..3 {
            gate.pass();
            let step = gate.next().await;
            assert_eq!(step.spans.len(), 1, "turn {iteration}");
            slots.insert(step.spans[0].slot);
        }
        assert_eq!(slots.len(), 3, "turn {iteration}: a step for each sequence");
    }
    let outcomes = futures_util::future::join_all(streams.into_iter().map(outcome));
    let (rest, outcomes) = tokio::join!(gate.open(&engine), outcomes);
    assert!(rest.iter().all(|step| step.spans.len() == 1));
    assert!(outcomes.iter().all(|outcome| outcome.tokens.len() == 10));
    engine.stop();
}

/// The window is so long that only full slots end it: two batches of four, however early the second arrived.
#[actix::test]
async fn who_arrives_while_a_batch_runs_waits_until_it_is_through() {
    let settings = [("scheduler.policy", "window".into()), ("scheduler.window", "1h".into())];
    let (engine, mut gate) = gated(&settings).await;
    let mut streams = Vec::new();
    for (number, tokens) in [6, 2, 9, 4, 3, 3, 5, 1].into_iter().enumerate() {
        streams.push(begin(&engine, number, 6, tokens).await);
    }
    let first = gate.next().await;
    assert_eq!((joining(&first), first.rows()), (4, 4 * 6));
    let outcomes = futures_util::future::join_all(streams.into_iter().map(outcome));
    let (steps, outcomes) = tokio::join!(gate.open(&engine), outcomes);
    let rows: Vec<usize> = steps.iter().map(StepBatch::rows).collect();
    assert_eq!(rows, [4, 3, 3, 2, 2, 1, 1, 1, 4 * 6, 3, 3, 1, 1]);
    assert_eq!(joining(&steps[8]), 4);
    assert!(outcomes.iter().all(|outcome| outcome.end == Some(Ok(FinishReason::Length))));
    engine.stop();
}
