//! How far what several devices say may be from what one does.
//!
//! Invariant: tokens that are told apart are never taken for each other, however near the numbers may be.

use mainstem_kernels::StepOutput;

/// How near two outputs must be.
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

    /// Whether of two log-probabilities the first is larger for all who are so near.
    fn tells_apart(self, a: f32, b: f32) -> bool {
        match self {
            Near::Bits => true,
            Near::Within(tolerance) => a - b > 2.0 * tolerance,
        }
    }
}

/// Asserts that what several devices said is as near as that to what one did.
pub fn check(what: &str, ours: &[StepOutput], theirs: &[StepOutput], near: Near) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (step, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        assert_eq!((ours.rows.len(), ours.hidden.len()), (theirs.rows.len(), theirs.hidden.len()), "{what}");
        for (row, (a, b)) in ours.rows.iter().zip(&theirs.rows).enumerate() {
            let is_same = a.token == b.token && near.holds(a.logprob, b.logprob);
            assert!(is_same, "{what}: step {step}, row {row}: {a:?}, alone {b:?}");
            check_top(&format!("{what}: step {step}, row {row}"), ours.top_of(a), theirs.top_of(b), near);
        }
        for (at, (a, b)) in ours.hidden.iter().zip(&theirs.hidden).enumerate() {
            assert!(near.holds(*a, *b), "{what}: step {step}, number {at}: {a}, alone {b}");
        }
    }
}

/// Tokens and log-probabilities; of tokens that are nearly as likely as the next, and of the last, which may be, only those.
fn check_top(what: &str, ours: &[(u32, f32)], theirs: &[(u32, f32)], near: Near) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (at, (a, b)) in ours.iter().zip(theirs).enumerate() {
        let before = at == 0 || near.tells_apart(theirs[at - 1].1, b.1);
        let behind = theirs.get(at + 1).map_or(near == Near::Bits, |next| near.tells_apart(b.1, next.1));
        let is_same = a.0 == b.0 || !(before && behind);
        assert!(is_same && near.holds(a.1, b.1), "{what}: {ours:?}, alone {theirs:?}");
    }
}
