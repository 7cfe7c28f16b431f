//! Tests of `mainstem run`: standard output, standard error and exit code, with correct and faulty servers.

use crate::common::{Copied, PATIENCE, again, fixture, mainstem, signal, within};
use futures_util::StreamExt;
use mainstem::cli::run::remote::Remote;
use mainstem::cli::run::transport::{Reply, Transport};
use mainstem::server::{LocalApi, ResponseBody, ServeParts};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

/// A request received by the server.
struct ReceivedRequest {
    /// Method and path.
    line: String,
    /// Header lines in lower case.
    headers: Vec<String>,
    body: Value,
}

/// Handles a connection after the request has been read.
type Respond = Box<dyn FnOnce(&mut TcpStream) + Send>;

/// A server that accepts one connection for each of its responses, then exits.
struct FakeServer {
    url: String,
    seen: Receiver<ReceivedRequest>,
}

impl FakeServer {
    fn new(responses: Vec<Respond>) -> FakeServer {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let url = format!("http://{}", listener.local_addr().expect("it has an address"));
        let (sender, seen) = channel();
        thread::spawn(move || {
            for respond in responses {
                let (mut stream, _) = listener.accept().expect("a client comes");
                let _ = sender.send(read_request(&mut stream));
                respond(&mut stream);
            }
        });
        FakeServer { url, seen }
    }

    fn seen(&self) -> ReceivedRequest {
        self.seen.recv().expect("a request came")
    }
}

fn read_request(stream: &mut TcpStream) -> ReceivedRequest {
    let mut reader = BufReader::new(stream);
    let mut line = || {
        let mut line = String::new();
        reader.read_line(&mut line).expect("the client writes text");
        line.trim_end().to_string()
    };
    let first = line();
    let headers: Vec<String> = std::iter::from_fn(|| Some(line()).filter(|line| !line.is_empty())).collect();
    let length = headers
        .iter()
        .find_map(|header| header.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body).expect("the body is as long as it says");
    let path = first.trim_end_matches(" HTTP/1.1").to_string();
    ReceivedRequest { line: path, headers, body: serde_json::from_slice(&body).unwrap_or(Value::Null) }
}

/// Writes a text. Returns false if the client has disconnected.
fn write(stream: &mut TcpStream, text: &str) -> bool {
    stream.write_all(text.as_bytes()).and_then(|()| stream.flush()).is_ok()
}

/// Responds with a JSON body.
fn status(status: &'static str, body: Value) -> Respond {
    let head = "Content-Type: application/json\r\nConnection: close";
    let (body, head) = (body.to_string(), head.to_string());
    Box::new(move |stream| {
        let length = body.len();
        write(stream, &format!("HTTP/1.1 {status}\r\n{head}\r\nContent-Length: {length}\r\n\r\n{body}"));
    })
}

const EVENTS: &str =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n";

/// Responds with a body of events and closes the connection.
fn events(body: String) -> Respond {
    Box::new(move |stream| {
        write(stream, &format!("{EVENTS}{body}"));
    })
}

fn text_chunk(text: &str) -> String {
    format!("data: {}\n\n", json!({"choices": [{"index": 0, "delta": {"content": text}}]}))
}

const DONE: &str = "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n\
                    data: {\"choices\":[],\"usage\":{\"completion_tokens\":2}}\n\ndata: [DONE]\n\n";

fn command(args: &[&str]) -> Command {
    let mut command = mainstem();
    command.arg("run").args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(args: &[&str]) -> Output {
    command(args).output().expect("the program starts")
}

/// Sends one chat request to a server through the program.
fn ask(server: &FakeServer, args: &[&str]) -> Output {
    run(&[&["--url", &server.url, "m", "Hi"], args].concat())
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("it is text")
}

/// Checks the exit code and standard output, and that standard error contains `named`.
fn check(output: &Output, code: i32, stdout: &str, named: &str) {
    let stderr = text(&output.stderr);
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(code), stdout), "{stderr}");
    assert!(if named.is_empty() { stderr.is_empty() } else { stderr.contains(named) }, "{stderr}");
}

