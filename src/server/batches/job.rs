//! Running the requests of a batch job: as many at once as keep the engine busy, each until it is answered or
//! has failed too often.
//!
//! Invariant: an answer is recorded before its request counts as done. A request that may be the reason for
//! failures of the device is sent again only while no other one is in flight, of any job with the device.

use super::exclusion::Exclusion;
use super::input::{BatchRequest, Input};
use super::output::BatchAnswer;
use crate::server::access::RequestId;
use crate::server::error::ApiError;
use crate::server::turns::Share;
use crate::server::{LocalApi, ResponseBody};
use actix_web::ResponseError;
use actix_web::http::StatusCode;
use actix_web::web::Bytes;
use anyhow::{Context, Result};
use futures_util::StreamExt;
use futures_util::future::{LocalBoxFuture, OptionFuture};
use futures_util::stream::FuturesUnordered;
use std::cell::Cell;
use std::future::ready;
use std::sync::Arc;
use std::time::Duration;
use tokio::select;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{MissedTickBehavior, interval, sleep};

/// Time between two reports of progress, after which what is recorded is also written to the disk.
const PROGRESS_TIME: Duration = Duration::from_secs(5);

/// First and longest time after which a request that found the engine busy is sent again. That is rare if the
/// engine serves nobody else, since no more sequences are in flight than it takes.
const BUSY_PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_secs(1)];

/// Longest time after which a request is sent again whose client has used up its limit per minute.
const LIMITED_PAUSE: Duration = Duration::from_secs(10);

/// Number of failures after which a request is sent while no other one of a job is in flight: if it makes the
/// device fail, the others do not fail with it again and again.
pub const FAILURES_TOGETHER: u32 = 2;

/// Codes of server errors that end one request only, and would again.
const OWN_CODES: [&str; 2] = ["sampling_failed", "request_timeout"];

/// Codes of the errors of a server that shuts down.
const SHUTDOWN_CODES: [&str; 2] = ["shutting_down", "shut_down"];

const STREAM_REFUSED: &str = "'stream' is not supported in a batch; its answers are whole";

/// An API that takes the requests of a job.
pub trait BatchApi {
    /// Handles the request `id`: a body posted to `url`.
    fn post<'a>(
        &'a self,
        id: Arc<str>,
        url: &'a str,
        body: Bytes,
        memory: Option<Share>,
    ) -> LocalBoxFuture<'a, Result<ResponseBody, ApiError>>;

    /// Waits for the memory of a request of `bytes` bytes, where it is shared with others.
    fn reserve(&self, bytes: usize) -> LocalBoxFuture<'_, Result<Option<Share>, ApiError>> {
        let _ = bytes;
        Box::pin(ready(Ok(None)))
    }
}

impl BatchApi for LocalApi {
    fn post<'a>(
        &'a self,
        id: Arc<str>,
        url: &'a str,
        body: Bytes,
        memory: Option<Share>,
    ) -> LocalBoxFuture<'a, Result<ResponseBody, ApiError>> {
        Box::pin(self.post_with_id(id, url, body, memory))
    }
}

/// Limits of sending a request again that failed for a reason that is not its own.
#[derive(Clone, Copy, Debug)]
pub struct Retries {
    /// Maximum number of times that it is sent.
    pub attempts: u32,
    /// Time before it is sent for the second time; it doubles each time.
    pub pause: Duration,
    /// Whether the API serves others, too. Otherwise it is a failure if it is busy without requests of the
    /// job.
    pub is_shared: bool,
}

/// The record of a job's answers.
pub trait Answers {
    /// Returns whether the request at `index` has an answer.
    fn is_answered(&self, index: usize) -> bool;

    /// Records an answer. `refusal` is the message of its error, if it has one.
    fn add(&mut self, index: usize, answer: &BatchAnswer, refusal: Option<String>) -> Result<()>;

