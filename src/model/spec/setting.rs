//! Values of specification files: written directly, looked up in the model's config.json, or computed.
//!
//! Invariant: a setting is parsed where it is written, so that errors have file and line.

use schemars::JsonSchema;
use serde::de::value::{
    BoolDeserializer, F64Deserializer, I64Deserializer, MapAccessDeserializer, SeqAccessDeserializer,
    StrDeserializer,
};
use serde::de::{DeserializeOwned, Error, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

/// A value of a specification file, or a lookup of one.
#[derive(Clone, Debug, PartialEq, JsonSchema)]
#[schemars(untagged)]
pub enum Setting<T> {
    /// The value itself.
    Fixed(T),
    /// A lookup of the value.
    Lookup(Box<Lookup<T>>),
}

/// A lookup of a value. The first of `key`, `formula` and `default` that yields a value decides.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, bound = "T: DeserializeOwned")]
pub struct Lookup<T> {
    /// A key of config.json, with dots for nested ones, or several keys of which the first that exists is
    /// used.
    pub key: Option<OneOrMore<String>>,
    /// Maps the key's values to values of this setting. Without this table they are used unchanged.
    pub cases: Option<BTreeMap<String, T>>,
    /// A formula: numbers, `+ - * / ^`, parentheses, `sqrt(…)`, `floor(…)`, keys of config.json, and numbers
    /// of this file that were resolved earlier (`$hidden`, `$layers`, `$heads` …).
    pub formula: Option<String>,
    /// For models whose config.json lacks the key.
    pub default: Option<Box<Setting<T>>>,
}

/// One value, or a list of values.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum OneOrMore<T> {
    One(T),
    More(Vec<T>),
}

impl<T> OneOrMore<T> {
    /// Returns all values, at least one if the file lists any.
    pub fn as_slice(&self) -> &[T] {
        match self {
            OneOrMore::One(one) => std::slice::from_ref(one),
            OneOrMore::More(more) => more,
        }
    }
}

/// The type of a setting's value.
pub trait Value: DeserializeOwned + Serialize + Clone + PartialEq {
    /// Converts a formula's result; `None` if formulas have no meaning for this type.
    fn from_number(_: f64) -> Option<Self> {
        None
    }
}

impl Value for f64 {
    fn from_number(number: f64) -> Option<f64> {
        Some(number)
    }
}

impl Value for usize {
    /// Accepts whole numbers only: `0.5 * head_dim` with an odd `head_dim` is an error.
    fn from_number(number: f64) -> Option<usize> {
        (number >= 0.0 && number <= u32::MAX.into() && number.fract() == 0.0).then_some(number as usize)
    }
}

impl Value for bool {}

impl Value for Vec<usize> {}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Setting<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(SettingVisitor(PhantomData))
    }
}

/// Deserializes a table as a lookup and anything else as the value.
struct SettingVisitor<T>(PhantomData<T>);

impl<'de, T: DeserializeOwned> Visitor<'de> for SettingVisitor<T> {
    type Value = Setting<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value, or a table with key, formula or default")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Self::Value, E> {
        let value: BoolDeserializer<E> = value.into_deserializer();
        T::deserialize(value).map(Setting::Fixed)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Self::Value, E> {
        let value: I64Deserializer<E> = value.into_deserializer();
        T::deserialize(value).map(Setting::Fixed)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Self::Value, E> {
        let value: F64Deserializer<E> = value.into_deserializer();
        T::deserialize(value).map(Setting::Fixed)
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Self::Value, E> {
        let value: StrDeserializer<'_, E> = value.into_deserializer();
        T::deserialize(value).map(Setting::Fixed)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Self::Value, A::Error> {
        T::deserialize(SeqAccessDeserializer::new(items)).map(Setting::Fixed)
    }

    fn visit_map<A: MapAccess<'de>>(self, entries: A) -> Result<Self::Value, A::Error> {
        Box::deserialize(MapAccessDeserializer::new(entries)).map(Setting::Lookup)
    }
}
