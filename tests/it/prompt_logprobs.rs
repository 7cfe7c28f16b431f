//! Log-probabilities and ranks of prompts: compared with the whole distribution of a position, and between
//! the APIs that report them.

use crate::common::{complete, complete_all, config, engine, fixture, greedy, prompt};
use mainstem::actors::engine::Engine;
use mainstem::cli::start;
use mainstem::request::Request;
use mainstem::server::{LocalApi, ResponseBody, ServeParts};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn scored(tokens: &[u32], top: u8) -> Request {
    Request { prompt_logprobs: Some(top), ..greedy(tokens, 0) }
}

/// Returns the log-probability of each token of the vocabulary after `tokens`, each from a prompt of its own.
async fn distribution(engine: &Engine, tokens: &[u32]) -> Vec<f32> {
    let prompts = (0..engine.model.vocab as u32).map(|next| [tokens, &[next]].concat());
    let outcomes = complete_all(engine, prompts.map(|prompt| scored(&prompt, 0))).await;
    let last = outcomes.iter().map(|outcome| outcome.prompt.last().expect("the prompt has tokens"));
    last.map(|token| token.logprob.expect("it is not the first")).collect()
}

/// The log-probabilities of a position are a distribution, of which a token's rank and the most likely tokens
/// follow.
#[actix::test]
async fn ranks_count_the_whole_vocabulary() {
    for (device, positions) in [("cpu", &[1, 2, 9, 17][..]), ("reference", &[6])] {
        let settings = [("device.kind", device.into()), ("scheduler.max_waiting", 512.into())];
        let engine = engine("gqa", &settings).await;
        let prompt = prompt(7, 18);
        let outcome = complete(&engine, scored(&prompt, 5)).await;
        assert_eq!((outcome.prompt[0].logprob, outcome.prompt[0].rank), (None, None));
        for &at in positions {
            let (all, token) = (distribution(&engine, &prompt[..at]).await, &outcome.prompt[at]);
            let total: f64 = all.iter().map(|logprob| f64::from(*logprob).exp()).sum();
            assert!((total - 1.0).abs() < 1e-4, "{device}, {at}: {total}");
            let mut order: Vec<u32> = (0..all.len() as u32).collect();
            order.sort_by(|a, b| all[*b as usize].total_cmp(&all[*a as usize]));
            let rank = 1 + order.iter().position(|id| *id == prompt[at]).expect("it is in the vocabulary");
            let what = format!("{device}, {at}: {token:?}");
            assert_eq!(
                (token.logprob, token.rank),
                (Some(all[prompt[at] as usize]), Some(rank as u32)),
                "{what}"
            );
            let likely: Vec<_> = order[..5].iter().map(|id| (*id, all[*id as usize])).collect();
            assert_eq!(token.top, likely, "{what}");
        }
        engine.stop();
    }
}

async fn post(local: &LocalApi, path: &str, body: Value) -> Value {
    match local.post(path, &body).await.unwrap_or_else(|error| panic!("{path} {body}: {error}")) {
        ResponseBody::Json(bytes) => serde_json::from_slice(&bytes).expect("it is JSON"),
        ResponseBody::Events(_) => panic!("nothing was to be streamed"),
    }
}

/// `prompt_logprobs` are those of `echo` with `logprobs`, and a chat's are those of its rendered prompt. The
/// numbers asked for are independent.
#[actix::test]
async fn apis_agree_on_the_log_probabilities_of_a_prompt() {
    let template = fixture("chat/chatml.jinja").display().to_string();
    let settings = [("scheduler.token_budget", 16.into()), ("model.chat_template", template.into())];
    let config = config(&fixture("gqa"), &settings);
    let engine = start::start_engine(&config).await.expect("the fixture loads");
    let local = LocalApi::new(ServeParts::from(&engine), config.server);
    let messages = json!([{ "role": "user", "content": "Wide?" }]);
    let body = json!({
        "messages": messages, "max_tokens": 2, "n": 2, "prompt_logprobs": 3, "return_token_ids": true
    });
    let chat = post(&local, CHAT, body).await;
    let prompt = &chat["choices"][1]["prompt_token_ids"];
    let of_chat = chat["prompt_logprobs"].as_array().expect("a list");
    assert_eq!(of_chat.len(), prompt.as_array().expect("a list").len());

    for (logprobs, top) in [(json!(5), 3), (json!(1), 3), (json!(3), 0), (Value::Null, 3)] {
        let body = json!({
            "prompt": prompt, "max_tokens": 0, "echo": true, "logprobs": logprobs, "prompt_logprobs": top
        });
        let completion = post(&local, COMPLETIONS, body).await["choices"][0].take();
        let scores = completion["prompt_logprobs"].as_array().expect("a list");
        if top == 3 {
            assert_eq!(scores, of_chat);
        }
        assert_eq!((scores.len(), &scores[0]), (of_chat.len(), &Value::Null));
        for (at, score) in scores.iter().enumerate().skip(1) {
            let own = &score[prompt[at].to_string()];
            assert!(own["rank"].as_u64() >= Some(1), "{score}");
            assert!((1..=top + 1).contains(&score.as_object().expect("an object").len()), "{score}");
            if let Some(logprobs) = logprobs.as_u64() {
                let echoed = &completion["logprobs"];
                assert_eq!(own["logprob"], echoed["token_logprobs"][at]);
                let listed = echoed["top_logprobs"][at].as_object().expect("an object").len();
                assert!(listed <= logprobs as usize + 1, "{echoed}");
            }
        }
    }
    engine.stop();
}

/// A prompt is scored as a whole, whatever is cached; and what is cached belongs to a salt.
#[actix::test]
async fn scores_do_not_depend_on_cached_pages_and_pages_have_a_salt() {
    let config = config(&fixture("gqa"), &[]);
    let engine = start::start_engine(&config).await.expect("the fixture loads");
    let local = LocalApi::new(ServeParts::from(&engine), config.server);
    let prompt = prompt(3, 100);
    let scores = async || {
        let body = json!({ "prompt": prompt, "max_tokens": 3, "prompt_logprobs": 2, "temperature": 0 });
        let mut response = post(&local, COMPLETIONS, body).await;
        assert_eq!(response["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
        response["choices"].take()
    };
    let cached = async |salt: Option<&str>| {
        let body = json!({ "prompt": prompt, "max_tokens": 1, "cache_salt": salt });
        let usage = &post(&local, COMPLETIONS, body).await["usage"];
        usage["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number")
    };
    let first = scores().await;
    // The last token is computed for its logits.
    assert_eq!(cached(None).await, 99);
    assert!(scores().await == first, "bits and answer are the same");
    for salt in ["a", "b"] {
        assert_eq!((cached(Some(salt)).await, cached(Some(salt)).await), (0, 99), "{salt}");
    }
    engine.stop();
}
