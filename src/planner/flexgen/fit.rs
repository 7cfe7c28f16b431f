//! A fit of the cost model's rates to measured runs, by the method of Levenberg and Marquardt in the
//! logarithms of the rates. The paper's own fit is a gradient descent of 30,000 rounds over the same errors.
//!
//! Invariant: rates stay positive.

use super::formulas::Formulas;
use super::{Block, Lengths, Memories, OptShape, Placement, Problem, Rates};
use good_lp::{Expression, IntoAffineExpression, ProblemVariables};
use std::array;

/// A measured run of a block with a given placement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measurement {
    pub shape: OptShape,
    pub lengths: Lengths,
    pub compress_weights: bool,
    pub placement: Placement,
    pub block: Block,
    /// Time of the prompts, and of all steps after the first, in seconds.
    pub prefill_seconds: f64,
    pub decode_seconds: f64,
}

/// Number of rates whose reciprocals the times are linear in.
const LINEAR: usize = 11;

/// Number of all parameters: host attention and its three coefficients in addition.
const PARAMETERS: usize = LINEAR + 4;

/// Maximum number of rounds, far more than a fit takes.
const ROUNDS: usize = 200;

/// The terms of a run's times: for each rate, the work that it divides.
pub(super) struct Terms {
    prefill: [[f64; LINEAR]; 3],
    decode: [[f64; LINEAR]; 4],
    /// Work of attention on the host, in the last of the times of decoding.
    host_attention: f64,
    measurement: Measurement,
    /// Numbers of layers, and of layers times steps.
    repeats: [f64; 2],
    formulas: Formulas,
}

impl Terms {
    pub(super) fn new(measurement: Measurement) -> Terms {
        let Measurement { shape, lengths, compress_weights, placement, block, .. } = measurement;
        let unlimited = Memories { gpu: 0.0, host: 0.0, disk: 0.0, usable: 0.0 };
        let problem = Problem {
            shape,
            lengths,
            rates: Rates::T4,
            memories: unlimited,
            compress_weights,
            placement: Some(placement),
        };
        let formulas = Formulas::new(&mut ProblemVariables::new(), &problem, block);
        // With one rate of 1 and all others infinite, a time is the work of that rate.
        let only = |at: usize| {
            let mut values = [f64::INFINITY; LINEAR];
            values[at] = 1.0;
            rates_of(&values, f64::INFINITY, [0.0; 3])
        };
        let host_only = rates_of(&[f64::INFINITY; LINEAR], 1.0, [0.0; 3]);
        let value = |time: &Expression| time.constant();
        let prefill: [[f64; 3]; LINEAR] =
            array::from_fn(|at| formulas.prefill_times(&only(at)).each_ref().map(value));
        let decode: [[f64; 4]; LINEAR] =
            array::from_fn(|at| formulas.decode_times(&only(at)).each_ref().map(value));
        Terms {
            prefill: array::from_fn(|time| array::from_fn(|rate| prefill[rate][time])),
            decode: array::from_fn(|time| array::from_fn(|rate| decode[rate][time])),
            host_attention: value(&formulas.decode_times(&host_only)[3]),
            measurement,
            repeats: [shape.layers, shape.layers * (lengths.output - 1.0)],
            formulas,
        }
    }

    /// Errors of the predicted times, relative to the measured ones. A run of one step has no decoding.
    pub(super) fn errors(&self, rates: &Rates) -> [f64; 2] {
        let values = linear(rates);
        let time = |work: &[f64; LINEAR]| work.iter().zip(&values).map(|(work, rate)| work / rate).sum();
        let prefill = self.prefill.iter().map(time).fold(0.0, f64::max);
        let mut decode: [f64; 4] = self.decode.each_ref().map(time);
        decode[3] += self.host_attention / self.formulas.host_attention_rate(rates);
        let decode = decode.into_iter().fold(0.0, f64::max);
        let [layers, steps] = self.repeats;
        let Measurement { prefill_seconds, decode_seconds, .. } = self.measurement;
        let decode_error = if steps > 0.0 { steps * decode / decode_seconds - 1.0 } else { 0.0 };
        [layers * prefill / prefill_seconds - 1.0, decode_error]
    }
}

/// The rates that times are linear in the reciprocals of.
fn linear(rates: &Rates) -> [f64; LINEAR] {
    [
        rates.host_to_gpu,
        rates.gpu_to_host_cache,
        rates.gpu_to_host_hidden,
        rates.disk_to_host,
        rates.host_to_disk_cache,
        rates.host_to_disk_hidden,
        rates.host_to_disk_decode,
        rates.matmul_prefill,
        rates.matmul_decode,
        rates.batched_matmul_prefill,
        rates.batched_matmul_decode,
    ]
}