#[test]
fn the_answer_is_all_of_standard_output() {
    let body = format!(": keep-alive\n\n{}:\n\n{}{DONE}", text_chunk("Grüße,\n"), text_chunk("\u{1b}[1m🌊"));
    let server = FakeServer::new(vec![events(body)]);
    check(&ask(&server, &[]), 0, "Grüße,\n\u{1b}[1m🌊\n", "");
    let seen = server.seen();
    assert_eq!(seen.line, "POST /v1/chat/completions");
    let body = json!({
        "model": "m", "messages": [{"role": "user", "content": "Hi"}],
        "stream": true, "stream_options": {"include_usage": true},
    });
    assert_eq!(seen.body, body, "nothing is sent that was not asked for");
    assert!(!seen.headers.iter().any(|header| header.to_lowercase().starts_with("authorization")));
}

#[test]
fn flags_become_parameters() {
    let server = FakeServer::new(vec![events(DONE.to_string())]);
    let flags = "--temperature 0.5 --top-p 0.9 --top-k -1 --min-p 0.1 --seed 7 --max-tokens 5 \
                 --stop a --stop b --stats";
    let flags: Vec<_> = flags.split(' ').chain(["--system", "Be brief."]).collect();
    check(&ask(&server, &flags), 0, "", "2 tokens");
    let body = server.seen().body;
    let wanted = json!({
        "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "seed": 7, "max_tokens": 5,
        "stop": ["a", "b"],
    });
    for (name, value) in wanted.as_object().expect("it is an object") {
        assert_eq!(&body[name], value, "{name}");
    }
    assert_eq!(body["messages"][0], json!({"role": "system", "content": "Be brief."}));
}

