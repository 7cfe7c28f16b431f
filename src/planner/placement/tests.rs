//! Properties of predictions and of the search, over models of several families.
//!
//! Invariant: rates are made up, so nothing depends on the machine.

use super::job::StepSizes;
use super::step::{StepWork, pass_seconds};
use super::traffic::ROUTES;
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

/// Positions of a page.
const PAGE: usize = 32;

/// A policy with everything on the device.
const RESIDENT: StepPolicy = StepPolicy {
    kv: KV,
    page: PAGE as f64,
    weights: [0.0; ROUTES],
    load: [0.0; ROUTES],
    store: [0.0; ROUTES],
    whole_experts: false,
};

/// Returns a policy with weights on disk that take so many seconds to read.
fn reading(seconds: f64) -> StepPolicy {
    StepPolicy { weights: [0.0, 0.0, seconds], ..RESIDENT }
}

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
        disk: Some(DiskRates { read: disk, write: disk / 2.0, pages: disk }),
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
    let (layers, disk) = (20, |seconds| [0.0, 0.0, seconds]);
    let alike = |kind, around| pass_seconds(&[kind], &vec![0; layers], around);
    close(alike((2.0, disk(0.0)), 3.0), 43.0);
    close(alike((2.0, disk(1.0)), 3.0), 43.0);
    close(alike((1.0, disk(2.0)), 1.0), 40.0);
    // Paths do not wait for each other.
    close(alike((1.0, [2.0, 1.5, 2.5]), 1.0), 50.0);
    // While a layer that is not read computes, no more than two can be read ahead.
    let order: Vec<usize> = (0..layers).map(|layer| usize::from(layer >= 10)).collect();
    let seconds = pass_seconds(&[(2.0, disk(4.0)), (2.0, disk(0.0))], &order, 0.0);
    assert!(seconds > 50.0 && seconds < 61.0, "{seconds}");
}

/// With weights on disk only, a pass takes what a single reader ahead of the computation makes it.
#[test]
fn one_route_is_one_reader() {
    let one_reader = |layers: &[(f64, f64)], around: f64| {
        let (mut is_read, mut ended, mut before) = (0.0f64, 0.0f64, 0.0f64);
        for _ in 0..16 {
            for (compute, read) in layers {
                is_read = is_read.max(before) + read;
                before = ended;
                ended = ended.max(is_read) + compute;
            }
            ended += around;
        }
        ended / 16.0
    };
    let mut random = Random(50);
    for _ in 0..100 {
        let layers: Vec<(f64, f64)> =
            (0..1 + random.below(30)).map(|_| (random.next(), 2.0 * random.next())).collect();
        let around = random.next();
        let kinds: Vec<_> = layers.iter().map(|(compute, read)| (*compute, [0.0, 0.0, *read])).collect();
        let order: Vec<usize> = (0..layers.len()).collect();
        assert_eq!(pass_seconds(&kinds, &order, around), one_reader(&layers, around), "{layers:?}");
    }
}

