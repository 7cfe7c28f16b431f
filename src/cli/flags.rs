//! Groups of flags that subcommands share. A field is named like the configuration key that it sets, with an
//! underscore for the dot.
//!
//! Invariant: flags only pass values on; `config` validates them, like those of every other layer.

use super::tier_flags::TierFlags;
use crate::config::{self, Overrides};
use clap::{Args, Command, ValueHint};
use mainstem_kernels::cpu::Isa;
use std::collections::HashMap;
use std::path::PathBuf;

/// KV cache data types.
const KV_TYPES: [&str; 7] = ["f32", "f16", "bf16", "q8", "q4", "q8_0", "g4_b64"];

/// Heading of options that only measurements and tests need. The short help does not list them.
const EXPERIMENTS: &str = "Experiments";

/// Help text of the argument MODEL.
pub const MODEL_HELP: &str = "Folder, file or hf:owner/name[@revision]; the built-in demo model if not given";

/// The model of a subcommand: an argument, or an option as in llama.cpp.
#[derive(Args)]
pub struct ModelArgument {
    #[arg(help = MODEL_HELP, value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    model_path: Option<String>,
    /// Model, in place of the argument MODEL.
    #[arg(short = 'm', long = "model", value_name = "MODEL", value_hint = ValueHint::AnyPath,
          conflicts_with = "model_path")]
    model_option: Option<String>,
}

impl ModelArgument {
    /// Returns the model, if one is given.
    pub fn name(self) -> Option<String> {
        self.model_path.or(self.model_option)
    }
}

/// The options of all subcommands that configure an engine, other than the model's path. None of its parts
/// has parts of its own: their options would belong to no group that others can refer to.
#[derive(Args)]
pub struct ConfigFlags {
    #[command(flatten)]
    model: ModelFlags,
    #[command(flatten)]
    engine: EngineFlags,
    #[command(flatten)]
    tiers: TierFlags,
    #[command(flatten)]
    partition: PartitionFlags,
    #[command(flatten)]
    log: LogFlags,
}

impl ConfigFlags {
    /// Adds the flags that are given, and returns the configuration file, if given.
    pub fn add_to(mut self, overrides: &mut Overrides) -> Option<PathBuf> {
        let file = self.model.config.take();
        self.model.add_to(overrides);
        self.engine.add_to(overrides);
        self.tiers.add_to(overrides);
        self.partition.add_to(overrides);
        self.log.add_to(overrides);
        file
    }
}

/// Model options other than its path.
#[derive(Args)]
#[command(next_help_heading = "Model")]
pub struct ModelFlags {
    /// Configuration file (TOML); config/mainstem.toml lists all keys.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
    /// Model specification file, instead of the model's own or the built-in one.
    #[arg(long = "spec", value_name = "FILE", value_hint = ValueHint::FilePath)]
    model_spec: Option<String>,
    /// Number formats to load weight matrices in, such as q4 or "head=q6,q4".
    #[arg(long = "weights", value_name = "RULES")]
    model_weights: Option<String>,
    /// Tokenizer file or folder, instead of the model's own.
    #[arg(long = "tokenizer", value_name = "FILE", value_hint = ValueHint::AnyPath)]
    model_tokenizer: Option<String>,
    /// Tokenizer file or folder of the output, instead of the model's own.
    #[arg(long = "target-tokenizer", value_name = "FILE", value_hint = ValueHint::AnyPath)]
    model_target_tokenizer: Option<String>,
    /// Chat template file, instead of the model's own template.
    #[arg(long = "chat-template", value_name = "FILE", value_hint = ValueHint::FilePath)]
    model_chat_template: Option<String>,
    /// Format of the model's tool calls, such as hermes; docs/tools.md lists them.
    #[arg(long = "tool-parser", value_name = "NAME")]
    model_tool_parser: Option<String>,
    /// Format of the model's reasoning, such as deepseek_r1; docs/tools.md lists them.
    #[arg(long = "reasoning-parser", value_name = "NAME")]
    model_reasoning_parser: Option<String>,
    /// Source of default sampling parameters.
    #[arg(long = "sampling-defaults", value_name = "SOURCE", value_parser = ["model", "neutral"])]
    model_sampling_defaults: Option<String>,
    /// Default sampling parameters, such as "repetition_penalty=1.1,top_p=0.9".
    #[arg(long = "sampling", value_name = "PARAMETERS")]
    model_sampling: Option<String>,
}

