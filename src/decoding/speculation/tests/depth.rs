//! The number of drafts: its optimality against trying all choices, and the estimates that it depends on.

use crate::decoding::speculation::{
    DepthPlanner, MAX_DEPTH, Speculating, SpeculationStats, StepCost, StepCosts, StepWork,
};
use mainstem_kernels::random::uniform;
use std::time::Duration;

/// Statistics of a sequence whose drafts were accepted at this rate, at all positions.
fn stats(rate: f64) -> SpeculationStats {
    SpeculationStats::new(rate)
}

/// Costs of a step in milliseconds.
fn cost(step: f64, row: f64, pass: f64, draft_row: f64) -> StepCost {
    StepCost { step: step / 1e3, row: row / 1e3, pass: pass / 1e3, draft_row: draft_row / 1e3 }
}

/// A sequence, as (statistics, limit, has a model).
type Case = (SpeculationStats, usize, bool);

fn speculating((stats, limit, has_model): &Case) -> Speculating<'_> {
    Speculating { stats, limit: *limit, has_model: *has_model, missing: 0 }
}

fn plan(cases: &[Case], costs: &StepCost, others: usize, max_drafts: usize) -> Vec<usize> {
    let mut planner = DepthPlanner::default();
    planner.plan(cases.iter().map(speculating), costs, cases.len() + others, max_drafts).to_vec()
}

/// Tokens per second of a choice, computed from the definition.
fn rate(cases: &[Case], costs: &StepCost, others: usize, depths: &[usize]) -> f64 {
    let mut tokens = (cases.len() + others) as f64;
    let mut work = StepWork { rows: cases.len() + others, ..StepWork::default() };
    for ((stats, _, has_model), &depth) in cases.iter().zip(depths) {
        tokens += stats.survival()[..depth].iter().sum::<f64>();
        work.rows += depth;
        if *has_model {
            work.passes = work.passes.max(depth);
            work.draft_rows += depth;
        }
    }
    tokens / costs.seconds(&work)
}

#[test]
fn no_other_choice_gives_more_tokens_per_second() {
    let mut drafted = 0;
    for case in 0..300u64 {
        let random = |i: u64| f64::from(uniform(case, i, 0));
        let cases: Vec<Case> = (0..3)
            .map(|s| {
                let mut stats = stats(random(s));
                let results =
                    (0..(random(9 + s) * 9.0) as u64).map(|i| (random(100 * s + 40 + i) * 5.0) as usize);
                results.for_each(|accepted| stats.observe(4, accepted));
                (stats, (random(3 + s) * 5.0) as usize, random(6 + s) < 0.6)
            })
            .collect();
        let costs = cost(5.0 * random(20), 2.0 * random(21), 2.0 * random(22) * random(23), random(24));
        let (others, max_drafts) = ((random(25) * 4.0) as usize, (random(26) * 14.0) as usize);
        let depths = plan(&cases, &costs, others, max_drafts);
        let chosen = rate(&cases, &costs, others, &depths);
        assert!(depths.iter().zip(&cases).all(|(depth, (_, limit, _))| depth <= limit));
        assert!(depths.iter().sum::<usize>() <= max_drafts);
        drafted += depths.iter().sum::<usize>();
        for number in 0..125 {
            let other = [number % 5, number / 5 % 5, number / 25];
            let fits = other.iter().zip(&cases).all(|(depth, (_, limit, _))| depth <= limit);
            if fits && other.iter().sum::<usize>() <= max_drafts {
                let rate = rate(&cases, &costs, others, &other);
                assert!(rate <= chosen * (1.0 + 1e-9), "case {case}: {other:?} is better than {depths:?}");
            }
        }
    }
    assert!(drafted > 300, "{drafted}");
}

#[test]
fn depths_grow_with_acceptance_and_shrink_with_costs() {
    for sequences in [1, 4, 16] {
        let depth = |rate: f64, costs: StepCost| {
            plan(&vec![(stats(rate), MAX_DEPTH, true); sequences], &costs, 0, usize::MAX)[0]
        };
        let mut deepest = 0;
        for step in 0..20 {
            let varied = f64::from(step);
            let (a, b) = (varied / 20.0, (varied + 1.0) / 20.0);
            assert!(depth(a, cost(5.0, 0.2, 0.5, 0.05)) <= depth(b, cost(5.0, 0.2, 0.5, 0.05)));
            for costs in
                [|x| cost(5.0, x, 0.5, 0.05), |x| cost(5.0, 0.2, x, 0.05), |x| cost(5.0, 0.2, 0.5, x)]
            {
                assert!(depth(0.8, costs(varied)) >= depth(0.8, costs(varied + 1.0)));
                deepest = deepest.max(depth(0.8, costs(varied)));
            }
        }
        assert!(deepest >= 2, "{sequences}: {deepest}");
    }
}

