//! Scenarios of a group of devices: its mailboxes, links, steps, faults and supervisor.

use super::group::mailbox::{Command, Mailbox, StepMessage};
use super::group::{Devices, Epoch, Group, GroupConfig, SentStep};
use super::step::{ExecutorFactory, Step, StepResult};
use crate::late::MaskSender;
use crate::model::executor::{Executor, ExecutorReport};
use crate::scenarios::join;
use crate::schedules::draw;
use crate::{Aborted, Collective, DeviceError, Fraction, HandoffPorts, StepBatch, StepLimits, StepOutput};
use anyhow::ensure;
use core::sync::atomic::{AtomicUsize, Ordering};
use shuttle::future::block_on;
use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{spawn, yield_now};
use std::time::Duration;

/// Commands of several senders are received once, in the order of each sender. Closing the mailbox ends the
/// wait and drops later commands.
pub fn a_mailbox_loses_no_command() {
    let mailbox = Arc::new(Mailbox::new(2));
    let senders = [0, 1].map(|build| {
        let mailbox = mailbox.clone();
        spawn(move || (1..=2).for_each(|step| mailbox.send(command(build, step))))
    });
    let mut last = [0; 2];
    for _ in 0..4 {
        let Some(Command::Run(message)) = mailbox.receive() else { panic!("the mailbox is open") };
        let last = &mut last[message.build as usize];
        *last += 1;
        assert_eq!(message.batch.step, *last);
    }
    join(senders);
    let other = mailbox.clone();
    let closer = spawn(move || other.close());
    assert!(mailbox.receive().is_none(), "nothing was sent");
    join([closer]);
    mailbox.send(command(0, 5));
    assert!(mailbox.receive().is_none(), "the mailbox is closed");
}

/// A mailbox that is closed while commands are sent has no commands after that.
pub fn a_closed_mailbox_drops_what_is_sent() {
    let mailbox = Arc::new(Mailbox::new(2));
    let batch = Arc::new(StepBatch::default());
    let (other, sent) = (mailbox.clone(), batch.clone());
    let sender = spawn(move || {
        for build in 0..2 {
            let message = StepMessage { build, batch: sent.clone(), handoff: None };
            other.send(Command::Run(message));
        }
    });
    let other = mailbox.clone();
    let closer = spawn(move || other.close());
    while mailbox.receive().is_some() {}
    join([sender, closer]);
    assert!(mailbox.receive().is_none());
    assert_eq!(Arc::strong_count(&batch), 1, "no command is left");
}

fn command(build: u64, step: u64) -> Command {
    let batch = Arc::new(StepBatch { step, ..StepBatch::default() });
    Command::Run(StepMessage { build, batch, handoff: None })
}

const LIMITS: StepLimits = StepLimits {
    slots: 1,
    rows: 4,
    batch_rows: usize::MAX,
    logit_rows: 1,
    positions: 9,
    encoder_positions: 0,
    page_positions: 32,
    window: None,
    top_logprobs: 0,
    vocab: 9,
    hidden: 0,
    drafts: 0,
    draft_logits: false,
    counts_tokens: false,
    opening_rows: 0,
    attended_fraction: Fraction::ONE,
};

/// A failure that happens once.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Trouble {
    /// A build fails.
    BuildFails,
    /// A step returns an error.
    Fails,
    /// A step unwinds.
    Unwinds,
    /// A step waits until the gate is open.
    Hangs,
}

/// The state that the executors of a group share.
struct Plan {
    /// Failures: kind, stage and rank of the device, and the number of its steps or builds before.
    troubles: Vec<(Trouble, (usize, usize), AtomicUsize)>,
    state: Mutex<PlanState>,
    changed: Condvar,
}

#[derive(Default)]
struct PlanState {
    /// Whether executors that hang go on.
    gate_is_open: bool,
    /// Number of executors on each device, by stage and rank.
    executors: BTreeMap<(usize, usize), usize>,
    /// A rule that was broken. The group catches panics, so they would not end the test.
    broken: Option<String>,
}

/// An executor that checks what reaches it. Its ranks add their numbers in each step.
struct FakeExecutor {
    plan: Arc<Plan>,
    stage: usize,
    collective: Box<dyn Collective>,
}

