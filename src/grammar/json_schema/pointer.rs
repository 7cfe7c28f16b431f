//! JSON pointers, by which references name a place of a schema.

use serde_json::Value;

/// Keywords whose members are schemas.
pub const SCHEMA_MAPS: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

/// Keywords whose items are schemas.
pub const SCHEMA_LISTS: [&str; 4] = ["prefixItems", "anyOf", "oneOf", "allOf"];

/// Keywords whose value is a schema.
pub const SCHEMAS: [&str; 3] = ["items", "additionalItems", "additionalProperties"];

/// Returns the schema within another that a JSON pointer, as a fragment, leads to.
pub fn schema<'a>(root: &'a Value, fragment: &str) -> Option<&'a Value> {
    let mut steps = fragment.strip_prefix('#')?.split('/');
    let mut schema = root;
    if steps.next() != Some("") {
        return None;
    }
    while let Some(keyword) = steps.next() {
        let found = match schema.get(keyword) {
            Some(Value::Object(members)) if SCHEMA_MAPS.contains(&keyword) => {
                steps.next().and_then(name).and_then(|name| members.get(&name))
            }
            Some(Value::Array(items)) if SCHEMA_LISTS.contains(&keyword) || keyword == "items" => {
                let index = steps.next().and_then(|step| Some((step, step.parse::<usize>().ok()?)));
                index
                    .filter(|(step, index)| *step == index.to_string())
                    .and_then(|(_, index)| items.get(index))
            }
            found => found.filter(|_| SCHEMAS.contains(&keyword)),
        };
        schema = found?;
    }
    Some(schema)
}

/// Returns the name that a step of a JSON pointer stands for.
fn name(step: &str) -> Option<String> {
    let name = step.replace("~1", "/").replace("~0", "~");
    (name.replace('~', "~0").replace('/', "~1") == step).then_some(name)
}

/// Decodes `%XX` of a reference; sequences that are no UTF-8 stay as they are.
pub fn unescape_percent(reference: &str) -> String {
    let mut bytes = Vec::with_capacity(reference.len());
    let mut rest = reference.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..2).filter(|_| *first == b'%').and_then(|digits| str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => (bytes.push(byte), rest = &after[2..]).1,
            None => (bytes.push(*first), rest = after).1,
        }
    }
    String::from_utf8(bytes).unwrap_or_else(|_| reference.to_owned())
}
