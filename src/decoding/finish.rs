//! When a sequence is over, as far as token ids and lengths tell.
//!
//! Invariant: decided from one token alone; stop strings are found where ids become text.

use crate::request::FinishReason;

/// Why the sequence ends with `token`, if it does. `generated` counts the tokens generated so far, this one
/// included; `eos` are the model's end-of-sequence tokens.
///
/// A token that ends the sequence with [`FinishReason::Stop`] is not sent to the client; one that ends it
/// with [`FinishReason::Length`] is.
pub fn finish(
    token: u32,
    eos: &[u32],
    ignore_eos: bool,
    generated: u32,
    max_tokens: u32,
) -> Option<FinishReason> {
    if !ignore_eos && eos.contains(&token) {
        return Some(FinishReason::Stop);
    }
    (generated >= max_tokens).then_some(FinishReason::Length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_at_eos_and_at_the_limit_and_nowhere_else() {
        const EOS: &[u32] = &[2, 7];
        let cases = [
            (5, EOS, false, 1, 3, None),
            (5, EOS, false, 2, 3, None),
            (5, EOS, false, 3, 3, Some(FinishReason::Length)),
            (2, EOS, false, 1, 3, Some(FinishReason::Stop)),
            (7, EOS, false, 1, 3, Some(FinishReason::Stop)),
            // At the limit the end-of-sequence token is still one, and still not sent.
            (7, EOS, false, 3, 3, Some(FinishReason::Stop)),
            (7, EOS, true, 2, 3, None),
            (7, EOS, true, 3, 3, Some(FinishReason::Length)),
            (2, &[], false, 1, 3, None),
        ];
        for (token, eos, ignore_eos, generated, max_tokens, expected) in cases {
            let reason = finish(token, eos, ignore_eos, generated, max_tokens);
            assert_eq!(
                reason, expected,
                "token {token}, {generated} of {max_tokens}, ignore_eos {ignore_eos}"
            );
        }
    }
}
