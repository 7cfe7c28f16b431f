//! `mainstem serve`: runs the engine and its HTTP server, from start to shutdown.
//!
//! Invariant: nothing is loaded before the configuration is checked, including the files and the port that it
//! names.

use super::flags::{
    EngineFlags, LogFlags, ModelArgument, ModelFlags, PartitionFlags, ServerFlags, SpeculationFlags,
};
use super::tier_flags::TierFlags;
use super::{start, start_log};
use crate::config::{Config, Overrides};
use crate::server::{BoundServer, ServeParts, ShutdownOutcome};
use crate::telemetry;
use actix_web::rt::{self, System};
use anyhow::{Context, Result, bail};
use clap::Args;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use tokio::select;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tracing::{info, warn};

/// Serve a model over HTTP.
///
/// Values come from the built-in defaults, the configuration file, environment variables
/// (MAINSTEM_SERVER_PORT sets server.port) and these flags; later ones override earlier ones.
#[derive(Args)]
#[command(after_help = "\
Examples:
  mainstem serve                                    serve the built-in demo model
  mainstem serve path/to/model --port 8000 --slots 64
  mainstem serve hf:owner/name@main --host 0.0.0.0 --api-key-file keys.txt
  MAINSTEM_SERVER_PORT=8000 mainstem serve path/to/model --config my.toml")]
pub struct ServeArgs {
    #[command(flatten)]
    path: ModelArgument,
    #[command(flatten)]
    model: ModelFlags,
    #[command(flatten)]
    server: ServerFlags,
    #[command(flatten)]
    engine: EngineFlags,
    #[command(flatten)]
    tiers: TierFlags,
    #[command(flatten)]
    speculation: SpeculationFlags,
    #[command(flatten)]
    partition: PartitionFlags,
    #[command(flatten)]
    log: LogFlags,
}

impl ServeArgs {
    /// Returns the configuration file, if given, and the flags that override it.
    pub(super) fn layers(mut self) -> (Option<PathBuf>, Overrides) {
        let file = self.model.config.take();
        let mut flags = Overrides::default();
        flags.set("model.path", self.path.name());
        self.model.add_to(&mut flags);
        self.server.add_to(&mut flags);
        self.engine.add_to(&mut flags);
        self.tiers.add_to(&mut flags);
        self.speculation.add_to(&mut flags);
        self.partition.add_to(&mut flags);
        self.log.add_to(&mut flags);
        (file, flags)
    }
}

/// Serves with the given arguments until a signal ends the process.
pub fn run(args: ServeArgs) -> Result<()> {
    let (file, flags) = args.layers();
    let config = Config::from_process(file.as_deref(), flags)?;
    start_log(&config)?;
    System::new().block_on(serve(config))
}

/// Starts the engine and serves it until a signal ends the process.
async fn serve(config: Config) -> Result<()> {
    let (mut stops, mut hangups) = signals()?;
    let place = BoundServer::bind(config.server.clone())?;
    let reloader = place.reloader();
    rt::spawn(async move {
        while hangups.recv().await.is_some() {
            if let Err(error) = reloader.reload() {
                let error = format!("{error:#}");
                warn!("SIGHUP: nothing is reloaded: {}", error.escape_debug());
            }
        }
    });
    let loading = async {
        let prepared = start::prepare_server(&config).await?;
        // Before the engine starts, so that metrics recorded while loading are kept.
        telemetry::install(Some(prepared.name()));
        if let Some(endpoint) = &config.telemetry.traces {
            telemetry::start_traces(endpoint, prepared.name())?;
        }
        let budget = start::MemoryBudget::new(&prepared, &config.server, &place)?;
        Ok::<_, anyhow::Error>((prepared.start().await?, budget))
    };
    let (engine, budget) = select! {
        loaded = loading => loaded?,
        _ = stops.recv() => bail!("stopped while the model was loading"),
    };
    engine.report().lines().for_each(|line| info!("{line}"));
    if let Some(gpus) = start::unused_gpus(&config.device) {
        info!("gpus         {gpus}");
    }
    info!("{}", budget.line());
    let server = place.serve(ServeParts::from(&engine))?;
    let ending = server.run(stops, config.scheduler.drain_timeout).await?;
    telemetry::stop_traces();
    telemetry::flush_inflight_log();
    match ending {
        // Stopping waits for the device, which is idle.
        ShutdownOutcome::Drained => engine.stop(),
        // The device may never complete its step; the process exits without it.
        ShutdownOutcome::TimedOut => {
            bail!("requests in flight were cut off: scheduler.drain_timeout has elapsed")
        }
        ShutdownOutcome::Aborted => bail!("requests in flight were cut off by a second signal"),
    }
    Ok(())
}