impl ModelFlags {
    /// Adds the flags that are given.
    pub fn add_to(self, overrides: &mut Overrides) {
        overrides.set("model.spec", self.model_spec);
        overrides.set("model.weights", self.model_weights);
        overrides.set("model.tokenizer", self.model_tokenizer);
        overrides.set("model.target_tokenizer", self.model_target_tokenizer);
        overrides.set("model.chat_template", self.model_chat_template);
        overrides.set("model.tool_parser", self.model_tool_parser);
        overrides.set("model.reasoning_parser", self.model_reasoning_parser);
        overrides.set("model.sampling_defaults", self.model_sampling_defaults);
        overrides.set("model.sampling", self.model_sampling);
    }
}

/// Options of the scheduler, the KV cache and the device.
#[derive(Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineFlags {
    /// Maximum sequences decoded at once.
    #[arg(long = "slots", value_name = "N")]
    scheduler_slots: Option<u32>,
    /// Maximum queued sequences.
    #[arg(long = "max-waiting", value_name = "N")]
    scheduler_max_waiting: Option<u32>,
    /// Maximum batched tokens per step, more than slots; auto is 512, or more from disk.
    #[arg(long = "token-budget", value_name = "N")]
    scheduler_token_budget: Option<String>,
    /// Maximum rows of a step computed at once; auto is all, or 512 with offloading.
    #[arg(long = "batch-rows", value_name = "N")]
    scheduler_batch_rows: Option<String>,
    /// Time between two tokens of a stream, which limits prompt rows; 0s is no limit.
    #[arg(long = "itl-target", value_name = "TIME")]
    scheduler_itl_target: Option<String>,
    /// Batching policy.
    #[arg(long = "policy", help_heading = EXPERIMENTS, hide_short_help = true, value_name = "POLICY",
          value_parser = ["fused", "window", "concurrent"])]
    scheduler_policy: Option<String>,
    /// Length of the batching window with policy "window", such as 4s.
    #[arg(long = "window", help_heading = EXPERIMENTS, hide_short_help = true, value_name = "TIME")]
    scheduler_window: Option<String>,
    /// Close holes between slots when sequences finish.
    #[arg(long = "shuffle", help_heading = EXPERIMENTS, hide_short_help = true, value_name = "MODE",
          value_parser = ["on", "off"])]
    scheduler_shuffle: Option<String>,
    /// Steps in flight at once (lanes): a number, or auto for one per stage.
    #[arg(long = "lanes", value_name = "N")]
    scheduler_lanes: Option<String>,
    /// Send a step before the tokens of the previous one are back.
    #[arg(long = "run-ahead", value_name = "MODE", value_parser = ["auto", "on", "off"])]
    scheduler_run_ahead: Option<String>,
    /// Threads that choose tokens on the host; 0 for as many as there are cores.
    #[arg(long = "sampling-threads", value_name = "N")]
    scheduler_sampling_threads: Option<u32>,
    /// Schemas and grammars of constrained output compiled at once.
    #[arg(long = "grammar-threads", value_name = "N")]
    grammar_threads: Option<u32>,
    /// Memory of compiled schemas and grammars that are kept, such as 256MiB.
    #[arg(long = "grammar-cache-size", value_name = "SIZE")]
    grammar_cache_size: Option<String>,
    /// KV cache data type.
    #[arg(long = "kv-type", visible_alias = "kv", value_name = "TYPE", value_parser = KV_TYPES)]
    kv_type: Option<String>,
    /// KV cache size: auto, "65536 tokens" or 2GiB.
    #[arg(long = "kv-size", value_name = "SIZE")]
    kv_size: Option<String>,
    /// KV page size in tokens.
    #[arg(long = "page-size", alias = "page-positions", value_name = "TOKENS")]
    kv_page_size: Option<u32>,
    /// Maximum prompt and output length together, in tokens; 0 is the model's limit.
    #[arg(short = 'c', long = "max-context", alias = "ctx-size", value_name = "N")]
    kv_max_context: Option<u32>,
    /// Fraction of cached values attended to per generated token, such as 0.1.
    #[arg(long = "sparse-attention", alias = "attended-share", value_name = "FRACTION")]
    kv_sparse_attention: Option<f64>,
    /// Skip the part of a prompt whose keys and values are cached.
    #[arg(long = "prefix-cache", value_name = "MODE", value_parser = ["on", "off"])]
    kv_prefix_cache: Option<String>,
    /// Memory for the layers' weights: all, auto, 20% or 2GiB; the rest is read from disk.
    #[arg(long = "host-memory", value_name = "SIZE")]
    tiers_host: Option<String>,
    /// Memory for the layers' KV caches: all, auto, 20% or 2GiB; the rest is on disk.
    #[arg(long = "kv-memory", value_name = "SIZE")]
    tiers_kv: Option<String>,
    /// Read and write layers on disk while others compute.
    #[arg(long = "overlap", value_name = "MODE", value_parser = ["on", "off"])]
    tiers_overlap: Option<String>,
    /// Folder for weights and KV caches on disk.
    #[arg(long = "disk-path", value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    tiers_disk_path: Option<String>,
    /// Choice of slots, cache size and weights in memory: as configured, or planned at start.
    #[arg(long = "placement", value_name = "MODE", value_parser = ["configured", "auto"])]
    tiers_placement: Option<String>,
    /// Policy file of `mainstem plan`.
    #[arg(long = "policy-file", value_name = "FILE", value_hint = ValueHint::FilePath)]
    tiers_policy_file: Option<String>,
    /// Compute backend.
    #[arg(long = "device", value_name = "DEVICE", value_parser = ["cpu", "cuda", "reference", "fake"])]
    device_kind: Option<String>,
    /// Maximum time without a step result while steps are pending; 0s is unlimited.
    #[arg(long = "step-timeout", value_name = "TIME")]
    device_step_timeout: Option<String>,
    /// Compute threads per device; 0 divides the cores among the devices.
    #[arg(long = "threads", value_name = "N")]
    device_threads: Option<u32>,
    /// CPU instruction set.
    #[arg(long = "isa", value_name = "ISA", value_parser = Isa::ALL.map(Isa::name))]
    device_isa: Option<String>,
    /// Activation precision in matrix multiplications.
    #[arg(long = "activations", value_name = "PRECISION", value_parser = ["fast", "f32"])]
    device_activations: Option<String>,
    /// Step time of the fake device, such as 20ms.
    #[arg(long = "fake-step", help_heading = EXPERIMENTS, hide_short_help = true, value_name = "TIME")]
    device_fake_step: Option<String>,
    /// Additional step time per row on the fake device, such as 100us.
    #[arg(long = "fake-row", help_heading = EXPERIMENTS, hide_short_help = true, value_name = "TIME")]
    device_fake_row: Option<String>,
}

