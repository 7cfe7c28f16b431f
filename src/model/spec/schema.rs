//! Generates the JSON Schema of specification files, for editors.
//!
//! Invariant: the schema is generated from the types that parse the files; `specs/schema.json` is the output
//! of [`text`].

use super::tables::SpecText;
use schemars::generate::SchemaSettings;
use serde_json::Value;

/// Returns the text of `specs/schema.json`.
pub fn text() -> String {
    let mut schema = schema();
    schema["title"] = "Specification of a model".into();
    let text = serde_json::to_string_pretty(&schema).expect("a schema is JSON; this is a bug");
    text + "\n"
}

/// Returns the reference of all tables and keys in Markdown: the generated part of `docs/models.md`.
pub fn reference() -> String {
    let root = schema();
    let defs = &root["$defs"];
    let mut page = String::from("### Top-level keys\n\n");
    table(&mut page, &root["properties"], defs, |key| defs_table(&root["properties"][key]).is_none());
    for (key, value) in object(&root["properties"]) {
        let Some(name) = defs_table(value).filter(|_| !["encoder", "decoder"].contains(&key.as_str())) else {
            continue;
        };
        let about = defs[name]["description"].as_str().unwrap_or_default();
        page += &format!("\n### [{key}]\n\n{about}\n\n");
        table(&mut page, &defs[name]["properties"], defs, |_| true);
    }
    for (title, name) in [
        ("[[override]], in addition to the tables above", "Override"),
        ("override.when", "Condition"),
        ("override.layers", "LayerPick"),
        ("Lookup of a value", "Lookup"),
    ] {
        page += &format!("\n### {title}\n\n");
        table(&mut page, &defs[name]["properties"], defs, |key| {
            defs_table(&defs[name]["properties"][key]).is_none()
        });
    }
    page
}

fn schema() -> Value {
    SchemaSettings::draft2020_12().into_generator().into_root_schema_for::<SpecText>().into()
}

fn object(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flatten()
}

/// Returns the name of the table that a property refers to, if it is a table.
fn defs_table(property: &Value) -> Option<&str> {
    reference_of(property).filter(|name| name.ends_with("Table") || *name == "Tables")
}

fn reference_of(property: &Value) -> Option<&str> {
    property["$ref"].as_str()?.strip_prefix("#/$defs/")
}

fn table(page: &mut String, properties: &Value, defs: &Value, wanted: impl Fn(&str) -> bool) {
    *page += "| key | value | meaning |\n|---|---|---|\n";
    for (key, property) in object(properties).filter(|(key, _)| wanted(key)) {
        let about = property["description"].as_str().unwrap_or_default().replace('\n', " ");
        // A lookup has the type of the value it finds.
        let kind = match key.as_str() {
            "default" if about.starts_with("For models whose") => "a value, or another lookup".to_owned(),
            _ => kind(property, defs),
        };
        *page += &format!("| `{key}` | {kind} | {about} |\n");
    }
}

/// Describes the possible values of a property in a few words.
fn kind(property: &Value, defs: &Value) -> String {
    if let Some(name) = reference_of(property) {
        return match name.trim_end_matches(char::is_numeric) {
            "OneOrMore" => "one, or a list".to_owned(),
            "ScalingSetting" => "`none`, or `{ key = … }`".to_owned(),
            _ => kind(&defs[name], defs),
        };
    }
    let choices: Vec<&Value> =
        ["anyOf", "oneOf"].iter().filter_map(|key| property[*key].as_array()).flatten().collect();
    let named: Vec<String> = choices.iter().flat_map(|choice| words(choice)).collect();
    if !named.is_empty() {
        return named.join(", ");
    }
    // The first choice is the plain value; that a value may be looked up or omitted applies to all.
    if let Some(first) = choices.first() {
        return kind(first, defs);
    }
    let ty = property["type"].as_array().and_then(|types| types.first()).unwrap_or(&property["type"]);
    match ty.as_str() {
        Some("integer") => "whole number".to_owned(),
        Some("boolean") => "true or false".to_owned(),
        Some("array") => "list".to_owned(),
        Some("object") => "table".to_owned(),
        Some("string") if property["enum"].is_array() => words(property).join(", "),
        Some(other) => other.to_owned(),
        None => "anything".to_owned(),
    }
}

/// Returns the names that a choice allows.
fn words(choice: &Value) -> Vec<String> {
    let single = choice["const"].as_str().into_iter();
    let several = choice["enum"].as_array().into_iter().flatten().filter_map(Value::as_str);
    single.chain(several).map(|word| format!("`{word}`")).collect()
}