/// Returns a channel that receives a message per SIGTERM or SIGINT, and one that receives a message per
/// SIGHUP. If the terminal that the program was started at is gone, SIGHUP says so, and counts as the others.
fn signals() -> Result<(UnboundedReceiver<()>, UnboundedReceiver<()>)> {
    let listen = |kind| signal(kind).context("cannot listen for signals");
    let (mut terminate, mut interrupt) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
    let mut hangup = listen(SignalKind::hangup())?;
    let ((stops, stop_receiver), (reloads, reload_receiver)) = (unbounded_channel(), unbounded_channel());
    let had_terminal = io::stdin().is_terminal();
    rt::spawn(async move {
        loop {
            let signals = select! {
                _ = terminate.recv() => &stops,
                _ = interrupt.recv() => &stops,
                _ = hangup.recv() => match had_terminal && !io::stdin().is_terminal() {
                    true => &stops,
                    false => &reloads,
                },
            };
            // A receiver that is gone needs no more signals.
            _ = signals.send(());
        }
    });
    Ok((stop_receiver, reload_receiver))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{
        DeviceKind, ExpertPlacement, KvSize, LaneCount, LogFormat, Policy, SamplingDefaultsSource,
        SpeculationMethod, TlsFiles, TraceEndpoint, format_groups,
    };
    use crate::quantize::WeightRules;
    use crate::request::{ParamList, Pooling};
    use clap::Parser;
    use mainstem_kernels::cpu::Isa;
    use mainstem_kernels::{ActivationPrecision, QuantType};
    use std::time::Duration;

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        args: ServeArgs,
    }

    fn config_of(flags: &str) -> Config {
        let words = ["serve"].into_iter().chain(flags.split_whitespace());
        let (file, flags) = Alone::try_parse_from(words).unwrap().args.layers();
        assert_eq!(file, None);
        Config::load(None, flags).unwrap()
    }

    #[test]
    fn without_flags_the_defaults_stand() {
        assert_eq!(config_of(""), Config::load(None, Overrides::default()).unwrap());
    }

    #[test]
    fn every_flag_of_model_and_server_reaches_its_value() {
        let config = config_of(
            "some/model --spec my.toml --chat-template my.jinja --sampling-defaults neutral \
             --sampling top_p=0.5,min_p=0.25 \
             --served-model-name tiny --alias a,b --alias c --accept-any-model \
             --pooling cls --normalize no --host 0.0.0.0 --port 81 --workers 3 \
             --api-key a --api-key b \
             --cors-origin https://c.d --cors-origin http://e:1 \
             --allowed-host a.b --allowed-host *.c --tls-cert cert --tls-key key \
             --request-timeout 9s --drain-timeout 8s --data-dir data \
             --inflight-log log.csv --otlp-traces-endpoint http://a:4318/v1/traces \
             --log-format json --log-level debug",
        );
        let model = config.model;
        assert_eq!((model.path.as_str(), model.served_name.as_str()), ("some/model", "tiny"));
        assert_eq!(model.spec, Some("my.toml".into()));
        assert_eq!((model.pooling, model.normalize), (Some(Pooling::Cls), Some(false)));
        assert_eq!(model.chat_template, Some("my.jinja".into()));
        assert_eq!(model.sampling_defaults, SamplingDefaultsSource::Neutral);
        assert_eq!(model.sampling, ParamList::parse_text("top_p=0.5,min_p=0.25").unwrap());
        let server = config.server;
        assert_eq!((server.host.as_str(), server.port, server.workers), ("0.0.0.0", 81, 3));
        assert_eq!(
            (server.model_names, server.accept_any_model),
            (["a", "b", "c"].map(Into::into).to_vec(), true)
        );
        assert_eq!(server.api_keys.0, ["a", "b"]);
        assert_eq!(server.cors_origins, ["https://c.d", "http://e:1"]);
        assert_eq!(server.allowed_hosts, ["a.b", "*.c"]);
        assert_eq!(server.tls, Some(TlsFiles { cert: "cert".into(), key: "key".into() }));
        assert_eq!(server.request_timeout, Some(Duration::from_secs(9)));
        assert_eq!(server.batches.data_dir, Some("data".into()));
        assert_eq!(server.inflight_log, Some("log.csv".into()));
        let endpoint = TraceEndpoint::Url("http://a:4318/v1/traces".into());
        assert_eq!(config.telemetry.traces, Some(endpoint));
        assert_eq!(config.scheduler.drain_timeout, Duration::from_secs(8));
        assert_eq!((config.log.format, config.log.level.as_str()), (LogFormat::Json, "debug"));
    }

    #[test]
    fn every_flag_of_the_engine_reaches_its_value() {
        let config = config_of(
            "--slots 4 --max-waiting 5 --token-budget 66 --policy window --window 7s --shuffle off \
             --kv-type bf16 --kv-size 99tokens --page-size 64 --max-context 10 --sparse-attention 0.5 \
             --prefix-cache off --lanes 3 --device fake --devices 0&1;2 --layers 2,1 --shares 3&1;1 \
             --experts expert --step-timeout 9s --threads 11 --isa portable --activations f32 \
             --weights head=q6,q4 --fake-step 20ms --fake-row 100us",
        );
        let scheduler = config.scheduler;
        assert_eq!((scheduler.slots, scheduler.max_waiting, scheduler.token_budget), (4, 5, 66));
        assert_eq!(scheduler.policy, Policy::Window { window: Duration::from_secs(7) });
        assert_eq!((scheduler.shuffle, scheduler.lanes), (false, LaneCount::Number(3)));
        let kv = config.kv;
        assert_eq!((kv.ty, kv.size, kv.page_size), (QuantType::BF16, KvSize::Tokens(99), 64));
        assert_eq!((kv.max_context, kv.sparse_attention.floor_of(100)), (Some(10), 50));
        assert!(!kv.prefix_cache);
        assert_eq!(config.model.weights, WeightRules::parse("head=q6,q4").unwrap());
        let device = config.device;
        assert_eq!(
            (device.threads, device.isa, device.activation_precision),
            (11, Isa::Portable, ActivationPrecision::F32)
        );
        let (step, row) = (Duration::from_millis(20), Duration::from_micros(100));
        assert!(device.devices().all(|device| device.kind == DeviceKind::Fake { step, row }));
        assert_eq!(format_groups(&device.groups), "fake:0&fake:1;fake:2");
        assert_eq!((device.layers, device.shares), (vec![2, 1], vec![vec![3, 1], vec![1]]));
        assert_eq!(
            (device.experts, device.step_timeout),
            (ExpertPlacement::Expert, Some(Duration::from_secs(9)))
        );
    }

    #[test]
    fn every_flag_of_speculation_reaches_its_value() {
        let speculation = config_of("--draft some/draft --speculation prompt_lookup").speculation;
        assert_eq!(
            (speculation.draft.as_str(), speculation.method),
            ("some/draft", SpeculationMethod::PromptLookup)
        );
    }

    #[test]
    fn deprecated_flags_are_accepted() {
        let current = config_of("--page-size 64 --sparse-attention 0.5");
        assert_eq!(config_of("--page-positions 64 --attended-share 0.5"), current);
    }
}
