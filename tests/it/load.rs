//! Tests of many requests on few slots with clients that disconnect: correct tokens, and all resources are
//! released.

use crate::common::{all_home, complete, engine, greedy, outcome, prompt, sampled, submit, within};
use mainstem::actors::{Engine, TokenStream};
use mainstem::request::{FinishReason, Request, TokenEvent};

const REQUESTS: usize = 200;
const SLOTS: usize = 4;

fn request(number: usize) -> Request {
    let prompt = prompt(number, 1 + number * 13 % 70);
    let max_tokens = 1 + (number * 7 % 30) as u32;
    match number % 2 {
        0 => greedy(&prompt, max_tokens),
        _ => sampled(&prompt, max_tokens, number as u64),
    }
}

/// Reads `events` events and hangs up.
async fn hang_up_after(mut stream: TokenStream, events: usize) {
    for _ in 0..events {
        match within(stream.next()).await {
            Some(TokenEvent::Started { .. } | TokenEvent::Token(_) | TokenEvent::EndToken(_)) => {}
            _ => return,
        }
    }
}

/// Every seventh client disconnects: at once (while queued), or after a few tokens (while decoding).
async fn serve_them_all(engine: &Engine) {
    let mut readers = Vec::new();
    for number in 0..REQUESTS {
        let stream = submit(engine, request(number)).await.expect("there is room to wait");
        readers.push(actix::spawn(async move {
            match number % 7 {
                6 => {
                    hang_up_after(stream, number % 3).await;
                    None
                }
                _ => Some((number, outcome(stream).await)),
            }
        }));
    }
    let mut outcomes = Vec::new();
    for reader in readers {
        outcomes.extend(reader.await.expect("no reader panics"));
    }
    all_home(engine, SLOTS).await;
    for (number, outcome) in outcomes {
        let alone = complete(engine, request(number)).await;
        assert_eq!(outcome.end, Some(Ok(FinishReason::Length)), "request {number}");
        assert_eq!(outcome.ids(), alone.ids(), "request {number}");
        assert_eq!(outcome.tokens.len(), request(number).max_tokens as usize);
    }
    all_home(engine, SLOTS).await;
}

#[actix::test]
async fn two_hundred_requests_on_four_slots_with_every_seventh_client_disconnected() {
    // Pages are scarce too: four sequences of maximum length do not fit.
    let settings = [
        ("scheduler.max_waiting", (REQUESTS as i64).into()),
        ("scheduler.token_budget", 24.into()),
        ("kv.size", "320 tokens".into()),
    ];
    let engine = engine("gqa", &settings).await;
    serve_them_all(&engine).await;
    engine.stop();
}

#[actix::test]
async fn and_with_the_shuffle_off() {
    let settings = [("scheduler.max_waiting", (REQUESTS as i64).into()), ("scheduler.shuffle", "off".into())];
    let engine = engine("tied", &settings).await;
    serve_them_all(&engine).await;
    engine.stop();
}
