//! Reads the sections of the configuration from its merged layers.
//!
//! Invariant: each key is read here once, with the parser of its value; an error names the key and the layer
//! that set it.

use super::clients::{self, ApiKey, ApiKeys, KeyFile};
use super::devices;
use super::faults;
use super::layers::{ConfigError, LayeredSettings};
use super::sections::*;
use super::values::{
    self, duration, integer, log_level, non_empty_string, non_zero_duration, one_of, string, whole_seconds,
};
use crate::quantize::WeightRules;
use crate::request::client::{Class, ClientSettings};
use crate::request::{AcceptanceRule, Pooling};
use mainstem_kernels::cpu::Isa;
use mainstem_kernels::{ActivationPrecision, QuantType};
use std::num::NonZero;
use std::time::Duration;

/// Upper limit of the tokens that prompt lookup searches for.
const LOOKUP_MAX: i64 = 64;

const API_KEY_FILE: &str = "server.api_key_file";

impl LayeredSettings {
    /// Returns the complete configuration, or the error of the first invalid value.
    pub(super) fn config(&self) -> Result<Config, ConfigError> {
        let device = self.device()?;
        let scheduler = self.scheduler(&device)?;
        Ok(Config {
            model: self.model()?,
            server: self.server(&scheduler)?,
            scheduler,
            kv: self.kv()?,
            tiers: self.tiers(&device)?,
            speculation: self.speculation()?,
            faults: self.faults(&device)?,
            device,
            hub: self.hub()?,
            telemetry: TelemetryConfig { traces: self.get("telemetry.traces", values::trace_endpoint)? },
            log: self.log()?,
            warnings: self.warnings(),
        })
    }

    fn model(&self) -> Result<ModelConfig, ConfigError> {
        let sources =
            [("model", SamplingDefaultsSource::Model), ("neutral", SamplingDefaultsSource::Neutral)];
        let poolings = Pooling::ALL.map(|pooling| (pooling.name(), Some(pooling)));
        let poolings = [&[("auto", None)], &poolings[..]].concat();
        let normalize = [("auto", None), ("yes", Some(true)), ("no", Some(false))];
        Ok(ModelConfig {
            path: self.get("model.path", string)?,
            spec: self.get("model.spec", values::path)?,
            tokenizer: self.get("model.tokenizer", values::path)?,
            target_tokenizer: self.get("model.target_tokenizer", values::path)?,
            chat_template: self.get("model.chat_template", values::path)?,
            tool_parser: self.get("model.tool_parser", non_empty_string)?,
            reasoning_parser: self.get("model.reasoning_parser", non_empty_string)?,
            sampling_defaults: self.get("model.sampling_defaults", |v| one_of(v, &sources))?,
            sampling: self.get("model.sampling", values::sampling)?,
            weights: self.get("model.weights", |v| WeightRules::parse(&string(v)?))?,
            fast_openings: self
                .get("attention.mla", |v| one_of(v, &[("absorbed", false), ("fast", true)]))?,
            served_name: self.get("model.served_name", string)?,
            pooling: self.get("model.pooling", |v| one_of(v, &poolings))?,
            normalize: self.get("model.normalize", |v| one_of(v, &normalize))?,
            classifier_tokens: self.get("model.classifier_tokens", |v| {
                let names = string(v)?;
                let names: Vec<_> =
                    names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
                // A space is part of a token, so "no, yes" is more likely a mistake.
                let spaced = names.iter().filter(|name| name.starts_with(' ')).count();
                match names.len() {
                    1 => Err("there must be at least two tokens".into()),
                    all if spaced % all.max(1) != 0 => {
                        Err("only some tokens begin with a space: spaces around commas are part of them"
                            .into())
                    }
                    _ => Ok(names),
                }
            })?,
            pair_template: self.get("model.pair_template", |v| match string(v)? {
                text if text.is_empty() => Ok(None),
                text => PairTemplate::parse(&text).map(Some),
            })?,
        })
    }

