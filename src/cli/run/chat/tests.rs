//! Scripted conversations: given the user's input and the server's answers, the tests check the requests and
//! the output.

use super::super::client::{Chunk, Delivery};
use super::super::settings::SamplingSettings;
use super::super::transport::{Failure, Reply, Transport};
use super::PromptMark::Continued;
use super::*;
use crate::testing::Scratch;
use actix_web::web::Bytes;
use futures_util::future::LocalBoxFuture;
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::pending;
use std::rc::Rc;
use tokio::sync::Notify;

/// An event while an answer arrives.
#[derive(Clone)]
enum Event {
    Text(&'static str),
    Reasoning(&'static str),
    /// A call of a tool: its index, name and arguments.
    Call(u32, &'static str, &'static str),
    /// The user presses Ctrl-C before the server has finished.
    Interrupt,
    /// The server's last event and the end of the stream.
    Done(&'static str),
    Error(&'static str),
    /// The connection ends.
    Cut,
}
use Event::{Call, Cut, Done, Interrupt, Reasoning, Text};

/// Requests that the server received: path and body.
type ReceivedRequests = Rc<RefCell<Vec<(String, Value)>>>;

struct ScriptedServer {
    answers: RefCell<VecDeque<Result<Vec<Event>, Failure>>>,
    received: ReceivedRequests,
    interrupt: Rc<Notify>,
}

fn sse(value: Value) -> Bytes {
    format!("data: {value}\n\n").into()
}

async fn bytes(event: Event, interrupt: Rc<Notify>) -> Result<Bytes, Failure> {
    match event {
        Text(text) => Ok(sse(json!({"choices": [{"delta": {"content": text}, "text": text}]}))),
        Reasoning(text) => Ok(sse(json!({"choices": [{"delta": {"reasoning_content": text}}]}))),
        Call(index, name, arguments) => {
            let function = json!({"name": name, "arguments": arguments});
            let id = format!("call-{name}");
            let call = json!({"index": index, "id": id, "type": "function", "function": function});
            Ok(sse(json!({"choices": [{"delta": {"tool_calls": [call]}}]})))
        }
        Done(reason) => {
            let last = json!({"choices": [{"delta": {}, "finish_reason": reason}]});
            let details = json!({"cached_tokens": 5});
            let usage = json!({"completion_tokens": 7, "prompt_tokens_details": details});
            let usage = json!({"choices": [], "usage": usage});
            Ok([sse(last), sse(usage), "data: [DONE]\n\n".into()].concat().into())
        }
        Event::Error(message) => Ok(sse(json!({"error": {"message": message}}))),
        Cut => Err(Failure::new("the connection broke")),
        Interrupt => {
            interrupt.notify_one();
            pending().await
        }
    }
}

impl Transport for ScriptedServer {
    fn post<'a>(&'a self, path: &'a str, body: &'a Value) -> LocalBoxFuture<'a, Result<Reply, Failure>> {
        self.received.borrow_mut().push((path.to_string(), body.clone()));
        let answer = self.answers.borrow_mut().pop_front().expect("the script has an answer");
        let interrupt = self.interrupt.clone();
        let reply = answer.map(|events| {
            let events = stream::iter(events).then(move |event| bytes(event, interrupt.clone()));
            Reply::Events(events.boxed_local())
        });
        Box::pin(async { reply })
    }
}

#[derive(Default)]
struct ScriptedUser {
    inputs: VecDeque<Input>,
    marks: Vec<PromptMark>,
    entries: Vec<String>,
    shown: String,
    notes: Vec<String>,
    interrupt: Rc<Notify>,
}

impl Screen for ScriptedUser {
    fn show(&mut self, chunk: &Chunk) -> io::Result<()> {
        self.shown += &chunk.text;
        Ok(())
    }

    fn note(&mut self, text: &str) {
        self.notes.push(text.to_string());
    }

    fn interrupted(&mut self) -> LocalBoxFuture<'_, ()> {
        Box::pin(self.interrupt.notified())
    }
}

impl Console for ScriptedUser {
    fn read(&mut self, mark: PromptMark) -> io::Result<Input> {
        self.marks.push(mark);
        Ok(self.inputs.pop_front().unwrap_or(Input::End))
    }

    fn remember(&mut self, entry: &str) {
        self.entries.push(entry.to_string());
    }

