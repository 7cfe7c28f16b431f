//! Arguments of `run`, and the checked plan made from them.
//!
//! Invariant: a plan is consistent; only opening the model, the server or the prompt can still fail.

use super::super::flags::{ConfigFlags, SpeculationFlags};
use super::client::{Delivery, Dialect};
use super::constraint::{TOOLS, grammar, json_schema, tools};
use super::remote::{BaseUrl, Remote};
use super::settings::{SamplingSettings, number, whole_number};
use super::terminal::{self, AnswerFormat};
use crate::config::{Config, ConfigError, ConfigSource, Overrides};
use clap::{Args, ValueHint};
use serde_json::Value;
use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};

/// Environment variable with the API key for a server, if `--api-key` is not given.
const API_KEY_VARIABLE: &str = "OPENAI_API_KEY";

const KEY_NOT_SENT: &str = "OPENAI_API_KEY is not sent, because http to another machine is not encrypted; \
                      use https, or --api-key to send a key anyway";

/// Defaults in which this subcommand differs from the configuration, by the id of the option.
pub const OWN_DEFAULTS: [(&str, &str); 2] = [("scheduler_slots", "1"), ("log_level", "warn")];

/// Help text of the argument MODEL.
const MODEL_HELP: &str =
    "Folder, file or hf:owner/name[@revision]; \"demo\" is built in. With --url, a model of the server";

const EXAMPLES: &str = "\
Examples:
  mainstem run                                       chat with the demo model
  mainstem run path/to/model                         chat with a model
  mainstem run path/to/model \"Why is the sky blue?\"  answer one prompt
  mainstem run -p \"Tell me a story\"                  answer one prompt with the demo model
  mainstem run demo --raw \"Once upon a time\"         continue a text
  git diff | mainstem run path/to/model              read the prompt from stdin
  mainstem run --url http://127.0.0.1:8080           chat with a server's model

MODEL comes first. \"demo\" is the built-in model; - uses the configured model, or the server's first one.
In the chat, /help lists the commands.
Exit codes: 0 answered, 1 failed, 2 bad usage, 130 stopped by Ctrl-C.";

/// Answer a prompt, or chat at the terminal.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct RunArgs {
    #[arg(help = MODEL_HELP, value_hint = ValueHint::AnyPath)]
    model: Option<String>,
    /// Prompt to answer; - reads it from stdin. Without one, chat at the terminal.
    #[arg(conflicts_with = "prompt_flag")]
    prompt: Option<String>,
    /// Prompt to answer, like PROMPT, for use without MODEL.
    #[arg(short = 'p', long = "prompt", value_name = "TEXT")]
    prompt_flag: Option<String>,
    /// Model, in place of MODEL: the argument is then PROMPT.
    #[arg(short = 'm', long = "model", value_name = "MODEL", value_hint = ValueHint::AnyPath,
          conflicts_with = "prompt")]
    model_option: Option<String>,
    /// System prompt.
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Continue the prompt without a chat template; by 128 tokens unless --max-tokens is given.
    #[arg(long)]
    raw: bool,
    /// Print the API's JSON response, one object for the whole answer.
    #[arg(long)]
    json: bool,
    /// With --json: print one object per streamed chunk, one per line.
    #[arg(long, requires = "json")]
    stream: bool,
    /// Print token count and speed to stderr.
    #[arg(long)]
    stats: bool,
    /// Do not save the input history.
    #[arg(long)]
    no_history: bool,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    remote: RemoteFlags,
    #[command(flatten)]
    speculation: SpeculationFlags,
    #[command(flatten)]
    config: ConfigFlags,
}

