//! Metrics of a decode loop: cached handles, so that recording is cheap for steps of microseconds, and a
//! clock of a step's phases.
//!
//! Each lane has its own. Invariant: on the control thread, no time is counted in two phases of a lane's
//! steps.

use super::live::LiveLane;
use crate::decoding::speculation::MAX_DEPTH;
use crate::model::offload::{ByStream, Stream, Tier, TransferTotals, Transfers};
use crate::request::Class;
use crate::telemetry;
use mainstem_kernels::batch::StepTimes;
use metrics::{Counter, Histogram};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Metric handles and phase clock of one decode loop.
pub struct LoopMetrics {
    /// When the current phase began.
    phase_start: Instant,
    /// Whether the device has had no work since the last step that completed.
    was_idle: bool,
    /// Time spent sending events since the last step completed.
    delivery_time: Duration,
    plan: Histogram,
    forward: Histogram,
    sample: Histogram,
    deliver: Histogram,
    gap: Histogram,
    step_seconds: Histogram,
    step_rows: Histogram,
    step_slots: Histogram,
    step_tokens: Histogram,
    moves: Counter,
    shuffles: Counter,
    wasted_rows: Counter,
    not_finite: Counter,
    prompts: Counter,
    generated: Counter,
    /// By class.
    queue: [Histogram; Class::ALL.len()],
    prefill: Histogram,
    decode: Histogram,
    inference: Histogram,
    per_token: Histogram,
    drafts: Counter,
    draft_tokens: Counter,
    accepted_tokens: Counter,
    /// Accepted drafts by their position in the step.
    accepted_at: [Counter; MAX_DEPTH],
    offload: OffloadMetrics,
    /// The view of the lane for those who watch.
    live: Arc<LiveLane>,
}

/// Metrics of what is read from disk and written to it.
struct OffloadMetrics {
    transfers: Arc<Transfers>,
    bytes: ByStream<Counter>,
    stalls: [Histogram; Stream::ALL.len()],
    ready: Counter,
    late: Counter,
    buffers: Histogram,
    expert_hits: Counter,
    expert_misses: Counter,
}

impl OffloadMetrics {
    fn new(transfers: Arc<Transfers>) -> OffloadMetrics {
        let layers = |state| telemetry::OFFLOAD_LAYERS.counter_with([state]);
        let experts = |result| telemetry::OFFLOAD_EXPERTS.counter_with([result]);
        OffloadMetrics {
            transfers,
            bytes: Stream::ALL.map(|stream| {
                Tier::BELOW.map(|tier| telemetry::OFFLOAD_BYTES.counter_with([stream.name(), tier.name()]))
            }),
            stalls: Stream::ALL.map(|stream| telemetry::OFFLOAD_STALLS.histogram_with([stream.name()])),
            ready: layers("ready"),
            late: layers("late"),
            buffers: telemetry::OFFLOAD_BUFFERS.histogram(),
            expert_hits: experts("hit"),
            expert_misses: experts("miss"),
        }
    }

    /// Records what was moved since the step before, of whichever lane.
    fn record(&self) {
        let new = self.transfers.take_new();
        if new == TransferTotals::default() {
            return;
        }
        let bytes = self.bytes.iter().flatten().zip(new.bytes.into_iter().flatten());
        bytes.for_each(|(counter, bytes)| counter.increment(bytes));
        self.stalls.iter().zip(new.stalls).for_each(|(stalls, time)| stalls.record(time.as_secs_f64()));
        self.ready.increment(new.ready);
        self.late.increment(new.late);
        if let Some(occupancy) = new.occupancy() {
            self.buffers.record(occupancy);
        }
        self.expert_hits.increment(new.expert_hits);
        self.expert_misses.increment(new.expert_misses);
    }
}

/// The positions of drafts in a step, as labels.
const POSITIONS: [&str; MAX_DEPTH] =
    ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15"];

