//! The sampler: its equality with the definition, hostile logits, masks, state, and log-probabilities.

use super::super::LogprobsMode;
use super::*;

use mainstem_kernels::candidates::{Buffers, Candidates};
use mainstem_kernels::reference::{logprobs, sample, sample_counted};
use mainstem_kernels::{RowFailure, SamplingParams, StepBatch};

/// Random logits, with ties and a few unusual values.
fn random_logits(case: u32, vocab: usize) -> Vec<f32> {
    let scale = [0.5, 4.0, 20.0][case as usize % 3];
    let mut logits: Vec<f32> =
        noise(case, vocab).into_iter().map(|x| (scale * x * 8.0).round() / 8.0).collect();
    if case.is_multiple_of(4) {
        logits[case as usize % vocab] = f32::NAN;
        logits[case as usize * 7 % vocab] = f32::NEG_INFINITY;
    }
    logits
}

/// A mask that allows many tokens, few, only such that a bias may forbid, or none.
fn random_mask(case: u32, vocab: usize) -> Vec<u32> {
    let words = vocab.div_ceil(32);
    let bits = |i: usize| ((uniform(case.into(), i as u64, 9) * (1 << 24) as f32) as u32).wrapping_mul(257);
    match case % 7 {
        0 => vec![0b111 & bits(0); words.min(1)],
        1 => (0..words).map(|i| bits(i) & bits(i + words) & bits(i + 2 * words)).collect(),
        2 => vec![0; words],
        _ => (0..words).map(bits).collect(),
    }
}

