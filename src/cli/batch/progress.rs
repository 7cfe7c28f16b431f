//! Progress and summary of a batch job: requests, tokens, speed and the time that is left.
//!
//! Invariant: speeds are those of this run; answers of earlier runs count as done only.

use crate::cli::start::EnginePredictor;
use crate::planner::placement::{Prediction, Workload};
use crate::server::batches::input::RequestSize;
use crate::server::batches::output::{AnswerCounts, BatchAnswer};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Counts of a job, as it runs.
pub struct Progress {
    requests: usize,
    /// Answers of earlier runs.
    before: AnswerCounts,
    /// Answers of this run.
    now: AnswerCounts,
    usage: Usage,
    /// The first request that was refused, and the first one without an answer, with the reason.
    first_refusal: Option<String>,
    first_unanswered: Option<String>,
    /// Tokens that this run is expected to compute, and those of them whose requests are answered.
    expected: u64,
    expected_done: u64,
    began: Instant,
    /// Predicts the speed, if the engine has a policy.
    predictor: Option<EnginePredictor>,
}

/// Numbers of tokens, as in the API's responses.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
struct Usage {
    #[serde(default)]
    prompt_tokens: u64,
    #[serde(default)]
    completion_tokens: u64,
}

/// A response, as far as it is read.
#[derive(Deserialize)]
struct CountedResponse {
    usage: Option<Usage>,
}

/// The summary of a job, as JSON.
#[derive(Serialize)]
pub struct Summary {
    /// Requests of the input.
    requests: usize,
    /// Answered requests with status 200, those of earlier runs included.
    ok: usize,
    /// Answered requests with another status, those of earlier runs included.
    failed: usize,
    /// Requests without an answer.
    pub unanswered: usize,
    /// Answered requests of earlier runs.
    answered_before: usize,
    interrupted: bool,
    prompt_tokens: u64,
    generated_tokens: u64,
    seconds: f64,
    prompt_tokens_per_second: f64,
    generated_tokens_per_second: f64,
    /// The speed that was to be expected, if the engine has a policy.
    predicted: Option<PredictedSpeed>,
    #[serde(skip)]
    first_refusal: Option<String>,
}

/// The speed that is predicted for the answered requests, as if each were as long as their mean.
#[derive(Clone, Copy, Debug, Serialize)]
struct PredictedSpeed {
    seconds: f64,
    prompt_tokens_per_second: f64,
    generated_tokens_per_second: f64,
    /// Speed in steps of prompts only, and in steps that decode as many sequences as there are slots.
    prefill_tokens_per_second: f64,
    decode_tokens_per_second: f64,
    /// Measured by predicted seconds.
    measured_by_predicted: f64,
}

impl Progress {
    /// Creates the counts of a job whose requests without an answer have the sizes `open`.
    pub fn new(requests: usize, before: AnswerCounts, open: impl Iterator<Item = RequestSize>) -> Progress {
        Progress {
            requests,
            before,
            now: AnswerCounts::default(),
            usage: Usage::default(),
            first_refusal: None,
            first_unanswered: None,
            expected: open.map(RequestSize::tokens).sum(),
            expected_done: 0,
            began: Instant::now(),
            predictor: None,
        }
    }

    /// Starts the clock, once the model is loaded.
    pub fn start(&mut self, predictor: Option<EnginePredictor>) {
        self.predictor = predictor;
        self.began = Instant::now();
    }

    /// Counts an answer. `refusal` is the message of its error, if it has one.
    pub fn answered(&mut self, size: RequestSize, answer: &BatchAnswer, refusal: Option<String>) {
        self.now.add(answer.status);
        self.expected_done += size.tokens();
        if let Ok(CountedResponse { usage: Some(usage) }) = serde_json::from_slice(&answer.body) {
            self.usage.prompt_tokens += usage.prompt_tokens;
            self.usage.completion_tokens += usage.completion_tokens;
        }
        if let Some(message) = refusal.filter(|_| self.first_refusal.is_none()) {
            self.first_refusal = Some(format!("{:?}, status {}: {message}", answer.custom_id, answer.status));
        }
    }

    /// Notes a request that could not be answered.
    pub fn unanswered(&mut self, custom_id: &str, reason: String) {
        self.first_unanswered.get_or_insert_with(|| format!("{custom_id:?}, {reason}"));
    }

    /// Returns the first request that could not be answered, with the reason.
    pub fn first_unanswered(&self) -> Option<&str> {
        self.first_unanswered.as_deref()
    }

    /// Returns the number of answered requests, those of earlier runs included.
    pub fn done(&self) -> usize {
        self.before.all() + self.now.all()
    }

    /// Returns a line with the progress so far.
    pub fn line(&self) -> String {
        self.line_after(self.began.elapsed())
    }

    fn line_after(&self, elapsed: Duration) -> String {
        let (done, all, failed) = (self.done(), self.requests, self.before.failed + self.now.failed);
        let [prompt, generated] = self.rates(elapsed);
        let mut line = format!("{done} of {all} requests answered");
        if failed > 0 {
            line += &format!(", {failed} of them failed");
        }
        line += &format!("; {generated:.1} tokens/s generated, {prompt:.1} tokens/s of prompts");
        if self.expected_done > 0 {
            let left = self.expected.saturating_sub(self.expected_done) as f64 / self.expected_done as f64;
            line += &format!("; about {} left", duration(elapsed.as_secs_f64() * left));
        }
        line
    }

    /// Returns the numbers of prompt tokens and of generated tokens per second.
    fn rates(&self, elapsed: Duration) -> [f64; 2] {
        let seconds = elapsed.as_secs_f64().max(1e-9);
        [self.usage.prompt_tokens, self.usage.completion_tokens].map(|tokens| tokens as f64 / seconds)
    }

