//! Tolerances for the comparison of several devices with a single one.
//!
//! Invariant: tokens whose log-probabilities are clearly different are never considered interchangeable.

use mainstem_kernels::StepOutput;

/// The required closeness of two outputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Near {
    Bits,
    Within(f32),
}

impl Near {
    fn holds(self, a: f32, b: f32) -> bool {
        match self {
            Near::Bits => a.to_bits() == b.to_bits(),
            Near::Within(tolerance) => (a - b).abs() <= tolerance || a.is_nan() && b.is_nan(),
        }
    }

    /// Returns whether the first log-probability is larger for all outputs within the tolerance.
    fn tells_apart(self, a: f32, b: f32) -> bool {
        match self {
            Near::Bits => true,
            Near::Within(tolerance) => a - b > 2.0 * tolerance,
        }
    }
}

/// Asserts that the output of several devices is within the tolerance of that of a single device.
pub fn check(what: &str, ours: &[StepOutput], theirs: &[StepOutput], near: Near) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (step, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        assert_eq!(
            (ours.tokens.len(), ours.hidden.len()),
            (theirs.tokens.len(), theirs.hidden.len()),
            "{what}"
        );
        for (row, (a, b)) in ours.tokens.iter().zip(&theirs.tokens).enumerate() {
            let is_same = a.token == b.token && near.holds(a.logprob, b.logprob);
            assert!(is_same, "{what}: step {step}, row {row}: {a:?}, alone {b:?}");
            check_top(
                &format!("{what}: step {step}, row {row}"),
                ours.top_logprobs_of(a),
                theirs.top_logprobs_of(b),
                near,
            );
        }
        for (at, (a, b)) in ours.hidden.iter().zip(&theirs.hidden).enumerate() {
            assert!(near.holds(*a, *b), "{what}: step {step}, number {at}: {a}, alone {b}");
        }
    }
}

/// Compares tokens and log-probabilities; for tokens almost as likely as the next, and for the last, only
/// log-probabilities.
fn check_top(what: &str, ours: &[(u32, f32)], theirs: &[(u32, f32)], near: Near) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (at, (a, b)) in ours.iter().zip(theirs).enumerate() {
        let before = at == 0 || near.tells_apart(theirs[at - 1].1, b.1);
        let behind = theirs.get(at + 1).map_or(near == Near::Bits, |next| near.tells_apart(b.1, next.1));
        let is_same = a.0 == b.0 || !(before && behind);
        assert!(is_same && near.holds(a.1, b.1), "{what}: {ours:?}, alone {theirs:?}");
    }
}
