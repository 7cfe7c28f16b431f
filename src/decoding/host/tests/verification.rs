//! Rows of one sequence that verify drafts in one step.

use super::*;
use crate::decoding::speculation::AcceptanceRule;
use mainstem_kernels::random::{noise, uniform};

/// The logits after these tokens.
fn logits(tokens: &[u32]) -> Vec<f32> {
    let context = tokens.iter().rev().take(3).fold(tokens.len() as u32, |hash, token| hash * 31 + token);
    noise(context, SIZE).iter().map(|x| 4.0 * x).collect()
}

fn row_params(position: usize) -> SamplingParams {
    SamplingParams {
        position: position as u32,
        seed: 5,
        logprob: true,
        top_logprobs: 2,
        ..SamplingParams::GREEDY
    }
}

/// A way to speculate: returns the drafts after these tokens of the text, whose next tokens are given.
type Drafter = fn(&[u32], &[u32]) -> Vec<u32>;

/// Makes no drafts.
fn none(_: &[u32], _: &[u32]) -> Vec<u32> {
    Vec::new()
}

/// Makes up to four drafts, right and wrong ones. Some wrong ones are followed by what comes in their place.
fn mixed(tokens: &[u32], next: &[u32]) -> Vec<u32> {
    let random = |i: usize| uniform(77, tokens.len() as u64, i as u32 + 10);
    let mut drafts = next[..next.len().min((random(0) * 5.0) as usize)].to_vec();
    for i in 0..drafts.len() {
        if random(1 + i) < 0.15 {
            drafts[i] = (drafts[i] + 1) % SIZE as u32;
        } else if random(1 + i) < 0.35 {
            drafts.insert(i, (drafts[i] + 1) % SIZE as u32);
        }
    }
    drafts.truncate(4);
    drafts
}

/// Text and reports of a sequence, up to `len` tokens. `text` is the text that the drafter knows.
fn run(
    host: &HostSequence,
    len: usize,
    (drafter, text): (Drafter, &[u32]),
) -> (Vec<u32>, Vec<Option<LogprobReport>>) {
    let mut tokens = vec![1, 2];
    let mut reports = Vec::new();
    while tokens.len() < len + 2 {
        let known = &text[(tokens.len() - 2).min(text.len())..];
        let drafts = drafter(&tokens, known);
        let late = Arc::new(LateInputs::default());
        let start = tokens.len();
        for index in 0..=drafts.len() {
            let mut params = row_params(start + index);
            host.register_verified(&late, index, &mut params, AcceptanceRule::Coupled, index);
        }
        let inputs = [&tokens[start - 1..], &drafts[..]].concat();
        for index in 0..=drafts.len() {
            let context = [&tokens[..], &drafts[..index]].concat();
            let logits = logits(&context);
            late.begin_draw(
                index,
                HostRow {
                    logits: &logits,
                    input_token: inputs[index],
                    next_token: drafts.get(index).copied(),
                    draft_logits: None,
                },
            );
        }
        for index in 0..=drafts.len() {
            let Some(token) = late.wait_token(index).unwrap() else { return (tokens, reports) };
            tokens.push(token);
            reports.push(host.take_report());
            assert!(host.accept(token).is_empty());
            if drafts.get(index) != Some(&token) || tokens.len() == len + 2 {
                break;
            }
        }
    }
    (tokens, reports)
}

