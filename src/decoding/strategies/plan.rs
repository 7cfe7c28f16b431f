//! The sampling plan of a request: its parameters, checked and built into units.

use super::params::{ParamError, Values, Vocabulary};
use super::parse;
use super::registry::{TABLE, find, find_param, request_params};
use super::temperature::{TEMPERATURE, Temperature};
use super::token_filter::SUPPRESSED;
use super::top_k::TOP_K;
use super::unit::{Choose, Edit, Filter, Place, Registers, Strategy, Unit};
use super::{logit_bias::BIAS, min_p::MIN_P, min_tokens::MIN_TOKENS, penalties, top_p::TOP_P};
use crate::decoding::speculation::rule::AcceptanceRule;
use mainstem_kernels::{Penalties, SamplingParams};
use serde_json::Value as Json;
use std::sync::Arc;

/// Temperatures of named strategies are at least this.
const LEAST_TEMPERATURE: f32 = 0.001;

/// Parameters of a request that are not a strategy's: which strategies to use, and in which order.
pub const GENERAL_PARAMS: [(&str, &str); 4] = [
    ("strategy", "name of a strategy that replaces the filters; \"sample\": none"),
    ("strategy_params", "object with the parameters of the named strategy"),
    ("samplers", "list of names: the edits and filters to run, in this order; others are off"),
    (
        "logprobs_mode",
        "\"raw_logprobs\": of the model's logits (default); \"processed_logprobs\": of the \
                       candidates that the token was drawn from",
    ),
];

/// The logits that log-probabilities are computed from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogprobsMode {
    /// The model's logits.
    #[default]
    Raw,
    /// The candidates after all edits and filters, at their temperature. Others have probability 0.
    Processed,
}

/// Sampling parameters that a device can apply by itself. Biases and the ban of end tokens before
/// `min_tokens` are added by the caller.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceSampling {
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    /// Penalties by all tokens of the sequence.
    pub penalties: Penalties,
}

impl DeviceSampling {
    /// Takes the most likely token.
    pub const GREEDY: DeviceSampling =
        DeviceSampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, penalties: Penalties::NONE };
}

/// The way in which a request's tokens are chosen. It is built once and does not change.
#[derive(Debug)]
pub struct SamplingPlan {
    pub(super) edits: Vec<Box<dyn Edit>>,
    pub(super) filters: Vec<Box<dyn Filter>>,
    /// Draws by noise if there is none.
    pub(super) chooser: Option<Box<dyn Choose>>,
    /// Whether the most likely token after the edits is taken.
    pub(super) is_greedy: bool,
    mode: LogprobsMode,
    active: Vec<&'static str>,
    device: Option<DeviceSampling>,
    draft: DeviceSampling,
    min_tokens: u32,
    logit_bias: Arc<[(u32, f32)]>,
}

/// Default parameters of requests, checked.
#[derive(Clone, Debug, Default)]
pub struct CheckedDefaults(Settings);

impl CheckedDefaults {
    /// Checks parameters. JSON's null is no value. The error names the first parameter that is unknown or out
    /// of bounds.
    pub fn parse<'v>(
        pairs: impl IntoIterator<Item = (&'v str, &'v Json)>,
        vocabulary: &dyn Vocabulary,
    ) -> Result<CheckedDefaults, ParamError> {
        Settings::read(pairs, vocabulary).map(CheckedDefaults)
    }

    /// Returns these defaults and, for parameters without one, the `others`.
    pub fn or(self, others: CheckedDefaults) -> CheckedDefaults {
        let (CheckedDefaults(own), CheckedDefaults(others)) = (self, others);
        CheckedDefaults(Settings {
            values: own.values.or(&others.values),
            strategy: own.strategy.or(others.strategy),
            samplers: own.samplers.or(others.samplers),
            mode: own.mode.or(others.mode),
        })
    }
}

