//! Limits of what a chat template may make. The engine's own operators take as much memory as they need, so a
//! template is rewritten before it is compiled: `a ~ b` and `a * b` become calls of functions, and the
//! results of `+` go through one. Filters and methods count what they are about to make. Text of the template
//! itself is not counted as it is written, so the number of instructions is limited by the longest one that
//! can be written repeatedly to a text: in a macro, or in a loop within a block that is assigned or filtered.
//!
//! Invariant: a rewritten template gives the same text, on the same lines, unless it exceeds a limit. No
//! single text exceeds `TEXT_MAX`, except by what one filter adds to it or the template itself has; all texts
//! and lists of one rendering together do not exceed `ALL_MAX`, as far as operators, output, filters and
//! methods make them, and once more as far as they are of the template itself.

use minijinja::machinery::{ast, parse};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value, filters};
use std::fmt::{self, Write};

/// Maximum length of a text that a template makes, in bytes.
pub const TEXT_MAX: usize = 16 << 20;

/// Maximum length of all texts and lists of one rendering together, in bytes.
pub const ALL_MAX: usize = 256 << 20;

/// Maximum length of a template's source in bytes.
const SOURCE_MAX: usize = 1 << 20;

/// Maximum number of consecutive digits in a format: a width or a precision.
const FORMAT_DIGITS_MAX: usize = 4;

/// Beginning of the names of the functions below, which a template must not use itself.
const PREFIX: &str = "__mainstem";

/// Size that counts for an item of a list.
const ITEM_BYTES: usize = 32;

/// Replaces filters of the engine by ones that count what they are about to make.
fn add_counted_filters(env: &mut Environment) {
    let filters = [
        ("upper", Makes::Text, Value::from_function(filters::upper)),
        ("lower", Makes::Text, Value::from_function(filters::lower)),
        ("title", Makes::Text, Value::from_function(filters::title)),
        ("capitalize", Makes::Text, Value::from_function(filters::capitalize)),
        ("trim", Makes::Text, Value::from_function(filters::trim)),
        ("escape", Makes::Text, Value::from_function(filters::escape)),
        ("e", Makes::Text, Value::from_function(filters::escape)),
        ("safe", Makes::Text, Value::from_function(filters::safe)),
        ("pprint", Makes::Text, Value::from_function(filters::pprint)),
        ("split", Makes::Parts, Value::from_function(filters::split)),
        ("lines", Makes::Parts, Value::from_function(filters::lines)),
        ("reverse", Makes::List, Value::from_function(filters::reverse)),
        ("list", Makes::List, Value::from_function(filters::list)),
        ("sort", Makes::List, Value::from_function(filters::sort)),
        ("unique", Makes::List, Value::from_function(filters::unique)),
        ("map", Makes::List, Value::from_function(filters::map)),
        ("select", Makes::List, Value::from_function(filters::select)),
        ("reject", Makes::List, Value::from_function(filters::reject)),
        ("selectattr", Makes::List, Value::from_function(filters::selectattr)),
        ("rejectattr", Makes::List, Value::from_function(filters::rejectattr)),
        ("groupby", Makes::List, Value::from_function(filters::groupby)),
        ("items", Makes::List, Value::from_function(filters::items)),
        ("dictsort", Makes::List, Value::from_function(filters::dictsort)),
        ("batch", Makes::FilledList, Value::from_function(filters::batch)),
        ("slice", Makes::FilledList, Value::from_function(filters::slice)),
    ];
    // Jinja has no such filters, and what they make has no length that could be counted.
    ["chain", "zip"].into_iter().for_each(|name| env.remove_filter(name));
    for (name, makes, filter) in filters {
        env.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            count_made(state, makes, &args)?;
            filter.call(state, &args)
        });
    }
}

/// Adds the functions that rewritten templates call, and the filters that count what they make.
pub fn add_functions(env: &mut Environment) {
    add_counted_filters(env);
    env.add_function("__mainstem_concat", concat);
    env.add_function("__mainstem_mul", multiply);
    env.add_function("__mainstem_made", made);
    env.set_formatter(write_value);
}

/// A rewritten template.
pub struct Rewritten {
    pub source: String,
    /// Maximum number of instructions that keeps the template's own text within the limits.
    pub instructions: u64,
}