/// Catches rows that are drawn in another order, rows behind a wrong draft that change the state or report
/// probabilities, and rows that see a state without the drafts before them.
#[test]
fn verified_rows_give_the_tokens_of_rows_one_by_one() {
    let grammars = [
        None,
        Some(constraint("((abc|xyz|hello)(no|yes)?)*", ConstraintStart::Immediately)),
        Some(constraint("[a-m]*", ConstraintStart::After { marker: "q".into() })),
    ];
    for params in [
        json!({"temperature": 0.8}),
        json!({"temperature": 0, "repetition_penalty": 1.5}),
        json!({"temperature": 1.3, "top_p": 0.9, "min_tokens": 30, "logprobs_mode": "processed_logprobs"}),
        json!({"frequency_penalty": 1.0, "presence_penalty": 0.5}),
        json!({"mirostat": 2, "logprobs_mode": "processed_logprobs"}),
        json!({"mirostat": 1}),
        json!({"dry_multiplier": 2, "dry_allowed_length": 1, "dry_sequence_breakers": ["z"]}),
        json!({"no_repeat_ngram_size": 3, "typical_p": 0.9}),
        json!({"strategy": "sample.std", "strategy_params": {"eos_bypassing_max": 3}}),
        json!({"xtc_probability": 0.5, "xtc_threshold": 0.1, "top_n_sigma": 1.5}),
    ] {
        let plan = plan(params.clone());
        for grammar in &grammars {
            let begin = |pool: &Arc<HostPool>| {
                HostSequence::begin(pool, Some(&plan), grammar.as_ref(), &[1, 2], 60, 0).unwrap()
            };
            let one_by_one = run(&begin(&pool(1)), 60, (none, &[]));
            assert_eq!(one_by_one.0.len(), 62);
            let processed = plan.logprobs_mode() == crate::decoding::strategies::LogprobsMode::Processed;
            assert!(one_by_one.1.iter().all(|report| report.is_some() == processed), "{params}");
            for threads in [1, 4] {
                let host = begin(&pool(threads));
                let drafts: (Drafter, _) = (mixed, &one_by_one.0[2..]);
                assert_eq!(run(&host, 60, drafts), one_by_one, "{params}, {threads} threads, {grammar:?}");
            }
        }
    }
}

/// Many sequences at once, so that threads draw rows of several sequences while others come.
#[test]
fn sequences_do_not_disturb_each_other() {
    let plan = plan(json!({"mirostat": 2, "presence_penalty": 0.5}));
    let pool = pool(4);
    let begin = || HostSequence::begin(&pool, Some(&plan), None, &[1, 2], 40, 0).unwrap();
    let one_by_one = run(&begin(), 40, (none, &[]));
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| assert_eq!(run(&begin(), 40, (mixed, &one_by_one.0[2..])), one_by_one));
        }
    });
}

/// Otherwise the step would wait for ever, or the rows behind would continue a sequence that has ended.
#[test]
fn rows_behind_one_that_fails_do_not_wait() {
    let vocabulary = Arc::new(Vocabulary::new(SIZE, |_| Token::Text(b"a"), &[], None).unwrap());
    let grammar = Grammar::compile(&Spec::new(Form::Regex("aa".into())), &vocabulary, &Limits::default());
    let start = ConstraintStart::Immediately;
    let constraint = Arc::new(Constraint { grammar: Arc::new(grammar.unwrap()), start });
    let plan = plan(json!({"temperature": 0}));
    let host = HostSequence::begin(&pool(2), Some(&plan), Some(&constraint), &[1], 9, 0).unwrap();
    let late = Arc::new(LateInputs::default());
    let falling: Vec<f32> = (0..SIZE).map(|id| -(id as f32)).collect();
    for index in 0..5 {
        host.register_verified(&late, index, &mut row_params(index), AcceptanceRule::Coupled, index);
    }
    for index in 0..5 {
        let next_token = (index < 4).then_some(0);
        let row = HostRow { logits: &falling, input_token: 0, next_token, draft_logits: None };
        late.begin_draw(index, row);
    }
    let tokens: Vec<_> = (0..5).map(|index| late.wait_token(index).unwrap()).collect();
    assert_eq!(tokens[..3], [Some(0), Some(0), None]);
    assert!(host.error().is_some());
    // The next row fails, too.
    let late = Arc::new(LateInputs::default());
    host.register(&late, 0, &mut row_params(2));
    late.begin_draw(0, HostRow::of_logits(&falling));
    assert_eq!(late.wait_token(0), Ok(None));
}

