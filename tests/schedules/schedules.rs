//! The schedules under which a scenario runs.

use shuttle::rand::Rng;
use shuttle::scheduler::{PctScheduler, Schedule, Scheduler, Task, TaskId};
use shuttle::{Config, MaxSteps, Runner};

/// Maximum number of choices of the scheduler in a run. One that exceeds it runs for ever.
const MAX_STEPS: usize = 300_000;

/// Bytes of a thread's stack.
const STACK: usize = 1 << 18;

/// Number of times that the schedules of the second kind change the order of the threads.
const CHANGES: usize = 3;

/// Probabilities, as one in so many, with which a thread is interrupted. One is drawn for each run.
const INTERRUPTS: [u64; 5] = [1, 4, 20, 100, 1000];

/// Runs a scenario under `runs` schedules of each of two kinds: threads are interrupted at random, often or
/// rarely; or each thread runs as long as it can, in an order that changes a few times.
///
/// # Panics
/// If a run panics, deadlocks or does not end.
pub fn check(runs: usize, scenario: fn()) {
    let config = || {
        let mut config = Config::new();
        config.stack_size = STACK;
        config.max_steps = MaxSteps::FailAfter(MAX_STEPS);
        config.silence_warnings = true;
        config
    };
    Runner::new(Interrupting::new(1, runs), config()).run(scenario);
    Runner::new(PctScheduler::new_from_seed(2, CHANGES, runs), config()).run(scenario);
}

/// Draws a number below `end` in a scenario, as part of the schedule.
pub fn draw(end: usize) -> usize {
    shuttle::rand::thread_rng().gen_range(0..end)
}

/// Interrupts threads with a probability that differs from run to run.
struct Interrupting {
    state: u64,
    runs_left: usize,
    one_in: u64,
}

impl Interrupting {
    fn new(seed: u64, runs: usize) -> Interrupting {
        Interrupting { state: seed, runs_left: runs, one_in: 1 }
    }

    /// Returns the next number of the generator SplitMix64.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.state ^ self.state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

impl Scheduler for Interrupting {
    fn new_execution(&mut self) -> Option<Schedule> {
        self.runs_left = self.runs_left.checked_sub(1)?;
        self.one_in = INTERRUPTS[self.below(INTERRUPTS.len() as u64) as usize];
        Some(Schedule::new(self.next()))
    }

    fn next_task(
        &mut self,
        runnable: &[&Task],
        current: Option<TaskId>,
        is_yielding: bool,
    ) -> Option<TaskId> {
        let goes_on = |task: &&&Task| Some(task.id()) == current;
        let current = runnable.iter().find(goes_on).filter(|_| !is_yielding);
        match current {
            Some(task) if self.below(self.one_in) > 0 => Some(task.id()),
            _ => Some(runnable[self.below(runnable.len() as u64) as usize].id()),
        }
    }

    fn next_u64(&mut self) -> u64 {
        self.next()
    }
}
