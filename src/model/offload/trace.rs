//! The times of reads, writes and computations, recorded for a timeline of the last step.
//!
//! Invariant: recording allocates nothing. Rows and names are added while devices are built, and when the
//! memory for spans is used up, the oldest spans are overwritten.

use mainstem_kernels::SpanStack;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Number of spans that are kept.
const SPANS: usize = 1 << 16;

/// The kind of work that a row of a timeline shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// The layers of a device.
    Compute,
    /// Weights that a thread reads.
    LoadWeights,
    /// Pages of KV caches that a thread reads.
    LoadCache,
    /// Pages of KV caches that a thread writes.
    StoreCache,
}

/// The recorded work of a model's devices, and of the threads that read and write for them.
#[derive(Debug)]
pub struct Trace {
    origin: Instant,
    state: Mutex<TraceState>,
}

#[derive(Debug)]
struct TraceState {
    /// Each row with its name.
    rows: Vec<(Activity, String)>,
    /// Names of spans.
    names: Vec<String>,
    /// The newest spans, in any order.
    spans: Vec<Span>,
    /// Number of spans so far.
    count: usize,
    /// For each row the last step of the device that it belongs to, if it computes.
    steps: Vec<Option<[Duration; 2]>>,
}

/// A piece of work.
#[derive(Clone, Copy, Debug)]
struct Span {
    row: usize,
    name: usize,
    /// Its beginning and end, since the trace began.
    times: [Duration; 2],
}

/// The work of the last step.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// Duration of the step, in seconds.
    pub seconds: f64,
    pub rows: Vec<TimelineRow>,
}

/// The work of one device or thread.
#[derive(Clone, Debug, PartialEq)]
pub struct TimelineRow {
    pub activity: Activity,
    pub name: String,
    /// In the order of their beginnings.
    pub spans: Vec<TimelineSpan>,
}

/// A piece of work in a timeline.
#[derive(Clone, Debug, PartialEq)]
pub struct TimelineSpan {
    /// Name of the matrix or layer.
    pub name: String,
    /// Beginning and end in seconds since the beginning of the step, which they may exceed on both sides.
    pub times: [f64; 2],
}

impl Trace {
    /// Creates an empty trace, with memory for all spans.
    pub(super) fn new() -> Trace {
        let state = TraceState {
            rows: Vec::new(),
            names: Vec::new(),
            spans: Vec::with_capacity(SPANS),
            count: 0,
            steps: Vec::new(),
        };
        Trace { origin: Instant::now(), state: Mutex::new(state) }
    }

    /// Adds a row, and returns its number.
    pub(super) fn add_row(&self, activity: Activity, name: String) -> usize {
        let mut state = self.lock();
        state.rows.push((activity, name));
        state.steps.push(None);
        state.rows.len() - 1
    }

    /// Adds names of spans, and returns the number of the first one. The others follow.
    pub(super) fn add_names(&self, names: impl Iterator<Item = String>) -> usize {
        let mut state = self.lock();
        let first = state.names.len();
        state.names.extend(names);
        first
    }

    /// Records a span of a row that began at `began` and ends now.
    pub(super) fn record(&self, row: usize, name: usize, began: Instant) {
        let span = Span { row, name, times: self.since(began) };
        let mut state = self.lock();
        let at = state.count % SPANS;
        match state.spans.get_mut(at) {
            Some(oldest) => *oldest = span,
            None => state.spans.push(span),
        }
        state.count += 1;
    }

    /// Returns the times of what began at `began` and ends now.
    fn since(&self, began: Instant) -> [Duration; 2] {
        [began.saturating_duration_since(self.origin), self.origin.elapsed()]
    }

    /// Returns the last step of all devices; `None` before the first one ends.
    pub fn last_step(&self) -> Option<Timeline> {
        let state = self.lock();
        let steps = || state.steps.iter().flatten();
        let began = steps().map(|[began, _]| *began).min()?;
        let ended = steps().map(|[_, ended]| *ended).max()?;
        let seconds = |time: Duration| time.as_secs_f64() - began.as_secs_f64();
        let rows = state.rows.iter().enumerate().map(|(row, (activity, name))| {
            let is_shown = |span: &&Span| span.row == row && span.times[0] < ended && span.times[1] > began;
            let shown = |span: &Span| TimelineSpan {
                name: state.names[span.name].clone(),
                times: span.times.map(seconds),
            };
            let mut spans: Vec<_> = state.spans.iter().filter(is_shown).map(shown).collect();
            spans.sort_by(|a, b| a.times[0].total_cmp(&b.times[0]));
            TimelineRow { activity: *activity, name: name.clone(), spans }
        });
        Some(Timeline { seconds: seconds(ended), rows: rows.collect() })
    }