impl EngineFlags {
    /// Adds the flags that are given.
    pub fn add_to(self, overrides: &mut Overrides) {
        overrides.set("scheduler.slots", self.scheduler_slots);
        overrides.set("scheduler.max_waiting", self.scheduler_max_waiting);
        overrides.set("scheduler.token_budget", self.scheduler_token_budget);
        overrides.set("scheduler.batch_rows", self.scheduler_batch_rows);
        overrides.set("scheduler.itl_target", self.scheduler_itl_target);
        overrides.set("scheduler.policy", self.scheduler_policy);
        overrides.set("scheduler.window", self.scheduler_window);
        overrides.set("scheduler.shuffle", self.scheduler_shuffle);
        overrides.set("scheduler.lanes", self.scheduler_lanes);
        overrides.set("scheduler.run_ahead", self.scheduler_run_ahead);
        overrides.set("scheduler.sampling_threads", self.scheduler_sampling_threads);
        overrides.set("grammar.threads", self.grammar_threads);
        overrides.set("grammar.cache_size", self.grammar_cache_size);
        overrides.set("kv.type", self.kv_type);
        overrides.set("kv.size", self.kv_size);
        overrides.set("kv.page_size", self.kv_page_size);
        overrides.set("kv.max_context", self.kv_max_context);
        overrides.set("kv.sparse_attention", self.kv_sparse_attention);
        overrides.set("kv.prefix_cache", self.kv_prefix_cache);
        overrides.set("tiers.host", self.tiers_host);
        overrides.set("tiers.kv", self.tiers_kv);
        overrides.set("tiers.overlap", self.tiers_overlap);
        overrides.set("tiers.disk_path", self.tiers_disk_path);
        overrides.set("tiers.placement", self.tiers_placement);
        overrides.set("tiers.policy_file", self.tiers_policy_file);
        overrides.set("device.kind", self.device_kind);
        overrides.set("device.step_timeout", self.device_step_timeout);
        overrides.set("device.threads", self.device_threads);
        overrides.set("device.isa", self.device_isa);
        overrides.set("device.activations", self.device_activations);
        overrides.set("device.fake_step", self.device_fake_step);
        overrides.set("device.fake_row", self.device_fake_row);
    }
}

