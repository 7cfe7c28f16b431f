//! Tests that the device threads of a group do not allocate during a step: hand-offs use recycled buffers.

use mainstem::actors::device::{ExecutorFactory, Step};
use mainstem::actors::group::{Devices, Group, GroupConfig};
use mainstem::model::executor::{Executor, ExecutorReport};
use mainstem_kernels::{Collective, DeviceError, HandoffPorts, StepBatch, StepLimits, StepOutput};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    static IS_DEVICE: Cell<bool> = const { Cell::new(false) };
}

/// Number of allocations on device threads.
static MADE: AtomicUsize = AtomicUsize::new(0);

/// Counts an allocation if this thread is a device thread.
pub fn allocated() {
    if IS_DEVICE.try_with(Cell::get).unwrap_or(false) {
        MADE.fetch_add(1, Ordering::SeqCst);
    }
}

const WIDTH: usize = 16;

/// A device that only exchanges and passes on data.
struct Idle {
    collective: Box<dyn Collective>,
    x: Vec<f32>,
}

impl Executor for Idle {
    fn run(
        &mut self,
        _: &StepBatch,
        flow: HandoffPorts<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        IS_DEVICE.set(true);
        self.collective.all_reduce(&mut self.x).map_err(|fault| DeviceError::Fault(fault.to_string()))?;
        out.clear();
        flow.last_layer.send();
        if let Some(to) = flow.output {
            to.decoder.clear();
            to.decoder.extend_from_slice(&[1; 4 * WIDTH]);
        }
        Ok(())
    }

    fn report(&self) -> ExecutorReport {
        ExecutorReport::default()
    }
}

/// Three stages of two ranks, and more lanes than stages: several steps may queue before a stage that is
/// briefly slow.
pub fn devices_of_a_group_allocate_nothing_for_a_step(limits: StepLimits) {
    const LANES: usize = 5;
    let idle = || -> ExecutorFactory {
        Box::new(|collective| Ok(Box::new(Idle { collective, x: vec![1.0; WIDTH] })))
    };
    let factories = (0..3).map(|_| vec![idle(), idle()]).collect();
    let names = (0..3).map(|stage| (0..2).map(|rank| format!("a{stage}:{rank}")).collect()).collect();
    actix::System::new().block_on(async {
        let config = GroupConfig { lanes: LANES, ..GroupConfig::new(names, limits, 4 * WIDTH) };
        let (group, _) = Group::start(factories, config).await.expect("it starts");
        let lane = |steps: usize| {
            let group = &group;
            async move {
                let mut step = Box::new(Step::with_capacity(&limits));
                for _ in 0..steps {
                    let ran = group.send(step, group.epoch()).expect("nothing fails").await;
                    ran.result.expect("nothing fails");
                    step = ran.step;
                }
            }
        };
        // One step more than fit on the devices: it waits until a device's thread takes it.
        let lanes = |steps| futures_util::future::join_all((0..=LANES).map(move |_| lane(steps)));
        // Who wakes the lanes has to find its room first.
        lanes(200).await;
        let before = MADE.load(Ordering::SeqCst);
        lanes(400).await;
        assert_eq!(MADE.load(Ordering::SeqCst) - before, 0);
        group.stop();
    });
}
