//! The Jinja dialect of chat templates, that of Python. The template engine is close to it; this module adds
//! what known templates need beyond it, and the tests of `chat_template` compare both with Python's results.
//!
//! Invariant: a template has access only to its variables.

use super::template_limits::{self, Makes, TEXT_MAX};
use jiff::Zoned;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, StringInput, Tuple, ValueKind, ValueOrKwargs, from_args};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value, filters};
use minijinja_contrib::globals::{cycler, joiner};
use minijinja_contrib::pycompat::unknown_method_callback;
use std::fmt;
use std::sync::Arc;

/// Maximum number of instructions of one rendering. A conversation of a thousand messages takes about a
/// fiftieth of it.
const INSTRUCTIONS_MAX: u64 = 5_000_000;

/// Recursion limit. Each nested macro counts four; a higher limit overflows a thread's stack in debug builds.
const DEPTH_MAX: usize = 200;

/// Maximum number of characters of a padded text.
const WIDTH_MAX: usize = 10_000;

/// Source of the current time for `strftime_now`.
pub type Clock = fn() -> Zoned;

/// Error with the message of a template's `raise_exception`.
#[derive(Debug)]
pub struct RaisedException(pub String);

impl fmt::Display for RaisedException {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for RaisedException {}

/// Returns a template environment with all filters, tests and functions. `clock` is read by `strftime_now`.
pub fn environment(clock: Clock) -> Environment<'static> {
    let mut env = Environment::new();
    env.set_syntax(syntax());
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_recursion_limit(DEPTH_MAX);
    env.set_fuel(Some(INSTRUCTIONS_MAX));
    env.set_unknown_method_callback(call_method);
    env.add_filter("tojson", to_json);
    env.add_filter("int", int);
    env.add_filter("float", float);
    env.add_filter("replace", replace);
    env.add_filter("indent", indent);
    env.add_filter("join", join);
    env.add_filter("format", format);
    env.add_filter("string", |value: &Value| template_limits::text_of(value));
    env.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String)
    });
    env.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
        Err(invalid("refused").with_source(RaisedException(template_limits::text_of(&message)?)))
    });
    env.add_function("strftime_now", move |format: &str| {
        jiff::fmt::strtime::format(format, &clock()).map_err(|error| invalid(error.to_string()))
    });
    env.add_function("cycler", |items: Rest<Value>| cycler(items.0));
    env.add_function("joiner", joiner);
    env.remove_global("debug");
    template_limits::add_functions(&mut env);
    env
}

fn syntax() -> SyntaxConfig {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    syntax.expect("the default delimiters are valid; this is a bug")
}

/// Converts a template's source to one of the engine's that keeps to the limits of [`template_limits`], and
/// sets how many instructions it may have.
pub fn convert(env: &mut Environment, source: &str) -> Result<String, Error> {
    let template_limits::Rewritten { source, instructions } =
        template_limits::rewrite(&preprocess(source), syntax())?;
    env.set_fuel(Some(instructions.min(INSTRUCTIONS_MAX)));
    Ok(source)
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Converts a template's source to the engine's syntax. Line endings become `\n`, as in Python. `{%
/// generation %}`, which marks the assistant's text for training and does not change it, becomes `with`,
/// which has the same scope.
fn preprocess(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut text = String::with_capacity(source.len());
    let mut rest = source.as_str();
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        text.push_str(before);
        let length = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, behind) = tag.split_at(length);
        let inner = tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+']).trim();
        match inner {
            "generation" => text.push_str(&tag.replacen("generation", "with", 1)),
            "endgeneration" => text.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            _ => text.push_str(tag),
        }
        rest = behind;
    }
    text + rest
}

/// The `int` filter: as `filters::int`, but values that are not numbers become the default, which is 0.
fn int(state: &State, value: &Value, default: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let default = default.or(options.get("default")?).unwrap_or(Value::from(0));
    filters::int(state, value, Some(default), None, options)
}

