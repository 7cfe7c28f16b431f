//! `mainstem serve`: the engine and the HTTP server before it, from start to shutdown.
//!
//! Invariant: flags only name values; what they may be is told by `config`, for flags and files alike.

use super::start;
use crate::config::{Config, ConfigError, Overrides, Source};
use crate::server::{Ending, ServeParts, Server};
use actix_web::rt;
use anyhow::{Context, Result, bail};
use clap::Args;
use std::path::PathBuf;
use tokio::select;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tracing::info;

/// Serve a model over HTTP.
///
/// Values come from the built-in defaults, then from the file, then from these flags.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Folder with the model's files, or one file.
    model: Option<PathBuf>,
    /// Specification file to read the model by, instead of the one that ships for its type.
    #[arg(long, value_name = "FILE")]
    spec: Option<PathBuf>,
    /// Configuration file (TOML); config/mainstem.toml shows every key.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Name of the model in the API.
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,
    /// Address to listen on.
    #[arg(long)]
    host: Option<String>,
    /// Port to listen on; 0 takes any that is free.
    #[arg(long)]
    port: Option<u16>,
    /// HTTP threads.
    #[arg(long, value_name = "N")]
    workers: Option<u32>,
    /// Sequences in the decode loop at once.
    #[arg(long, value_name = "N")]
    slots: Option<u32>,
    /// Requests that may wait for a slot.
    #[arg(long, value_name = "N")]
    max_waiting: Option<u32>,
    /// Rows of one step; more than slots.
    #[arg(long, value_name = "N")]
    token_budget: Option<u32>,
    /// How requests share the device.
    #[arg(long, value_parser = ["fused", "window", "concurrent"])]
    policy: Option<String>,
    /// Length of the window of policy "window", such as 4s.
    #[arg(long, value_name = "TIME")]
    window: Option<String>,
    /// Close holes between slots.
    #[arg(long, value_parser = ["on", "off"])]
    shuffle: Option<String>,
    /// Time for requests in flight at shutdown, such as 30s.
    #[arg(long, value_name = "TIME")]
    drain_timeout: Option<String>,
    /// Number format of keys and values.
    #[arg(long, value_parser = ["f32", "f16", "bf16"])]
    kv_type: Option<String>,
    /// Room for keys and values: auto, "65536 tokens" or 2GiB.
    #[arg(long, value_name = "SIZE")]
    kv_size: Option<String>,
    /// Token positions of one page.
    #[arg(long, value_name = "N")]
    page_positions: Option<u32>,
    /// Longest prompt and answer together, in tokens; 0 is the model's own limit.
    #[arg(long, value_name = "N")]
    max_context: Option<u32>,
    /// Backend that computes.
    #[arg(long, value_parser = ["cpu", "reference"])]
    device: Option<String>,
    /// Compute threads; 0 is one for each core.
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
    /// Instruction set.
    #[arg(long, value_parser = ["auto", "avx512", "avx2", "portable"])]
    isa: Option<String>,
    /// Form of log lines.
    #[arg(long, value_parser = ["text", "json"])]
    log_format: Option<String>,
    /// Log level or filter directives.
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
}

impl ServeArgs {
    /// The whole configuration, with the flags over the file over the defaults.
    pub fn config(self) -> Result<Config, ConfigError> {
        let file = self.config.clone();
        let config = Config::load(file.as_deref(), self.overrides())?;
        if config.model.path.as_os_str().is_empty() {
            let message = "which model? give MODEL, or model.path in a configuration file".to_string();
            return Err(ConfigError { origin: Source::CommandLine, message });
        }
        Ok(config)
    }

    fn overrides(self) -> Overrides {
        let mut flags = Overrides::default();
        flags.set("model.path", self.model.map(|path| path.to_string_lossy().into_owned()));
        flags.set("model.spec", self.spec.map(|path| path.to_string_lossy().into_owned()));
        flags.set("model.served_name", self.served_model_name);
        flags.set("server.host", self.host);
        flags.set("server.port", self.port.map(i64::from));
        flags.set("server.workers", self.workers);
        flags.set("scheduler.slots", self.slots);
        flags.set("scheduler.max_waiting", self.max_waiting);
        flags.set("scheduler.token_budget", self.token_budget);
        flags.set("scheduler.policy", self.policy);
        flags.set("scheduler.window", self.window);
        flags.set("scheduler.shuffle", self.shuffle);
        flags.set("scheduler.drain_timeout", self.drain_timeout);
        flags.set("kv.type", self.kv_type);
        flags.set("kv.size", self.kv_size);
        flags.set("kv.page_positions", self.page_positions);
        flags.set("kv.max_context", self.max_context);
        flags.set("device.kind", self.device);
        flags.set("device.threads", self.threads);
        flags.set("device.isa", self.isa);
        flags.set("log.format", self.log_format);
        flags.set("log.level", self.log_level);
        flags
    }
}

