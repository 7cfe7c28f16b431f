//! Injected faults: executors that fail as a plan says, so that operators can rehearse faults.
//!
//! Invariant: devices for which the plan has no fault are not wrapped, so a plan without faults costs
//! nothing.

use crate::actors::device::ExecutorFactory;
use crate::config::{FaultKind, FaultPlan, FaultRule, FaultTime, Groups};
use crate::model::executor::{Executor, ExecutorReport};
use crate::telemetry;
use mainstem_kernels::random::uniform;
use mainstem_kernels::{Abort, DeviceError, HandoffPorts, RowFailure, SampledToken, StepBatch, StepOutput};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use tracing::warn;

/// Stream of random numbers that choose rows. Those below choose steps, one for each fault of the plan.
const ROW_STREAM: u32 = u32::MAX;

/// Wraps the factories of the devices that have faults in `plan`, and warns if there are any. `groups` are
/// the devices, as the factories are: by stage and rank.
pub fn inject_faults(
    factories: Vec<Vec<ExecutorFactory>>,
    groups: &Groups,
    plan: &FaultPlan,
) -> Vec<Vec<ExecutorFactory>> {
    if plan.rules.is_empty() {
        return factories;
    }
    warn!(
        "FAULTS ARE INJECTED: requests are going to fail, because faults.inject is set ({} faults)",
        plan.rules.len()
    );
    let mut names = groups.iter().flatten();
    let mut wrap = |factory| {
        let name = names.next().expect("each device has a name; anything else is a bug");
        let numbered = (0..).zip(&plan.rules);
        let own: Vec<_> = numbered
            .filter(|(_, rule)| rule.device == *name)
            .map(|(n, rule)| Planned::new(n, rule))
            .collect();
        if own.is_empty() { factory } else { faulty_factory(factory, DeviceFaults::new(plan.seed, own)) }
    };
    factories.into_iter().map(|stage| stage.into_iter().map(&mut wrap).collect()).collect()
}

fn faulty_factory(mut factory: ExecutorFactory, faults: DeviceFaults) -> ExecutorFactory {
    let faults = Arc::new(faults);
    Box::new(move |stage| Ok(Box::new(FaultyExecutor { inner: factory(stage)?, faults: faults.clone() })))
}

/// The faults of a device, which outlast its executors: steps are counted on when it is rebuilt.
struct DeviceFaults {
    seed: u64,
    faults: Vec<Planned>,
    /// Steps that the device has begun.
    steps: AtomicU64,
}

/// A fault of a device.
struct Planned {
    kind: FaultKind,
    when: FaultTime,
    /// Number of the fault in the plan, which is its stream of random numbers.
    number: u32,
    /// Whether a fault at a chosen step is over.
    is_over: AtomicBool,
}

impl Planned {
    fn new(number: u32, rule: &FaultRule) -> Planned {
        Planned { kind: rule.kind, when: rule.when, number, is_over: AtomicBool::new(false) }
    }

    /// Returns whether the fault happens at a step. One that was chosen for an earlier step, which had no use
    /// for it, happens at the next step that has.
    fn is_due(&self, seed: u64, step: u64) -> bool {
        match self.when {
            FaultTime::Step(chosen) => step >= chosen && !self.is_over.swap(true, Ordering::Relaxed),
            FaultTime::Chance(chance) => uniform(seed, step, self.number) < chance,
        }
    }
}

impl DeviceFaults {
    fn new(seed: u64, faults: Vec<Planned>) -> DeviceFaults {
        DeviceFaults { seed, faults, steps: AtomicU64::new(0) }
    }

    /// Injects the faults that a device has before it computes a step. Returns an error if one of them ends
    /// the step.
    fn before(&self, step: u64) -> Result<(), DeviceError> {
        let early = self.faults.iter().filter(|fault| fault.kind != FaultKind::Nan);
        for fault in early.filter(|fault| fault.is_due(self.seed, step)) {
            count(fault.kind);
            match fault.kind {
                FaultKind::Fail => return Err(DeviceError::Fault(format!("injected fault at step {step}"))),
                FaultKind::Panic => panic!("injected panic at step {step}"),
                FaultKind::Hang(time) | FaultKind::Slow(time) => thread::sleep(time),
                FaultKind::Nan => {}
            }
        }
        Ok(())
    }