impl Plan {
    /// Creates a plan with these troubles, each with the number of steps or builds before it.
    fn new(troubles: &[(Trouble, (usize, usize), usize)]) -> Arc<Plan> {
        let troubles = troubles.iter().map(|(trouble, place, before)| (*trouble, *place, (*before).into()));
        let (troubles, state) = (troubles.collect(), Mutex::default());
        Arc::new(Plan { troubles, state, changed: Condvar::new() })
    }

    /// Returns the trouble that hits the device now.
    fn next_trouble(&self, place: (usize, usize), is_build: bool) -> Option<Trouble> {
        let concerned =
            self.troubles.iter().filter(|it| it.1 == place && (it.0 == Trouble::BuildFails) == is_build);
        concerned.filter(|it| it.2.fetch_sub(1, Ordering::Relaxed) == 0).map(|it| it.0).last()
    }

    fn lock(&self) -> MutexGuard<'_, PlanState> {
        self.state.lock().expect("no thread panics")
    }

    /// Lets executors that hang go on.
    fn open_gate(&self) {
        self.lock().gate_is_open = true;
        self.changed.notify_all();
    }

    /// Requires that something is true.
    fn require(&self, is_true: bool, what: &str) {
        if !is_true {
            self.lock().broken.get_or_insert(what.to_owned());
        }
    }

    /// Counts an executor that begins or ends. A device never holds a third one.
    fn count(&self, place: (usize, usize), begins: bool) {
        let mut state = self.lock();
        let count = state.executors.entry(place).or_default();
        *count = if begins { *count + 1 } else { *count - 1 };
        let is_allowed = *count <= 2;
        drop(state);
        self.require(is_allowed, "a device holds three executors");
        self.changed.notify_all();
    }

    /// Waits until no executor is left, and checks that every rule was kept.
    fn end(&self) {
        let has_some = |state: &mut PlanState| state.executors.values().any(|count| *count > 0);
        let state = self.changed.wait_while(self.lock(), has_some).expect("no thread panics");
        assert_eq!(state.broken, None);
    }

    /// Makes the factories of the executors.
    fn factories(self: &Arc<Plan>, stages: usize, ranks: usize) -> Vec<Vec<ExecutorFactory>> {
        let factory = |stage: usize| -> ExecutorFactory {
            let plan = self.clone();
            Box::new(move |mut collective: Box<dyn Collective>| {
                let place = (stage, collective.rank());
                ensure!(plan.next_trouble(place, true).is_none(), "no memory");
                collective.all_reduce(&mut [1.0])?;
                plan.count(place, true);
                Ok(Box::new(FakeExecutor { plan: plan.clone(), stage, collective }) as Box<dyn Executor>)
            })
        };
        (0..stages).map(|stage| (0..ranks).map(|_| factory(stage)).collect()).collect()
    }

    /// Starts a group of these executors, each stage with so many ranks.
    fn start(
        self: &Arc<Plan>,
        [stages, ranks]: [usize; 2],
        timeout: Option<Duration>,
    ) -> anyhow::Result<Group> {
        let names = (0..stages).map(|stage| (0..ranks).map(|rank| format!("{stage}.{rank}")).collect());
        let mut config = GroupConfig::new(names.collect(), LIMITS, 1);
        config.step_timeout = timeout;
        block_on(Group::start(self.factories(stages, ranks), config)).map(|(group, _)| group)
    }
}

impl Executor for FakeExecutor {
    fn run(
        &mut self,
        batch: &StepBatch,
        flow: HandoffPorts<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        let place = (self.stage, self.collective.rank());
        match self.plan.next_trouble(place, false) {
            Some(Trouble::Fails) => return Err(DeviceError::Fault("it fails".to_owned())),
            Some(Trouble::Unwinds) => resume_unwind(Box::new("it unwinds")),
            Some(Trouble::Hangs) => {
                drop(self.plan.changed.wait_while(self.plan.lock(), |state| !state.gate_is_open));
            }
            Some(Trouble::BuildFails) | None => {}
        }
        let mut sum = [batch.tokens[0] as f32];
        if let Some(input) = flow.input {
            let is_right = input.decoder[..8] == batch.step.to_le_bytes();
            self.plan.require(is_right, "the activations are those of the step");
            sum[0] = input.decoder[8].into();
        }
        self.collective.all_reduce(&mut sum).unwrap_or_else(|aborted| resume_unwind(Box::new(aborted)));
        if let Some(output) = flow.output {
            output.decoder.clear();
            output.decoder.extend_from_slice(&batch.step.to_le_bytes());
            output.decoder.push(sum[0] as u8);
        }
        flow.last_layer.send();
        out.clear();
        out.step = batch.step;
        out.drafts.push(sum[0] as u32);
        if let Some(late) = flow.late {
            let masked = late.wait_mask(0, &mut [0]);
            out.drafts
                .push(masked.unwrap_or_else(|aborted: Aborted| resume_unwind(Box::new(aborted))).into());
        }
        Ok(())
    }

