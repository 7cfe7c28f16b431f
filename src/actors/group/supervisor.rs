//! The supervisor of a group: the thread that builds the devices, and rebuilds them after a fault.
//!
//! Owns the devices' threads. It sleeps while the group is healthy.
//! Invariant: a group is built from scratch: every device has dropped its executor, or its thread has been
//! abandoned and replaced. At most one hung thread per device exists beside the current one, so that a device
//! never holds a third model in memory. If steps have a timeout, waiting steps fail when recovery takes too
//! long; when the group is stopped, the supervisor ends within a fixed time.

use super::GroupConfig;
use super::state::{DeviceId, GroupState, RecoveryReason};
use crate::actors::device::{Device, SharedExecutorFactory};
use crate::model::executor::ExecutorReport;
use crate::telemetry;
use anyhow::{Context, Result};
use mainstem_kernels::DeviceError;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tracing::{error, info, warn};

/// Reports of all devices of a group, by stage and rank.
pub type Reports = Vec<Vec<ExecutorReport>>;

/// Maximum time that the devices have after a timeout to drop their executors before the ones that have not
/// are logged.
const STALL_REPORT_DELAY: Duration = Duration::from_secs(2);

/// Maximum time of a rebuild, as a multiple of the time of the first build.
const REBUILD_TIME_FACTOR: u32 = 10;

/// Minimum time between attempts to rebuild, unless steps wait.
const MIN_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Maximum time of the devices to finish their current step when the group is stopped.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// The state of the supervisor thread.
pub(super) struct Supervisor {
    group: Arc<GroupState>,
    factories: Vec<Vec<SharedExecutorFactory>>,
    /// The thread of each device; `None` if it has none.
    threads: Vec<Vec<Option<JoinHandle<()>>>>,
    /// Abandoned threads with their device names. They end when they resume, if ever.
    abandoned: Vec<(String, JoinHandle<()>)>,
    /// Duration of the first build.
    first_build_time: Duration,
}

impl Supervisor {
    /// Creates a supervisor of a group whose devices are not built yet. `factories` are by stage and rank.
    pub fn new(group: Arc<GroupState>, factories: Vec<Vec<SharedExecutorFactory>>) -> Supervisor {
        let threads = factories.iter().map(|stage| stage.iter().map(|_| None).collect()).collect();
        Supervisor { group, factories, threads, abandoned: Vec::new(), first_build_time: Duration::ZERO }
    }

    /// Builds the group and sends the result; if it succeeded, supervises the group until it is stopped.
    pub fn run(mut self, started: oneshot::Sender<Result<Reports>>) {
        let began = Instant::now();
        match self.build(None) {
            Ok(reports) => {
                self.first_build_time = began.elapsed();
                let _ = started.send(Ok(reports));
                self.supervise();
                self.join_threads();
            }
            Err(error) => {
                self.group.stop();
                self.join_threads();
                let _ = started.send(Err(error));
            }
        }
    }

    /// Recovers the group whenever necessary, until it is stopped.
    fn supervise(&mut self) {
        let label = self.group.config().label();
        // Devices that take long to build are not rebuilt continuously.
        let retry_interval = self.first_build_time.max(MIN_RETRY_INTERVAL);
        while let Some(reason) = self.group.wait_for_recovery(retry_interval) {
            match self.recover(reason) {
                Ok(_) => info!("{label} is available again"),
                Err(_) if self.group.is_stopping() => {}
                Err(fault) => {
                    error!(
                        "{label} is still unavailable: {fault:#}; retrying in {retry_interval:.0?}, or with \
                         the next step"
                    )
                }
            }
        }
    }