#[test]
fn rejection_gets_the_logits_of_the_draft() {
    let plan = plan(json!({"temperature": 1}));
    let pool = pool(1);
    let mut accepted = [0, 0];
    for seed in 0..400 {
        for (case, rule) in [AcceptanceRule::Rejection, AcceptanceRule::Coupled].into_iter().enumerate() {
            let host = HostSequence::begin(&pool, Some(&plan), None, &[1], 9, 0).unwrap();
            let late = Arc::new(LateInputs::default());
            for index in 0..2 {
                let mut params = SamplingParams { seed, ..row_params(index) };
                host.register_verified(&late, index, &mut params, rule, index);
            }
            let (flat, mut likely) = ([0.0; SIZE], [0.0; SIZE]);
            likely[3] = 5.0;
            // The draft is always accepted, because the target finds it more likely than the draft model.
            let first =
                HostRow { logits: &likely, input_token: 1, next_token: Some(3), draft_logits: Some(&flat) };
            late.begin_draw(0, first);
            late.begin_draw(1, HostRow { input_token: 3, ..HostRow::of_logits(&likely) });
            accepted[case] += u32::from(late.wait_token(0) == Ok(Some(3)));
            assert!(late.wait_token(1).unwrap().is_some());
        }
    }
    assert_eq!(accepted[0], 400);
    assert!((280..360).contains(&accepted[1]), "{accepted:?}");
}

/// Otherwise the pool would keep the buffers of the largest step for ever.
#[test]
fn buffers_of_many_drafts_are_freed() {
    let plan = plan(json!({"temperature": 1}));
    let pool = pool(1);
    for rows in [6, 1] {
        let host = HostSequence::begin(&pool, Some(&plan), None, &[1], 9, 0).unwrap();
        let late = Arc::new(LateInputs::default());
        for index in 0..rows {
            host.register_verified(&late, index, &mut row_params(index), AcceptanceRule::Rejection, index);
        }
        (0..rows).for_each(|index| late.begin_draw(index, HostRow::of_logits(&[0.0; SIZE])));
        assert!((0..rows).all(|index| late.wait_token(index).is_ok()));
    }
    // Before the only thread computes a mask, it has put back the buffers of all rows.
    let grammar = constraint("a", ConstraintStart::Immediately);
    generate(&HostSequence::begin(&pool, None, Some(&grammar), &[1], 9, 0).unwrap(), 1, false);
    assert_eq!(pool.kept_buffers(), 2);
}

/// The device may still hand over rows when the pool is gone.
#[test]
fn dropping_the_pool_gives_up_all_rows_of_a_step() {
    let plan = plan(json!({"mirostat": 2}));
    let pool = pool(1);
    let host = HostSequence::begin(&pool, Some(&plan), None, &[1], 9, 0).unwrap();
    let late = Arc::new(LateInputs::default());
    for index in 0..3 {
        host.register_verified(&late, index, &mut row_params(index), AcceptanceRule::Coupled, index);
    }
    late.begin_draw(0, HostRow { next_token: Some(3), ..HostRow::of_logits(&[0.0; SIZE]) });
    drop((host, pool));
    // The first rows do not wait for those that have not come.
    assert!(late.wait_token(0).is_ok());
    late.begin_draw(1, HostRow::of_logits(&[0.0; SIZE]));
    assert!(late.wait_token(1).is_ok());
}

#[test]
fn a_panic_gives_up_the_rows_behind() {
    let panicking = Arc::new(HostPool::new(1, 1, SIZE, |_, _| panic!("planted")).unwrap());
    let plan = plan(json!({"mirostat": 2}));
    let host = HostSequence::begin(&panicking, Some(&plan), None, &[1], 9, 0).unwrap();
    for _ in 0..2 {
        let late = Arc::new(LateInputs::default());
        for index in 0..4 {
            host.register_verified(&late, index, &mut row_params(index), AcceptanceRule::Coupled, index);
        }
        for index in 0..4 {
            late.begin_draw(index, HostRow { next_token: Some(3), ..HostRow::of_logits(&[0.0; SIZE]) });
        }
        (0..4).for_each(|index| assert!(late.wait_token(index).is_ok()));
    }
    assert!(host.error().is_some());
}