/// The `float` filter: values that are not numbers become the default, which is 0.0.
fn float(state: &State, value: &Value, default: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let default = default.or(options.get("default")?).unwrap_or(Value::from(0.0));
    filters::float(state, value, Some(default), options)
}

/// The `indent` filter, for a text that stays below `TEXT_MAX`.
fn indent(state: &mut State, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    type Options = (Option<usize>, Option<bool>, Option<bool>, Kwargs);
    let args = args.into_values();
    let (text, (width, first, blank, options)): (&Value, Options) = match &args[..] {
        [text, options @ ..] => (text, from_args(options)?),
        [] => return Err(invalid("indent: the text is missing")),
    };
    let width = width.or(options.get("width")?).unwrap_or(4);
    let (first, blank) = (first.or(options.get("first")?), blank.or(options.get("blank")?));
    options.assert_all_used()?;
    let text = template_limits::text_of(text)?;
    let lines = text.split('\n').count();
    template_limits::count(state, text.len().saturating_add(width.saturating_mul(lines)))?;
    let nothing: [(&str, Value); 0] = [];
    let text = Value::from(text);
    filters::indent(StringInput::new(state, &text)?, Some(width), first, blank, Kwargs::from_iter(nothing))
}

/// The `replace` filter, with Python's optional count.
fn replace(
    state: &mut State,
    text: &Value,
    from: &str,
    to: &str,
    count: Option<usize>,
) -> Result<String, Error> {
    replace_text(state, &template_limits::text_of(text)?, (from, to), count)
}

fn replace_text(
    state: &mut State,
    text: &str,
    (from, to): (&str, &str),
    count: Option<usize>,
) -> Result<String, Error> {
    let count = count.unwrap_or(usize::MAX);
    let found = text.matches(from).take(count).count();
    template_limits::count(state, text.len().saturating_add(found.saturating_mul(to.len())))?;
    Ok(text.replacen(from, to, count))
}

/// The `join` filter, whose items have their texts first.
fn join(
    state: &mut State,
    value: &Value,
    separator: Option<&str>,
    attribute: Option<&str>,
    options: Kwargs,
) -> Result<Value, Error> {
    let mut items = Vec::new();
    for item in value.try_iter()?.checked() {
        let item = item?;
        template_limits::count_text(state, &item)?;
        template_limits::count(state, separator.map_or(0, str::len))?;
        items.push(item);
    }
    let separator = separator.map(Value::from);
    let separator = separator.as_ref().map(|text| StringInput::new(state, text)).transpose()?;
    filters::join(state, &Value::from(items), separator, attribute, options)
}

/// The `format` filter, for widths that are not beyond all measure.
fn format(state: &mut State, format: &Value, values: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    template_limits::check_format(format)?;
    let values = values.into_values();
    values.iter().try_for_each(|value| template_limits::count_text(state, value))?;
    filters::format(state, format, Rest(values.into_iter().map(ValueOrKwargs::from).collect()))
}

/// Calls a Python method: one that `minijinja_contrib` lacks, or else one of its own.
fn call_method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if name == "format" {
        template_limits::check_format(value)?;
        args.iter().try_for_each(|value| template_limits::count_text(state, value))?;
    }
    if let ("replace", Some(text)) = (name, value.as_str()) {
        let (from, to, count): (&str, &str, Option<i64>) = from_args(args)?;
        // A negative count is no limit.
        let count = count.and_then(|count| usize::try_from(count).ok());
        return replace_text(state, text, (from, to), count).map(Value::from);
    }
    if let ("join", Some(separator)) = (name, value.as_str()) {
        let (items,): (&Value,) = from_args(args)?;
        let nothing: [(&str, Value); 0] = [];
        return join(state, items, Some(separator), None, Kwargs::from_iter(nothing));
    }
    if value.as_str().is_some() && !reads_only(name) {
        let makes = if name.contains("split") { Makes::Parts } else { Makes::Text };
        let all: Vec<Value> = [value].into_iter().chain(args).cloned().collect();
        template_limits::count_made(state, makes, &all)?;
    }
    let result = match value.kind() {
        ValueKind::String => call_text_method(value.as_str().unwrap_or_default(), name, args)?,
        ValueKind::Seq if name == "index" => {
            let (wanted,): (&Value,) = from_args(args)?;
            let found = value.try_iter()?.position(|item| item == *wanted);
            Some(found.ok_or_else(|| invalid("the list does not contain the item"))?.into())
        }
        ValueKind::Map if name == "copy" && args.is_empty() => Some(value.clone()),
        _ => None,
    };
    match result {
        Some(result) => Ok(result),
        None => unknown_method_callback(state, value, name, args),
    }
}

