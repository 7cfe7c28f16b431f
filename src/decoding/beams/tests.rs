//! Tests of the search against transformers' algorithm, written out with whole vocabularies, and against the
//! enumeration of all sequences.

use super::*;
use mainstem_kernels::random::uniform;

const WAYS_TO_STOP: [EarlyStopping; 3] =
    [EarlyStopping::Estimate, EarlyStopping::Immediate, EarlyStopping::Never];
const PENALTIES: [f64; 5] = [0.0, 1.0, 2.0, -0.5, 0.3];

const PLAIN: BeamParams = BeamParams {
    width: 2,
    max_tokens: 10,
    min_tokens: 0,
    length_penalty: 1.0,
    early_stopping: EarlyStopping::Estimate,
    end_tokens: Vec::new(),
    forced_tokens: 0,
};

/// A model: the log-probability of each token after some tokens. They need not be normalized.
struct Tables {
    seed: u64,
    vocab: u32,
    /// Whether log-probabilities are multiples of 1/4, so that many sums are equal, and exact.
    coarse: bool,
}

impl Tables {
    fn after(&self, tokens: &[u32]) -> Vec<f32> {
        let position = tokens
            .iter()
            .fold(7, |hash: u64, token| hash.wrapping_mul(31).wrapping_add(u64::from(*token) + 1));
        let logprob = |token| {
            // The tokens that may be end tokens are likely.
            let least = if token % 5 == 0 { -4.0 } else { -8.0 };
            let logprob = least * uniform(self.seed, position, token);
            if self.coarse { (4.0 * logprob).floor() / 4.0 } else { logprob }
        };
        (0..self.vocab).map(logprob).collect()
    }

    /// Returns the `count` most likely tokens after some tokens.
    fn row(&self, tokens: &[u32], count: usize) -> Vec<(u32, f32)> {
        let mut row: Vec<(u32, f32)> = (0..).zip(self.after(tokens)).collect();
        row.sort_by(|a, b| b.1.total_cmp(&a.1));
        row.truncate(count);
        row
    }

    /// Searches with rows that are as short as allowed.
    fn search(&self, params: &BeamParams) -> Vec<Hypothesis> {
        let mut search = BeamSearch::new(params.clone()).expect("the parameters are valid");
        let mut beams = vec![Vec::new()];
        loop {
            let count = search.candidates_per_beam();
            let rows: Vec<_> = beams.iter().map(|tokens| self.row(tokens, count)).collect();
            assert_eq!(rows.len(), search.live_beams());
            let BeamStep::Continue(new) = search.advance(rows.iter().map(Vec::as_slice)) else { break };
            let extended = |new: &NewBeam| [beams[new.parent as usize].as_slice(), &[new.token]].concat();
            beams = new.iter().map(extended).collect();
        }
        let hypotheses = search.finish();
        for Hypothesis { tokens, logprobs, .. } in &hypotheses {
            let expected = (0..tokens.len()).map(|at| self.after(&tokens[..at])[tokens[at] as usize]);
            assert!(logprobs.iter().copied().eq(expected), "the log-probability of each token");
        }
        hypotheses
    }
}

