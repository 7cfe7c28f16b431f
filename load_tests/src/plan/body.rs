//! Serialization of a request to the JSON body of its endpoint.
//!
//! Invariant: the body is written directly from the request, without an intermediate copy of the prompt.

use serde::{Serialize, Serializer, ser::SerializeMap};
use serde_json::{Map, Value};

use super::requests::{Endpoint, Prompt, Request};

/// The inputs of a request body.
pub(super) struct Body<'a> {
    pub request: &'a Request,
    pub endpoint: Endpoint,
    pub model: &'a str,
    pub extra: &'a Map<String, Value>,
}

impl Body<'_> {
    /// Serializes the body.
    pub fn json(&self) -> String {
        let prompt_bytes = match &self.request.prompt {
            // Most ids have five or six digits, and a comma.
            Prompt::Ids(ids) => ids.len() * 7,
            Prompt::Text(text) => text.len() + text.len() / 16,
        };
        let mut json = Vec::with_capacity(prompt_bytes + 512);
        serde_json::to_writer(&mut json, self).expect("plain data can be serialized");
        String::from_utf8(json).expect("JSON is valid UTF-8")
    }
}

impl Serialize for Body<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let request = self.request;
        let mut fields = Fields { map: serializer.serialize_map(None)?, extra: self.extra };
        fields.add("model", self.model)?;
        match self.endpoint {
            Endpoint::Completions => fields.add("prompt", &request.prompt)?,
            Endpoint::Chat => fields.add("messages", &[Message::user(&request.prompt)])?,
        }
        fields.add("max_tokens", &request.output_len)?;
        fields.add("temperature", &request.temperature)?;
        // Servers parse seeds as signed integers.
        fields.add("seed", &(request.seed & i64::MAX as u64))?;
        fields.add("stream", &true)?;
        fields.add("stream_options", &StreamOptions { include_usage: true })?;
        fields.add("return_token_ids", &true)?;
        // Some servers reject unknown fields, so this one is sent only when needed.
        if request.ignore_eos {
            fields.add("ignore_eos", &true)?;
        }
        fields.finish()
    }
}

/// Serializes the standard fields except those overridden in `extra`, then the non-null fields of `extra`.
struct Fields<'a, M> {
    map: M,
    extra: &'a Map<String, Value>,
}

impl<M: SerializeMap> Fields<'_, M> {
    fn add(&mut self, name: &str, value: &(impl Serialize + ?Sized)) -> Result<(), M::Error> {
        if self.extra.contains_key(name) { Ok(()) } else { self.map.serialize_entry(name, value) }
    }

    fn finish(mut self) -> Result<M::Ok, M::Error> {
        for (name, value) in self.extra.iter().filter(|(_, value)| !value.is_null()) {
            self.map.serialize_entry(name, value)?;
        }
        self.map.end()
    }
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
}

impl<'a> Message<'a> {
    fn user(prompt: &'a Prompt) -> Self {
        let Prompt::Text(content) = prompt else {
            panic!("prompts of token ids are rejected for the chat endpoint by LoadSpec::check");
        };
        Message { role: "user", content }
    }
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn request(prompt: Prompt) -> Request {
        Request {
            index: 3,
            prompt,
            prompt_len: 2,
            output_len: 5,
            hang_up_after: None,
            read_rate: None,
            model: 0,
            key: None,
            temperature: 0.7,
            seed: u64::MAX,
            ignore_eos: false,
        }
    }

    fn body(request: &Request, endpoint: Endpoint, extra: Value) -> Value {
        let Value::Object(extra) = extra else { panic!("{extra}") };
        serde_json::from_str(&request.body(endpoint, "m", &extra)).unwrap()
    }

    #[test]
    fn a_completion_is_streamed_with_its_ids_and_the_closing_usage() {
        let body = body(&request(Prompt::Ids(vec![7, 0])), Endpoint::Completions, json!({}));
        let expected = json!({
            "model": "m", "prompt": [7, 0], "max_tokens": 5, "temperature": 0.7,
            "seed": 9_223_372_036_854_775_807u64, "stream": true, "stream_options": {"include_usage": true},
            "return_token_ids": true,
        });
        assert_eq!(body, expected);
    }

    #[test]
    fn a_chat_is_one_message_of_a_user() {
        let prompt = "say \"hi\"\n\u{1F600}";
        let body = body(&request(Prompt::Text(prompt.into())), Endpoint::Chat, json!({}));
        assert_eq!(body["messages"], json!([{"role": "user", "content": prompt}]));
        assert_eq!((&body["max_tokens"], body.get("prompt")), (&json!(5), None));
    }

    #[test]
    fn end_of_sequence_is_mentioned_only_to_be_ignored() {
        let ignores = Request { ignore_eos: true, ..request(Prompt::Text("a".into())) };
        assert_eq!(body(&ignores, Endpoint::Completions, json!({}))["ignore_eos"], true);
        let respects = Request { ignore_eos: false, ..ignores };
        assert!(body(&respects, Endpoint::Completions, json!({})).get("ignore_eos").is_none());
    }

    #[test]
    fn extra_fields_replace_add_and_remove() {
        let extra = json!({
            "max_tokens": null, "max_completion_tokens": 9, "temperature": 1, "return_token_ids": null,
            "not_there": null, "stream_options": {"include_usage": true, "continuous_usage_stats": true},
        });
        let text = request(Prompt::Text("a".into())).body(Endpoint::Chat, "m", extra.as_object().unwrap());
        // A duplicate field would be ambiguous.
        assert_eq!((text.matches("temperature").count(), text.matches("stream_options").count()), (1, 1));
        let body: Value = serde_json::from_str(&text).unwrap();
        for absent in ["max_tokens", "return_token_ids", "not_there"] {
            assert!(body.get(absent).is_none(), "{absent}");
        }
        assert_eq!((&body["max_completion_tokens"], &body["temperature"]), (&json!(9), &json!(1)));
        assert_eq!(body["stream_options"]["continuous_usage_stats"], true);
        assert_eq!((&body["model"], &body["stream"]), (&json!("m"), &json!(true)));
    }
}