/// Options of speculative decoding.
#[derive(Args)]
#[command(next_help_heading = "Speculative decoding")]
pub struct SpeculationFlags {
    /// Draft model with the same tokenizer, such as demo-draft for the demo model.
    #[arg(long = "draft", value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    speculation_draft: Option<String>,
    /// Source of drafts for requests that choose none.
    #[arg(long = "speculation", value_name = "METHOD",
          value_parser = ["auto", "off", "draft", "prompt_lookup"])]
    speculation_method: Option<String>,
}

impl SpeculationFlags {
    /// Returns whether one of them is given.
    pub fn are_given(&self) -> bool {
        self.speculation_draft.is_some() || self.speculation_method.is_some()
    }

    /// Adds the flags that are given.
    pub fn add_to(self, overrides: &mut Overrides) {
        overrides.set("speculation.draft", self.speculation_draft);
        overrides.set("speculation.method", self.speculation_method);
    }
}

/// Options for dividing a model among devices.
#[derive(Debug, Args)]
#[command(next_help_heading = "Devices")]
pub struct PartitionFlags {
    /// Devices by stage: 0;1 splits layers, 0&1 splits tensors, "0&1;2&3" splits both.
    #[arg(long = "devices", value_name = "DEVICES")]
    device_groups: Option<String>,
    /// Layers of each stage, such as 20,20.
    #[arg(long = "layers", value_name = "NUMBERS")]
    device_layers: Option<String>,
    /// Relative share of each device in its stage, such as "2&1;1".
    #[arg(long = "shares", value_name = "NUMBERS")]
    device_shares: Option<String>,
    /// Split of a mixture of experts among the devices of a stage.
    #[arg(long = "experts", value_name = "SPLIT", value_parser = ["column", "expert"])]
    device_experts: Option<String>,
}

impl PartitionFlags {
    /// Adds the flags that are given.
    pub fn add_to(self, overrides: &mut Overrides) {
        overrides.set("device.groups", self.device_groups);
        overrides.set("device.layers", self.device_layers);
        overrides.set("device.shares", self.device_shares);
        overrides.set("device.experts", self.device_experts);
    }
}

