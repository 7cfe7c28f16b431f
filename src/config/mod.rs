//! Typed configuration. Layers (the defaults, a file, the environment, the command line) are merged, then
//! each key is parsed and checked once and stored in the struct of its consumer. The defaults are the file
//! `config/mainstem.toml`, compiled in, so that they are written in one place.
//!
//! Invariant: all values outside this module are checked, and no other module reads keys or `MAINSTEM_`
//! variables. A file that a value names is opened by its consumer, at start and before the weights are
//! loaded.

mod aliases;
mod clients;
mod device_sections;
mod devices;
mod faults;
mod layers;
mod policy;
mod read;
mod reference;
mod sections;
mod values;

pub use clients::{ApiKey, ApiKeys, KeyFile};
pub use devices::format_groups;
pub use layers::{ConfigError, ConfigSource, Overrides};
pub use policy::{POLICY_VERSION, PlacementPolicy, PolicyPrediction, PolicyWorkload};
pub use read::{parse_bytes, parse_duration};
pub use reference::{defaults, reference};
pub use sections::*;

use layers::{CONFIG_FILE_VARIABLE, Environment, LayeredSettings, variable_name};
use std::path::Path;

/// Text of `config/mainstem.toml`: every key with its default and a comment.
pub const DEFAULTS: &str = include_str!("../../config/mainstem.toml");
impl Config {
    /// Loads the configuration from the defaults (those of `flags` replace the general ones), `file` if
    /// given, and the flags. The environment is ignored.
    pub fn load(file: Option<&Path>, flags: Overrides) -> Result<Config, ConfigError> {
        Config::from_layers(file, Environment::new(), flags)
    }

    /// Loads the configuration like [`Config::load`], with the process's environment between file and flags.
    /// If `file` is `None`, the variable `MAINSTEM_CONFIG` may name the file.
    pub fn from_process(file: Option<&Path>, flags: Overrides) -> Result<Config, ConfigError> {
        Config::from_layers(file, layers::process_environment(), flags)
    }

    fn from_layers(
        file: Option<&Path>,
        mut environment: Environment,
        flags: Overrides,
    ) -> Result<Config, ConfigError> {
        let named = environment.remove(CONFIG_FILE_VARIABLE).filter(|path| !path.is_empty());
        let file = file.or(named.as_deref().map(Path::new));
        let merge = |policy: Option<&Path>| {
            let mut settings = LayeredSettings::new();
            settings.add_defaults(&flags);
            file.map_or(Ok(()), |path| settings.add_file(path))?;
            policy.map_or(Ok(()), |path| settings.add_policy_file(path))?;
            settings.add_environment(environment.clone())?;
            settings.add_flags(flags.clone())?;
            Ok(settings)
        };
        let settings = merge(None)?;
        // Any other layer may name the file of the policy's.
        match settings.text(POLICY_FILE) {
            Some(path) => merge(Some(Path::new(path)))?.config(),
            None => settings.config(),
        }
    }
}

/// Key of the file whose layer is between configuration file and environment.
const POLICY_FILE: &str = "tiers.policy_file";

#[cfg(test)]
mod tests {
    use super::read::cores;
    use super::*;
    use crate::quantize::WeightRules;
    use crate::request::client::{Class, ClientSettings};
    use crate::request::{AcceptanceRule, DraftSource, ParamList};
    use mainstem_kernels::cpu::Isa;
    use mainstem_kernels::{ActivationPrecision, Fraction, QuantType};
    use std::ffi::OsString;
    use std::path::PathBuf;
    use std::time::Duration;

    fn parse_config(toml: &str) -> Result<Config, ConfigError> {
        let mut settings = LayeredSettings::new();
        settings.add_text(Path::new("some.toml"), toml)?;
        settings.config()
    }

    fn error_of(toml: &str) -> String {
        parse_config(toml).unwrap_err().to_string()
    }

    fn defaults() -> Config {
        Config::load(None, Overrides::default()).unwrap()
    }

    fn with_flag(key: &'static str, value: impl Into<toml::Value>) -> Result<Config, ConfigError> {
        let mut flags = Overrides::default();
        flags.set(key, Some(value));
        Config::load(None, flags)
    }