    /// Takes note of a request that failed too often for a `reason` that is not its own. `answer` is the last
    /// error.
    fn add_failure(&mut self, index: usize, answer: &BatchAnswer, reason: String) -> Result<()>;

    /// Reports the progress, every few seconds. Returns a function that blocks until what is recorded is on
    /// the disk.
    fn sync(&mut self) -> Result<Box<dyn FnOnce() -> Result<()> + Send>>;
}

/// The way in which a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobEnd {
    /// All requests were sent until they were answered or had failed too often.
    Finished,
    /// As many requests in succession as run at once have failed too often, so no more were begun.
    GaveUp,
    /// An interruption, which dropped what was in flight.
    Interrupted,
    /// The API shuts down. What was in flight is dropped.
    Halted,
}

/// A job that runs.
pub struct Job<'a, A, R> {
    pub api: &'a A,
    pub input: &'a Input,
    pub answers: &'a mut R,
    /// Maximum number of requests in flight.
    pub width: usize,
    /// Maximum number of their sequences, of which a request counts as half at most.
    pub sequences: usize,
    pub retries: Retries,
    /// Gives requests their turns together or alone. Jobs with the same device share it, so that none fails
    /// because of another one's request.
    pub exclusion: &'a Exclusion,
}

/// The requests that are not begun yet, in their order.
struct Waiting<'a> {
    input: &'a Input,
    order: std::vec::IntoIter<usize>,
    /// The next request, which may have too many sequences.
    next: Option<usize>,
}

impl Waiting<'_> {
    /// Returns the index of the next request and the number of its sequences, of which no more than `most`
    /// count. `None` if there is no request, or it has more than `free`.
    fn take(&mut self, free: usize, most: usize) -> Option<(usize, usize)> {
        self.next = self.next.or_else(|| self.order.next());
        let count = |index: usize| self.input.sequences(index).min(most);
        let index = self.next.take_if(|index| count(*index) <= free)?;
        Some((index, count(index)))
    }
}

/// The end of a request.
struct Done {
    index: usize,
    sequences: usize,
    outcome: Outcome,
}

/// The outcome of a request.
enum Outcome {
    /// An answer, and the error message of a refused request.
    Answered(BatchAnswer, Option<String>),
    /// The last error of a request that failed too often, and its message.
    Failed(BatchAnswer, String),
    /// The API shuts down.
    Halted,
    /// The request could not be read.
    Unreadable(anyhow::Error),
}

impl<A: BatchApi, R: Answers> Job<'_, A, R> {
    /// Runs the requests that are not answered yet, until `interrupted` completes or the API shuts down,
    /// which drops those in flight. If as many in succession as run at once cannot be answered, no more are
    /// begun. Fails if an answer cannot be recorded.
    pub async fn run(&mut self, interrupted: impl Future<Output = ()>) -> Result<JobEnd> {
        let (api, retries, exclusion, in_flight) = (self.api, self.retries, self.exclusion, &Cell::new(0));
        let order = self.input.order(|index| !self.answers.is_answered(index)).into_iter();
        let mut waiting = Waiting { input: self.input, order, next: None };
        let mut free = self.sequences;
        let mut running = FuturesUnordered::new();
        let mut syncing: Option<JoinHandle<Result<()>>> = None;
        let mut ticks = interval(PROGRESS_TIME);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.reset();
        let mut unanswered_in_row = 0;
        tokio::pin!(interrupted);
        loop {
            let gave_up = unanswered_in_row >= self.width;
            while running.len() < self.width && !gave_up {
                // Of a request with many texts, an encoder queues no more at once than half of all.
                let most = self.sequences.div_ceil(2);
                let Some((index, sequences)) = waiting.take(free, most) else { break };
                free -= sequences;
                let input = self.input;
                running.push(Call { api, input, retries, exclusion, in_flight, index, sequences }.run());
            }
            if running.is_empty() {
                return Ok(if gave_up { JobEnd::GaveUp } else { JobEnd::Finished });
            }
            select! {
                // Requests last, because there may always be one that is done.
                biased;
                () = &mut interrupted => return Ok(JobEnd::Interrupted),
                Some(synced) = OptionFuture::from(syncing.as_mut()), if syncing.is_some() => {
                    syncing = None;
                    synced.context("the thread that writes to the disk has panicked")??;
                }
                _ = ticks.tick() => {
                    let sync = self.answers.sync()?;
                    if syncing.is_none() {
                        syncing = Some(spawn_blocking(sync));
                    }
                }
                Some(Done { index, sequences, outcome }) = running.next() => {
                    free += sequences;
                    match outcome {
                        Outcome::Answered(answer, refusal) => {
                            unanswered_in_row = 0;
                            self.answers.add(index, &answer, refusal)?;
                        }
                        Outcome::Failed(answer, reason) => {
                            unanswered_in_row += 1;
                            self.answers.add_failure(index, &answer, reason)?;
                        }
                        Outcome::Halted => return Ok(JobEnd::Halted),
                        Outcome::Unreadable(error) => return Err(error),
                    }
                }
            }
        }
    }
}

