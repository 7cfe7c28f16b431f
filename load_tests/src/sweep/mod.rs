//! Sweeps: a load at increasing rates or numbers of users until the server is saturated. The knee is the last
//! step that the server keeps up with.
//!
//! Invariant: the verdict on a step depends only on its own samples and on steps of lower load.

mod ladder;
mod lag;
mod saturation;
mod texts;

use std::{sync::atomic::Ordering, time::Duration};

use anyhow::{Context, bail};

use crate::{
    measure::{self, GoodputLimits},
    plan::arrivals::Arrivals,
    report::RunReport,
    run::{self, Progress, RunSettings},
};

pub use ladder::{Ladder, StepSize};
pub use texts::{describe_knee, sections};

/// The definition of a sweep.
#[derive(Clone, Debug)]
pub struct SweepSettings {
    pub ladder: Ladder,
    pub size: StepSize,
    /// Goodput limits; a step in which too few requests are within them is saturated.
    pub limits: GoodputLimits,
    /// Number of saturated steps to run before stopping; 0 counts as 1.
    pub beyond: usize,
    /// Number of bisection steps between the knee and the first saturated step.
    pub refine: usize,
}

/// The results of a sweep.
#[derive(Clone, Debug)]
pub struct Sweep {
    pub unit: LoadUnit,
    /// Steps by ascending load.
    pub steps: Vec<SweepStep>,
    /// Index of the last step before the first saturated one, or of the last step if none is saturated;
    /// `None` if the first step is saturated.
    pub knee: Option<usize>,
}

/// The unit of the load of a sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadUnit {
    /// Requests per second.
    Rate,
    /// Users of a closed loop.
    Users,
}

/// A step of a sweep.
#[derive(Clone, Debug)]
pub struct SweepStep {
    /// The load: requests per second, or users.
    pub x: f64,
    pub run: RunReport,
    /// Reason why the step is saturated; `None` if it is not.
    pub saturated: Option<String>,
}

/// Runs a sweep until enough steps are saturated, the ladder ends, or the run is stopped; `watch` receives
/// each step. A step during which the run is stopped is dropped. Fails if a run fails, or if the arrival
/// process has no rate that can be changed.
pub fn sweep(
    settings: &RunSettings,
    climb: &SweepSettings,
    progress: &Progress,
    watch: &mut dyn FnMut(&SweepStep),
) -> anyhow::Result<Sweep> {
    let unit = climb.ladder.unit();
    let mut number = 0;
    let steps = run_ladder(climb, &mut |x, lower| {
        if progress.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let settings = step_settings(settings, unit, x, climb.size.requests(unit, x, lower), number)?;
        number += 1;
        let step = run_step(&settings, unit, x, &climb.limits, lower, progress);
        let step = step.with_context(|| format!("at {}", unit.name(x)))?;
        step.iter().for_each(&mut *watch);
        Ok(step)
    })?;
    let knee = steps.iter().position(|step| step.saturated.is_some()).unwrap_or(steps.len()).checked_sub(1);
    Ok(Sweep { unit, steps, knee })
}

impl LoadUnit {
    /// Formats a load: `8/s`, `1 user`, `8 users`.
    pub fn name(self, x: f64) -> String {
        match self {
            LoadUnit::Rate => format!("{x}/s"),
            LoadUnit::Users if x == 1.0 => "1 user".into(),
            LoadUnit::Users => format!("{x} users"),
        }
    }
}

/// Runs a step, given the steps of lower load. `None` ends the sweep.
type RunStep<'a> = dyn FnMut(f64, &[SweepStep]) -> anyhow::Result<Option<SweepStep>> + 'a;

