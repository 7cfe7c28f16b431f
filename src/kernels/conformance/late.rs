//! Tests of sampling with inputs of the host: draws, inputs that do not come, and aborts.

use super::Bounds;
use super::inputs::*;
use super::rig::*;
use super::spans::*;
use mainstem_kernels::backend::{Backend, SamplingInputs};
use mainstem_kernels::batch::{RowFailure, SampleMode, SamplingParams, SpanOutput, StepOutput};
use mainstem_kernels::collective::Aborted;
use mainstem_kernels::late::LateInputs;
use mainstem_kernels::reference::logprobs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

const GREEDY: SamplingParams = SamplingParams { logprob: true, top_logprobs: 2, ..SamplingParams::GREEDY };
const MASKED: SamplingParams = SamplingParams { masked: true, ..GREEDY };
const HOST: SamplingParams = SamplingParams { mode: SampleMode::Host, ..GREEDY };

/// Time after which a wait counts as endless.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns a span of a slot's last token, whatever its sequence.
fn last(slot: u32) -> TestSpan {
    TestSpan { sequence: 0, ..TestSpan::last(slot, 1) }
}

/// Runs a step of one row per slot, which has sampled token 20 + slot before, and samples its rows in two
/// blocks.
fn run_step<B: Backend>(
    rig: &mut Rig<B>,
    spans: &[TestSpan],
    params: &[SamplingParams],
    logits: &[f32],
    late: &Arc<LateInputs>,
) -> StepOutput {
    let before: Vec<u32> = (0..spans.len() as u32).map(|slot| 20 + slot).collect();
    let given = |span: &TestSpan| TestSpan { sequence: 0, ..TestSpan::given(span.slot, 0, 1) };
    let rows: Vec<TestSpan> = spans.iter().map(given).collect();
    rig.sample_tokens(&rows, &before, &vec![SamplingParams::GREEDY; before.len()], &[]);
    let mut batch = build_batch(spans, SpanOutput::All, &mut PageBook::scattered(32));
    batch.sampling = params.to_vec();
    rig.begin(batch);
    let mut out = StepOutput::with_capacity(&rig.limits);
    let inputs = SamplingInputs { late: Some(late), ..SamplingInputs::default() };
    for block in [0..1, 1..spans.len()] {
        let vocab = rig.limits.vocab;
        let buf = rig.input(&logits[block.start * vocab..block.end * vocab]);
        rig.backend.sample(block, &buf, inputs, &mut out);
    }
    out
}

/// Runs `work`, and aborts the inputs if it does not end.
fn with_patience<T>(late: &Arc<LateInputs>, work: impl FnOnce() -> T) -> T {
    let (running, ended) = mpsc::channel::<()>();
    let watched = late.clone();
    thread::scope(|scope| {
        scope.spawn(move || {
            if ended.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
                watched.abort();
            }
        });
        // Dropped at the end, also by a panic.
        let _running = running;
        work()
    })
}

/// Tests that the host draws from the raw logits of its rows; that its tokens become the last ones of their
/// slots and have log-probabilities; and that all logits of a block are handed over before anything is waited
/// for: the draw of its last row supplies the mask of its first.
pub fn host_draws<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let mut rig = Rig::new(make(), limits(32));
    let vocab = rig.limits.vocab;
    let spans = [0, 1, 2, 3, 4].map(|slot| if slot == 2 { TestSpan::hole(2) } else { last(slot) });
    let params = [HOST, MASKED, HOST, GREEDY, HOST];
    let logits = scaled(900, spans.len() * vocab, 4.0);
    let late = Arc::new(LateInputs::default());
    let mut allows_42 = vec![0; vocab.div_ceil(32)];
    allows_42[42 / 32] |= 1 << (42 % 32);
    let mut mask = Some((late.mask_sender(1), allows_42));
    let (handed_over, received) = mpsc::channel();
    for (row, token) in [(0, 7), (2, 8), (4, 9)] {
        let handed_over = handed_over.clone();
        let mask = mask.take_if(|_| row == 4);
        late.draw_with(row, move |given, sender| {
            handed_over.send((row, given.logits.to_vec())).expect("the test receives it");
            sender.send(token);
            mask.into_iter().for_each(|(sender, mask)| sender.send(mask.into()));
        });
    }
    let out = with_patience(&late, || run_step(&mut rig, &spans, &params, &logits, &late));
    for (row, got) in received.try_iter() {
        assert_same(format_args!("logits of row {row}"), &got, &logits[row * vocab..][..vocab], 0.0);
    }
    let tokens: Vec<u32> = out.tokens.iter().map(|row| row.token).collect();
    assert_eq!((tokens[..3].to_vec(), tokens[4]), (vec![7, 42, 8], 9), "tokens of the host");
    for (row, result) in out.tokens.iter().enumerate() {
        let logits = &logits[row * vocab..][..vocab];
        let expected = logprobs(logits, 2);
        let want = expected.logprob(logits[result.token as usize]);
        let allowed = bounds.elementwise * (2.0 * want.abs() + 10.0);
        assert!((result.logprob - want).abs() <= allowed, "row {row}: {} is not {want}", result.logprob);
        let ids = |top: &[(u32, f32)]| top.iter().map(|top| top.0).collect::<Vec<_>>();
        assert_eq!(ids(out.top_logprobs_of(result)), ids(&expected.top), "row {row}: most likely tokens");
    }
    assert_eq!(rig.last_tokens(&[0, 1, 2, 3, 4]), [7, 42, 22, tokens[3], 9], "last tokens");
}

