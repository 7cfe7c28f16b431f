//! Recorded answers of transformers for encoders: the hidden states of every token, and the predictions of
//! each mask.

use super::{embed, fill};
use crate::common::{Outcome, fixture};
use mainstem::request::{Pooling, Request, Token};
use serde::Deserialize;

/// Tolerance of log-probabilities.
const TOLERANCE: f32 = 1e-3;
/// Tolerance of hidden states, large enough for the difference between two kinds of GELU.
const HIDDEN_TOLERANCE: f32 = 1e-4;
/// Size of the fixtures' hidden states.
const WIDTH: usize = 32;

/// The recorded answers for an encoder.
#[derive(Deserialize)]
struct Recorded {
    inputs: Vec<Input>,
}

#[derive(Deserialize)]
pub struct Input {
    ids: Vec<u32>,
    hidden: Vec<Vec<f32>>,
    #[serde(default)]
    masks: Vec<Mask>,
    /// The L2-normalized mean, for embedding models.
    pooled: Option<Vec<f32>>,
}

#[derive(Deserialize)]
struct Mask {
    at: u32,
    top5_ids: Vec<u32>,
    top5_logprobs: Vec<f32>,
}

impl Input {
    pub fn all(name: &str) -> Vec<Input> {
        let file = fixture(&format!("families/{name}/answers.json"));
        let text = std::fs::read(file).expect("the answers are there");
        serde_json::from_slice::<Recorded>(&text).expect("they are in their form").inputs
    }

    /// Returns one request per pooling mode, and one for all masks.
    pub fn requests(&self) -> Vec<Request> {
        let poolings = [Pooling::Mean, Pooling::Cls, Pooling::Last];
        let mut requests: Vec<Request> =
            poolings.into_iter().map(|pooling| embed(&self.ids, pooling)).collect();
        let places: Vec<u32> = self.masks.iter().map(|mask| mask.at).collect();
        if !places.is_empty() {
            requests.push(fill(&self.ids, &places, 5));
        }
        requests
    }

    /// Checks the outcomes of these requests.
    pub fn check(&self, outcomes: &[Outcome]) {
        let count = self.hidden.len() as f32;
        let mean = (0..WIDTH).map(|x| self.hidden.iter().map(|row| row[x]).sum::<f32>() / count).collect();
        let (first, last) = (self.hidden[0].clone(), self.hidden[self.hidden.len() - 1].clone());
        for (outcome, expected) in outcomes.iter().zip([mean, first, last]) {
            let vector: &Vec<f32> = outcome.embedding.as_ref().expect("a vector was asked for");
            assert_eq!((vector.len(), outcome.filled.len()), (WIDTH, 0));
            for (x, (ours, theirs)) in vector.iter().zip(expected).enumerate() {
                let what = format!("text of {}, dimension {x}: {ours}, recorded {theirs}", self.ids.len());
                assert!((ours - theirs).abs() <= HIDDEN_TOLERANCE, "{what}");
            }
        }
        if let Some(pooled) = &self.pooled {
            let mean = outcomes[0].embedding.as_ref().expect("a vector was asked for");
            let length = mean.iter().map(|x| x * x).sum::<f32>().sqrt();
            assert!(
                mean.iter().zip(pooled).all(|(x, pooled)| (x / length - pooled).abs() <= HIDDEN_TOLERANCE)
            );
        }
        let filled = outcomes.get(3).map_or(&[][..], |outcome| &outcome.filled);
        assert_eq!(filled.len(), self.masks.len());
        for (token, mask) in filled.iter().zip(&self.masks) {
            mask.check(token);
        }
    }
}

impl Mask {
    fn check(&self, token: &Token) {
        assert_eq!((token.id, token.top.len()), (self.top5_ids[0], 5));
        assert_eq!(token.logprob, Some(token.top[0].1));
        for ((_, ours), theirs) in token.top.iter().zip(&self.top5_logprobs) {
            close(*ours, *theirs, &format!("place {}", self.at));
        }
    }
}

fn close(ours: f32, theirs: f32, what: &str) {
    assert!((ours - theirs).abs() <= TOLERANCE, "{what}: {ours}, recorded {theirs}");
}