/// Tools are sent, and what a single answer calls is printed for whoever runs them.
#[test]
fn calls_of_tools_are_lines_of_json() {
    let chunk = |delta: Value| format!("data: {}\n\n", json!({"choices": [{"delta": delta}]}));
    let part = |index: usize, part: Value| {
        let mut part = part;
        part["index"] = index.into();
        chunk(json!({"tool_calls": [part]}))
    };
    let body = [
        text_chunk("Wait."),
        part(0, json!({"id": "a", "type": "function", "function": {"name": "f", "arguments": "{\"x\""}})),
        part(0, json!({"function": {"arguments": ":1}"}})),
        part(1, json!({"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}})),
        DONE.to_string(),
    ];
    let server = FakeServer::new(vec![events(body.concat())]);
    let folder = Copied::of("mha", "tools");
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let file = folder.file("tools.json");
    std::fs::write(&file, tools.to_string()).expect("it can be written");
    let file = file.display().to_string();
    let call = |id: &str, name: &str, arguments: &str| {
        json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}).to_string()
    };
    let shown = format!("Wait.\n{}\n{}\n", call("a", "f", "{\"x\":1}"), call("b", "g", "{}"));
    check(&ask(&server, &["--tools", &file]), 0, &shown, "");
    assert_eq!(server.seen().body["tools"], tools);

    std::fs::write(&file, r#"[{"function": {"name": "f"}}, {"name": "g"}]"#).expect("it can be written");
    let refused = run(&["-p", "Hi", "--tools", &file]);
    check(&refused, 2, "", "[1].function.name");
    assert!(text(&refused.stderr).contains(&file), "{}", text(&refused.stderr));
}

/// `-m` names the model, so what would be the model is the prompt.
#[test]
fn the_options_of_llama_cpp_mean_the_same() {
    for prompt in [&["-p", "Hi"][..], &["Hi"]] {
        let server = FakeServer::new(vec![events(DONE.to_string())]);
        let flags = ["--url", &server.url, "-m", "m", "-n", "5"];
        check(&run(&[&flags, prompt].concat()), 0, "", "");
        let body = server.seen().body;
        let asked = json!([{"role": "user", "content": "Hi"}]);
        assert_eq!((&body["model"], &body["max_tokens"]), (&json!("m"), &json!(5)), "{prompt:?}");
        assert_eq!(body["messages"], asked, "{prompt:?}");
    }
    check(&run(&["-m", "m", "Hi", "-p", "Ho"]), 2, "", "given twice");
    check(&run(&["-m", "m", "Hi", "Ho"]), 2, "", "--model");
}

#[test]
fn without_a_name_the_first_model_answers() {
    let models = json!({"object": "list", "data": [{"id": "first"}, {"id": "second"}]});
    let server =
        FakeServer::new(vec![status("200 OK", models), events(format!("{}{DONE}", text_chunk("yes")))]);
    let url = format!("{}/v1/", server.url);
    check(&run(&["--url", &url, "-p", "Hi"]), 0, "yes\n", "");
    assert_eq!(server.seen().line, "GET /v1/models");
    assert_eq!(server.seen().body["model"], "first");
}

#[test]
fn a_piped_prompt_is_read() {
    for args in [&["m"][..], &["m", "-"]] {
        let server = FakeServer::new(vec![events(DONE.to_string())]);
        let mut command = command(args);
        let mut child =
            command.args(["--raw", "--url", &server.url]).stdin(Stdio::piped()).spawn().expect("it starts");
        child.stdin.take().expect("it is piped").write_all("Zeile\nwas\n".as_bytes()).expect("it reads");
        check(&child.wait_with_output().expect("it ends"), 0, "", "");
        let seen = server.seen();
        assert_eq!(seen.line, "POST /v1/completions");
        assert_eq!((&seen.body["prompt"], &seen.body["max_tokens"]), (&json!("Zeile\nwas"), &json!(128)));
    }
}

#[test]
fn json_is_the_servers_own() {
    let whole = json!({"choices": [{"message": {"content": "yes"}}], "id": "x"});
    let server = FakeServer::new(vec![status("200 OK", whole.clone())]);
    check(&ask(&server, &["--json"]), 0, &format!("{whole}\n"), "");
    assert!(server.seen().body.get("stream").is_none());

    let server = FakeServer::new(vec![events(format!("{}{DONE}", text_chunk("yes")))]);
    let output = ask(&server, &["--json", "--stream"]);
    assert_eq!(output.status.code(), Some(0));
    let lines: Vec<Value> =
        text(&output.stdout).lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    assert_eq!(lines.len(), 3);
    assert_eq!(lines[0]["choices"][0]["delta"]["content"], "yes");
    assert_eq!(lines[2]["usage"]["completion_tokens"], 2);
}

#[test]
fn a_refusal_is_reported_and_fails() {
    let refused =
        json!({"error": {"message": "no such \u{1b}[31mmodel", "type": "not_found_error", "code": "x"}});
    let server = FakeServer::new(vec![status("404 Not Found", refused.clone())]);
    check(&ask(&server, &[]), 1, "", "404 Not Found: no such \\x1b[31mmodel");
    let server = FakeServer::new(vec![status("404 Not Found", refused.clone())]);
    check(&ask(&server, &["--json"]), 1, &format!("{refused}\n"), "404 Not Found");
    let server = FakeServer::new(vec![status("302 Found", json!({}))]);
    check(&ask(&server, &[]), 1, "", "302 Found");
    check(&run(&["--url", "http://127.0.0.1:1", "m", "Hi"]), 1, "", "Connection refused");
}

#[test]
fn the_key_is_sent_and_never_shown() {
    for (flag, variables, sent) in [
        (Some("k-flag"), &[("OPENAI_API_KEY", "k-other")][..], "k-flag"),
        (None, &[("OPENAI_API_KEY", "k-other")], "k-other"),
    ] {
        let refused = json!({"error": {"message": "wrong API key"}});
        let server = FakeServer::new(vec![status("401 Unauthorized", refused)]);
        let mut command = command(&["--url", &server.url, "m", "Hi"]);
        command.args(flag.map(|key| format!("--api-key={key}"))).envs(variables.iter().copied());
        let output = command.output().expect("it starts");
        check(&output, 1, "", "401 Unauthorized: wrong API key");
        assert!(!text(&output.stderr).contains("k-"));
        assert!(server.seen().headers.contains(&format!("Authorization: Bearer {sent}")));
    }
    let output = run(&["--url", "http://127.0.0.1:1", "--api-key", "k\u{7}secret", "m", "Hi"]);
    check(&output, 2, "", "API key");
    assert!(!text(&output.stderr).contains("secret"));
}

/// The key of the variable is not tied to a server, so it is not sent over plain HTTP, except to this
/// machine.
#[test]
fn the_variables_key_goes_nowhere_in_the_clear() {
    for (flag, sent) in [(None, None), (Some("--api-key=k-flag"), Some("Authorization: Bearer k-flag"))] {
        let server = FakeServer::new(vec![events(DONE.to_string())]);
        let url = server.url.replace("127.0.0.1", "0.0.0.0");
        let mut command = command(&["--url", &url, "m", "Hi"]);
        let output = command.args(flag).env("OPENAI_API_KEY", "k-other").output().expect("it starts");
        let note = if flag.is_none() { "OPENAI_API_KEY is not sent" } else { "" };
        check(&output, 0, "", note);
        let headers = server.seen().headers;
        let shown = headers.iter().find(|header| header.to_lowercase().starts_with("authorization"));
        assert_eq!(shown.map(String::as_str), sent);
    }
}

#[test]
fn an_answer_that_breaks_off_fails_and_what_came_stays() {
    let error = json!({"error": {"message": "the device failed"}});
    for (rest, named) in [
        (format!("data: {error}\n\ndata: [DONE]\n\n"), "the device failed"),
        (String::new(), "ended before the answer was complete"),
        ("data: {\"choices\":[{\"finish_rea".to_string(), "ended before the answer was complete"),
        ("data: oops\n\n".to_string(), "invalid JSON"),
    ] {
        let server = FakeServer::new(vec![events(text_chunk("Once") + &rest)]);
        check(&ask(&server, &[]), 1, "Once\n", named);
    }
    let chunk = text_chunk("Once");
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
    let cut: Respond = Box::new(move |stream| {
        write(stream, &format!("{head}{:x}\r\n{chunk}\r\nff\r\ndata: {{", chunk.len()));
    });
    check(&ask(&FakeServer::new(vec![cut]), &[]), 1, "Once\n", "the connection ");
}

#[test]
fn bad_usage_is_2_and_names_the_fault() {
    for (args, named) in [
        (&["--url", "localhost:1", "m", "Hi"][..], "http://"),
        (&["m", "Hi", "--temperature", "warm"], "warm"),
        (&["m", "Hi", "--stream"], "--json"),
        (&["m", ""], "empty"),
        (&["m"], "empty"),
        (&["Tell me a story"], "--prompt"),
        (&["m", "Hi", "-p", "Ho"], "--prompt"),
        (&["m", "Hi", "--raw", "--system", "x"], "--system"),
        (&["m", "Hi", "--url", "http://127.0.0.1:1", "--threads", "2"], "--threads"),
        (&["m", "Hi", "--url", "http://127.0.0.1:1", "--devices", "0;1"], "--devices"),
    ] {
        check(&run(args), 2, "", named);
    }
    check(&run(&["no/such/model", "Hi"]), 1, "", "no/such/model");
}

/// Starts the program against a server that streams until the client disconnects. Returns it with the first
/// piece of the answer.
fn halfway(form: &[&str]) -> (Child, String) {
    let endless: Respond = Box::new(|stream| {
        let chunk = text_chunk("on and on\n");
        write(stream, EVENTS);
        while write(stream, &chunk) {}
    });
    let server = FakeServer::new(vec![endless]);
    let mut child = command(&[&["--url", &server.url, "m", "Hi"], form].concat()).spawn().expect("it starts");
    let mut line = String::new();
    let mut stdout = BufReader::with_capacity(1, child.stdout.take().expect("it is piped"));
    stdout.read_line(&mut line).expect("it is text");
    child.stdout = Some(stdout.into_inner());
    (child, line)
}

#[test]
fn ctrl_c_ends_the_answer_with_130() {
    let (child, line) = halfway(&[]);
    assert_eq!(line, "on and on\n");
    signal(&child, "INT");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(130), ""));
}

