//! Compilation of specifications.
//!
//! Invariant: compiling neither overflows the stack nor panics, whatever the specification is. llguidance
//! recurses over references, properties and rules, which [`Limits`] bounds, so it runs on a stack that is
//! large enough for that.

use crate::limits::Budget;
use crate::{Form, GrammarError, Limits, Matcher, Spec, Vocabulary, error, json_schema, lark};
use llguidance::JsonCompileOptions;
use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
use serde_json::Value;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Stack of a compilation in bytes, most of which is never touched.
const STACK: usize = 256 << 20;

/// Most parts of a schema that are tried alone, to find the one that was refused. Together they may take as
/// much work as one compilation.
const TRIED_PARTS: usize = 100;

/// Most parts that are tried alone to find one that is too complex, each with the work of a compilation.
const TRIED_COMPLEX_PARTS: usize = 4;

/// Memory of a grammar that the lexer's figures do not include, in bytes per byte of the specification and in
/// bytes; estimated.
const BYTES_PER_BYTE: usize = 10;
const BYTES: usize = 20_000;

/// A compiled grammar, which any number of sequences can follow.
pub struct Grammar {
    vocabulary: Arc<Vocabulary>,
    /// The state at the beginning of a text. Sequences get copies of their own, so that no sequence uses up
    /// the limits of another.
    start: Mutex<llguidance::Matcher>,
    bytes: usize,
    compile_time: Duration,
}

impl Grammar {
    /// Compiles a specification. Takes milliseconds typically; the limits bound its work, not its time. Keeps
    /// the calling thread waiting; [`crate::GrammarCache`] avoids compiling the same twice. Fails with
    /// [`GrammarError::Refused`].
    pub fn compile(
        spec: &Spec,
        vocabulary: &Arc<Vocabulary>,
        limits: &Limits,
    ) -> Result<Grammar, GrammarError> {
        let begin = Instant::now();
        if spec.bytes() > limits.text_bytes {
            let reason = format!("{} bytes: at most {}", spec.bytes(), limits.text_bytes);
            return Err(GrammarError::refused(name(&spec.form), reason));
        }
        let thread = std::thread::Builder::new().name("grammar".to_owned()).stack_size(STACK);
        let (start, bytes) = std::thread::scope(|scope| {
            let compiled = thread.spawn_scoped(scope, || compile(spec, vocabulary, limits));
            let compiled =
                compiled.map_err(|error| GrammarError::refused(name(&spec.form), error.to_string()))?;
            let panicked = |_| GrammarError::refused(name(&spec.form), "an internal error of the compiler");
            compiled.join().map_err(panicked)?
        })?;
        let bytes = bytes + spec.bytes() * BYTES_PER_BYTE + BYTES;
        let (vocabulary, start) = (vocabulary.clone(), Mutex::new(start));
        Ok(Grammar { vocabulary, start, bytes, compile_time: begin.elapsed() })
    }

    /// Starts a sequence at the beginning of the grammar's text.
    pub fn matcher(&self) -> Matcher {
        let start = self.start.lock().unwrap_or_else(PoisonError::into_inner).deep_clone();
        Matcher::new(start, self.vocabulary.clone())
    }

    /// Returns about how many bytes of memory the grammar takes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns how long compiling took.
    pub fn compile_time(&self) -> Duration {
        self.compile_time
    }
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Grammar({} bytes)", self.bytes)
    }
}

/// The form in messages, for errors without a place of their own.
fn name(form: &Form) -> &'static str {
    match form {
        Form::JsonObject | Form::JsonSchema(_) => "$",
        Form::Regex(_) => "regex",
        Form::Choice(_) => "choice",
        Form::Grammar(_) => "grammar",
        Form::Calls(_) => "calls",
    }
}

/// Compiles a specification, and the first mask with it. Returns the state at the beginning and the bytes of
/// its lexer.
fn compile(
    spec: &Spec,
    vocabulary: &Vocabulary,
    limits: &Limits,
) -> Result<(llguidance::Matcher, usize), GrammarError> {
    let (grammar, schemas) = source(spec, limits)?;
    let factory = vocabulary.factory();
    let parser = || {
        let init = llguidance::api::GrammarInit::Serialized(TopLevelGrammar::from_grammar(grammar));
        let caps = llguidance::toktrie::InferenceCapabilities::default();
        let mut parser = factory.create_parser_from_init_ext(
            init,
            llguidance::Logger::new(0, 0),
            caps,
            limits.parser(),
        )?;
        parser.start_without_prompt();
        // Refuses a grammar without any text, and sequences start with what was computed for it.
        parser.compute_mask()?;
        Ok(parser)
    };
    let parser = llguidance::panic_utils::catch_unwind(std::panic::AssertUnwindSafe(parser));
    let refused = |error| refusal(&format!("{error:#}"), &spec.form, &schemas, limits);
    let parser = parser.map_err(refused)?;
    let bytes = parser.parser.lexer_stats().num_bytes;
    Ok((llguidance::Matcher::new(Ok(parser)), bytes))
}

