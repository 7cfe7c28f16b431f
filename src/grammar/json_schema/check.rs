//! The check of a schema: every schema within it is visited, with its path.

use super::names::Names;
use super::pointer::{SCHEMA_LISTS, SCHEMA_MAPS, SCHEMAS, unescape_percent};
use super::{child_path, disjoint, formats, pattern, pointer};
use crate::GrammarError;
use crate::limits::Budget;
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};

/// Keywords that would change which values are valid, and are not served.
const UNSUPPORTED: [&str; 22] = [
    "not",
    "if",
    "then",
    "else",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "propertyNames",
    "contains",
    "minContains",
    "maxContains",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$dynamicAnchor",
    "$recursiveRef",
    "$recursiveAnchor",
    "divisibleBy",
    "extends",
    "disallow",
    "x-guidance",
    "$vocabulary",
];

/// Least integer that other integers are rounded to in the arithmetic of numeric bounds.
const INEXACT: f64 = 9_007_199_254_740_992.0;

/// Most decimals of `multipleOf`.
const DECIMALS: u32 = 6;

/// Largest common multiple of all `multipleOf`, in units of the last decimal: a product of two fits into the
/// arithmetic of 32 bits. Without keywords that combine schemas none are multiplied.
const COMBINED_MULTIPLE: u64 = 65_535;
const SINGLE_MULTIPLE: u64 = 100_000_000;

/// Checks a schema and returns it rewritten: annotations are dropped, and patterns are in the syntax of
/// llguidance.
pub fn check(mut schema: Value, budget: &mut Budget) -> Result<Value, GrammarError> {
    let mut check = Check::new(budget);
    check.schema(&mut schema, "$", 0)?;
    disjoint::resolve(&mut schema);
    check.references(&schema)?;
    check.multiples()?;
    check.names.check(check.budget)?;
    Ok(schema)
}

/// A check in progress: what was found in the schema so far.
struct Check<'a, 'b> {
    budget: &'a mut Budget<'b>,
    /// Targets of references, with the path of each.
    references: Vec<(String, String)>,
    /// Values of `multipleOf`: path, digits, decimals.
    multiples: Vec<(String, u64, u32)>,
    names: Names,
    combines: bool,
    /// Steps of the longest JSON pointer of a schema.
    depth: usize,
}

impl<'a, 'b> Check<'a, 'b> {
    fn new(budget: &'a mut Budget<'b>) -> Check<'a, 'b> {
        let (references, multiples, names) = Default::default();
        Check { budget, references, multiples, names, combines: false, depth: 0 }
    }

    /// Checks the schema at a path; its JSON pointer has `depth` steps. The depth is bounded, because the
    /// parser of JSON bounds it.
    fn schema(&mut self, schema: &mut Value, path: &str, depth: usize) -> Result<(), GrammarError> {
        self.depth = self.depth.max(depth);
        self.budget.schemas += 1;
        let most = self.budget.limits.schemas;
        if self.budget.schemas > most {
            return Err(GrammarError::refused("$", format!("more than {most} schemas")));
        }
        match schema {
            Value::Bool(_) => Ok(()),
            Value::Object(keywords) => {
                drop_annotations(keywords);
                self.sizes(keywords, path)?;
                for (name, value) in keywords.iter_mut() {
                    self.keyword(name, value, path, depth)?;
                }
                translate_patterns(keywords, path)?;
                formats::replace(keywords);
                Ok(())
            }
            _ => Err(GrammarError::refused(path, "a schema must be an object or a boolean")),
        }
    }

    fn keyword(
        &mut self,
        name: &str,
        value: &mut Value,
        path: &str,
        depth: usize,
    ) -> Result<(), GrammarError> {
        let limits = self.budget.limits;
        let path = child_path(path, name);
        if UNSUPPORTED.contains(&name) {
            return Err(GrammarError::refused(path, "this keyword is not supported"));
        }
        self.combines |= matches!(name, "allOf" | "anyOf" | "oneOf" | "$ref");
        match (name, value) {
            ("$id" | "id", Value::String(_)) if depth > 0 => {
                Err(GrammarError::refused(path, "schemas with their own identifier are not supported"))
            }
            ("$ref", Value::String(target)) => {
                self.budget.references += 1;
                self.count(self.budget.references, limits.references, "$")?;
                self.references.push((path, unescape_percent(target)));
                Ok(())
            }
            ("const", value) => literal(value, &path),
            ("enum", Value::Array(values)) => {
                self.count(values.len(), limits.choices, &path)?;
                values.iter().try_for_each(|value| literal(value, &path))
            }
            ("minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum", Value::Number(number)) => {
                exact(number, &path)
            }
            ("minLength" | "maxLength", Value::Number(number)) => {
                let most = limits.string_characters;
                let refused = || GrammarError::refused(path, format!("{number} is too many: at most {most}"));
                number.as_u64().is_none_or(|count| count <= most).then_some(()).ok_or_else(refused)
            }
            ("multipleOf", Value::Number(number)) => self.multiple(number, path),
            ("uniqueItems", _) => Err(GrammarError::refused(path, "this keyword is not supported")),
            ("pattern" | "format", Value::String(pattern)) => self.regex(pattern, &path),
            (name, Value::Object(members)) if SCHEMA_MAPS.contains(&name) => {
                self.members(name, members, &path, depth + 1)
            }
            (name, Value::Array(items)) if SCHEMA_LISTS.contains(&name) || name == "items" => {
                let mut indexed = items.iter_mut().enumerate();
                indexed
                    .try_for_each(|(index, item)| self.schema(item, &format!("{path}[{index}]"), depth + 2))
            }
            (name, schema) if SCHEMAS.contains(&name) => self.schema(schema, &path, depth + 1),
            _ => Ok(()),
        }
    }

