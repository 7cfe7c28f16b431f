//! Tests of files and batches over HTTP: each request is answered once, whatever happens to the server, and
//! only the client sees them whose they are.

use crate::common::{Copied, PATIENCE, config, fixture};
use crate::http::{Server, split};
use crate::security::{Served, keys};
use mainstem::config::ServerConfig;
use mainstem::server::BoundServer;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::Instant;

const COMPLETIONS: &str = "/v1/completions";

/// A folder of files and batches, removed on drop.
struct Data(PathBuf);

impl Data {
    /// `name` must be unique among the tests.
    fn new(name: &str) -> Data {
        Data(std::env::temp_dir().join(format!("mainstem-{}-data-{name}", std::process::id())))
    }

    fn serve(&self, configure: impl FnOnce(&mut ServerConfig)) -> Served {
        Served::with(|config| {
            config.batches.data_dir = Some(self.0.clone());
            configure(config);
        })
    }

    /// Returns the names of the files that are kept.
    fn contents(&self) -> Vec<String> {
        let names = |folder: &str| {
            let entries = std::fs::read_dir(self.0.join(folder)).expect("it is there").flatten();
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        assert!(names("uploads").is_empty(), "an upload is left");
        names("files")
    }

    /// Waits until a batch, which no client can see, has a status.
    fn wait_for_status(&self, batch: &str, status: &str) {
        let database = rusqlite::Connection::open(self.0.join("batches.sqlite")).expect("it is there");
        let (query, began) = ("SELECT status FROM batches WHERE id = ?1", Instant::now());
        while database.query_row(query, [batch], |row| row.get::<_, String>(0)).expect("a batch") != status {
            assert!(began.elapsed() < PATIENCE, "the batch is not {status}");
            std::thread::yield_now();
        }
    }
}

impl Drop for Data {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A client of a server.
struct Client {
    address: String,
    key: Option<&'static str>,
}

/// The boundary of forms.
const BOUNDARY: &str = "----part";

impl Client {
    fn of(served: &Served) -> Client {
        Client { address: served.address.to_string(), key: None }
    }

    fn with_key(served: &Served, key: &'static str) -> Client {
        Client { key: Some(key), ..Client::of(served) }
    }

