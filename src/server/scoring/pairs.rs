//! Scores of pairs of texts.
//!
//! Invariant: a score depends on its pair only.

use super::texts::{TokenLimit, base_name, join_names};
use super::vector_of;
use crate::actors::EmbeddingDefaults;
use crate::decoding::{Classifier, dot};
use crate::formats::Similarity;
use crate::request::Task;
use crate::server::ServeParts;
use crate::server::embeddings::{check_prompt, default_pooling, finished_vector};
use crate::server::encoders::{EncoderInput, EncoderOutput, check_finite};
use crate::server::error::ApiError;
use crate::server::respond::Turn;
use std::sync::Arc;

/// A text with the name of the parameter that has it.
pub struct NamedText<'t> {
    pub name: String,
    pub text: &'t str,
}

/// Pairs of texts whose scores are wanted.
pub struct PairTexts<'t> {
    /// The texts on the left: queries.
    pub first: Vec<NamedText<'t>>,
    /// The texts on the right: documents.
    pub second: Vec<NamedText<'t>>,
    /// The pairs, each of an index on the left and one on the right.
    pub pairs: Vec<[usize; 2]>,
    /// Names of the prompts of queries and of documents, for models that embed them.
    pub roles: [&'static [&'static str]; 2],
    pub limit: TokenLimit,
    /// Whether scores are logits.
    pub raw: bool,
}

/// The computation of the scores of pairs from what the engine returns.
pub enum PairScoring {
    /// A classifier reads a pair at once: an input for each.
    Classifier { raw: bool },
    /// Texts are embedded: first those on the left, then those on the right, which begin at `second`.
    Similarity { pairs: Vec<[usize; 2]>, second: usize },
}

impl PairTexts<'_> {
    /// Returns the inputs of the engine, and how to score what it returns for them.
    pub fn inputs(
        self,
        parts: &ServeParts,
        turn: &Turn,
    ) -> Result<(PairScoring, Vec<EncoderInput>), ApiError> {
        match (&parts.model.classifier, parts.model.prompting.embedding()) {
            (Some(classifier), _) => {
                self.hold_pairs(parts, turn)?;
                let inputs = self.pairs.iter().map(|pair| self.pair_input(parts, classifier, *pair));
                let inputs = inputs.collect::<Result<_, _>>()?;
                Ok((PairScoring::Classifier { raw: self.raw }, inputs))
            }
            (None, Some(prompting)) => {
                let task =
                    Task::Embed(default_pooling(prompting, ("model", "'model.pooling' must name one"))?);
                let [of_first, of_second] = self.roles.map(|names| prompting.prompts.of_role(names));
                [of_first, of_second]
                    .into_iter()
                    .try_for_each(|prompt| check_prompt(prompting, ("model", prompt)))?;
                let prompts = self.first.len() * of_first.len() + self.second.len() * of_second.len();
                let own = self.first.iter().chain(&self.second).map(|text| text.text.len());
                turn.hold_text(prompts + own.sum::<usize>(), &self.param())?;
                let first = self.first.iter().map(|NamedText { name, text }| {
                    self.limit.tokenize(parts, (&[of_first, text].concat(), None), name)
                });
                let second = self.second.iter().map(|NamedText { name, text }| match self.limit.document {
                    usize::MAX => self.limit.tokenize(parts, (&[of_second, text].concat(), None), name),
                    _ => self.limit.tokenize_within(parts, (of_second, text, ""), name),
                });
                let inputs = first.chain(second).map(|typed| {
                    Ok(EncoderInput { ids: typed?.ids.into(), second_text: None, task: task.clone() })
                });
                let inputs = inputs.collect::<Result<_, ApiError>>()?;
                let second = self.first.len();
                Ok((PairScoring::Similarity { pairs: self.pairs, second }, inputs))
            }
            (None, None) => Err(ApiError::internal("the model cannot score pairs; this is a bug")),
        }
    }

    /// Holds the memory of the texts of all pairs, of which one may be in many.
    fn hold_pairs(&self, parts: &ServeParts, turn: &Turn) -> Result<(), ApiError> {
        let around = |query: &str| match &parts.model.pair_template {
            Some(template) => template.around(query).map(|part| part.len()).iter().sum(),
            None => self.limit.cut(query).len(),
        };
        let first: Vec<usize> = self.first.iter().map(|text| around(text.text)).collect();
        let second = |at: usize| self.limit.cut_document(self.second[at].text).len();
        let bytes = self.pairs.iter().map(|[a, b]| first[*a].saturating_add(second(*b)));
        turn.hold_text(bytes.fold(0, usize::saturating_add), &self.param())
    }

    /// Returns the name of the parameter with the texts on the right.
    fn param(&self) -> String {
        let name = self.second.first().map_or("documents", |text| &text.name);
        base_name(name).to_owned()
    }

    /// Returns the input of a classifier that reads a pair.
    fn pair_input(
        &self,
        parts: &ServeParts,
        classifier: &Classifier,
        [first, second]: [usize; 2],
    ) -> Result<EncoderInput, ApiError> {
        let (first, second) = (&self.first[first], &self.second[second]);
        let name = join_names(&first.name, &second.name);
        let typed = match &parts.model.pair_template {
            Some(template) => {
                let [before, after] = template.around(first.text);
                self.limit.tokenize_within(parts, (&before, second.text, &after), &name)?
            }
            None => self.limit.tokenize(parts, (first.text, Some(second.text)), &name)?,
        };
        let pooling = classifier
            .pooling
            .ok_or_else(|| ApiError::internal("a classifier of tokens scores no pairs; this is a bug"))?;
        Ok(EncoderInput {
            ids: typed.ids.into(),
            second_text: typed.second.map(|at| at as u32),
            task: Task::Embed(pooling),
        })
    }
}