    fn with_variable(name: &str, text: &str) -> Result<Config, ConfigError> {
        let environment = [(name.to_string(), OsString::from(text))].into();
        Config::from_layers(None, environment, Overrides::default())
    }

    /// A temporary file, removed on drop.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str, text: &str) -> Scratch {
            let path = std::env::temp_dir().join(format!("mainstem-config-{}-{name}", std::process::id()));
            std::fs::write(&path, text).unwrap();
            Scratch(path)
        }

        fn name(&self) -> String {
            self.0.display().to_string()
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn the_commented_file_is_the_defaults() {
        let expected = Config {
            model: ModelConfig {
                path: "".into(),
                spec: None,
                tokenizer: None,
                target_tokenizer: None,
                chat_template: None,
                tool_parser: "auto".into(),
                reasoning_parser: "auto".into(),
                sampling_defaults: SamplingDefaultsSource::Model,
                sampling: ParamList::default(),
                weights: WeightRules::default(),
                fast_openings: false,
                served_name: "".into(),
                pooling: None,
                normalize: None,
                classifier_tokens: Vec::new(),
                pair_template: None,
            },
            server: ServerConfig {
                host: "127.0.0.1".into(),
                port: 8080,
                workers: 2,
                max_connections: 2048,
                max_connections_per_address: None,
                body_limit_bytes: 4 << 20,
                response_bytes: 512 << 20,
                request_memory_bytes: 256 << 20,
                keep_alive: Duration::from_secs(75),
                stream_comment_interval: Duration::from_secs(15),
                stalled_after: Duration::from_secs(30),
                retry_after: Duration::from_secs(1),
                request_timeout: Some(Duration::from_secs(3600)),
                model_names: vec![],
                accept_any_model: false,
                unknown_fields: UnknownFieldsPolicy::Ignore,
                api_keys: ApiKeys(vec![]),
                api_key_file: None,
                cors_origins: vec![],
                allowed_hosts: vec![],
                metrics_access: MetricsAccess::Open,
                web: true,
                inflight_log: None,
                metrics_listener: None,
                tls: None,
                grammar: GrammarConfig {
                    threads: 2,
                    cache_entries: 256,
                    cache_bytes: 256 << 20,
                    text_bytes: 1 << 20,
                },
                clients: ClientSettings::default(),
                batches: BatchConfig {
                    data_dir: None,
                    file_limit_bytes: 200 << 20,
                    quota_bytes: 10 << 30,
                    max_batches: 100,
                    max_requests: 50_000,
                    retention: Duration::from_secs(30 * 86400),
                    responses_quota_bytes: 256 << 20,
                    responses_retention: Duration::from_secs(30 * 86400),
                    requests_at_once: 64,
                },
            },
            scheduler: SchedulerConfig {
                slots: 32,
                max_waiting: 256,
                token_budget: 512,
                is_budget_auto: true,
                batch_rows: None,
                itl_target: Some(Duration::from_millis(50)),
                policy: Policy::Fused,
                shuffle: true,
                lanes: LaneCount::PerStage,
                run_ahead: false,
                sampling_threads: None,
                drain_timeout: Duration::from_secs(30),
            },
            kv: KvConfig {
                ty: QuantType::F16,
                page_size: 32,
                size: KvSize::Auto,
                max_context: None,
                sparse_attention: Fraction::ONE,
                prefix_cache: true,
            },
            tiers: TierConfig {
                device: HostTier::Auto,
                host: HostTier::All,
                kv: HostTier::All,
                host_kv: HostTier::All,
                attends_on_host: false,
                rule: TierRule::Even,
                overrides: vec![],
                cpu_moe: false,
                overlap: true,
                disk_path: None,
                placement: Placement::Configured,
                policy: None,
                reserved: None,
            },
            speculation: SpeculationConfig {
                draft: "".into(),
                method: SpeculationMethod::Auto,
                max_drafts: 5,
                acceptance: AcceptanceRule::Coupled,
                lookup: LookupSizes { min: 2, max: 4 },
            },
            device: DeviceConfig {
                groups: vec![vec![DeviceName { kind: DeviceKind::Cpu, number: 0 }]],
                layers: vec![],
                shares: vec![],
                experts: ExpertPlacement::Column,
                step_timeout: None,
                threads: cores(),
                isa: Isa::Auto,
                activation_precision: ActivationPrecision::Int8,
                memory: None,
                link: None,
                nvrtc: None,
                kernel_cache: KernelCache::Usual,
            },
            faults: FaultPlan::default(),
            hub: HubSettings { cache: None, endpoint: None },
            telemetry: TelemetryConfig::default(),
            log: LogConfig { format: LogFormat::Text, level: "info,actix_server=warn".into() },
            warnings: vec![],
        };
        assert_eq!(defaults(), expected);
    }

    /// Each key of the file reaches the configuration: a value of the wrong type is reported with the key's
    /// name.
    #[test]
    fn every_key_of_the_file_is_read() {
        let settings = LayeredSettings::new();
        for key in settings.keys() {
            let (section, name) = key.split_once('.').unwrap();
            let error = error_of(&format!("[{section}]\n{name} = 1.5"));
            let shown = if key == "server.api_keys" { "(hidden)" } else { "1.5" };
            assert!(error.starts_with(&format!("some.toml:2: {key} = {shown}: ")), "{key}: {error}");
        }
        assert_eq!(settings.keys().count(), DEFAULTS.lines().filter(|line| line.contains(" = ")).count());
    }

    /// Each key can be set from the environment, in the syntax of the file.
    #[test]
    fn every_key_can_be_a_variable() {
        let table: toml::Table = DEFAULTS.parse().unwrap();
        for key in LayeredSettings::new().keys() {
            let (section, name) = key.split_once('.').unwrap();
            let default = &table[section][name];
            let text = default.as_str().map_or_else(|| default.to_string(), str::to_string);
            assert_eq!(with_variable(&variable_name(key), &text).unwrap(), defaults(), "{key} = {text}");
        }
    }

    #[test]
    fn a_section_whose_keys_are_all_commented_out_changes_nothing() {
        assert_eq!(parse_config("[server]\n# port = 1\n[kv]\n").unwrap(), defaults());
    }

    #[test]
    fn wrong_values_are_reported_with_line_key_and_value() {
        for (toml, part) in [
            ("\n[server]\nport = 65536", "some.toml:3: server.port = 65536: must be from 0 to 65535"),
            ("[server]\nport = \"x\"", "server.port = \"x\": expected a whole number"),
            ("[server]\nretry_after = \"1500ms\"", "must be whole seconds"),
            ("[server]\nbody_limit = \"4 apples\"", "the unit must be B, KiB"),
            ("[server]\ncors_origins = [\"example.com\"]", "an origin must be \"*\" or like"),
            ("[server]\ncors_origins = [\"https://example.com/\"]", "an origin must be"),
            ("[server]\ncors_origins = [\"*\", \"https://a.b\"]", "must be the only entry"),
            ("[server]\ncors_origins = \"https://a.b\"", "expected a list of strings"),
            ("[server]\nmodel_names = [\"a\", \"\"]", "a name must not be empty"),
            ("[server]\nallowed_hosts = [\"a.b:80\"]", "a host must be \"*\" or a name without port"),
            ("[server]\nallowed_hosts = [\"*\", \"a.b\"]", "must be the only entry"),
            (
                "[server]\nmetrics_access = \"key\"",
                "\"key\": requires server.api_key_file or server.api_keys",
            ),
            (
                "[telemetry]\ntraces = \"localhost\"",
                "telemetry.traces = \"localhost\": must be \"env\", or must begin with https:// or http://",
            ),
            ("[server]\ntls_cert = \"c\"", "some.toml:2: server.tls_cert = \"c\": requires server.tls_key"),
            ("[server]\ntls_key = \"k\"", "server.tls_key = \"k\": requires server.tls_cert"),
            ("[kv]\ntype = \"q5\"", r#"must be one of "f32", "f16", "bf16", "q8", "q4", "q8_0", "g4_b64""#),
            ("[kv]\nsparse_attention = 0", "kv.sparse_attention = 0: must be more than 0 and at most 1"),
            ("[kv]\nsparse_attention = 1.01", "must be more than 0 and at most 1"),
            ("[kv]\nsparse_attention = nan", "must be more than 0 and at most 1"),
            ("[kv]\nsparse_attention = \"half\"", "must be more than 0 and at most 1"),
            (
                "[model]\nsampling = \"top_p=2\"",
                "model.sampling = \"top_p=2\": top_p is 2 but must be above 0",
            ),
            ("[model.sampling]\ntop_q = 2", "some.toml:1: model.sampling = { top_q = 2 }: top_q is not a"),
            ("[model.sampling]\ntemperature = nan", "temperature is nan but numbers must be finite"),
            ("[model.sampling.logit_bias]\n5 = -inf", "logit_bias is { 5 = -inf } but numbers must be"),
            ("[model]\nsampling = \"top_p\"", "expected parameters such as top_p=0.9"),
            ("[scheduler]\nslots = 0", "scheduler.slots = 0: must be from 1"),
            ("[scheduler]\nlanes = 0", "scheduler.lanes = 0: must be from 1 to 65536, or be \"auto\""),
            ("[scheduler]\nlanes = \"many\"", "expected a whole number, or \"auto\""),
            ("[device]\ngroups = [[0, \"cpu:0\"]]", "cpu:0 is listed twice; the nearest possible is cpu:0"),
            (
                "[device]\ngroups = \"0;1\"\nlayers = [4]",
                "some.toml:3: device.layers = [4]: is for 1 stage, but",
            ),
            ("[device]\nshares = [[1, 1]]", "device.shares = [[1, 1]]: does not fit the devices"),
            ("[device]\nexperts = \"row\"", "must be one of \"column\", \"expert\""),
            ("[scheduler]\npolicy = \"best\"", "one of \"fused\", \"window\", \"concurrent\""),
            ("[scheduler]\nwindow = \"0s\"", "must not be zero"),
            ("[scheduler]\nwindow = \"-1s\"", "must begin with a number"),
            ("[scheduler]\nwindow = \"4\"", "the unit must be ns, us, ms, s, m or h"),
            ("[model]\npooling = \"max\"", "must be one of \"auto\", \"mean\", \"cls\", \"last\""),
            ("[model]\nnormalize = true", "model.normalize = true"),
            ("[kv]\npage_size = 48", "kv.page_size = 48: must be a multiple of 32"),
            ("[kv]\npage_positions = 48", "kv.page_positions = 48: must be a multiple of 32"),
            ("[kv]\nsize = \"x tokens\"", "expected a whole number of tokens"),
            ("[kv]\ntype = \"q1\"", "must be one of \"f32\", \"f16\", \"bf16\""),
            ("[tiers]\nhost = \"101%\"", "tiers.host = \"101%\": a percentage must be from 0% to 100%"),
            ("[tiers]\nhost = \"most\"", "tiers.host = \"most\": must begin with a number"),
            ("[tiers]\nhost = true", "expected \"all\", \"auto\", \"20%\" or a size"),
            ("[tiers]\nplacement = \"best\"", "must be one of \"configured\", \"auto\""),
            (
                "[tiers]\nplacement = \"auto\"\npolicy_file = \"p\"",
                "tiers.placement = \"auto\": cannot be combined with tiers.policy_file",
            ),
            ("[device]\nfake_row = \"9\"", "device.fake_row = \"9\": the unit must be ns, us"),
            (
                "[speculation]\nmethod = \"draft\"",
                "some.toml:2: speculation.method = \"draft\": requires speculation.draft",
            ),
            (
                "[speculation]\nmethod = \"eagle\"",
                r#"must be one of "auto", "off", "draft", "prompt_lookup""#,
            ),
            ("[speculation]\nmax_drafts = 17", "speculation.max_drafts = 17: must be from 1 to 16"),
            ("[speculation]\nmax_drafts = 0", "must be from 1 to 16"),
            ("[speculation]\nacceptance = \"all\"", r#"one of "coupled", "rejection", "top_sampling""#),
            ("[speculation]\nlookup_min = 5", "must be at most speculation.lookup_max, which is 4"),
            ("[hub]\nendpoint = \"hub.example\"", "must begin with https:// or http://"),
            ("[log]\nlevel = \"a=b=c\"", "log.level = "),
            (
                "[log]\nlevel = \"loud\"",
                "log.level = \"loud\": \"loud\" is not a level: expected error, warn,",
            ),
            ("[log]\nlevel = \"info,mainstem\"", "for a target, write \"mainstem=LEVEL\""),
            ("[log]\nlevel = \"info,mainstem=loud\"", "log.level = "),
            ("[log]\nlevel = \" , \"", "log.level = \" , \": names no level"),
            ("[server]\nworkers = 513", "server.workers = 513: must be from 1 to 512"),
        ] {
            let error = error_of(toml);
            assert!(error.contains(part), "{toml}: {error}");
        }
    }

    #[test]
    fn values_are_read_with_their_units() {
        let config = parse_config(
            "[scheduler]\npolicy = \"window\"\nwindow = \"1.5s\"\n[kv]\nsize = \"2GiB\"\nmax_context = 9\n\
             [server]\nrequest_timeout = \"0s\"\ncors_origins = [\"https://a.b:1\", \"tauri://localhost\"]\n\
             tls_cert = \"c\"\ntls_key = \"k\"\n[hub]\nendpoint = \"http://hub\"\n\
             [device]\nkind = \"fake\"\nfake_step = \"0.02s\"\nfake_row = \"150us\"",
        )
        .unwrap();
        assert_eq!(config.scheduler.policy, Policy::Window { window: Duration::from_millis(1500) });
        assert_eq!((config.kv.size, config.kv.max_context), (KvSize::Bytes(2 << 30), Some(9)));
        assert_eq!(config.server.request_timeout, None);
        assert_eq!(config.server.cors_origins, ["https://a.b:1", "tauri://localhost"]);
        assert_eq!(config.server.tls, Some(TlsFiles { cert: "c".into(), key: "k".into() }));
        assert_eq!(config.hub.endpoint.as_deref(), Some("http://hub"));
        let (step, row) = (Duration::from_millis(20), Duration::from_micros(150));
        assert_eq!(config.device.groups[0][0].kind, DeviceKind::Fake { step, row });
        let [auto, two, three] = ["\"auto\"", "2", "\"3\""]
            .map(|lanes| parse_config(&format!("[scheduler]\nlanes = {lanes}")).unwrap().scheduler.lanes);
        assert_eq!((auto, two, three), (LaneCount::PerStage, LaneCount::Number(2), LaneCount::Number(3)));
        let groups =
            parse_config("[device]\ngroups = \"0;1\"\nthreads = 0\nstep_timeout = \"60s\"").unwrap().device;
        let minute = Some(Duration::from_secs(60));
        assert_eq!((groups.threads, groups.step_timeout), ((cores() / 2).max(1), minute));
        let nanos = parse_config("[device]\nkind = \"fake\"\nfake_step = \"7 ns\"").unwrap().device.groups;
        assert_eq!(nanos[0][0].kind, DeviceKind::Fake { step: Duration::from_nanos(7), row: Duration::ZERO });
        assert_eq!(parse_config("[kv]\nsize = \"4096 tokens\"").unwrap().kv.size, KvSize::Tokens(4096));
        for (text, host) in [
            ("auto", HostTier::Auto),
            ("0", HostTier::Bytes(0)),
            ("600MiB", HostTier::Bytes(600 << 20)),
            ("20%", HostTier::Fraction(0.2)),
        ] {
            assert_eq!(with_flag("tiers.host", text).unwrap().tiers.host, host);
            assert_eq!(with_flag("tiers.kv", text).unwrap().tiers.kv, host);
        }
        assert!(!parse_config("[kv]\nprefix_cache = \"off\"").unwrap().kv.prefix_cache);
        let few = parse_config("[kv]\nsparse_attention = 0.1\ntype = \"q4\"").unwrap().kv;
        assert_eq!(
            (few.sparse_attention.floor_of(20), few.ty),
            (2, QuantType::G4_B64),
            "not q4_b32t1a, which is q4 of weights"
        );
    }

    /// Keys that no layer sets are for the planner to choose.
    #[test]
    fn a_planned_placement_keeps_what_is_set() {
        let fixed = |toml: &str| parse_config(toml).unwrap().tiers.placement;
        let auto = |slots, token_budget| Placement::Auto { slots, token_budget };
        assert_eq!(fixed("[tiers]\nplacement = \"auto\""), auto(false, false));
        assert_eq!(fixed("[tiers]\nplacement = \"auto\"\n[scheduler]\nslots = 32"), auto(true, false));
        assert_eq!(fixed("[tiers]\nplacement = \"auto\"\n[scheduler]\ntoken_budget = 99"), auto(false, true));
    }

    #[test]
    fn a_draft_model_is_loaded_only_where_it_is_used() {
        let (draft, lookup) = (Some(DraftSource::Model), Some(LookupSizes { min: 2, max: 4 }.drafter()));
        for (toml, drafter, model) in [
            ("", None, None),
            ("draft = \"d\"", draft, Some("d")),
            ("draft = \"d\"\nmethod = \"draft\"", draft, Some("d")),
            ("draft = \"d\"\nmethod = \"off\"", None, None),
            ("draft = \"d\"\nmethod = \"prompt_lookup\"", lookup, Some("d")),
            ("method = \"prompt_lookup\"", lookup, None),
            ("method = \"off\"", None, None),
        ] {
            let config = parse_config(&format!("[speculation]\n{toml}")).unwrap().speculation;
            assert_eq!((config.drafter(), config.draft_model()), (drafter, model), "{toml}");
            let is_ignored = toml.contains("draft") && model.is_none();
            assert_eq!(config.warning().is_some_and(|text| text.contains("is d,")), is_ignored, "{toml}");
        }
    }

    /// Running ahead takes time from the cores that a CPU device computes on.
    #[test]
    fn kernels_are_kept_in_the_usual_folder_another_or_none() {
        for (text, folder) in [
            ("", KernelCache::Usual),
            ("off", KernelCache::Off),
            ("/a/b", KernelCache::Folder("/a/b".into())),
        ] {
            let config =
                parse_config(&format!("[device]\nkind = \"cuda\"\nkernel_cache = \"{text}\"")).unwrap();
            assert_eq!(
                (config.device.kernel_cache, &*config.device.groups[0][0].to_string()),
                (folder, "cuda:0")
            );
        }
    }

    #[test]
    fn steps_are_sent_ahead_where_the_host_is_not_the_device() {
        for (text, runs_ahead) in [
            ("", false),
            ("[device]\nkind = \"fake\"", true),
            ("[device]\nkind = \"fake\"\n[scheduler]\nrun_ahead = \"off\"", false),
            ("[scheduler]\nrun_ahead = \"on\"", true),
        ] {
            assert_eq!(parse_config(text).unwrap().scheduler.run_ahead, runs_ahead, "{text}");
        }
    }

    /// Deprecated names set the same value, whichever layer uses which name.
    #[test]
    fn deprecated_names_are_accepted() {
        let page = |config: Result<Config, ConfigError>| config.unwrap().kv.page_size;
        assert_eq!(page(parse_config("[kv]\npage_positions = 64")), 64);
        assert_eq!(page(parse_config("[kv]\npage_positions = 64\npage_size = 64")), 64);
        assert_eq!(page(with_variable("MAINSTEM_KV_PAGE_POSITIONS", "96")), 96);
        assert_eq!(page(with_flag("kv.page_positions", 128)), 128);
        let attended =
            |config: Result<Config, ConfigError>| config.unwrap().kv.sparse_attention.floor_of(100);
        assert_eq!(attended(parse_config("[kv]\nattended_share = 0.25")), 25);
        assert_eq!(attended(with_variable("MAINSTEM_KV_ATTENDED_SHARE", "0.5")), 50);

        let file = Scratch::new("deprecated", "[kv]\npage_size = 64");
        let environment = [("MAINSTEM_KV_PAGE_POSITIONS".to_string(), OsString::from("96"))].into();
        assert_eq!(page(Config::from_layers(Some(&file.0), environment, Overrides::default())), 96);
        let mut flags = Overrides::default();
        flags.set("kv.page_size", Some(128));
        let environment = [("MAINSTEM_KV_PAGE_POSITIONS".to_string(), OsString::from("96"))].into();
        assert_eq!(page(Config::from_layers(Some(&file.0), environment, flags)), 128);
    }

    #[test]
    fn two_names_of_a_key_with_different_values_are_an_error() {
        assert_eq!(
            error_of("[kv]\npage_size = 64\npage_positions = 32"),
            "some.toml:3: kv.page_size = 64 and kv.page_positions = 32 are two names of the same setting; \
             use kv.page_size only"
        );
        let environment = [("ATTENDED_SHARE", "0.5"), ("SPARSE_ATTENTION", "0.25")];
        let environment =
            environment.map(|(name, text)| (format!("MAINSTEM_KV_{name}"), OsString::from(text)));
        let error = Config::from_layers(None, environment.into(), Overrides::default()).unwrap_err();
        assert_eq!(error.origin, ConfigSource::Environment("MAINSTEM_KV_SPARSE_ATTENTION".into()));
        assert!(error.message.contains("use kv.sparse_attention only"), "{error}");
    }

    /// Slots and token budget contradict each other: the error names the key that was set later.
    #[test]
    fn the_later_of_two_contradicting_keys_is_reported() {
        let mut flags = Overrides::default();
        flags.set("scheduler.slots", Some(8));
        let file = Scratch::new("budget", "[scheduler]\ntoken_budget = 8");
        let error = Config::load(Some(&file.0), flags).unwrap_err();
        let message = "scheduler.slots = 8: must be less than scheduler.token_budget, which is 8";
        assert_eq!((error.origin, error.message.as_str()), (ConfigSource::CommandLine, message));
        let message = "scheduler.token_budget = 7: must be more than scheduler.slots, which is 8";
        assert_eq!(error_of("[scheduler]\nslots = 8\ntoken_budget = 7"), format!("some.toml:3: {message}"));
    }

    #[test]
    fn keys_come_from_list_file_and_variable() {
        let file = Scratch::new("keys", "# Ours\nfirst\r\n\n  second#2  \n");
        let name = file.name();
        let config =
            parse_config(&format!("[server]\napi_keys = [\"zero\"]\napi_key_file = '{name}'")).unwrap();
        let keys = config.server.load_api_keys().unwrap();
        assert_eq!(keys.iter().map(|key| &*key.key).collect::<Vec<_>>(), ["zero", "first", "second#2"]);
        assert!(!format!("{keys:?}").contains("zero") && !format!("{config:?}").contains("zero"));
        for text in ["a, b", "[\"a\", \"b\"]"] {
            let config = with_variable("MAINSTEM_SERVER_API_KEYS", text).unwrap();
            assert_eq!(config.server.api_keys.0, ["a", "b"]);
        }
    }

    #[test]
    fn keys_have_the_settings_of_their_lines_and_the_defaults_of_clients() {
        let file = Scratch::new("settings", "first class=interactive weight=3\nsecond name=ann\n");
        let toml = format!(
            "[server]\napi_keys = [\"zero\"]\napi_key_file = '{}'\n\
             [clients]\nclass = \"batch\"\nmax_sequences = 4\ntokens_per_minute = 100",
            file.name()
        );
        let defaults = ClientSettings {
            class: Class::Batch,
            max_sequences: Some(4),
            tokens_per_minute: Some(100),
            ..ClientSettings::default()
        };
        let server = parse_config(&toml).unwrap().server;
        assert_eq!(server.clients, defaults);
        let keys = server.load_api_keys().unwrap();
        let first = ClientSettings { class: Class::Interactive, weight: 3, ..defaults };
        assert_eq!(keys.iter().map(|key| key.settings).collect::<Vec<_>>(), [defaults, first, defaults]);
        assert_eq!(keys[2].name.as_deref(), Some("ann"));
    }

    /// An invalid API key is an error rather than no key, and is not shown.
    #[test]
    fn a_wrong_key_is_refused_and_not_shown() {
        for text in ["", "secret key", "secret,", "sécret", "[\"secret\", 5]", "[\"secret\""] {
            let error = with_variable("MAINSTEM_SERVER_API_KEYS", text).unwrap_err().to_string();
            assert!(error.contains("SERVER_API_KEYS: server.api_keys = (hidden): "), "{error}");
            assert!(!error.contains("secret") && !error.contains("cret"), "{error}");
        }
        let error = with_flag("server.api_keys", vec![""]).unwrap_err();
        assert_eq!(error.origin, ConfigSource::CommandLine);
        for (name, text, reason) in [
            ("none", "# no key\n\n", "the file contains no API key"),
            ("space", "#\nsecret key # Ann", "line 2: after the key, settings must be name=value"),
            ("sign", "#\ns\u{e9}cret", "line 2: an API key must"),
            ("setting", "secret wait=secret", "line 1: unknown setting; there are name, class"),
        ] {
            let file = Scratch::new(name, text);
            let config = with_flag("server.api_key_file", file.name()).unwrap();
            let error = config.server.load_api_keys().unwrap_err();
            assert_eq!(error.origin, ConfigSource::CommandLine);
            let error = error.to_string();
            assert!(error.contains(&file.name()) && error.contains(reason), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
        let config = parse_config("[server]\napi_key_file = \"/no/such/keys\"").unwrap();
        let error = config.server.load_api_keys().unwrap_err().to_string();
        assert!(
            error.starts_with("some.toml:2: server.api_key_file = \"/no/such/keys\": No such file"),
            "{error}"
        );
    }

    /// A subcommand's defaults are overridden by every layer, and their source is the defaults.
    #[test]
    fn a_subcommands_defaults_are_beneath_every_layer() {
        let mut own = Overrides::default();
        own.set_default("scheduler.slots", 1);
        own.set_default("log.level", "warn");
        let file = Scratch::new("own", "[scheduler]\nslots = 3");
        let environment = [("MAINSTEM_LOG_LEVEL".to_string(), OsString::from("debug"))].into();
        let layered = Config::from_layers(Some(&file.0), environment, own.clone()).unwrap();
        assert_eq!((layered.scheduler.slots, layered.log.level.as_str()), (3, "debug"));
        own.set("scheduler.slots", Some(2));
        let flags = Config::load(None, own.clone()).unwrap();
        assert_eq!((flags.scheduler.slots, flags.log.level.as_str()), (2, "warn"));
        own = Overrides::default();
        own.set_default("scheduler.slots", 1 << 20);
        assert_eq!(Config::load(None, own).unwrap_err().origin, ConfigSource::Defaults);
    }

    #[test]
    fn the_environment_names_the_file_when_no_flag_does() {
        let (one, two) =
            (Scratch::new("one", "[server]\nport = 1"), Scratch::new("two", "[server]\nport = 2"));
        let port = |file, variable: &str| {
            let environment = [(CONFIG_FILE_VARIABLE.to_string(), OsString::from(variable))].into();
            Config::from_layers(file, environment, Overrides::default()).unwrap().server.port
        };
        assert_eq!(port(None, &one.name()), 1);
        assert_eq!(port(Some(two.0.as_path()), &one.name()), 2);
        assert_eq!(port(None, ""), 8080);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named() {
        let error = Config::load(Some(Path::new("/nowhere/at/all.toml")), Overrides::default()).unwrap_err();
        assert!(error.to_string().starts_with("/nowhere/at/all.toml: "));
    }

    /// Every example is accepted and changes some value.
    #[test]
    fn the_examples_are_accepted() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/examples");
        let mut names = Vec::new();
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let config = Config::load(Some(&path), Overrides::default()).unwrap();
            assert_ne!(config, defaults(), "{}", path.display());
            names.push(path.file_name().unwrap().to_string_lossy().into_owned());
        }
        names.sort();
        assert_eq!(names, ["hybrid.toml", "policy-window.toml", "public-server.toml", "small-machine.toml"]);
    }
}