/// Starts the engine and serves it until a signal ends the process.
pub async fn run(config: Config) -> Result<()> {
    // Before the engine, so that what loading records has a place.
    crate::telemetry::install();
    let mut stops = stop_signals()?;
    let engine = select! {
        engine = start::engine(&config) => engine?,
        _ = stops.recv() => bail!("stopped while the model was loading"),
    };
    engine.report.lines().for_each(|line| info!("{line}"));
    let parts = ServeParts {
        intake: engine.intake.clone(),
        status: engine.status.clone(),
        tokenizer: engine.tokenizer.clone(),
        model: engine.model.clone(),
    };
    let server = Server::bind(parts, config.server)?;
    let ending = server.run(stops, config.scheduler.drain_timeout).await?;
    match ending {
        // Waits for the device, which is idle.
        Ending::Drained => engine.stop(),
        // The device may never answer; the process ends without it.
        Ending::TimedOut => bail!("requests in flight were cut off: scheduler.drain_timeout is over"),
        Ending::Cut => bail!("requests in flight were cut off by a second signal"),
    }
    Ok(())
}

/// SIGTERM and SIGINT, as they come.
fn stop_signals() -> Result<UnboundedReceiver<()>> {
    let listen = |kind| signal(kind).context("cannot listen for signals");
    let (mut terminate, mut interrupt) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
    let (stops, receiver) = unbounded_channel();
    rt::spawn(async move {
        loop {
            select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if stops.send(()).is_err() {
                return;
            }
        }
    });
    Ok(receiver)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{DeviceKind, KvSize, LogFormat, Policy};
    use clap::{CommandFactory, Parser};
    use mainstem_kernels::QuantType;
    use mainstem_kernels::cpu::Isa;
    use std::time::Duration;

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        args: ServeArgs,
    }

    fn config_of(flags: &str) -> Result<Config, ConfigError> {
        Alone::try_parse_from(["serve"].into_iter().chain(flags.split_whitespace())).unwrap().args.config()
    }

    #[test]
    fn the_flags_are_well_formed() {
        Alone::command().debug_assert();
    }

    #[test]
    fn every_flag_reaches_its_value() {
        let config = config_of(
            "some/model --spec my.toml --served-model-name tiny --host 0.0.0.0 --port 81 --workers 3 --slots 4 \
             --max-waiting 5 --token-budget 66 --policy window --window 7s --shuffle off \
             --drain-timeout 8s --kv-type bf16 --kv-size 99tokens --page-positions 64 \
             --max-context 10 --device reference --threads 11 --isa portable --log-format json \
             --log-level debug",
        )
        .unwrap();
        assert_eq!(config.model.path, PathBuf::from("some/model"));
        assert_eq!(config.model.spec, Some(PathBuf::from("my.toml")));
        assert_eq!(config.model.served_name, "tiny");
        assert_eq!(
            (config.server.host.as_str(), config.server.port, config.server.workers),
            ("0.0.0.0", 81, 3)
        );
        let scheduler = config.scheduler;
        assert_eq!((scheduler.slots, scheduler.max_waiting, scheduler.token_budget), (4, 5, 66));
        assert_eq!(scheduler.policy, Policy::Window { window: Duration::from_secs(7) });
        assert_eq!((scheduler.shuffle, scheduler.drain_timeout), (false, Duration::from_secs(8)));
        let kv = config.kv;
        assert_eq!((kv.ty, kv.size, kv.page_positions), (QuantType::BF16, KvSize::Tokens(99), 64));
        assert_eq!(kv.max_context, Some(10));
        let device = config.device;
        assert_eq!((device.kind, device.threads, device.isa), (DeviceKind::Reference, 11, Isa::Portable));
        assert_eq!((config.log.format, config.log.level.as_str()), (LogFormat::Json, "debug"));
    }

    #[test]
    fn a_model_must_be_named() {
        let error = config_of("--port 1").unwrap_err();
        assert_eq!(error.origin, Source::CommandLine);
        assert!(error.message.contains("MODEL"));
    }
}