/// A request in flight.
struct Call<'a, A> {
    api: &'a A,
    input: &'a Input,
    retries: Retries,
    exclusion: &'a Exclusion,
    /// Number of the job's requests that the API is handling.
    in_flight: &'a Cell<usize>,
    index: usize,
    sequences: usize,
}

impl<A: BatchApi> Call<'_, A> {
    /// Sends the request until it is answered or has failed too often.
    async fn run(self) -> Done {
        let (index, sequences) = (self.index, self.sequences);
        Done { index, sequences, outcome: self.outcome().await }
    }

    async fn outcome(self) -> Outcome {
        let (mut failures, mut busy_pause) = (0, BUSY_PAUSES[0]);
        loop {
            let id = RequestId::generate().0;
            let (custom_id, sent) = match self.send(&id, failures).await {
                Ok(sent) => sent,
                Err(error) => return Outcome::Unreadable(error),
            };
            let answer = |id: &str, status: StatusCode, body| {
                let (request_id, custom_id) = (id.to_owned(), custom_id.clone());
                BatchAnswer { request_id, custom_id, status: status.as_u16(), body }
            };
            let error = match sent {
                Ok(ResponseBody::Json(json)) => {
                    return Outcome::Answered(answer(&id, StatusCode::OK, json.into()), None);
                }
                Ok(ResponseBody::Events(_)) => stream_error(),
                Err(error) => error,
            };
            let status = error.status_code();
            if SHUTDOWN_CODES.contains(&error.code()) {
                return Outcome::Halted;
            }
            let answer = |id: &str| answer(id, status, error_body(&error));
            let is_busy = status == StatusCode::TOO_MANY_REQUESTS;
            if !is_busy && !status.is_server_error() || OWN_CODES.contains(&error.code()) {
                return Outcome::Answered(answer(&id), Some(error.to_string()));
            }
            // Others in flight are what it is busy with.
            if is_busy && (self.retries.is_shared || self.in_flight.get() > 0) {
                let known = Duration::from_secs(error.retry_after_s()).min(LIMITED_PAUSE);
                sleep(busy_pause.max(known)).await;
                busy_pause = (2 * busy_pause).min(BUSY_PAUSES[1]);
            } else {
                failures += 1;
                if failures >= self.retries.attempts {
                    return Outcome::Failed(answer(&id), format!("status {}: {error}", status.as_u16()));
                }
                sleep(self.retries.pause * 2u32.saturating_pow(failures - 1)).await;
            }
        }
    }

    /// Sends the request once, alone if it has failed too often together with others.
    /// Returns its id and the response. Fails if it cannot be read.
    async fn send(&self, id: &Arc<str>, failures: u32) -> Result<(String, Result<ResponseBody, ApiError>)> {
        let _turn = match failures < FAILURES_TOGETHER {
            true => self.exclusion.together().await,
            false => self.exclusion.alone().await,
        };
        // Before it is read, and not while it waits for others, which may need the memory.
        let memory = self.api.reserve(self.input.bytes(self.index)).await;
        let BatchRequest { custom_id, url, body } = self.input.read(self.index)?;
        let memory = match memory {
            _ if self.input.is_stream(self.index) => return Ok((custom_id, Err(stream_error()))),
            Err(error) => return Ok((custom_id, Err(error))),
            Ok(memory) => memory,
        };
        self.in_flight.update(|calls| calls + 1);
        let response = self.api.post(id.clone(), &url, body, memory).await;
        self.in_flight.update(|calls| calls - 1);
        Ok((custom_id, response))
    }
}

