//! Properties of predictions and of the search, over models of several families.
//!
//! Invariant: rates are made up, so nothing depends on the machine.

use super::cost::{StepWork, pass_seconds};
use super::job::StepSizes;
use super::*;
use crate::model::spec::SpecFile;
use crate::model::synthetic::SyntheticShape;
use crate::model::{ModelRef, ModelSource, ModelSpec};
use crate::specs;
use mainstem_kernels::QuantType;
use mainstem_kernels::random::philox;
use std::cell::Cell;
use std::path::Path;

const KV: QuantType = QuantType::F16;

/// Pseudo-random numbers from 0 to 1.
struct Random(u32);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 += 1;
        f64::from(philox([self.0, 0, 0, 0], [7, 0])[0]) / 2f64.powi(32)
    }

    /// A number from 0 to `most - 1`.
    fn below(&mut self, most: usize) -> usize {
        (self.next() * most as f64) as usize
    }
}

/// Rates of an imaginary machine for models with these costs.
fn rates(costs: &[&ModelCost], disk: f64) -> MachineRates {
    // Reading bounds few rows, arithmetic many.
    let curve = |ty: QuantType| {
        let read = ty.bits_per_element() / 8.0 / 10e9;
        let point = |rows: usize| (rows as f64, read.max(rows as f64 * 2.0 / 80e9));
        RowCurve::new([1, 4, 16, 64, 512].map(point).to_vec())
    };
    let mut rates = MachineRates {
        memory: 10e9,
        operation: 2e-6,
        step: 1e-4,
        token: 1e-5,
        disk: Some(DiskRates { read: disk, write: disk / 2.0 }),
        ..MachineRates::default()
    };
    for cost in costs {
        rates.gemms.extend(cost.formats().into_iter().map(|ty| (ty.name().to_owned(), curve(ty))));
        for ty in QuantType::kv_cache_types() {
            let attention = AttentionRates { decode: 1e-8 * ty.bits_per_element(), prompt: 2e-8 };
            let shapes = cost.attention_shapes(ty).into_iter();
            rates.attention.extend(shapes.map(|shape| (shape.name(), attention)));
        }
    }
    rates
}

fn synthetic(shape: &str) -> ModelSpec {
    let shape = SyntheticShape::parse(shape).unwrap();
    shape.resolve(SpecFile::for_model_type(specs::SYNTHETIC).unwrap()).unwrap()
}

/// Costs of models of all kinds: dense, a mixture, encoder-decoder, encoder-only, with windows.
fn costs() -> Vec<(String, ModelCost)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let fixture = |name: &str| {
        let source = ModelSource::open(&ModelRef::Path(folder.join(name)), None).unwrap();
        (name.to_owned(), ModelCost::from_spec(&source.spec, &|piece| source.load_type(piece)))
    };
    let mut all = vec![("110M".to_owned(), large("110M"))];
    let families = folder.join("families");
    let mut names: Vec<_> = families.read_dir().unwrap().flatten().map(|entry| entry.file_name()).collect();
    names.sort();
    let names = names.iter().map(|name| format!("families/{}", name.to_str().unwrap()));
    let opens = |name: &String| ModelSource::open(&ModelRef::Path(folder.join(name)), None).is_ok();
    all.extend(names.filter(opens).map(|name| fixture(&name)));
    all.extend(["gqa", "tied"].map(fixture));
    assert!(all.len() > 8, "{}", all.len());
    all
}

fn large(shape: &str) -> ModelCost {
    ModelCost::from_spec(&synthetic(shape), &|_| QuantType::F16)
}