impl PairScoring {
    /// Returns the score of each pair.
    pub fn scores(&self, parts: &ServeParts, found: &[EncoderOutput]) -> Result<Vec<f32>, ApiError> {
        match (self, &parts.model.classifier, parts.model.prompting.embedding()) {
            (PairScoring::Classifier { raw }, Some(classifier), _) => {
                let one = |found| {
                    let score = score_of(classifier, *raw, vector_of(found)?);
                    check_finite(&[score]).map(|()| score)
                };
                found.iter().map(one).collect()
            }
            (PairScoring::Similarity { pairs, second }, _, Some(prompting)) => {
                let vectors =
                    found.iter().map(|found| Ok(finished_vector(prompting, vector_of(found)?.to_vec())));
                let vectors: Vec<Vec<f32>> = vectors.collect::<Result<_, ApiError>>()?;
                let of_pair = |[a, b]: &[usize; 2]| similarity(prompting, &vectors[*a], &vectors[second + b]);
                let scores: Vec<f32> = pairs.iter().map(of_pair).collect();
                check_finite(&scores)?;
                Ok(scores)
            }
            _ => Err(ApiError::internal("the model cannot score pairs; this is a bug")),
        }
    }
}

fn score_of(classifier: &Arc<Classifier>, raw: bool, vector: &[f32]) -> f32 {
    let mut scores = classifier.logits(vector);
    if !raw {
        classifier.function.apply(&mut scores);
    }
    scores[0]
}

/// Returns the similarity of two embeddings.
fn similarity(prompting: &EmbeddingDefaults, a: &[f32], b: &[f32]) -> f32 {
    let differences = || a.iter().zip(b).map(|(a, b)| a - b);
    match prompting.similarity {
        Similarity::Cosine => {
            let length = (f64::from(dot(a, a)) * f64::from(dot(b, b))).sqrt();
            if length > 0.0 { (f64::from(dot(a, b)) / length) as f32 } else { 0.0 }
        }
        Similarity::Dot => dot(a, b),
        Similarity::Euclidean => -differences().map(|x| x * x).sum::<f32>().sqrt(),
        Similarity::Manhattan => -differences().map(f32::abs).sum::<f32>(),
    }
}