/// Options of the HTTP server.
#[derive(Args)]
#[command(next_help_heading = "Server")]
pub struct ServerFlags {
    /// Address to listen on.
    #[arg(long = "host", value_name = "ADDRESS", value_hint = ValueHint::Hostname)]
    server_host: Option<String>,
    /// Port to listen on; 0 picks a free one.
    #[arg(long = "port", value_name = "PORT")]
    server_port: Option<u16>,
    /// Model name in the API.
    #[arg(long = "served-model-name", value_name = "NAME")]
    model_served_name: Option<String>,
    /// Further names of the model in the API, separated by commas; repeatable.
    #[arg(long = "alias", value_name = "NAMES", value_delimiter = ',')]
    server_model_names: Option<Vec<String>>,
    /// Accept any model name in requests.
    #[arg(long = "accept-any-model")]
    server_accept_any_model: bool,
    /// Method of pooling the token vectors of a text into one embedding.
    #[arg(long = "pooling", value_name = "METHOD", value_parser = ["auto", "mean", "cls", "last"])]
    model_pooling: Option<String>,
    /// L2-normalize embeddings.
    #[arg(long = "normalize", value_name = "MODE", value_parser = ["auto", "yes", "no"])]
    model_normalize: Option<String>,
    /// Tokens whose logits are the scores of a generative reranker, such as "no,yes".
    #[arg(long = "classifier-tokens", value_name = "TOKENS")]
    model_classifier_tokens: Option<String>,
    /// Text that a classifier reads for a pair, with {query} and {document}.
    #[arg(long = "pair-template", value_name = "TEXT")]
    model_pair_template: Option<String>,
    /// API key that clients must send; repeatable. Visible to other users of the machine.
    #[arg(long = "api-key", value_name = "KEY")]
    server_api_keys: Option<Vec<String>>,
    /// File with API keys, one per line.
    #[arg(long = "api-key-file", value_name = "FILE", value_hint = ValueHint::FilePath)]
    server_api_key_file: Option<String>,
    /// Origin allowed to use the API from a browser, or *; repeatable.
    #[arg(long = "cors-origin", value_name = "ORIGIN", value_hint = ValueHint::Url)]
    server_cors_origins: Option<Vec<String>>,
    /// Host name that requests may be for, or *; repeatable.
    #[arg(long = "allowed-host", value_name = "NAME", value_hint = ValueHint::Hostname)]
    server_allowed_hosts: Option<Vec<String>>,
    /// TLS certificate file (PEM).
    #[arg(long = "tls-cert", value_name = "FILE", value_hint = ValueHint::FilePath)]
    server_tls_cert: Option<String>,
    /// TLS private key file (PEM).
    #[arg(long = "tls-key", value_name = "FILE", value_hint = ValueHint::FilePath)]
    server_tls_key: Option<String>,
    /// Maximum duration of a request, such as 10m; 0s is unlimited.
    #[arg(long = "request-timeout", value_name = "TIME")]
    server_request_timeout: Option<String>,
    /// Time for requests in flight to finish at shutdown, such as 30s.
    #[arg(long = "drain-timeout", value_name = "TIME")]
    scheduler_drain_timeout: Option<String>,
    /// HTTP worker threads.
    #[arg(long = "workers", value_name = "N")]
    server_workers: Option<u32>,
    /// Maximum number of open connections.
    #[arg(long = "max-connections", value_name = "N")]
    server_max_connections: Option<u32>,
    /// Port of a listener of its own for /metrics; 0 for none.
    #[arg(long = "metrics-port", value_name = "PORT")]
    server_metrics_port: Option<u16>,
    /// File for the times of the requests that end, as comma-separated values.
    #[arg(long = "inflight-log", value_name = "FILE", value_hint = ValueHint::FilePath)]
    server_inflight_log: Option<String>,
    /// Address to which traces are sent by OTLP over HTTP, or env.
    #[arg(long = "otlp-traces-endpoint", value_name = "URL", value_hint = ValueHint::Url)]
    telemetry_traces: Option<String>,
    /// Folder of the files and batches of the API, which there are with one only.
    #[arg(long = "data-dir", value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    batches_data_dir: Option<String>,
    /// Faults to rehearse, such as fail@100,nan@0.001; requires faults.enabled.
    #[arg(long = "inject", help_heading = EXPERIMENTS, hide_short_help = true, value_name = "FAULTS")]
    faults_inject: Option<String>,
}

impl ServerFlags {
    /// Adds the flags that are given.
    pub fn add_to(self, overrides: &mut Overrides) {
        overrides.set("server.host", self.server_host);
        overrides.set("server.port", self.server_port.map(i64::from));
        overrides.set("model.served_name", self.model_served_name);
        overrides.set("server.model_names", self.server_model_names);
        overrides.set("server.accept_any_model", self.server_accept_any_model.then_some(true));
        overrides.set("model.pooling", self.model_pooling);
        overrides.set("model.normalize", self.model_normalize);
        overrides.set("model.classifier_tokens", self.model_classifier_tokens);
        overrides.set("model.pair_template", self.model_pair_template);
        overrides.set("server.api_keys", self.server_api_keys);
        overrides.set("server.api_key_file", self.server_api_key_file);
        overrides.set("server.cors_origins", self.server_cors_origins);
        overrides.set("server.allowed_hosts", self.server_allowed_hosts);
        overrides.set("server.tls_cert", self.server_tls_cert);
        overrides.set("server.tls_key", self.server_tls_key);
        overrides.set("server.request_timeout", self.server_request_timeout);
        overrides.set("scheduler.drain_timeout", self.scheduler_drain_timeout);
        overrides.set("server.workers", self.server_workers);
        overrides.set("server.max_connections", self.server_max_connections);
        overrides.set("server.metrics_port", self.server_metrics_port.map(i64::from));
        overrides.set("server.inflight_log", self.server_inflight_log);
        overrides.set("telemetry.traces", self.telemetry_traces);
        overrides.set("batches.data_dir", self.batches_data_dir);
        overrides.set("faults.inject", self.faults_inject);
    }
}