/// More rows, longer contexts and less in memory never make a step faster, in models of every kind.
#[test]
fn steps_are_monotone() {
    let mut random = Random(100);
    for (name, cost) in costs() {
        let rates = rates(&[&cost], 1e9);
        for _ in 0..100 {
            let mut number = |most: usize| random.below(most) as f64;
            let mut moved = |scale: f64| [0; ROUTES].map(|_| number(5) * scale);
            let (weights, load, store) = (moved(1e-3), moved(1e-6), moved(1e-6));
            let policy = StepPolicy { weights, load, store, ..RESIDENT };
            let work = StepWork {
                prompt_rows: number(100),
                prompt_context: number(100),
                decode_rows: number(100),
                decode_context: number(500),
                encoder_len: number(100),
                prompts: number(3),
                prompt_start: number(100),
                outputs: number(50),
            };
            let cost_of = |policy: &StepPolicy| cost.prepare(&rates, KV, &work).bound(policy).seconds;
            let base = cost.step(&rates, &policy, &work);
            assert!(base.seconds.is_finite() && base.seconds >= base.compute * (1.0 - 1e-9), "{name}");
            let more = [
                StepWork { prompt_rows: work.prompt_rows + 9.0, ..work },
                StepWork { decode_rows: work.decode_rows + 9.0, ..work },
                StepWork { prompt_context: work.prompt_context * 2.0, ..work },
                StepWork { decode_context: work.decode_context * 2.0, ..work },
                StepWork { outputs: work.outputs + 1.0, ..work },
                StepWork { prompts: work.prompts + 1.0, ..work },
                StepWork { prompt_start: work.prompt_start + 1.0, ..work },
            ];
            for more in more {
                let time = cost.step(&rates, &policy, &more).seconds;
                assert!(time >= base.seconds * (1.0 - 1e-9), "{name}: {work:?}, {more:?}");
            }
            assert!(cost_of(&policy) <= base.seconds * (1.0 + 1e-9), "{name}: {work:?}");
            for route in Route::ALL {
                let [mut weights, mut load, mut store] = [policy; 3];
                weights.weights[route as usize] += 1e-4;
                load.load[route as usize] += 1e-7;
                store.store[route as usize] += 1e-7;
                for slower in [weights, load, store] {
                    let time = cost.step(&rates, &slower, &work).seconds;
                    assert!(time >= base.seconds, "{name}: {work:?}, {route:?}");
                }
            }
        }
    }
}

/// A row reads the two of five experts that it chooses, and many rows all of them.
#[test]
fn few_rows_read_few_experts() {
    let (_, mixture) = costs().into_iter().find(|(name, _)| name == "families/mixtral").unwrap();
    let rates = rates(&[&mixture], 1e9);
    let read_with = |policy: StepPolicy, decode_rows: f64| {
        let work = StepWork { decode_rows, ..StepWork::default() };
        mixture.step(&rates, &policy, &work).moved[Route::Disk as usize]
    };
    let read = |rows| read_with(reading(1.0), rows);
    let whole = StepPolicy { whole_experts: true, ..reading(1.0) };
    assert!((read_with(whole, 1.0) - 1.0).abs() < 1e-9);
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
            let of_step = |(work, count): &(StepWork, f64)| {
                most.set(most.get().max(work.decode_rows + work.prompt_rows));
                count * of(work)
            };
            let seconds: f64 = workload.steps(&sizes).iter().map(of_step).sum();
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
        // Each prompt has rows in one step, and in one more for each step that begins within it.
        let begun = total(|work| if work.prompt_start > 0.0 { 1.0 } else { 0.0 });
        let prompts = if begun == usize::MAX { begun } else { expected(1) + begun };
        assert_eq!(total(|work| work.prompts), prompts, "{workload:?} {sizes:?}");
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
            let policy = reading(random.below(2) as f64 * 1e-3);
            let policies = [StepPolicy { load: [1e-6; ROUTES], store: [1e-6; ROUTES], ..policy }];
            let variant = Variant { weights: None, stages: vec![cost.clone()], lanes: 1 };
            let (slots, token_budget) = (1 + random.below(4), random.below(6));
            let choice = Choice { variant: 0, kv: KV, slots, token_budget };
            let Prediction {
                prefill, prefill_rate, decode, decode_rate, job_seconds, request_seconds, ..
            } = Predictor::new(&variant, &rates, &choice, &workload).predict(&policies);
            let steps = [prefill, decode];
            let steps = steps.into_iter().flat_map(|it| [it.seconds, it.compute, it.longest_move()]);
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
    let steps = |requests| -> f64 {
        let steps = Workload { requests, prompt: 3, output: 5 }.steps(&sizes);
        steps.iter().map(|(_, count)| count).sum()
    };
    assert_eq!([1, 4, 5, 10, 12].map(steps), [5.0, 5.0, 10.0, 15.0, 15.0]);
    let many = steps(4000);
    assert!((many / 5000.0 - 1.0).abs() < 1e-9, "{many}");
}