/// Runs the steps of the ladder, then the bisection steps after the knee. Returns them by ascending load.
fn run_ladder(climb: &SweepSettings, run: &mut RunStep) -> anyhow::Result<Vec<SweepStep>> {
    let mut steps = Vec::new();
    let is_saturated = |step: &SweepStep| step.saturated.is_some();
    for x in climb.ladder.values() {
        let Some(step) = run(x, &steps)? else { return Ok(steps) };
        steps.push(step);
        if steps.iter().filter(|step| is_saturated(step)).count() >= climb.beyond.max(1) {
            break;
        }
    }
    for _ in 0..climb.refine {
        let Some(at @ 1..) = steps.iter().position(is_saturated) else { break };
        let Some(x) = climb.ladder.unit().midpoint(steps[at - 1].x, steps[at].x) else { break };
        let Some(step) = run(x, &steps[..at])? else { break };
        steps.insert(at, step);
    }
    Ok(steps)
}

/// Runs and evaluates one step; returns `None` if it was stopped.
fn run_step(
    settings: &RunSettings,
    unit: LoadUnit,
    x: f64,
    limits: &GoodputLimits,
    lower: &[SweepStep],
    progress: &Progress,
) -> anyhow::Result<Option<SweepStep>> {
    let record = run::run(settings, progress);
    // A run that is stopped before it starts returns an error.
    if progress.stop.load(Ordering::Relaxed) {
        return Ok(None);
    }
    let record = record?;
    let run = measure::report(settings, &record, limits);
    let saturated = match unit {
        LoadUnit::Rate => saturation::open_loop(&run, &record.samples, lower),
        LoadUnit::Users => saturation::closed_loop(x, &run, lower),
    };
    Ok(Some(SweepStep { x, run, saturated }))
}

/// Returns the settings of step `number`. Each step has its own random requests, so that none finds the
/// prompts of another in the server's cache; only the first step warms up.
fn step_settings(
    settings: &RunSettings,
    unit: LoadUnit,
    x: f64,
    requests: usize,
    number: u64,
) -> anyhow::Result<RunSettings> {
    let mut settings = settings.clone();
    settings.label = Some(unit.name(x));
    settings.load.requests = requests;
    settings.load.seed = settings.load.seed.wrapping_add(number);
    settings.warmups = if number == 0 { settings.warmups } else { 0 };
    if unit == LoadUnit::Rate {
        // The time limit must not make the step look saturated.
        let planned = Duration::from_secs_f64(requests as f64 / x);
        settings.time_limit = settings.time_limit.max(planned.saturating_add(settings.request_timeout));
    }
    settings.arrivals = match unit {
        LoadUnit::Rate => at_rate(&settings.arrivals, x)?,
        LoadUnit::Users => Arrivals::Users { count: x as usize, think: think_time(&settings.arrivals) },
    };
    Ok(settings)
}

/// Returns the arrival process at this many requests per second, or a Poisson process if it has no rate.
fn at_rate(arrivals: &Arrivals, rate: f64) -> anyhow::Result<Arrivals> {
    let mean_gap = Duration::from_secs_f64(1.0 / rate);
    Ok(match arrivals {
        Arrivals::AllAtOnce | Arrivals::Users { .. } | Arrivals::Poisson { .. } => {
            Arrivals::Poisson { mean_gap }
        }
        Arrivals::Constant { .. } => Arrivals::Constant { gap: mean_gap },
        Arrivals::Gamma { shape, .. } => Arrivals::Gamma { mean_gap, shape: *shape },
        Arrivals::Trace(_) => {
            let own = arrivals.rate().filter(|own| own.is_finite());
            arrivals.scaled(own.context("all requests of the trace are simultaneous: it has no rate")? / rate)
        }
        Arrivals::Ramp { .. } => bail!("a ramp has no constant rate"),
    })
}