    /// Checks the schemas that are the members of a keyword.
    fn members(
        &mut self,
        keyword: &str,
        members: &mut Map<String, Value>,
        path: &str,
        depth: usize,
    ) -> Result<(), GrammarError> {
        let limits = self.budget.limits;
        self.count(members.len(), limits.properties, path)?;
        if keyword == "properties" {
            self.budget.all_properties += members.len();
            self.count(self.budget.all_properties, limits.all_properties, path)?;
            self.budget.property_pairs += members.len() * members.len();
            self.count(self.budget.property_pairs, limits.property_pairs, path)?;
        }
        if keyword == "patternProperties" {
            self.budget.pattern_pairs += members.len() * members.len().saturating_sub(1) / 2;
            self.count(self.budget.pattern_pairs, limits.pattern_pairs, path)?;
        }
        for (member, schema) in members.iter_mut() {
            if keyword == "patternProperties" {
                self.regex(member, &child_path(path, member))?;
                self.names.patterns.push(member.clone());
            } else {
                self.name(member, path)?;
            }
            self.schema(schema, &child_path(path, member), depth + 1)?;
        }
        Ok(())
    }

    /// Checks the name of a property or of a definition.
    fn name(&mut self, name: &str, path: &str) -> Result<(), GrammarError> {
        let most = self.budget.limits.name_bytes;
        if name.len() > most {
            let reason = format!("a name of {} bytes: at most {most}", name.len());
            return Err(GrammarError::refused(path, reason));
        }
        self.names.names.insert(name.to_owned());
        Ok(())
    }

    fn count(&self, count: usize, most: usize, path: &str) -> Result<(), GrammarError> {
        let refused = || GrammarError::refused(path, format!("{count} is too many: at most {most}"));
        (count <= most).then_some(()).ok_or_else(refused)
    }

    fn regex(&mut self, pattern: &str, path: &str) -> Result<(), GrammarError> {
        let limits = self.budget.limits;
        self.budget.patterns += 1;
        self.count(self.budget.patterns, limits.patterns, path)?;
        self.budget.all_regex_bytes += pattern.len();
        self.count(self.budget.all_regex_bytes, limits.all_regex_bytes, path)?;
        let refused = || {
            let most = limits.regex_bytes;
            GrammarError::refused(path, format!("a pattern of {} bytes: at most {most}", pattern.len()))
        };
        (pattern.len() <= limits.regex_bytes).then_some(()).ok_or_else(refused)
    }

    /// Checks keywords of objects that depend on each other.
    fn sizes(&mut self, keywords: &Map<String, Value>, path: &str) -> Result<(), GrammarError> {
        let names = keywords.get("required").and_then(Value::as_array);
        let required_path = child_path(path, "required");
        self.count(names.map_or(0, Vec::len), self.budget.limits.properties, &required_path)?;
        let required: HashSet<&str> = names.into_iter().flatten().filter_map(Value::as_str).collect();
        required.iter().try_for_each(|name| self.name(name, &required_path))?;
        // A name may be written twice, and counts once: of further properties, only the first is certain.
        match keywords.get("minProperties").and_then(Value::as_u64) {
            Some(least) if least > required.len() as u64 + 1 => {
                let path = child_path(path, "minProperties");
                let reason = format!("at most one more than the {} required properties", required.len());
                Err(GrammarError::refused(path, reason))
            }
            _ => Ok(()),
        }
    }

