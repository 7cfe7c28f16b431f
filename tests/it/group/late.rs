//! Tests of late inputs in groups: a step computes without them, the rank that samples waits for them, and no
//! rank hangs.

use super::SHAPES;
use super::rank::{Failure, Fault, Moment, Script};
use super::steps::{LIMITS, config, run, step};
use crate::common::{self, PATIENCE, fixture, within};
use futures_util::FutureExt;
use mainstem::actors::device::{Step, StepResult};
use mainstem::actors::group::{Devices, Group, GroupConfig, StepFuture};
use mainstem::cli::start::{self, PreparedModel};
use mainstem::model::ModelRef;
use mainstem_kernels::late::{MaskSender, TokenSender};
use mainstem_kernels::{KvTable, RowFailure, SampleMode, SamplingParams, Span, StepLimits, TableUpdate};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

/// Sends a step.
fn launch(group: &Group, step: Box<Step>) -> StepFuture {
    group.send(step, group.epoch()).expect("the group has not failed").result
}

/// Returns a step with a prompt that is sampled with a mask, and the mask's sender.
fn masked_step(number: u32) -> (Box<Step>, MaskSender) {
    let mut step = step(number);
    step.batch.sampling[0].masked = true;
    let mask = step.late.mask_sender(0);
    (step, mask)
}

/// Returns a step with a prompt whose token the host draws, and what the device hands over.
fn host_step(number: u32) -> (Box<Step>, Receiver<(Vec<f32>, TokenSender)>) {
    let mut step = step(number);
    step.batch.sampling[0].mode = SampleMode::Host;
    let (hand_over, drawer) = channel();
    step.late.draw_with(0, move |row, sender| _ = hand_over.send((row.logits.to_vec(), sender)));
    (step, drawer)
}

/// Returns the mask that allows one token of the vocabulary of these limits.
fn only(token: u32, limits: &StepLimits) -> Vec<u32> {
    let mut mask = vec![0; limits.mask_words()];
    mask[token as usize / 32] = 1 << (token % 32);
    mask
}

/// Returns the token of the first row, or the failure of the row; an error if the step fails.
async fn first_token(running: StepFuture) -> Result<Result<u32, RowFailure>, String> {
    let StepResult { step, result } = within(running).await;
    let row = result.map(|()| step.output.tokens[0]).map_err(|fault| fault.to_string())?;
    Ok(row.failure.map_or(Ok(row.token), Err))
}

/// Waits until a device has begun `steps` steps.
fn wait_for_steps(script: &Script, device: usize, steps: u64) {
    let began = Instant::now();
    while script.steps[device].load(Ordering::SeqCst) < steps {
        assert!(began.elapsed() < PATIENCE, "the device does not begin the step");
        std::thread::yield_now();
    }
}

/// With any number of stages and ranks; a step whose inputs do not come fails one row, and the devices go on.
#[actix::test]
async fn masks_and_tokens_come_after_the_devices_have_begun() {
    for shape in SHAPES {
        let script = Script::new(shape, []);
        let (group, _) = Group::start(script.factories(LIMITS), config(shape)).await.expect("it starts");
        let (answering, epoch) = ((shape.0 - 1) * shape.1, group.epoch());
        let (step, mask) = masked_step(1);
        let mut running = launch(&group, step);
        wait_for_steps(&script, answering, 1);
        assert!((&mut running).now_or_never().is_none(), "it waits for its mask");
        mask.send(only(77, &LIMITS).into());
        assert_eq!(first_token(running).await, Ok(Ok(77)));

        let (step, drawer) = host_step(2);
        let mut running = launch(&group, step);
        let (logits, sender) = drawer.recv_timeout(PATIENCE).expect("the device hands the logits over");
        assert!(logits.len() == LIMITS.vocab && (&mut running).now_or_never().is_none());
        sender.send(78);
        assert_eq!(first_token(running).await, Ok(Ok(78)));

        for number in [3, 4] {
            let running = match number {
                3 => {
                    let (step, mask) = masked_step(number);
                    let running = launch(&group, step);
                    wait_for_steps(&script, answering, 3);
                    drop(mask);
                    running
                }
                _ => {
                    let (step, drawer) = host_step(number);
                    let running = launch(&group, step);
                    drop(drawer);
                    running
                }
            };
            assert_eq!(first_token(running).await, Ok(Err(RowFailure::NoLateInput)));
        }
        assert!(run(&group, 5).await.iter().all(Result::is_ok));
        assert_eq!(group.epoch(), epoch, "nothing failed");
        group.stop();
        script.threads_end();
    }
}