/// Rewrites the operators of a template. A source that cannot be parsed stays as it is, for the error that
/// compiling it gives.
pub fn rewrite(source: &str, syntax: SyntaxConfig) -> Result<Rewritten, Error> {
    if source.len() > SOURCE_MAX {
        return Err(too_long("the template's source"));
    }
    if source.contains(PREFIX) {
        return Err(Error::new(ErrorKind::SyntaxError, format!("'{PREFIX}' is reserved")));
    }
    let Ok(template) = parse(source, "template", syntax) else {
        return Ok(Rewritten { source: source.to_owned(), instructions: u64::MAX });
    };
    let mut rewriter = Rewriter { source, edits: Vec::new(), place: Place::default(), longest: 0 };
    rewriter.statement(&template);
    // At the same place, an operand ends before its operator, as in `a~b~c`. Otherwise edits stay in the
    // order of their expressions, the outer ones first.
    rewriter.edits.sort_by_key(|(at, replaced, _)| (*at, *replaced));
    let (mut text, mut from) = (String::with_capacity(source.len() * 2), 0);
    for (at, replaced, by) in rewriter.edits {
        text.push_str(&source[from..at]);
        text.push_str(by);
        from = at + replaced;
    }
    let instructions = (ALL_MAX / rewriter.longest.max(1)) as u64;
    Ok(Rewritten { source: text + &source[from..], instructions })
}

/// Place of a statement within others.
#[derive(Clone, Copy, Default)]
struct Place {
    /// Its output becomes a text of the template, rather than a part of the limited result.
    is_captured: bool,
    is_repeated: bool,
}

/// Finds the operators of a template, and its longest text that is repeated in the making of another one.
struct Rewriter<'s> {
    source: &'s str,
    place: Place,
    longest: usize,
    /// Places with the number of bytes that are replaced, and their replacement.
    edits: Vec<(usize, usize, &'static str)>,
}