    /// Predicts the speed of the requests that this run answered; `None` without a policy or answers.
    fn predicted(&self, seconds: f64) -> Option<PredictedSpeed> {
        let requests = self.now.ok;
        let predictor = self.predictor.as_ref().filter(|_| requests > 0)?;
        let mean = |tokens: u64| (tokens as f64 / requests as f64).round() as usize;
        let (prompt, output) = (mean(self.usage.prompt_tokens), mean(self.usage.completion_tokens));
        let workload = Workload { requests, prompt: prompt.max(1), output };
        let Prediction { job_seconds, prefill_rate, decode_rate, .. } = predictor.predict(&workload);
        if job_seconds <= 0.0 {
            return None;
        }
        let [prompt, generated] = self.rates(Duration::try_from_secs_f64(job_seconds).ok()?);
        Some(PredictedSpeed {
            seconds: job_seconds,
            prompt_tokens_per_second: prompt,
            generated_tokens_per_second: generated,
            prefill_tokens_per_second: prefill_rate,
            decode_tokens_per_second: decode_rate,
            measured_by_predicted: seconds / job_seconds,
        })
    }

    /// Returns the summary of the job.
    pub fn summary(self, interrupted: bool) -> Summary {
        let elapsed = self.began.elapsed();
        let [prompt_tokens_per_second, generated_tokens_per_second] = self.rates(elapsed);
        Summary {
            requests: self.requests,
            ok: self.before.ok + self.now.ok,
            failed: self.before.failed + self.now.failed,
            unanswered: self.requests - self.done(),
            answered_before: self.before.all(),
            interrupted,
            prompt_tokens: self.usage.prompt_tokens,
            generated_tokens: self.usage.completion_tokens,
            seconds: elapsed.as_secs_f64(),
            prompt_tokens_per_second,
            generated_tokens_per_second,
            predicted: self.predicted(elapsed.as_secs_f64()),
            first_refusal: self.first_refusal,
        }
    }
}

impl Summary {
    /// Returns it as text, with a line feed.
    pub fn text(&self) -> String {
        let Summary { requests, ok, failed, unanswered, answered_before, .. } = self;
        let mut text = format!("{requests} requests: {ok} ok, {failed} failed, {unanswered} not answered");
        if *answered_before > 0 {
            text += &format!(" ({answered_before} answered by earlier runs)");
        }
        if let Some(refusal) = &self.first_refusal {
            text += &format!("\nfirst failed request: {}", crate::cli::escape::one_line(refusal));
        }
        text += &format!(
            "\n{} prompt tokens and {} generated tokens in {:.1} s: {:.1} and {:.1} tokens/s\n",
            self.prompt_tokens,
            self.generated_tokens,
            self.seconds,
            self.prompt_tokens_per_second,
            self.generated_tokens_per_second
        );
        if let Some(predicted) = &self.predicted {
            text += &format!(
                "predicted {:.1} s: {:.1} and {:.1} tokens/s; the job took {:.2} times as long\n\
                 predicted in steps of prompts {:.1} tokens/s, in steps of decoding {:.1} tokens/s\n",
                predicted.seconds,
                predicted.prompt_tokens_per_second,
                predicted.generated_tokens_per_second,
                predicted.measured_by_predicted,
                predicted.prefill_tokens_per_second,
                predicted.decode_tokens_per_second
            );
        }
        text
    }
}

/// Formats a duration: 12 s, 3 min 5 s, 2 h 7 min.
fn duration(seconds: f64) -> String {
    match seconds.ceil() as u64 {
        seconds @ ..60 => format!("{seconds} s"),
        seconds @ ..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        seconds => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_follows_from_the_tokens_that_are_expected() {
        let size = |answer| RequestSize { text: 400, answer: Some(answer) };
        let sizes = [size(100), size(300), size(100), size(100)];
        let before = AnswerCounts { ok: 1, failed: 1 };
        let mut progress = Progress::new(6, before, sizes.into_iter());
        assert_eq!(
            progress.line_after(Duration::from_secs(5)),
            "2 of 6 requests answered, 1 of them failed; 0.0 tokens/s generated, 0.0 tokens/s of prompts"
        );
        let body = br#"{"usage":{"prompt_tokens":100,"completion_tokens":300}}"#;
        let answer =
            BatchAnswer { request_id: "r".into(), custom_id: "a".into(), status: 200, body: body.to_vec() };
        progress.answered(sizes[1], &answer, None);
        // 400 of 1000 tokens took 100 s.
        let line = progress.line_after(Duration::from_secs(100));
        assert!(
            line.contains("; 3.0 tokens/s generated, 1.0 tokens/s of prompts; about 2 min 30 s left"),
            "{line}"
        );
        let failed = BatchAnswer { status: 400, body: b"{}".to_vec(), ..answer };
        progress.answered(sizes[0], &failed, Some("no".to_owned()));
        progress.unanswered("b", "status 500: the device failed".to_owned());
        assert_eq!(progress.first_unanswered(), Some("\"b\", status 500: the device failed"));
        let summary = progress.summary(false);
        let counts = (summary.ok, summary.failed, summary.unanswered, summary.answered_before);
        assert_eq!(counts, (2, 2, 2, 2));
        assert!(summary.text().contains("\nfirst failed request: \"a\", status 400: no\n"));
    }

    #[test]
    fn durations_have_two_units_at_most() {
        let cases = [(0.0, "0 s"), (59.2, "1 min 0 s"), (185.0, "3 min 5 s"), (7680.0, "2 h 8 min")];
        cases.into_iter().for_each(|(seconds, text)| assert_eq!(duration(seconds), text));
    }
}