/// Returns the body of an error response.
fn error_body(error: &ApiError) -> Vec<u8> {
    serde_json::to_vec(&error.body()).expect("an error is JSON; this is a bug")
}

fn stream_error() -> ApiError {
    ApiError::unsupported("stream", STREAM_REFUSED)
}

#[cfg(test)]
mod tests {
    use super::super::input::InputRules;
    use super::super::input::tests::{RULES, line};
    use super::*;
    use crate::request::RequestError;
    use crate::testing::Scratch;
    use futures_util::future::join;
    use serde_json::{Value, json};
    use std::cell::RefCell;
    use std::collections::{BTreeMap, HashMap};
    use std::future::{pending, ready};

    const RETRIES: Retries = Retries { attempts: 3, pause: Duration::ZERO, is_shared: false };

    /// An API whose requests have the next outcome that their body lists, and then succeed.
    #[derive(Default)]
    struct ScriptedApi {
        /// Number of requests by body.
        seen: RefCell<HashMap<Bytes, usize>>,
        in_flight: Cell<usize>,
        most_in_flight: Cell<usize>,
        /// Number of requests so far that fail all in flight.
        crashes: Cell<usize>,
    }

    impl ScriptedApi {
        fn outcome(&self, body: &Bytes) -> Result<ResponseBody, ApiError> {
            let value: Value = serde_json::from_slice(body).unwrap();
            let mut seen = self.seen.borrow_mut();
            let times = seen.entry(body.clone()).or_default();
            *times += 1;
            match value["outcomes"][*times - 1].as_str() {
                Some("fault") => Err(RequestError::DeviceFailed("gone".into()).into()),
                Some("sampling") => Err(RequestError::SamplingFailed("no token".into()).into()),
                Some("busy") => {
                    Err(RequestError::Busy { coming: 1, waiting: 1, limit: 1, retry_after_s: 0 }.into())
                }
                Some("draining") => Err(RequestError::Draining.into()),
                Some("refused") => Err(ApiError::invalid("prompt", "'prompt' is missing")),
                Some("stream") => Ok(ResponseBody::Events(Box::pin(futures_util::stream::empty()))),
                _ => Ok(ResponseBody::Json(json!({"seen": *times}).to_string().into())),
            }
        }
    }