/// Returns the sequences and scores of transformers' `_beam_search`: the same steps on the same numbers, with
/// its placeholders of -1e9.
fn transformers(tables: &Tables, params: &BeamParams) -> Vec<(Vec<u32>, f32)> {
    const NOTHING: f32 = -1e9;
    let BeamParams { width, max_tokens, length_penalty, early_stopping, .. } = *params;
    let max_length = max_tokens as usize;
    let ends = |token| params.end_tokens.contains(&token);
    let power = |len: usize| ((len + params.forced_tokens as usize) as f64).powf(length_penalty) as f32;
    let mut running = vec![(Vec::new(), NOTHING); width];
    running[0].1 = 0.0;
    let mut finished = vec![(Vec::new(), NOTHING, false); width];
    for len in 0.. {
        let mut candidates = Vec::new();
        for (tokens, sum) in &running {
            for (token, mut logprob) in (0..).zip(tables.after(tokens)) {
                if len < params.min_tokens as usize && ends(token) {
                    logprob = f32::NEG_INFINITY;
                }
                candidates.push(([tokens.as_slice(), &[token]].concat(), sum + logprob));
            }
        }
        candidates.sort_by(|a, b| b.1.total_cmp(&a.1));
        candidates.truncate(width * (1 + params.end_tokens.len()).max(2));
        let stops = |tokens: &[u32]| ends(tokens[len]) || len + 1 >= max_length;
        let all_stop = candidates.iter().all(|(tokens, _)| stops(tokens));

        running = candidates.clone();
        running.iter_mut().filter(|(tokens, _)| stops(tokens)).for_each(|(_, sum)| *sum += NOTHING);
        running.sort_by(|a, b| b.1.total_cmp(&a.1));
        running.truncate(width);

        for (rank, (tokens, sum)) in candidates.into_iter().enumerate() {
            let has_ended = rank < width && stops(&tokens);
            let score = sum / power(len + 1) + if has_ended { 0.0 } else { NOTHING };
            finished.push((tokens, score, has_ended));
        }
        finished.sort_by(|a, b| b.1.total_cmp(&a.1));
        finished.truncate(width);

        let is_full = finished.iter().all(|(_, _, has_ended)| *has_ended);
        let longest = early_stopping == EarlyStopping::Never && length_penalty > 0.0;
        let best = running[0].1 / power(if longest { max_length } else { len + 1 });
        let can_improve = best > if is_full { finished[width - 1].1 } else { NOTHING };
        if !can_improve || (is_full && early_stopping == EarlyStopping::Immediate) || all_stop {
            break;
        }
    }
    finished.into_iter().map(|(tokens, score, _)| (tokens, score)).collect()
}

/// 1800 searches, half of them with many equal sums. Every way to stop must matter in some of them.
#[test]
fn the_result_is_that_of_transformers() {
    let (mut immediate_differs, mut never_differs, mut ended_early) = (0, 0, 0);
    for seed in 0..120u64 {
        let pick = |what, of: u32| (uniform(seed, what, 0) * of as f32) as u32;
        let params = BeamParams {
            width: 1 + pick(0, 5) as usize,
            max_tokens: 1 + pick(1, 16),
            min_tokens: [0, 0, 3][pick(2, 3) as usize],
            end_tokens: (0..pick(3, 4)).map(|at| 5 * at).collect(),
            forced_tokens: pick(4, 2),
            ..PLAIN
        };
        let tables = Tables { seed, vocab: 26, coarse: seed % 2 == 0 };
        for length_penalty in PENALTIES {
            let results = WAYS_TO_STOP.map(|early_stopping| {
                let params = BeamParams { length_penalty, early_stopping, ..params.clone() };
                let ours = tables.search(&params);
                let ours: Vec<_> = ours.into_iter().map(|found| (found.tokens, found.score)).collect();
                assert_eq!(ours, transformers(&tables, &params), "{seed}: {params:?}");
                ours
            });
            immediate_differs += usize::from(results[0] != results[1]);
            never_differs += usize::from(results[0] != results[2]);
            ended_early +=
                results[2].iter().filter(|(tokens, _)| tokens.len() < params.max_tokens as usize).count();
        }
    }
    let counts = [immediate_differs, never_differs, ended_early];
    assert!(counts.iter().zip([50, 20, 500]).all(|(count, least)| *count >= least), "{counts:?}");
}

/// With as many beams as there are sequences, nothing is pruned, and the result is all of them, by score.
#[test]
fn a_search_that_is_wide_enough_finds_the_best_of_all_sequences() {
    let tables = Tables { seed: 3, vocab: 3, coarse: false };
    for length_penalty in PENALTIES {
        // Two tokens that continue: 1 + 2 + 4 + 8 sequences end with token 1, and 16 at the maximum length.
        let params = BeamParams {
            width: 31,
            max_tokens: 4,
            length_penalty,
            early_stopping: EarlyStopping::Never,
            end_tokens: vec![1],
            ..PLAIN
        };
        let mut all = Vec::new();
        let mut open = vec![(Vec::new(), 0.0)];
        while let Some((tokens, sum)) = open.pop() {
            if tokens.last() == Some(&1) || tokens.len() == 4 {
                all.push((f64::from(sum) / (tokens.len() as f64).powf(length_penalty), tokens));
                continue;
            }
            let after = tables.after(&tokens);
            let longer = |token| ([tokens.as_slice(), &[token]].concat(), sum + after[token as usize]);
            open.extend((0..3).map(longer));
        }
        all.sort_by(|a, b| b.0.total_cmp(&a.0));
        let found = tables.search(&params);
        assert_eq!(found.len(), 31);
        for (found, (score, tokens)) in found.iter().zip(&all) {
            assert_eq!(&found.tokens, tokens, "{length_penalty}");
            assert!((f64::from(found.score) - score).abs() < 1e-4, "{length_penalty}");
        }
    }
}

