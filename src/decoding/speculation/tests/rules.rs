//! The acceptance rules, by the distributions of the texts that they give.

use crate::decoding::speculation::{AcceptanceRule, Proposal, draft_row};
use crate::decoding::strategies::{
    AnyVocabulary, CheckedDefaults, HostSampler, Row, SamplingPlan, SequenceState,
};
use mainstem_kernels::random::{noise, uniform};
use mainstem_kernels::reference::sample;

/// Number of tokens of the vocabulary.
const VOCAB: usize = 6;

/// The first token of every text.
const PROMPT: u32 = 0;

fn plan(params: &str) -> SamplingPlan {
    let params: serde_json::Value = serde_json::from_str(params).unwrap();
    let pairs = params.as_object().unwrap().iter().map(|(name, value)| (name.as_str(), value));
    SamplingPlan::parse(&CheckedDefaults::default(), pairs, &AnyVocabulary).unwrap()
}

/// A target and a draft model whose logits depend on the last two tokens.
struct Models {
    case: u32,
    /// Distance between both.
    distance: f32,
}

impl Models {
    fn target(&self, tokens: &[u32]) -> Vec<f32> {
        let context = tokens.iter().rev().take(2).fold(1, |hash, token| hash * 11 + token);
        noise(self.case * 1000 + context, VOCAB).iter().map(|x| 2.0 * x).collect()
    }

    fn draft(&self, tokens: &[u32]) -> Vec<f32> {
        let context = tokens.iter().rev().take(2).fold(3, |hash, token| hash * 13 + token);
        let other = noise(self.case * 1000 + 500 + context, VOCAB);
        self.target(tokens).iter().zip(other).map(|(x, other)| x + self.distance * other).collect()
    }
}

/// The texts of many seeds, each of two tokens.
struct Texts {
    /// (first token, second token).
    counts: Vec<u32>,
    proposed: u32,
    accepted: u32,
}

/// Generates two tokens for each seed, with up to two drafts in a step. `couples` lets the draft model draw
/// with the seed of the sequence, whatever the rule.
fn generate(models: &Models, plan: &SamplingPlan, rule: AcceptanceRule, seeds: u64, couples: bool) -> Texts {
    let mut texts = Texts { counts: vec![0; VOCAB * VOCAB], proposed: 0, accepted: 0 };
    let mut sampler = HostSampler::new();
    let draft_rule = if couples { AcceptanceRule::Coupled } else { plan.acceptance(rule) };
    for seed in 0..seeds {
        let mut state = SequenceState::new(plan, &[PROMPT], 9);
        while state.history().generated().len() < 2 {
            let start = state.history().tokens().len();
            let mut tokens = state.history().tokens().to_vec();
            for position in start..start + 2 {
                let row = draft_row(draft_rule, &plan.draft(), seed, position as u32);
                tokens.push(sample(&models.draft(&tokens), &[], None, &row).unwrap());
            }
            for position in start..start + 3 {
                let logits = models.target(&tokens[..position]);
                let draft_logits = models.draft(&tokens[..position]);
                let proposal =
                    tokens.get(position).map(|&token| Proposal { token, draft_logits: Some(&draft_logits) });
                let row =
                    Row { logits: &logits, seed, position: position as u64, mask: None, logprobs: None };
                let draw = sampler.verify(plan, &state, &row, proposal, rule).unwrap();
                state.accept(&draw);
                let is_accepted = tokens.get(position) == Some(&draw.token);
                texts.proposed += u32::from(proposal.is_some());
                texts.accepted += u32::from(is_accepted);
                if !is_accepted {
                    break;
                }
            }
        }
        let generated = state.history().generated();
        texts.counts[generated[0] as usize * VOCAB + generated[1] as usize] += 1;
    }
    texts
}

