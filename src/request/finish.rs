//! When a sequence ends, as far as token ids and lengths decide it, and the logit biases that keep it from
//! ending too soon.
//!
//! Invariant: the decision depends on one token only; stop strings are found in the detokenized text. The
//! tokens that [`logit_biases`] bans are exactly those that [`finish_reason`] would end the sequence with.

use super::{FinishReason, Request};

/// Returns why `request`'s sequence ends with `token`, if it does. `generated` counts the generated tokens,
/// including this one; `eos` are the model's end-of-sequence tokens. A request for 0 tokens ends with the
/// first token.
///
/// An end-of-sequence or stop token is not part of the text; the last token of a sequence of maximum length
/// is.
pub fn finish_reason(token: u32, request: &Request, eos: &[u32], generated: u32) -> Option<FinishReason> {
    if request.max_tokens == 0 {
        return Some(FinishReason::Length);
    }
    if active_eos(request, eos).contains(&token) {
        return Some(FinishReason::Stop);
    }
    if request.stop_ids.contains(&token) {
        return Some(FinishReason::StopToken(token));
    }
    (generated >= request.max_tokens).then_some(FinishReason::Length)
}

/// Returns the biases for the logits of the token after `generated` ones: the request's own, and before
/// `min_tokens` a ban (negative infinity) on every token that would end the sequence.
pub fn logit_biases<'a>(
    request: &'a Request,
    eos: &'a [u32],
    generated: u32,
) -> impl Iterator<Item = (u32, f32)> + 'a {
    let ends = active_eos(request, eos).iter().chain(&*request.stop_ids);
    let banned = ends.filter(move |_| generated < request.min_tokens).map(|id| (*id, f32::NEG_INFINITY));
    request.logit_bias.iter().copied().chain(banned)
}

/// Returns the end-of-sequence tokens that apply to the request.
fn active_eos<'a>(request: &Request, eos: &'a [u32]) -> &'a [u32] {
    if request.ignore_eos { &[] } else { eos }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EOS: &[u32] = &[2, 7];

    /// A request with two stop tokens, of which one is an end-of-sequence token of the model, too.
    fn request(max_tokens: u32, ignore_eos: bool) -> Request {
        Request { ignore_eos, stop_ids: [7, 9].into(), ..Request::greedy("", [1], max_tokens) }
    }

    #[test]
    fn ends_at_eos_at_stop_tokens_and_at_the_limit_and_nowhere_else() {
        use FinishReason::{Length, Stop, StopToken};
        let cases = [
            (5, false, 1, 3, None),
            (5, false, 2, 3, None),
            (5, false, 3, 3, Some(Length)),
            (2, false, 1, 3, Some(Stop)),
            // The model's end-of-sequence tokens come first, unless they are ignored.
            (7, false, 1, 3, Some(Stop)),
            (7, true, 1, 3, Some(StopToken(7))),
            (9, false, 1, 3, Some(StopToken(9))),
            (9, true, 2, 3, Some(StopToken(9))),
            // At the maximum length, a token that ends the sequence is reported as such, too.
            (2, false, 3, 3, Some(Stop)),
            (9, false, 3, 3, Some(StopToken(9))),
            (2, true, 2, 3, None),
            (2, true, 3, 3, Some(Length)),
            // A request for 0 tokens.
            (5, false, 1, 0, Some(Length)),
            (2, false, 1, 0, Some(Length)),
        ];
        for (token, ignore_eos, generated, max_tokens, expected) in cases {
            let reason = finish_reason(token, &request(max_tokens, ignore_eos), EOS, generated);
            assert_eq!(
                reason, expected,
                "token {token}, {generated} of {max_tokens}, ignore_eos {ignore_eos}"
            );
        }
        assert_eq!(finish_reason(2, &request(3, false), &[], 1), None);
    }

    /// Before `min_tokens`, exactly the tokens that would end the sequence are banned; from then on none is.
    #[test]
    fn tokens_that_would_end_a_sequence_too_soon_are_banned() {
        for ignore_eos in [false, true] {
            let logit_bias = [(4, 1.5), (2, -3.0)].into();
            let request = Request { min_tokens: 2, logit_bias, ..request(5, ignore_eos) };
            for generated in 0..4 {
                let all: Vec<(u32, f32)> = logit_biases(&request, EOS, generated).collect();
                assert_eq!(all[..2], *request.logit_bias);
                for token in 0..12 {
                    let is_forbidden = all[2..].contains(&(token, f32::NEG_INFINITY));
                    let would_end = finish_reason(token, &request, EOS, generated + 1).is_some();
                    assert_eq!(is_forbidden, generated < 2 && would_end, "{token} after {generated}");
                }
            }
        }
    }
}