    fn server(&self, scheduler: &SchedulerConfig) -> Result<ServerConfig, ConfigError> {
        let request_timeout = self.get("server.request_timeout", duration)?;
        let policies = [("ignore", UnknownFieldsPolicy::Ignore), ("reject", UnknownFieldsPolicy::Reject)];
        Ok(ServerConfig {
            host: self.get("server.host", non_empty_string)?,
            port: self.get("server.port", |v| integer(v, 0, u16::MAX.into()))? as u16,
            workers: self.get("server.workers", |v| integer(v, 1, 512))?,
            max_connections: self.get("server.max_connections", |v| integer(v, 1, 1 << 20))?,
            max_connections_per_address: NonZero::new(
                self.get("server.max_connections_per_address", |v| integer(v, 0, 1 << 20))?,
            ),
            body_limit_bytes: self.get("server.body_limit", |v| values::size(v, 1024))? as usize,
            response_bytes: self.get("server.response_memory", |v| values::size(v, 1 << 20))? as usize,
            request_memory_bytes: self.get("server.request_memory", |v| values::size(v, 1 << 20))? as usize,
            keep_alive: self.get("server.keep_alive", duration)?,
            stream_comment_interval: self.get("server.stream_comment_interval", non_zero_duration)?,
            stalled_after: self.get("server.stalled_after", non_zero_duration)?,
            retry_after: self.get("server.retry_after", whole_seconds)?,
            request_timeout: (!request_timeout.is_zero()).then_some(request_timeout),
            model_names: self.get("server.model_names", |v| values::strings(v, values::model_name))?,
            accept_any_model: self.get("server.accept_any_model", values::boolean)?,
            unknown_fields: self.get("server.unknown_fields", |v| one_of(v, &policies))?,
            api_keys: ApiKeys(self.get("server.api_keys", |v| values::strings(v, clients::api_key))?),
            api_key_file: self
                .get(API_KEY_FILE, values::path)?
                .map(|path| KeyFile { path, origin: self.source(API_KEY_FILE) }),
            cors_origins: self.get("server.cors_origins", values::origins)?,
            allowed_hosts: self.get("server.allowed_hosts", values::hosts)?,
            metrics_access: self.metrics_access()?,
            web: self.get("server.web", values::boolean)?,
            inflight_log: self.get("server.inflight_log", values::path)?,
            metrics_listener: self.metrics_listener()?,
            tls: self.tls()?,
            grammar: self.grammar()?,
            clients: self.clients()?,
            batches: self.batches(scheduler)?,
        })
    }

    fn batches(&self, scheduler: &SchedulerConfig) -> Result<BatchConfig, ConfigError> {
        Ok(BatchConfig {
            data_dir: self.get("batches.data_dir", values::path)?,
            file_limit_bytes: self.get("batches.file_limit", |v| values::size(v, 1024))?,
            quota_bytes: self.get("batches.quota", |v| values::size(v, 1024))?,
            max_batches: self.get("batches.max_batches", |v| integer(v, 1, 1 << 20))?,
            max_requests: self.get("batches.max_requests", |v| integer(v, 1, 1 << 24))?,
            retention: self.get("batches.retention", whole_seconds)?,
            responses_quota_bytes: self.get("batches.responses_quota", |v| values::size(v, 1024))?,
            responses_retention: self.get("batches.responses_retention", whole_seconds)?,
            requests_at_once: scheduler.requests_at_once(),
        })
    }

    fn metrics_access(&self) -> Result<MetricsAccess, ConfigError> {
        let (key, words) =
            ("server.metrics_access", [("open", MetricsAccess::Open), ("key", MetricsAccess::Key)]);
        let access = self.get(key, |v| one_of(v, &words))?;
        let has_keys = !self.get("server.api_keys", |v| values::strings(v, clients::api_key))?.is_empty();
        if access == MetricsAccess::Key && !has_keys && self.get(API_KEY_FILE, values::path)?.is_none() {
            return Err(self.error_for(key, "requires server.api_key_file or server.api_keys"));
        }
        Ok(access)
    }

    fn metrics_listener(&self) -> Result<Option<(String, NonZero<u16>)>, ConfigError> {
        let host = self.get("server.metrics_host", non_empty_string)?;
        let port = self.get("server.metrics_port", |v| integer(v, 0, u16::MAX.into()))? as u16;
        Ok(NonZero::new(port).map(|port| (host, port)))
    }

    fn grammar(&self) -> Result<GrammarConfig, ConfigError> {
        let size = |key| self.get(key, |v| values::size(v, 1024)).map(|size| size as usize);
        Ok(GrammarConfig {
            threads: self.get("grammar.threads", |v| integer(v, 1, 256))?,
            cache_entries: self.get("grammar.cache_entries", |v| integer(v, 1, 1 << 24))?,
            cache_bytes: size("grammar.cache_size")?,
            text_bytes: size("grammar.text_limit")?,
        })
    }

