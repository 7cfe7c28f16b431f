//! A request body, posted to any endpoint of a model of any kind, and answered with some tokens. The first
//! byte chooses model and endpoint, the second one the length of the answer, which follows.

#![no_main]

use mainstem_fuzz::engine::Apis;

mainstem_fuzz::target!(parse);

std::thread_local! {
    static APIS: Apis = Apis::new();
}

/// Maximum length of the answer.
const ANSWER: usize = 24;

fn parse(bytes: &[u8]) {
    let [choice, length, rest @ ..] = bytes else { return };
    let Some((answer, body)) = rest.split_at_checked(*length as usize % ANSWER) else { return };
    APIS.with(|apis| apis.post(*choice, body, answer));
}