/// An imaginary machine with a device that has memory of its own, or not, and an engine.
struct Case {
    variants: Vec<Variant>,
    rates: MachineRates,
    links: Links,
    /// Bytes of the memory of the device, and of the host if the device has its own.
    memory: f64,
    host: Option<f64>,
    workload: Workload,
    /// Bytes of the matrices of layers, and of the cache of a sequence.
    layers: f64,
    cache: f64,
}

/// Parts of the caches that may be in each tier.
const LEVELS: usize = 6;

impl Case {
    fn new(random: &mut Random) -> Case {
        let variant = |ty, weights| {
            let cost = ModelCost::from_spec(&synthetic("110M"), &|_| ty);
            Variant { weights, stages: vec![cost], lanes: 1 }
        };
        let variants = vec![variant(QuantType::F16, None), variant(QuantType::Q8_0, Some("q8"))];
        let costs: Vec<&ModelCost> = variants.iter().flat_map(|variant| &variant.stages).collect();
        let rates = rates(&costs, 1e8 + random.next() * 2e9);
        let workload = Workload {
            requests: 1 + random.below(60),
            prompt: 1 + random.below(300),
            output: 1 + random.below(60),
        };
        Case {
            links: Links { device: f64::INFINITY, disk: rates.disk },
            variants,
            rates,
            memory: 2e8 + random.next() * 1.5e9,
            host: None,
            workload,
            layers: 2e8 + random.next() * 1e9,
            cache: 2e6 + random.next() * 3e7,
        }
    }

    /// Returns a case whose device has memory of its own.
    fn with_host(random: &mut Random) -> Case {
        let mut case = Case::new(random);
        case.links.device = 3e8 + random.next() * 5e9;
        case.memory *= 0.5;
        case.host = Some(random.next() * 1e9);
        case
    }

    /// Returns the bytes of a choice without layers, those of its weights, and those of its caches.
    fn sizes(&self, choice: &Choice) -> [f64; 3] {
        let cache = choice.slots as f64 * self.cache * choice.kv.bits_per_element() / 16.0;
        [1e8 + choice.token_budget as f64 * 1e5, self.layers / (1 + choice.variant) as f64, cache]
    }

    /// Returns how a choice fits with so much of the caches on the device and on the host.
    fn fit(&self, choice: &Choice, on_device: f64, in_host: f64) -> Option<MemoryFit> {
        let [fixed, weights, cache] = self.sizes(choice);
        let buffers = if on_device < 1.0 { cache / 4.0 } else { 0.0 };
        let own = fixed + on_device * cache + buffers;
        let device = match own + weights <= self.memory {
            true => weights,
            false => (self.memory - own - weights / 10.0).min(weights),
        };
        let room = self.host.unwrap_or(0.0) - in_host * cache;
        let host = room.min(weights - device);
        let caches = [on_device, in_host, 1.0 - on_device - in_host].map(|part| part * cache);
        let stage = StageData {
            weights: ByTier { device, host, disk: weights - device - host },
            caches: ByTier { device: caches[0], host: caches[1], disk: caches[2].max(0.0) },
            positions: (choice.slots * self.workload.prompt.max(PAGE)) as f64,
            whole_experts: false,
        };
        let is_possible = device >= 0.0 && host >= 0.0;
        let memory = own + device + if device < weights { weights / 10.0 } else { 0.0 };
        let fit = MemoryFit {
            memory,
            host_memory: in_host * cache + host,
            stages: vec![stage],
            ..Default::default()
        };
        let needs_disk = fit.weight_bytes().disk + fit.cache_bytes().disk > 0.5;
        (is_possible && (self.links.disk.is_some() || !needs_disk)).then_some(fit)
    }

