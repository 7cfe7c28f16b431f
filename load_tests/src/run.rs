//! The open loop: each request is sent when it is due, whatever became of those before it.
//!
//! Invariant: no request waits for another's answer: a stalled server does not hold back the load.

use std::{rc::Rc, time::Duration};

use tokio::{task::JoinSet, time::sleep_until};

use crate::{
    arrivals::Arrivals,
    client::{Client, Clock, Sample},
    draws::{Draws, Purpose},
    requests::Load,
};

/// Everything a run is made of.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The server, such as `http://127.0.0.1:8080`.
    pub url: String,
    /// `None` asks the server what it serves.
    pub model: Option<String>,
    pub load: Load,
    pub arrivals: Arrivals,
    /// A request that takes longer has failed.
    pub request_timeout: Duration,
    /// After this time nothing more is sent, and what is in flight has failed.
    pub time_limit: Duration,
}

/// What a run leaves behind.
#[derive(Clone, Debug)]
pub struct Record {
    /// The model asked for.
    pub model: String,
    /// One per request sent, by index.
    pub samples: Vec<Sample>,
    /// Requests the time limit left unsent.
    pub unsent: usize,
}

/// Runs the whole load. Fails only when the server cannot be asked for its model; call within a `LocalSet`.
pub async fn run(settings: &Settings) -> anyhow::Result<Record> {
    let client = Client::new(&settings.url, settings.model.as_deref(), settings.request_timeout).await?;
    let client = Rc::new(client);
    let load = &settings.load;
    let schedule = settings.arrivals.schedule(load.requests, &mut Draws::new(load.seed, Purpose::Arrivals));
    let clock = Clock::start(settings.request_timeout, settings.time_limit);
    let mut in_flight = JoinSet::new();
    let mut sent = 0;
    for (index, due) in schedule.into_iter().enumerate() {
        // Made while there is time: before it is due.
        let request = load.request(index);
        if clock.is_over(due) {
            break;
        }
        sleep_until(clock.at(due)).await;
        if clock.is_over(clock.now()) {
            break;
        }
        let client = Rc::clone(&client);
        in_flight.spawn_local(async move { client.send(&request, due, clock).await });
        sent += 1;
    }
    let mut samples = in_flight.join_all().await;
    samples.sort_by_key(|sample| sample.index);
    Ok(Record { model: client.model().to_string(), samples, unsent: load.requests - sent })
}