    fn clients(&self) -> Result<ClientSettings, ConfigError> {
        let classes = Class::ALL.map(|class| (class.name(), class));
        let limit = |key| self.get(key, |v| integer(v, 0, u32::MAX.into())).map(NonZero::new);
        let per_minute = |key| limit(key).map(|limit| limit.map(|limit| limit.get() as u64));
        Ok(ClientSettings {
            class: self.get("clients.class", |v| one_of(v, &classes))?,
            max_sequences: limit("clients.max_sequences")?.map(NonZero::get),
            tokens_per_minute: per_minute("clients.tokens_per_minute")?,
            requests_per_minute: per_minute("clients.requests_per_minute")?,
            ..ClientSettings::default()
        })
    }

    fn tls(&self) -> Result<Option<TlsFiles>, ConfigError> {
        let (cert, key) = ("server.tls_cert", "server.tls_key");
        match (self.get(cert, values::path)?, self.get(key, values::path)?) {
            (Some(cert), Some(key)) => Ok(Some(TlsFiles { cert, key })),
            (Some(_), None) => Err(self.error_for(cert, "requires server.tls_key")),
            (None, Some(_)) => Err(self.error_for(key, "requires server.tls_cert")),
            (None, None) => Ok(None),
        }
    }

    fn scheduler(&self, device: &DeviceConfig) -> Result<SchedulerConfig, ConfigError> {
        let (slots, token_budget) = self.slots_and_token_budget()?;
        let auto_or_integer = |key| self.get(key, |v| values::auto_or_integer(v, 1 << 24));
        let (budget, batch_rows) =
            (auto_or_integer("scheduler.token_budget")?, auto_or_integer("scheduler.batch_rows")?);
        let window = self.get("scheduler.window", non_zero_duration)?;
        let run_ahead = [("auto", None), ("on", Some(true)), ("off", Some(false))];
        let run_ahead = self.get("scheduler.run_ahead", |v| one_of(v, &run_ahead))?;
        let policies = [
            ("fused", Policy::Fused),
            ("window", Policy::Window { window }),
            ("concurrent", Policy::Concurrent),
        ];
        Ok(SchedulerConfig {
            slots,
            max_waiting: self.get("scheduler.max_waiting", |v| integer(v, 0, 1 << 24))?,
            token_budget,
            is_budget_auto: budget.is_none(),
            batch_rows,
            itl_target: Some(self.get("scheduler.itl_target", duration)?).filter(|target| !target.is_zero()),
            policy: self.get("scheduler.policy", |v| one_of(v, &policies))?,
            shuffle: self.get("scheduler.shuffle", |v| one_of(v, &[("on", true), ("off", false)]))?,
            lanes: self.get("scheduler.lanes", values::lanes)?,
            run_ahead: run_ahead.unwrap_or_else(|| device.devices().all(|device| !device.kind.is_host())),
            sampling_threads: NonZero::new(self.get("scheduler.sampling_threads", |v| integer(v, 0, 256))?),
            drain_timeout: self.get("scheduler.drain_timeout", duration)?,
        })
    }

    /// Returns slots and token budget. The budget must exceed the slots: with all rows taken by decode,
    /// prompts would never be processed. An error is attributed to the key that a later layer set.
    fn slots_and_token_budget(&self) -> Result<(usize, usize), ConfigError> {
        let (slots_key, budget_key) = ("scheduler.slots", "scheduler.token_budget");
        let slots = self.get(slots_key, |v| integer(v, 1, 1 << 16))?;
        let budget = self.get(budget_key, |v| values::auto_or_integer(v, 1 << 24))?;
        let budget = budget.unwrap_or(AUTO_TOKEN_BUDGET.max(2 * slots));
        if budget > slots {
            return Ok((slots, budget));
        }
        Err(if self.source(slots_key) > self.source(budget_key) {
            self.error_for(slots_key, &format!("must be less than {budget_key}, which is {budget}"))
        } else {
            self.error_for(budget_key, &format!("must be more than {slots_key}, which is {slots}"))
        })
    }

    fn kv(&self) -> Result<KvConfig, ConfigError> {
        let types: Vec<_> = QuantType::kv_cache_names().collect();
        let max_context = self.get("kv.max_context", |v| integer(v, 0, 1 << 32))?;
        Ok(KvConfig {
            ty: self.get("kv.type", |v| one_of(v, &types))?,
            page_size: self.get("kv.page_size", values::page_size)?,
            size: self.get("kv.size", values::kv_size)?,
            max_context: (max_context > 0).then_some(max_context),
            sparse_attention: self.get("kv.sparse_attention", values::fraction)?,
            prefix_cache: self.get("kv.prefix_cache", |v| one_of(v, &[("on", true), ("off", false)]))?,
        })
    }