impl SamplingPlan {
    /// Returns the names of all parameters that [`Self::parse`] knows, each followed by its other names.
    pub fn param_names() -> impl Iterator<Item = &'static str> {
        let of_strategies = request_params().flat_map(|param| [&[param.name], param.aliases].concat());
        of_strategies.chain(GENERAL_PARAMS.iter().map(|(name, _)| *name))
    }

    /// Builds the plan of a request from its parameters, with those of the server or the model where the
    /// request gives none. JSON's null is no value.
    ///
    /// `strategy` contradicts filters that are on, `mirostat` and `samplers` within a request; those of the
    /// defaults are ignored then. `strategy` and `mirostat` of the defaults are ignored if the request has
    /// `samplers`, and the former if it has a filter or `mirostat`. Beside `mirostat`, all filters are
    /// ignored, as llama.cpp does. The error names the first parameter that is unknown, out of bounds, or
    /// contradicts another.
    pub fn parse<'v>(
        CheckedDefaults(defaults): &CheckedDefaults,
        request: impl IntoIterator<Item = (&'v str, &'v Json)>,
        vocabulary: &dyn Vocabulary,
    ) -> Result<SamplingPlan, ParamError> {
        let request = Settings::read(request, vocabulary)?;
        let instead = request.first_active(Place::Instead, vocabulary)?;
        let replaced = request.first_active(Place::Filter, vocabulary)?.or(instead);
        request.check_strategy(replaced)?;
        let names_none = request.strategy.is_none() && request.samplers.is_none();
        let has_instead = names_none || instead.is_some();
        let default = defaults.strategy.clone().filter(|_| names_none && replaced.is_none());
        let strategy = request.strategy.or(default);
        let order = match strategy {
            Some((row, _)) if row.name != "sample" => None,
            _ => request.samplers.or(defaults.samplers.clone()),
        };
        let mode = request.mode.or(defaults.mode).unwrap_or_default();
        Builder::new(request.values.or(&defaults.values), mode, vocabulary).build(
            strategy,
            order,
            has_instead,
        )
    }

    /// Returns the registers of a new sequence.
    pub(super) fn initial_registers(&self) -> Registers {
        self.chooser.as_ref().map_or(Registers::default(), |chooser| chooser.begin())
    }

    /// Returns the logits that log-probabilities are computed from.
    pub fn logprobs_mode(&self) -> LogprobsMode {
        self.mode
    }

    /// Returns the names of the strategies that are on; `greedy` stands for filters that have no effect
    /// because of the temperature, and `sample` for nothing.
    pub fn active(&self) -> &[&'static str] {
        &self.active
    }

    /// Returns the parameters for the device, if it can apply all of the plan.
    pub fn device(&self) -> Option<DeviceSampling> {
        self.device
    }

    /// Returns the parameters with which a draft model draws for this plan: the plan's temperature, top-k,
    /// top-p and min-p; greedy if the plan is.
    pub fn draft(&self) -> DeviceSampling {
        self.draft
    }

    /// Returns the rule by which drafts are accepted if a request asks for `rule`:
    /// [`AcceptanceRule::Coupled`] if the plan is greedy, or if a strategy such as mirostat takes the token,
    /// because there are no probabilities to compare then.
    pub fn acceptance(&self, rule: AcceptanceRule) -> AcceptanceRule {
        if self.is_greedy || self.chooser.is_some() { AcceptanceRule::Coupled } else { rule }
    }

    /// Returns the number of tokens before which no token that ends the sequence is chosen.
    pub fn min_tokens(&self) -> u32 {
        self.min_tokens
    }

    /// Returns the logit biases with those that suppress tokens, each token id once, in order.
    pub fn logit_bias(&self) -> &Arc<[(u32, f32)]> {
        &self.logit_bias
    }
}

/// The checked parameters of one source: the defaults or the request.
#[derive(Clone, Debug, Default)]
struct Settings {
    values: Values,
    strategy: Option<(&'static Strategy, Values)>,
    samplers: Option<Vec<&'static Strategy>>,
    mode: Option<LogprobsMode>,
}

impl Settings {
    fn read<'v>(
        pairs: impl IntoIterator<Item = (&'v str, &'v Json)>,
        vocabulary: &dyn Vocabulary,
    ) -> Result<Settings, ParamError> {
        let mut settings = Settings::default();
        let mut strategy_params = None;
        for (name, json) in pairs.into_iter().filter(|(_, json)| !json.is_null()) {
            match name {
                "strategy" => settings.strategy = Some((read_strategy(json)?, Values::default())),
                "strategy_params" => strategy_params = Some(json),
                "samplers" => settings.samplers = Some(read_samplers(json)?),
                "logprobs_mode" => settings.mode = Some(read_mode(json)?),
                _ => settings.set(name, json, vocabulary)?,
            }
        }
        if let Some(json) = strategy_params {
            settings.set_strategy_params(json, vocabulary)?;
        }
        Ok(settings)
    }