/// Returns the probabilities of the texts that generation without speculation gives, by the candidates that
/// the sampler reports.
fn probabilities(models: &Models, params: &str) -> Vec<f64> {
    let plan = plan(&params.replacen('{', r#"{"logprobs_mode": "processed", "#, 1));
    let mut sampler = HostSampler::new();
    let mut of_next = |generated: &[u32]| {
        let mut state = SequenceState::new(&plan, &[PROMPT], 9);
        generated.iter().for_each(|&token| state.accept_forced(token));
        let logits = models.target(state.history().tokens());
        let row = Row { logits: &logits, seed: 0, position: 0, mask: None, logprobs: Some(VOCAB) };
        sampler.draw(&plan, &state, &row).unwrap();
        let mut next = [0.0; VOCAB];
        sampler.top().iter().for_each(|&(id, logprob)| next[id as usize] = f64::from(logprob).exp());
        next
    };
    let first = of_next(&[]);
    (0..VOCAB as u32).flat_map(|id| of_next(&[id]).map(|next| first[id as usize] * next)).collect()
}

/// Returns Pearson's statistic, and a bound that a true distribution exceeds about once in 30,000 times
/// (Wilson and Hilferty's approximation).
fn chi_square(counts: &[u32], probabilities: &[f64]) -> (f64, f64) {
    let total: u32 = counts.iter().sum();
    let mut freedom = -1.0;
    let mut statistic = 0.0;
    for (&count, &probability) in counts.iter().zip(probabilities) {
        if probability < 1e-9 {
            statistic += if count > 0 { f64::INFINITY } else { 0.0 };
            continue;
        }
        freedom += 1.0;
        let expected = probability * f64::from(total);
        statistic += (f64::from(count) - expected).powi(2) / expected;
    }
    let spread: f64 = 2.0 / (9.0 * freedom);
    (statistic, freedom * (1.0 - spread + 4.0 * spread.sqrt()).powi(3))
}

/// Plans that the device draws, and such that only the host can draw.
const PARAMS: [&str; 6] = [
    r#"{"temperature": 1.0}"#,
    r#"{"temperature": 0.6}"#,
    r#"{"top_k": 3, "temperature": 1.2}"#,
    r#"{"top_p": 0.8}"#,
    r#"{"repetition_penalty": 1.5, "presence_penalty": 1.0, "min_p": 0.05}"#,
    r#"{"typical_p": 0.8, "logit_bias": {"3": 1.5}}"#,
];

/// Catches acceptance with another ratio, a replacement from another distribution, and drafts that depend on
/// the random numbers that accept them.
#[test]
fn rejection_keeps_the_distribution_of_texts() {
    for (case, params) in (0..).zip(PARAMS) {
        let models = Models { case, distance: [0.5, 1.5][case as usize % 2] };
        let texts = generate(&models, &plan(params), AcceptanceRule::Rejection, 20_000, false);
        let (statistic, bound) = chi_square(&texts.counts, &probabilities(&models, params));
        assert!(statistic < bound, "{params}: {statistic} exceeds {bound}");
        assert!(texts.accepted > texts.proposed / 2, "{params}: {} of {}", texts.accepted, texts.proposed);
    }
}

/// The statistic has the power to notice a wrong rule.
#[test]
fn other_rules_change_the_distribution_of_texts() {
    let models = Models { case: 1, distance: 1.5 };
    let params = PARAMS[1];
    let wrong = [(AcceptanceRule::TopSampling, false), (AcceptanceRule::Rejection, true)];
    for (rule, couples) in wrong {
        let texts = generate(&models, &plan(params), rule, 20_000, couples);
        let (statistic, bound) = chi_square(&texts.counts, &probabilities(&models, params));
        assert!(statistic > 1.3 * bound, "{rule}: {statistic}, {bound}");
    }
}

#[test]
fn top_sampling_accepts_more_than_rejection_and_only_candidates() {
    for params in [r#"{"top_k": 3}"#, r#"{"top_p": 0.7}"#, r#"{"min_p": 0.3, "frequency_penalty": 0.5}"#] {
        let models = Models { case: 7, distance: 2.0 };
        let plan = plan(params);
        let [lossy, exact] = [AcceptanceRule::TopSampling, AcceptanceRule::Rejection]
            .map(|rule| generate(&models, &plan, rule, 2_000, false));
        let rate = |texts: &Texts| f64::from(texts.accepted) / f64::from(texts.proposed);
        assert!(rate(&lossy) > rate(&exact) + 0.02, "{params}: {} and {}", rate(&lossy), rate(&exact));
        let possible = probabilities(&models, params);
        assert!(lossy.counts.iter().zip(possible).all(|(&count, share)| count == 0 || share > 1e-9));
    }
}

/// A draft that is drawn from the same candidates with the same numbers is the token of the target.
#[test]
fn coupled_drafts_of_the_target_itself_are_always_accepted() {
    let models = Models { case: 3, distance: 0.0 };
    for params in [PARAMS[0], PARAMS[1], PARAMS[2], PARAMS[3], r#"{"temperature": 0}"#] {
        let texts = generate(&models, &plan(params), AcceptanceRule::Coupled, 200, false);
        assert_eq!(texts.accepted, texts.proposed, "{params}");
        let texts = generate(&models, &plan(params), AcceptanceRule::Rejection, 200, false);
        assert_eq!(texts.accepted, texts.proposed, "{params}: p = q");
    }
}

/// Without probabilities to compare, every rule gives the token of the plain draw.
#[test]
fn greedy_plans_choosers_and_drafts_without_logits_are_drawn_as_without_speculation() {
    let mut sampler = HostSampler::new();
    let mut check = |params: &str, rule: AcceptanceRule, has_logits: bool| {
        let plan = plan(params);
        let state = SequenceState::new(&plan, &[1, 2], 9);
        for position in 0..200 {
            let logits = noise(position, VOCAB);
            let draft_logits = noise(position + 1000, VOCAB);
            let token = (uniform(9, position.into(), 0) * VOCAB as f32) as u32;
            let proposal = Proposal { token, draft_logits: has_logits.then_some(&draft_logits) };
            let row = Row { logits: &logits, seed: 5, position: position.into(), mask: None, logprobs: None };
            let plain = sampler.draw(&plan, &state, &row).unwrap();
            let verified = sampler.verify(&plan, &state, &row, Some(proposal), rule).unwrap();
            assert_eq!((plain.token, plain.registers()), (verified.token, verified.registers()), "{params}");
        }
    };
    for params in [r#"{"temperature": 0}"#, r#"{"mirostat": 2}"#, r#"{"strategy": "sample.top_k"}"#] {
        AcceptanceRule::ALL.into_iter().for_each(|rule| check(params, rule, true));
    }
    check(r#"{"temperature": 0.8}"#, AcceptanceRule::Rejection, false);
    check(r#"{"temperature": 0.8}"#, AcceptanceRule::Coupled, true);
}

/// A mask holds for accepted drafts and for what replaces them.
#[test]
fn no_rule_gives_a_token_that_the_mask_forbids() {
    let plan = plan(r#"{"temperature": 1.5}"#);
    let state = SequenceState::new(&plan, &[1, 2], 9);
    let mut sampler = HostSampler::new();
    for position in 0..300u32 {
        let (logits, draft_logits) = (noise(position, VOCAB), noise(position + 1000, VOCAB));
        let mask = [(position % 62) + 1];
        let row =
            Row { logits: &logits, seed: 5, position: position.into(), mask: Some(&mask), logprobs: None };
        for rule in AcceptanceRule::ALL {
            let proposal = Proposal { token: position % VOCAB as u32, draft_logits: Some(&draft_logits) };
            let token = sampler.verify(&plan, &state, &row, Some(proposal), rule).unwrap().token;
            assert_eq!(mask[0] >> token & 1, 1, "{rule}");
        }
    }
}

#[test]
fn drafts_are_drawn_with_the_parameters_of_the_plan() {
    let of = |params: &str| {
        let draft = plan(params).draft();
        (draft.temperature, draft.top_k, draft.top_p, draft.min_p)
    };
    assert_eq!(of(r#"{"temperature": 0.5, "top_k": 7, "top_p": 0.9}"#), (0.5, 7, 0.9, 0.0));
    assert_eq!(of(r#"{"temperature": 0.5, "min_p": 0.1, "repetition_penalty": 2}"#), (0.5, 0, 1.0, 0.1));
    assert_eq!(of(r#"{"temperature": 0.5, "top_p": 0.9, "samplers": ["top_p"]}"#), (1.0, 0, 0.9, 0.0));
    assert_eq!(of(r#"{"mirostat": 2, "temperature": 0.7, "top_k": 5}"#), (0.7, 0, 1.0, 0.0));
    for greedy in [r#"{"temperature": 0, "top_k": 3}"#, r#"{"strategy": "fsd"}"#, r#"{"strategy": "greedy"}"#]
    {
        assert_eq!(of(greedy).0, 0.0, "{greedy}");
    }
}

#[test]
fn rules_have_names() {
    for rule in AcceptanceRule::ALL {
        assert_eq!(rule.name().parse(), Ok(rule));
    }
    let error = "top-p".parse::<AcceptanceRule>().unwrap_err().to_string();
    assert!(AcceptanceRule::ALL.iter().all(|rule| error.contains(rule.name())), "{error}");
    assert_eq!(AcceptanceRule::Coupled.draft_seed(7), 7);
    let [a, b] = [7, 8].map(|seed| AcceptanceRule::Rejection.draft_seed(seed));
    assert!(a != 7 && a != b && a >> 32 != b >> 32 && a as u32 != b as u32);
}
