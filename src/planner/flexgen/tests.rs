//! Tests against results of the original program with the solver CBC, and of the fit.
//!
//! Invariant: throughputs are compared, not placements, which are not unique.

use super::fit::{Terms, to_parameters, to_rates};
use super::*;
use mainstem_kernels::random::philox;

fn opt(name: &str) -> OptShape {
    let (layers, hidden, heads) = match name {
        "1.3b" => (24, 2048, 32),
        "6.7b" => (32, 4096, 32),
        "30b" => (48, 7168, 56),
        "66b" => (64, 9216, 72),
        "175b" => (96, 12288, 96),
        other => panic!("{other}"),
    };
    let [layers, hidden, heads] = [layers, hidden, heads].map(f64::from);
    OptShape { layers, hidden, mlp: 4.0 * hidden, heads }
}

fn problem(name: &str, usable: f64) -> Problem {
    Problem {
        shape: opt(name),
        lengths: Lengths { prompt: 512.0, output: 32.0 },
        rates: Rates::T4,
        memories: Memories { gpu: 16.0, host: 200.0, disk: 1500.0, usable },
        compress_weights: false,
        placement: None,
    }
}

/// A placement from the six percents of weights, cache and activations on GPU and host.
fn placed([w_gpu, w_host, c_gpu, c_host, h_gpu, h_host]: [f64; 6]) -> Option<Placement> {
    let fractions = |gpu: f64, host: f64| Fractions {
        gpu: gpu / 100.0,
        host: host / 100.0,
        disk: 1.0 - (gpu + host) / 100.0,
    };
    let (weights, cache, hidden) =
        (fractions(w_gpu, w_host), fractions(c_gpu, c_host), fractions(h_gpu, h_host));
    Some(Placement { weights, cache, hidden })
}

/// Asserts that a value is the printed one to five digits, as far as these were printed.
#[track_caller]
fn assert_close(actual: f64, expected: f64, printed: f64) {
    assert!((actual - expected).abs() <= printed.max(1e-5 * expected), "{actual} is not {expected}");
}

/// Throughput, times and peaks of the original program, to five digits.
#[test]
fn solutions_are_those_of_the_original_program() {
    let on_gpu = placed([100.0, 0.0, 100.0, 0.0, 100.0, 0.0]);
    let offloaded = placed([20.0, 80.0, 0.0, 100.0, 0.0, 100.0]);
    let on_disk = placed([0.0, 50.0, 0.0, 0.0, 0.0, 100.0]);
    let given = |name, usable, placement| Problem { placement, ..problem(name, usable) };
    let compressed = |name| Problem { compress_weights: true, ..problem(name, 0.8) };
    let of = |batch, batches| Block { batch, batches };
    let cases = [
        (given("1.3b", 0.8, on_gpu), of(4, 1), [263.24754, 0.25363, 0.2326, 2.82031, 2.68198]),
        (given("6.7b", 0.8, on_gpu), of(2, 1), [60.84806, 0.64876, 0.4030, 12.67188, 12.56473]),
        (given("30b", 1.2, offloaded), of(48, 3), [7.13573, 210.67041, 435.0937, 18.76875, 12.87019]),
        (problem("30b", 0.8), of(48, 3), [6.97397, 210.67041, 450.0724, 12.8, 6.90144]),
        (compressed("30b"), of(48, 3), [8.27305, 210.67041, 346.3191, 12.8, 6.90144]),
        (problem("66b", 0.8), of(16, 4), [0.82260, 205.23668, 2284.4266, 12.8, 10.27205]),
        (given("175b", 1.2, on_disk), of(32, 8), [0.15438, 2178.60422, 50886.9365, 13.5, 6.75879]),
        (compressed("175b"), of(32, 8), [0.22709, 2178.60422, 33895.3603, 12.8, 6.05879]),
    ];
    for (problem, block, [throughput, prefill, decode, prefill_peak, decode_peak]) in cases {
        let found = problem.solve(block).unwrap().expect("it fits");
        assert_close(found.throughput, throughput, 1e-5);
        assert_close(found.prefill_seconds, prefill, 1e-5);
        assert_close(found.decode_seconds, decode, 1e-4);
        assert_close(found.gpu_peaks[0], prefill_peak, 1e-5);
        assert_close(found.gpu_peaks[1], decode_peak, 1e-5);
    }
    for infeasible in [given("30b", 0.8, offloaded), problem("175b", 0.8)] {
        let block = if infeasible.placement.is_some() { of(48, 3) } else { of(32, 8) };
        assert_eq!(infeasible.solve(block).unwrap(), None);
    }
}