/// The size of a step.
#[derive(Clone, Copy, Debug)]
pub struct StepSize {
    pub rows: usize,
    /// Rows of holes, whose results are discarded.
    pub holes: usize,
    /// Sequences in the step.
    pub slots: usize,
}

/// Times in a sequence's life that its metrics are computed from.
#[derive(Clone, Copy, Debug)]
pub struct SequenceTimes {
    /// When its first chunk was scheduled.
    pub scheduled: Instant,
    /// When its first token was generated; equals `scheduled` until then.
    pub first_token: Instant,
}

impl LoopMetrics {
    /// Creates the handles and starts the clock. `transfers` are what devices move between memory and disk;
    /// `live` counts for watchers, too.
    pub fn new(transfers: Arc<Transfers>, live: Arc<LiveLane>) -> LoopMetrics {
        let phase = |name| telemetry::STEP_PHASES.histogram_with([name]);
        LoopMetrics {
            phase_start: Instant::now(),
            was_idle: true,
            delivery_time: Duration::ZERO,
            plan: phase("plan"),
            forward: phase("forward"),
            sample: phase("sample"),
            deliver: phase("deliver"),
            gap: phase("gap"),
            step_seconds: telemetry::STEP_SECONDS.histogram(),
            step_rows: telemetry::STEP_ROWS.histogram(),
            step_slots: telemetry::STEP_SLOTS.histogram(),
            step_tokens: telemetry::ITERATION_TOKENS.histogram(),
            moves: telemetry::SLOT_MOVES.counter(),
            shuffles: telemetry::SLOT_SHUFFLES.counter(),
            wasted_rows: telemetry::WASTED_ROWS.counter(),
            not_finite: telemetry::NOT_FINITE.counter(),
            prompts: telemetry::PROMPT_TOKENS.counter(),
            generated: telemetry::GENERATION_TOKENS.counter(),
            queue: Class::ALL.map(|class| telemetry::QUEUE_TIME.histogram_with([class.name()])),
            prefill: telemetry::PREFILL_TIME.histogram(),
            decode: telemetry::DECODE_TIME.histogram(),
            inference: telemetry::INFERENCE_TIME.histogram(),
            per_token: telemetry::TIME_PER_OUTPUT_TOKEN.histogram(),
            drafts: telemetry::SPEC_DECODE_DRAFTS.counter(),
            draft_tokens: telemetry::SPEC_DECODE_DRAFT_TOKENS.counter(),
            accepted_tokens: telemetry::SPEC_DECODE_ACCEPTED_TOKENS.counter(),
            accepted_at: POSITIONS
                .map(|position| telemetry::SPEC_DECODE_ACCEPTED_TOKENS_PER_POS.counter_with([position])),
            offload: OffloadMetrics::new(transfers),
            live,
        }
    }

    /// Restarts the clock: the time before was spent waiting for work and belongs to no step.
    pub fn restart_clock(&mut self) {
        self.was_idle = true;
        self.resume_clock();
    }

    /// Begins the planning phase while a step runs: the time before was spent waiting for the device.
    pub fn resume_clock(&mut self) {
        self.phase_start = Instant::now();
    }

    /// Ends the planning phase: the step was sent. Returns the time.
    pub fn record_sent(&mut self) -> Instant {
        let plan = self.lap();
        self.plan.record(plan.as_secs_f64());
        self.phase_start
    }

    /// Ends a delivery phase: the events of the previous step were sent while this one runs.
    pub fn record_delivery(&mut self) {
        let delivering = self.lap();
        self.delivery_time += delivering;
    }

    /// Records a completed step that the device could begin at `began`, `gap` after its previous one. Returns
    /// the time.
    pub fn record_completed(
        &mut self,
        began: Instant,
        times: StepTimes,
        size: StepSize,
        gap: Option<Duration>,
    ) -> Instant {
        self.lap();
        // After an idle period, the gap contains the time without work.
        if !std::mem::take(&mut self.was_idle)
            && let Some(gap) = gap
        {
            self.gap.record(gap.as_secs_f64());
        }
        let time = self.phase_start - began;
        self.step_seconds.record(time.as_secs_f64());
        self.live.count_step(time);
        self.forward.record(times.forward.as_secs_f64());
        self.sample.record(times.sample.as_secs_f64());
        self.offload.record();
        self.step_rows.record(size.rows as f64);
        self.step_slots.record(size.slots as f64);
        self.step_tokens.record((size.rows - size.holes) as f64);
        self.phase_start
    }

