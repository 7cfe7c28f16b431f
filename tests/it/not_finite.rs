//! Tests of models that compute NaN or infinity: damaged weights are refused at start, and a request whose
//! logits are not finite ends with an error while others go on.

use crate::common::{Copied, all_home, complete_all, config, greedy};
use crate::families::family;
use mainstem::actors::Engine;
use mainstem::cli::start;
use mainstem::request::RequestError;
use serde_json::Value;

/// Table of learned positions of the model, F32.
const POSITIONS: &str = "wpe.weight";
const HIDDEN: usize = 32;

/// Writes numbers over those of a row of the model's positions.
fn with_position(model: &Copied, row: usize, number: f32) {
    let path = model.file("model.safetensors");
    let mut file = std::fs::read(&path).expect("it can be read");
    let (length, rest) = file.split_first_chunk::<8>().expect("it has a header");
    let header = u64::from_le_bytes(*length) as usize;
    let names: Value = serde_json::from_slice(&rest[..header]).expect("the header is JSON");
    let first = names[POSITIONS]["data_offsets"][0].as_u64().expect("an offset") as usize;
    let begin = 8 + header + first + row * HIDDEN * 4;
    file[begin..begin + HIDDEN * 4].copy_from_slice(&number.to_le_bytes().repeat(HIDDEN));
    std::fs::write(&path, file).expect("it can be written");
}

async fn started(model: &Copied) -> anyhow::Result<Engine> {
    start::start_engine(&config(&model.0, &[("scheduler.slots", 4.into())])).await
}

#[actix::test]
async fn weights_that_are_not_finite_are_refused_by_tensor_and_index() {
    for number in [f32::NAN, f32::INFINITY] {
        let model = family("gpt2", "not-finite-weights");
        with_position(&model, 20, number);
        let error = format!("{:#}", started(&model).await.err().expect("the weights are damaged"));
        let expected = format!("tensor '{POSITIONS}' is damaged: the number at [20, 0] is NaN or infinite");
        assert!(error.contains(&expected), "{error}");
    }
}

/// Position 20 has numbers whose sum exceeds F32, so that every sequence that reaches it has NaN from there
/// on. The token 0 was served for ever, as if it were an answer.
#[actix::test]
async fn a_request_whose_logits_are_not_finite_ends_with_an_error_and_others_go_on() {
    let prompt = |i: u32, len: u32| (0..len).map(|at| 3 + (17 * i + 5 * at) % 90).collect::<Vec<_>>();
    let requests = |len: u32| (0..4).map(move |i| greedy(&prompt(i, len), 6));
    let alone = {
        let engine = started(&family("gpt2", "finite")).await.expect("it starts");
        let outcomes = complete_all(&engine, requests(5)).await;
        engine.stop();
        outcomes
    };
    let model = family("gpt2", "not-finite");
    with_position(&model, 20, 3.4e38);
    let engine = started(&model).await.expect("finite weights are accepted");
    let mixed = requests(5).zip(requests(17)).flat_map(|(short, long)| [short, long]);
    let outcomes = complete_all(&engine, mixed).await;
    for (pair, alone) in outcomes.chunks(2).zip(&alone) {
        let [short, long] = pair else { unreachable!("requests come in pairs") };
        assert_eq!((short.ids(), &short.end), (alone.ids(), &alone.end));
        let Some(Err(RequestError::SamplingFailed(why))) = &long.end else { panic!("{:?}", long.end) };
        assert_eq!((long.ids().len(), why.as_str()), (4, "the model computed no finite logits"));
    }
    all_home(&engine, 4).await;
    engine.stop();
}