    /// Checks that every reference leads to a schema within the one that was checked.
    fn references(&mut self, root: &Value) -> Result<(), GrammarError> {
        let targets: HashSet<&String> = self.references.iter().map(|(_, target)| target).collect();
        if (self.depth + 1) * (targets.len() + 1) > self.budget.limits.levels {
            return Err(GrammarError::refused("$", "nested too deeply through references"));
        }
        let mut sizes = HashMap::new();
        let most = self.budget.limits.referenced;
        for (path, target) in &self.references {
            let Some(schema) = pointer::schema(root, target) else {
                let reason = format!("'{target}' is no schema within this schema");
                return Err(GrammarError::refused(path, reason));
            };
            let left = most - self.budget.referenced;
            self.budget.referenced += *sizes.entry(target).or_insert_with(|| size(schema, left + 1));
            if self.budget.referenced > most {
                return Err(GrammarError::refused("$", "references to too large schemas"));
            }
        }
        Ok(())
    }

    fn multiple(&mut self, number: &serde_json::Number, path: String) -> Result<(), GrammarError> {
        let value = number.as_f64().unwrap_or(f64::NAN);
        let scaled = (0..=DECIMALS).map(|decimals| (decimals, value.abs() * 10f64.powi(decimals as i32)));
        let found = scaled.into_iter().find(|(_, scaled)| scaled.fract() == 0.0);
        match found {
            Some((decimals, digits)) if digits >= 1.0 && digits <= SINGLE_MULTIPLE as f64 => {
                self.multiples.push((path, digits as u64, decimals));
                Ok(())
            }
            _ => Err(GrammarError::refused(path, "not a positive number with few digits")),
        }
    }

    /// Checks that common multiples of `multipleOf` can be computed.
    fn multiples(&self) -> Result<(), GrammarError> {
        let most = if self.combines { COMBINED_MULTIPLE } else { SINGLE_MULTIPLE };
        let decimals = self.multiples.iter().map(|(.., decimals)| *decimals).max().unwrap_or(0);
        let mut common = 1;
        for (path, digits, own) in &self.multiples {
            let digits = digits * 10u64.pow(decimals - own);
            let multiple = digits / greatest_divisor(digits, common) * common;
            common = if self.combines { multiple } else { digits };
            if common > most {
                return Err(GrammarError::refused(path, "too large, alone or combined with others"));
            }
        }
        Ok(())
    }
}

/// Returns the number of values within a value, or `most` if it has more.
fn size(value: &Value, most: usize) -> usize {
    let add = |sum: usize, inner: &Value| (sum < most).then(|| sum + size(inner, most - sum));
    let sum = match value {
        Value::Array(items) => items.iter().try_fold(1, add),
        Value::Object(members) => members.values().try_fold(1, add),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Some(1),
    };
    sum.unwrap_or(most)
}

/// Removes keywords that allow every value.
fn drop_annotations(keywords: &mut Map<String, Value>) {
    keywords.retain(|name, value| match name.as_str() {
        "deprecated" | "discriminator" => false,
        "uniqueItems" => *value != Value::Bool(false),
        _ => true,
    });
}

/// Rewrites the patterns of a schema whose members were checked.
fn translate_patterns(keywords: &mut Map<String, Value>, path: &str) -> Result<(), GrammarError> {
    let translated = |text: &str, path: &str| {
        pattern::translate(text).map_err(|reason| GrammarError::refused(child_path(path, "pattern"), reason))
    };
    if let Some(Value::String(text)) = keywords.get_mut("pattern") {
        *text = translated(text, path)?;
    }
    if let Some(Value::Object(members)) = keywords.get_mut("patternProperties") {
        let path = child_path(path, "patternProperties");
        let renamed = std::mem::take(members).into_iter().map(|(name, schema)| {
            let name = pattern::translate(&name);
            Ok((name.map_err(|reason| GrammarError::refused(&path, reason))?, schema))
        });
        *members = renamed.collect::<Result<_, GrammarError>>()?;
    }
    Ok(())
}

/// Checks a constant: its numbers are exact, and its strings can be written without `\u`.
fn literal(value: &Value, path: &str) -> Result<(), GrammarError> {
    let strange = |c: char| (c < ' ' && !"\u{8}\t\n\u{c}\r".contains(c)) || c == '\u{7f}';
    match value {
        Value::Number(number) => exact(number, path),
        Value::String(text) if text.contains(strange) => {
            Err(GrammarError::refused(path, "a string with control characters"))
        }
        Value::Array(items) => items.iter().try_for_each(|item| literal(item, path)),
        Value::Object(members) => members.values().try_for_each(|member| literal(member, path)),
        Value::Null | Value::Bool(_) | Value::String(_) => Ok(()),
    }
}

fn exact(number: &serde_json::Number, path: &str) -> Result<(), GrammarError> {
    match number.as_f64() {
        Some(value) if value.abs() < INEXACT => Ok(()),
        _ => Err(GrammarError::refused(path, format!("{number} is too large: at most 2^53 - 1"))),
    }
}

fn greatest_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_divisor(b, a % b) }
}