    /// Returns all ways in which a choice fits.
    fn fits(&self, choice: &Choice) -> Vec<MemoryFit> {
        let levels =
            (0..=LEVELS).rev().flat_map(|device| (0..=LEVELS - device).map(move |host| (device, host)));
        let part = |level: usize| level as f64 / LEVELS as f64;
        levels
            .filter(|(_, host)| *host == 0 || self.host.is_some())
            .filter_map(|(device, host)| self.fit(choice, part(device), part(host)))
            .collect()
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
            links: self.links,
            page: PAGE,
        }
    }

    /// Returns the best policy, with any parts of the caches below the device, or with none.
    fn best_with(&self, problem: &PlacementProblem, has_caches_below: bool) -> Option<PlannedPolicy> {
        let fits = |choice: &Choice| {
            let mut fits = self.fits(choice);
            fits.retain(|fit| has_caches_below || fit.cache_bytes().below() == 0.0);
            fits
        };
        let found = problem.search(3, fits);
        for PlannedPolicy { fit, .. } in &found {
            assert!(fit.memory <= self.memory + 0.5, "{fit:?}");
            assert!(fit.host_memory <= self.host.unwrap_or(0.0) + 0.5, "{fit:?}");
        }
        found.into_iter().next()
    }

    fn best(&self, problem: &PlacementProblem) -> Option<PlannedPolicy> {
        self.best_with(problem, true)
    }
}

/// The search stops early, and finds what trying everything finds; the numbers of sequences that it tries are
/// enough.
#[test]
fn the_search_finds_the_best_of_all() {
    let mut random = Random(300);
    for number in 0..4 {
        let case = if number % 2 == 0 { Case::new(&mut random) } else { Case::with_host(&mut random) };
        let every: Vec<usize> = (1..=case.workload.requests.min(12)).collect();
        for objective in [Objective::Throughput, Objective::Latency] {
            let score = |prediction: &Prediction| match objective {
                Objective::Throughput => prediction.job_seconds,
                Objective::Latency => prediction.request_seconds,
            };
            let problem = case.problem(objective, case.choices(&every));
            let predicted = |choice: &Choice| {
                let fits = case.fits(choice).into_iter();
                fits.map(|fit| score(&problem.predict(choice, &fit.stages))).fold(f64::INFINITY, f64::min)
            };
            let least = problem.choices.iter().map(predicted).fold(f64::INFINITY, f64::min);
            let best = case.best(&problem).map_or(f64::INFINITY, |best| score(&best.prediction));
            assert!(best <= least * (1.0 + 1e-12), "{:?}: {best}, {least}", case.workload);
            let few: Vec<usize> =
                slot_counts(case.workload.requests).into_iter().filter(|it| *it <= 12).collect();
            let few = case.problem(objective, case.choices(&few));
            let best = case.best(&few).map_or(f64::INFINITY, |best| score(&best.prediction));
            assert!(best <= 1.03 * least, "{:?}: {best}, {least}", case.workload);
        }
    }
}

/// Neither more memory of a device or of the host, nor caches in slower tiers, make a plan slower.
#[test]
fn more_memory_and_more_freedom_are_never_slower() {
    let mut random = Random(400);
    let mut gained = 0;
    for number in 0..8 {
        let mut case = if number % 2 == 0 { Case::new(&mut random) } else { Case::with_host(&mut random) };
        let of_host = number % 4 == 3;
        if of_host {
            case.memory = 4e8;
        }
        let (mut before, mut found) = (f64::INFINITY, 0);
        for memory in (0..12).map(|step| 1.2e8 * 1.33f64.powi(step)) {
            *(if of_host { case.host.as_mut().unwrap() } else { &mut case.memory }) = memory;
            let problem =
                case.problem(Objective::Throughput, case.choices(&slot_counts(case.workload.requests)));
            let Some(best) = case.best(&problem) else {
                assert_eq!(found, 0, "something fitted into less");
                continue;
            };
            found += 1;
            let seconds = best.prediction.job_seconds;
            assert!(seconds <= before * (1.0 + 1e-12), "{memory}: {seconds}, {before}");
            before = seconds;
            let without =
                case.best_with(&problem, false).map_or(f64::INFINITY, |best| best.prediction.job_seconds);
            assert!(seconds <= without, "{memory}: {seconds}, {without}");
            gained += usize::from(seconds < 0.99 * without);
        }
        assert!(found > 3);
    }
    assert!(gained > 3, "caches in slower tiers gain in {gained} cases");
}

