//! The requests of a soak test.
//!
//! Invariant: a request is determined by the file, its kind and its variant, so its answer can be recorded
//! and compared.

use std::collections::BTreeMap;

use hyper::{Method, body::Bytes};
use serde_json::{Value, json};

use super::{
    file::{SoakFile, SoakLoad},
    kind::{CHOICES, Kind},
};
use crate::plan::{
    prompts::random_words,
    random::{Purpose, RandomStream},
};

/// A request of a soak test.
#[derive(Clone, Debug)]
pub struct SoakRequest {
    pub kind: Kind,
    pub variant: u32,
    pub method: Method,
    pub path: &'static str,
    pub body: Bytes,
}

impl SoakRequest {
    /// Returns a request of a kind.
    pub fn new(load: &SoakLoad, kind: Kind, variant: u32) -> SoakRequest {
        let body = match kind {
            Kind::Malformed => Bytes::from_static(b"{\"prompt\": \"a\", \"max_tokens\": "),
            Kind::HugeBody => Bytes::from(vec![b' '; load.huge_bytes]),
            _ => Bytes::from(body(load, kind, variant).to_string()),
        };
        let path = match kind {
            Kind::Chat | Kind::Schema => "/v1/chat/completions",
            Kind::Embeddings => "/v1/embeddings",
            Kind::UnknownPath => "/v1/no/such/path",
            _ => "/v1/completions",
        };
        SoakRequest { kind, variant, method: Method::POST, path, body }
    }
}

/// Returns the body of a request that is JSON.
fn body(load: &SoakLoad, kind: Kind, variant: u32) -> Value {
    let words = match kind {
        Kind::Long => load.long_words,
        Kind::TooLong => load.too_long_words,
        _ => load.short_words,
    };
    let text = random_words(load.seed, kind as u64 * u64::from(u32::MAX) + u64::from(variant), words);
    // Every other answer is sampled.
    let temperature = if variant.is_multiple_of(2) { 0.0 } else { 0.9 };
    let mut body = json!({
        "max_tokens": load.max_tokens,
        "temperature": temperature,
        "seed": u64::from(variant) + load.seed,
    });
    let input = match kind {
        Kind::Chat | Kind::Schema => ("messages", json!([{"role": "user", "content": text}])),
        Kind::Embeddings => return json!({"input": [text, "another text"]}),
        _ => ("prompt", text.into()),
    };
    body[input.0] = input.1;
    match kind {
        Kind::Stream | Kind::HangUp => body["stream"] = true.into(),
        Kind::Choices => body["n"] = CHOICES.into(),
        Kind::Logprobs => body["logprobs"] = 3.into(),
        Kind::BadParameter => body["temperature"] = (-1).into(),
        Kind::UnknownModel => body["model"] = "no-such-model".into(),
        Kind::Schema => body["response_format"] = response_format(),
        _ => {}
    }
    body
}

fn response_format() -> Value {
    let schema = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": false,
    });
    json!({"type": "json_schema", "json_schema": {"name": "person", "schema": schema}})
}

/// Chooses the requests of the traffic, by the mix of a file.
pub struct Traffic {
    load: SoakLoad,
    /// Kinds with the sums of their weights up to them.
    kinds: Vec<(Kind, f64)>,
    requests: BTreeMap<(Kind, u32), SoakRequest>,
    chosen: u64,
}

impl Traffic {
    /// Creates the traffic of a file, with the kinds that `is_wanted` accepts.
    pub fn new(file: &SoakFile, is_wanted: impl Fn(Kind) -> bool) -> Traffic {
        let mut sum = 0.0;
        let wanted = file.mix.iter().filter(|(kind, weight)| **weight > 0.0 && is_wanted(**kind));
        let kinds = wanted.map(|(kind, weight)| {
            sum += weight;
            (*kind, sum)
        });
        Traffic { load: file.load.clone(), kinds: kinds.collect(), requests: BTreeMap::new(), chosen: 0 }
    }

    /// Returns the next request, with random numbers for it.
    pub fn next(&mut self) -> (SoakRequest, RandomStream) {
        let mut random = RandomStream::new(self.load.seed, Purpose::Soak(self.chosen));
        self.chosen += 1;
        let sum = self.kinds.last().expect("a file has at least one kind").1;
        let drawn = random.unit() * sum;
        let found = self.kinds.iter().find(|(_, up_to)| drawn < *up_to);
        let kind = found.unwrap_or(&self.kinds[0]).0;
        let variant = random.between(0, self.load.variants.get() - 1);
        let made = self.requests.entry((kind, variant));
        let request = made.or_insert_with(|| SoakRequest::new(&self.load, kind, variant));
        (request.clone(), random)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_come_as_often_as_the_mix_says() {
        let mut file = SoakFile::read(None).unwrap();
        file.mix = [(Kind::Short, 3.0), (Kind::Stream, 1.0), (Kind::Long, 0.0), (Kind::Chat, 4.0)].into();
        let mut traffic = Traffic::new(&file, |kind| kind != Kind::Chat);
        let mut counts = BTreeMap::<Kind, u32>::new();
        for _ in 0..4000 {
            *counts.entry(traffic.next().0.kind).or_default() += 1;
        }
        assert_eq!(counts.keys().copied().collect::<Vec<_>>(), [Kind::Short, Kind::Stream]);
        assert!((2850..3150).contains(&counts[&Kind::Short]), "{counts:?}");
    }

    #[test]
    fn requests_are_what_their_kind_says() {
        let load = SoakFile::read(None).unwrap().load;
        for kind in Kind::ALL {
            let request = SoakRequest::new(&load, kind, 1);
            let json = serde_json::from_slice::<Value>(&request.body);
            assert_eq!(json.is_err(), matches!(kind, Kind::Malformed | Kind::HugeBody), "{kind:?}");
            assert_eq!(request.body, SoakRequest::new(&load, kind, 1).body);
        }
        let prompt = |kind, variant| {
            let request = SoakRequest::new(&load, kind, variant);
            serde_json::from_slice::<Value>(&request.body).unwrap()["prompt"].as_str().unwrap().to_owned()
        };
        assert_eq!(prompt(Kind::Long, 0).split(' ').count(), load.long_words as usize);
        assert_ne!(prompt(Kind::Short, 0), prompt(Kind::Short, 1));
        assert_ne!(prompt(Kind::Short, 0), prompt(Kind::Stream, 0));
    }
}