#[test]
fn a_full_batch_gets_no_drafts() {
    // A step whose time is that of its rows: a draft costs more than it gives.
    let costs = cost(0.2, 1.0, 0.3, 0.1);
    let sequences = |n| vec![(stats(0.9), 8, true); n];
    assert_eq!(plan(&sequences(32), &costs, 0, 999), [0; 32]);
    // A step that is bound by memory has room for them, as long as it is small.
    let costs = cost(20.0, 0.5, 1.0, 0.1);
    assert!(plan(&sequences(1), &costs, 0, 999)[0] >= 4);
    let depths: Vec<usize> = [1, 8, 32, 128, 512].map(|n| plan(&sequences(n), &costs, 0, 9999)[0]).into();
    assert!(depths.is_sorted_by(|a, b| a >= b) && depths[4] < depths[0], "{depths:?}");
    let alone = plan(&sequences(1), &costs, 0, 999)[0];
    assert!(plan(&sequences(1), &costs, 400, 999)[0] < alone, "other sequences fill the batch, too");
}

#[test]
fn the_budget_goes_to_the_drafts_that_are_accepted_most() {
    let costs = cost(20.0, 0.01, 0.0, 0.0);
    let cases = [(stats(0.3), 4, true), (stats(0.9), 4, true), (stats(0.6), 4, false)];
    assert_eq!(plan(&cases, &costs, 0, 0), [0, 0, 0]);
    assert_eq!(plan(&cases, &costs, 0, 3), [0, 3, 0]);
    assert_eq!(plan(&cases, &costs, 0, 5), [0, 4, 1]);
    assert_eq!(plan(&cases, &costs, 0, 99), [4, 4, 4]);
}

/// Copied drafts do not wait for passes that do not pay.
#[test]
fn copied_drafts_cost_no_pass() {
    let costs = cost(5.0, 0.5, 50.0, 0.1);
    let cases = [(stats(0.8), 4, true), (stats(0.8), 4, false)];
    let depths = plan(&cases, &costs, 0, 99);
    assert!(depths[0] == 0 && depths[1] > 1, "{depths:?}");
}

#[test]
fn probes_come_now_and_then_and_rarely_if_they_show_nothing() {
    let mut planner = DepthPlanner::default();
    let full = cost(0.0, 1.0, 1.0, 1.0);
    let cases = vec![(stats(0.5), 4, true), (stats(0.5), 0, true), (stats(0.5), 4, false)];
    let mut probes = Vec::new();
    for number in 1..=3000 {
        let depths = planner.plan(cases.iter().map(speculating), &full, 3, 9);
        if depths.iter().sum::<usize>() > 0 {
            assert_eq!(depths, [1, 0, 1]);
            probes.push(number);
        }
    }
    assert_eq!(probes, [64, 192, 448, 960, 1984]);
    // Drafts that pay bring back the usual interval, also for sequences that get none.
    let uneven = [(stats(0.9), 4, false), (stats(0.01), 4, false)];
    let cheap = cost(5.0, 1.0, 0.0, 0.0);
    let depths: Vec<usize> =
        (0..200).map(|_| planner.plan(uneven.iter().map(speculating), &cheap, 2, 9)[1]).collect();
    assert_eq!(depths.iter().sum::<usize>(), 4, "at once, and after 64, 128 and 192 plans");
    // Without any known time, there is one draft to learn from, within the budget.
    assert_eq!(plan(&cases, &StepCost::default(), 0, 1), [1, 0, 0]);
}

#[test]
fn statistics_approach_the_rates_of_each_position() {
    let mut observed = SpeculationStats::new(0.5);
    assert!((observed.survival()[1] - 0.25).abs() < 1e-6);
    // The first draft is accepted in half of the steps, those behind it always.
    for i in 0..400 {
        observed.observe(4, if i % 2 == 0 { 0 } else { 4 });
    }
    let survival = observed.survival();
    assert!((survival[0] - 0.5).abs() < 0.08 && survival[3] > 0.35, "{survival:?}");
    assert!(survival.is_sorted_by(|a, b| a > b));
    // Old results are forgotten.
    (0..100).for_each(|_| observed.observe(4, 0));
    assert!(observed.survival()[0] < 0.05);
    let mut better = observed.clone();
    better.observe(MAX_DEPTH + 3, MAX_DEPTH + 3);
    assert!(better.survival().iter().zip(observed.survival()).all(|(a, b)| *a >= b));
}

