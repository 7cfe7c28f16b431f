//! The flags that subcommands share, in groups. A field has the name of the key that it sets, the dot an
//! underscore.
//!
//! Invariant: flags only name values; what they may be is told by `config`, for every layer alike.

use crate::config::Overrides;
use clap::{Args, ValueHint};
use mainstem_kernels::cpu::Isa;
use std::path::PathBuf;

/// What keys and values can be stored as.
pub const KV_TYPES: [&str; 7] = ["f32", "f16", "bf16", "q8", "q4", "q8_0", "g4_b64"];

/// What is known of the model beside its name.
#[derive(Args)]
#[command(next_help_heading = "Model")]
pub struct ModelFlags {
    /// Configuration file (TOML); config/mainstem.toml shows every key.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
    /// Specification to read the model by, instead of its own or the shipped one.
    #[arg(long = "spec", value_name = "FILE", value_hint = ValueHint::FilePath)]
    model_spec: Option<String>,
    /// Number formats to load matrices in, such as q4 or "head=q6,q4".
    #[arg(long = "weights", value_name = "RULES")]
    model_weights: Option<String>,
    /// Template that makes a prompt of a chat, instead of the model's own.
    #[arg(long = "chat-template", value_name = "FILE", value_hint = ValueHint::FilePath)]
    model_chat_template: Option<String>,
    /// Who says how to sample when a request does not.
    #[arg(long = "sampling-defaults", value_name = "WHOSE", value_parser = ["model", "neutral"])]
    model_sampling_defaults: Option<String>,
}

impl ModelFlags {
    pub fn add_to(self, overrides: &mut Overrides) {
        overrides.set("model.spec", self.model_spec);
        overrides.set("model.weights", self.model_weights);
        overrides.set("model.chat_template", self.model_chat_template);
        overrides.set("model.sampling_defaults", self.model_sampling_defaults);
    }
}

/// Scheduler, cache and device.
#[derive(Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineFlags {
    /// Sequences in the decode loop at once.
    #[arg(long = "slots", value_name = "N")]
    scheduler_slots: Option<u32>,
    /// Requests that may wait for a slot.
    #[arg(long = "max-waiting", value_name = "N")]
    scheduler_max_waiting: Option<u32>,
    /// Tokens of one step; more than slots.
    #[arg(long = "token-budget", value_name = "N")]
    scheduler_token_budget: Option<u32>,
    /// How requests share the device.
    #[arg(long = "policy", value_name = "POLICY", value_parser = ["fused", "window", "concurrent"])]
    scheduler_policy: Option<String>,
    /// Length of the window of policy "window", such as 4s.
    #[arg(long = "window", value_name = "TIME")]
    scheduler_window: Option<String>,
    /// Close holes between slots.
    #[arg(long = "shuffle", value_name = "SWITCH", value_parser = ["on", "off"])]
    scheduler_shuffle: Option<String>,
    /// Steps in flight at once: a number, or auto, one for each stage.
    #[arg(long = "lanes", value_name = "N")]
    scheduler_lanes: Option<String>,
    /// Number format of keys and values.
    #[arg(long = "kv-type", visible_alias = "kv", value_name = "TYPE", value_parser = KV_TYPES)]
    kv_type: Option<String>,
    /// Room for keys and values: auto, "65536 tokens" or 2GiB.
    #[arg(long = "kv-size", value_name = "SIZE")]
    kv_size: Option<String>,
    /// Token positions of one page.
    #[arg(long = "page-positions", value_name = "N")]
    kv_page_positions: Option<u32>,
    /// Longest prompt and answer together, in tokens; 0 is the model's own limit.
    #[arg(long = "max-context", value_name = "N")]
    kv_max_context: Option<u32>,
    /// Share of its past whose values a drawn token takes, such as 0.1.
    #[arg(long = "attended-share", value_name = "SHARE")]
    kv_attended_share: Option<f64>,
    /// What computes.
    #[arg(long = "device", value_name = "DEVICE", value_parser = ["cpu", "reference", "fake"])]
    device_kind: Option<String>,
    /// Longest time of a step, such as 60s; 0s is no limit.
    #[arg(long = "step-timeout", value_name = "TIME")]
    device_step_timeout: Option<String>,
    /// Compute threads of each device; 0 divides the cores among them.
    #[arg(long = "threads", value_name = "N")]
    device_threads: Option<u32>,
    /// Instruction set.
    #[arg(long = "isa", value_name = "ISA", value_parser = Isa::ALL.map(Isa::name))]
    device_isa: Option<String>,
    /// What products take activations as.
    #[arg(long = "activations", value_name = "HOW", value_parser = ["fast", "f32"])]
    device_activations: Option<String>,
    /// Time of a step of device "fake", such as 20ms.
    #[arg(long = "fake-step", value_name = "TIME")]
    device_fake_step: Option<String>,
    /// What each row adds to the time of such a step, such as 100us.
    #[arg(long = "fake-row", value_name = "TIME")]
    device_fake_row: Option<String>,
}