    /// Recovers the group: all devices drop their executors, threads that do not in time are replaced, and
    /// all devices build again.
    fn recover(&mut self, reason: RecoveryReason) -> Result<Reports> {
        let group = self.group.clone();
        let GroupConfig { step_timeout, status, .. } = group.config();
        let build_limit = self.first_build_time * REBUILD_TIME_FACTOR + step_timeout.unwrap_or_default();
        status.start_rebuild(build_limit + step_timeout.unwrap_or_default());
        if !matches!(reason, RecoveryReason::RetryDue) {
            telemetry::DEVICE_RESTARTS.add(1);
        }
        self.clear_devices(reason);
        let reports = self.build(step_timeout.map(|_| build_limit))?;
        status.finish_rebuild();
        Ok(reports)
    }

    /// Commands all devices to drop their executors, and abandons the threads that do not. A device in a long
    /// step gets another step timeout before its thread is abandoned, as it may well finish.
    fn clear_devices(&mut self, reason: RecoveryReason) {
        let timeout = self.group.config().step_timeout;
        let within = |time| Some(Instant::now() + time);
        let until = timeout.and_then(within);
        self.group.clear_all();
        if let RecoveryReason::Timeout = reason {
            let stalled =
                self.group.wait_cleared(timeout.and_then(|timeout| within(timeout.min(STALL_REPORT_DELAY))));
            self.group.log_stalled(&stalled);
        }
        for id in self.group.devices_to_abandon(until) {
            self.abandon(id);
        }
    }

    /// Abandons a thread: the device will get another.
    fn abandon(&mut self, id: DeviceId) {
        self.abandoned.retain(|(_, thread)| !thread.is_finished());
        let device = self.group.name(id).to_owned();
        if self.group.abandon_thread(id) {
            warn!(device, "the device's thread is abandoned; it ends when it resumes");
            let thread = self.threads[id.stage][id.rank].take();
            self.abandoned.extend(thread.map(|thread| (device, thread)));
        }
    }

    /// Builds the group, with new threads for devices that have none. Waiting steps fail if the build fails
    /// or takes longer than `limit`.
    fn build(&mut self, limit: Option<Duration>) -> Result<Reports> {
        self.group.set_unavailable();
        let built = self.start_missing_threads().and_then(|()| {
            self.group.start_build();
            self.group.wait_built(limit.map(|limit| Instant::now() + limit))
        });
        match &built {
            Ok(_) => self.group.start_serving(),
            Err(fault) => self.group.fail_pending(&DeviceError::Fault(format!("{fault:#}"))),
        }
        built
    }

    /// Starts a thread for every device that has none.
    fn start_missing_threads(&mut self) -> Result<()> {
        for id in self.group.devices_without_thread() {
            if let Some(thread) = self.threads[id.stage][id.rank].take() {
                let _ = thread.join();
            }
            self.start_thread(id)?;
        }
        Ok(())
    }

    /// Starts a thread for a device.
    fn start_thread(&mut self, old: DeviceId) -> Result<()> {
        let Some((id, mailbox)) = self.group.register_thread(old) else { return Ok(()) };
        let factory = self.factories[id.stage][id.rank].clone();
        let thread = Device::spawn(id, self.group.clone(), mailbox, factory)
            .inspect_err(|_| self.group.report_exited(id))
            .with_context(|| format!("starting the thread of the device {}", self.group.name(id)))?;
        self.threads[id.stage][id.rank] = Some(thread);
        Ok(())
    }

    /// Waits a limited time for the threads, which have been told to exit.
    fn join_threads(mut self) {
        for id in self.group.wait_exited(Instant::now() + STOP_TIMEOUT) {
            let thread = self.threads[id.stage][id.rank].take();
            self.abandoned.extend(thread.map(|thread| (self.group.name(id).to_owned(), thread)));
        }
        for (device, thread) in self.abandoned {
            match thread.is_finished() {
                true => _ = thread.join(),
                false => warn!(device, "the device's thread has not ended; it is abandoned"),
            }
        }
        for thread in self.threads.into_iter().flatten().flatten() {
            let _ = thread.join();
        }
    }
}