    /// Counts the `drafts` drafts of a sequence that a step verifies.
    pub fn record_drafts(&self, drafts: usize) {
        self.drafts.increment(1);
        self.draft_tokens.increment(drafts as u64);
    }

    /// Counts an accepted draft, by its position among those of the step.
    pub fn record_accepted(&self, position: u32) {
        self.accepted_tokens.increment(1);
        self.accepted_at[position as usize % MAX_DEPTH].increment(1);
    }

    /// Ends the delivery phase: the results of the step were processed.
    pub fn record_processed(&mut self) {
        let settling = self.lap();
        let delivering = std::mem::take(&mut self.delivery_time);
        self.deliver.record((delivering + settling).as_secs_f64());
    }

    /// Records a shuffle of `moves` moves, if there are any.
    pub fn record_moves(&self, moves: usize) {
        if moves > 0 {
            self.shuffles.increment(1);
            self.moves.increment(moves as u64);
            self.live.count_moves(moves);
        }
    }

    /// Counts an output row whose sequence had ended when its step ran.
    pub fn count_wasted_row(&self) {
        self.wasted_rows.increment(1);
    }

    /// Counts an output of the model that is not finite.
    pub fn count_not_finite(&self) {
        self.not_finite.increment(1);
    }

    /// Records that the first chunk of a request of a class that arrived at `arrived` was scheduled.
    pub fn record_scheduled(&self, class: Class, arrived: Instant) -> SequenceTimes {
        let now = Instant::now();
        self.queue[class as usize].record((now - arrived).as_secs_f64());
        SequenceTimes { scheduled: now, first_token: now }
    }

    /// Counts a generated token that is sent to a client.
    pub fn count_generated(&self) {
        self.generated.increment(1);
        self.live.count_generated();
    }

    /// Records a sequence's first token, or its only output, produced at `now`, and its `prompt_tokens` input
    /// tokens; once, although a preempted beam search begins anew.
    pub fn record_first_output(&self, moments: &mut SequenceTimes, prompt_tokens: usize, now: Instant) {
        if moments.first_token > moments.scheduled {
            return;
        }
        moments.first_token = now;
        self.prompts.increment(prompt_tokens as u64);
        self.prefill.record((now - moments.scheduled).as_secs_f64());
    }

    /// Records the end of a sequence with `generated` tokens, the last of them produced at `now`.
    pub fn record_finished(&self, moments: SequenceTimes, generated: u32, now: Instant) {
        let decode = (now - moments.first_token).as_secs_f64();
        self.inference.record((now - moments.scheduled).as_secs_f64());
        if generated > 0 {
            self.decode.record(decode);
        }
        if generated > 1 {
            self.per_token.record(decode / f64::from(generated - 1));
        }
    }