impl Rewriter<'_> {
    fn statements(&mut self, all: &[ast::Stmt]) {
        all.iter().for_each(|statement| self.statement(statement));
    }

    /// Goes through the statements within another one, which captures their output or repeats them.
    fn within(&mut self, is_captured: bool, is_repeated: bool, all: &[ast::Stmt]) {
        let outer = self.place;
        self.place.is_captured |= is_captured;
        self.place.is_repeated |= is_repeated;
        self.statements(all);
        self.place = outer;
    }

    fn statement(&mut self, statement: &ast::Stmt) {
        match statement {
            ast::Stmt::Template(it) => self.statements(&it.children),
            ast::Stmt::EmitRaw(it) if self.place.is_captured && self.place.is_repeated => {
                self.longest = self.longest.max(it.raw.len());
            }
            ast::Stmt::EmitExpr(it) => self.expression(&it.expr),
            ast::Stmt::ForLoop(it) => {
                self.expression(&it.iter);
                self.expressions(it.filter_expr.as_ref());
                self.within(false, true, &it.body);
                self.statements(&it.else_body);
            }
            ast::Stmt::IfCond(it) => {
                self.expression(&it.expr);
                self.statements(&it.true_body);
                self.statements(&it.false_body);
            }
            ast::Stmt::WithBlock(it) => {
                self.expressions(it.assignments.iter().map(|(_, value)| value));
                self.statements(&it.body);
            }
            ast::Stmt::Set(it) => self.expression(&it.expr),
            ast::Stmt::SetBlock(it) => {
                self.expressions(it.filter.as_ref());
                self.within(true, false, &it.body);
            }
            ast::Stmt::AutoEscape(it) => self.statements(&it.body),
            ast::Stmt::FilterBlock(it) => {
                self.expression(&it.filter);
                self.within(true, false, &it.body);
            }
            ast::Stmt::Block(it) => self.within(true, true, &it.body),
            ast::Stmt::Macro(it) => {
                self.expressions(&it.defaults);
                self.within(true, true, &it.body);
            }
            ast::Stmt::CallBlock(it) => {
                self.arguments(&it.call.args);
                self.expressions(&it.macro_decl.defaults);
                self.within(true, true, &it.macro_decl.body);
            }
            ast::Stmt::Do(it) => self.arguments(&it.call.args),
            // They have no expressions, or load other templates, of which there are none.
            _ => {}
        }
    }

    fn expressions<'e, 'a: 'e>(&mut self, all: impl IntoIterator<Item = &'e ast::Expr<'a>>) {
        all.into_iter().for_each(|expression| self.expression(expression));
    }

    fn arguments(&mut self, all: &[ast::CallArg]) {
        for argument in all {
            let (ast::CallArg::Pos(value)
            | ast::CallArg::Kwarg(_, value)
            | ast::CallArg::PosSplat(value)
            | ast::CallArg::KwargSplat(value)) = argument;
            self.expression(value);
        }
    }

    fn expression(&mut self, expression: &ast::Expr) {
        match expression {
            ast::Expr::Var(_) | ast::Expr::Const(_) => {}
            ast::Expr::Slice(it) => {
                self.expression(&it.expr);
                self.expressions([&it.start, &it.stop, &it.step].into_iter().flatten());
            }
            ast::Expr::UnaryOp(it) => self.expression(&it.expr),
            ast::Expr::BinOp(it) => self.operator(it),
            ast::Expr::Compare(it) => {
                self.expression(&it.expr);
                self.expressions(it.ops.iter().map(|operator| &operator.expr));
            }
            ast::Expr::IfExpr(it) => {
                self.expressions([&it.test_expr, &it.true_expr]);
                self.expressions(it.false_expr.as_ref());
            }
            ast::Expr::Filter(it) => {
                self.expressions(it.expr.as_ref());
                self.arguments(&it.args);
            }
            ast::Expr::Test(it) => {
                self.expression(&it.expr);
                self.arguments(&it.args);
            }
            ast::Expr::GetAttr(it) => self.expression(&it.expr),
            ast::Expr::GetItem(it) => self.expressions([&it.expr, &it.subscript_expr]),
            ast::Expr::Call(it) => {
                self.expression(&it.expr);
                self.arguments(&it.args);
            }
            ast::Expr::List(it) => self.expressions(&it.items),
            ast::Expr::Tuple(it) => self.expressions(&it.items),
            ast::Expr::Map(it) => {
                self.expressions(&it.keys);
                self.expressions(&it.values);
            }
        }
    }

    fn operator(&mut self, it: &ast::Spanned<ast::BinOp>) {
        let (begin, end) = (it.span().start_offset as usize, it.span().end_offset as usize);
        let left_end = it.left.span().end_offset as usize;
        match it.op {
            ast::BinOpKind::Concat => self.call("__mainstem_concat(", (begin, end), (left_end, '~')),
            ast::BinOpKind::Mul => self.call("__mainstem_mul(", (begin, end), (left_end, '*')),
            ast::BinOpKind::Add => self.wrap("__mainstem_made(", (begin, end)),
            _ => {}
        }
        self.expressions([&it.left, &it.right]);
    }

    /// Makes a call of an operator with its two operands, between which it is the first one after `after`.
    fn call(&mut self, name: &'static str, place: (usize, usize), (after, operator): (usize, char)) {
        let Some(at) = self.source.get(after..).and_then(|rest| rest.find(operator)) else { return };
        self.wrap(name, place);
        self.edits.push((after + at, operator.len_utf8(), ","));
    }

    fn wrap(&mut self, name: &'static str, (begin, end): (usize, usize)) {
        self.edits.push((begin, 0, name));
        self.edits.push((end, 0, ")"));
    }
}

/// Bytes that a rendering has made.
struct Made(usize);

/// Counts bytes that are made. Fails beyond the limits.
pub fn count(state: &mut State, bytes: usize) -> Result<(), Error> {
    let made = state.get_or_insert_extension(Made(0));
    made.0 = made.0.saturating_add(bytes);
    match bytes > TEXT_MAX || made.0 > ALL_MAX {
        true => Err(too_long("the text")),
        false => Ok(()),
    }
}

/// Returns the error for something that exceeds a limit.
pub fn too_long(what: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("{what} is too long"))
}

/// Returns a value's text, which may be one that a list of lists repeats beyond all measure.
pub fn text_of(value: &Value) -> Result<String, Error> {
    let mut text = Bounded(String::new());
    write!(text, "{value}").map_err(|_| too_long("the text"))?;
    Ok(text.0)
}

/// Kind of value that a filter or a method makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Makes {
    /// A text about as long as the one that it is given.
    Text,
    /// A text for each part of one.
    Parts,
    /// A list of the items, or the characters, that it is given.
    List,
    /// A list that an argument may fill up to a number of items.
    FilledList,
}