/// The parts of caches that are tried, with weights in what is left, are about as good as the solution of the
/// linear program over all fractions, which has the same costs and memories.
#[test]
fn placements_are_as_good_as_those_of_the_linear_program() {
    use good_lp::{ProblemVariables, Solution, SolverModel, constraint, microlp, variable};
    let mut random = Random(450);
    for _ in 0..40 {
        let case = Case::with_host(&mut random);
        let choice = Choice { variant: 0, kv: KV, slots: 1 + random.below(40), token_budget: 512 };
        let [fixed, weights, cache] = case.sizes(&choice);
        let whole =
            |tier: ByTier| StageData { positions: 1e3, weights: tier, caches: tier, whole_experts: false };
        let seconds = |data: &StageData| {
            let policy = StepPolicy::new(data, &case.links, KV, PAGE);
            // A step that loads a third of the positions and stores some.
            std::array::from_fn(|route| {
                policy.weights[route] + 300.0 * policy.load[route] + 30.0 * policy.store[route]
            })
        };
        let of_weights = |tier| StageData { caches: ByTier::default(), ..whole(tier) };
        let of_caches = |tier| StageData { weights: ByTier::default(), ..whole(tier) };
        let [host, disk] =
            [ByTier { host: 1.0, ..ByTier::default() }, ByTier { disk: 1.0, ..ByTier::default() }];
        let costs: [[f64; ROUTES]; 4] =
            [of_weights(host), of_weights(disk), of_caches(host), of_caches(disk)].map(|data| seconds(&data));
        let of = |fit: &MemoryFit| -> f64 {
            let data = StageData { positions: 1e3, ..fit.stages[0] };
            seconds(&data).into_iter().fold(0.0, f64::max)
        };
        let tried = case.fits(&choice).iter().map(of).fold(f64::INFINITY, f64::min);
        let mut best = f64::INFINITY;
        // With and without buffers for weights and for caches.
        for (has_weights_below, has_caches_below) in
            [(false, false), (false, true), (true, false), (true, true)]
        {
            let mut variables = ProblemVariables::new();
            let mut part = |max: bool| variables.add(variable().min(0).max(if max { 1.0 } else { 0.0 }));
            let [wh, wd] = [part(has_weights_below), part(has_weights_below)];
            let [ch, cd] = [part(has_caches_below), part(has_caches_below)];
            let longest = variables.add(variable().min(0));
            let mut program = variables.minimise(longest).using(microlp);
            for route in Route::ALL {
                let [a, b, c, d] = costs.map(|cost| cost[route as usize]);
                let (a, b, c, d) = (a * weights, b * weights, c * cache, d * cache);
                program.add_constraint(constraint!(a * wh + b * wd + c * ch + d * cd <= longest));
            }
            program.add_constraint(constraint!(wh + wd <= 1));
            program.add_constraint(constraint!(ch + cd <= 1));
            let buffers = if has_weights_below { weights / 10.0 } else { 0.0 }
                + if has_caches_below { cache / 4.0 } else { 0.0 };
            let room = (case.memory - fixed - buffers - weights - cache) / 1e9;
            let (w, c) = (weights / 1e9, cache / 1e9);
            program.add_constraint(constraint!(-w * wh - w * wd - c * ch - c * cd <= room));
            program.add_constraint(constraint!(w * wh + c * ch <= case.host.unwrap() / 1e9));
            best = program.solve().map_or(best, |found| best.min(found.value(longest)));
        }
        assert_eq!(tried.is_finite(), best.is_finite(), "{tried}, {best}");
        if tried.is_finite() {
            // One part of the caches more or less, on every route.
            let step = costs[2].iter().chain(&costs[3]).fold(0.0, |most: f64, cost| most.max(*cost));
            let slack = step * cache / LEVELS as f64 + 1e-6;
            assert!(tried >= best - 1e-6 && tried <= best + slack, "{tried}, {best}, {slack}");
        }
    }
}