    /// Returns the time since the current phase began, and starts the next phase.
    fn lap(&mut self) -> Duration {
        let now = Instant::now();
        now - std::mem::replace(&mut self.phase_start, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of one series in a rendered recorder.
    fn value(text: &str, series: &str) -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {series} in {text}")).parse().expect("it is a number")
    }

    #[test]
    fn phases_of_the_control_thread_do_not_overlap_and_exclude_waiting() {
        let recorder = telemetry::recorder(None);
        let handle = recorder.handle();
        let began = Instant::now();
        let waited = metrics::with_local_recorder(&recorder, || {
            let mut meters = LoopMetrics::new(Arc::default(), Arc::default());
            // As if the loop had waited for work for an hour.
            meters.phase_start -= Duration::from_secs(3600);
            meters.restart_clock();
            let times = StepTimes {
                forward: Duration::from_secs(2),
                sample: Duration::from_secs(1),
                draft: Duration::ZERO,
            };
            let sent = meters.record_sent();
            meters.record_delivery();
            // As if the device had taken an hour.
            meters.phase_start -= Duration::from_secs(3600);
            let size = StepSize { rows: 9, holes: 2, slots: 5 };
            let ran = meters.record_completed(sent, times, size, Some(Duration::from_secs(3600)));
            meters.record_processed();
            ran - sent
        });
        let all = began.elapsed().as_secs_f64();
        let text = handle.render();
        let phase = |name: &str, part: &str| {
            value(&text, &format!("mainstem_step_phase_seconds_{part}{{phase=\"{name}\"}}"))
        };
        for name in ["plan", "forward", "sample", "deliver"] {
            assert_eq!(phase(name, "count"), 1.0, "{name}");
        }
        assert!(
            phase("plan", "sum") + phase("deliver", "sum") + waited.as_secs_f64() <= all + 1e-9,
            "{text}"
        );
        assert_eq!((phase("forward", "sum"), phase("sample", "sum")), (2.0, 1.0));
        let sizes = ["rows", "slots"].map(|name| value(&text, &format!("mainstem_step_{name}_sum")));
        assert_eq!((sizes, value(&text, "mainstem_iteration_tokens_sum")), ([9.0, 5.0], 7.0));
    }

    #[test]
    fn gaps_of_idle_periods_are_not_recorded() {
        let recorder = telemetry::recorder(None);
        let handle = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            let mut meters = LoopMetrics::new(Arc::default(), Arc::default());
            let mut complete = |restart, seconds: Option<u64>| {
                if restart {
                    meters.restart_clock();
                }
                let (sent, size) = (meters.record_sent(), StepSize { rows: 1, holes: 0, slots: 1 });
                let gap = seconds.map(Duration::from_secs);
                meters.record_completed(sent, StepTimes::default(), size, gap);
            };
            for (restart, gap) in [(false, None), (false, Some(2)), (true, Some(900)), (false, Some(3))] {
                complete(restart, gap);
            }
        });
        let text = handle.render();
        let gap = |part| value(&text, &format!("mainstem_step_phase_seconds_{part}{{phase=\"gap\"}}"));
        assert_eq!((gap("count"), gap("sum")), (2.0, 5.0));
    }

    #[test]
    fn request_times_add_up() {
        let recorder = telemetry::recorder(None);
        let handle = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            let meters = LoopMetrics::new(Arc::default(), Arc::default());
            let scheduled = Instant::now();
            let at = |seconds| scheduled + Duration::from_secs(seconds);
            for (generated, last) in [(5, 11), (1, 3), (0, 3)] {
                let mut moments = SequenceTimes { scheduled, first_token: scheduled };
                meters.record_first_output(&mut moments, 5, at(3));
                // As if it began anew.
                meters.record_first_output(&mut moments, 5, at(4));
                meters.record_finished(moments, generated, at(last));
            }
            for moves in [0, 3, 0, 1] {
                meters.record_moves(moves);
            }
        });
        let text = handle.render();
        let sum = |time: &str| value(&text, &format!("mainstem_request_{time}_seconds_sum"));
        let sums = ["prefill_time", "decode_time", "inference_time", "time_per_output_token"].map(sum);
        assert_eq!(sums, [9.0, 8.0, 17.0, 2.0]);
        assert_eq!(value(&text, "mainstem_prompt_tokens_total"), 15.0);
        assert_eq!(
            value(&text, "mainstem_request_decode_time_seconds_count"),
            2.0,
            "an embedding has no decode time"
        );
        assert_eq!(value(&text, "mainstem_request_time_per_output_token_seconds_count"), 1.0);
        let shuffles =
            [value(&text, "mainstem_slot_shuffles_total"), value(&text, "mainstem_slot_moves_total")];
        assert_eq!(shuffles, [2.0, 4.0]);
    }
}