impl EngineFlags {
    pub fn add_to(self, overrides: &mut Overrides) {
        overrides.set("scheduler.slots", self.scheduler_slots);
        overrides.set("scheduler.max_waiting", self.scheduler_max_waiting);
        overrides.set("scheduler.token_budget", self.scheduler_token_budget);
        overrides.set("scheduler.policy", self.scheduler_policy);
        overrides.set("scheduler.window", self.scheduler_window);
        overrides.set("scheduler.shuffle", self.scheduler_shuffle);
        overrides.set("scheduler.lanes", self.scheduler_lanes);
        overrides.set("kv.type", self.kv_type);
        overrides.set("kv.size", self.kv_size);
        overrides.set("kv.page_positions", self.kv_page_positions);
        overrides.set("kv.max_context", self.kv_max_context);
        overrides.set("kv.attended_share", self.kv_attended_share);
        overrides.set("device.kind", self.device_kind);
        overrides.set("device.step_timeout", self.device_step_timeout);
        overrides.set("device.threads", self.device_threads);
        overrides.set("device.isa", self.device_isa);
        overrides.set("device.activations", self.device_activations);
        overrides.set("device.fake_step", self.device_fake_step);
        overrides.set("device.fake_row", self.device_fake_row);
    }
}

/// Which devices hold which part of the model.
#[derive(Debug, Args)]
#[command(next_help_heading = "Devices")]
pub struct PartitionFlags {
    /// Devices by stage: 0;1 by layers, 0&1 by tensors, "0&1;2&3" both.
    #[arg(long = "devices", value_name = "DEVICES")]
    device_groups: Option<String>,
    /// Layers of each stage, such as 20,20.
    #[arg(long = "layers", value_name = "NUMBERS")]
    device_layers: Option<String>,
    /// How much of its stage each member takes, such as "2&1;1".
    #[arg(long = "shares", value_name = "NUMBERS")]
    device_shares: Option<String>,
    /// How members share experts.
    #[arg(long = "experts", value_name = "HOW", value_parser = ["column", "expert"])]
    device_experts: Option<String>,
}

impl PartitionFlags {
    pub fn add_to(self, overrides: &mut Overrides) {
        overrides.set("device.groups", self.device_groups);
        overrides.set("device.layers", self.device_layers);
        overrides.set("device.shares", self.device_shares);
        overrides.set("device.experts", self.device_experts);
    }
}

/// The HTTP server.
#[derive(Args)]
#[command(next_help_heading = "Server")]
pub struct ServerFlags {
    /// Address to listen on.
    #[arg(long = "host", value_name = "ADDRESS", value_hint = ValueHint::Hostname)]
    server_host: Option<String>,
    /// Port to listen on; 0 takes any that is free.
    #[arg(long = "port", value_name = "PORT")]
    server_port: Option<u16>,
    /// Name of the model in the API.
    #[arg(long = "served-model-name", value_name = "NAME")]
    model_served_name: Option<String>,
    /// How an encoder makes one vector of a text.
    #[arg(long = "pooling", value_name = "HOW", value_parser = ["auto", "mean", "cls", "last"])]
    model_pooling: Option<String>,
    /// Bring vectors to length 1.
    #[arg(long = "normalize", value_name = "SWITCH", value_parser = ["auto", "yes", "no"])]
    model_normalize: Option<String>,
    /// Key that clients must send; may be repeated. Others on the machine can see it.
    #[arg(long = "api-key", value_name = "KEY")]
    server_api_keys: Option<Vec<String>>,
    /// File with such keys, one in a line.
    #[arg(long = "api-key-file", value_name = "FILE", value_hint = ValueHint::FilePath)]
    server_api_key_file: Option<String>,
    /// Origin whose pages may use the API, or *; may be repeated.
    #[arg(long = "cors-origin", value_name = "ORIGIN", value_hint = ValueHint::Url)]
    server_cors_origins: Option<Vec<String>>,
    /// Certificate (PEM) to speak HTTPS with.
    #[arg(long = "tls-cert", value_name = "FILE", value_hint = ValueHint::FilePath)]
    server_tls_cert: Option<String>,
    /// Private key (PEM) of the certificate.
    #[arg(long = "tls-key", value_name = "FILE", value_hint = ValueHint::FilePath)]
    server_tls_key: Option<String>,
    /// Longest time of a request, such as 10m; 0s is no limit.
    #[arg(long = "request-timeout", value_name = "TIME")]
    server_request_timeout: Option<String>,
    /// Time for requests in flight at shutdown, such as 30s.
    #[arg(long = "drain-timeout", value_name = "TIME")]
    scheduler_drain_timeout: Option<String>,
    /// HTTP threads.
    #[arg(long = "workers", value_name = "N")]
    server_workers: Option<u32>,
}