    /// Injects the faults that a step's results have: rows that are not finite. Steps without results have no
    /// use for such a fault.
    fn after(&self, step: u64, out: &mut StepOutput) {
        if out.tokens.is_empty() && out.hidden.is_empty() {
            return;
        }
        let late = self.faults.iter().filter(|fault| fault.kind == FaultKind::Nan);
        for fault in late.filter(|fault| fault.is_due(self.seed, step)) {
            count(fault.kind);
            let chosen = uniform(self.seed, step, ROW_STREAM - fault.number);
            let index = |len: usize| ((chosen * len as f32) as usize).min(len - 1);
            match out.tokens.len() {
                0 => {
                    let at = index(out.hidden.len());
                    out.hidden[at] = f32::NAN;
                }
                rows => out.tokens[index(rows)] = SampledToken::failed(RowFailure::NotFinite),
            }
        }
    }
}

fn count(kind: FaultKind) {
    telemetry::INJECTED_FAULTS.count([kind.name()]);
}

/// An executor that has faults.
struct FaultyExecutor {
    inner: Box<dyn Executor>,
    faults: Arc<DeviceFaults>,
}

impl Executor for FaultyExecutor {
    fn run(
        &mut self,
        batch: &StepBatch,
        flow: HandoffPorts<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        let step = self.faults.steps.fetch_add(1, Ordering::Relaxed) + 1;
        self.faults.before(step)?;
        self.inner.run(batch, flow, out)?;
        self.faults.after(step, out);
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
    use crate::config::{DeviceKind, DeviceName};

    fn faults(seed: u64, rules: &[(FaultKind, FaultTime)]) -> DeviceFaults {
        let device = DeviceName { kind: DeviceKind::Cpu, number: 0 };
        let rule = |(number, &(kind, when))| Planned::new(number, &FaultRule { kind, device, when });
        DeviceFaults::new(seed, (0..).zip(rules).map(rule).collect())
    }

    /// Returns the steps of the first 2,000 that fail, and those of which a row of `rows` is not finite, with
    /// the row.
    fn history(faults: &DeviceFaults, rows: usize) -> (Vec<u64>, Vec<(u64, usize)>) {
        let (mut failed, mut spoilt) = (Vec::new(), Vec::new());
        for step in 1..=2000 {
            if faults.before(step).is_err() {
                failed.push(step);
                continue;
            }
            let mut out = StepOutput { tokens: vec![SampledToken::new(7); rows], ..StepOutput::default() };
            faults.after(step, &mut out);
            let not_finite = out.tokens.iter().enumerate().filter(|(_, token)| token.failure.is_some());
            spoilt.extend(not_finite.map(|(row, _)| (step, row)));
        }
        (failed, spoilt)
    }

    #[test]
    fn faults_happen_at_the_steps_that_were_chosen_once() {
        let rules = [
            (FaultKind::Fail, FaultTime::Step(3)),
            (FaultKind::Nan, FaultTime::Step(3)),
            (FaultKind::Nan, FaultTime::Step(5)),
        ];
        let (failed, spoilt) = history(&faults(0, &rules), 1);
        // The third step fails, so the row of the next one is not finite.
        assert_eq!((failed, spoilt), (vec![3], vec![(4, 0), (5, 0)]));
    }

    #[test]
    fn random_faults_depend_on_the_seed_only_and_hit_all_rows() {
        let rules = [(FaultKind::Fail, FaultTime::Chance(0.05)), (FaultKind::Nan, FaultTime::Chance(0.05))];
        let (failed, spoilt) = history(&faults(1, &rules), 4);
        assert_eq!((failed.clone(), spoilt.clone()), history(&faults(1, &rules), 4));
        assert_ne!(failed, history(&faults(2, &rules), 4).0);
        // 100 are expected, with a standard deviation of 10.
        assert!(
            (60..140).contains(&failed.len()) && (60..140).contains(&spoilt.len()),
            "{failed:?} {spoilt:?}"
        );
        assert!((0..4).all(|row| spoilt.iter().any(|(_, hit)| *hit == row)), "{spoilt:?}");
        let always = history(&faults(1, &[(FaultKind::Nan, FaultTime::Chance(1.0))]), 4).1;
        assert_eq!(always.len(), 2000);
    }

    #[test]
    fn steps_without_results_have_no_use_for_rows_that_are_not_finite() {
        let faults = faults(0, &[(FaultKind::Nan, FaultTime::Step(1))]);
        faults.after(1, &mut StepOutput::default());
        let mut embedded = StepOutput { hidden: vec![0.0; 8], ..StepOutput::default() };
        faults.after(2, &mut embedded);
        assert_eq!(embedded.hidden.iter().filter(|number| number.is_nan()).count(), 1);
        faults.after(3, &mut embedded);
        assert_eq!(embedded.hidden.iter().filter(|number| number.is_nan()).count(), 1);
    }
}
