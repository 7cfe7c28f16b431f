//! Looks up the values of settings and records the origin of each.
//!
//! Invariant: every value that is looked up is recorded, once for all layers that have it.

use super::formula;
use super::setting::{Lookup, OneOrMore, Setting, Value};
use crate::formats::HubConfig;
use crate::model::provenance::{Origin, SourcedValue};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value as Json;
use std::collections::BTreeMap;

/// State of the resolution of one model's specification.
pub struct Lookups<'a> {
    pub config: &'a HubConfig,
    /// Returns whether the checkpoint has a tensor with that name.
    pub has_tensor: &'a dyn Fn(&str) -> bool,
    /// Prefix of recorded keys: empty, `encoder.` or `decoder.`.
    pub stack: &'static str,
    /// The layer that is being resolved; `None` outside of the layers.
    pub layer: Option<usize>,
    /// Number of layers of the stack, once it is known.
    pub layers: Option<usize>,
    values: Vec<SourcedValue>,
    /// Indices of each key's entries in `values`.
    entries: BTreeMap<String, Vec<usize>>,
    /// Numbers that formulas can refer to, by key, with the layer they belong to.
    numbers: BTreeMap<&'static str, (f64, Option<usize>)>,
}

impl<'a> Lookups<'a> {
    /// Creates lookups in a configuration, for a checkpoint whose tensor names satisfy `has`.
    pub fn new(config: &'a HubConfig, has: &'a dyn Fn(&str) -> bool) -> Lookups<'a> {
        let (values, places, numbers) = Default::default();
        Lookups {
            config,
            has_tensor: has,
            stack: "",
            layer: None,
            layers: None,
            values,
            entries: places,
            numbers,
        }
    }

    /// Returns all recorded values.
    pub fn into_values(self) -> Vec<SourcedValue> {
        self.values
    }

    /// Returns the value of a required setting. Fails if there is none.
    pub fn required<T: Value>(&mut self, key: &'static str, setting: &Option<Setting<T>>) -> Result<T> {
        let setting =
            setting.as_ref().with_context(|| format!("the specification has no value for '{key}'"))?;
        let (value, origin) = self.find(key, setting)?.with_context(|| self.missing_message(key, setting))?;
        Ok(self.record(key, value, origin))
    }

    /// Returns the setting's value; without one, `derived`, which the rule `rule` gives.
    pub fn or_derived<T: Value>(
        &mut self,
        key: &'static str,
        setting: &Option<Setting<T>>,
        rule: &'static str,
        derived: T,
    ) -> Result<T> {
        let found = setting.as_ref().map(|setting| self.find(key, setting)).transpose()?.flatten();
        let (value, origin) = found.unwrap_or((derived, Origin::Derived(rule)));
        Ok(self.record(key, value, origin))
    }

    /// Returns the setting's value; without one, `default`, which is not recorded.
    pub fn or_default<T: Value>(
        &mut self,
        key: &'static str,
        setting: &Option<Setting<T>>,
        default: T,
    ) -> Result<T> {
        let found = setting.as_ref().map(|setting| self.find(key, setting)).transpose()?.flatten();
        Ok(match found {
            Some((value, origin)) => self.record(key, value, origin),
            None => default,
        })
    }

    /// Returns the first of several config.json keys that exists, with its value.
    pub fn first_present<'k>(&self, keys: &'k OneOrMore<String>) -> Option<(&'k String, &'a Json)> {
        keys.as_slice().iter().find_map(|key| Some((key, self.config.at(key)?)))
    }

    /// Records a value with its origin.
    pub fn record<T: Value>(&mut self, key: &'static str, value: T, origin: Origin) -> T {
        let json = serde_json::to_value(&value).unwrap_or(Json::Null);
        if let Some(number) = json.as_f64() {
            self.numbers.insert(key, (number, self.layer));
        }
        self.record_json(key, json, origin);
        value
    }

    /// Records a value in its JSON form, with its origin.
    pub fn record_json(&mut self, key: &'static str, value: Json, origin: Origin) {
        let key = format!("{}{key}", self.stack);
        let places = self.entries.entry(key.clone()).or_default();
        let known = places.iter().copied().find(|place| {
            let entry = &self.values[*place];
            entry.value == value && entry.origin == origin
        });
        let place = known.unwrap_or(self.values.len());
        if known.is_none() {
            places.push(place);
            self.values.push(SourcedValue { key, layers: Vec::new(), value, origin });
        }
        let layers = &mut self.values[place].layers;
        if let Some(layer) = self.layer.filter(|layer| layers.last() != Some(layer)) {
            layers.push(layer);
        }
    }

    /// Returns the value and its origin, if there is one.
    fn find<T: Value>(&self, key: &str, setting: &Setting<T>) -> Result<Option<(T, Origin)>> {
        match setting {
            Setting::Fixed(value) => Ok(Some((value.clone(), Origin::Specification))),
            Setting::Lookup(sought) => self.resolve_lookup(key, sought),
        }
    }

    fn resolve_lookup<T: Value>(&self, key: &str, sought: &Lookup<T>) -> Result<Option<(T, Origin)>> {
        if let Some((name, value)) = sought.key.as_ref().and_then(|keys| self.first_present(keys)) {
            return Ok(Some((
                self.convert(name, value, sought)?,
                Origin::Config(self.config.source_keys(name)),
            )));
        }
        let mut absent: Vec<String> = sought.key.iter().flat_map(OneOrMore::as_slice).cloned().collect();
        if let Some(formula) = &sought.formula {
            match self.evaluate_formula::<T>(key, formula, sought.default.is_some())? {
                Ok(value) => return Ok(Some((value, Origin::Formula(formula.clone())))),
                Err(names) => absent.extend(names),
            }
        }
        let Some(default) = &sought.default else { return Ok(None) };
        let found = self.find(key, default)?;
        let keys: Vec<String> = absent.iter().map(|key| self.config.file_key(key)).collect();
        Ok(found.map(|(value, origin)| match origin {
            Origin::Specification if !keys.is_empty() => (value, Origin::Default(keys.join(", "))),
            origin => (value, origin),
        }))
    }

    /// Returns the entry of the current layer from a list with an entry for every layer, which may have more
    /// for layers that the model does not have. Other values are returned as they are.
    fn of_layer<'v>(&self, value: &'v Json) -> &'v Json {
        let entries = value.as_array().filter(|entries| self.layers.is_some_and(|n| entries.len() >= n));
        entries.zip(self.layer).map_or(value, |(entries, layer)| &entries[layer])
    }

    /// Converts the value of a key, by the setting's `cases` if it has them.
    fn convert<T: Value>(&self, name: &str, value: &Json, sought: &Lookup<T>) -> Result<T> {
        let value = self.of_layer(value);
        match &sought.cases {
            Some(cases) => {
                let case = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                let known = || cases.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
                let wrong = || {
                    self.config
                        .key_error(name, format_args!("{value} is not supported (supported: {})", known()))
                };
                cases.get(&case).cloned().ok_or_else(wrong)
            }
            None => serde_json::from_value(value.clone()).map_err(|error| self.config.key_error(name, error)),
        }
    }

    /// Evaluates a formula. Returns the keys that it names and the configuration lacks if there is a default.
    fn evaluate_formula<T: Value>(
        &self,
        key: &str,
        text: &str,
        has_default: bool,
    ) -> Result<Result<T, Vec<String>>> {
        let mut absent = Vec::new();
        let result = formula::evaluate(text, &mut |name| match self.formula_variable(name)? {
            None if has_default && !name.starts_with('$') => {
                absent.push(name.to_owned());
                Ok(1.0)
            }
            found => found.with_context(|| format!("formula '{text}': there is no '{name}'")),
        });
        if !absent.is_empty() {
            return Ok(Err(absent));
        }
        let number = result.with_context(|| format!("{}: '{key}'", self.config.file().display()))?;
        let value = T::from_number(number);
        value.map(Ok).with_context(|| {
            format!("formula '{text}' evaluates to {number}, which is not valid for '{key}'")
        })
    }

    /// Returns the number of a config.json key, or of a value recorded earlier if the name starts with `$`.
    fn formula_variable(&self, name: &str) -> Result<Option<f64>> {
        match name.strip_prefix('$') {
            Some(known) => self.recorded_number(known),
            None => {
                let Some(value) = self.config.at(name) else { return Ok(None) };
                let value = self.of_layer(value);
                let number = value.as_f64();
                ensure!(
                    number.is_some(),
                    self.config.key_error(name, format_args!("{value} is not a number"))
                );
                Ok(number)
            }
        }
    }

    /// Returns a number recorded for this layer or for all: by its full key, or by the key's last component
    /// if that is unambiguous.
    fn recorded_number(&self, name: &str) -> Result<Option<f64>> {
        let is_meant = |key: &str| key == name || key.rsplit_once('.').is_some_and(|(_, last)| last == name);
        let here = |layer: &Option<usize>| layer.is_none() || *layer == self.layer;
        let found = self.numbers.iter().filter(|(key, (_, layer))| is_meant(key) && here(layer));
        let found: Vec<_> = found.collect();
        match found.as_slice() {
            [] => Ok(None),
            [(_, (number, _))] => Ok(Some(*number)),
            several => {
                let keys: Vec<&str> = several.iter().map(|(key, _)| **key).collect();
                bail!("'${name}' is ambiguous between {}: use the full key", keys.join(", "))
            }
        }
    }

    /// Starts the next stack, which shares no numbers with the previous one.
    pub fn begin_stack(&mut self, prefix: &'static str) {
        (self.stack, self.layer, self.layers) = (prefix, None, None);
        self.numbers.clear();
    }

    fn missing_message<T>(&self, key: &str, setting: &Setting<T>) -> String {
        let file = self.config.file().display();
        let keys = match setting {
            Setting::Lookup(sought) => sought.key.as_ref(),
            Setting::Fixed(_) => None,
        };
        match keys {
            Some(keys) => {
                let names: Vec<String> =
                    keys.as_slice().iter().map(|key| self.config.file_key(key)).collect();
                let keys = names.join("' or '");
                format!("{file}: the key '{keys}' is missing")
            }
            None => format!("{file}: there is no value for '{key}'"),
        }
    }
}