#[test]
fn a_curve_is_monotone_and_passes_through_its_points() {
    let curve =
        RowCurve::new(vec![(64.0, 4.0), (1.0, 1.0), (4.0, 1.5), (16.0, 1.2), (0.0, 9.0), (2.0, f64::NAN)]);
    for (rows, seconds) in
        [(0.5, 1.0), (1.0, 1.0), (4.0, 1.2), (16.0, 1.2), (40.0, 2.6), (64.0, 4.0), (128.0, 8.0)]
    {
        assert!((curve.seconds(rows) - seconds).abs() < 1e-12, "{rows}: {}", curve.seconds(rows));
    }
    let mut random = Random(0);
    for _ in 0..100 {
        let points = (0..1 + random.below(8)).map(|_| (1.0 + random.next() * 600.0, random.next())).collect();
        let curve = RowCurve::new(points);
        let times: Vec<f64> = (1..1000).map(|rows| curve.seconds(f64::from(rows))).collect();
        assert!(times.is_sorted(), "{curve:?}");
        let json = serde_json::to_string(&curve).unwrap();
        assert_eq!(serde_json::from_str::<RowCurve>(&json).unwrap(), curve);
    }
    assert_eq!(RowCurve::new(Vec::new()).seconds(3.0), 0.0);
}

/// A step takes the longer of computing and reading, as far as two layers of buffers allow.
#[test]
fn computing_and_reading_overlap() {
    let close =
        |actual: f64, expected: f64| assert!((actual / expected - 1.0).abs() < 0.02, "{actual}, {expected}");
    let layers = 20;
    close(pass_seconds(&vec![2.0; layers], &vec![0.0; layers], 3.0), 43.0);
    close(pass_seconds(&vec![2.0; layers], &vec![1.0; layers], 3.0), 43.0);
    close(pass_seconds(&vec![1.0; layers], &vec![2.0; layers], 1.0), 40.0);
    // While a layer that is not read computes, no more than two can be read ahead.
    let read: Vec<f64> = (0..layers).map(|layer| if layer < 10 { 4.0 } else { 0.0 }).collect();
    let seconds = pass_seconds(&vec![2.0; layers], &read, 0.0);
    assert!(seconds > 50.0 && seconds < 61.0, "{seconds}");
}

/// More rows, longer contexts and less in memory never make a step faster, in models of every kind.
#[test]
fn steps_are_monotone() {
    let mut random = Random(100);
    for (name, cost) in costs() {
        let rates = rates(&[&cost], 1e9);
        for _ in 0..100 {
            let mut number = |most: usize| random.below(most) as f64;
            let policy = StepPolicy { kv: KV, read_seconds: number(5) * 1e-3 };
            let work = StepWork {
                prompt_rows: number(100),
                prompt_context: number(100),
                decode_rows: number(100),
                decode_context: number(500),
                encoder_len: number(100),
                outputs: number(50),
            };
            let base = cost.step(&rates, &policy, &work);
            assert!(base.seconds.is_finite() && base.seconds >= base.compute * (1.0 - 1e-9), "{name}");
            let more = [
                StepWork { prompt_rows: work.prompt_rows + 9.0, ..work },
                StepWork { decode_rows: work.decode_rows + 9.0, ..work },
                StepWork { prompt_context: work.prompt_context * 2.0, ..work },
                StepWork { decode_context: work.decode_context * 2.0, ..work },
                StepWork { outputs: work.outputs + 1.0, ..work },
            ];
            for more in more {
                let time = cost.step(&rates, &policy, &more).seconds;
                assert!(time >= base.seconds * (1.0 - 1e-9), "{name}: {work:?}, {more:?}");
            }
            let slower = StepPolicy { read_seconds: policy.read_seconds + 1e-4, ..policy };
            assert!(cost.step(&rates, &slower, &work).seconds >= base.seconds, "{name}: {work:?}");
        }
    }
}