/// Counts what a filter or a method is about to make of its first argument.
pub fn count_made(state: &mut State, makes: Makes, args: &[Value]) -> Result<(), Error> {
    let Some(value) = args.first() else { return Ok(()) };
    let items = |len: usize| len.saturating_mul(ITEM_BYTES);
    let bytes = match (makes, value.as_str()) {
        (Makes::Text, Some(text)) => text.len(),
        // It is the text of a list or a map, which the filter makes first.
        (Makes::Text | Makes::Parts, None) => text_of(value)?.len(),
        (Makes::Parts, Some(text)) => {
            let parts = match args.get(1).and_then(Value::as_str) {
                Some(separator) if !separator.is_empty() => text.matches(separator).count(),
                _ => text.split_whitespace().count().max(text.lines().count()),
            };
            text.len() + items(parts)
        }
        (Makes::List, Some(text)) => items(text.chars().count()),
        (Makes::List, None) => items(value.len().unwrap_or(0)),
        (Makes::FilledList, _) => {
            let filled = args.iter().skip(1).filter_map(Value::as_usize).max().unwrap_or(0);
            items(value.len().unwrap_or(0).max(filled))
        }
    };
    count(state, bytes)
}

/// Counts the text of a value.
pub fn count_text(state: &mut State, value: &Value) -> Result<(), Error> {
    let len = match value.as_str() {
        Some(text) => text.len(),
        None => text_of(value)?.len(),
    };
    count(state, len)
}

/// Checks the width and the precision in a format.
pub fn check_format(format: &Value) -> Result<(), Error> {
    let Some(text) = format.as_str() else { return Ok(()) };
    let is_long = text.split(|c: char| !c.is_ascii_digit()).any(|digits| digits.len() > FORMAT_DIGITS_MAX);
    match is_long || text.contains('*') && text.contains('%') {
        true => Err(too_long("a width in a format")),
        false => Ok(()),
    }
}

/// A text that takes no more than a template may make.
struct Bounded(String);

impl Write for Bounded {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        if self.0.len() + part.len() > TEXT_MAX {
            return Err(fmt::Error);
        }
        self.0.push_str(part);
        Ok(())
    }
}

/// The operator `~`.
fn concat(state: &mut State, parts: Rest<Value>) -> Result<Value, Error> {
    let mut text = Bounded(String::new());
    for part in parts.iter() {
        write!(text, "{part}").map_err(|_| too_long("the text"))?;
    }
    count(state, text.0.len())?;
    Ok(Value::from(text.0))
}

/// The operator `*`, which repeats a text or a list, or multiplies numbers.
fn multiply(state: &mut State, left: Value, right: Value) -> Result<Value, Error> {
    let repeated = [(&left, &right), (&right, &left)]
        .into_iter()
        .find(|(it, _)| matches!(it.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Iterable));
    let wrong = || Error::new(ErrorKind::InvalidOperation, "tried to use * with values that it is not for");
    if let Some((value, times)) = repeated {
        // As in Python, a text or list that is repeated less than once is empty.
        let times = usize::try_from(times.as_i64().ok_or_else(wrong)?.max(0)).map_err(|_| wrong())?;
        let item = if value.as_str().is_some() { 1 } else { ITEM_BYTES };
        let len = value.as_str().map(str::len).or(value.len()).ok_or_else(wrong)?;
        count(state, len.saturating_mul(item).saturating_mul(times))?;
        return match value.as_str() {
            Some(text) => Ok(text.repeat(times).into()),
            None => {
                let items: Vec<Value> = value.try_iter()?.checked().collect::<Result<_, _>>()?;
                Ok(std::iter::repeat_n(items, times).flatten().collect())
            }
        };
    }
    match left.is_integer() && right.is_integer() {
        true => {
            let product = i128::try_from(left)?.checked_mul(i128::try_from(right)?);
            product.map(Value::from).ok_or_else(|| too_long("a number"))
        }
        false => Ok(Value::from(f64::try_from(left)? * f64::try_from(right)?)),
    }
}

/// The result of `+`, which is counted if it is a text or a list.
fn made(state: &mut State, value: Value) -> Result<Value, Error> {
    let bytes = match (value.as_str(), value.kind()) {
        (Some(text), _) => text.len(),
        (None, ValueKind::Seq | ValueKind::Iterable) => value.len().unwrap_or(0).saturating_mul(ITEM_BYTES),
        _ => 0,
    };
    count(state, bytes)?;
    Ok(value)
}

/// Writes a value to the output, or to the text of a block that is assigned.
fn write_value(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let text = match value.as_str() {
        Some(text) => text,
        None => &text_of(value)?,
    };
    count(state, text.len())?;
    out.write_str(text).map_err(Error::from)
}