/// Schemas, each with its place.
type Schemas = Vec<(String, Value)>;

/// Returns the grammar of a specification as llguidance takes it, and its schemas.
fn source(spec: &Spec, limits: &Limits) -> Result<(GrammarWithLexer, Schemas), GrammarError> {
    let budget = &mut Budget::new(limits);
    match &spec.form {
        Form::JsonObject => {
            let schema = json_schema::any_object(spec.json_spaces);
            Ok((GrammarWithLexer::from_json_schema(schema), Schemas::new()))
        }
        Form::JsonSchema(text) => {
            let schema = json_schema::prepare(text, spec.json_spaces, budget)?;
            Ok((GrammarWithLexer::from_json_schema(schema.clone()), vec![("$".to_owned(), schema)]))
        }
        form => {
            let (text, schemas) = lark::form(form, spec.json_spaces, budget)?;
            Ok((GrammarWithLexer::from_lark(text), schemas))
        }
    }
}

/// Returns the error for the user of one of llguidance.
fn refusal(message: &str, form: &Form, schemas: &Schemas, limits: &Limits) -> GrammarError {
    let is_limit = error::is_limit(message);
    let reason = match message {
        _ if message.contains("oneOf constraints are not supported") => {
            "'oneOf' is supported only if its options exclude each other; 'anyOf' allows all of them"
                .to_owned()
        }
        _ if message.contains("NoExtensionBias") => "allows no text".to_owned(),
        _ if is_limit => "too complex".to_owned(),
        _ => error::summary(message),
    };
    let part = refused_part(schemas, is_limit, limits);
    let (part, reason) = part.unwrap_or_else(|| (name(form).to_owned(), reason));
    GrammarError::Refused { part, reason }
}

/// Compiles the parts of refused schemas alone. Returns the path of the first that is refused, and why.
/// `is_limit` says that the whole exceeded a limit.
fn refused_part(schemas: &Schemas, is_limit: bool, limits: &Limits) -> Option<(String, String)> {
    let leaves = schemas.iter().flat_map(|(place, schema)| json_schema::leaves(place, schema));
    let (most, limits) = trials(is_limit, limits);
    leaves.take(most).find_map(|(path, part)| {
        let error = compile_part(part, limits.clone())?;
        // With its share of the work, a part may exceed limits within which the whole is.
        (is_limit || !error::is_limit(&error)).then(|| (path, error::summary(&error)))
    })
}

/// Returns how many parts of a refused schema are tried, and the limits of each.
fn trials(is_limit: bool, limits: &Limits) -> (usize, ParserLimits) {
    let whole = limits.parser();
    if is_limit {
        return (TRIED_COMPLEX_PARTS, whole);
    }
    let share = whole.initial_lexer_fuel / TRIED_PARTS as u64;
    (TRIED_PARTS, ParserLimits { initial_lexer_fuel: share, ..whole })
}

/// Compiles a schema without a vocabulary. Returns the error.
fn compile_part(schema: Value, limits: ParserLimits) -> Option<String> {
    let compiled = llguidance::panic_utils::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let builder = llguidance::GrammarBuilder::new(None, limits);
        JsonCompileOptions::default().json_to_llg(builder, schema).map(|_| ())
    }));
    compiled.err().map(|error| format!("{error:#}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Naming the part of a refused schema takes no more work than a few compilations.
    #[test]
    fn the_work_of_a_refusal_is_bounded() {
        let limits = Limits::default();
        for is_limit in [false, true] {
            let (most, each) = trials(is_limit, &limits);
            assert!(most as u64 * each.initial_lexer_fuel <= 4 * limits.compile_nodes, "{is_limit}");
        }
        let parts = |count: usize| {
            let refused = serde_json::json!({ "type": "string", "pattern": "(" });
            let pattern = |at: usize| match at == count {
                true => refused.clone(),
                false => serde_json::json!({ "type": "string", "pattern": format!("^[a-z]{{{at},}}$") }),
            };
            vec![("$".to_owned(), (0..=count).map(pattern).collect::<Value>())]
        };
        let (path, _) = refused_part(&parts(50), false, &limits).expect("a part is refused");
        assert_eq!(path, "$[50].pattern");
        assert_eq!(refused_part(&parts(TRIED_PARTS), false, &limits), None);
    }
}