    fn lock(&self) -> MutexGuard<'_, TraceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Records the steps of a device and the computation of their layers.
#[derive(Debug)]
pub struct StepTrace {
    trace: Arc<Trace>,
    row: usize,
    /// Numbers of the names of the first layers of encoder and decoder.
    layers: [usize; 2],
}

impl StepTrace {
    /// Creates the record of a device with these layers of the encoder and of the decoder.
    pub fn start(trace: &Arc<Trace>, encoder: &Range<usize>, decoder: &Range<usize>) -> StepTrace {
        // The thread of a device has its name.
        let device = std::thread::current().name().unwrap_or("device").to_owned();
        let row = trace.add_row(Activity::Compute, device);
        let layers = [
            trace.add_names(encoder.clone().map(|layer| format!("encoder layer {layer}"))),
            trace.add_names(decoder.clone().map(|layer| format!("layer {layer}"))),
        ];
        StepTrace { trace: trace.clone(), row, layers }
    }

    /// Records that a layer of a stack, by its index on the device, has been computed since `began`.
    pub fn end_layer(&self, stack: SpanStack, layer: usize, began: Instant) {
        let first = self.layers[usize::from(stack == SpanStack::Decoder)];
        self.trace.record(self.row, first + layer, began);
    }

    /// Records that a step has been computed since `began`.
    pub fn end_step(&self, began: Instant) {
        let times = self.trace.since(began);
        self.trace.lock().steps[self.row] = Some(times);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeline_has_what_ran_during_the_last_step() {
        let trace = Arc::new(Trace::new());
        let device = StepTrace::start(&trace, &(0..1), &(3..5));
        let reader = trace.add_row(Activity::LoadWeights, "weights-0".into());
        let matrices = trace.add_names(["a".to_owned(), "b".to_owned()].into_iter());
        assert_eq!(trace.last_step(), None);
        trace.record(reader, matrices, Instant::now());
        let across = Instant::now();
        let step = || {
            let began = Instant::now();
            let layers = [(SpanStack::Encoder, 0), (SpanStack::Decoder, 0), (SpanStack::Decoder, 1)];
            layers.into_iter().for_each(|(stack, layer)| device.end_layer(stack, layer, Instant::now()));
            began
        };
        device.end_step(step());
        let last = step();
        trace.record(reader, matrices + 1, across);
        device.end_step(last);
        trace.record(reader, matrices, Instant::now());
        let Timeline { seconds, rows } = trace.last_step().unwrap();
        let names = |row: &TimelineRow| row.spans.iter().map(|span| span.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&rows[0]), ["encoder layer 0", "layer 3", "layer 4"]);
        assert_eq!(names(&rows[1]), ["b"], "others were before or after the step");
        let [began, ended] = rows[1].spans[0].times;
        assert!(began < 0.0 && ended > 0.0 && ended <= seconds, "{rows:?}");
    }

    /// The newest spans stay.
    #[test]
    fn a_full_trace_does_not_grow() {
        let trace = Arc::new(Trace::new());
        let device = StepTrace::start(&trace, &(0..0), &(0..2));
        let began = Instant::now();
        (0..SPANS).for_each(|_| device.end_layer(SpanStack::Decoder, 0, began));
        let sizes = || {
            let spans = &trace.lock().spans;
            (spans.len(), spans.capacity())
        };
        let (len, capacity) = sizes();
        assert_eq!(len, SPANS);
        (0..3).for_each(|_| device.end_layer(SpanStack::Decoder, 1, began));
        device.end_step(began);
        assert_eq!(sizes(), (SPANS, capacity));
        let rows = trace.last_step().unwrap().rows;
        assert_eq!(rows[0].spans.iter().filter(|span| span.name == "layer 1").count(), 3);
    }
}