impl ServerFlags {
    pub fn add_to(self, overrides: &mut Overrides) {
        overrides.set("server.host", self.server_host);
        overrides.set("server.port", self.server_port.map(i64::from));
        overrides.set("model.served_name", self.model_served_name);
        overrides.set("model.pooling", self.model_pooling);
        overrides.set("model.normalize", self.model_normalize);
        overrides.set("server.api_keys", self.server_api_keys);
        overrides.set("server.api_key_file", self.server_api_key_file);
        overrides.set("server.cors_origins", self.server_cors_origins);
        overrides.set("server.tls_cert", self.server_tls_cert);
        overrides.set("server.tls_key", self.server_tls_key);
        overrides.set("server.request_timeout", self.server_request_timeout);
        overrides.set("scheduler.drain_timeout", self.scheduler_drain_timeout);
        overrides.set("server.workers", self.server_workers);
    }
}

/// The log.
#[derive(Args)]
#[command(next_help_heading = "Log")]
pub struct LogFlags {
    /// Form of log lines.
    #[arg(long, value_name = "FORM", value_parser = ["text", "json"])]
    log_format: Option<String>,
    /// Log level or filter directives.
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
}

impl LogFlags {
    pub fn add_to(self, overrides: &mut Overrides) {
        overrides.set("log.format", self.log_format);
        overrides.set("log.level", self.log_level);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Cli;
    use crate::config::{Config, reference};
    use clap::builder::PossibleValue;
    use clap::{Arg, Command, CommandFactory, Parser};

    fn serve() -> Command {
        Cli::command().find_subcommand("serve").expect("there is serve").clone()
    }

    /// What sets `key` in `serve`: a flag, or its place.
    fn argument(serve: &Command, key: &str) -> Option<String> {
        let id = key.replace('.', "_");
        let named = |arg: &Arg| match arg.get_long() {
            Some(flag) => format!("--{flag}"),
            None => arg.get_value_names().into_iter().flatten().map(ToString::to_string).collect(),
        };
        serve.get_arguments().find(|arg| arg.get_id() == id.as_str()).map(named)
    }

    /// Each argument is a row of the page, and each row of the page a key.
    #[test]
    fn the_page_has_every_key_with_its_flag() {
        let serve = serve();
        let tables = reference(|key| argument(&serve, key));
        let page = include_str!("../../docs/configuration.md");
        let (_, shown) = page.split_once("\n## Keys\n").expect("the page has a part for the keys");
        assert_eq!(shown, tables, "docs/configuration.md differs from config::reference()");
        for arg in serve.get_arguments().filter(|arg| arg.get_id() != "config") {
            let flag = arg.get_long().map_or("`MODEL`".to_string(), |flag| format!("`--{flag}`"));
            assert!(tables.contains(&flag), "{flag} is no key's");
        }
    }

    /// What a flag offers is what its key takes.
    #[test]
    fn every_word_of_a_flag_is_accepted() {
        let serve = serve();
        let words: Vec<(&Arg, PossibleValue)> = serve
            .get_arguments()
            .flat_map(|arg| arg.get_possible_values().into_iter().map(move |word| (arg, word)))
            .collect();
        assert!(words.len() > 15);
        for (arg, word) in words {
            let line = ["mainstem", "serve", &format!("--{}={}", arg.get_long().unwrap(), word.get_name())];
            let super::super::Command::Serve(args) = Cli::try_parse_from(line).unwrap().command else {
                panic!("{line:?} is serve")
            };
            let (file, flags) = args.layers();
            Config::load(file.as_deref(), flags).unwrap_or_else(|error| panic!("{line:?}: {error}"));
        }
    }

    /// Long help is for pages; here a line must do.
    #[test]
    fn every_flag_is_explained_in_a_line() {
        for arg in serve().get_arguments() {
            let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
            assert!((5..=85).contains(&help.len()) && !help.contains('\n'), "{}: {help}", arg.get_id());
        }
    }
}