    /// Sends a request. Returns status and body.
    fn send(&self, method: &str, path: &str, kind: &str, body: &[u8]) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).expect("the server accepts");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
        let key = self.key.map(|key| format!("Authorization: Bearer {key}\r\n")).unwrap_or_default();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n{key}Content-Type: \
             {kind}\r\nContent-Length: {length}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).expect("the request is sent");
        // A server that refuses it may not read it all.
        let _ = stream.write_all(body);
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("the answer comes to its end");
        split(&answer)
    }

    fn ask(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let (status, text) = self.send(method, path, "application/json", body.as_bytes());
        (status, serde_json::from_str(&text).unwrap_or_else(|_| panic!("not JSON: {text}")))
    }

    fn get(&self, path: &str) -> (u16, Value) {
        self.ask("GET", path, &Value::Null)
    }

    /// Sends a form with these parts, each the parameters of its head and its content.
    fn send_form(&self, parts: &[(&str, &str)]) -> (u16, Value) {
        let (status, text) = self.send(
            "POST",
            "/v1/files",
            &format!("multipart/form-data; boundary={BOUNDARY}"),
            &form(parts),
        );
        (status, serde_json::from_str(&text).unwrap_or_else(|_| panic!("not JSON: {text}")))
    }

    fn try_upload(&self, content: &str) -> (u16, Value) {
        self.send_form(&[PURPOSE, ("name=\"file\"; filename=\"my \\\"file\\\".jsonl\"", content)])
    }

    /// Uploads a file. Returns its id.
    fn upload(&self, content: &str) -> String {
        let (status, file) = self.try_upload(content);
        assert_eq!(status, 200, "{file}");
        id(&file)
    }

    /// Creates a batch. Returns its id.
    fn begin(&self, content: &str, window: &str) -> String {
        let file = self.upload(content);
        let (status, batch) = self.ask("POST", "/v1/batches", &new_batch(&file, window));
        assert_eq!((status, &batch["status"]), (200, &json!("validating")), "{batch}");
        id(&batch)
    }

    fn batch(&self, id: &str) -> Value {
        let (status, batch) = self.get(&format!("/v1/batches/{id}"));
        assert_eq!(status, 200, "{batch}");
        batch
    }

    /// Waits until a batch is as wanted.
    fn wait_for(&self, id: &str, is_wanted: impl Fn(&Value) -> bool) -> Value {
        let began = Instant::now();
        loop {
            let batch = self.batch(id);
            if is_wanted(&batch) {
                return batch;
            }
            assert!(began.elapsed() < PATIENCE, "{batch}");
            std::thread::yield_now();
        }
    }

    fn wait_for_status(&self, id: &str, status: &str) -> Value {
        self.wait_for(id, |batch| {
            let is_final =
                ["completed", "failed", "cancelled", "expired"].map(Value::from).contains(&batch["status"]);
            assert!(!is_final || batch["status"] == status, "{batch}");
            batch["status"] == status
        })
    }

    fn wait_for_answers(&self, id: &str, answers: u64) -> Value {
        self.wait_for(id, |batch| {
            assert!(["validating", "in_progress"].map(Value::from).contains(&batch["status"]), "{batch}");
            batch["request_counts"]["completed"].as_u64() >= Some(answers)
        })
    }

    /// Returns the answers of a batch by their ids, from both of its files. Asserts that there is one for
    /// each.
    fn answers(&self, batch: &Value) -> HashMap<String, Value> {
        let mut answers = HashMap::new();
        for (field, is_ok) in [("output_file_id", true), ("error_file_id", false)] {
            let Some(file) = batch[field].as_str() else { continue };
            let (status, text) = self.send("GET", &format!("/v1/files/{file}/content"), "", b"");
            assert_eq!(status, 200, "{text}");
            for line in text.lines() {
                let answer: Value = serde_json::from_str(line).expect("a line is JSON");
                let id = answer["custom_id"].as_str().expect("an answer has an id").to_owned();
                assert_eq!(answer["response"]["status_code"] == 200, is_ok, "{line}");
                assert!(answers.insert(id, answer).is_none(), "{line}");
            }
        }
        answers
    }

    /// Returns the texts of the answers to [`many`] requests of a completed batch, by index.
    fn texts(&self, batch: &Value, count: usize) -> Vec<String> {
        assert_eq!(batch["request_counts"], json!({"total": count, "completed": count, "failed": 0}));
        let answers = self.answers(batch);
        assert_eq!(answers.len(), count);
        let text =
            |index| answers[&format!("r{index}")]["response"]["body"]["choices"][0]["text"].to_string();
        (0..count).map(text).collect()
    }
}

const PURPOSE: (&str, &str) = ("name=\"purpose\"", "batch");

fn form(parts: &[(&str, &str)]) -> Vec<u8> {
    let mut body = String::new();
    for (head, content) in parts {
        body += &format!("--{BOUNDARY}\r\nContent-Disposition: form-data; {head}\r\n\r\n{content}\r\n");
    }
    (body + &format!("--{BOUNDARY}--\r\n")).into_bytes()
}

fn id(object: &Value) -> String {
    object["id"].as_str().unwrap_or_else(|| panic!("no id: {object}")).to_owned()
}

fn new_batch(file: &str, window: &str) -> Value {
    json!({ "input_file_id": file, "endpoint": COMPLETIONS, "completion_window": window })
}

fn line(id: &str, body: &Value) -> String {
    json!({"custom_id": id, "method": "POST", "url": COMPLETIONS, "body": body}).to_string() + "\n"
}

/// Returns a file of `count` requests of different lengths, some of them sampled.
fn many(count: usize) -> String {
    let request = |index: usize| {
        let prompt: Vec<usize> = (0..1 + index * 7 % 23).map(|i| 3 + (index * 5 + i) % 90).collect();
        let temperature = if index.is_multiple_of(3) { 0.9 } else { 0.0 };
        let body = json!({
            "prompt": prompt, "max_tokens": 4 + index % 11, "ignore_eos": true, "temperature": temperature,
            "seed": index,
        });
        line(&format!("r{index}"), &body)
    };
    (0..count).map(request).collect()
}

