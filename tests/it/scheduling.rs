//! What is in each step, watched from a device that waits at its door for the test's word.

use crate::common::{all_home, engine_with, free_permits, greedy, outcome, prompt, within};
use mainstem::actors::kv::Held;
use mainstem::actors::{Engine, TokenStream};
use mainstem::model::executor::{Executor, ExecutorReport};
use mainstem::request::{FinishReason, RequestError, TokenEvent};
use mainstem_kernels::{DeviceError, SpanTable, StepBatch, StepOutput};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use tokio::sync::mpsc as tokio_mpsc;
use toml::Value;

/// A device that shows each step and waits for leave to run it. Without anybody at the gate it runs on.
struct Gated {
    inner: Box<dyn Executor>,
    entered: tokio_mpsc::UnboundedSender<StepBatch>,
    leave: mpsc::Receiver<()>,
}

impl Executor for Gated {
    fn run(&mut self, batch: &StepBatch, out: &mut StepOutput) -> Result<(), DeviceError> {
        let _ = self.entered.send(batch.clone());
        let _ = self.leave.recv();
        self.inner.run(batch, out)
    }

    fn report(&self) -> ExecutorReport {
        self.inner.report()
    }
}

/// The other side of the gate.
struct Gate {
    entered: tokio_mpsc::UnboundedReceiver<StepBatch>,
    leave: mpsc::Sender<()>,
}

impl Gate {
    /// The step that stands at the gate.
    async fn next(&mut self) -> StepBatch {
        within(self.entered.recv()).await.expect("the device is there")
    }

    fn pass(&self) {
        let _ = self.leave.send(());
    }

    /// Lets everything through from here on, and gives what passed meanwhile.
    async fn open(self, engine: &Engine) -> Vec<StepBatch> {
        let Gate { mut entered, leave } = self;
        drop(leave);
        all_home(engine, 4).await;
        let mut steps = Vec::new();
        while let Ok(step) = entered.try_recv() {
            steps.push(step);
        }
        steps
    }
}