/// Returns whether a method of Python's `str` returns no text.
fn reads_only(name: &str) -> bool {
    let reads = ["startswith", "endswith", "find", "rfind", "index", "rindex", "count"];
    reads.contains(&name) || name.starts_with("is")
}

/// Calls a method of Python's `str`; `None` if it is not one of those here.
fn call_text_method(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let part = || from_args::<(&str,)>(args).map(|(part,)| part);
    let found = |at: Option<usize>| {
        at.map(|at| text[..at].chars().count().into()).ok_or_else(|| invalid("substring not found"))
    };
    Ok(Some(match name {
        "removeprefix" => text.strip_prefix(part()?).unwrap_or(text).into(),
        "removesuffix" => text.strip_suffix(part()?).unwrap_or(text).into(),
        "partition" => partition(text.split_once(part()?), part()?, [text, "", ""]),
        "rpartition" => partition(text.rsplit_once(part()?), part()?, ["", "", text]),
        "split" => split(text, args)?,
        "rsplit" => split_from_right(text, args)?,
        "index" => found(text.find(part()?))?,
        "rindex" => found(text.rfind(part()?))?,
        "ljust" => pad(text, args, |blanks| (0, blanks))?,
        "rjust" => pad(text, args, |blanks| (blanks, 0))?,
        _ => return Ok(None),
    }))
}

fn partition(halves: Option<(&str, &str)>, separator: &str, whole: [&str; 3]) -> Value {
    let three = halves.map_or(whole, |(before, behind)| [before, separator, behind]);
    Value::from(Tuple::from(three.map(Value::from)))
}

/// Parses the arguments of `split` and `rsplit`: the optional separator, and the optional maximum number of
/// splits.
fn split_args(args: &[Value]) -> Result<(Option<Arc<str>>, Option<i64>), Error> {
    let (separator, limit, options): (Option<Arc<str>>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = separator.or(options.get("sep")?);
    let limit = limit.or(options.get("maxsplit")?).filter(|limit| *limit >= 0);
    options.assert_all_used()?;
    Ok((separator, limit))
}

fn split(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, limit) = split_args(args)?;
    filters::split(&text.into(), separator, limit)
}

fn split_from_right(text: &str, args: &[Value]) -> Result<Value, Error> {
    match split_args(args)? {
        (Some(separator), Some(limit)) => {
            let mut pieces: Vec<_> = text.rsplitn(limit as usize + 1, &*separator).collect();
            pieces.reverse();
            Ok(pieces.into_iter().collect())
        }
        (separator, None) => filters::split(&text.into(), separator, None),
        (None, Some(_)) => Err(invalid("rsplit: a limit needs a separator")),
    }
}

/// Pads a text to a width. `sides` divides the number of missing characters between the left and the right
/// side.
fn pad(text: &str, args: &[Value], sides: impl Fn(usize) -> (usize, usize)) -> Result<Value, Error> {
    let (width, filler): (usize, Option<&str>) = from_args(args)?;
    let lacking = width.min(WIDTH_MAX).saturating_sub(text.chars().count());
    let (before, behind) = sides(lacking);
    let filler = filler.unwrap_or(" ");
    Ok(format!("{}{text}{}", filler.repeat(before), filler.repeat(behind)).into())
}