/// Regression: 90 and 10 percent did not fit, because 1 - 0.9 - 0.1 is less than 0.
#[test]
fn given_percents_need_not_be_exact_in_binary() {
    let block = Block { batch: 1, batches: 1 };
    for gpu in 0..=100 {
        let gpu = f64::from(gpu);
        let host = 100.0 - gpu;
        let given = Problem { placement: placed([gpu, host, gpu, host, gpu, host]), ..problem("1.3b", 0.8) };
        let found = given.solve(block).unwrap().expect("it fits");
        let again = Problem { placement: Some(found.placement), ..given }.solve(block).unwrap().unwrap();
        assert_close(again.throughput, found.throughput, 1e-9);
    }
    let off = Problem { placement: placed([50.0, 50.0, 50.0, 50.0, 0.0, 0.0]), ..problem("1.3b", 0.8) };
    assert_eq!(off.solve(block).unwrap(), None, "activations are not on the disk");
    for (gpu, host, disk) in [(0.5, 0.6, -0.1), (0.5, 0.6, 0.0), (0.2, 0.2, 0.2)] {
        let placement =
            off.placement.map(|given| Placement { weights: Fractions { gpu, host, disk }, ..given });
        let error = Problem { placement, ..off }.solve(block).unwrap_err().to_string();
        assert!(error.starts_with("the fractions of weights are"), "{error}");
    }
}

/// A machine without a GPU is one on which nothing fits, and one without limits has a largest block.
#[test]
fn memories_may_be_nothing_or_unlimited() {
    let memories = |gpu, all| Problem {
        memories: Memories { gpu, host: all, disk: all, usable: 0.8 },
        ..problem("1.3b", 0.8)
    };
    assert_eq!(memories(0.0, 200.0).solve(Block { batch: 1, batches: 1 }).unwrap(), None);
    assert_eq!(memories(f64::INFINITY, f64::INFINITY).max_batches(1).unwrap(), 1 << 16);
}

/// The bounds of the number of batches, and the best block. Of the first case, the original program finds two
/// batches, whose throughput is the same.
#[test]
fn the_search_finds_what_the_original_one_finds() {
    let sizes = [1, 2, 3, 4, 8, 16, 32, 64, 128, 256];
    let cases: [(&str, [f64; 3], &[usize], _, f64); 6] = [
        (
            "6.7b",
            [16.0, 200.0, 1500.0],
            &[5081, 2540, 1693, 1270, 634, 317, 158, 79, 39, 0],
            (1, 1),
            60.84806,
        ),
        (
            "6.7b",
            [15.0, 200.0, 1500.0],
            &[5077, 2538, 1692, 1269, 634, 317, 158, 79, 39, 0],
            (64, 9),
            28.17923,
        ),
        ("30b", [16.0, 200.0, 1500.0], &[1880, 940, 626, 469, 234, 117, 58, 29, 0], (32, 5), 7.09473),
        ("30b", [24.0, 64.0, 1000.0], &[1158, 578, 385, 289, 144, 72, 36, 17, 8, 0], (2, 10), 3.71700),
        ("175b", [16.0, 200.0, 1500.0], &[434, 217, 144, 108, 54, 27, 0], (1, 432), 0.16937),
        ("1.3b", [4.0, 16.0, 100.0], &[929, 464, 309, 232, 115, 57, 28, 14, 0], (1, 1), 263.24754),
    ];
    for (name, [gpu, host, disk], bounds, (batch, batches), throughput) in cases {
        let problem = Problem { memories: Memories { gpu, host, disk, usable: 0.8 }, ..problem(name, 0.8) };
        let found: Vec<usize> =
            sizes[..bounds.len()].iter().map(|size| problem.max_batches(*size).unwrap()).collect();
        assert_eq!(found, bounds, "{name}");
        let best = problem.search().unwrap().expect("something fits");
        assert_eq!(best.block, Block { batch, batches }, "{name}");
        assert_close(best.throughput, throughput, 1e-5);
    }
}