/// By the fault of another device, or because the group is stopped.
#[actix::test]
async fn a_device_that_waits_for_an_input_is_woken_by_an_abort() {
    for shape in SHAPES {
        let failures = [Failure { device: 0, at_step: 1, fault: Fault::Error, moment: Moment::Begin }];
        let script = Script::new(shape, failures);
        let (group, _) = Group::start(script.factories(LIMITS), config(shape)).await.expect("it starts");
        if shape.0 > 1 {
            let (step, drawer) = host_step(0);
            let waiting = launch(&group, step);
            let kept = drawer.recv_timeout(PATIENCE).expect("the device waits for a token");
            let failing = launch(&group, self::step(1));
            for running in [waiting, failing] {
                let fault = first_token(running).await.expect_err("the group fails");
                assert_eq!(fault, "device fault: t0:0: the test's device fails");
            }
            assert!(run(&group, 5).await.iter().all(Result::is_ok), "the devices are rebuilt");
            assert_eq!(script.threads(), shape.0 * shape.1, "no thread hung");
            drop(kept);
        }
        let (step, drawer) = host_step(0);
        let _running = launch(&group, step);
        let kept = drawer.recv_timeout(PATIENCE).expect("the device waits for a token");
        group.stop();
        script.threads_end();
        drop(kept);
    }
}

/// Starts real devices.
async fn model_group(devices: &str) -> (Group, StepLimits) {
    let settings = [("device.groups", devices.into())];
    let config = common::config(&fixture("gqa"), &settings);
    let prepared = PreparedModel::open(&config, &ModelRef::Path(fixture("gqa"))).expect("the fixture opens");
    let PreparedModel { setup, source, tokenizer, device, .. } = prepared;
    let factories = start::factories(&device, &source, &tokenizer, &setup);
    let config = GroupConfig::new(setup.partition.device_names(), setup.limits, setup.row_bytes);
    let (group, _) = Group::start(factories, config).await.expect("it starts");
    (group, setup.limits)
}

/// Returns a step with the same prompt in slots 1 and 2.
fn two_prompts(limits: &StepLimits) -> Box<Step> {
    let mut step = step(29);
    let batch = &mut step.batch;
    batch.spans.push(Span { slot: 2, ..batch.spans[0] });
    batch.sampling = vec![SamplingParams::GREEDY; 2];
    for slot in [1, 2] {
        let pages = 30u32.div_ceil(limits.page_positions as u32);
        let entry = |index| TableUpdate { slot, table: KvTable::Own, index, page: slot * pages + index };
        batch.table_updates.extend((0..pages).map(entry));
    }
    step
}

/// The logits of the row that the host draws are there before the mask of the other row is.
#[actix::test]
async fn a_model_computes_all_layers_before_its_mask_comes() {
    for devices in ["cpu:0", "cpu:0;cpu:1", "cpu:0&cpu:1", "cpu:0&cpu:1;cpu:2&cpu:3"] {
        let (group, limits) = model_group(devices).await;
        let plain = within(launch(&group, two_prompts(&limits))).await.step.output.tokens[1].token;
        let mut step = two_prompts(&limits);
        step.batch.sampling[0].mode = SampleMode::Host;
        step.batch.sampling[1].masked = true;
        let (hand_over, drawer) = channel();
        step.late.draw_with(0, move |row, sender| _ = hand_over.send((row.logits.to_vec(), sender)));
        let mask = step.late.mask_sender(1);
        let mut running = launch(&group, step);
        let (logits, sender) = drawer.recv_timeout(PATIENCE).expect("the layers do not wait for the mask");
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        assert_eq!(logits[plain as usize], largest, "{devices}: the logits of the same prompt");
        sender.send(5);
        assert!((&mut running).now_or_never().is_none(), "{devices}: it waits for its mask");
        let allowed = (plain + 1) % limits.vocab as u32;
        mask.send(only(allowed, &limits).into());
        let output = within(running).await.step.output;
        assert_eq!([0, 1].map(|row: usize| output.tokens[row].token), [5, allowed], "{devices}");
        group.stop();
    }
}