    fn report(&self) -> ExecutorReport {
        ExecutorReport
    }
}

impl Drop for FakeExecutor {
    fn drop(&mut self) {
        self.plan.count((self.stage, self.collective.rank()), false);
    }
}

/// Sends a step with this token. It needs a mask, which another thread sends, or drops if the token is even.
fn send(group: &Group, token: u32, epoch: Epoch) -> Result<SentStep, DeviceError> {
    let (step, mask) = step(token);
    drop(spawn(move || if token.is_multiple_of(2) { drop(mask) } else { mask.send([1].into()) }));
    group.send(step, epoch)
}

/// Returns a step with this token, and the sender of its mask.
fn step(token: u32) -> (Box<Step>, MaskSender) {
    let step = Step { batch: StepBatch { tokens: vec![token], ..StepBatch::default() }, ..Step::default() };
    let mask = step.late.mask_sender(0);
    (Box::new(step), mask)
}

/// Checks the results of steps with the tokens from 1 on: these are right and in order, up to the first
/// error. Returns how many there were before it.
fn count_good(results: Vec<StepResult>, [stages, ranks]: [usize; 2]) -> usize {
    let good = results.iter().take_while(|result| result.result.is_ok()).count();
    assert!(results[good..].iter().all(|result| result.result.is_err()), "a fault fails all later steps");
    let mut last = 0;
    for (token, result) in (1..).zip(&results[..good]) {
        let output = &result.step.output;
        let factor = ranks.pow(stages as u32) as u32;
        assert_eq!(output.drafts, [token * factor, token % 2], "the result of the step with token {token}");
        assert!(output.step > last, "steps are numbered in the order in which they are sent");
        last = output.step;
    }
    good
}

/// Returns a shape of a group: one stage or two, with one rank or two each.
fn draw_shape() -> [usize; 2] {
    [1 + draw(2), 1 + draw(2)]
}

/// Steps return their results in order, more of them than may be in flight; then the group stops.
pub fn a_healthy_group_returns_results_in_order() {
    let (plan, shape) = (Plan::new(&[]), draw_shape());
    let group = plan.start(shape, None).expect("the devices can be built");
    let sent: Vec<SentStep> =
        (1..=4).map(|token| send(&group, token, group.epoch()).expect("no fault")).collect();
    let mut results = Vec::new();
    for SentStep { result, last_layer } in sent {
        assert_eq!(block_on(last_layer), Ok(()), "the signal comes before the result");
        results.push(block_on(result));
    }
    assert_eq!(count_good(results, shape), 4);
    group.stop();
    plan.end();
}

/// A fault fails every step that depends on the lost state, and steps of the next epoch run.
pub fn a_fault_ends_the_epoch() {
    let shape = draw_shape();
    let place = (draw(shape[0]), draw(shape[1]));
    let trouble = [Trouble::Fails, Trouble::Unwinds][draw(2)];
    let good_steps = draw(3);
    let plan = Plan::new(&[(trouble, place, good_steps)]);
    let group = plan.start(shape, None).expect("the devices can be built");
    let epoch = group.epoch();
    // Nobody sends the masks of the step that fails and of those after it. If the first of two stages fails,
    // the second one waits for the mask of the step before.
    let has_waiting_stage = shape[0] == 2 && place.0 == 0;
    let answered = good_steps.saturating_sub(has_waiting_stage.into()) as u32;
    let mut sent: Vec<_> = (1..=answered).map(|token| send(&group, token, epoch)).collect();
    let (steps, masks): (Vec<_>, Vec<_>) = (answered + 1..=3).map(step).unzip();
    sent.extend(steps.into_iter().map(|step| group.send(step, epoch)));
    // A step is refused once the epoch is over, and so are all later ones.
    let accepted = sent.iter().take_while(|sent| sent.is_ok()).count();
    assert!(sent[accepted..].iter().all(Result::is_err));
    let results: Vec<StepResult> =
        sent.into_iter().flatten().map(|step| block_on(step.into_future())).collect();
    let good = count_good(results, shape);
    assert!(good <= good_steps, "a device failed in the next step");
    assert!(group.check_epoch(epoch).is_err() && send(&group, 1, epoch).is_err(), "the epoch is over");
    let next = group.epoch();
    let again = block_on(send(&group, 1, next).expect("the epoch has begun").into_future());
    assert_eq!(count_good(vec![again], shape), 1);
    drop(masks);
    group.stop();
    plan.end();
}

