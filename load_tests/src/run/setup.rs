//! Preparation of a run: resolving the service, warming it up, and reading its metrics.
//!
//! Invariant: nothing here is measured, and unreadable metrics do not fail the run.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, bail, ensure};

use super::{Progress, RunSettings, watcher::StopSignal};
use crate::{
    client::{Client, Server, Service, clock::Clock, wait_until_stopped},
    plan::requests::LoadSpec,
    sample::Outcome,
    scrape::Scrape,
};

/// Timeout for reading the server's metrics.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout for reading the server's metrics after the run was stopped.
const SCRAPE_TIMEOUT_STOPPED: Duration = Duration::from_secs(1);

/// A service prepared for a run.
pub struct Setup {
    service: Arc<Service>,
    /// The metrics endpoint.
    metrics: Option<Server>,
    stop: StopSignal,
}

impl Setup {
    /// Resolves the service of the settings and warms it up.
    pub async fn prepare(settings: &RunSettings, stop: &StopSignal) -> anyhow::Result<Self> {
        let making = async {
            let target = &settings.target;
            settings.load.check(target.endpoint)?;
            let service = Service::resolve(target, settings.connections, settings.request_timeout).await?;
            check_spread(&settings.load, &service)?;
            let metrics = target.metrics_url.as_deref().map(|url| Server::resolve(url, target.ca.as_deref()));
            let setup = Self {
                service: Arc::new(service),
                metrics: metrics.transpose().context("the metrics URL")?,
                stop: stop.clone(),
            };
            setup.warm_up(settings).await?;
            Ok(setup)
        };
        tokio::select! {
            setup = making => setup,
            () = wait_until_stopped(stop.receiver()) => bail!("interrupted before the run began"),
        }
    }

    /// Returns the service.
    pub fn service(&self) -> &Arc<Service> {
        &self.service
    }

    /// Reads the server's metrics, or returns `None` if they are unavailable.
    pub async fn scrape(&self) -> Option<Scrape> {
        let patience = if self.stop.is_triggered() { SCRAPE_TIMEOUT_STOPPED } else { SCRAPE_TIMEOUT };
        let text = self.service.fetch_page(self.metrics.as_ref()?, patience).await.ok()?;
        Some(Scrape { text })
    }

    /// Sends the warm-up requests one after the other. Fails when one fails.
    async fn warm_up(&self, settings: &RunSettings) -> anyhow::Result<()> {
        let service = Arc::clone(&self.service);
        let live = Arc::new(Progress::default());
        let client = Client::new(service, settings.connections, settings.retries, self.stop.receiver(), live);
        let load = warmup_load(&settings.load);
        for place in 0..settings.warmups {
            let outgoing = client.prepare(&load.request(place % load.requests.max(1)));
            let clock = Clock::start(settings.request_timeout, Duration::MAX);
            let sample = client.send(outgoing, Duration::ZERO, clock).await;
            if let Outcome::Failed(failure) = sample.outcome {
                bail!(
                    "warm-up {} of {} failed: {}: {}",
                    place + 1,
                    settings.warmups,
                    failure.kind,
                    failure.message
                );
            }
        }
        Ok(())
    }
}

/// Returns a load like that of the run but with different prompts, so that the server cannot serve the run
/// from its prompt cache.
fn warmup_load(load: &LoadSpec) -> LoadSpec {
    LoadSpec { seed: !load.seed, hangup_share: 0.0, slow_share: 0.0, ..load.clone() }
}

fn check_spread(load: &LoadSpec, service: &Service) -> anyhow::Result<()> {
    let (models, keys) = (service.models.len(), service.keys());
    ensure!(load.models == models, "requests are spread over {} models, but there are {models}", load.models);
    ensure!(load.keys == keys, "requests are spread over {} keys, but there are {keys}", load.keys);
    Ok(())
}