/// A row reads the two of five experts that it chooses, and many rows all of them.
#[test]
fn few_rows_read_few_experts() {
    let (_, mixture) = costs().into_iter().find(|(name, _)| name == "families/mixtral").unwrap();
    let (rates, policy) = (rates(&[&mixture], 1e9), StepPolicy { kv: KV, read_seconds: 1.0 });
    let read = |decode_rows: f64| {
        let work = StepWork { decode_rows, ..StepWork::default() };
        mixture.step(&rates, &policy, &work).read
    };
    let (one, two, all) = (read(1.0), read(2.0), read(1e4));
    let experts = (all - one) / 0.6;
    assert!((all - 1.0).abs() < 1e-9 && experts > 0.2 && experts < 1.0, "{one}, {all}");
    // The second row's two of five are among the other three in 24 of 100 cases.
    assert!((two - one - 0.24 * experts).abs() < 1e-9, "{one}, {two}, {all}");
}

/// Every row of every request is computed once, whatever the sizes of steps.
#[test]
fn a_job_computes_each_row_once() {
    let mut random = Random(200);
    for _ in 0..300 {
        let workload = Workload {
            requests: 1 + random.below(40),
            prompt: 1 + random.below(50),
            output: random.below(12),
        };
        let slots = 1 + random.below(20);
        let sizes = StepSizes {
            slots,
            token_budget: slots + 1 + random.below(60),
            is_prompt_whole: random.next() < 0.3,
        };
        let total = |of: fn(&StepWork) -> f64| {
            let most = Cell::new(0.0f64);
            let seconds = workload.seconds(&sizes, &|work| {
                most.set(most.get().max(work.decode_rows + work.prompt_rows));
                of(work)
            });
            assert!(
                most.get() <= sizes.token_budget.max(workload.prompt + slots) as f64,
                "{workload:?} {sizes:?}"
            );
            // A job that is scaled is not exact.
            if workload.requests <= 2 * slots { seconds.round() as usize } else { usize::MAX }
        };
        let expected =
            |each: usize| if workload.requests <= 2 * slots { workload.requests * each } else { usize::MAX };
        let Workload { prompt, output, .. } = workload;
        assert_eq!(total(|work| work.prompt_rows), expected(prompt), "{workload:?} {sizes:?}");
        assert_eq!(
            total(|work| work.decode_rows),
            expected(output.saturating_sub(1)),
            "{workload:?} {sizes:?}"
        );
        assert_eq!(total(|work| work.outputs), expected(output), "{workload:?} {sizes:?}");
    }
}

/// Nothing is infinite, negative or no number, however small a job is, in models of every kind.
#[test]
fn small_jobs_have_predictions() {
    let mut random = Random(250);
    for (name, cost) in costs() {
        let rates = rates(&[&cost], 1e9);
        for _ in 0..60 {
            let workload =
                Workload { requests: random.below(3), prompt: random.below(3), output: random.below(4) };
            let policy = StepPolicy { kv: KV, read_seconds: random.below(2) as f64 * 1e-3 };
            let (slots, token_budget) = (1 + random.below(4), random.below(6));
            let choice = Choice { variant: 0, kv: KV, slots, token_budget };
            let Prediction {
                prefill, prefill_rate, decode, decode_rate, job_seconds, request_seconds, ..
            } = Predictor { cost: &cost, rates: &rates, policy, slowest: 1 }.predict(&choice, &workload);
            let steps = [prefill, decode].into_iter().flat_map(|it| [it.seconds, it.compute, it.read]);
            let all = steps.chain([prefill_rate, decode_rate, job_seconds, request_seconds]);
            assert!(all.into_iter().all(|it| it.is_finite() && it >= 0.0), "{name}: {workload:?} {choice:?}");
            assert_eq!(job_seconds > 0.0, workload.requests > 0, "{name}: {workload:?} {choice:?}");
            assert!(request_seconds > 0.0 && prefill_rate > 0.0, "{name}: {workload:?} {choice:?}");
        }
    }
}

/// Requests take turns: ten of them in four slots fill these three times, and the last time not all.
#[test]
fn the_last_partial_wave_counts() {
    let sizes = StepSizes { slots: 4, token_budget: 100, is_prompt_whole: false };
    let steps = |requests| Workload { requests, prompt: 3, output: 5 }.seconds(&sizes, &|_| 1.0);
    assert_eq!([1, 4, 5, 10, 12].map(steps), [5.0, 5.0, 10.0, 15.0, 15.0]);
    let many = steps(4000);
    assert!((many / 5000.0 - 1.0).abs() < 1e-9, "{many}");
}