/// Sampling parameters. Parameters that are not given have the defaults of the model or server.
#[derive(Args)]
#[command(next_help_heading = "Sampling")]
struct SamplingFlags {
    /// Sampling temperature; 0 always picks the most likely token.
    #[arg(long, value_name = "X", value_parser = number, allow_negative_numbers = true)]
    temperature: Option<Value>,
    /// Sample from the most likely tokens with this total probability.
    #[arg(long, value_name = "X", value_parser = number, allow_negative_numbers = true)]
    top_p: Option<Value>,
    /// Sample from this many of the most likely tokens.
    #[arg(long, value_name = "N", value_parser = whole_number, allow_negative_numbers = true)]
    top_k: Option<Value>,
    /// Minimum token probability, relative to the top token's probability.
    #[arg(long, value_name = "X", value_parser = number, allow_negative_numbers = true)]
    min_p: Option<Value>,
    /// Random seed; the same seed gives the same answer.
    #[arg(long, value_name = "N", value_parser = whole_number, allow_negative_numbers = true)]
    seed: Option<Value>,
    /// Maximum answer length in tokens.
    #[arg(short = 'n', long, alias = "n-predict", value_name = "N", value_parser = whole_number)]
    max_tokens: Option<Value>,
    /// End the answer before this text; repeatable.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Set a sampling parameter of docs/sampling.md, such as mirostat=2; repeatable.
    #[arg(long, value_name = "NAME=VALUE")]
    set: Vec<String>,
    /// Answer with JSON that satisfies this schema: a file, or the schema itself.
    #[arg(long, value_name = "FILE", value_parser = json_schema, value_hint = ValueHint::FilePath,
          conflicts_with = "grammar")]
    json_schema: Option<Value>,
    /// Tools that the model may call, as the API takes them: a JSON list, or a file with it.
    #[arg(long, value_name = "FILE", value_parser = tools, value_hint = ValueHint::FilePath,
          conflicts_with = "raw")]
    tools: Option<Value>,
    /// Answer in the form of the grammar (GBNF or Lark) in this file.
    #[arg(long, value_name = "FILE", value_parser = grammar, value_hint = ValueHint::FilePath)]
    grammar: Option<Value>,
}

/// Options for a remote server instead of an engine in this process.
#[derive(Args)]
#[command(next_help_heading = "Remote server")]
struct RemoteFlags {
    /// Use the OpenAI-compatible server at this URL; MODEL defaults to its first model.
    #[arg(long, value_name = "URL", value_hint = ValueHint::Url,
          conflicts_with_all =
              ["ModelFlags", "EngineFlags", "TierFlags", "SpeculationFlags", "PartitionFlags"])]
    url: Option<BaseUrl>,
    /// API key of the server; default is OPENAI_API_KEY, over https or to this machine only.
    #[arg(long, value_name = "KEY", requires = "url")]
    api_key: Option<String>,
}

/// The checked plan of a run.
pub struct RunPlan {
    pub target: AnswerSource,
    pub task: RunTask,
    pub system: Option<String>,
    pub dialect: Dialect,
    pub delivery: Delivery,
    pub form: AnswerFormat,
    pub settings: SamplingSettings,
    pub stats: bool,
    /// Note to print at the start.
    pub note: Option<&'static str>,
}

/// The engine or server that answers.
pub enum AnswerSource {
    Local(Box<Config>),
    Remote { server: Remote, model: Option<String> },
}

/// The kind of run: a single prompt, or a chat with an optional history file.
pub enum RunTask {
    Prompt(String),
    Chat { history: Option<PathBuf> },
}

impl RunArgs {
    /// Checks the arguments and returns the plan. Reads the prompt from stdin if it is piped.
    pub fn into_plan(mut self) -> Result<RunPlan, ConfigError> {
        self.take_model_option()?;
        self.check_model()?;
        let task = self.read_task()?;
        let delivery = if self.json && !self.stream { Delivery::Whole } else { Delivery::Stream };
        let (server, note) = self.remote.server()?;
        let settings = self.sampling.settings().map_err(usage)?;
        let beams = settings.beams();
        Ok(RunPlan {
            task,
            dialect: if self.raw { Dialect::Raw } else { Dialect::Chat },
            delivery,
            form: if self.json { AnswerFormat::Json } else { AnswerFormat::Text },
            settings,
            stats: self.stats,
            note,
            system: self.system,
            target: match server {
                Some(server) => AnswerSource::Remote { server, model: self.model.filter(is_named) },
                None => {
                    let config = local_config(self.model, self.speculation, self.config, beams)?;
                    AnswerSource::Local(Box::new(config))
                }
            },
        })
    }

    /// Takes the model from `--model`, if it is given, and the prompt from the first argument.
    fn take_model_option(&mut self) -> Result<(), ConfigError> {
        if let Some(model) = self.model_option.take() {
            self.prompt = self.model.replace(model);
            if self.prompt.is_some() && self.prompt_flag.is_some() {
                return Err(usage("a prompt is given twice: as an argument, and by --prompt"));
            }
        }
        Ok(())
    }