#[test]
fn a_batch_is_answered_as_its_requests_would_be() {
    let data = Data::new("whole");
    let served = data.serve(|_| {});
    let client = Client::of(&served);
    let bodies = [
        json!({"prompt": "Once upon a time", "max_tokens": 9, "temperature": 0}),
        json!({"prompt": ["a", "b"], "max_tokens": 4, "temperature": 0.8, "seed": 3, "n": 2}),
        json!({"prompt": "a", "top_p": 7}),
        json!({"prompt": "a", "stream": true}),
    ];
    let content: String = (0..).zip(&bodies).map(|(index, body)| line(&format!("r{index}"), body)).collect();
    let (status, file) = client.try_upload(&content);
    assert_eq!(status, 200, "{file}");
    assert_eq!(file["bytes"], content.len());
    assert_eq!((&file["object"], &file["purpose"]), (&json!("file"), &json!("batch")));
    assert_eq!(file["filename"], "my \"file\".jsonl");
    let file = id(&file);
    let stored = client.send("GET", &format!("/v1/files/{file}/content"), "", b"");
    assert_eq!(stored, (200, content));
    let metadata = json!({"for": "a test"});
    let mut new = new_batch(&file, "24h");
    new["metadata"] = metadata.clone();
    new["output_expires_after"] = json!({"anchor": "created_at", "seconds": 3600});
    let (status, batch) = client.ask("POST", "/v1/batches", &new);
    assert_eq!(status, 200, "{batch}");
    assert_eq!(batch["expires_at"].as_i64(), batch["created_at"].as_i64().map(|at| at + 86_400));
    let batch = client.wait_for_status(&id(&batch), "completed");
    assert_eq!(batch["request_counts"], json!({"total": 4, "completed": 2, "failed": 2}));
    assert_eq!((&batch["metadata"], &batch["errors"]), (&metadata, &Value::Null));
    for time in ["in_progress_at", "finalizing_at", "completed_at"] {
        assert!(batch[time].as_i64() >= batch["created_at"].as_i64(), "{batch}");
    }
    let answers = client.answers(&batch);
    for (index, body) in bodies.iter().enumerate().take(3) {
        let (status, expected) = client.ask("POST", COMPLETIONS, body);
        let response = &answers[&format!("r{index}")]["response"];
        assert_eq!(response["status_code"], status);
        let field = if status == 200 { "choices" } else { "error" };
        assert_eq!(response["body"][field], expected[field]);
    }
    assert_eq!(answers["r3"]["response"]["body"]["error"]["param"], "stream");
    // The files of answers are files, which expire as asked.
    let (_, output) = client.get(&format!("/v1/files/{}", batch["output_file_id"].as_str().expect("an id")));
    assert_eq!(output["purpose"], "batch_output");
    assert_eq!(output["expires_at"].as_i64(), output["created_at"].as_i64().map(|at| at + 3600));
    let metrics = served.get("/metrics", &[]).body;
    assert!(metrics.contains("mainstem_batch_requests_total{outcome=\"failed\"}"), "{metrics}");
    let (_, batches) = client.get("/v1/batches");
    assert_eq!((&batches["data"][0], &batches["has_more"]), (&batch, &json!(false)));
}

#[test]
fn lists_have_pages_and_deleted_files_are_gone() {
    let data = Data::new("lists");
    let served = data.serve(|_| {});
    let client = Client::of(&served);
    let ids: Vec<String> = (0..3).map(|i| client.upload(&line(&format!("r{i}"), &json!({})))).collect();
    let listed = |query: &str| {
        let (status, list) = client.get(&format!("/v1/files?{query}"));
        assert_eq!(status, 200, "{list}");
        let found: Vec<_> = list["data"].as_array().expect("a list").iter().map(id).collect();
        let position = |id: &String| ids.iter().position(|known| known == id).expect("it is one of them");
        (found.iter().map(position).collect::<Vec<_>>(), list["has_more"] == true)
    };
    assert_eq!(listed("order=asc&limit=2"), (vec![0, 1], true));
    assert_eq!(listed(&format!("order=asc&limit=2&after={}", ids[1])), (vec![2], false));
    assert_eq!(listed("purpose=batch"), (vec![2, 1, 0], false));
    assert_eq!(listed("purpose=batch_output"), (vec![], false));
    assert_eq!(client.get("/v1/files?after=file-x").1["error"]["param"], "after");
    let path = format!("/v1/files/{}", ids[1]);
    let deleted = client.ask("DELETE", &path, &Value::Null);
    assert_eq!(deleted, (200, json!({"id": ids[1], "object": "file", "deleted": true})));
    for (method, path) in [("GET", path.clone()), ("DELETE", path.clone()), ("GET", path + "/content")] {
        let (status, error) = client.ask(method, &path, &Value::Null);
        assert_eq!((status, &error["error"]["code"]), (404, &json!("not_found")), "{method} {path}");
    }
    assert_eq!((listed("").0, data.contents().len()), (vec![2, 0], 2));
    let (status, error) = client.ask("POST", "/v1/batches", &new_batch(&ids[1], "24h"));
    assert_eq!((status, &error["error"]["param"]), (404, &json!("input_file_id")));
}