/// Returns the memory of a choice in an imaginary engine.
fn fit(choice: &Choice, layers: f64, memory: f64) -> Option<MemoryFit> {
    let per_slot = choice.kv.bits_per_element() * 1e6;
    let fixed = 1e8 + choice.slots as f64 * per_slot + choice.token_budget as f64 * 1e5;
    let (buffers, layers) = (layers / 10.0, layers / (1 + choice.variant) as f64);
    if fixed + layers <= memory {
        return Some(MemoryFit { memory: fixed + layers, resident: layers, streamed: 0.0 });
    }
    let resident = (memory - fixed - buffers).min(layers);
    let used = fixed + buffers + resident;
    (resident >= 0.0).then_some(MemoryFit { memory: used, resident, streamed: layers - resident })
}

struct Case {
    variants: Vec<Variant>,
    rates: MachineRates,
    tiers: Vec<Tier>,
    workload: Workload,
    layers: f64,
}

impl Case {
    fn new(random: &mut Random) -> Case {
        let variant =
            |ty, weights| Variant { weights, cost: ModelCost::from_spec(&synthetic("110M"), &|_| ty) };
        let variants = vec![variant(QuantType::F16, None), variant(QuantType::Q8_0, Some("q8"))];
        let costs: Vec<&ModelCost> = variants.iter().map(|variant| &variant.cost).collect();
        let disk = 1e8 + random.next() * 2e9;
        let rates = rates(&costs, disk);
        let memory = Tier { name: "memory", bytes: 2e8 + random.next() * 1.5e9, read: 10e9 };
        let tiers = vec![memory, Tier { name: "disk", bytes: f64::INFINITY, read: disk }];
        let workload = Workload {
            requests: 1 + random.below(60),
            prompt: 1 + random.below(300),
            output: 1 + random.below(60),
        };
        Case { variants, rates, tiers, workload, layers: 2e8 + random.next() * 1e9 }
    }

    fn choices(&self, slots: &[usize]) -> Vec<Choice> {
        let mut all = Vec::new();
        for variant in 0..self.variants.len() {
            for kv in [KV, QuantType::Q8_0] {
                for slots in slots.iter().copied() {
                    let budgets = token_budgets(slots, self.workload.prompt);
                    all.extend(budgets.into_iter().map(|token_budget| Choice {
                        variant,
                        kv,
                        slots,
                        token_budget,
                    }));
                }
            }
        }
        all
    }

    fn problem(&self, objective: Objective, choices: Vec<Choice>) -> PlacementProblem<'_> {
        PlacementProblem {
            variants: &self.variants,
            choices,
            workload: self.workload,
            objective,
            max_token_seconds: None,
            rates: &self.rates,
            tiers: &self.tiers,
        }
    }

    fn best(&self, problem: &PlacementProblem) -> Option<PlannedPolicy> {
        let found = problem.search(3, |choice, memory| fit(choice, self.layers, memory));
        assert!(found.iter().all(|policy| policy.memory <= self.tiers[0].bytes + 0.5));
        found.into_iter().next()
    }
}

/// The search stops early, and finds what trying everything finds; the numbers of sequences that it tries are
/// enough.
#[test]
fn the_search_finds_the_best_of_all() {
    let mut random = Random(300);
    for _ in 0..12 {
        let case = Case::new(&mut random);
        let every: Vec<usize> = (1..=case.workload.requests).collect();
        for objective in [Objective::Throughput, Objective::Latency] {
            let score = |prediction: &Prediction| match objective {
                Objective::Throughput => prediction.job_seconds,
                Objective::Latency => prediction.request_seconds,
            };
            let problem = case.problem(objective, case.choices(&every));
            let predicted = |choice: &Choice| {
                let layers = problem.place(&fit(choice, case.layers, case.tiers[0].bytes)?)?;
                Some(score(&problem.predict(choice, &layers)))
            };
            let least = problem.choices.iter().filter_map(predicted);
            let least = least.fold(f64::INFINITY, f64::min);
            let best = case.best(&problem).map_or(f64::INFINITY, |best| score(&best.prediction));
            assert_eq!(best, least, "{:?}", case.workload);
            let few = case.problem(objective, case.choices(&slot_counts(case.workload.requests)));
            let best = case.best(&few).map_or(f64::INFINITY, |best| score(&best.prediction));
            assert!(best <= 1.03 * least, "{:?}: {best}, {least}", case.workload);
        }
    }
}