async fn gated(settings: &[(&'static str, Value)]) -> (Engine, Gate) {
    let (entered_tx, entered) = tokio_mpsc::unbounded_channel();
    let (leave, leave_rx) = mpsc::channel();
    let mut door = Some((entered_tx, leave_rx));
    let engine = engine_with("gqa", settings, |mut factory| {
        Box::new(move || {
            let (entered, leave) = door.take().expect("this device is built once");
            Ok(Box::new(Gated { inner: factory()?, entered, leave }))
        })
    })
    .await;
    (engine, Gate { entered, leave })
}

async fn submit(engine: &Engine, number: usize, len: usize, max_tokens: u32) -> TokenStream {
    engine.intake.submit(greedy(&prompt(number, len), max_tokens)).await.expect("it is taken in")
}

/// Waits until `requests` requests hold their pages, whatever the device does meanwhile.
async fn ready(engine: &Engine, pages: usize) {
    within(async {
        while engine.actors.kv.send(Held).await.expect("kv answers").1 < pages {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[actix::test]
async fn who_arrives_during_a_step_is_in_the_next() {
    let (engine, mut gate) = gated(&[]).await;
    let first = submit(&engine, 0, 5, 20).await;
    assert_eq!(gate.next().await.rows(), 5);
    gate.pass();
    assert_eq!(gate.next().await.rows(), 1);
    // Inferflow's Figure 2: the step is at the gate when the second request comes.
    let second = submit(&engine, 1, 7, 3).await;
    ready(&engine, 2).await;
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
    let short = submit(&engine, 0, 4, 12).await;
    gate.next().await;
    gate.pass();
    gate.next().await;
    let long = submit(&engine, 1, 100, 2).await;
    ready(&engine, 1 + 4).await;
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

/// Different lengths on four slots: with the shuffle on the slots of each step are contiguous; with it off,
/// holes between them are computed; and a step after an end has fewer rows.
#[actix::test]
async fn slots_are_contiguous_or_their_holes_are_computed() {
    for shuffle in ["on", "off"] {
        let (engine, gate) = gated(&[("scheduler.shuffle", shuffle.into())]).await;
        let mut streams = Vec::new();
        for (number, tokens) in [14, 3, 9, 5, 4, 11, 2, 8].into_iter().enumerate() {
            streams.push(submit(&engine, number, 3 + number, tokens).await);
        }
        let outcomes = futures_util::future::join_all(streams.into_iter().map(outcome));
        let (steps, _) = tokio::join!(gate.open(&engine), outcomes);
        let mut moves = 0;
        let mut holes = 0;
        for step in &steps {
            let slots: BTreeSet<u32> = step.spans.iter().map(|span| span.slot).collect();
            assert_eq!(slots.len(), step.spans.len(), "one span for each slot");
            let (low, high) = (slots.first().unwrap(), slots.last().unwrap());
            assert_eq!((high - low + 1) as usize, slots.len(), "shuffle {shuffle}: {slots:?}");
            moves += step.moves.len();
            holes += step.spans.iter().filter(|span| span.table == SpanTable::Sink).count();
        }
        assert_eq!((moves > 0, holes > 0), (shuffle == "on", shuffle == "off"));
        assert_eq!(steps.last().unwrap().rows(), 1, "the longest ends alone");
        engine.stop();
    }
}

#[actix::test]
async fn a_client_that_leaves_during_its_prompt_costs_one_more_step_at_most() {
    let (engine, mut gate) = gated(&[("scheduler.token_budget", 8.into())]).await;
    let stream = submit(&engine, 0, 100, 5).await;
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
        running.push(submit(&engine, number, 3, 4).await);
    }
    assert_eq!(free_permits(&engine.actors.intake).await, 0);
    let waiting = submit(&engine, 4, 3, 4).await;
    let leaving = submit(&engine, 5, 3, 4).await;
    let refused = engine.intake.submit(greedy(&prompt(6, 3), 4)).await.map(drop);
    assert_eq!(refused, Err(RequestError::Busy { waiting: 2, limit: 2 }));
    drop(leaving);
    let replacing = submit(&engine, 6, 3, 4).await;
    running.extend([waiting, replacing]);
    let outcomes = futures_util::future::join_all(running.into_iter().map(outcome));
    let (_, outcomes) = tokio::join!(gate.open(&engine), outcomes);
    assert!(outcomes.iter().all(|outcome| outcome.end == Some(Ok(FinishReason::Length))));
    engine.stop();
}

#[actix::test]
async fn draining_refuses_what_comes_and_finishes_what_runs() {
    let (engine, mut gate) = gated(&[]).await;
    let mut running = submit(&engine, 0, 3, 6).await;
    gate.next().await;
    engine.status.draining.store(true, Ordering::Relaxed);
    let refused = engine.intake.submit(greedy(&prompt(1, 3), 4)).await.map(drop);
    assert_eq!(refused, Err(RequestError::Draining));
    gate.pass();
    assert!(matches!(within(running.next()).await, Some(TokenEvent::Token(_))));
    let (_, rest) = tokio::join!(gate.open(&engine), outcome(running));
    assert_eq!((rest.tokens.len(), rest.end), (5, Some(Ok(FinishReason::Length))));
    engine.stop();
}

#[actix::test]
async fn what_can_never_fit_is_refused_with_its_numbers() {
    let (engine, _gate) = gated(&[("kv.size", "64 tokens".into())]).await;
    let submit = async |prompt: &[u32], max_tokens| {
        engine.intake.submit(greedy(prompt, max_tokens)).await.map(drop).expect_err("it cannot be served")
    };
    let context = engine.model.context;
    let too_long = RequestError::TooLong { prompt_tokens: 100, max_tokens: context, context };
    assert_eq!(submit(&prompt(0, 100), context as u32).await, too_long);
    assert_eq!(submit(&prompt(0, 40), 25).await, RequestError::TooLarge { needed: 3, pages: 2 });
    let stranger = submit(&[5, engine.model.vocab as u32], 4).await;
    assert!(matches!(&stranger, RequestError::Invalid { param: "prompt", .. }), "{stranger:?}");
    assert!(matches!(submit(&[], 4).await, RequestError::Invalid { param: "prompt", .. }));
    let mut bad = greedy(&[5], 4);
    bad.sampling.top_p = 0.0;
    let refused = engine.intake.submit(bad).await.map(drop);
    assert!(matches!(refused, Err(RequestError::Invalid { param: "top_p", .. })));
    engine.stop();
}
