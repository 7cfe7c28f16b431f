//! Tests of beam search against Hugging Face transformers (tests/oracle/make_beams.py): the same sequences,
//! and scores within 1e-4. The whole sequence of each beam is computed again in each step.

use crate::common::{Copied, complete_all, config, fixture, greedy};
use crate::families::family;
use mainstem::actors::Engine;
use mainstem::cli::start;
use mainstem::decoding::{BeamParams, BeamSearch, BeamStep, EarlyStopping, Hypothesis, NewBeam};
use mainstem::request::Request;
use serde::Deserialize;
use std::collections::HashMap;
use std::path::PathBuf;

pub const TOLERANCE: f32 = 1e-4;
/// Reported tokens of a row: enough for eight beams and two end tokens.
const CANDIDATES: u8 = 10;

/// A file of results.
#[derive(Deserialize)]
pub struct Recorded {
    model: String,
    pub searches: Vec<Search>,
    /// Folder of the model.
    #[serde(skip)]
    pub folder: PathBuf,
    #[serde(skip)]
    _copy: Option<Copied>,
}

/// An input, and the results with several settings.
#[derive(Deserialize)]
pub struct Search {
    #[serde(default)]
    pub source: Vec<u32>,
    pub prompt: Vec<u32>,
    pub forced: u32,
    pub end_tokens: Vec<u32>,
    pub max_tokens: u32,
    pub min_tokens: u32,
    pub runs: Vec<Run>,
}

#[derive(Deserialize)]
pub struct Run {
    pub width: usize,
    pub length_penalty: f64,
    pub early_stopping: serde_json::Value,
    pub sequences: Vec<Vec<u32>>,
    pub scores: Vec<f32>,
}

/// The most likely tokens after each sequence that was computed. Most searches of an input share them.
type Rows = HashMap<Vec<u32>, Vec<(u32, f32)>>;

impl Search {
    fn params(&self, run: &Run) -> BeamParams {
        BeamParams {
            width: run.width,
            max_tokens: self.max_tokens,
            min_tokens: self.min_tokens,
            length_penalty: run.length_penalty,
            early_stopping: EarlyStopping::parse(&run.early_stopping).expect("a known value"),
            end_tokens: self.end_tokens.clone(),
            forced_tokens: self.forced,
        }
    }

    async fn hypotheses(&self, run: &Run, engine: &Engine, rows: &mut Rows) -> Vec<Hypothesis> {
        let mut search = BeamSearch::new(self.params(run)).expect("the parameters are valid");
        assert!(search.candidates_per_beam() <= CANDIDATES as usize);
        let mut beams = vec![Vec::new()];
        loop {
            self.compute(&beams, engine, rows).await;
            let step = search.advance(beams.iter().map(|tokens| rows[tokens].as_slice()));
            let BeamStep::Continue(new) = step else { return search.finish() };
            let extended = |new: &NewBeam| [beams[new.parent as usize].as_slice(), &[new.token]].concat();
            beams = new.iter().map(extended).collect();
        }
    }

    /// Adds the rows of the beams that have none.
    async fn compute(&self, beams: &[Vec<u32>], engine: &Engine, rows: &mut Rows) {
        let missing: Vec<_> = beams.iter().filter(|tokens| !rows.contains_key(*tokens)).collect();
        let requests = missing.iter().map(|tokens| Request {
            logprobs: Some(CANDIDATES),
            encoder_input: self.source.as_slice().into(),
            ..greedy(&[self.prompt.as_slice(), tokens].concat(), 1)
        });
        for (tokens, mut outcome) in missing.iter().zip(complete_all(engine, requests).await) {
            let token = outcome.tokens.pop().expect("each request gives one token");
            rows.insert(tokens.to_vec(), token.top);
        }
    }
}

/// Reads a file of results, and copies its model if it needs a tokenizer. `test` must be unique.
pub fn recorded(file: &str, test: &str) -> Recorded {
    let text = std::fs::read(fixture("beams").join(file)).expect("the results are there");
    let mut recorded: Recorded = serde_json::from_slice(&text).expect("the results are in their form");
    let copy = recorded.model.strip_prefix("families/").map(|name| family(name, test));
    recorded.folder = copy.as_ref().map_or_else(|| fixture(&recorded.model), |copy| copy.0.clone());
    recorded._copy = copy;
    recorded
}

async fn check(file: &str) {
    let recorded = recorded(file, "beams");
    let settings =
        [("scheduler.slots", 8.into()), ("device.kind", "cpu".into()), ("device.activations", "f32".into())];
    let engine = start::start_engine(&config(&recorded.folder, &settings)).await.expect("the fixture loads");
    for search in &recorded.searches {
        let mut rows = Rows::new();
        for run in &search.runs {
            let found = search.hypotheses(run, &engine, &mut rows).await;
            let what = format!("{file}: {:?}", search.params(run));
            let tokens: Vec<_> = found.iter().map(|hypothesis| hypothesis.tokens.as_slice()).collect();
            assert_eq!(tokens, run.sequences, "{what}");
            for (found, recorded) in found.iter().zip(&run.scores) {
                assert!((found.score - recorded).abs() <= TOLERANCE, "{what}: {} {recorded}", found.score);
            }
        }
    }
    engine.stop();
}

#[actix::test]
async fn beams_of_decoders_are_those_of_transformers() {
    for file in ["mha.json", "gqa.json", "tied.json", "gpt2.json", "qwen3.json", "bloom.json"] {
        check(file).await;
    }
}

#[actix::test]
async fn beams_of_encoder_decoders_are_those_of_transformers() {
    for file in ["t5.json", "bart.json", "m2m100.json"] {
        check(file).await;
    }
}
