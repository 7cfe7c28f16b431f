//! Benchmark of the page of requests in flight: the decode loop around a fake device without delay, in turns
//! with a client that reads `/v1/inflight` and without one. The shortest step that there is makes the page's
//! part the largest.
//!
//! Invariant: each watched turn directly follows one that nobody watches, so that both see the same machine.

use super::client::Client;
use super::frontend::{Consumers, drain_events, local_server_config, start_fake_engine};
use super::report::{BenchReport, BenchRow};
use super::sample::{Sample, Summary, TestKind};
use crate::actors::{Engine, Watcher};
use crate::config::Config;
use crate::server::{ServeParts, Server};
use actix_web::rt::{self, time};
use anyhow::{Context, Result};
use indicatif::ProgressBar;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::unbounded_channel;

/// The path that the page reads.
const PATH: &str = "/v1/inflight";

/// Time that a turn waits for the one before to be over.
const SETTLING: Duration = Duration::from_millis(50);

/// Measures `repeat` pairs of turns, of `duration` together in each row.
pub(super) async fn measure(
    config: Config,
    duration: Duration,
    repeat: u32,
    report: &mut BenchReport,
    progress: &ProgressBar,
) -> Result<()> {
    let (engine, built) = start_fake_engine(&config).await?;
    report.record_device(&config, &built);
    let sequences = config.scheduler.slots;
    progress.set_length(2 * u64::from(repeat + 1));
    let server = Server::bind(ServeParts::from(&engine), local_server_config(&config.server))?;
    let address = server.address();
    let (stop, stops) = unbounded_channel();
    let serving = rt::spawn(server.run(stops, config.scheduler.drain_timeout));
    let intake = engine.intake.clone();
    let drain = move |tally| drain_events(intake.clone(), tally);
    let consumers = Consumers::start(config.server.workers, sequences, drain);
    let rows = turns(&engine, address, duration / repeat, repeat, progress).await?;
    report.notes.push(cost(&rows));
    for (kind, samples) in [TestKind::Loop, TestKind::WatchedLoop].into_iter().zip(rows) {
        let (weight_bytes, work, offload) = (None, None, None);
        report.rows.push(BenchRow { kind, sequences, tokens: 1, weight_bytes, work, offload, samples });
    }
    consumers.stop();
    drop(stop);
    serving.await??;
    engine.stop();
    Ok(())
}

/// Returns a note of how much longer watched steps are. Each is compared with the turn before it, because the
/// speed of the machine changes more within the run.
fn cost([alone, watched]: &[Vec<Sample>; 2]) -> String {
    let ratio = |(alone, watched): (&Sample, &Sample)| watched.seconds_per_step() / alone.seconds_per_step();
    let longer = alone.iter().zip(watched).map(|pair| 100.0 * (ratio(pair) - 1.0));
    let Summary { min, median, max } = Summary::from_values(longer);
    let range = format!("median of {} pairs of turns, {min:.1} to {max:.1}", alone.len());
    format!("a client of {PATH} makes a step {median:.1} % longer ({range})")
}

/// Measures turns that nobody watches, and turns that a client watches. The first of each warms up.
async fn turns(
    engine: &Engine,
    address: SocketAddr,
    window: Duration,
    repeat: u32,
    progress: &ProgressBar,
) -> Result<[Vec<Sample>; 2]> {
    let counter = engine.live.watch(1).context("somebody watches a new engine; this is a bug")?;
    let mut rows = [Vec::new(), Vec::new()];
    for turn in 0..=repeat {
        for (samples, is_watched) in rows.iter_mut().zip([false, true]) {
            let watching = is_watched.then(|| rt::spawn(watch(address)));
            time::sleep(SETTLING).await;
            let sample = sample(&counter, window).await;
            if let Some(watching) = watching {
                watching.abort();
                // It ends by itself only if it fails.
                if let Ok(ended) = watching.await {
                    ended?;
                }
            }
            samples.extend((turn > 0).then_some(sample));
            progress.inc(1);
        }
    }
    Ok(rows)
}

/// Counts the steps and the tokens of a time, or of a longer one if there are none.
async fn sample(counter: &Watcher, window: Duration) -> Sample {
    let (began, before) = (Instant::now(), counter.totals());
    loop {
        time::sleep(window).await;
        let now = counter.totals();
        let (steps, tokens) = (now.steps - before.steps, now.generated - before.generated);
        if steps > 0 {
            return Sample { tokens, steps, seconds: began.elapsed().as_secs_f64(), roofline: None };
        }
    }
}

/// Reads what the page reads, as often as it does.
async fn watch(address: SocketAddr) -> Result<()> {
    let mut client = Client::connect(address).await?;
    client.get(PATH).await?;
    while client.read_events().await?.is_some() {}
    Ok(())
}