/// Returns a server that reads the request, never responds, and reports when the client disconnects.
fn silent() -> (FakeServer, Receiver<()>) {
    let (sender, disconnected) = channel();
    let wait: Respond = Box::new(move |stream| {
        let _ = stream.read(&mut [0]);
        let _ = sender.send(());
    });
    (FakeServer::new(vec![wait]), disconnected)
}

#[test]
fn ctrl_c_ends_the_wait_for_an_answer_that_never_begins() {
    let (server, disconnected) = silent();
    let child = command(&["--url", &server.url, "m", "Hi"]).spawn().expect("it starts");
    server.seen();
    signal(&child, "INT");
    check(&child.wait_with_output().expect("it ends"), 130, "", "");
    disconnected.recv_timeout(PATIENCE).expect("the server has noticed");
}

/// Returns a model with a context too long for any test to reach its end.
fn endless_model(name: &str) -> Copied {
    let model = Copied::of("gqa", name);
    model.configure("max_position_embeddings", json!(40_000));
    model
}

#[test]
fn ctrl_c_ends_an_answer_of_this_process_with_130() {
    let model = endless_model("interrupted");
    let folder = model.0.display().to_string();
    let flags = "--raw --temperature 0 --max-tokens 30000 --device reference";
    let mut child = command(&[&folder, "a b c"]).args(flags.split(' ')).spawn().expect("it starts");
    let mut stdout = child.stdout.take().expect("it is piped");
    stdout.read_exact(&mut [0]).expect("the answer begins");
    signal(&child, "INT");
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).expect("what came is text");
    check(&child.wait_with_output().expect("it ends"), 130, "", "");
}