    fn end_answer(&mut self, _: &str) -> io::Result<()> {
        self.shown += "\n";
        Ok(())
    }
}

/// Runs a conversation to its end; returns the requests and the user's view.
async fn run_chat(
    inputs: Vec<Input>,
    answers: Vec<Result<Vec<Event>, Failure>>,
) -> (Vec<(String, Value)>, ScriptedUser) {
    let mut user = ScriptedUser { inputs: inputs.into(), ..ScriptedUser::default() };
    let requests = ReceivedRequests::default();
    let server = ScriptedServer {
        answers: RefCell::new(answers.into()),
        received: requests.clone(),
        interrupt: user.interrupt.clone(),
    };
    let client = Client {
        transport: Box::new(server),
        model: Some("m".to_string()),
        dialect: Dialect::Chat,
        delivery: Delivery::Stream,
        settings: SamplingSettings::default(),
    };
    let dialog = Dialog::default();
    Chat { client, dialog, console: &mut user, stats: false, reasoning: false }
        .run()
        .await
        .expect("the user stays");
    let requests = requests.borrow().clone();
    (requests, user)
}

fn lines(lines: &[&str]) -> Vec<Input> {
    lines.iter().map(|line| Input::Line(line.to_string())).collect()
}

/// The messages of a request, as "role: content".
fn messages((path, body): &(String, Value)) -> Vec<String> {
    assert_eq!(path, "/v1/chat/completions");
    let text = |value: &Value| value.as_str().expect("it is a text").to_string();
    let messages = body["messages"].as_array().expect("there are messages");
    messages.iter().map(|m| format!("{}: {}", text(&m["role"]), text(&m["content"]))).collect()
}

#[actix::test]
async fn the_conversation_so_far_is_sent_with_each_question() {
    let answers =
        vec![Ok(vec![Text("Hello"), Text("."), Done("stop")]), Ok(vec![Text("Bye."), Done("length")])];
    let (requests, user) = run_chat(lines(&["Hi", "", "  ", "So long"]), answers).await;
    assert_eq!(messages(&requests[0]), ["user: Hi"]);
    assert_eq!(messages(&requests[1]), ["user: Hi", "assistant: Hello.", "user: So long"]);
    assert_eq!(requests.len(), 2, "empty lines are no questions");
    assert_eq!(requests[0].1["stream_options"], json!({"include_usage": true}));
    assert_eq!(user.shown, "Hello.\nBye.\n");
    assert!(user.notes[0].contains("maximum number of tokens"), "{:?}", user.notes);
}

/// Reasoning is shown if the user wants it, and is no part of the answer that later requests contain.
#[actix::test]
async fn reasoning_is_folded_or_shown_and_not_sent_back() {
    let first = vec![Reasoning("Hm"), Reasoning("."), Text("Yes"), Text("."), Done("stop")];
    let answers = || vec![Ok(first.clone()), Ok(vec![Text("ok"), Done("stop")])];
    let (requests, user) = run_chat(lines(&["/reasoning on", "Is it?", "Sure?"]), answers()).await;
    assert_eq!(messages(&requests[1]), ["user: Is it?", "assistant: Yes.", "user: Sure?"]);
    assert_eq!((user.shown.as_str(), user.notes.len()), ("Hm.\n\nYes.\nok\n", 0));
    let (requests, user) = run_chat(lines(&["Is it?", "Sure?"]), answers()).await;
    assert_eq!(messages(&requests[1]), ["user: Is it?", "assistant: Yes.", "user: Sure?"]);
    assert_eq!(user.shown, "Yes.\nok\n");
    assert!(user.notes.len() == 1 && user.notes[0].contains("/reasoning on"), "{:?}", user.notes);
}

const TOOLS: &str = r#"/set tools [{"type": "function", "function": {"name": "add"}}]"#;

/// The user gives the results of calls, which go on with the answer, stay in the conversation, and are saved.
#[actix::test]
async fn the_results_of_tools_go_back_to_the_model() {
    let folder = Scratch::new();
    let file = folder.path().join("chat.json").display().to_string();
    let (save, load) = (format!("/save {file}"), format!("/load {file}"));
    let calls = vec![Text("Wait."), Call(0, "add", "{\"a\":1}"), Call(1, "sub", "{}"), Done("tool_calls")];
    let answer = |text| Ok(vec![Text(text), Done("stop")]);
    let inputs = lines(&[
        TOOLS, "/tools", "Sum?", "3", "\"\"\"", "/no", "\"\"\"", "And?", &save, "/clear", &load, "Then?",
    ]);
    let (requests, user) =
        run_chat(inputs, vec![Ok(calls), answer("It is 3."), answer("Yes."), answer("No.")]).await;
    assert_eq!(requests[0].1["tools"][0]["function"]["name"], "add");
    let function = |name: &str, arguments: &str| {
        json!({"id": format!("call-{name}"), "type": "function",
               "function": {"name": name, "arguments": arguments}})
    };
    let round = json!([
        {"role": "user", "content": "Sum?"},
        {"role": "assistant", "content": "Wait.",
         "tool_calls": [function("add", "{\"a\":1}"), function("sub", "{}")]},
        {"role": "tool", "tool_call_id": "call-add", "content": "3"},
        {"role": "tool", "tool_call_id": "call-sub", "content": "/no"},
    ]);
    let round = round.as_array().unwrap();
    let sent = |at: usize| requests[at].1["messages"].as_array().unwrap().clone();
    assert_eq!(&sent(1), round);
    assert_eq!(&sent(2)[..4], round);
    assert_eq!(sent(2)[4], json!({"role": "assistant", "content": "It is 3."}));
    assert_eq!(&sent(3)[..6], &sent(2)[..], "what was saved and loaded is the same");
    assert_eq!(&user.notes[..3], ["add", "tool call: add({\"a\":1})", "tool call: sub({})"]);
    assert_eq!(user.shown, "Wait.\nIt is 3.\nYes.\nNo.\n");
    assert_eq!(user.marks[3..7], [PromptMark::Result, PromptMark::Result, Continued, Continued]);
}

/// Results that the user entered are sent again after a failure.
#[actix::test]
async fn results_are_kept_if_the_answer_to_them_fails() {
    let calls = Ok(vec![Call(0, "add", "{}"), Done("tool_calls")]);
    let answer = Ok(vec![Text("3"), Done("stop")]);
    let inputs = lines(&[TOOLS, "Sum?", "3", "/retry", "And?"]);
    let end = Ok(vec![Done("stop")]);
    let (requests, _) = run_chat(inputs, vec![calls, Ok(vec![Cut]), answer, end]).await;
    assert_eq!(requests[1].1["messages"].as_array().unwrap().len(), 3);
    assert_eq!(requests[2].1["messages"], requests[1].1["messages"]);
    assert_eq!(requests[3].1["messages"][3], json!({"role": "assistant", "content": "3"}));
}

/// Without a result, what the model wrote before the calls is the answer.
#[actix::test]
async fn calls_without_a_result_are_left_out() {
    let calls = |text| Ok(vec![Text(text), Call(0, "add", "{}"), Done("tool_calls")]);
    let answer = Ok(vec![Text("ok"), Done("stop")]);
    let mut inputs = lines(&["/tools", TOOLS, "One?", "", "Two?"]);
    inputs.push(Input::Interrupt);
    inputs.extend(lines(&["Three?"]));
    let (requests, user) = run_chat(inputs, vec![calls("Wait."), calls(""), answer]).await;
    assert!(user.notes[0].contains("/set tools FILE"), "{:?}", user.notes);
    assert_eq!(messages(&requests[2]), ["user: One?", "assistant: Wait.", "user: Three?"]);
    assert_eq!(user.notes.iter().filter(|note| note.contains("left out")).count(), 2);
}

/// Completions know no tools: the refusal says so, and nothing is asked without them.
#[actix::test]
async fn a_model_without_a_template_gets_no_tools() {
    let refused = Failure::from_body(json!({"error": {"message": "sorry", "code": "no_chat_template"}}));
    let (requests, user) = run_chat(lines(&[TOOLS, "One?"]), vec![Err(refused)]).await;
    assert_eq!((requests.len(), user.notes.as_slice()), (1, &["error: sorry".to_owned()][..]));
}

#[actix::test]
async fn lines_in_quotes_are_one_question() {
    let inputs = lines(&["\"\"\"", "/clear", "  b\\", "\"\"\"", "\"\"\"one\"\"\"", "x \"\"\" y"]);
    let answers = || (0..3).map(|_| Ok(vec![Text("ok"), Done("stop")])).collect();
    let (requests, user) = run_chat(inputs, answers()).await;
    let questions: Vec<_> = requests.iter().map(|request| messages(request).pop().unwrap()).collect();
    assert_eq!(questions, ["user: /clear\n  b\\", "user: one", "user: x \"\"\" y"]);
    assert_eq!(&user.marks[..4], [PromptMark::Question, Continued, Continued, Continued]);
    // Ctrl-C gives up what is not ended.
    let inputs = [lines(&["\"\"\"a"]), vec![Input::Interrupt], lines(&["b"])].concat();
    let (requests, _) = run_chat(inputs, answers()).await;
    assert_eq!(messages(&requests[0]), ["user: b"]);
}

#[actix::test]
async fn a_saved_conversation_goes_on_when_it_is_loaded() {
    let folder = Scratch::new();
    let file = folder.path().join("chat.json").display().to_string();
    let (save, load) = (format!("/save {file}"), format!("/load {file}"));
    let answer = |text| Ok(vec![Text(text), Done("stop")]);
    let (_, user) = run_chat(lines(&["/system Be brief", "Hi", &save]), vec![answer("Hello")]).await;
    assert_eq!(user.notes, [format!("saved in {file}")]);
    let inputs = lines(&["other", "/load none.json", &load, "Bye"]);
    let (requests, user) = run_chat(inputs, vec![answer("x"), answer("y")]).await;
    assert!(user.notes[0].contains("none.json"), "{:?}", user.notes);
    let expected = ["system: Be brief", "user: Hi", "assistant: Hello", "user: Bye"];
    assert_eq!(messages(&requests[1]), expected);
}

#[actix::test]
async fn the_received_part_of_an_interrupted_answer_is_kept() {
    let answers = vec![Ok(vec![Text("Once "), Text("upon"), Interrupt]), Ok(vec![Text("ok"), Done("stop")])];
    let (requests, user) = run_chat(lines(&["A story", "Go on"]), answers).await;
    assert_eq!(messages(&requests[1]), ["user: A story", "assistant: Once upon", "user: Go on"]);
    assert_eq!(
        (user.shown.as_str(), user.notes.as_slice()),
        ("Once upon\nok\n", &["(stopped)".to_string()][..])
    );
}

/// An encoder-decoder gets completion requests, one per line; any other refusal is an error.
#[actix::test]
async fn an_encoder_decoder_gets_completion_requests() {
    let refusal = |right: &str| {
        let message = format!("/v1/chat/completions is not supported by the model 'm': use {right}");
        Failure::from_body(json!({"error": {"code": "wrong_endpoint", "message": message}}))
    };
    let answers = vec![
        Err(refusal("/v1/completions")),
        Ok(vec![Text("eins"), Done("stop")]),
        Ok(vec![Text("zwei"), Done("stop")]),
    ];
    let (requests, user) = run_chat(lines(&["one", "two"]), answers).await;
    let requests: Vec<_> =
        requests[1..].iter().map(|(path, body)| (path.as_str(), &body["prompt"])).collect();
    assert_eq!(requests, [("/v1/completions", &json!("one")), ("/v1/completions", &json!("two"))]);
    assert!(user.notes.len() == 1 && user.notes[0].contains("encoder-decoder"), "{:?}", user.notes);
    assert_eq!(user.shown, "eins\nzwei\n");

    let (requests, user) = run_chat(lines(&["one"]), vec![Err(refusal("/v1/embeddings"))]).await;
    assert!(requests.len() == 1 && user.notes[0].contains("/v1/embeddings"), "{:?}", user.notes);
}

#[actix::test]
async fn a_question_without_any_answer_is_not_repeated() {
    let refused = Failure::from_body(json!({"error": {"message": "too long: 9 of 8 tokens"}}));
    let answers = vec![
        Ok(vec![Interrupt]),
        Err(refused),
        Ok(vec![Text("half"), Event::Error("the device failed")]),
        Ok(vec![Text("less"), Cut]),
        Ok(vec![Done("stop")]),
    ];
    let (requests, user) = run_chat(lines(&["one", "two", "three", "four", "five"]), answers).await;
    let expected = ["user: three", "assistant: half", "user: four", "assistant: less", "user: five"];
    assert_eq!(messages(&requests[4]), expected);
    let errors = ["too long: 9 of 8 tokens", "the device failed", "the connection broke"];
    assert_eq!(user.notes[0], "(stopped)");
    assert_eq!(user.notes[1..], errors.map(|error| format!("error: {error}")));
}

#[actix::test]
async fn commands_change_what_is_sent() {
    let answer = |text| Ok(vec![Text(text), Done("stop")]);
    let inputs = lines(&[
        "/retry",
        "/system Be brief.",
        "/set temperature 0",
        "/set seed 3",
        "one",
        "/retry",
        "two",
        "/regenerate",
        "/clear",
        "/set seed default",
        "three",
        "/system",
        "four",
        "/exit",
        "never",
    ]);
    let answers = ["1", "1'", "2", "2'", "3", "4"].map(answer).into();
    let (requests, user) = run_chat(inputs, answers).await;
    assert!(user.notes[0].contains("no question to retry"));
    assert_eq!(messages(&requests[0]), ["system: Be brief.", "user: one"]);
    assert_eq!(messages(&requests[1]), messages(&requests[0]));
    assert_eq!(messages(&requests[2]), ["system: Be brief.", "user: one", "assistant: 1'", "user: two"]);
    assert_eq!(messages(&requests[3]), messages(&requests[2]));
    assert_eq!(messages(&requests[4]), ["system: Be brief.", "user: three"]);
    assert_eq!(messages(&requests[5]), ["user: three", "assistant: 3", "user: four"]);
    assert_eq!((&requests[0].1["temperature"], &requests[0].1["seed"]), (&json!(0.0), &json!(3)));
    assert_eq!((&requests[4].1["temperature"], &requests[4].1["seed"]), (&json!(0.0), &Value::Null));
    assert_eq!(requests.len(), 6, "nothing comes after /exit");
}

/// A retry without an answer keeps the earlier answer.
#[actix::test]
async fn a_retry_without_an_answer_keeps_the_old_one() {
    let answers = vec![
        Ok(vec![Text("1"), Done("stop")]),
        Err(Failure::new("busy")),
        Ok(vec![Interrupt]),
        Ok(vec![Cut]),
        Ok(vec![Text("2"), Done("stop")]),
    ];
    let (requests, _) = run_chat(lines(&["one", "/retry", "/retry", "/retry", "two"]), answers).await;
    assert_eq!(messages(&requests[3]), ["user: one"]);
    assert_eq!(messages(&requests[4]), ["user: one", "assistant: 1", "user: two"]);
}

#[actix::test]
async fn an_unknown_command_is_reported_and_not_sent() {
    let inputs = lines(&[
        "/frobnicate",
        "/set heat 1",
        "/set temperature warm",
        "/set top_k",
        "/stats maybe",
        "/help",
    ]);
    let (requests, user) = run_chat(inputs, vec![]).await;
    assert!(requests.is_empty());
    for (note, named) in
        user.notes.iter().zip(["/frobnicate", "heat", "warm", "top_k VALUE", "/stats", "/retry"])
    {
        assert!(note.contains(named), "{note}");
    }
    assert_eq!(user.notes.len(), 6);
    let (requests, _) = run_chat(lines(&[" /etc/passwd"]), vec![Ok(vec![Done("stop")])]).await;
    assert_eq!(messages(&requests[0]), ["user:  /etc/passwd"]);
}

#[actix::test]
async fn a_backslash_continues_the_line() {
    let inputs = lines(&["first\\", "second\\", "third"]);
    let (requests, user) = run_chat(inputs, vec![Ok(vec![Done("stop")])]).await;
    assert_eq!(messages(&requests[0]), ["user: first\nsecond\nthird"]);
    assert_eq!(user.marks[..3], [PromptMark::Question, PromptMark::Continued, PromptMark::Continued]);
    assert_eq!(user.entries, ["first\nsecond\nthird"]);
}

#[actix::test]
async fn ctrl_c_at_the_prompt_hints_and_drops_what_was_begun() {
    let mut inputs = lines(&["begun\\"]);
    inputs.push(Input::Interrupt);
    inputs.extend(lines(&["whole"]));
    let (requests, user) = run_chat(inputs, vec![Ok(vec![Done("stop")])]).await;
    assert_eq!(messages(&requests[0]), ["user: whole"]);
    assert_eq!(user.notes, [HINT]);
}

#[actix::test]
async fn stats_are_shown_if_enabled() {
    let answer = || Ok(vec![Text("a"), Done("stop")]);
    let inputs = lines(&["/stats on", "one", "/stats off", "two"]);
    let (_, user) = run_chat(inputs, vec![answer(), answer()]).await;
    assert_eq!(user.notes.len(), 1, "{:?}", user.notes);
    assert!(user.notes[0].starts_with("7 tokens, "), "{:?}", user.notes);
    assert!(user.notes[0].ends_with(", 5 prompt tokens cached"), "{:?}", user.notes);
}

#[actix::test]
async fn a_model_without_a_template_completes_and_says_so_once() {
    let refused = Failure::from_body(json!({"error": {"message": "sorry", "code": "no_chat_template"}}));
    let answers = vec![Err(refused), Ok(vec![Text(" a time"), Done("length")]), Ok(vec![Done("stop")])];
    let (requests, user) = run_chat(lines(&["Once upon", "/system Be brief.", "The end"]), answers).await;
    let paths: Vec<_> = requests.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(paths, ["/v1/chat/completions", "/v1/completions", "/v1/completions"]);
    assert_eq!(
        (&requests[1].1["prompt"], &requests[2].1["prompt"]),
        (&json!("Once upon"), &json!("The end"))
    );
    assert_eq!(requests[1].1["max_tokens"], json!(128));
    assert_eq!(user.notes.iter().filter(|note| note.contains("no chat template")).count(), 1);
}
