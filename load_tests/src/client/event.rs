//! Deserialization of stream events, limited to what is needed to count tokens.
//!
//! Several hundred thousand events arrive per second, so parsing copies only the counts.
//! Invariant: an accepted event is valid JSON from its first byte to its last.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error, IgnoredAny, SeqAccess, Visitor},
};

/// A stream event of a completion or a chat; fields not listed here are ignored.
#[derive(Deserialize)]
pub struct Event {
    pub error: Option<serde_json::Value>,
    pub choices: Option<ChoiceTotals>,
    pub usage: Option<Usage>,
}

/// Token counts reported by the server.
#[derive(Deserialize)]
pub struct Usage {
    pub prompt_tokens: Option<u32>,
    pub completion_tokens: Option<u32>,
}

/// The sum over the choices of an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChoiceTotals {
    /// Number of tokens: the number of token ids, or one for each choice with text.
    pub tokens: u32,
    /// Whether any choice has token ids.
    pub has_token_ids: bool,
}

#[derive(Deserialize)]
struct ChoiceEvent {
    #[serde(default)]
    text: HasText,
    token_ids: Option<ArrayLen>,
    delta: Option<Delta>,
}

/// An increment of a chat message.
#[derive(Deserialize)]
struct Delta {
    #[serde(default)]
    content: HasText,
    #[serde(default)]
    refusal: HasText,
    #[serde(default)]
    reasoning: HasText,
    #[serde(default)]
    reasoning_content: HasText,
    tool_calls: Option<ArrayLen>,
}

impl ChoiceEvent {
    fn has_text(&self) -> bool {
        self.text.0 || self.delta.as_ref().is_some_and(Delta::has_text)
    }
}

impl Delta {
    fn has_text(&self) -> bool {
        let texts = [self.content, self.refusal, self.reasoning, self.reasoning_content];
        texts.contains(&HasText(true)) || self.tool_calls.is_some_and(|calls| calls.0 > 0)
    }
}

impl<'de> Deserialize<'de> for ChoiceTotals {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Sum;
        impl<'de> Visitor<'de> for Sum {
            type Value = ChoiceTotals;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of choices")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<ChoiceTotals, A::Error> {
                let mut sum = ChoiceTotals::default();
                while let Some(choice) = list.next_element::<ChoiceEvent>()? {
                    sum.has_token_ids |= choice.token_ids.is_some();
                    sum.tokens += choice.token_ids.map_or(u32::from(choice.has_text()), |ids| ids.0);
                }
                Ok(sum)
            }
        }
        deserializer.deserialize_seq(Sum)
    }
}

/// The length of a JSON array, deserialized without its elements.
#[derive(Clone, Copy)]
struct ArrayLen(u32);

impl<'de> Deserialize<'de> for ArrayLen {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Counter;
        impl<'de> Visitor<'de> for Counter {
            type Value = ArrayLen;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<ArrayLen, A::Error> {
                let mut count = 0;
                while list.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(ArrayLen(count))
            }
        }
        deserializer.deserialize_seq(Counter)
    }
}

/// Whether a string field is present and not empty.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct HasText(bool);

impl<'de> Deserialize<'de> for HasText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Look;
        impl Visitor<'_> for Look {
            type Value = HasText;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<HasText, E> {
                Ok(HasText(!text.is_empty()))
            }

            fn visit_unit<E: Error>(self) -> Result<HasText, E> {
                Ok(HasText(false))
            }
        }
        deserializer.deserialize_any(Look)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices(list: &str) -> Option<(u32, bool)> {
        let event: Event = serde_json::from_str(&format!("{{\"choices\":{list}}}")).ok()?;
        event.choices.map(|choices| (choices.tokens, choices.has_token_ids))
    }

    #[test]
    fn choices_come_to_their_tokens() {
        for (list, expected) in [
            ("[]", (0, false)),
            (r#"[{"index":0,"text":"ab","logprobs":null,"finish_reason":null}]"#, (1, false)),
            (r#"[{"text":"\u00e9\n\""},{"text":""},{"text":null},{"text":"b"}]"#, (2, false)),
            (r#"[{"text":"ab","token_ids":[1,2,3],"logprobs":{"tokens":["a","b"]}}]"#, (3, true)),
            (r#"[{"text":"ab","token_ids":[]}]"#, (0, true)),
            (r#"[{"text":"ab","token_ids":null}]"#, (1, false)),
            (r#"[{"delta":{"role":"assistant","content":""}}]"#, (0, false)),
            (r#"[{"delta":{"content":"Hi"},"finish_reason":"stop"}]"#, (1, false)),
            (r#"[{"delta":{"content":null,"reasoning_content":"so"}}]"#, (1, false)),
            (r#"[{"delta":{"reasoning":"so","reasoning_content":"so"}}]"#, (1, false)),
            (r#"[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}}]"#, (1, false)),
            (r#"[{"delta":{"content":"Hi"},"token_ids":[4,5]}]"#, (2, true)),
            (r#"[{"delta":{}}]"#, (0, false)),
        ] {
            assert_eq!(choices(list), Some(expected), "{list}");
        }
    }

    #[test]
    fn what_are_no_choices_is_refused() {
        for list in ["\"x\"", "[1]", "{}", r#"[{"text":1}]"#, r#"[{"token_ids":3}]"#, r#"[{"delta":"Hi"}]"#] {
            assert_eq!(choices(list), None, "{list}");
        }
        assert!(serde_json::from_str::<Event>("{\"choices\":[]}x").is_err());
    }
}