#[test]
fn ctrl_c_ends_the_loading_with_130() {
    let (hub, _disconnected) = silent();
    let mut command = command(&["hf:owner/name", "Hi"]);
    let child = command
        .env("HF_ENDPOINT", &hub.url)
        .env("HF_HOME", env!("CARGO_TARGET_TMPDIR"))
        .spawn()
        .expect("it starts");
    hub.seen();
    signal(&child, "INT");
    check(&child.wait_with_output().expect("it ends"), 130, "", "");
}

#[test]
fn a_closed_standard_output_ends_it_quietly() {
    for form in [&[][..], &["--json", "--stream"]] {
        let (mut child, _) = halfway(form);
        drop(child.stdout.take());
        let output = child.wait_with_output().expect("it ends");
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""));
    }
}

/// A streaming server notices a disconnected client with its next write.
#[actix::test]
async fn dropping_an_answer_hangs_up() {
    let (sender, disconnected) = tokio::sync::oneshot::channel();
    let endless: Respond = Box::new(|stream| {
        write(stream, EVENTS);
        while write(stream, &text_chunk("on and on")) {}
        let _ = sender.send(());
    });
    let server = FakeServer::new(vec![endless]);
    let remote = Remote::new(server.url.parse().expect("it is a URL"), None);
    let reply = within(remote.post("/v1/chat/completions", &json!({}))).await.expect("it answers");
    let Reply::Events(mut events) = reply else { panic!("the answer comes as events") };
    assert!(within(events.next()).await.expect("there is more").is_ok());
    drop(events);
    within(disconnected).await.expect("the server has noticed");
}

/// A server that has not started to respond notices a disconnected client when it does.
#[actix::test]
async fn dropping_an_answer_before_it_begins_hangs_up_when_it_does() {
    let (begin, begun) = channel();
    let (sender, disconnected) = tokio::sync::oneshot::channel();
    let late: Respond = Box::new(move |stream| {
        let _ = begun.recv();
        write(stream, EVENTS);
        while write(stream, &text_chunk("on and on")) {}
        let _ = sender.send(());
    });
    let server = FakeServer::new(vec![late]);
    let remote = Remote::new(server.url.parse().expect("it is a URL"), None);
    let body = json!({});
    let mut asking = remote.post("/v1/chat/completions", &body);
    assert!(tokio::time::timeout(Duration::ZERO, &mut asking).await.is_err());
    server.seen();
    drop(asking);
    begin.send(()).expect("the server waits");
    within(disconnected).await.expect("the server has noticed");
}

