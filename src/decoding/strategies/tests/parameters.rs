//! The parameters of a request: bounds, contradictions, defaults and orders.

use super::super::registry::{TABLE, request_params};
use super::super::unit::Place;
use super::super::{DeviceSampling, Kind};
use super::*;
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
            "strategy is \"best\" but must be one of greedy, sample.std, top_k, min_p, tfs, typical, \
             mirostat, fsd, random_fsd, sample",
        ),
        (
            r#"{"strategy": "fsd", "strategy_params": {"k": 0}}"#,
            "strategy_params.k is 0 but must be a whole number from 1 to 64",
        ),
        (
            r#"{"strategy": "tfs", "strategy_params": {"k": 1}}"#,
            "strategy_params has \"k\", but the parameters of \"tfs\" are: pool_size, z",
        ),
        (
            r#"{"strategy": "greedy", "strategy_params": {"k": 1}}"#,
            "strategy_params has \"k\", but the parameters of \"greedy\" are: none",
        ),
        (r#"{"strategy_params": {"k": 1}}"#, "strategy_params needs strategy, the name of one"),
        (r#"{"strategy": "fsd", "strategy_params": 3}"#, "strategy_params is 3 but must be an object"),
        (
            r#"{"strategy": "sample.std", "strategy_params": {"min_k": 9}}"#,
            "min_k is 9 but must be at most max_k, 8",
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
    let expected = DeviceSampling { temperature: 0.6, top_k: 20, top_p: 0.5, min_p: 0.0 };
    assert_eq!(both.device(), Some(expected));
    assert_eq!(build(json!({"top_k": 20}), json!({"strategy": "fsd"})).active(), ["fsd"]);
    assert_eq!(build(json!({"strategy": "fsd"}), json!({})).active(), ["fsd"]);
    assert_eq!(build(json!({"strategy": "fsd"}), json!({"top_k": 3})).active(), ["top_k"]);
    assert_eq!(
        build(json!({"samplers": ["top_p"], "top_p": 0.5, "top_k": 2}), json!({})).active(),
        ["top_p"]
    );
}

#[test]
fn the_device_gets_what_it_can_do() {
    assert_eq!(
        plan(r#"{}"#, 24).device(),
        Some(DeviceSampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 })
    );
    for params in [r#"{"logit_bias": {"3": 1}, "min_tokens": 3}"#, r#"{"temperature": 0}"#, r#"{"top_k": 3}"#]
    {
        assert!(plan(params, 24).device().is_some(), "{params}");
    }
    for params in [
        r#"{"presence_penalty": 0.1}"#,
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
    assert!(plan(r#"{}"#, 24).active().is_empty());
    let is_param = |name: &str| SamplingPlan::param_names().any(|known| known == name);
    assert!(is_param("repeat_penalty") && is_param("samplers") && !is_param("max_tokens"));
}