fn think_time(arrivals: &Arrivals) -> Duration {
    match arrivals {
        Arrivals::Users { think, .. } => *think,
        _ => Duration::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::report;

    fn climb(ladder: &str, beyond: usize, refine: usize) -> SweepSettings {
        let ladder = ladder.parse().unwrap();
        SweepSettings { ladder, size: StepSize::Requests(1), limits: GoodputLimits::new(), beyond, refine }
    }

    /// Returns the loads that are run against a server that keeps up with `capacity`, in the order of
    /// execution and in the order of the result.
    fn loads(climb: &SweepSettings, capacity: f64, most: usize) -> (Vec<f64>, Vec<f64>) {
        let mut run = Vec::new();
        let steps = run_ladder(climb, &mut |x, lower| {
            assert!(lower.iter().all(|step| step.x < x));
            if run.len() == most {
                return Ok(None);
            }
            run.push(x);
            Ok(Some(SweepStep { x, run: report(1), saturated: (x > capacity).then(|| "more".into()) }))
        });
        (run.clone(), steps.unwrap().iter().map(|step| step.x).collect())
    }

    #[test]
    fn the_climb_ends_beyond_saturation_and_then_closes_in() {
        let all = usize::MAX;
        assert_eq!(loads(&climb("1..64x2", 1, 0), 10.0, all).0, [1.0, 2.0, 4.0, 8.0, 16.0]);
        assert_eq!(loads(&climb("1..64x2", 0, 0), 10.0, all).0.len(), 5);
        assert_eq!(loads(&climb("1..64x2", 2, 0), 10.0, all).0.last(), Some(&32.0));
        assert_eq!(loads(&climb("1..64x2", 1, 0), 100.0, all).0.len(), 7);
        let (order, rising) = loads(&climb("1..64x2", 2, 3), 10.0, all);
        assert_eq!(order[6..], [11.3, 9.51, 10.4]);
        assert_eq!(rising, [1.0, 2.0, 4.0, 8.0, 9.51, 10.4, 11.3, 16.0, 32.0]);
        // Adjacent numbers of users have no value between them, and no step is added below the lowest.
        assert_eq!(loads(&climb("users:1..8+1", 1, 9), 4.0, all).0, [1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(loads(&climb("4,8", 1, 9), 1.0, all).0, [4.0]);
    }

    #[test]
    fn a_climb_that_is_stopped_keeps_what_it_has() {
        assert_eq!(loads(&climb("1..64x2", 1, 3), 10.0, 3).1, [1.0, 2.0, 4.0]);
        assert_eq!(loads(&climb("1..64x2", 1, 3), 10.0, 6).1, [1.0, 2.0, 4.0, 8.0, 11.3, 16.0]);
    }

    #[test]
    fn the_process_stays_and_its_rate_is_raised() {
        let gap = Duration::from_millis(125);
        let at = |arrivals: Arrivals| at_rate(&arrivals, 8.0);
        let think = Duration::ZERO;
        for without in [Arrivals::AllAtOnce, Arrivals::Users { count: 3, think }] {
            assert_eq!(at(without).unwrap(), Arrivals::Poisson { mean_gap: gap });
        }
        let second = Duration::from_secs(1);
        assert_eq!(at(Arrivals::Constant { gap: second }).unwrap(), Arrivals::Constant { gap });
        let gamma = |mean_gap| Arrivals::Gamma { mean_gap, shape: 0.3 };
        assert_eq!(at(gamma(second)).unwrap(), gamma(gap));
        let kind = crate::plan::arrivals::RampKind::Linear;
        assert!(at(Arrivals::Ramp { from: 1.0, to: 2.0, over: second, kind }).is_err());
    }

    #[test]
    fn a_trace_is_run_faster_or_slower() {
        // Four gaps in ten seconds become four in half a second.
        let trace = [0.0, 1.0, 1.0, 6.0, 10.0].map(Duration::from_secs_f64);
        let Ok(Arrivals::Trace(times)) = at_rate(&Arrivals::Trace(trace.into()), 8.0) else {
            panic!("it is a trace")
        };
        assert_eq!(*times, [0.0, 0.05, 0.05, 0.3, 0.5].map(Duration::from_secs_f64));
        let error = at_rate(&Arrivals::Trace([Duration::ZERO; 3].into()), 8.0).unwrap_err().to_string();
        assert!(error.contains("all requests of the trace are simultaneous"), "{error}");
    }
}