    fn tiers(&self, device: &DeviceConfig) -> Result<TierConfig, ConfigError> {
        let placements = [
            ("configured", Placement::Configured),
            (
                "auto",
                Placement::Auto {
                    slots: self.is_set("scheduler.slots"),
                    token_budget: self.is_set("scheduler.token_budget"),
                },
            ),
        ];
        let placement = self.get("tiers.placement", |v| one_of(v, &placements))?;
        let policy_file = self.get("tiers.policy_file", values::path)?;
        if placement != Placement::Configured && policy_file.is_some() {
            return Err(self.error_for("tiers.placement", "cannot be combined with tiers.policy_file"));
        }
        let rules = [("even", TierRule::Even), ("midpoint", TierRule::MidPoint)];
        let (on_device, host_kv, attend_on) = ("tiers.device", "tiers.host_kv", "tiers.attend_on");
        let tiers = TierConfig {
            device: self.get(on_device, values::host_tier)?,
            host: self.get("tiers.host", values::host_tier)?,
            kv: self.get("tiers.kv", values::host_tier)?,
            host_kv: self.get(host_kv, values::host_tier)?,
            attends_on_host: self.get(attend_on, |v| one_of(v, &[("device", false), ("host", true)]))?,
            rule: self.get("tiers.rule", |v| one_of(v, &rules))?,
            overrides: self.get("tiers.overrides", values::tier_patterns)?,
            cpu_moe: self.get("tiers.cpu_moe", values::boolean)?,
            overlap: self.get("tiers.overlap", |v| one_of(v, &[("on", true), ("off", false)]))?,
            disk_path: self.get("tiers.disk_path", values::path)?,
            placement,
            policy: self.policy(),
            reserved: None,
        };
        // Keys that are about a second memory, with the value that is none.
        let needs_memory = [
            (on_device, tiers.device != HostTier::Auto),
            (host_kv, tiers.host_kv != HostTier::All),
            (attend_on, tiers.attends_on_host),
            ("tiers.cpu_moe", tiers.cpu_moe),
        ];
        let needs_memory = needs_memory.into_iter().find(|(_, is_used)| *is_used && device.memory.is_none());
        if let Some((key, _)) = needs_memory {
            let reason = "requires device.memory: without it, devices have no memory beside that of the host";
            return Err(self.error_for(key, reason));
        }
        Ok(tiers)
    }

    fn speculation(&self) -> Result<SpeculationConfig, ConfigError> {
        let (draft_key, method_key) = ("speculation.draft", "speculation.method");
        let methods = [
            ("auto", SpeculationMethod::Auto),
            ("off", SpeculationMethod::Off),
            ("draft", SpeculationMethod::Draft),
            ("prompt_lookup", SpeculationMethod::PromptLookup),
        ];
        let rules = AcceptanceRule::ALL.map(|rule| (rule.name(), rule));
        let draft = self.get(draft_key, string)?;
        let method = self.get(method_key, |v| one_of(v, &methods))?;
        if method == SpeculationMethod::Draft && draft.is_empty() {
            return Err(self.error_for(method_key, &format!("requires {draft_key}")));
        }
        let (min_key, max_key) = ("speculation.lookup_min", "speculation.lookup_max");
        let size = |key| self.get(key, |v| integer(v, 1, LOOKUP_MAX));
        let lookup = LookupSizes { min: size(min_key)?, max: size(max_key)? };
        if lookup.min > lookup.max {
            let max = lookup.max;
            return Err(self.error_for(min_key, &format!("must be at most {max_key}, which is {max}")));
        }
        Ok(SpeculationConfig {
            draft,
            method,
            max_drafts: self.get("speculation.max_drafts", |v| integer(v, 1, DRAFTS_MAX as i64))?,
            acceptance: self.get("speculation.acceptance", |v| one_of(v, &rules))?,
            lookup,
        })
    }

    /// Returns the kind of devices that are given by their number alone, and all kinds.
    fn device_kinds(&self) -> Result<(DeviceKind, [DeviceKind; 4]), ConfigError> {
        let step = self.get("device.fake_step", duration)?;
        let row = self.get("device.fake_row", duration)?;
        let kinds =
            [DeviceKind::Cpu, DeviceKind::Reference, DeviceKind::Cuda, DeviceKind::Fake { step, row }];
        let kind = self.get("device.kind", |v| one_of(v, &kinds.map(|kind| (kind.name(), kind))))?;
        Ok((kind, kinds))
    }