/// A device that hangs is abandoned after a timeout, and another thread takes its place, whether or not the
/// first one ever resumes. If it does, nothing that it does counts, and it ends. Timeouts may pass at any
/// time, so any step may fail.
pub fn a_hung_device_is_replaced() {
    let shape = [1, 1 + draw(2)];
    let plan = Plan::new(&[(Trouble::Hangs, (0, draw(shape[1])), draw(2))]);
    let group = plan.start(shape, Some(Duration::from_millis(100))).expect("the devices can be built");
    let resumes = draw(2) == 0;
    let mut good = 0;
    while good < 2 {
        let epoch = group.epoch();
        let sent: Vec<SentStep> = (1..=2).filter_map(|token| send(&group, token, epoch).ok()).collect();
        let results: Vec<StepResult> = sent.into_iter().map(|step| block_on(step.into_future())).collect();
        let all = results.len();
        let of_these = count_good(results, shape);
        assert!(of_these == all || group.check_epoch(epoch).is_err());
        good += of_these;
        if resumes {
            plan.open_gate();
        }
        // Whoever tries again lets the others run. Otherwise schedules in which this thread comes first try
        // hundreds of times.
        yield_now();
    }
    plan.open_gate();
    group.stop();
    plan.end();
}

/// A group that is stopped at any time answers every step, and all of its threads end.
pub fn a_group_can_be_stopped_at_any_time() {
    let shape = draw_shape();
    let place = || (draw(shape[0]), draw(shape[1]));
    let troubles = [(Trouble::Fails, place(), draw(2)), (Trouble::BuildFails, place(), 1)];
    let plan = Plan::new(&troubles[..draw(3)]);
    let group = Arc::new(plan.start(shape, None).expect("the first build succeeds"));
    let other = group.clone();
    let stopper = spawn(move || other.stop());
    for token in 1..=3 {
        if let Ok(sent) = send(&group, token, group.epoch()) {
            // It ends, with a result or an error.
            block_on(sent.into_future());
        }
    }
    join([stopper]);
    plan.end();
}

/// A device that cannot be built fails the start of its group, and no other device waits for it.
pub fn a_failed_build_ends_the_start() {
    let shape = draw_shape();
    let plan = Plan::new(&[(Trouble::BuildFails, (draw(shape[0]), draw(shape[1])), 0)]);
    let error = plan.start(shape, None).err().expect("a device cannot be built");
    assert_eq!(error.root_cause().to_string(), "no memory", "the error is the cause, not a consequence");
    plan.end();
}

/// A rebuild that fails is repeated, at the latest with the next step.
pub fn a_failed_rebuild_is_repeated() {
    let shape = [1, 1 + draw(2)];
    let place = || (0, draw(shape[1]));
    let plan = Plan::new(&[(Trouble::Fails, place(), 0), (Trouble::BuildFails, place(), 1)]);
    let group = plan.start(shape, None).expect("the first build succeeds");
    let run = || Ok(block_on(send(&group, 1, group.epoch())?.into_future()));
    // The first step fails with its device, and the second one may fail with the rebuild.
    let results: Vec<_> = (0..3).map(|_| run()).collect();
    let is_good =
        |result: &Result<StepResult, DeviceError>| result.as_ref().is_ok_and(|it| it.result.is_ok());
    assert_eq!((is_good(&results[0]), is_good(&results[2])), (false, true));
    group.stop();
    plan.end();
}
