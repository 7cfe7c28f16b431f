//! Bodies of native requests, filled from the fields of another API.

use crate::decoding::SamplingPlan;
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use serde_json::{Map, Value, json};

/// The body of a native request.
#[derive(Default)]
pub struct NativeBody(Map<String, Value>);

impl NativeBody {
    /// Sets a parameter.
    pub fn set(&mut self, name: &str, value: impl Into<Value>) {
        self.0.insert(name.to_owned(), value.into());
    }

    /// Takes the fields out that the native API has by the same names.
    pub fn take_same(&mut self, fields: &mut Fields, names: impl IntoIterator<Item = &'static str>) {
        let same = fields.take_all(names.into_iter());
        self.0.extend(same.into_iter().map(|(name, value)| (name.to_owned(), value)));
    }

    /// Takes a field out that the native API calls `native`. Returns whether it is there.
    pub fn take_as(&mut self, fields: &mut Fields, name: &str, native: &str) -> bool {
        let value = fields.take(name);
        let is_given = value.is_some();
        self.0.extend(value.map(|value| (native.to_owned(), value)));
        is_given
    }

    /// Sets a parameter that is not set yet.
    pub fn set_default(&mut self, name: &str, value: impl Into<Value>) {
        self.0.entry(name).or_insert_with(|| value.into());
    }

    /// Removes a parameter if it has this value.
    pub fn remove_if(&mut self, name: &str, value: &Value) {
        if self.0.get(name) == Some(value) {
            self.0.shift_remove(name);
        }
    }

    /// Takes all sampling parameters out, which have the names of other servers already.
    pub fn take_sampling(&mut self, fields: &mut Fields) {
        self.take_same(fields, SamplingPlan::param_names());
    }

    /// Makes the answer a stream, whose last chunk has the usage.
    pub fn stream(&mut self) {
        self.set("stream", true);
        self.set("stream_options", json!({"include_usage": true}));
    }

    /// Returns the body as JSON.
    pub fn into_value(self) -> Value {
        self.0.into()
    }
}

/// Returns an error for a field that is missing.
pub fn missing(name: &str) -> ApiError {
    ApiError::invalid(name, format!("'{name}' is missing"))
}