/// The inverse of [`linear`], with the remaining parameters.
fn rates_of(linear: &[f64; LINEAR], host_attention: f64, host_attention_slowdown: [f64; 3]) -> Rates {
    let [
        host_to_gpu,
        gpu_to_host_cache,
        gpu_to_host_hidden,
        disk_to_host,
        host_to_disk_cache,
        host_to_disk_hidden,
        host_to_disk_decode,
        matmul_prefill,
        matmul_decode,
        batched_matmul_prefill,
        batched_matmul_decode,
    ] = *linear;
    Rates {
        host_to_gpu,
        gpu_to_host_cache,
        gpu_to_host_hidden,
        disk_to_host,
        host_to_disk_cache,
        host_to_disk_hidden,
        host_to_disk_decode,
        matmul_prefill,
        matmul_decode,
        batched_matmul_prefill,
        batched_matmul_decode,
        host_attention,
        host_attention_slowdown,
    }
}

/// The parameters as the fit changes them: logarithms of the rates, which keeps them positive, and the
/// coefficients of host attention.
pub(super) fn to_parameters(rates: &Rates) -> [f64; PARAMETERS] {
    let logs = linear(rates).map(f64::ln);
    array::from_fn(|at| match at {
        _ if at < LINEAR => logs[at],
        LINEAR => rates.host_attention.ln(),
        _ => rates.host_attention_slowdown[at - LINEAR - 1],
    })
}

pub(super) fn to_rates(parameters: &[f64; PARAMETERS]) -> Rates {
    let slowdown = array::from_fn(|at| parameters[LINEAR + 1 + at]);
    rates_of(&array::from_fn(|at| parameters[at].exp()), parameters[LINEAR].exp(), slowdown)
}

/// The result of a fit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fit {
    pub rates: Rates,
    /// Root mean square of the relative errors of all predicted times.
    pub error: f64,
}

/// Fits rates to measurements, from a first guess. A rate that no measurement depends on keeps the guess.
pub fn fit(measurements: &[Measurement], guess: Rates) -> Fit {
    let terms: Vec<Terms> = measurements.iter().copied().map(Terms::new).collect();
    let errors = |parameters: &[f64; PARAMETERS]| -> Vec<f64> {
        let rates = to_rates(parameters);
        terms.iter().flat_map(|terms| terms.errors(&rates)).collect()
    };
    let sum = |errors: &[f64]| errors.iter().map(|error| error * error).sum::<f64>();
    let mut parameters = to_parameters(&guess);
    let mut current = errors(&parameters);
    let mut damping = 1e-2;
    for _ in 0..ROUNDS {
        let (squares, gradient) = normal_equations(&parameters, &current, &errors);
        let mut damped = squares;
        // A parameter without influence stays where it is.
        (0..PARAMETERS).for_each(|at| damped[at][at] += damping * squares[at][at].max(1e-9));
        let step = solve(damped, gradient);
        let next: [f64; PARAMETERS] = array::from_fn(|at| parameters[at] - step[at].clamp(-1.0, 1.0));
        let next_errors = errors(&next);
        let (before, after) = (sum(&current), sum(&next_errors));
        if after < before {
            (parameters, current) = (next, next_errors);
            damping = (damping / 3.0_f64).max(1e-9);
        } else {
            damping *= 4.0;
        }
        if before - after < 1e-12 * before && (after < before || damping > 1e9) {
            break;
        }
    }
    let error = (sum(&current) / current.len().max(1) as f64).sqrt();
    Fit { rates: to_rates(&parameters), error }
}

type Matrix = [[f64; PARAMETERS]; PARAMETERS];

/// Returns the squares of the Jacobian and its product with the errors.
fn normal_equations(
    parameters: &[f64; PARAMETERS],
    current: &[f64],
    errors: &impl Fn(&[f64; PARAMETERS]) -> Vec<f64>,
) -> (Matrix, [f64; PARAMETERS]) {
    const DELTA: f64 = 1e-6;
    let columns: Vec<Vec<f64>> = (0..PARAMETERS)
        .map(|at| {
            let mut moved = *parameters;
            moved[at] += DELTA;
            errors(&moved).iter().zip(current).map(|(moved, error)| (moved - error) / DELTA).collect()
        })
        .collect();
    let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let squares = array::from_fn(|row| array::from_fn(|column| product(&columns[row], &columns[column])));
    (squares, array::from_fn(|row| product(&columns[row], current)))
}

/// Solves a system of equations with a symmetric, positive definite matrix by Gauss's elimination.
fn solve(mut matrix: Matrix, mut right: [f64; PARAMETERS]) -> [f64; PARAMETERS] {
    for row in 0..PARAMETERS {
        for below in row + 1..PARAMETERS {
            let factor = matrix[below][row] / matrix[row][row];
            let upper = matrix[row];
            matrix[below].iter_mut().zip(upper).for_each(|(value, upper)| *value -= factor * upper);
            right[below] -= factor * right[row];
        }
    }
    for row in (0..PARAMETERS).rev() {
        let known: f64 = (row + 1..PARAMETERS).map(|at| matrix[row][at] * right[at]).sum();
        right[row] = (right[row] - known) / matrix[row][row];
    }
    right
}
