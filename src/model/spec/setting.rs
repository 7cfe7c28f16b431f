//! A value of a specification file: written there, looked up in the model's config.json, or worked out.
//!
//! Invariant: a setting is read where it stands, so that an error has its file and line.

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

/// A value, or where it is to be found.
#[derive(Clone, Debug, PartialEq, JsonSchema)]
#[schemars(untagged)]
pub enum Setting<T> {
    /// It stands here.
    Fixed(T),
    /// It is to be found.
    Sought(Sought<T>),
}

/// Where a value is found. The first of `key`, `formula` and `default` that gives one decides.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, bound = "T: DeserializeOwned")]
pub struct Sought<T> {
    /// A key of config.json, nested ones with dots, or several of which the first that is there counts.
    pub key: Option<OneOrMore<String>>,
    /// What the key's value means here, value by value. Without this table it is taken as it is.
    pub cases: Option<BTreeMap<String, T>>,
    /// Arithmetic: numbers, `+ - * / ^`, parentheses, `sqrt(…)`, `floor(…)`, keys of config.json, and the numbers of this file that
    /// were settled before (`$hidden`, `$layers`, `$heads` …).
    pub formula: Option<String>,
    /// For models whose config.json lacks the key.
    pub default: Option<Box<Setting<T>>>,
}

/// One thing, or a list of them.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum OneOrMore<T> {
    One(T),
    More(Vec<T>),
}

impl<T> OneOrMore<T> {
    pub fn as_slice(&self) -> &[T] {
        match self {
            OneOrMore::One(one) => std::slice::from_ref(one),
            OneOrMore::More(more) => more,
        }
    }
}

/// What a setting can be.
pub trait Value: DeserializeOwned + Serialize + Clone + PartialEq {
    /// The value that a formula's result is; `None` where formulas have no meaning.
    fn of_number(_: f64) -> Option<Self> {
        None
    }
}

impl Value for f64 {
    fn of_number(number: f64) -> Option<f64> {
        Some(number)
    }
}

impl Value for usize {
    /// Whole numbers only: `0.5 * head_dim` of an odd head is a mistake.
    fn of_number(number: f64) -> Option<usize> {
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

/// A table says where the value is found; anything else is the value.
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
        Sought::deserialize(MapAccessDeserializer::new(entries)).map(Setting::Sought)
    }
}