#[test]
fn the_devices_parameters_give_the_tokens_of_the_definition() {
    let mut sampler = HostSampler::new();
    for case in 0..400u32 {
        let vocab = [3, 50, 331, 1500][case as usize % 4];
        let logits = random_logits(case, vocab);
        let random = |i: u64| uniform(u64::from(case), 1000 + i, 0);
        let random_id = |i: u64, vocab: usize| (random(i) * vocab as f32) as u32;
        let temperature = [0.0, 0.3, 1.0, 1.7, 1e-4][case as usize % 5];
        let top_k = [0, 1, 7, 90, 5000][(random(0) * 5.0) as usize];
        let top_p = if random(1) < 0.4 { 1.0 } else { random(2).max(1e-3) };
        let min_p = if random(3) < 0.6 { 0.0 } else { random(4) * 0.3 };
        let mut params =
            serde_json::json!({"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p});
        if random(5) < 0.4 {
            params["logit_bias"] = serde_json::json!({"0": 3.5, "2": false, "1": -2});
            params["suppress_tokens"] = serde_json::json!([random_id(6, vocab)]);
        }
        if random(8) < 0.5 {
            params["repetition_penalty"] = (0.7 + random(9)).into();
            params["presence_penalty"] = (3.0 * random(10) - 1.5).into();
            params["frequency_penalty"] = (2.0 * random(11) - 1.0).into();
        }
        let mask: Option<Vec<u32>> = (random(7) < 0.6).then(|| random_mask(case, vocab));
        let mask = mask.as_deref();
        let plan = parse(&params, vocab).expect("valid");
        let device = plan.device().expect("the device can do this");
        let tokens = |from: u64| (from..from + 9).map(|i| random_id(i, vocab.min(60))).collect::<Vec<u32>>();
        let (prompt, generated) = (tokens(20), tokens(30));
        let state = state(&plan, &prompt, &generated);
        let mut batch = StepBatch::default();
        batch.replace_counts(0, (&prompt, &generated), vocab);
        let mut counts = vec![0; vocab];
        batch.token_counts.iter().for_each(|(token, count)| counts[*token as usize] = *count);
        for position in 0..5u32 {
            let row = SamplingParams {
                temperature: device.temperature,
                top_k: device.top_k,
                top_p: device.top_p,
                min_p: device.min_p,
                penalties: device.penalties,
                seed: 77,
                position,
                ..SamplingParams::GREEDY
            };
            let host = Row { logits: &logits, seed: 77, position: position.into(), mask, logprobs: None };
            let token = sampler.draw(&plan, &state, &host).map(|draw| draw.token);
            let token = token.map_err(|_| RowFailure::EmptyMask);
            let expected = sample_counted(&logits, plan.logit_bias(), &counts, mask, &row);
            assert_eq!(token, expected, "case {case}, {row:?}");
        }
    }
}

/// A large vocabulary takes other paths: lists by threshold, and selection.
#[test]
fn a_large_vocabulary_gives_the_tokens_of_the_definition() {
    let mut sampler = HostSampler::new();
    for (case, params) in [
        r#"{"temperature": 0.9}"#,
        r#"{"top_k": 40}"#,
        r#"{"top_k": 9000, "top_p": 0.7}"#,
        r#"{"top_p": 0.95, "temperature": 1.3}"#,
        r#"{"top_p": 0.3, "min_p": 0.001}"#,
    ]
    .into_iter()
    .enumerate()
    {
        let logits = random_logits(3 * case as u32 + 1, 20_001);
        let plan = plan(params, 20_001);
        let device = plan.device().expect("the device can do this");
        let state = state(&plan, &[], &[]);
        for position in 0..2u32 {
            let row = SamplingParams {
                temperature: device.temperature,
                top_k: device.top_k,
                top_p: device.top_p,
                min_p: device.min_p,
                position,
                ..SamplingParams::GREEDY
            };
            let host =
                Row { logits: &logits, seed: 0, position: position.into(), mask: None, logprobs: None };
            let token = sampler.draw(&plan, &state, &host).expect("no mask").token;
            assert_eq!(Ok(token), sample(&logits, &[], None, &row), "{params}");
        }
    }
}

/// Every strategy, on rows that no model should give.
#[test]
fn hostile_logits_never_panic_and_never_escape_the_mask() {
    const NAN: f32 = f32::NAN;
    const INF: f32 = f32::INFINITY;
    let mut rows: Vec<Vec<f32>> = vec![
        vec![NAN; 24],
        vec![-INF; 24],
        vec![INF; 24],
        vec![0.0; 24],
        vec![f32::MAX; 24],
        vec![f32::MIN; 24],
        (0..24).map(|i| [NAN, INF, -INF, 3.0, -0.0][i % 5]).collect(),
        (0..24).map(|i| [NAN, -INF, f32::MAX, f32::MIN][i % 4]).collect(),
        (0..24).map(|i| [1e38, -1e38, 1e-45][i % 3]).collect(),
        (0..24).map(|i| if i == 5 { 0.0 } else { -INF }).collect(),
    ];
    rows.extend((0..30).map(|case| random_logits(case, 24)));
    let plans = [
        r#"{}"#,
        r#"{"temperature": 0}"#,
        r#"{"temperature": 1e-5, "top_p": 0.5}"#,
        r#"{"temperature": 3e38, "min_p": 0.5}"#,
        r#"{"temperature": 1e-30, "dynatemp_range": 3e38, "dynatemp_exponent": 0}"#,
        r#"{"top_k": 1, "xtc_probability": 1, "xtc_threshold": 0}"#,
        r#"{"xtc_probability": 1, "xtc_threshold": 0, "top_p": 0.9}"#,
        r#"{"typical_p": 0.01, "tfs_z": 0.01, "top_n_sigma": 1e-9, "eta_cutoff": 0.9}"#,
        r#"{"repetition_penalty": 1e38, "presence_penalty": 2, "frequency_penalty": -2}"#,
        r#"{"repetition_penalty": 1e-38, "no_repeat_ngram_size": 1}"#,
        r#"{"dry_multiplier": 1e38, "dry_base": 1e38, "dry_allowed_length": 1}"#,
        r#"{"allowed_token_ids": [2], "bad_words": [[2]], "logit_bias": {"2": -99}}"#,
        r#"{"min_tokens": 99, "thinking_token_budget": 0}"#,
        r#"{"mirostat": 1, "mirostat_tau": 0, "mirostat_eta": 1e38}"#,
        r#"{"mirostat": 2, "mirostat_tau": 3e38}"#,
        r#"{"strategy": "sample.std", "strategy_params": {"eos_bypassing_max": 9}}"#,
        r#"{"strategy": "top_k"}"#,
        r#"{"strategy": "min_p", "temperature": 0}"#,
        r#"{"strategy": "tfs"}"#,
        r#"{"strategy": "typical"}"#,
        r#"{"strategy": "mirostat"}"#,
        r#"{"strategy": "fsd", "strategy_params": {"k": 64, "n": 16}}"#,
        r#"{"strategy": "random_fsd", "strategy_params": {"pool_size": 1}}"#,
        r#"{"logprobs_mode": "processed_logprobs", "top_p": 0.5}"#,
    ];
    let mut sampler = HostSampler::new();
    let mask = [0b0011_0000_0000_1000_0011_0000u32];
    for params in plans {
        let plan = plan(params, 24);
        // A token beyond the vocabulary may stand in a prompt.
        let mut state = state(&plan, &[20, 3, 3, 99, u32::MAX], &[3, 3, 3]);
        for (position, logits) in rows.iter().enumerate() {
            for mask in [None, Some(&mask[..])] {
                let row = Row { logits, seed: 5, position: position as u64, mask, logprobs: Some(3) };
                let draw = sampler.draw(&plan, &state, &row).expect("the mask allows tokens");
                assert!(draw.token < 24, "{params} {logits:?}");
                let allows = |mask: &[u32]| mask[0] >> draw.token & 1 == 1;
                assert!(mask.is_none_or(allows), "{params} {logits:?}: {}", draw.token);
                if position % 8 == 0 {
                    state.accept(&draw);
                }
            }
        }
        let row = Row { logits: &rows[3], seed: 5, position: 0, mask: Some(&[0]), logprobs: None };
        assert!(sampler.draw(&plan, &state, &row).is_err());
    }
}

#[test]
fn a_mask_is_kept_and_edits_that_empty_it_are_ignored() {
    let plan = plan(r#"{"logit_bias": {"2": -50}, "bad_words": [[3]], "temperature": 0}"#, 40);
    let mut logits = vec![0.0; 40];
    (logits[1], logits[2], logits[3], logits[35]) = (9.0, 8.0, 7.0, -90.0);
    let token = |mask: &[u32]| {
        let row = Row { logits: &logits, seed: 0, position: 0, mask: Some(mask), logprobs: None };
        HostSampler::new().draw(&plan, &state(&plan, &[], &[]), &row).map(|draw| draw.token)
    };
    assert_eq!(token(&[0b1110, 0b1000]), Ok(1));
    assert_eq!(token(&[0b1100, 0b1000]), Ok(2));
    assert_eq!(token(&[0b1000, 0b1000]), Ok(35), "token 3 is a bad word");
    assert_eq!(token(&[0b1000]), Ok(3), "the only one left");
    assert_eq!(token(&[0, 1 << 31]), Err(super::super::EmptyMask), "beyond the vocabulary");
}

/// Wider parameters keep at least the same tokens.
#[test]
fn filters_are_monotone() {
    let kept = |params: &str, logits: &[f32]| -> std::collections::BTreeSet<u32> {
        let plan = plan(params, logits.len());
        let mut buffers = Buffers::default();
        buffers.values = logits.to_vec();
        let mut candidates = Candidates::new(&mut buffers);
        let history = super::super::History::default();
        let context = super::super::unit::Context { history: &history, seed: 1, position: 2 };
        plan.filters.iter().for_each(|filter| filter.filter(&mut candidates, &context));
        let mut ids = std::collections::BTreeSet::new();
        candidates.visit(|id, _| {
            ids.insert(id);
        });
        ids
    };
    for case in 1..40u32 {
        let logits = random_logits(2 * case + 1, 90);
        for (name, narrow_to_wide) in [
            ("top_k", [1.0, 2.0, 5.0, 30.0, 91.0]),
            ("top_p", [0.001, 0.2, 0.5, 0.9, 1.0]),
            ("min_p", [1.0, 0.5, 0.1, 0.01, 0.0]),
            ("typical_p", [0.001, 0.2, 0.5, 0.9, 1.0]),
            ("tfs_z", [0.001, 0.2, 0.5, 0.9, 1.0]),
            ("top_n_sigma", [0.01, 0.5, 1.0, 2.0, 99.0]),
            ("epsilon_cutoff", [0.9, 0.3, 0.1, 0.01, 0.0]),
            ("eta_cutoff", [0.9, 0.3, 0.1, 0.01, 0.0]),
        ] {
            let sets = narrow_to_wide.map(|value| kept(&format!(r#"{{"{name}": {value}}}"#), &logits));
            assert!(sets.windows(2).all(|pair| pair[0].is_subset(&pair[1])), "{name}, case {case}");
            assert!(!sets[0].is_empty() && sets[4].len() == logits.len(), "{name}, case {case}");
        }
    }
}

/// In llama.cpp's order, the temperature comes after XTC and raises candidates that were negligible before.
#[test]
fn candidates_far_behind_survive_xtc_before_the_temperature() {
    let xtc = r#"{"samplers": ["xtc", "temperature"], "xtc_probability": 1, "xtc_threshold": 0.1,
        "temperature": 50}"#;
    let plan = plan(xtc, 24);
    let mut logits = vec![0.0; 24];
    (logits[3], logits[4], logits[7]) = (40.0, 39.5, f32::NEG_INFINITY);
    let mut drawn = [0; 24];
    (0..2400).for_each(|position| drawn[draw(&plan, &logits, position).token as usize] += 1);
    assert_eq!((drawn[3], drawn[7]), (0, 0), "removed and forbidden");
    // e^(39.5 / 50) = 2.2 times as likely as each of the other 21.
    assert!((170..=290).contains(&drawn[4]), "{drawn:?}");
    assert!(
        (0..24).filter(|id| ![3, 4, 7].contains(id)).all(|id| (60..=150).contains(&drawn[id])),
        "{drawn:?}"
    );
}

/// The end of the thinking part is forced, whatever another edit forbids.
#[test]
fn a_used_up_budget_wins_over_other_edits() {
    let mut logits = vec![0.0; 24];
    logits[9] = 5.0;
    for (params, prompt) in [
        (r#"{"thinking_token_budget": 1}"#, [20, 5, 5]),
        (r#"{"thinking_token_budget": 1, "no_repeat_ngram_size": 1}"#, [20, 21, 5]),
        (r#"{"thinking_token_budget": 1, "logit_bias": {"21": -100}}"#, [20, 5, 5]),
        (r#"{"thinking_token_budget": 1, "suppress_tokens": [21], "min_tokens": 9}"#, [20, 5, 5]),
        (r#"{"thinking_token_budget": 1, "dry_multiplier": 3e38, "dry_base": 3e38}"#, [20, 21, 5]),
    ] {
        let plan = plan(params, 24);
        let row = Row { logits: &logits, seed: 0, position: 3, mask: None, logprobs: None };
        let draw = HostSampler::new().draw(&plan, &state(&plan, &prompt, &[]), &row).expect("no mask");
        assert_eq!(draw.token, 21, "{params}");
    }
}

/// Over a long text, the mean surprise of both versions is the target.
#[test]
fn mirostat_converges_to_its_target() {
    // Probabilities by Zipf's law.
    let logits: Vec<f32> = (1..=2000u32).map(|rank| -1.1 * (rank as f32).ln()).collect();
    for (version, tau) in [(2, 3.0), (2, 5.0), (1, 3.0), (1, 5.0)] {
        let plan = plan(&format!(r#"{{"mirostat": {version}, "mirostat_tau": {tau}}}"#), 2000);
        let mut state = state(&plan, &[], &[]);
        let mut sampler = HostSampler::new();
        assert_eq!(state.registers()[0], 2.0 * tau);
        let (mut sum, mut count) = (0.0, 0);
        for position in 0..1500 {
            let before = state.registers()[0];
            let row = Row { logits: &logits, seed: 3, position, mask: None, logprobs: None };
            let draw = sampler.draw(&plan, &state, &row).expect("no mask");
            state.accept(&draw);
            if position >= 100 {
                // mu falls by eta times the surprise beyond the target.
                sum += tau + (before - state.registers()[0]) / 0.1;
                count += 1;
            }
        }
        let mean = sum / f64::from(count);
        assert!((mean - tau).abs() < 0.05 * tau, "version {version}: {mean} bits, not {tau}");
    }
}

#[test]
fn a_state_rolls_back_and_a_draw_alone_changes_nothing() {
    let params = r#"{"mirostat": 2, "repetition_penalty": 1.3, "dry_multiplier": 0.5}"#;
    let plan = plan(params, 50);
    let mut state = state(&plan, &[1, 2, 3], &[]);
    let mut sampler = HostSampler::new();
    let mut run = |state: &mut SequenceState, from: u64| -> Vec<u32> {
        let step = |position: u64| {
            let logits = random_logits(position as u32 * 2 + 1, 50);
            let row = Row { logits: &logits, seed: 8, position, mask: None, logprobs: None };
            let draw = sampler.draw(&plan, state, &row).expect("no mask");
            assert_eq!(sampler.draw(&plan, state, &row).map(|again| again.token), Ok(draw.token));
            state.accept(&draw);
            draw.token
        };
        (from..from + 6).map(step).collect()
    };
    run(&mut state, 3);
    let checkpoint: Checkpoint = state.checkpoint();
    let first = run(&mut state, 9);
    state.accept_forced(7);
    state.roll_back(&checkpoint);
    assert_eq!(state.checkpoint(), checkpoint);
    assert_eq!(run(&mut state, 9), first);
}

#[test]
fn log_probabilities_are_those_of_the_mode() {
    let logits = random_logits(1, 60);
    for n in [0, 1, 5, 60, 99] {
        let plan = plan(r#"{"top_k": 3, "temperature": 0.5}"#, 60);
        let mut sampler = HostSampler::new();
        let row = Row { logits: &logits, seed: 0, position: 1, mask: None, logprobs: Some(n) };
        let draw = sampler.draw(&plan, &state(&plan, &[], &[]), &row).expect("no mask");
        let want = logprobs(&logits, n);
        assert_eq!(draw.logprob, want.logprob(logits[draw.token as usize]));
        assert_eq!(sampler.top(), want.top);
    }
    let plan = plan(r#"{"top_k": 3, "temperature": 0.5, "logprobs_mode": "processed_logprobs"}"#, 60);
    assert_eq!((plan.logprobs_mode(), plan.device()), (LogprobsMode::Processed, None));
    let mut sampler = HostSampler::new();
    let row = Row { logits: &logits, seed: 0, position: 1, mask: None, logprobs: Some(5) };
    let draw = sampler.draw(&plan, &state(&plan, &[], &[]), &row).expect("no mask");
    let top = sampler.top();
    assert_eq!(top.len(), 3);
    assert!((top.iter().map(|(_, logprob)| logprob.exp()).sum::<f32>() - 1.0).abs() < 1e-5);
    assert!(top.contains(&(draw.token, draw.logprob)));
    let (a, b) = (top[0], top[1]);
    let ratio = (logits[a.0 as usize] - logits[b.0 as usize]) / 0.5;
    assert!((a.1 - b.1 - ratio).abs() < 1e-5);
}

/// Forbidden tokens are no candidates, and rows without a finite largest logit have no probabilities.
#[test]
fn only_candidates_are_reported() {
    let plan = plan(r#"{"logit_bias": {"1": false}, "logprobs_mode": "processed_logprobs"}"#, 4);
    let mut sampler = HostSampler::new();
    let mut reported = |logits: [f32; 4]| {
        let row = Row { logits: &logits, seed: 0, position: 1, mask: Some(&[0b1011]), logprobs: Some(4) };
        let draw = sampler.draw(&plan, &state(&plan, &[], &[]), &row).expect("tokens are allowed");
        (draw.token, draw.logprob, sampler.top().iter().map(|(id, _)| *id).collect::<Vec<_>>())
    };
    let (token, logprob, top) = reported([1.0, 9.0, 5.0, 2.0]);
    assert!([0, 3].contains(&token) && logprob < 0.0);
    assert_eq!(top, [3, 0]);
    for logits in [[f32::NEG_INFINITY; 4], [f32::NAN; 4], [f32::INFINITY; 4]] {
        let (token, logprob, top) = reported(logits);
        assert!(token == 0 && logprob.is_nan() && top.is_empty(), "{logits:?}");
    }
}