    /// Fails if MODEL looks like a prompt, before the model is opened or a prompt is read.
    fn check_model(&self) -> Result<(), ConfigError> {
        let is_sentence = |model: &&String| model.contains(char::is_whitespace) && !Path::new(model).exists();
        match self.model.as_ref().filter(|_| self.remote.url.is_none()).filter(is_sentence) {
            Some(model) => {
                Err(usage(format!("there is no model '{model}'; use --prompt for a prompt without MODEL")))
            }
            None => Ok(()),
        }
    }

    fn read_task(&self) -> Result<RunTask, ConfigError> {
        let given = self.prompt.as_deref().or(self.prompt_flag.as_deref());
        let prompt = match given {
            Some("-") => read_stdin()?,
            Some(prompt) => prompt.to_string(),
            None if !io::stdin().is_terminal() => read_stdin()?,
            None if self.json => return Err(usage("no prompt is given, and --json does not chat")),
            None if !io::stdout().is_terminal() => {
                return Err(usage("no prompt is given, and a chat needs a terminal as stdout"));
            }
            None => {
                let history = terminal::history_file().filter(|_| !self.no_history);
                return Ok(RunTask::Chat { history });
            }
        };
        match prompt.is_empty() && !self.raw {
            true => Err(usage("the prompt is empty")),
            false => Ok(RunTask::Prompt(prompt)),
        }
    }
}

/// Whether MODEL names a model; `-` is only a placeholder before the prompt.
fn is_named(model: &String) -> bool {
    model != "-"
}

/// Loads the configuration of an engine for a single user: one slot, or one for each beam of a beam search,
/// and a quiet log by default.
fn local_config(
    model: Option<String>,
    speculation: SpeculationFlags,
    config: ConfigFlags,
    beams: u64,
) -> Result<Config, ConfigError> {
    let mut flags = Overrides::default();
    flags.set_default("scheduler.slots", i64::try_from(beams).unwrap_or(i64::MAX));
    flags.set_default("log.level", "warn");
    flags.set("model.path", model.filter(is_named));
    speculation.add_to(&mut flags);
    let file = config.add_to(&mut flags);
    Config::from_process(file.as_deref(), flags)
}

/// Reads all of stdin, without the final line feed.
fn read_stdin() -> Result<String, ConfigError> {
    let mut text = String::new();
    let read = io::stdin().read_to_string(&mut text);
    read.map_err(|error| usage(format!("cannot read the prompt from stdin: {error}")))?;
    Ok(text.strip_suffix('\n').map(str::to_string).unwrap_or(text))
}

fn usage(message: impl Into<String>) -> ConfigError {
    ConfigError { origin: ConfigSource::CommandLine, message: message.into() }
}

impl SamplingFlags {
    fn settings(self) -> Result<SamplingSettings, String> {
        let mut settings = SamplingSettings::default();
        settings.insert("temperature", self.temperature);
        settings.insert("top_p", self.top_p);
        settings.insert("top_k", self.top_k);
        settings.insert("min_p", self.min_p);
        settings.insert("seed", self.seed);
        settings.insert("max_tokens", self.max_tokens);
        settings.insert("stop", Some(self.stop).filter(|stop| !stop.is_empty()));
        settings.insert("response_format", self.json_schema);
        settings.insert("grammar", self.grammar);
        settings.insert(TOOLS, self.tools);
        self.set.iter().try_for_each(|pair| settings.set_pair(pair))?;
        Ok(settings)
    }
}

impl RemoteFlags {
    /// Returns the server, if one is given, and a note about its key. The key of the environment variable is
    /// not specific to this server, so it is never sent unencrypted to another machine; the key of the flag
    /// always is sent.
    fn server(self) -> Result<(Option<Remote>, Option<&'static str>), ConfigError> {
        let Some(url) = self.url else { return Ok((None, None)) };
        let variable = || std::env::var(API_KEY_VARIABLE).ok().filter(|key| !key.is_empty());
        let (key, note) = match (self.api_key, variable()) {
            (None, Some(_)) if !url.is_private() => (None, Some(KEY_NOT_SENT)),
            (flag, variable) => (flag.or(variable), None),
        };
        if key.as_ref().is_some_and(|key| key.is_empty() || !key.chars().all(|c| c.is_ascii_graphic())) {
            return Err(usage("the API key is empty or has characters other than printable ASCII"));
        }
        Ok((Some(Remote::new(url, key.as_deref())), note))
    }
}
