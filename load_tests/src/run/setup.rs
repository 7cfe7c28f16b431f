//! What comes before a run and after it: finding the service, warming it up, reading its metrics.
//!
//! Invariant: nothing here counts for the run, and metrics that cannot be read are no failure of it.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, bail, ensure};

use super::{Progress, Settings, watch::Stop};
use crate::{
    client::{Client, Server, Service, clock::Clock, stopped},
    plan::requests::Load,
    sample::Outcome,
    scrape::Scrape,
};

/// How long the server's metrics are waited for.
const SCRAPE_PATIENCE: Duration = Duration::from_secs(10);

/// How long, once somebody wants the run to end.
const SCRAPE_PATIENCE_STOPPED: Duration = Duration::from_secs(1);

/// A service that is ready for a run.
pub struct Setup {
    service: Arc<Service>,
    /// Where its metrics are.
    metrics: Option<Server>,
    stop: Stop,
}

impl Setup {
    /// Finds the service that the settings name, and warms it up.
    pub async fn make(settings: &Settings, stop: &Stop) -> anyhow::Result<Self> {
        let making = async {
            let target = &settings.target;
            settings.load.check(target.endpoint)?;
            let service = Service::find(target, settings.connections, settings.request_timeout).await?;
            check_spread(&settings.load, &service)?;
            let metrics = target.metrics_url.as_deref().map(|url| Server::at(url, target.ca.as_deref()));
            let setup = Self {
                service: Arc::new(service),
                metrics: metrics.transpose().context("the URL of the metrics")?,
                stop: stop.clone(),
            };
            setup.warm_up(settings).await?;
            Ok(setup)
        };
        tokio::select! {
            setup = making => setup,
            () = stopped(stop.receiver()) => bail!("interrupted before the run began"),
        }
    }

    pub fn service(&self) -> &Arc<Service> {
        &self.service
    }

    /// The server's metrics as they are now, where it tells them.
    pub async fn scrape(&self) -> Option<Scrape> {
        let patience = if self.stop.is_now() { SCRAPE_PATIENCE_STOPPED } else { SCRAPE_PATIENCE };
        let text = self.service.page(self.metrics.as_ref()?, patience).await.ok()?;
        Some(Scrape { text })
    }

    /// Sends the warm-ups, one after the other.
    async fn warm_up(&self, settings: &Settings) -> anyhow::Result<()> {
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

/// Requests like the run's, but others: prompts that a server has seen it may answer from its cache.
fn warmup_load(load: &Load) -> Load {
    Load { seed: !load.seed, hangup_share: 0.0, slow_share: 0.0, ..load.clone() }
}

fn check_spread(load: &Load, service: &Service) -> anyhow::Result<()> {
    let (models, keys) = (service.models.len(), service.keys());
    ensure!(load.models == models, "requests are spread over {} models, but there are {models}", load.models);
    ensure!(load.keys == keys, "requests are spread over {} keys, but there are {keys}", load.keys);
    Ok(())
}
