//! The parameters of a request: bounds, contradictions, defaults and orders.

use super::super::registry::{TABLE, request_params};
use super::super::unit::Place;
use super::super::{DeviceSampling, Kind};
use super::*;
use mainstem_kernels::Penalties;
use std::collections::BTreeSet;

/// Returns the refused parameter and the message.
fn refused(params: &str) -> (String, String) {
    let json = serde_json::from_str(params).expect("JSON");
    let error = parse(&json, 24).err().unwrap_or_else(|| panic!("{params} was accepted"));
    (error.param, error.message)
}

#[test]
fn nonsense_is_refused_with_its_name_value_and_bounds() {
    let cases = [
        (r#"{"temperature": -0.1}"#, "temperature is -0.1 but must be finite and at least 0"),
        (r#"{"temperature": 1e300}"#, "temperature is 1e+300 but must be finite and at least 0"),
        (r#"{"temperature": "hot"}"#, "temperature is \"hot\" but must be a number"),
        (r#"{"temperature": true}"#, "temperature is true but must be a number"),
        (r#"{"top_p": 0}"#, "top_p is 0 but must be above 0 and at most 1"),
        (r#"{"top_p": 1e-60}"#, "top_p is 1e-60 but must be above 0 and at most 1 as a 32-bit number"),
        (
            r#"{"repetition_penalty": 1e-50}"#,
            "repetition_penalty is 1e-50 but must be finite and above 0 as a 32-bit number",
        ),
        (
            r#"{"eta_cutoff": 0.99999999999}"#,
            "eta_cutoff is 0.99999999999 but must be at least 0 and below 1 as a 32-bit number",
        ),
        (r#"{"top_p": 1.5}"#, "top_p is 1.5 but must be above 0 and at most 1"),
        (r#"{"top_k": -2}"#, "top_k is -2 but must be a whole number from -1 to 4294967295"),
        (r#"{"top_k": 2.5}"#, "top_k is 2.5 but must be a whole number from -1 to 4294967295"),
        (r#"{"min_p": 1.25}"#, "min_p is 1.25 but must be from 0 to 1"),
        (r#"{"repeat_penalty": 0}"#, "repeat_penalty is 0 but must be finite and above 0"),
        (r#"{"presence_penalty": 2.5}"#, "presence_penalty is 2.5 but must be from -2 to 2"),
        (r#"{"eta_cutoff": 1}"#, "eta_cutoff is 1 but must be at least 0 and below 1"),
        (r#"{"mirostat": 3}"#, "mirostat is 3 but must be a whole number from 0 to 2"),
        (r#"{"dry_base": 0.5}"#, "dry_base is 0.5 but must be finite and at least 1"),
        (
            r#"{"allowed_token_ids": [24]}"#,
            "allowed_token_ids is [24] but must be a list of token ids below 24",
        ),
        (
            r#"{"bad_words": [[]]}"#,
            "bad_words is [[]] but must be a list of texts, or of lists that are each a list of \
             token ids below 24",
        ),
        (r#"{"logit_bias": {"24": 1}}"#, "logit_bias has \"24\", which is not a token id below 24"),
        (r#"{"logit_bias": {"-1": 1}}"#, "logit_bias has \"-1\", which is not a token id below 24"),
        (r#"{"logit_bias": [["A", 1]]}"#, "logit_bias has \"A\", which has no tokens"),
        (r#"{"logit_bias": [[1]]}"#, "logit_bias has [1], which is not a pair of a token and a bias"),
        (
            r#"{"logit_bias": {"1": -101}}"#,
            "logit_bias has -101 for \"1\", but a bias must be false or a number from -100 to 100",
        ),
        (
            r#"{"logit_bias": [["b", true]]}"#,
            "logit_bias has true for \"b\", but a bias must be false or a number from -100 to 100",
        ),
        (
            r#"{"logit_bias": 3}"#,
            "logit_bias is 3 but must be an object from token ids or texts to biases, or a list of such \
             pairs",
        ),
        (
            r#"{"dry_sequence_breakers": [1]}"#,
            "dry_sequence_breakers is [1] but must be a list of texts that are not empty",
        ),
        (r#"{"warmth": 1}"#, "warmth is not a sampling parameter"),
        (
            r#"{"strategy": "best"}"#,
            "strategy is \"best\" but must be one of greedy, sample.std, sample.top_k, sample.min_p, \
             sample.tfs, sample.typical, sample.mirostat, fsd, random_fsd, sample",
        ),
        (
            r#"{"strategy": "fsd", "strategy_params": {"k": 0}}"#,
            "strategy_params.k is 0 but must be a whole number from 1 to 64",
        ),
        (
            r#"{"strategy": "tfs", "strategy_params": {"k": 1}}"#,
            "strategy_params has \"k\", but the parameters of \"sample.tfs\" are: pool_size, z",
        ),
        (
            r#"{"strategy": "greedy", "strategy_params": {"k": 1}}"#,
            "strategy_params has \"k\", but the parameters of \"greedy\" are: none",
        ),
        (r#"{"strategy_params": {"k": 1}}"#, "strategy_params needs strategy, the name of one"),
        (r#"{"strategy": "fsd", "strategy_params": 3}"#, "strategy_params is 3 but must be an object"),
        (
            r#"{"strategy": "sample.std", "strategy_params": {"min_k": 9}}"#,
            "strategy_params.min_k is 9 but must be at most max_k, 8",
        ),
        (
            r#"{"samplers": ["top_q"]}"#,
            "samplers has \"top_q\", but the names are: penalties, no_repeat_ngram, dry, \
             temperature, top_n_sigma, top_k, tfs_z, typical_p, top_p, min_p, epsilon_cutoff, \
             eta_cutoff, xtc",
        ),
        (r#"{"samplers": ["typ_p", "typical"]}"#, "samplers has \"typical_p\" twice"),
        (
            r#"{"samplers": ["top_k", "dry"]}"#,
            "samplers has \"dry\" after \"top_k\", but must have it before",
        ),
        (r#"{"samplers": 3}"#, "samplers is 3 but must be a list of names"),
        (
            r#"{"logprobs_mode": "cooked"}"#,
            "logprobs_mode is \"cooked\" but must be raw_logprobs or processed_logprobs",
        ),
        (
            r#"{"dynatemp_range": 3e38, "temperature": 3e38}"#,
            "dynatemp_range is 300000000000000000000000000000000000000, too large for temperature \
             300000000000000000000000000000000000000",
        ),
        // Contradictions.
        (
            r#"{"repetition_penalty": 1.1, "repeat_penalty": 1.2}"#,
            "repeat_penalty is given twice with different values, as repetition_penalty and repeat_penalty",
        ),
        (
            r#"{"strategy": "fsd", "top_p": 0.9}"#,
            "strategy is \"fsd\", which replaces top_p; set one of them",
        ),
        (
            r#"{"strategy": "sample.std", "mirostat": 2}"#,
            "strategy is \"sample.std\", which replaces mirostat; set one of them",
        ),
        (
            r#"{"strategy": "fsd", "samplers": ["penalties"]}"#,
            "samplers is given, but strategy is \"fsd\", which replaces it; set one of them",
        ),
    ];
    for (params, expected) in cases {
        let (param, message) = refused(params);
        assert_eq!(message, expected, "{params}");
        assert!(message.starts_with(&param), "{params}");
    }
    let long = format!(r#"{{"top_p": "{}"}}"#, "x".repeat(100_000));
    assert!(refused(&long).1.len() < 200);
}

#[test]
fn a_model_without_thinking_refuses_its_budget() {
    let error = parse(&serde_json::json!({"thinking_token_budget": 5}), 5).expect_err("no such tokens");
    assert_eq!(
        error.message,
        "thinking_token_budget is given, but the model has no tokens around its thinking"
    );
}

#[test]
fn neutral_values_are_accepted_beside_a_strategy() {
    let neutral = r#"{"strategy": "fsd", "top_p": 1, "top_k": -1, "min_p": 0, "mirostat": 0, "typical_p": 1.0,
        "xtc_probability": null, "temperature": 0.7, "repetition_penalty": 1.2}"#;
    assert_eq!(plan(neutral, 24).active(), ["penalties", "fsd", "temperature"]);
    // Clients send all their parameters; llama.cpp ignores filters beside mirostat.
    assert_eq!(plan(r#"{"mirostat": 2, "top_k": 40, "top_p": 0.9}"#, 24).active(), ["mirostat"]);
    assert!(plan(r#"{"repetition_penalty": 1.1, "repeat_penalty": 1.1}"#, 24).active() == ["penalties"]);
    assert_eq!(
        plan(r#"{"top_k": 40.0, "xtc_probability": 0.5, "xtc_threshold": 0.6}"#, 24).active(),
        ["top_k"]
    );
}

#[test]
fn a_request_overrides_the_defaults() {
    let build = |defaults: Json, request: Json| {
        let pairs = |json: &Json| json.as_object().expect("an object").clone();
        let (defaults, request) = (pairs(&defaults), pairs(&request));
        let defaults = defaults.iter().map(|(name, value)| (name.as_str(), value));
        let plan = SamplingPlan::parse(
            &CheckedDefaults::parse(defaults, &Letters(24)).expect("valid"),
            request.iter().map(|(name, value)| (name.as_str(), value)),
            &Letters(24),
        );
        plan.expect("valid")
    };
    use serde_json::json;
    let both =
        build(json!({"top_k": 20, "top_p": 0.8}), json!({"top_p": 0.5, "temperature": 0.6, "top_k": null}));
    let expected = DeviceSampling { temperature: 0.6, top_k: 20, top_p: 0.5, ..DeviceSampling::GREEDY };
    assert_eq!(both.device(), Some(expected));
    assert_eq!(build(json!({"top_k": 20}), json!({"strategy": "fsd"})).active(), ["fsd"]);
    assert_eq!(build(json!({"strategy": "fsd"}), json!({})).active(), ["fsd"]);
    assert_eq!(build(json!({"strategy": "fsd"}), json!({"top_k": 3})).active(), ["top_k"]);
    assert_eq!(
        build(json!({"samplers": ["top_p"], "top_p": 0.5, "top_k": 2}), json!({})).active(),
        ["top_p"]
    );
    // Whatever chooses by default gives way to a choice of the request, but not to a value beside it.
    let active = |defaults: Json, request: Json| build(defaults, request).active().to_vec();
    let mirostat = || json!({"mirostat": 2, "top_k": 5});
    assert_eq!(active(mirostat(), json!({})), ["mirostat"]);
    assert_eq!(active(mirostat(), json!({"mirostat_tau": 3, "min_p": 0.1})), ["mirostat"]);
    assert_eq!(active(mirostat(), json!({"strategy": "fsd"})), ["fsd"]);
    assert_eq!(active(mirostat(), json!({"strategy": "sample.top_k"})), ["sample.top_k"]);
    assert_eq!(active(mirostat(), json!({"strategy": "sample"})), ["top_k"]);
    assert_eq!(active(mirostat(), json!({"strategy": "sample", "mirostat": 1})), ["mirostat"]);
    assert_eq!(active(mirostat(), json!({"samplers": ["top_k"]})), ["top_k"]);
    assert_eq!(active(mirostat(), json!({"samplers": ["penalties"], "mirostat": 1})), ["mirostat"]);
    let fsd = || json!({"strategy": "fsd", "presence_penalty": 1});
    assert_eq!(active(fsd(), json!({"samplers": ["penalties"]})), ["penalties"]);
    assert_eq!(active(fsd(), json!({"samplers": []})), ["sample"]);
    assert_eq!(active(fsd(), json!({"strategy": "sample"})), ["penalties"]);
    let order = json!({"samplers": ["top_p"], "top_p": 0.5});
    assert_eq!(active(order, json!({"strategy": "fsd"})), ["fsd"]);
}

/// The tokens that a model suppresses stay suppressed when a request has biases of its own.
#[test]
fn suppressed_tokens_stay_beside_biases() {
    let defaults = serde_json::json!({"suppress_tokens": [4, 2], "logit_bias": {"9": 1}});
    let defaults = defaults.as_object().expect("an object");
    let pairs = defaults.iter().map(|(name, value)| (name.as_str(), value));
    let defaults = CheckedDefaults::parse(pairs, &Letters(24)).expect("valid");
    let plan = |name: &'static str, value: Json| {
        SamplingPlan::parse(&defaults, [(name, &value)], &Letters(24)).expect("valid")
    };
    const NEVER: f32 = f32::NEG_INFINITY;
    let biased = plan("logit_bias", serde_json::json!({"4": 50, "7": 1.5}));
    assert_eq!(biased.logit_bias()[..], [(2, NEVER), (4, NEVER), (7, 1.5)]);
    assert!(biased.device().is_some());
    assert_eq!(plan("suppress_tokens", serde_json::json!([])).logit_bias()[..], [(9, 1.0)]);
    // The host forbids the same tokens.
    let host = plan("presence_penalty", 1.into());
    let logits: Vec<f32> = (0..24).map(|id| if id < 5 { 20.0 - id as f32 } else { -90.0 }).collect();
    assert_eq!(host.active(), ["logit_bias", "suppress_tokens", "penalties"]);
    let drawn: BTreeSet<u32> = (0..200).map(|position| draw(&host, &logits, position).token).collect();
    assert_eq!(drawn.into_iter().collect::<Vec<_>>(), [0, 1, 3]);
}

#[test]
fn strategies_are_counted_by_distinct_names() {
    for (params, active) in [
        (r#"{}"#, &["sample"][..]),
        (r#"{"strategy": "sample"}"#, &["sample"]),
        (r#"{"strategy": "sample", "top_k": 3}"#, &["top_k"]),
        (r#"{"strategy": "top_k"}"#, &["sample.top_k"]),
        (r#"{"strategy": "mirostat"}"#, &["sample.mirostat"]),
        (r#"{"temperature": 0}"#, &["greedy"]),
        (
            r#"{"temperature": 0, "top_p": 0.5, "mirostat": 2, "presence_penalty": 1}"#,
            &["penalties", "greedy"],
        ),
        (r#"{"strategy": "greedy"}"#, &["greedy"]),
        // Named strategies have a temperature of at least 0.001.
        (r#"{"strategy": "mirostat", "temperature": 0}"#, &["sample.mirostat"]),
    ] {
        assert_eq!(plan(params, 24).active(), active, "{params}");
    }
}

#[test]
fn the_device_gets_what_it_can_do() {
    assert_eq!(
        plan(r#"{}"#, 24).device(),
        Some(DeviceSampling { temperature: 1.0, ..DeviceSampling::GREEDY })
    );
    for params in [r#"{"logit_bias": {"3": 1}, "min_tokens": 3}"#, r#"{"temperature": 0}"#, r#"{"top_k": 3}"#]
    {
        assert!(plan(params, 24).device().is_some(), "{params}");
    }
    let penalties =
        |params: &'static str| plan(params, 24).device().expect("the device can do this").penalties;
    let all = r#"{"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.25}"#;
    assert_eq!(penalties(all), Penalties { repetition: 1.5, presence: 0.5, frequency: -0.25 });
    assert_eq!(penalties(r#"{"presence_penalty": 0.5, "repeat_last_n": 0}"#), Penalties::NONE);
    assert_eq!(penalties(r#"{"repeat_last_n": 64}"#), Penalties::NONE);
    for params in [
        r#"{"presence_penalty": 0.1, "repeat_last_n": 64}"#,
        r#"{"presence_penalty": 0.1, "no_repeat_ngram_size": 3}"#,
        r#"{"presence_penalty": 0.1, "strategy": "fsd"}"#,
        r#"{"dynatemp_range": 0.1}"#,
        r#"{"strategy": "greedy"}"#,
        r#"{"samplers": ["top_p"]}"#,
        r#"{"bad_words": ["a"]}"#,
        r#"{"xtc_probability": 0.1}"#,
    ] {
        assert_eq!(plan(params, 24).device(), None, "{params}");
    }
}

#[test]
fn names_are_unique_and_defaults_switch_everything_off() {
    let mut names = BTreeSet::new();
    for param in request_params() {
        let all = std::iter::once(param.name).chain(param.aliases.iter().copied());
        all.for_each(|name| assert!(names.insert(name), "{name} twice"));
        if let Kind::Float { default, bounds } = param.kind {
            assert!(bounds.contain(default), "{}", param.name);
        }
    }
    for place in [Place::Edit, Place::Named] {
        let mut names = BTreeSet::new();
        let beside = |row: &&super::super::Strategy| match place {
            Place::Named => row.place == Place::Named,
            _ => matches!(row.place, Place::Edit | Place::Filter),
        };
        for row in TABLE.iter().filter(beside) {
            let all = std::iter::once(row.name).chain(row.aliases.iter().copied());
            all.for_each(|name| assert!(names.insert(name), "{name} twice"));
        }
    }
    assert_eq!(plan(r#"{}"#, 24).active(), ["sample"]);
    let is_param = |name: &str| SamplingPlan::param_names().any(|known| known == name);
    assert!(is_param("repeat_penalty") && is_param("samplers") && !is_param("max_tokens"));
}