/// Observes steps whose time varies by 5 %, with or without the part of the drafts.
fn observe(
    costs: &mut StepCosts,
    truth: &StepCost,
    (steps, has_parts): (u64, bool),
    of_step: impl Fn(u64) -> StepWork,
) {
    for i in 0..steps {
        let work = of_step(i);
        let noise = 1.0 + 0.1 * (f64::from(uniform(3, i, 0)) - 0.5);
        let of_drafts =
            truth.seconds(&work) - truth.seconds(&StepWork { rows: work.rows, ..StepWork::default() });
        let [whole, drafts] = [truth.seconds(&work), of_drafts.max(0.0)]
            .map(|seconds| Duration::from_secs_f64(seconds * noise));
        costs.observe(&work, whole, if has_parts { drafts } else { Duration::ZERO });
    }
}

#[test]
fn costs_are_those_of_the_steps() {
    let truth = cost(8.0, 0.3, 0.6, 0.02);
    for has_parts in [false, true] {
        let mut costs = StepCosts::default();
        let depth = |i: u64| (uniform(5, i, 0) * 4.0) as usize;
        let of_step = |i| {
            let (rows, passes) = (10 + 10 * depth(i), depth(i));
            StepWork { rows, passes, draft_rows: (3 + i as usize % 8) * passes }
        };
        observe(&mut costs, &truth, (600, has_parts), of_step);
        for work in (0..9).map(of_step) {
            let (got, want) = (costs.estimate().seconds(&work), truth.seconds(&work));
            assert!((got / want - 1.0).abs() < 0.05, "{work:?}: {got} is not {want}");
        }
        let pass = costs.estimate().pass;
        assert!(!has_parts || (pass / truth.pass - 1.0).abs() < 0.1, "{pass}");
        // An interruption changes little, a slower machine is noticed.
        let before = costs.estimate().seconds(&of_step(1));
        costs.observe(&of_step(1), Duration::from_secs(60), Duration::ZERO);
        assert!(costs.estimate().seconds(&of_step(1)) < 1.2 * before);
        observe(&mut costs, &cost(16.0, 0.6, 1.2, 0.04), (600, has_parts), of_step);
        let after = costs.estimate().seconds(&of_step(1));
        assert!((after / before - 2.0).abs() < 0.2, "{after} after {before}");
    }
}

/// Rows seem cheap where observations do not tell what they cost, so that drafts show it.
#[test]
fn rows_seem_cheap_until_drafts_show_their_cost() {
    let truth = cost(9.0, 1.0, 0.5, 0.5);
    let mut costs = StepCosts::default();
    let plain = StepWork { rows: 1, ..StepWork::default() };
    observe(&mut costs, &truth, (100, false), |_| plain);
    let estimate = *costs.estimate();
    assert!(estimate.step > 50.0 * estimate.row && estimate.pass == 0.0, "{estimate:?}");
    let drafted = |depth| StepWork { rows: 1 + depth, passes: depth, draft_rows: depth };
    observe(&mut costs, &truth, (40, false), |i| drafted(1 + i as usize % 3));
    let estimate = costs.estimate();
    let extra = estimate.seconds(&drafted(5)) - estimate.seconds(&plain);
    assert!((extra - 0.010).abs() < 0.002, "{estimate:?}");
    assert!([estimate.step, estimate.row, estimate.pass, estimate.draft_row].iter().all(|&x| x >= 0.0));
}

#[test]
fn probes_leave_out_sequences_whose_draft_model_is_behind() {
    let stats = SpeculationStats::new(0.9);
    // Rows cost so much that no draft pays.
    let costs = StepCost { step: 0.0, row: 1.0, pass: 1.0, draft_row: 1.0 };
    let plan = |planner: &mut DepthPlanner, missing: [usize; 3]| {
        let all = missing.map(|missing| Speculating { stats: &stats, limit: 4, has_model: true, missing });
        planner.plan(all.into_iter(), &costs, 3, 10).to_vec()
    };
    let mut planner = DepthPlanner::default();
    let until_probe = |planner: &mut DepthPlanner, missing| {
        (1..2000).find_map(|n| Some((n, plan(planner, missing))).filter(|(_, depths)| *depths != [0; 3]))
    };
    assert_eq!(until_probe(&mut planner, [0, 30, 0]), Some((64, vec![1, 0, 1])));
    // The one that has waited longest catches up first, and the probe follows as soon as it can.
    assert_eq!(until_probe(&mut planner, [30, 60, 50]), Some((128, vec![0, 1, 0])));
    assert_eq!(until_probe(&mut planner, [30, 20, 50]), Some((1, vec![0, 0, 1])));
    assert_eq!(until_probe(&mut planner, [30, 0, 50]), Some((1, vec![0, 1, 0])));
    assert_eq!(until_probe(&mut planner, [30, 1, 50]), Some((256, vec![0, 0, 1])));
}
