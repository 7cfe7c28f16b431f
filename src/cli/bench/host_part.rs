//! The host's part in the sampling of a test: a JSON schema, or a plan whose tokens the host draws.
//!
//! Invariant: it does not end a sequence before the test does.

use super::sample::TestKind;
use super::suite::BenchTest;
use crate::decoding::strategies::{AnyVocabulary, CheckedDefaults};
use crate::decoding::{Constraint, SamplingPlan};
use crate::model::ModelSource;
use crate::text::Tokenizer;
use crate::text::grammar_vocabulary::grammar_vocabulary;
use anyhow::{Context, Result};
use mainstem_grammar::{ConstraintStart, Form, Grammar, Limits, Spec};
use serde_json::json;
use std::sync::Arc;

/// Number of records in the output, more than any test generates.
const RECORDS: u32 = 1000;

/// The plan and the grammar of the tests that need them.
#[derive(Default)]
pub struct HostPart {
    plan: Option<Arc<SamplingPlan>>,
    constraint: Option<Arc<Constraint>>,
}

impl HostPart {
    /// Prepares what the tests need. Fails if the tokenizer does not support constrained output.
    pub fn new(tests: &[BenchTest], source: &ModelSource, tokenizer: &Arc<Tokenizer>) -> Result<HostPart> {
        let mut part = HostPart::default();
        for test in tests {
            match test.kind {
                TestKind::Constrained { .. } if part.constraint.is_none() => {
                    part.constraint = Some(constraint(source, tokenizer)?);
                }
                TestKind::HostDrawn { .. } if part.plan.is_none() => {
                    part.plan = Some(plan()?);
                }
                _ => {}
            }
        }
        Ok(part)
    }

    /// Returns the plan and the constraint of the sequence with this number.
    pub fn of_sequence(
        &self,
        kind: TestKind,
        number: usize,
    ) -> (Option<Arc<SamplingPlan>>, Option<Arc<Constraint>>) {
        match kind {
            TestKind::Constrained { .. } => (None, self.constraint.clone()),
            TestKind::HostDrawn { rows, .. } if number < rows => (self.plan.clone(), None),
            _ => (None, None),
        }
    }
}

/// Compiles the schema of a list of records.
fn constraint(source: &ModelSource, tokenizer: &Arc<Tokenizer>) -> Result<Arc<Constraint>> {
    let schema = json!({
        "type": "array",
        "minItems": RECORDS,
        "items": {
            "type": "object",
            "properties": {
                "name": { "type": "string", "maxLength": 24 },
                "age": { "type": "integer", "minimum": 0, "maximum": 120 },
                "tags": { "type": "array", "items": { "enum": ["new", "open", "closed"] }, "maxItems": 3 },
                "active": { "type": "boolean" },
            },
            "required": ["name", "age", "tags", "active"],
            "additionalProperties": false,
        },
    });
    let vocabulary = Arc::new(grammar_vocabulary(tokenizer, source.spec.vocab, &source.eos)?);
    let spec = Spec::new(Form::JsonSchema(schema.to_string().into()));
    let grammar = Grammar::compile(&spec, &vocabulary, &Limits::default());
    let grammar = Arc::new(grammar.context("cannot compile the schema of the test")?);
    Ok(Arc::new(Constraint { grammar, start: ConstraintStart::Immediately }))
}

/// Returns a plan that needs the history and a sum over the vocabulary.
fn plan() -> Result<Arc<SamplingPlan>> {
    let params = [("repetition_penalty", json!(1.1)), ("temperature", json!(0.8)), ("top_p", json!(0.95))];
    let pairs = params.iter().map(|(name, value)| (*name, value));
    Ok(Arc::new(SamplingPlan::parse(&CheckedDefaults::default(), pairs, &AnyVocabulary)?))
}