#[test]
fn files_and_batches_are_seen_with_their_key_only() {
    let data = Data::new("keys");
    let with_keys =
        |all: &'static [&'static str]| move |config: &mut ServerConfig| config.api_keys = keys(all);
    let served = data.serve(with_keys(&["one", "two"]));
    let [one, two] = ["one", "two"].map(|key| Client::with_key(&served, key));
    let file = one.upload(&line("r0", &json!({"prompt": "a", "max_tokens": 1})));
    let (_, batch) = one.ask("POST", "/v1/batches", &new_batch(&file, "24h"));
    let batch = one.wait_for_status(&id(&batch), "completed");
    let output = batch["output_file_id"].as_str().expect("an id");
    let batch = id(&batch);
    for (method, path) in [
        ("GET", format!("/v1/files/{file}")),
        ("GET", format!("/v1/files/{file}/content")),
        ("GET", format!("/v1/files/{output}/content")),
        ("DELETE", format!("/v1/files/{file}")),
        ("GET", format!("/v1/batches/{batch}")),
        ("POST", format!("/v1/batches/{batch}/cancel")),
    ] {
        assert_eq!(two.ask(method, &path, &Value::Null).0, 404, "{method} {path}");
        assert_eq!(Client::of(&served).ask(method, &path, &Value::Null).0, 401, "{method} {path}");
    }
    assert_eq!(two.ask("POST", "/v1/batches", &new_batch(&file, "24h")).0, 404);
    for list in ["/v1/files", "/v1/batches"] {
        assert_eq!(
            (two.get(list).1["data"].clone(), one.get(list).1["data"] == json!([])),
            (json!([]), false)
        );
        assert_eq!(two.get(&format!("{list}?after={batch}")).0, 400);
    }
    drop(served);
    // After a restart, it is still this key. The batch of a key that is not accepted any more ends.
    let served = data.serve(with_keys(&["three", "one", "two"]));
    let [one, two] = ["one", "two"].map(|key| Client::with_key(&served, key));
    assert_eq!(one.batch(&batch)["status"], "completed");
    let long = two.begin(&many(3000), "24h");
    two.wait_for_answers(&long, 1);
    drop(served);
    let revoking = data.serve(with_keys(&["one"]));
    data.wait_for_status(&long, "cancelled");
    drop(revoking);
    let served = data.serve(with_keys(&["one", "two"]));
    let two = Client::with_key(&served, "two");
    let ended = two.batch(&long);
    assert_eq!(
        (&ended["status"], &ended["errors"]["data"][0]["code"]),
        (&json!("cancelled"), &json!("invalid_api_key"))
    );
    assert_eq!(
        two.answers(&ended).len() as u64,
        ended["request_counts"]["completed"].as_u64().expect("a number")
    );
}

#[test]
fn faulty_lines_are_named_before_anything_runs() {
    let data = Data::new("lines");
    let served = data.serve(|config| config.batches.max_requests = 3);
    let client = Client::of(&served);
    let good = |id: &str| line(id, &json!({"prompt": "a", "max_tokens": 1}));
    for (content, expected) in [
        (good("a") + "{\n" + &good("a"), &[(2, "EOF"), (3, "'custom_id' \"a\" is that of line 1, too")][..]),
        (
            good("a").replace("completions", "embeddings"),
            &[(1, "'url' is \"/v1/embeddings\"; it must be \"/v1/comp")],
        ),
        (good("a").replace("POST", "GET"), &[(1, "'method' is \"GET\"")]),
        ("\n\n".to_owned(), &[(1, "the file has no requests")]),
        (["a", "b", "c", "d"].map(good).concat(), &[(4, "the file has more than 3 requests")]),
    ] {
        let batch = client.wait_for_status(&client.begin(&content, "24h"), "failed");
        let errors = batch["errors"]["data"].as_array().expect("there are errors");
        assert_eq!(errors.len(), expected.len(), "{batch}");
        for (error, (line, message)) in errors.iter().zip(expected) {
            let text = error["message"].as_str().expect("a message");
            assert!(error["line"] == *line && text.starts_with(message), "{error}");
        }
        assert!(
            batch["failed_at"].is_i64()
                && batch["output_file_id"].is_null()
                && batch["error_file_id"].is_null()
        );
    }
    let batch = client.begin(&"{}\n".repeat(25), "24h");
    let errors = client.wait_for_status(&batch, "failed")["errors"]["data"].clone();
    assert_eq!(
        (errors.as_array().map(Vec::len), &errors[20]["message"]),
        (Some(21), &json!("5 more lines are invalid"))
    );
}