/// Formatting options of Python's `json.dumps`.
struct JsonWriter {
    is_ascii: bool,
    sorts_keys: bool,
    /// Indentation per level; without it the output is a single line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
}

/// The `tojson` filter.
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent = match options.get::<Option<Value>>("indent")? {
        None => None,
        Some(indent) if indent.is_none() => None,
        Some(indent) => match (indent.as_usize(), indent.to_str()) {
            (Some(blanks), _) => Some(" ".repeat(blanks.min(16))),
            (_, Some(text)) => Some(text.to_string()),
            _ => return Err(invalid("tojson: indent must be a number or a string")),
        },
    };
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    let usual = || vec![if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string()];
    let Ok([item_separator, key_separator]) = <[String; 2]>::try_from(separators.unwrap_or_else(usual))
    else {
        return Err(invalid("tojson: separators must be two strings"));
    };
    let is_ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sorts_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let mut out = String::new();
    JsonWriter { is_ascii, sorts_keys, indent, item_separator, key_separator }
        .write_value(&mut out, value, 0)?;
    Ok(out)
}

/// Returns a value as JSON, as the `tojson` filter writes it. A value that is nested too deeply is null.
pub fn to_json_text(value: &Value) -> String {
    let options: [(&str, Value); 0] = [];
    to_json(value, Kwargs::from_iter(options)).unwrap_or_else(|_| "null".to_owned())
}

impl JsonWriter {
    fn write_value(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(invalid("tojson: nested too deeply"));
        }
        if out.len() > TEXT_MAX {
            return Err(template_limits::too_long("tojson: the text"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&format_number(value)?),
            ValueKind::String => self.write_string(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.checked().collect::<Result<_, _>>()?;
                self.write_list(out, ['[', ']'], &items, depth, |out, item| {
                    self.write_value(out, item, depth + 1)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.checked().collect::<Result<_, _>>()?;
                if self.sorts_keys {
                    keys.sort();
                }
                self.write_list(out, ['{', '}'], &keys, depth, |out, key| {
                    self.write_key(out, key)?;
                    self.write_value(out, &value.get_item(key)?, depth + 1)
                })?;
            }
            kind => return Err(invalid(format!("tojson: cannot convert {kind} to JSON"))),
        }
        Ok(())
    }

    fn write_list(
        &self,
        out: &mut String,
        [open, close]: [char; 2],
        items: &[Value],
        depth: usize,
        mut put: impl FnMut(&mut String, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                out.push_str(&self.item_separator);
            }
            self.write_newline(out, depth + 1);
            put(out, item)?;
        }
        if !items.is_empty() {
            self.write_newline(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn write_newline(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    /// Writes an object key; numbers, booleans and None become strings.
    fn write_key(&self, out: &mut String, key: &Value) -> Result<(), Error> {
        match key.kind() {
            ValueKind::String => self.write_string(out, key.as_str().unwrap_or_default()),
            ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                out.push('"');
                self.write_value(out, key, 0)?;
                out.push('"');
            }
            kind => return Err(invalid(format!("tojson: {kind} cannot be a key"))),
        }
        out.push_str(&self.key_separator);
        Ok(())
    }

    fn write_string(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.is_ascii && !c.is_ascii()) => {
                    let mut units = [0; 2];
                    let units = c.encode_utf16(&mut units).iter();
                    units.for_each(|unit| out.push_str(&format!("\\u{unit:04x}")));
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// Formats a number as Python does.
fn format_number(value: &Value) -> Result<String, Error> {
    if value.is_integer() {
        return Ok(value.to_string());
    }
    let float = f64::try_from(value.clone())?;
    if !float.is_finite() {
        let word = if float.is_nan() { "NaN" } else { "Infinity" };
        return Ok(format!("{}{word}", if float < 0.0 { "-" } else { "" }));
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    Ok(match exponent {
        -4..16 => format!("{float:?}"),
        16.. => format!("{digits}e+{exponent:02}"),
        _ => format!("{digits}e-{:02}", -exponent),
    })
}
