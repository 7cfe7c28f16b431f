//! Speculative decoding of a request: `speculation`, `acceptance`, and `speculative.n_max` of llama.cpp.
//!
//! Invariant: a request speculates only by means that the server has.

use crate::actors::speculation::SpeculationSetup;
use crate::request::{AcceptanceRule, DraftSource, Speculation};
use crate::server::error::ApiError;
use crate::server::fields::Fields;

/// The sources of drafts that a request can choose.
#[derive(Clone, Copy)]
enum Method {
    /// The server's default.
    Auto,
    Off,
    Draft,
    PromptLookup,
}

const METHODS: [(&str, Method); 4] = [
    ("auto", Method::Auto),
    ("off", Method::Off),
    ("draft", Method::Draft),
    ("prompt_lookup", Method::PromptLookup),
];

/// Parses the parameters of speculative decoding. A request that chooses nothing has the server's defaults.
/// Asking for a source of drafts that the server does not have is an error.
pub(super) fn parse_speculation(
    fields: &mut Fields,
    setup: Option<&SpeculationSetup>,
) -> Result<Option<Speculation>, ApiError> {
    let method = parse_name(fields, "speculation", &METHODS)?.unwrap_or(Method::Auto);
    let rules = AcceptanceRule::ALL.map(|rule| (rule.name(), rule));
    let rule = parse_name(fields, "acceptance", &rules)?;
    // A negative number is the default, as for other numbers of llama.cpp.
    let most = fields.take_integer("speculative.n_max", i64::from(i32::MIN), i64::from(i32::MAX))?;
    let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
    let Some(drafter) = find_drafter(method, setup)? else { return Ok(None) };
    let defaults = setup.map(|setup| (setup.max_drafts, setup.acceptance));
    Ok(defaults.filter(|_| most > 0).map(|(max_drafts, default_rule)| Speculation {
        drafter,
        max_drafts: max_drafts.min(most),
        rule: rule.unwrap_or(default_rule),
    }))
}

/// Returns the source of drafts for a request; `None` if it does not speculate.
fn find_drafter(method: Method, setup: Option<&SpeculationSetup>) -> Result<Option<DraftSource>, ApiError> {
    let refused = |method: &str, lack: &str| {
        let message = format!("'speculation' is \"{method}\", but this server {lack}");
        Err(ApiError::unsupported("speculation", message))
    };
    let is_off = "has no speculative decoding: speculation.method is off, or the model is not a decoder";
    match (method, setup) {
        (Method::Off, _) | (Method::Auto, None) => Ok(None),
        (Method::Auto, Some(setup)) => Ok(setup.drafter),
        (Method::Draft, None) => refused("draft", is_off),
        (Method::PromptLookup, None) => refused("prompt_lookup", is_off),
        (Method::Draft, Some(setup)) if setup.draft.is_none() => {
            refused("draft", "has no draft model; it has \"prompt_lookup\" and \"off\"")
        }
        (Method::Draft, Some(_)) => Ok(Some(DraftSource::Model)),
        (Method::PromptLookup, Some(setup)) => Ok(Some(setup.lookup.drafter())),
    }
}

/// Takes out a field that must be one of `names`.
fn parse_name<T: Copy>(fields: &mut Fields, name: &str, names: &[(&str, T)]) -> Result<Option<T>, ApiError> {
    let quoted: Vec<String> = names.iter().map(|(name, _)| format!("\"{name}\"")).collect();
    let expected = format!("one of {}", quoted.join(", "));
    fields.take_with(name, &expected, |value| {
        let known = names.iter().find(|(name, _)| value.as_str() == Some(name));
        known.map(|(_, meaning)| *meaning)
    })
}