/// The solver panics at numbers that are not finite.
#[test]
fn an_invalid_problem_is_an_error() {
    let valid = problem("1.3b", 0.8);
    for rate in [-0.0, f64::NAN] {
        let rates = Rates { host_to_gpu: rate, ..Rates::T4 };
        let error = Problem { rates, ..valid }.search().unwrap_err();
        assert!(error.to_string().contains("rates must be positive"), "{error}");
        let memories = Memories { host: rate - 1.0, ..valid.memories };
        let error = Problem { memories, ..valid }.max_batches(2).unwrap_err();
        assert!(error.to_string().contains("sizes of memories"), "{error}");
    }
}

/// Pseudo-random numbers from 0 to 1.
struct Random(u32);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 += 1;
        f64::from(philox([self.0, 0, 0, 0], [5, 0])[0]) / 2f64.powi(32)
    }

    fn fractions(&mut self, with_disk: bool) -> Fractions {
        let (kind, a, b) = (self.next(), self.next(), self.next());
        let (gpu, host) = match kind {
            _ if kind < 0.2 => (1.0, 0.0),
            _ if kind < 0.4 => (0.0, 1.0),
            _ if kind < 0.6 && with_disk => (0.0, 0.0),
            _ if with_disk => (a.min(b), a.max(b) - a.min(b)),
            _ => (a, 1.0 - a),
        };
        Fractions { gpu, host, disk: 1.0 - gpu - host }
    }

    /// A run that takes no time yet.
    fn run(&mut self) -> Measurement {
        let shape = opt(["1.3b", "6.7b", "30b"][(self.next() * 3.0) as usize]);
        let lengths = Lengths {
            prompt: (64.0 + 960.0 * self.next()).floor(),
            output: 8.0 + (56.0 * self.next()).floor(),
        };
        let block =
            Block { batch: 1 << (self.next() * 8.0) as u32, batches: 1 + (self.next() * 8.0) as usize };
        let (weights, cache, hidden) = (self.fractions(true), self.fractions(true), self.fractions(false));
        Measurement {
            shape,
            lengths,
            compress_weights: self.next() < 0.3,
            placement: Placement { weights, cache, hidden },
            block,
            prefill_seconds: 1.0,
            decode_seconds: 1.0,
        }
    }
}

/// Rates other than the first guess are found again from the times that they give, and predict others.
#[test]
fn a_fit_finds_the_rates_of_synthetic_runs() {
    let mut random = Random(0);
    let mut truth = to_rates(&to_parameters(&Rates::T4).map(|value| value + 0.8 * (random.next() - 0.5)));
    truth.host_attention_slowdown = [0.012, 0.045, 0.05];
    let mut measured = || {
        let run = random.run();
        let [prefill_seconds, decode_seconds] = Terms::new(run).errors(&truth).map(|error| error + 1.0);
        Measurement { prefill_seconds, decode_seconds, ..run }
    };
    let mut known: Vec<Measurement> = (0..300).map(|_| measured()).collect();
    let lengths = Lengths { output: 1.0, ..known[0].lengths };
    known[0] = Measurement { lengths, decode_seconds: 0.0, ..known[0] };
    let found = fit(&known, Rates::T4);
    assert!(found.error < 1e-4, "{}", found.error);
    for run in (0..50).map(|_| measured()) {
        let errors = Terms::new(run).errors(&found.rates);
        assert!(errors.iter().all(|error| error.abs() < 1e-2), "{errors:?}");
    }
}
