//! Tests of `mainstem batch`: its answers are those of the API, and each request is answered once, whatever
//! ends the program.

use crate::common::{self, Copied, config, fixture, mainstem, signal};
use crate::families::family;
use actix_web::ResponseError;
use mainstem::cli::start;
use mainstem::server::{LocalApi, ResponseBody, ServeParts};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// The files of a job, removed on drop.
struct JobFiles(PathBuf);

impl JobFiles {
    /// Creates a folder with an input of these requests, each a path and a body. `name` must be unique among
    /// the tests.
    fn new(name: &str, requests: &[(&str, Value)]) -> JobFiles {
        let folder = std::env::temp_dir().join(format!("mainstem-{}-batch-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a temporary folder");
        let line = |(index, (url, body)): (usize, &(&str, Value))| {
            json!({"custom_id": format!("r{index}"), "method": "POST", "url": url, "body": body}).to_string()
        };
        let lines: Vec<_> = requests.iter().enumerate().map(line).collect();
        std::fs::write(folder.join("in.jsonl"), lines.join("\n")).expect("it can be written");
        JobFiles(folder)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Returns the command of the job.
    fn command(&self, model: &Path, flags: &str) -> Command {
        let mut command = mainstem();
        command.arg("batch").arg(model).arg(self.file("in.jsonl")).arg(self.file("out.jsonl"));
        command.args(flags.split_whitespace()).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs the job to its end.
    fn run(&self, model: &Path, flags: &str) -> Output {
        self.command(model, flags).output().expect("the program starts")
    }

    fn start(&self, model: &Path, flags: &str) -> Child {
        self.command(model, flags).spawn().expect("the program starts")
    }

    fn output(&self) -> String {
        std::fs::read_to_string(self.file("out.jsonl")).unwrap_or_default()
    }

    /// Waits until the output has as many answers, or the job has ended.
    fn wait_for_answers(&self, job: &mut Child, answers: usize) {
        let began = Instant::now();
        while self.output().lines().count() < answers && job.try_wait().expect("it can be asked").is_none() {
            assert!(began.elapsed() < common::PATIENCE, "there are no {answers} answers");
            std::thread::yield_now();
        }
    }

    /// Returns the response to each request by its id. Asserts that there is one answer to each.
    fn responses(&self) -> HashMap<String, Value> {
        let mut responses = HashMap::new();
        for line in self.output().lines() {
            let answer: Value = serde_json::from_str(line).expect("a line is JSON");
            let id = answer["custom_id"].as_str().expect("an answer has an id");
            assert!(answer["error"].is_null() && answer["id"].is_string(), "{line}");
            assert!(responses.insert(id.to_owned(), answer["response"].clone()).is_none(), "{id} twice");
        }
        responses
    }

    /// Returns the status and the body of each response, without what differs from run to run.
    fn outcomes(&self) -> HashMap<String, (u64, Value)> {
        let outcome = |response: Value| {
            let status = response["status_code"].as_u64().expect("a response has a status");
            (status, lasting(response["body"].clone()))
        };
        self.responses().into_iter().map(|(id, response)| (id, outcome(response))).collect()
    }
}

impl Drop for JobFiles {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Removes what differs from run to run: the id and the time of a response, and how much of its prompt was
/// cached.
fn lasting(mut body: Value) -> Value {
    if let Some(fields) = body.as_object_mut() {
        fields.retain(|name, _| name != "id" && name != "created");
        let usage = fields.get_mut("usage").and_then(Value::as_object_mut);
        usage.into_iter().for_each(|usage: &mut Map<_, _>| _ = usage.remove("prompt_tokens_details"));
    }
    body
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("it is text")
}

/// Asserts the exit code, and that standard error contains `named`.
fn check(output: &Output, code: i32, named: &str) {
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    assert!(stderr.contains(named), "{stderr}");
}

/// Runs a job with all requests, and compares each answer with that of the API.
async fn answers_as_the_api(name: &str, model: &Path, requests: &[(&str, Value)], failed: usize) {
    let files = JobFiles::new(name, requests);
    let output = files.run(model, "--slots 3 --max-waiting 8 --threads 2 --kv-type f32 --json");
    check(&output, 0, "");
    let summary: Value = serde_json::from_slice(&output.stdout).expect("the summary is JSON");
    assert_eq!(summary["ok"], requests.len() - failed, "{summary}");
    assert_eq!(summary["failed"], failed);
    let config = config(model, &[]);
    let engine = start::start_engine(&config).await.expect("the model loads");
    let local = LocalApi::new(ServeParts::from(&engine), config.server);
    let outcomes = files.outcomes();
    let mut prompt_tokens = 0;
    for (index, (url, body)) in requests.iter().enumerate() {
        let expected = match local.post(url, body).await {
            Ok(ResponseBody::Json(json)) => (200, serde_json::from_slice(&json).expect("it is JSON")),
            Ok(ResponseBody::Events(_)) => continue,
            Err(error) => {
                (error.status_code().as_u16(), serde_json::to_value(error.body()).expect("it is JSON"))
            }
        };
        prompt_tokens += expected.1["usage"]["prompt_tokens"].as_u64().unwrap_or(0);
        let expected = (u64::from(expected.0), lasting(expected.1));
        assert_eq!(outcomes[&format!("r{index}")], expected, "{url} {body}");
    }
    assert_eq!(summary["prompt_tokens"], prompt_tokens);
    engine.stop();
}

#[actix::test]
async fn answers_are_those_of_the_api_and_failures_are_answers() {
    let story = json!({"prompt": "Once upon a time", "max_tokens": 9, "temperature": 0});
    let sampled = json!({"prompt": ["The", "A dog"], "max_tokens": 7, "temperature": 0.8, "seed": 5, "n": 2});
    let scored = json!({"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0, "logprobs": 2});
    let said = json!({
        "messages": [{"role": "user", "content": "Hello! What is your name?"}], "temperature": 0,
        "max_completion_tokens": 8, "service_tier": "batch", "priority": -3,
    });
    let requests = [
        (COMPLETIONS, story.clone()),
        (COMPLETIONS, sampled),
        (COMPLETIONS, scored),
        (CHAT, said),
        ("/v1/tokenize", json!({"prompt": "Once"})),
        ("/v1/detokenize", json!({"tokens": [5, 6]})),
        // Refused: a model's name, a value, a body that is no object, an endpoint of other models, a stream.
        (COMPLETIONS, json!({"model": "other", "prompt": "a"})),
        (COMPLETIONS, json!({"prompt": "a", "top_p": 7})),
        (CHAT, json!("hello")),
        ("/v1/embeddings", json!({"input": "a"})),
        (COMPLETIONS, json!({"prompt": "a", "stream": true, "max_tokens": 2})),
    ];
    answers_as_the_api("api", Path::new("demo"), &requests, 5).await;
    // The refusal of a stream is the job's own.
    let files = JobFiles::new("stream", &requests[9..]);
    let output = files.run(Path::new("demo"), "--threads 1");
    check(&output, 0, "");
    assert!(text(&output.stdout).starts_with("2 requests: 0 ok, 2 failed, 0 not answered\nfirst failed"));
    let (status, body) = &files.outcomes()["r1"];
    assert_eq!((*status, &body["error"]["param"]), (400, &json!("stream")));
    assert!(body["error"]["message"].as_str().is_some_and(|text| text.contains("in a batch")), "{body}");
}

#[actix::test]
async fn embeddings_are_those_of_the_api() {
    let model = family("bert", "batch");
    let input =
        |texts: usize| json!({"input": (0..texts).map(|i| vec![8 + i; 1 + i % 5]).collect::<Vec<_>>()});
    let requests: Vec<_> = [1, 30, 2, 17, 30, 1, 9].map(|texts| ("/v1/embeddings", input(texts))).into();
    answers_as_the_api("embeddings", &model.0, &requests, 0).await;
}

/// Returns `count` requests of different lengths, every third one sampled.
fn many(count: usize) -> Vec<(&'static str, Value)> {
    let request = |index: usize| {
        let prompt: Vec<usize> = (0..1 + index * 7 % 23).map(|i| 3 + (index * 5 + i) % 90).collect();
        let temperature = if index.is_multiple_of(3) { 0.9 } else { 0.0 };
        let body = json!({
            "prompt": prompt, "max_tokens": 4 + index % 11, "ignore_eos": true, "temperature": temperature,
            "seed": index,
        });
        (COMPLETIONS, body)
    };
    (0..count).map(request).collect()
}

const FLAGS: &str = "--slots 2 --threads 1 --kv-type f32";

/// Runs a job of `count` requests undisturbed, and again with a `kill -9` whenever so many more are answered
/// as `kills` lists. Asserts that both have the same answers.
fn survives_kills(name: &str, count: usize, kills: &[usize]) {
    let (model, requests) = (fixture("gqa"), many(count));
    let undisturbed = JobFiles::new(&format!("{name}-undisturbed"), &requests);
    check(&undisturbed.run(&model, FLAGS), 0, "");
    let files = JobFiles::new(name, &requests);
    let mut killed = 0;
    for (round, more) in kills.iter().enumerate() {
        let mut job = files.start(&model, FLAGS);
        files.wait_for_answers(&mut job, files.output().lines().count() + more);
        killed += usize::from(job.try_wait().expect("it can be asked").is_none());
        job.kill().expect("it can be killed");
        job.wait().expect("it ends");
        // What an answer that is being written leaves, if the machine fails.
        if round % 2 == 0 && files.output().ends_with('\n') {
            let torn = files.output() + "{\"id\":\"batch_req_5f\",\"custom_id\":\"r0\",\"respo";
            std::fs::write(files.file("out.jsonl"), torn).expect("it can be written");
        }
    }
    assert_eq!(killed, kills.len(), "the job ended before it was killed");
    check(&files.run(&model, FLAGS), 0, "");
    let outcomes = files.outcomes();
    assert_eq!(outcomes.len(), count);
    assert!(outcomes == undisturbed.outcomes());
    assert!(outcomes.values().all(|(status, _)| *status == 200));
    // There is nothing left for which a model would be needed.
    let again = files.run(Path::new("no/such/model"), FLAGS);
    check(&again, 0, "");
    assert!(text(&again.stdout).contains(&format!("({count} answered by earlier runs)")));
}

#[test]
fn each_request_is_answered_once_however_often_the_job_is_killed() {
    survives_kills("killed", 60, &[0, 1, 25]);
}

#[test]
#[ignore = "starts the program 22 times; .ci/long runs it"]
fn twenty_kills_of_a_long_job_change_nothing() {
    let kills: Vec<usize> = (0..20).map(|round| round * 37 % 90).collect();
    survives_kills("killed-often", 2000, &kills);
}

/// A job whose second request does not end by itself.
fn endless(name: &str) -> (Copied, JobFiles) {
    let model = Copied::of("gqa", name);
    model.configure("max_position_embeddings", json!(40_000));
    let body = |tokens: u32| json!({"prompt": "a", "max_tokens": tokens, "ignore_eos": true});
    let files = JobFiles::new(name, &[(COMPLETIONS, body(1)), (COMPLETIONS, body(39_000))]);
    (model, files)
}

#[test]
fn signals_end_a_job_whose_output_no_other_job_could_write() {
    for name in ["INT", "TERM"] {
        let (model, files) = endless(&format!("interrupted-job-{name}"));
        let mut job = files.start(&model.0, "--slots 2 --threads 1");
        files.wait_for_answers(&mut job, 1);
        let second = files.run(&model.0, "");
        check(&second, 1, "another job is writing");
        signal(&job, name);
        let output = job.wait_with_output().expect("it ends");
        check(&output, 130, "interrupted after 1 answers; the same command resumes the job");
        assert!(text(&output.stdout).starts_with("2 requests: 1 ok, 0 failed, 1 not answered"));
        assert_eq!(files.responses().len(), 1);
    }
}

/// A limit on the size of files fails like a full disk, in the middle of a line.
#[test]
fn a_full_disk_is_an_error_from_which_the_job_is_resumed() {
    let (model, files) = (fixture("gqa"), JobFiles::new("full", &many(12)));
    let command = files.command(&model, FLAGS);
    let mut limited = common::alone("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 4; exec \"$0\" \"$@\""]);
    limited.arg(command.get_program()).args(command.get_args());
    let output = limited.output().expect("there is sh");
    let named =
        format!("the same command resumes the job: cannot write {}: ", files.file("out.jsonl").display());
    check(&output, 1, &named);
    assert!(text(&output.stderr).contains("File too large"));
    let (written, answers) = (files.output(), files.responses().len());
    assert!(written.ends_with('\n') && (1..12).contains(&answers), "{answers}");
    check(&files.run(&model, FLAGS), 0, "");
    assert!(files.output().starts_with(&written) && files.responses().len() == 12);
}

/// Weights and KV caches are read from disk, and rows are computed in small batches.
#[test]
fn a_job_of_a_model_on_disk_has_the_same_answers() {
    let (model, requests) = (fixture("gqa"), many(24));
    let (files, in_memory) = (JobFiles::new("on-disk", &requests), JobFiles::new("in-memory", &requests));
    let folder = files.file("stores");
    let places = "--host-memory 20% --kv-memory 0% --batch-rows 5";
    check(&files.run(&model, &format!("{FLAGS} {places} --disk-path {}", folder.display())), 0, "");
    check(&in_memory.run(&model, FLAGS), 0, "");
    assert_eq!(files.outcomes(), in_memory.outcomes());
    let left: Vec<_> = folder.read_dir().expect("it has the store").flatten().collect();
    assert!(!left.iter().any(|entry| entry.file_name().to_string_lossy().starts_with("kv-")), "{left:?}");
}

#[test]
fn a_device_that_fails_costs_no_answer() {
    let (model, requests) = (fixture("gqa"), many(12));
    let (files, undisturbed) = (JobFiles::new("faults", &requests), JobFiles::new("no-faults", &requests));
    let faults = files.file("faults.toml");
    std::fs::write(&faults, "[faults]\nenabled = true\ninject = \"fail@9,panic@31\"\n")
        .expect("it is written");
    let output = files.run(&model, &format!("{FLAGS} --config {}", faults.display()));
    check(&output, 0, "fail");
    check(&undisturbed.run(&model, FLAGS), 0, "");
    assert_eq!(files.outcomes(), undisturbed.outcomes());
}

#[test]
fn the_files_are_checked_before_a_model_is_opened() {
    let (model, files) = (Path::new("no/such/model"), JobFiles::new("checked", &many(2)));
    check(&files.run(model, ""), 1, "cannot open the model no/such/model");
    let answer = "{\"id\":\"batch_req_1\",\"custom_id\":\"r7\",\"response\":{\"status_code\":200}}\n";
    std::fs::write(files.file("out.jsonl"), answer).expect("it can be written");
    check(&files.run(model, ""), 1, "out.jsonl:1: no request of the input has the custom_id \"r7\"");
    assert_eq!(files.output(), answer);
    std::fs::write(files.file("in.jsonl"), "{}\n\n{\"custom_id\": 1}\n").expect("it can be written");
    let output = files.run(model, "");
    check(&output, 1, "in.jsonl:1: 'custom_id' is missing\n");
    check(&output, 1, "in.jsonl:3: invalid type");
    std::fs::remove_file(files.file("in.jsonl")).expect("it is there");
    check(&files.run(model, ""), 1, "cannot read");
    check(&files.run(model, "--slots none"), 2, "--slots");
}