#[test]
fn a_bound_of_the_time_per_token_is_kept_and_no_disk_means_none() {
    let mut random = Random(500);
    let mut case = Case::new(&mut random);
    (case.layers, case.memory) = (8e8, 7e8);
    let slots = slot_counts(case.workload.requests);
    let free = case.best(&case.problem(Objective::Throughput, case.choices(&slots))).unwrap();
    let most = free.prediction.decode.seconds * 0.9;
    let problem = case.problem(Objective::Throughput, case.choices(&slots));
    let bounded = case.best(&PlacementProblem { max_token_seconds: Some(most), ..problem });
    assert!(bounded.is_none_or(|best| best.prediction.decode.seconds <= most));
    case.links.disk = None;
    let f16: Vec<Choice> = case.choices(&slots).into_iter().filter(|choice| choice.variant == 0).collect();
    assert_eq!(case.best(&case.problem(Objective::Throughput, f16)), None);
}

/// The bound of a step follows from the longest of its times.
#[test]
fn the_bound_is_what_takes_the_time() {
    let cost = large("110M");
    let rates = rates(&[&cost], 1e9);
    let variant = Variant { weights: None, stages: vec![cost], lanes: 1 };
    let bound = |slots, policy: StepPolicy| {
        let choice = Choice { variant: 0, kv: KV, slots, token_budget: 512 };
        let workload = Workload { requests: 999, prompt: 8, output: 8 };
        Predictor::new(&variant, &rates, &choice, &workload).predict(&[policy]).bound
    };
    for (slots, policy, expected) in [
        (1, RESIDENT, Bound::Memory),
        (64, RESIDENT, Bound::Compute),
        (64, reading(60.0), Bound::Route(Route::Disk)),
        // The disk is behind the link.
        (64, StepPolicy { weights: [60.0, 0.0, 60.0], ..RESIDENT }, Bound::Route(Route::Disk)),
        (64, StepPolicy { weights: [60.0, 0.0, 6.0], ..RESIDENT }, Bound::Route(Route::ToDevice)),
        (64, StepPolicy { store: [0.0, 1.0, 0.1], ..RESIDENT }, Bound::Route(Route::FromDevice)),
    ] {
        assert_eq!(bound(slots, policy), expected, "{slots}, {policy:?}");
    }
}

/// Stages that have half of the layers each take turns for one step, and compute at the same time for two.
#[test]
fn stages_pass_steps_on() {
    let spec = synthetic("110M");
    let whole = large("110M");
    let rates = rates(&[&whole], 1e9);
    let half = |last: bool| {
        let mut spec = spec.clone();
        let stack = spec.decoder.as_mut().unwrap();
        stack.layers.truncate(stack.layers.len() / 2);
        if !last {
            stack.head = None;
        }
        ModelCost::from_spec(&spec, &|_| QuantType::F16).of_stage(&whole, last)
    };
    let workload = Workload { requests: 64, prompt: 32, output: 32 };
    let predict = |stages: &[ModelCost], lanes: usize, slots: usize, policies: &[StepPolicy]| {
        let variant = Variant { weights: None, stages: stages.to_vec(), lanes };
        let choice = Choice { variant: 0, kv: KV, slots, token_budget: 512 };
        Predictor::new(&variant, &rates, &choice, &workload).predict(policies)
    };
    let close = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-9, "{a}, {b}");
    let halves = [half(false), half(true)];
    let one = predict(std::slice::from_ref(&whole), 1, 8, &[RESIDENT]);
    let sum = predict(&halves, 1, 8, &[RESIDENT; 2]);
    close(one.job_seconds, sum.job_seconds);
    close(one.decode.seconds, sum.decode.seconds);
    // With two lanes of as many sequences each, the job takes as long as the longer stage does.
    let two = predict(&halves, 2, 16, &[RESIDENT; 2]);
    let stage = predict(&halves[1..], 1, 8, &[RESIDENT]).decode.seconds;
    close(two.decode.seconds, 2.0 * stage);
    assert!(two.decode_rate > 1.2 * sum.decode_rate, "{}, {}", two.decode_rate, sum.decode_rate);
    // They share the disk, but not their links.
    let slow = |route: Route| {
        let mut policy = RESIDENT;
        policy.weights[route as usize] = 1.0;
        predict(&halves, 2, 16, &[policy; 2]).decode.moved[route as usize]
    };
    close(slow(Route::Disk), 4.0);
    close(slow(Route::ToDevice), 2.0);
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