#[test]
fn wrong_fields_of_a_batch_are_named() {
    let data = Data::new("fields");
    let served = data.serve(|_| {});
    let client = Client::of(&served);
    let file = client.upload(&many(1));
    let wrong = |name: &str, value: Value| {
        let mut body = new_batch(&file, "24h");
        body[name] = value;
        let (status, error) = client.ask("POST", "/v1/batches", &body);
        let param = error["error"]["param"].as_str().unwrap_or_default().to_owned();
        assert!(error["error"]["message"].as_str().is_some_and(|text| text.contains(&param)), "{error}");
        (status, param)
    };
    for (name, value, param) in [
        ("input_file_id", Value::Null, "input_file_id"),
        ("input_file_id", json!(5), "input_file_id"),
        ("endpoint", Value::Null, "endpoint"),
        ("endpoint", json!("/v1/models"), "endpoint"),
        ("endpoint", json!("/v1/embeddings"), "endpoint"),
        ("completion_window", Value::Null, "completion_window"),
        ("completion_window", json!("0s"), "completion_window"),
        ("completion_window", json!("721h"), "completion_window"),
        ("completion_window", json!("soon"), "completion_window"),
        ("metadata", json!({"a": 1}), "metadata"),
        ("metadata", json!({"a": "b".repeat(513)}), "metadata"),
        ("output_expires_after", json!({"seconds": 3600}), "output_expires_after.anchor"),
        ("output_expires_after", json!({"anchor": "created_at"}), "output_expires_after.seconds"),
        (
            "output_expires_after",
            json!({"anchor": "created_at", "seconds": 3599}),
            "output_expires_after.seconds",
        ),
    ] {
        assert_eq!(wrong(name, value), (400, param.to_owned()));
    }
    assert_eq!(client.get("/v1/batches").1["data"], json!([]));
}

#[test]
fn a_cancelled_batch_keeps_its_answers() {
    let data = Data::new("cancel");
    let served = data.serve(|_| {});
    let client = Client::of(&served);
    let running = client.begin(&many(3000), "24h");
    // This one does not begin, because another one of its client runs.
    let waiting = client.begin(&many(3000), "24h");
    client.wait_for_answers(&running, 1);
    for (batch, has_begun) in [(&waiting, false), (&running, true)] {
        let input = client.batch(batch)["input_file_id"].as_str().expect("an id").to_owned();
        let delete = || client.ask("DELETE", &format!("/v1/files/{input}"), &Value::Null);
        assert_eq!(delete().0, 409, "its requests are needed");
        let cancel = || client.ask("POST", &format!("/v1/batches/{batch}/cancel"), &Value::Null);
        let (status, cancelling) = cancel();
        assert_eq!((status, &cancelling["status"]), (200, &json!("cancelling")), "{cancelling}");
        let cancelled = client.wait_for_status(batch, "cancelled");
        assert!(cancelled["cancelling_at"].is_i64() && cancelled["cancelled_at"].is_i64());
        let counts = &cancelled["request_counts"];
        assert_eq!(client.answers(&cancelled).len() as u64, counts["completed"].as_u64().expect("a number"));
        assert_eq!((counts["total"] == 3000, counts["completed"] != 0), (has_begun, has_begun), "{counts}");
        assert_eq!((cancel().0, delete().0), (409, 200));
    }
    // The next one begins.
    client.wait_for_status(&client.begin(&many(2), "24h"), "completed");
}

#[test]
fn what_is_not_answered_in_time_expires() {
    let data = Data::new("expiry");
    let served = data.serve(|_| {});
    let client = Client::of(&served);
    let batch = client.wait_for_status(&client.begin(&many(4000), "1s"), "expired");
    let answers = client.answers(&batch);
    assert_eq!(answers.len(), 4000);
    let expired = answers.values().filter(|answer| answer["error"]["code"] == "batch_expired").count() as u64;
    assert!(answers.values().all(|answer| answer["response"].is_null() == answer["error"].is_object()));
    assert_eq!((&batch["request_counts"]["failed"], expired > 0), (&json!(expired), true), "{batch}");
}