    /// Sets the value of a parameter.
    fn set(&mut self, name: &str, json: &Json, vocabulary: &dyn Vocabulary) -> Result<(), ParamError> {
        let param = find_param(name).ok_or_else(|| ParamError::new(name, "is not a sampling parameter"))?;
        let value = parse::value(name, param, json, vocabulary)?;
        match self.values.set(param, value.clone()) {
            Some(other) if other != value => {
                let names = [&[param.name], param.aliases].concat().join(" and ");
                Err(ParamError::new(name, format!("is given twice with different values, as {names}")))
            }
            _ => Ok(()),
        }
    }

    /// Sets the parameters of the named strategy.
    fn set_strategy_params(&mut self, json: &Json, vocabulary: &dyn Vocabulary) -> Result<(), ParamError> {
        let error = |rest: String| Err(ParamError::new("strategy_params", rest));
        let Some(entries) = json.as_object() else {
            return error(format!("is {} but must be an object", parse::shown(json)));
        };
        let Some((row, values)) = &mut self.strategy else {
            return error("needs strategy, the name of one".to_owned());
        };
        for (name, json) in entries.iter().filter(|(_, json)| !json.is_null()) {
            let Some(param) = row.params.iter().find(|param| param.is_named(name)) else {
                let known: Vec<&str> = row.params.iter().map(|param| param.name).collect();
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                let name = parse::shown(&Json::String(name.clone()));
                return error(format!("has {name}, but the parameters of {:?} are: {known}", row.name));
            };
            values.set(param, parse::value(&format!("strategy_params.{name}"), param, json, vocabulary)?);
        }
        Ok(())
    }

    /// Checks that a named strategy does not stand beside what it replaces: the row `replaced`, which these
    /// settings switch on, and an order.
    fn check_strategy(&self, replaced: Option<&Strategy>) -> Result<(), ParamError> {
        let Some((strategy, _)) = self.strategy.as_ref().filter(|(row, _)| row.name != "sample") else {
            return Ok(());
        };
        let name = strategy.name;
        if let Some(row) = replaced {
            let rest = format!("is {name:?}, which replaces {}; set one of them", row.name);
            return Err(ParamError::new("strategy", rest));
        }
        if self.samplers.is_some() {
            let rest = format!("is given, but strategy is {name:?}, which replaces it; set one of them");
            return Err(ParamError::new("samplers", rest));
        }
        Ok(())
    }

    /// Returns the first row of a place, except the temperature, that these settings switch on.
    fn first_active(
        &self,
        place: Place,
        vocabulary: &dyn Vocabulary,
    ) -> Result<Option<&'static Strategy>, ParamError> {
        for row in TABLE.iter().filter(|row| row.place == place && row.name != "temperature") {
            if (row.build)(&self.values, vocabulary)?.is_some() {
                return Ok(Some(row));
            }
        }
        Ok(None)
    }
}

/// Returns the named strategy.
fn read_strategy(json: &Json) -> Result<&'static Strategy, ParamError> {
    let row = json.as_str().and_then(|name| find(name, &[Place::Named]));
    row.ok_or_else(|| {
        let rows = TABLE.iter().filter(|row| row.place == Place::Named);
        let names: Vec<&str> = rows.map(|row| row.name).collect();
        ParamError::new(
            "strategy",
            format!("is {} but must be one of {}", parse::shown(json), names.join(", ")),
        )
    })
}