/// Metrics are not recorded without a server. A process has at most one recorder, so a successful
/// installation shows that there was none.
#[test]
fn the_api_within_this_process_installs_no_recorder() {
    const ITSELF: &str = "run::the_api_within_this_process_installs_no_recorder";
    if std::env::var_os("ALONE").is_none() {
        return again(ITSELF, &[("ALONE", "1")]);
    }
    actix::System::new().block_on(async {
        let engine = crate::common::engine("gqa", &[]).await;
        let config = crate::common::config(&fixture("gqa"), &[]).server;
        let local = LocalApi::new(ServeParts::from(&engine), config);
        let answer = within(local.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 2}))).await;
        assert!(matches!(answer, Ok(ResponseBody::Json(_))));
        engine.stop();
    });
    assert!(metrics::set_global_recorder(metrics::NoopRecorder).is_ok());
}

/// A configured chat template is used for a model without one; an invalid one is refused by name.
#[test]
fn the_configured_template_makes_the_prompt() {
    let model = Copied::of("mha", "template");
    let (folder, template) = (model.0.display().to_string(), model.file("mine.jinja"));
    let flags = "--temperature 0 --max-tokens 8 --threads 2";
    let answer_with = |prompt: &str, more: &[&str]| {
        command(&[&folder, prompt]).args(flags.split(' ')).args(more).output().expect("it starts")
    };
    let named = template.display().to_string();
    check(&answer_with("a b c", &["--chat-template", &named]), 1, "", &format!("cannot read {named}"));
    std::fs::write(&template, "{{ bos_token }}the {{ messages[0].content }} rain")
        .expect("it can be written");
    let raw = answer_with("the a b c rain", &["--raw"]);
    assert!(!raw.stdout.is_empty());
    check(&answer_with("a b c", &["--chat-template", &named]), 0, text(&raw.stdout), "");
    std::fs::write(&template, "{{ messages[").expect("it can be written");
    check(&answer_with("a b c", &["--chat-template", &named]), 1, "", &named);
}

/// The environment and files override the log level that `run` sets.
#[test]
fn the_log_is_as_quiet_as_its_level() {
    let model = fixture("gqa").display().to_string();
    let args = [&model, "a", "--raw", "--max-tokens", "2", "--threads", "1"];
    let log = |variables: &[(&str, &str)]| {
        let output = command(&args).envs(variables.iter().copied()).output().expect("it starts");
        assert_eq!(output.status.code(), Some(0));
        text(&output.stderr).to_owned()
    };
    assert_eq!(log(&[]), "");
    assert!(log(&[("MAINSTEM_LOG_LEVEL", "info")]).contains("INFO"));
}

#[test]
fn a_model_in_this_process_answers_the_same_in_every_form() {
    let model = fixture("mha").display().to_string();
    let args = |more: &[&'static str]| {
        let args = [&model, "a b c", "--temperature", "0", "--max-tokens", "8", "--threads", "2"];
        args.iter()
            .map(|arg| arg.to_string())
            .chain(more.iter().map(|arg| arg.to_string()))
            .collect::<Vec<_>>()
    };
    let run = |more: &[&'static str]| {
        let args = args(more);
        run(&args.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let whole = run(&["--raw", "--json"]);
    let object: Value = serde_json::from_slice(&whole.stdout).expect("it is one object");
    let answer = object["choices"][0]["text"].as_str().expect("it has a text");
    assert!(!answer.is_empty());
    assert_eq!(object["usage"]["completion_tokens"], 8);
    check(&run(&["--raw"]), 0, &format!("{answer}\n"), "");
    // This model has no chat template.
    check(&run(&["--stats"]), 0, &format!("{answer}\n"), "no chat template");
    let refused = run(&["--raw", "--top-p", "7"]);
    check(&refused, 1, "", "top_p");
}

/// The engine of `run` has a slot for each beam that is set.
#[test]
fn beam_searches_are_set_like_other_parameters() {
    let search = ["run", "demo", "Once upon a time", "--raw", "--json", "--max-tokens", "6"];
    let output =
        mainstem().args(search).args(["--set", "beam_width=3", "--set", "early-stopping=never"]).output();
    let output = output.expect("the program starts");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let answer: Value = serde_json::from_slice(&output.stdout).expect("it is JSON");
    let choice = &answer["choices"][0];
    assert!(choice["beam_score"].as_f64() < Some(0.0) && choice["text"] != "", "{answer}");
}