#[test]
fn a_restarted_server_goes_on() {
    let data = Data::new("restart");
    let served = data.serve(|_| {});
    let client = Client::of(&served);
    let undisturbed = client.wait_for_status(&client.begin(&many(200), "24h"), "completed");
    let expected = client.texts(&undisturbed, 200);
    let batch = client.begin(&many(200), "24h");
    let later = client.begin(&many(5), "24h");
    client.wait_for_answers(&batch, 20);
    // What is in flight is dropped.
    drop(served);
    let unknown = format!("file-{:032}", 1);
    for folder in ["files", "uploads"] {
        std::fs::write(data.0.join(folder).join(&unknown), "x").expect("it can be written");
    }
    let served = data.serve(|_| {});
    let client = Client::of(&served);
    assert!(!data.contents().contains(&unknown));
    let ended = client.wait_for_status(&batch, "completed");
    assert!(client.texts(&ended, 200) == expected);
    assert!(client.texts(&client.wait_for_status(&later, "completed"), 5) == expected[..5]);
}

#[test]
fn broken_forms_are_refused_and_leave_nothing() {
    let data = Data::new("forms");
    let served = data.serve(|config| config.batches.file_limit_bytes = 100_000);
    let client = Client::of(&served);
    let file = ("name=\"file\"; filename=\"a\"", "{}\n");
    let large = "x".repeat(100_001);
    let huge = "x".repeat(400_000);
    for (parts, status, param) in [
        (&[file][..], 400, "purpose"),
        (&[PURPOSE], 400, "file"),
        (&[("name=\"purpose\"", "assistants"), file], 400, "purpose"),
        (&[file, ("name=\"purpose\"", "fine-tune")], 400, "purpose"),
        (&[PURPOSE, file, file], 400, "file"),
        (&[PURPOSE, ("name=\"file\"; filename=\"a\"", "")], 400, "file"),
        (&[PURPOSE, ("name=\"file\"; filename=\"a\"", &large)], 413, "file"),
        (&[PURPOSE, ("name=\"file\"; filename=\"a\"", &huge)], 413, "file"),
        (&[("name=\"purpose\"", &large), file], 400, "purpose"),
        (&[PURPOSE, ("name=\"expires_after[anchor]\"", "now"), file], 400, "expires_after[anchor]"),
        (&[PURPOSE, ("name=\"expires_after[seconds]\"", "1"), file], 400, "expires_after[seconds]"),
        (&[PURPOSE, ("filename=\"a\"", "x"), file], 400, ""),
    ] {
        let (found, error) = client.send_form(parts);
        let named = error["error"]["param"].as_str().unwrap_or_default();
        assert_eq!((found, named), (status, param), "{error}");
    }
    let whole = form(&[PURPOSE, file]);
    let cut = &whole[..whole.len() - 12];
    let typed = format!("multipart/form-data; boundary={BOUNDARY}");
    for (kind, body, named) in [
        ("multipart/form-data", &whole[..], "boundary"),
        ("application/json", &b"{}"[..], "multipart"),
        ("", &whole[..], "form"),
        (&typed, cut, "incomplete"),
        (&typed, b"", "incomplete"),
        ("multipart/form-data; boundary=other", &whole[..], "form"),
    ] {
        let (status, text) = client.send("POST", "/v1/files", kind, body);
        assert!(
            status == 400 && text.contains("malformed_body") && text.contains(named),
            "{kind}: {status} {text}"
        );
    }
    // A client that goes away in the middle leaves nothing, either.
    let mut stream = served.connect();
    let head = format!(
        "POST /v1/files HTTP/1.1\r\nHost: test\r\nContent-Type: {typed}\r\nContent-Length: 90000\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(cut)).expect("it is sent");
    drop(stream);
    let began = Instant::now();
    while std::fs::read_dir(data.0.join("uploads")).expect("it is there").count() > 0 {
        assert!(began.elapsed() < PATIENCE, "the upload is not removed");
        std::thread::yield_now();
    }
    assert_eq!(data.contents(), Vec::<String>::new());
    // Unknown values are ignored, and the order does not matter.
    let (status, stored) = client.send_form(&[("name=\"note\"", "x"), file, PURPOSE]);
    assert_eq!((status, data.contents().len()), (200, 1), "{stored}");
}

#[test]
fn quotas_are_those_of_a_key() {
    let data = Data::new("quotas");
    let served = data.serve(|config| {
        config.api_keys = keys(&["one", "two"]);
        config.batches.quota_bytes = 200_000;
        config.batches.max_batches = 2;
    });
    let [one, two] = ["one", "two"].map(|key| Client::with_key(&served, key));
    let first = one.upload(&"x".repeat(150_000));
    let (status, error) = one.try_upload(&"x".repeat(60_000));
    let message = error["error"]["message"].as_str().unwrap_or_default();
    assert!(status == 403 && message.contains("batches.quota"), "{error}");
    two.upload(&"x".repeat(60_000));
    assert_eq!(one.ask("DELETE", &format!("/v1/files/{first}"), &Value::Null).0, 200);
    let file = one.upload(&many(500));
    let begin = |client: &Client, file: &str| client.ask("POST", "/v1/batches", &new_batch(file, "24h"));
    let batches = [begin(&one, &file), begin(&one, &file)].map(|(status, batch)| (status, id(&batch)));
    let (status, error) = begin(&one, &file);
    let message = error["error"]["message"].as_str().unwrap_or_default();
    assert!(status == 429 && message.contains("batches.max_batches"), "{error}");
    assert_eq!(begin(&two, &two.upload(&many(1))).0, 200);
    for (_, batch) in batches {
        one.ask("POST", &format!("/v1/batches/{batch}/cancel"), &Value::Null);
        one.wait_for(&batch, |batch| ["cancelled", "completed"].map(Value::from).contains(&batch["status"]));
    }
    // Answers count, too.
    let long = json!({"prompt": "a", "max_tokens": 30, "ignore_eos": true, "logprobs": 5});
    let batch =
        two.begin(&(0..300).map(|index| line(&format!("r{index}"), &long)).collect::<String>(), "24h");
    let failed = two.wait_for_status(&batch, "failed");
    assert_eq!(failed["errors"]["data"][0]["code"], "quota_exceeded", "{failed}");
    assert_eq!(failed["request_counts"]["completed"], two.answers(&failed).len());
}

/// Regression: a stop waited for the requests of batches that were in flight, up to the drain timeout.
#[test]
fn a_stop_does_not_wait_for_requests_of_batches() {
    let (data, model) = (Data::new("endless"), Copied::of("gqa", "endless-batch"));
    model.configure("max_position_embeddings", json!(40_000));
    let flags = ["--data-dir", &data.0.display().to_string(), "--slots", "2"];
    let mut server = Server::with_model(&model.0, &flags);
    let client = Client { address: server.address().to_owned(), key: None };
    let body = |tokens: u32| json!({"prompt": "a", "max_tokens": tokens, "ignore_eos": true});
    let batch = client.begin(&(line("short", &body(1)) + &line("endless", &body(39_000))), "24h");
    client.wait_for_answers(&batch, 1);
    server.signal("TERM");
    assert!(server.exit().success());
    let output = data.contents().into_iter().find(|name| name.ends_with("-output")).expect("there is one");
    let answers = std::fs::read_to_string(data.0.join("files").join(output)).expect("it can be read");
    assert_eq!((answers.lines().count(), answers.contains("\"short\"")), (1, true), "{answers}");
}

/// Requests of a batch are sent again if a device fails.
#[test]
fn a_device_that_fails_costs_no_answer() {
    let (data, model) = (Data::new("faults"), fixture("gqa"));
    std::fs::create_dir_all(&data.0).expect("it can be made");
    let faults = data.0.join("faults.toml");
    std::fs::write(&faults, "[faults]\nenabled = true\ninject = \"fail@9,panic@31\"\n")
        .expect("it is written");
    let [folder, faults] = [&data.0, &faults].map(|path| path.display().to_string());
    let server = Server::with_model(&model, &["--data-dir", &folder, "--config", &faults, "--slots", "2"]);
    let client = Client { address: server.address().to_owned(), key: None };
    let batch = client.wait_for_status(&client.begin(&many(30), "24h"), "completed");
    let answered = client.texts(&batch, 30);
    // By now, no fault is left.
    let undisturbed = client.wait_for_status(&client.begin(&many(30), "24h"), "completed");
    assert_eq!(answered, client.texts(&undisturbed, 30));
}

#[test]
fn without_a_folder_there_are_no_files_and_batches() {
    let served = Served::with(|_| {});
    let client = Client::of(&served);
    for (method, path) in [
        ("GET", "/v1/files"),
        ("POST", "/v1/files"),
        ("GET", "/v1/files/file-1/content"),
        ("GET", "/v1/batches"),
        ("POST", "/v1/batches"),
    ] {
        let (status, error) = client.ask(method, path, &Value::Null);
        let message = error["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 501 && message.contains("batches.data_dir (--data-dir)"), "{error}");
    }
    assert_eq!(client.ask("DELETE", "/v1/batches", &Value::Null).0, 405);
}

#[actix::test]
async fn a_folder_has_one_server() {
    let data = Data::new("shared");
    let bind = || {
        let mut config = config(&fixture("gqa"), &[]).server;
        config.batches.data_dir = Some(data.0.clone());
        BoundServer::bind(config)
    };
    let first = bind().expect("the first one binds");
    let error = bind().err().expect("the second one does not").to_string();
    assert!(
        error.starts_with("batches.data_dir = ") && error.ends_with("another server uses this folder"),
        "{error}"
    );
    drop(first);
    bind().expect("the folder is free again");
}

/// Runs a batch of `count` requests undisturbed, and again with a `kill -9` of the server
/// whenever so many more are answered as `kills` lists. Asserts that both have the same answers.
fn survives_kills(name: &str, count: usize, kills: &[u64]) {
    let (data, model) = (Data::new(name), fixture("gqa"));
    let folder = data.0.display().to_string();
    let start = || {
        let server = Server::with_model(&model, &["--data-dir", &folder, "--slots", "2"]);
        let client = Client { address: server.address().to_owned(), key: None };
        (server, client)
    };
    let (mut server, mut client) = start();
    let undisturbed = client.wait_for_status(&client.begin(&many(count), "24h"), "completed");
    let expected = client.texts(&undisturbed, count);
    let batch = client.begin(&many(count), "24h");
    let done = |client: &Client| client.batch(&batch)["request_counts"]["completed"].as_u64().unwrap_or(0);
    for more in kills {
        client.wait_for_answers(&batch, done(&client) + more);
        server.kill();
        drop(server);
        (server, client) = start();
    }
    let ended = client.wait_for_status(&batch, "completed");
    assert!(client.texts(&ended, count) == expected);
    // A stop is not delayed by what has not begun, and nothing of it is lost.
    let last = client.begin(&many(count), "24h");
    client.wait_for_answers(&last, 1);
    server.signal("TERM");
    assert!(server.exit().success());
    let (_server, client) = start();
    assert!(client.texts(&client.wait_for_status(&last, "completed"), count) == expected);
}

#[test]
fn each_request_of_a_batch_is_answered_once_however_often_the_server_is_killed() {
    survives_kills("killed", 150, &[0, 1, 40]);
}

#[test]
#[ignore = "starts the program 22 times; .ci/long runs it"]
fn twenty_kills_of_the_server_change_nothing() {
    let kills: Vec<u64> = (0..20).map(|round| round * 37 % 90).collect();
    survives_kills("killed-often", 2000, &kills);
}

/// A limit on the size of files fails like a full disk.
#[test]
fn a_full_disk_fails_the_batch_and_not_the_server() {
    let data = Data::new("full");
    // 1 or 2 MiB: as much as the requests and the database take, but not the answers.
    let server =
        Server::with_file_limit(&fixture("gqa"), &["--data-dir", &data.0.display().to_string()], 2048);
    let client = Client { address: server.address().to_owned(), key: None };
    let long = json!({"prompt": "a", "max_tokens": 8, "ignore_eos": true, "logprobs": 5});
    let content: String = (0..2500).map(|index| line(&format!("r{index}"), &long)).collect();
    let batch = client.wait_for_status(&client.begin(&content, "24h"), "failed");
    assert_eq!(batch["errors"]["data"][0]["message"], "the server's disk is full", "{batch}");
    let answers = client.answers(&batch);
    assert_eq!(batch["request_counts"]["completed"], answers.len());
    assert!((1..2500).contains(&answers.len()), "{}", answers.len());
    let (status, error) = client.try_upload(&"x".repeat(3_000_000));
    assert_eq!((status, &error["error"]["code"]), (507, &json!("storage_full")), "{error}");
    client.wait_for_status(&client.begin(&many(3), "24h"), "completed");
}