    fn faults(&self, device: &DeviceConfig) -> Result<FaultPlan, ConfigError> {
        let (enabled, inject) = ("faults.enabled", "faults.inject");
        let (kind, kinds) = self.device_kinds()?;
        let parse = |v: &_| faults::parse_faults(v, &device.groups, kind, &kinds, device.step_timeout);
        let plan = self.get(inject, parse)?;
        if !self.get(enabled, values::boolean)? && !plan.rules.is_empty() {
            let reason =
                format!("requires {enabled}, which is false, so that nobody injects faults by mistake");
            return Err(self.error_for(inject, &reason));
        }
        Ok(plan)
    }

    fn device(&self) -> Result<DeviceConfig, ConfigError> {
        let (kind, kinds) = self.device_kinds()?;
        let groups = self.get("device.groups", |v| devices::parse_groups(v, kind, &kinds))?;
        let isas = Isa::ALL.map(|isa| (isa.name(), isa));
        let inputs = [("fast", ActivationPrecision::Int8), ("f32", ActivationPrecision::F32)];
        let threads = self.get("device.threads", |v| integer(v, 0, 4096))?;
        let step_timeout = self.get("device.step_timeout", duration)?;
        let memory = self.get("device.memory", values::optional_size)?;
        if memory.is_some() && groups.iter().flatten().any(|device| device.kind != DeviceKind::Cpu) {
            return Err(self.error_for("device.memory", "only CPU devices can have a memory of their own"));
        }
        let link = self.get("device.link", values::optional_rate)?;
        if link.is_some() && memory.is_none() {
            return Err(self.error_for("device.link", "requires device.memory"));
        }
        Ok(DeviceConfig {
            memory,
            link,
            nvrtc: self.get("device.nvrtc", values::path)?,
            kernel_cache: self.get("device.kernel_cache", values::kernel_cache)?,
            layers: self.get("device.layers", |v| devices::parse_layers(v, &groups))?,
            shares: self.get("device.shares", |v| devices::parse_shares(v, &groups))?,
            experts: self.get("device.experts", |v| one_of(v, &devices::EXPERTS))?,
            step_timeout: (!step_timeout.is_zero()).then_some(step_timeout),
            threads: if threads == 0 { cores_per_device(&groups) } else { threads },
            isa: self.get("device.isa", |v| one_of(v, &isas))?,
            activation_precision: self.get("device.activations", |v| one_of(v, &inputs))?,
            groups,
        })
    }

    fn hub(&self) -> Result<HubSettings, ConfigError> {
        Ok(HubSettings {
            cache: self.get("hub.cache", values::path)?,
            endpoint: self.get("hub.endpoint", values::url)?,
        })
    }

    fn log(&self) -> Result<LogConfig, ConfigError> {
        let formats = [("text", LogFormat::Text), ("json", LogFormat::Json)];
        Ok(LogConfig {
            format: self.get("log.format", |v| one_of(v, &formats))?,
            level: self.get("log.level", log_level)?,
        })
    }
}

impl ServerConfig {
    /// Returns all API keys with their clients, including the current ones of the key file. If the file has
    /// an error or no key, the error has the source of its path.
    pub fn load_api_keys(&self) -> Result<Vec<ApiKey>, ConfigError> {
        let plain = |key: &String| ApiKey { key: key.clone(), name: None, settings: self.clients };
        let mut keys: Vec<ApiKey> = self.api_keys.0.iter().map(plain).collect();
        if let Some(KeyFile { path, origin }) = &self.api_key_file {
            let fault = |reason| {
                let message = format!("{API_KEY_FILE} = {:?}: {reason}", path.display().to_string());
                ConfigError { origin: origin.clone(), message }
            };
            keys.extend(clients::read_api_key_file(path, self.clients).map_err(fault)?);
        }
        Ok(keys)
    }
}

/// Parses a duration in the configuration's syntax, such as `250ms`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    duration(&text.into())
}

/// Parses a number of bytes in the configuration's syntax, such as `4MiB`.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    values::size(&text.into(), 1)
}

/// Returns the cores per CPU device when they are divided evenly; at least 1.
fn cores_per_device(groups: &Groups) -> usize {
    let computing = groups.iter().flatten().filter(|device| device.kind == DeviceKind::Cpu).count();
    (cores() / computing.max(1)).max(1)
}

pub(super) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