/// Returns the rows of an order of samplers: a list of names, or a text with semicolons between them.
fn read_samplers(json: &Json) -> Result<Vec<&'static Strategy>, ParamError> {
    let names: Option<Vec<&str>> = match json {
        Json::String(text) => Some(text.split(';').map(str::trim).filter(|name| !name.is_empty()).collect()),
        _ => json.as_array().and_then(|names| names.iter().map(Json::as_str).collect()),
    };
    let error = |rest: String| ParamError::new("samplers", rest);
    let names =
        names.ok_or_else(|| error(format!("is {} but must be a list of names", parse::shown(json))))?;
    let mut rows: Vec<&'static Strategy> = Vec::new();
    for name in names {
        let places = [Place::Edit, Place::Filter];
        let row = find(name, &places).ok_or_else(|| {
            let known = TABLE.iter().filter(|row| places.contains(&row.place)).map(|row| row.name);
            let name = parse::shown(&Json::from(name));
            error(format!("has {name}, but the names are: {}", known.collect::<Vec<_>>().join(", ")))
        })?;
        if rows.iter().any(|other| other.name == row.name) {
            return Err(error(format!("has {:?} twice", row.name)));
        }
        if row.place == Place::Edit
            && let Some(filter) = rows.iter().find(|row| row.place == Place::Filter)
        {
            return Err(error(format!(
                "has {:?} after {:?}, but must have it before",
                row.name, filter.name
            )));
        }
        rows.push(row);
    }
    Ok(rows)
}

/// Returns the mode of log-probabilities.
fn read_mode(json: &Json) -> Result<LogprobsMode, ParamError> {
    match json.as_str() {
        Some("raw_logprobs" | "raw") => Ok(LogprobsMode::Raw),
        Some("processed_logprobs" | "processed") => Ok(LogprobsMode::Processed),
        _ => {
            let rest = format!("is {} but must be raw_logprobs or processed_logprobs", parse::shown(json));
            Err(ParamError::new("logprobs_mode", rest))
        }
    }
}

/// Returns the biases of tokens, including those that suppress tokens, each token id once, in order.
fn all_biases(values: &Values) -> Vec<(u32, f32)> {
    let suppressed = values.tokens(&SUPPRESSED).iter().map(|&id| (id, f32::NEG_INFINITY));
    let mut biases: Vec<(u32, f32)> = values.biases(&BIAS).iter().copied().chain(suppressed).collect();
    // Of one token, negative infinity comes first and stays.
    biases.sort_by(|(id, bias), (other, more)| id.cmp(other).then(bias.total_cmp(more)));
    biases.dedup_by_key(|(id, _)| *id);
    biases
}

/// Builds a plan from checked values.
struct Builder<'a> {
    values: Values,
    vocabulary: &'a dyn Vocabulary,
    plan: SamplingPlan,
}