    impl BatchApi for ScriptedApi {
        fn post<'a>(
            &'a self,
            _: Arc<str>,
            url: &'a str,
            body: Bytes,
            _: Option<Share>,
        ) -> LocalBoxFuture<'a, Result<ResponseBody, ApiError>> {
            assert_eq!(url, "/v1/completions");
            Box::pin(async move {
                self.in_flight.update(|count| count + 1);
                self.most_in_flight.update(|most| most.max(self.in_flight.get()));
                let crashes = self.crashes.get();
                tokio::task::yield_now().await;
                self.crashes.update(|count| count + usize::from(body.starts_with(b"{\"crash\"")));
                tokio::task::yield_now().await;
                self.in_flight.update(|count| count - 1);
                match self.crashes.get() == crashes {
                    true => self.outcome(&body),
                    false => Err(RequestError::DeviceFailed("gone".into()).into()),
                }
            })
        }
    }

    /// The answers of a job in memory: status and body by the index of the request.
    #[derive(Default)]
    struct Memory {
        answers: BTreeMap<usize, (u16, Value)>,
        failures: Vec<(usize, String)>,
    }

    impl Answers for Memory {
        fn is_answered(&self, index: usize) -> bool {
            self.answers.contains_key(&index)
        }

        fn add(&mut self, index: usize, answer: &BatchAnswer, refusal: Option<String>) -> Result<()> {
            assert_eq!((answer.custom_id.parse(), refusal.is_some()), (Ok(index), answer.status != 200));
            let body = serde_json::from_slice(&answer.body).unwrap();
            assert!(self.answers.insert(index, (answer.status, body)).is_none());
            Ok(())
        }

        fn add_failure(&mut self, index: usize, answer: &BatchAnswer, reason: String) -> Result<()> {
            assert!(reason.starts_with(&format!("status {}: ", answer.status)));
            self.failures.push((index, reason));
            Ok(())
        }

        fn sync(&mut self) -> Result<Box<dyn FnOnce() -> Result<()> + Send>> {
            Ok(Box::new(|| Ok(())))
        }
    }

    /// Writes a file of requests with these bodies.
    fn input(bodies: &[Value]) -> Input {
        let folder = Scratch::new();
        let lines: Vec<_> = bodies.iter().enumerate().map(|(i, body)| line(&i.to_string(), body)).collect();
        let path = folder.path().join("in.jsonl");
        std::fs::write(&path, lines.join("\n")).unwrap();
        Input::open(&path, &InputRules { body_limit: 1000, ..RULES }).unwrap()
    }

    /// Runs a job.
    async fn run(
        input: &Input,
        answers: &mut Memory,
        api: &ScriptedApi,
        stop: impl Future<Output = ()>,
    ) -> JobEnd {
        let exclusion = &Exclusion::default();
        let mut job = Job { api, input, answers, width: 2, sequences: 9, retries: RETRIES, exclusion };
        job.run(stop).await.unwrap()
    }

    fn outcomes(list: &[&str]) -> Value {
        json!({ "outcomes": list })
    }

    #[actix_web::test]
    async fn what_is_not_the_requests_own_fault_is_tried_again() {
        let input = input(&[
            outcomes(&["fault", "fault"]),
            outcomes(&["refused"]),
            outcomes(&["busy", "busy"]),
            outcomes(&["stream"]),
            outcomes(&["busy", "fault", "fault", "fault"]),
            outcomes(&["sampling"]),
        ]);
        let (api, mut answers) = (ScriptedApi::default(), Memory::default());
        let end = run(&input, &mut answers, &api, pending()).await;
        let statuses: Vec<_> = answers.answers.iter().map(|(index, (status, _))| (*index, *status)).collect();
        assert_eq!(statuses, [(0, 200), (1, 400), (2, 200), (3, 400), (5, 500)]);
        assert_eq!(answers.answers[&0].1, json!({"seen": 3}));
        assert_eq!(answers.answers[&1].1["error"]["param"], "prompt");
        let stream = &answers.answers[&3].1["error"];
        assert_eq!((&stream["param"], &stream["code"]), (&json!("stream"), &json!("unsupported_parameter")));
        assert_eq!((end, api.most_in_flight.get()), (JobEnd::Finished, 2));
        let [(4, reason)] = &*answers.failures else { panic!("{:?}", answers.failures) };
        assert!(reason.starts_with("status 500: ") && reason.contains("gone"), "{reason}");
        // The next run has only the request that is left.
        let api = ScriptedApi::default();
        run(&input, &mut answers, &api, pending()).await;
        assert_eq!((answers.answers.len(), api.seen.borrow().len()), (5, 1));
    }

    /// Regression: such a request took its neighbours with it, in each run again.
    #[actix_web::test]
    async fn a_request_that_makes_the_device_fail_is_alone_in_the_end() {
        let input = input(&[json!({"crash": true}), json!({"n": 1}), json!({"n": 2})]);
        let (api, mut answers) = (ScriptedApi::default(), Memory::default());
        run(&input, &mut answers, &api, pending()).await;
        assert_eq!(answers.answers.keys().copied().collect::<Vec<_>>(), [1, 2]);
        assert!(matches!(&*answers.failures, [(0, _)]), "{:?}", answers.failures);
    }

    /// Regression: what ran beside another client's request that makes the device fail had failed as often.
    #[actix_web::test]
    async fn a_request_that_makes_the_device_fail_ends_no_request_of_another_job() {
        let (crash, others) = (input(&[json!({"crash": true})]), input(&[json!({"n": 1}), json!({"n": 2})]));
        let (api, exclusion) = (&ScriptedApi::default(), &Exclusion::default());
        let (mut failed, mut answered) = (Memory::default(), Memory::default());
        let retries = Retries { is_shared: true, ..RETRIES };
        let job = |input, answers| Job { api, input, answers, width: 2, sequences: 9, retries, exclusion };
        let (mut crashing, mut other) = (job(&crash, &mut failed), job(&others, &mut answered));
        let ends = join(crashing.run(pending()), other.run(pending())).await;
        assert_eq!((ends.0.unwrap(), ends.1.unwrap()), (JobEnd::Finished, JobEnd::Finished));
        assert_eq!((failed.failures.len(), api.crashes.get()), (1, 3));
        assert!(answered.failures.is_empty(), "{:?}", answered.failures);
        assert_eq!(answered.answers.len(), 2);
    }

    /// A request counts as half of them at most.
    #[actix_web::test]
    async fn no_more_sequences_are_in_flight_than_fit() {
        for (choices, together) in [([4, 4, 4], 2), ([5, 4, 5], 2), ([5, 5, 5], 1), ([50, 50, 50], 1)] {
            let input = input(&choices.map(|n| json!({ "n": n })));
            let (api, mut answers) = (ScriptedApi::default(), Memory::default());
            run(&input, &mut answers, &api, pending()).await;
            assert_eq!((answers.answers.len(), api.most_in_flight.get()), (3, together), "{choices:?}");
        }
    }

    #[actix_web::test]
    async fn a_job_whose_requests_all_fail_ends_early() {
        let faults = |i| json!({"outcomes": ["fault", "fault", "fault"], "i": i});
        let input = input(&(0..20).map(faults).collect::<Vec<_>>());
        let (api, mut answers) = (ScriptedApi::default(), Memory::default());
        assert_eq!(run(&input, &mut answers, &api, pending()).await, JobEnd::GaveUp);
        // Two at once, of which two fail before the third is over.
        assert!((2..=4).contains(&api.seen.borrow().len()), "{:?}", api.seen);
        assert!(answers.answers.is_empty() && answers.failures.len() >= 2);
    }

    #[actix_web::test]
    async fn an_interruption_drops_what_is_in_flight() {
        let input = input(&[outcomes(&[]), outcomes(&[])]);
        let (api, mut answers) = (ScriptedApi::default(), Memory::default());
        assert_eq!(run(&input, &mut answers, &api, ready(())).await, JobEnd::Interrupted);
        assert!(answers.answers.is_empty());
        assert_eq!(run(&input, &mut answers, &api, pending()).await, JobEnd::Finished);
        assert_eq!(answers.answers.len(), 2);
    }

    #[actix_web::test]
    async fn a_job_whose_api_shuts_down_begins_nothing_more() {
        let input = input(&[json!({"n": 1}), outcomes(&["draining"]), json!({"n": 2}), json!({"n": 3})]);
        let (api, mut answers) = (ScriptedApi::default(), Memory::default());
        assert_eq!(run(&input, &mut answers, &api, pending()).await, JobEnd::Halted);
        assert!(answers.failures.is_empty() && answers.answers.len() < 3, "{:?}", answers.answers);
        assert_eq!(run(&input, &mut answers, &api, pending()).await, JobEnd::Finished);
        assert_eq!(answers.answers.len(), 4);
    }
}