/// Options of the log.
#[derive(Args)]
#[command(next_help_heading = "Log")]
pub struct LogFlags {
    /// Log format.
    #[arg(long, value_name = "FORMAT", value_parser = ["text", "json"])]
    log_format: Option<String>,
    /// Log level or filter directives.
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
}

impl LogFlags {
    /// Adds the flags that are given.
    pub fn add_to(self, overrides: &mut Overrides) {
        overrides.set("log.format", self.log_format);
        overrides.set("log.level", self.log_level);
    }
}

/// Adds the default of its key to the help of each option that sets a key. `own` has the defaults in which
/// the subcommand differs.
pub fn with_defaults(command: Command, own: &[(&str, &str)]) -> Command {
    let defaults: HashMap<String, String> =
        config::defaults().map(|(key, default)| (key.replace('.', "_"), default)).collect();
    command.mut_args(|arg| {
        let id = arg.get_id().as_str();
        let of_own = own.iter().find(|(known, _)| *known == id).map(|(_, default)| (*default).to_owned());
        let default = of_own.or_else(|| defaults.get(id).cloned());
        match (default, arg.get_help().map(ToString::to_string)) {
            (Some(default), Some(help)) if arg.get_long().is_some() => {
                arg.help(format!("{help} [default: {default}]"))
            }
            _ => arg,
        }
    })
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

    /// Returns the argument of `serve` that sets `key`: a flag, or a positional argument's name.
    fn argument(serve: &Command, key: &str) -> Option<String> {
        let id = key.replace('.', "_");
        let named = |arg: &Arg| match arg.get_long() {
            Some(flag) => format!("--{flag}"),
            None => arg.get_value_names().into_iter().flatten().map(ToString::to_string).collect(),
        };
        serve.get_arguments().find(|arg| arg.get_id() == id.as_str()).map(named)
    }

    /// Each argument has a row in the page, and each row of the page is a key.
    #[test]
    fn the_page_has_every_key_with_its_flag() {
        let serve = serve();
        let tables = reference(|key| argument(&serve, key));
        let page = include_str!("../../docs/configuration.md");
        let (_, shown) = page.split_once("\n## Keys\n").expect("the page has a section for the keys");
        assert_eq!(shown, tables, "docs/configuration.md differs from config::reference()");
        // `--model` is another way to give MODEL.
        let is_of_key = |arg: &&Arg| arg.get_id() != "config" && arg.get_id() != "model_option";
        for arg in serve.get_arguments().filter(is_of_key) {
            let flag = arg.get_long().map_or("`MODEL`".to_string(), |flag| format!("`--{flag}`"));
            assert!(tables.contains(&flag), "{flag} sets no key");
        }
    }

    /// Every value that a flag lists is accepted by its key.
    #[test]
    fn every_listed_value_of_a_flag_is_accepted() {
        let serve = serve();
        let words: Vec<(&Arg, PossibleValue)> = serve
            .get_arguments()
            .filter(|arg| arg.get_action().takes_values())
            .flat_map(|arg| arg.get_possible_values().into_iter().map(move |word| (arg, word)))
            .collect();
        assert!(words.len() > 15);
        for (arg, word) in words {
            let flag = format!("--{}={}", arg.get_long().unwrap(), word.get_name());
            // Some values require others: attention on the host, and the method "draft".
            let more = if flag.starts_with("--attend-on") { "--device-memory=1GiB" } else { "--draft=model" };
            let line = ["mainstem", "serve", more, &flag];
            let super::super::Command::Serve(args) = Cli::try_parse_from(line).unwrap().command else {
                panic!("{line:?} is serve")
            };
            let (file, flags) = args.layers();
            Config::load(file.as_deref(), flags).unwrap_or_else(|error| panic!("{line:?}: {error}"));
        }
    }

    /// Each flag has a one-line help text; the documentation has the details.
    #[test]
    fn every_flag_is_explained_in_a_line() {
        for arg in serve().get_arguments() {
            let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
            assert!((5..=85).contains(&help.len()) && !help.contains('\n'), "{}: {help}", arg.get_id());
        }
    }
}
