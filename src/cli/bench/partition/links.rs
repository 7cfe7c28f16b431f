//! Slow links: adds the time of a link to all communication between devices.
//!
//! Invariant: the data is unchanged, only later.

use crate::actors::device::ExecutorFactory;
use crate::model::executor::{Executor, ExecutorReport};
use crate::model::fake::wait_until;
use crate::planner::Link;
use mainstem_kernels::{
    Abort, Aborted, ActivationHandoff, Collective, DeviceError, HandoffPorts, StepBatch, StepOutput,
};
use std::time::{Duration, Instant};

/// Wraps factories so that their devices communicate over `link`.
pub fn slow_links(factories: Vec<Vec<ExecutorFactory>>, link: Link) -> Vec<Vec<ExecutorFactory>> {
    let ranks: Vec<usize> = factories.iter().map(Vec::len).collect();
    let of_stage = |(stage, factories): (usize, Vec<ExecutorFactory>)| {
        let next = ranks.get(stage + 1).copied().unwrap_or(0);
        factories.into_iter().map(|factory| slow_factory(factory, link, next)).collect()
    };
    factories.into_iter().enumerate().map(of_stage).collect()
}

fn slow_factory(mut factory: ExecutorFactory, link: Link, next: usize) -> ExecutorFactory {
    Box::new(move |stage| {
        let stage = Box::new(SlowCollective { stage, link });
        Ok(Box::new(SlowExecutor { inner: factory(stage)?, link, next }))
    })
}

/// Waits for the time of `messages` messages of `bytes` bytes, one after another.
fn wait_for_messages(link: Link, messages: usize, bytes: usize) {
    let seconds = messages as f64 * link.seconds(bytes as f64);
    wait_until(Instant::now() + Duration::from_secs_f64(seconds));
}

/// A collective with slow links. Each rank receives a message from every other rank.
struct SlowCollective {
    stage: Box<dyn Collective>,
    link: Link,
}

impl Collective for SlowCollective {
    fn rank(&self) -> usize {
        self.stage.rank()
    }

    fn rank_count(&self) -> usize {
        self.stage.rank_count()
    }

    fn all_reduce(&mut self, x: &mut [f32]) -> Result<(), Aborted> {
        wait_for_messages(self.link, self.rank_count() - 1, size_of_val(x));
        self.stage.all_reduce(x)
    }

    fn all_gather(
        &mut self,
        rows: usize,
        widths: &[usize],
        own: &[f32],
        all: &mut [f32],
    ) -> Result<(), Aborted> {
        let bytes = rows * widths.iter().max().copied().unwrap_or(0) * size_of::<f32>();
        wait_for_messages(self.link, self.rank_count() - 1, bytes);
        self.stage.all_gather(rows, widths, own, all)
    }
}

/// An executor with slow links to the next stage. Its activations are sent to each rank there.
struct SlowExecutor {
    inner: Box<dyn Executor>,
    link: Link,
    /// Ranks of the next stage.
    next: usize,
}

impl Executor for SlowExecutor {
    fn run(
        &mut self,
        batch: &StepBatch,
        flow: HandoffPorts<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        let HandoffPorts { output: mut to, .. } = flow;
        self.inner.run(batch, HandoffPorts { output: to.as_deref_mut(), ..flow }, out)?;
        if let Some(ActivationHandoff { encoder, decoder }) = to {
            wait_for_messages(self.link, self.next, encoder.len() + decoder.len());
        }
        Ok(())
    }

    fn report(&self) -> ExecutorReport {
        self.inner.report()
    }

    fn stop_on_abort(&mut self, abort: &Abort) {
        self.inner.stop_on_abort(abort);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstem_kernels::SingleRank;

    /// A rank of three whose collectives complete at once.
    struct ThreeRanks;

    impl Collective for ThreeRanks {
        fn rank(&self) -> usize {
            1
        }

        fn rank_count(&self) -> usize {
            3
        }

        fn all_reduce(&mut self, x: &mut [f32]) -> Result<(), Aborted> {
            x.iter_mut().for_each(|x| *x *= 3.0);
            Ok(())
        }

        fn all_gather(&mut self, _: usize, _: &[usize], own: &[f32], all: &mut [f32]) -> Result<(), Aborted> {
            all.fill(own[0]);
            Ok(())
        }
    }

    /// Each message takes a millisecond plus one per 100 bytes: two messages of 25 numbers, and two of the 2
    /// x 50 numbers of the widest rank.
    #[test]
    fn sums_and_gathered_rows_are_the_same_but_later() {
        let link = Link { latency: 1e-3, bandwidth: 100_000.0 };
        let mut stage = SlowCollective { stage: Box::new(ThreeRanks), link };
        assert_eq!((stage.rank(), stage.rank_count()), (1, 3));
        let (mut x, began) = ([2.0; 25], Instant::now());
        stage.all_reduce(&mut x).unwrap();
        assert!(began.elapsed() >= Duration::from_millis(4), "{:?}", began.elapsed());
        assert_eq!(x, [6.0; 25]);
        let (mut all, began) = ([0.0; 200], Instant::now());
        stage.all_gather(2, &[20, 30, 50], &[7.0; 60], &mut all).unwrap();
        assert!(began.elapsed() >= Duration::from_millis(10), "{:?}", began.elapsed());
        assert_eq!(all, [7.0; 200]);
    }

    /// An executor that hands off 100 bytes.
    struct HandoffExecutor;

    impl Executor for HandoffExecutor {
        fn run(
            &mut self,
            _: &StepBatch,
            flow: HandoffPorts<'_>,
            _: &mut StepOutput,
        ) -> Result<(), DeviceError> {
            if let Some(to) = flow.output {
                to.decoder.resize(100, 7);
            }
            Ok(())
        }

        fn report(&self) -> ExecutorReport {
            ExecutorReport::default()
        }
    }

    /// 100 bytes are sent to two ranks, at 50,000 bytes per second and a millisecond each.
    #[test]
    fn handed_off_activations_are_the_same_but_later() {
        let link = Link { latency: 1e-3, bandwidth: 50_000.0 };
        let handing = || -> ExecutorFactory { Box::new(|_| Ok(Box::new(HandoffExecutor))) };
        let mut factories = slow_links(vec![vec![handing()], vec![handing(), handing()]], link);
        let mut first = factories[0][0](Box::new(SingleRank)).unwrap();
        let (mut to, mut out) = (ActivationHandoff::default(), StepOutput::default());
        let began = Instant::now();
        let flow = HandoffPorts { output: Some(&mut to), ..HandoffPorts::default() };
        first.run(&StepBatch::default(), flow, &mut out).unwrap();
        assert!(began.elapsed() >= Duration::from_millis(6), "{:?}", began.elapsed());
        assert_eq!(to.decoder, [7; 100]);
    }
}