#[test]
fn more_memory_is_never_slower() {
    let mut random = Random(400);
    for _ in 0..10 {
        let mut case = Case::new(&mut random);
        let (mut before, mut found) = (f64::INFINITY, 0);
        for memory in (0..24).map(|step| 1.2e8 * 1.15f64.powi(step)) {
            case.tiers[0].bytes = memory;
            let problem =
                case.problem(Objective::Throughput, case.choices(&slot_counts(case.workload.requests)));
            let Some(best) = case.best(&problem) else {
                assert_eq!(found, 0, "something fitted into less");
                continue;
            };
            found += 1;
            assert!(best.prediction.job_seconds <= before, "{memory}");
            before = best.prediction.job_seconds;
        }
        assert!(found > 3);
    }
}

#[test]
fn a_bound_of_the_time_per_token_is_kept_and_no_disk_means_none() {
    let mut random = Random(500);
    let mut case = Case::new(&mut random);
    (case.layers, case.tiers[0].bytes) = (8e8, 7e8);
    let slots = slot_counts(case.workload.requests);
    let free = case.best(&case.problem(Objective::Throughput, case.choices(&slots))).unwrap();
    let most = free.prediction.decode.seconds * 0.9;
    let problem = case.problem(Objective::Throughput, case.choices(&slots));
    let bounded = case.best(&PlacementProblem { max_token_seconds: Some(most), ..problem });
    assert!(bounded.is_none_or(|best| best.prediction.decode.seconds <= most));
    case.tiers.truncate(1);
    let f16: Vec<Choice> = case.choices(&slots).into_iter().filter(|choice| choice.variant == 0).collect();
    assert_eq!(case.best(&case.problem(Objective::Throughput, f16)), None);
}

/// The bound of a step follows from the longer of its times.
#[test]
fn the_bound_is_what_takes_the_time() {
    let cost = large("110M");
    let rates = rates(&[&cost], 1e9);
    let bound = |slots, read_seconds| {
        let policy = StepPolicy { kv: KV, read_seconds };
        let choice = Choice { variant: 0, kv: KV, slots, token_budget: 512 };
        let workload = Workload { requests: 999, prompt: 8, output: 8 };
        Predictor { cost: &cost, rates: &rates, policy, slowest: 1 }.predict(&choice, &workload).bound
    };
    assert_eq!(
        [bound(1, 0.0), bound(64, 0.0), bound(64, 60.0)],
        [Bound::Memory, Bound::Compute, Bound::Tier(1)]
    );
}

#[test]
fn few_numbers_of_sequences_and_rows_are_tried() {
    assert_eq!(slot_counts(1), [1]);
    assert_eq!(slot_counts(10), [1, 2, 3, 4, 5, 6, 7, 8, 10]);
    for requests in [0, 100, 5_000, 1_000_000] {
        let counts = slot_counts(requests);
        assert!(counts.is_sorted() && counts.len() < 100 && counts[0] == 1, "{counts:?}");
        assert_eq!(counts.last(), Some(&requests.clamp(1, 1024)));
    }
    for (slots, prompt) in [(1, 1), (32, 512), (1024, 100_000)] {
        let budgets = token_budgets(slots, prompt);
        assert!(budgets.iter().all(|budget| *budget > slots) && budgets.len() < 8, "{budgets:?}");
    }
}