#[test]
fn all_beams_start_from_the_prompt_and_a_parent_can_have_several() {
    let mut search = BeamSearch::new(PLAIN).expect("valid");
    assert_eq!((search.live_beams(), search.candidates_per_beam()), (1, 2));
    let new = |parent, token| NewBeam { parent, token };
    let step = search.advance([&[(4, -0.1), (8, -3.0)][..]]);
    assert_eq!(step, BeamStep::Continue(&[new(0, 4), new(0, 8)]));
    let step = search.advance([&[(6, -0.5), (5, -1.0)][..], &[(5, -0.2), (1, -2.5)]]);
    assert_eq!(step, BeamStep::Continue(&[new(0, 6), new(0, 5)]));
    let step = search.advance([&[(3, -2.0), (2, -4.0)][..], &[(7, -1.0), (9, -1.5)]]);
    assert_eq!(step, BeamStep::Continue(&[new(1, 7), new(0, 3)]), "by sum, not by beam");
}

/// An impossible token is not taken even if nothing else is left, and a search without beams is over.
#[test]
fn impossible_tokens_are_never_taken() {
    let impossible = f32::NEG_INFINITY;
    let mut search = BeamSearch::new(BeamParams { end_tokens: vec![5], ..PLAIN }).expect("valid");
    let step = search.advance([&[(4, -0.1), (5, -0.2), (6, impossible)][..]]);
    assert_eq!(step, BeamStep::Continue(&[NewBeam { parent: 0, token: 4 }]), "one live beam");
    assert_eq!(search.advance([&[(1, impossible), (2, f32::NAN)][..]]), BeamStep::Done);
    assert_eq!(search.advance([]), BeamStep::Done, "and so it stays");
    let expected = Hypothesis { tokens: vec![5], logprobs: vec![-0.2], score: -0.2 };
    assert_eq!(search.finish(), [expected]);
}

#[test]
fn errors_name_the_parameter() {
    let cases = [
        (BeamParams { width: 0, ..PLAIN }, "beam_width"),
        (BeamParams { max_tokens: 0, ..PLAIN }, "max_tokens"),
        (BeamParams { length_penalty: f64::NAN, ..PLAIN }, "length_penalty"),
        (BeamParams { length_penalty: f64::NAN, max_tokens: 1, ..PLAIN }, "length_penalty"),
        (BeamParams { length_penalty: f64::INFINITY, ..PLAIN }, "length_penalty"),
        (BeamParams { length_penalty: 39.0, ..PLAIN }, "length_penalty"),
        (BeamParams { length_penalty: -39.0, ..PLAIN }, "length_penalty"),
    ];
    for (params, name) in cases {
        let error = BeamSearch::new(params).expect_err(name);
        assert_eq!(error.param, name);
        assert!(error.message.starts_with(name), "{error}");
    }
    assert!(BeamSearch::new(BeamParams { length_penalty: -37.0, ..PLAIN }).is_ok());
    for (text, expected) in
        [("false", WAYS_TO_STOP[0]), ("true", WAYS_TO_STOP[1]), ("\"never\"", WAYS_TO_STOP[2])]
    {
        assert_eq!(EarlyStopping::parse(&text.parse().expect("JSON")), Ok(expected));
    }
    for text in ["\"always\"", "1", "null", "\"true\""] {
        let error = EarlyStopping::parse(&text.parse().expect("JSON")).expect_err(text);
        assert_eq!(error.param, "early_stopping");
    }
}