/// Tests that rows fail whose input does not come or is invalid, and no others.
pub fn lost_late_inputs<B: Backend>(make: &impl Fn() -> B) {
    let mut rig = Rig::new(make(), limits(32));
    let vocab = rig.limits.vocab;
    let spans = [0, 1, 2, 3, 4, 5, 6, 7].map(last);
    let params = [MASKED, HOST, GREEDY, MASKED, HOST, HOST, MASKED, MASKED];
    let late = Arc::new(LateInputs::default());
    drop(late.mask_sender(0));
    late.draw_with(1, |_, sender| drop(sender));
    // Rows 3 and 4 are not registered.
    late.draw_with(5, move |_, sender| sender.send(vocab as u32));
    late.mask_sender(6).send(vec![u32::MAX; vocab.div_ceil(32) + 1].into());
    late.mask_sender(7).send(vec![u32::MAX; vocab.div_ceil(32)].into());
    let logits: Vec<f32> = (40..48).flat_map(|token| one_hot(token, vocab)).collect();
    let out = with_patience(&late, || run_step(&mut rig, &spans, &params, &logits, &late));
    for (row, result) in out.tokens.iter().enumerate() {
        if [2, 7].contains(&row) {
            assert_eq!((result.token, result.failure), (40 + row as u32, None), "row {row}");
            assert!(result.logprob.is_finite() && result.top_len == 2, "row {row}: {result:?}");
        } else {
            assert_eq!((result.token, result.failure), (0, Some(RowFailure::NoLateInput)), "row {row}");
            assert!(result.logprob.is_nan() && result.top_len == 0, "row {row}: {result:?}");
        }
    }
    assert_eq!(out.top_logprobs.len(), 4, "most likely tokens of the rows that did not fail");
    let last = rig.last_tokens(&[0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(last, [20, 21, 42, 23, 24, 25, 26, 47], "a row that failed leaves the last token unchanged");
}

/// Tests that an abort ends a wait for a mask and for a token, before and after it began.
pub fn late_abort<B: Backend>(make: &impl Fn() -> B) {
    for (params, is_early) in [(MASKED, false), (HOST, false), (MASKED, true), (HOST, true)] {
        let mut rig = Rig::new(make(), limits(32));
        let logits = scaled(901, 2 * rig.limits.vocab, 4.0);
        let late = Arc::new(LateInputs::default());
        let mask = (params == MASKED).then(|| late.mask_sender(1));
        let ((keep, kept), (begun, begins)) = (mpsc::channel(), mpsc::channel());
        // This draw is the last thing before the device waits.
        late.draw_with(0, move |_, sender| {
            sender.send(3);
            let _ = begun.send(());
        });
        if params == HOST {
            late.draw_with(1, move |_, sender| keep.send(sender).expect("it is kept"));
        }
        let spans = [0, 1].map(last);
        let payload = thread::scope(|scope| {
            let aborted = late.clone();
            if is_early {
                aborted.abort();
            }
            scope.spawn(move || {
                let _ = begins.recv_timeout(PATIENCE);
                aborted.abort();
            });
            catch_unwind(AssertUnwindSafe(|| run_step(&mut rig, &spans, &[HOST, params], &logits, &late)))
        });
        let payload = payload.expect_err("the step does not end");
        assert!(payload.is::<Aborted>(), "{params:?}");
        drop((mask, kept));
    }
}
