//! Formats that llguidance describes too widely: dates and times that do not exist, and names that are too
//! long. They become patterns, which match only what strict parsers read; other formats stay.

use serde_json::{Map, Value, json};

const DATE: &str = concat!(
    "(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))",
    "|(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29)",
);

const TIME: &str = concat!(
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:[.][0-9]{1,6})?",
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])",
);

/// At most 248 characters, without two hyphens in a row, which mark encoded names.
const HOSTNAME: &str =
    concat!("[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,30}", "(?:[.][a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,30}){0,3}",);

/// The part before the sign; at most 64 characters.
const MAILBOX: &str =
    concat!("[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,32}", "(?:[.][a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,15}){0,2}",);

const DURATION: &str = concat!(
    "P(?:[0-9]{1,6}W|(?:[0-9]{1,6}D|[0-9]{1,6}M(?:[0-9]{1,6}D)?|[0-9]{1,6}Y(?:[0-9]{1,6}M(?:[0-9]{1,6}D)?)?)",
    "(?:T[0-9]{1,6}[HMS])?|T[0-9]{1,6}[HMS])",
);

/// Replaces the keyword `format` of a schema whose patterns were translated.
pub fn replace(keywords: &mut Map<String, Value>) {
    let Some(pattern) = keywords.get("format").and_then(Value::as_str).and_then(pattern) else { return };
    keywords.shift_remove("format");
    if !keywords.contains_key("pattern") {
        keywords.insert("pattern".to_owned(), pattern.into());
        return;
    }
    let all = keywords.entry("allOf").or_insert_with(|| Value::Array(Vec::new()));
    if let Value::Array(all) = all {
        all.push(json!({ "pattern": pattern }));
    }
}

fn pattern(format: &str) -> Option<String> {
    let whole = match format {
        "date" => DATE.to_owned(),
        "time" => TIME.to_owned(),
        "date-time" => format!("{DATE}T{TIME}"),
        "duration" => DURATION.to_owned(),
        "hostname" => HOSTNAME.to_owned(),
        "email" => format!("{MAILBOX}@{HOSTNAME}"),
        _ => return None,
    };
    Some(format!("^(?:{whole})$"))
}
