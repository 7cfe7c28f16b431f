//! The time that an engine takes beside its devices: scheduling, and sending tokens to their requests.
//!
//! Invariant: it is measured by an engine with the program's own actors, of which only the device is fake.

use super::{engine_setup, factories, open_with_draft};
use crate::actors::engine::{self, Engine};
use crate::config::{Config, Overrides};
use crate::model::ModelRef;
use crate::server::{LocalApi, ServeParts};
use actix_web::rt::System;
use anyhow::{Result, anyhow};
use serde_json::json;
use std::thread;
use std::time::{Duration, Instant};

/// Sequences at once of the measurement with many of them, and the tokens of each.
const SEQUENCES: usize = 16;
const TOKENS: usize = 48;

/// Time of each measurement, of which the fastest run counts.
const MEASURE_TIME: Duration = Duration::from_millis(150);

/// Measures the seconds that a step takes beside the devices, and those of each token that it generates.
pub(super) fn measure() -> Result<[f64; 2]> {
    let measuring = thread::Builder::new().name("overhead".to_owned());
    // A loop of its own, since the caller's may be waiting for this.
    let measuring = measuring.spawn(|| System::new().block_on(measure_engine()))?;
    measuring.join().map_err(|_| anyhow!("the measurement of the scheduler has panicked"))?
}

async fn measure_engine() -> Result<[f64; 2]> {
    let mut flags = Overrides::default();
    flags.set("device.kind", Some("fake"));
    flags.set("scheduler.slots", Some(SEQUENCES as u32));
    flags.set("scheduler.itl_target", Some("0s"));
    // As with devices that compute on the CPU.
    flags.set("scheduler.run_ahead", Some("off"));
    flags.set("kv.size", Some("4096 tokens"));
    let config = Config::load(None, flags)?;
    let (source, tokenizer) = open_with_draft(&ModelRef::Demo, &config)?;
    let setup = engine_setup(&config, &source)?;
    let factories = factories(&config.device, &source, &tokenizer, &setup);
    let engine = engine::start(setup, tokenizer, factories).await?;
    let measured = async {
        let [one, all] = [1, SEQUENCES].map(|sequences| step_seconds(&engine, &config, sequences));
        let (one, all) = (one.await?, all.await?);
        let token = ((all - one) / (SEQUENCES - 1) as f64).max(0.0);
        anyhow::Ok([(one - token).max(0.0), token])
    };
    let measured = measured.await;
    engine.stop();
    measured
}

/// Returns the seconds of a step with so many sequences in the fastest run.
async fn step_seconds(engine: &Engine, config: &Config, sequences: usize) -> Result<f64> {
    let api = LocalApi::new(ServeParts::from(engine), config.server.clone());
    let body = json!({"prompt": "Once", "n": sequences, "max_tokens": TOKENS, "ignore_eos": true});
    let (began, mut least) = (Instant::now(), f64::INFINITY);
    while least.is_infinite() || began.elapsed() < MEASURE_TIME {
        let started = Instant::now();
        let answer = api.post("/v1/completions", &body).await;
        answer.map_err(|error| anyhow!("an engine with a fake device has failed: {error}"))?;
        least = least.min(started.elapsed().as_secs_f64());
    }
    Ok(least / TOKENS as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scheduling_takes_time_but_not_much() {
        let [step, token] = measure().unwrap();
        assert!(step + token > 1e-7 && step + token < 1.0, "{step}, {token}");
    }
}