impl<'a> Builder<'a> {
    fn new(values: Values, mode: LogprobsMode, vocabulary: &'a dyn Vocabulary) -> Builder<'a> {
        let plan = SamplingPlan {
            min_tokens: u32::try_from(values.integer(&MIN_TOKENS)).unwrap_or(0),
            logit_bias: all_biases(&values).into(),
            edits: Vec::new(),
            filters: Vec::new(),
            chooser: None,
            is_greedy: false,
            mode,
            active: Vec::new(),
            device: None,
            draft: DeviceSampling::GREEDY,
        };
        Builder { values, vocabulary, plan }
    }

    /// Builds the plan. `has_instead` is whether the rows of [`Place::Instead`] count.
    fn build(
        mut self,
        strategy: Option<(&'static Strategy, Values)>,
        order: Option<Vec<&'static Strategy>>,
        has_instead: bool,
    ) -> Result<SamplingPlan, ParamError> {
        let has_order = order.is_some();
        let of_place = |place: Place| TABLE.iter().filter(move |row| row.place == place);
        let (edits, filters) = match order {
            Some(rows) => rows.into_iter().partition(|row| row.place == Place::Edit),
            None => (of_place(Place::Edit).collect(), of_place(Place::Filter).collect::<Vec<_>>()),
        };
        let applies_temperature = filters.iter().any(|row| row.name == "temperature");
        let instead = of_place(Place::Instead).filter(|_| has_instead);
        for row in of_place(Place::First).chain(edits).chain(of_place(Place::Last)).chain(instead) {
            self.add(row, None)?;
        }
        if let Some((row, values)) = strategy.filter(|_| self.plan.chooser.is_none()) {
            self.add(row, Some(&values))?;
        }
        if self.plan.chooser.is_some() {
            self.add_temperature()?;
        } else {
            for row in filters {
                self.add(row, None)?;
            }
        }
        let warmest = Temperature::warmest(&self.values);
        let is_named = self.plan.chooser.is_some() && !self.plan.active.contains(&"mirostat");
        self.plan.is_greedy = applies_temperature && !is_named && warmest < SamplingParams::GREEDY_BELOW;
        self.plan.device = self.device(has_order);
        self.name_draw();
        self.plan.draft = self.plan.device.unwrap_or_else(|| self.draft());
        Ok(self.plan)
    }

    /// Returns the parameters for drafts, if the device cannot apply the plan.
    fn draft(&self) -> DeviceSampling {
        let (values, active) = (&self.values, &self.plan.active);
        let is_on = |name: &str| active.contains(&name);
        // A draft that is drawn would rarely be the token of a strategy that draws none.
        if is_on("greedy") || is_on("fsd") {
            return DeviceSampling::GREEDY;
        }
        DeviceSampling {
            temperature: if is_on("temperature") { values.float(&TEMPERATURE) } else { 1.0 },
            top_k: if is_on("top_k") { values.count(&TOP_K) as u32 } else { 0 },
            top_p: if is_on("top_p") { values.float(&TOP_P) } else { 1.0 },
            min_p: if is_on("min_p") { values.float(&MIN_P) } else { 0.0 },
            penalties: Penalties::NONE,
        }
    }

    /// Names what draws the token, if no filter or chooser does.
    fn name_draw(&mut self) {
        let SamplingPlan { active, is_greedy, .. } = &mut self.plan;
        if *is_greedy {
            let is_edit = |name: &str| find(name, &[Place::First, Place::Edit, Place::Last]).is_some();
            active.retain(|name| is_edit(name));
            active.push("greedy");
        } else if active.is_empty() {
            active.push("sample");
        }
    }

    /// Adds a row, if its values switch it on.
    fn add(&mut self, row: &'static Strategy, values: Option<&Values>) -> Result<(), ParamError> {
        let unit = (row.build)(values.unwrap_or(&self.values), self.vocabulary)?;
        if unit.is_some() {
            self.plan.active.push(row.name);
        }
        match unit {
            Some(Unit::Edit(edit)) => self.plan.edits.push(edit),
            Some(Unit::Filter(filter)) => self.plan.filters.push(filter),
            Some(Unit::Choose(chooser)) => self.plan.chooser = Some(chooser),
            None => {}
        }
        Ok(())
    }

    /// Adds the temperature, which is the only filter before a chooser.
    fn add_temperature(&mut self) -> Result<(), ParamError> {
        if Temperature::warmest(&self.values) < LEAST_TEMPERATURE {
            self.plan.filters.push(Box::new(Temperature::fixed(LEAST_TEMPERATURE)));
            return Ok(());
        }
        match find("temperature", &[Place::Filter]) {
            Some(row) => self.add(row, None),
            None => Ok(()),
        }
    }

    /// Returns the parameters for the device, if nothing else is on.
    fn device(&self, has_order: bool) -> Option<DeviceSampling> {
        const ON_DEVICE: [&str; 8] = [
            "suppress_tokens",
            "logit_bias",
            "min_tokens",
            "penalties",
            "temperature",
            "top_k",
            "top_p",
            "min_p",
        ];
        let values = &self.values;
        let temperature = values.float(&TEMPERATURE);
        let is_fixed = Temperature::warmest(values) == temperature;
        let penalties = penalties::of_all_tokens(values)?;
        let fits = self.plan.active.iter().all(|name| ON_DEVICE.contains(name));
        (fits && is_fixed && !has_order && self.plan.chooser.is_none() && self.plan.mode == LogprobsMode::Raw)
            .then(|| DeviceSampling {
                temperature,
                top_k: values.count(&TOP_K) as u32,
                top_p: values.float(&TOP_P),
                min_p: values.float(&MIN_P),
                penalties,
            })
    }
}
