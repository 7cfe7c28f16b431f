//! What is asked for: random prompts and output lengths, and which clients leave early.
//!
//! Invariant: a request is a pure function of the load, its seed and the request's index.

use std::{fmt, str::FromStr};

use serde::Serialize;

use crate::draws::{Draws, Purpose};

/// A number of tokens: fixed, or uniform among `low..=high`. Text form: `128` or `128-512`. At least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Length {
    low: u32,
    high: u32,
}

/// More than any model's context; keeps a slip of the hand from filling the memory.
const LENGTH_MAX: u32 = 10_000_000;

impl Length {
    fn draw(self, draws: &mut Draws) -> u32 {
        draws.between(self.low, self.high)
    }
}

impl FromStr for Length {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (low, high) = text.split_once('-').unwrap_or((text, text));
        let parse =
            |part: &str| part.parse::<u32>().map_err(|_| format!("'{part}' is not a number of tokens"));
        let (low, high) = (parse(low)?, parse(high)?);
        if low < 1 || low > high || high > LENGTH_MAX {
            return Err(format!("expected N or LOW-HIGH with 1 <= LOW <= HIGH <= {LENGTH_MAX}"));
        }
        Ok(Self { low, high })
    }
}

impl fmt::Display for Length {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.low == self.high {
            write!(f, "{}", self.low)
        } else {
            write!(f, "{}-{}", self.low, self.high)
        }
    }
}

/// Everything the requests of a run have in common.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Requests in all.
    pub requests: usize,
    /// Tokens per prompt.
    pub prompt: Length,
    /// Tokens asked for per answer.
    pub output: Length,
    /// Prompt ids are drawn from `0..vocab`; at least 1.
    pub vocab: u32,
    pub temperature: f32,
    pub seed: u64,
    /// Share of the clients that leave early, 0 to 1.
    pub hangup_share: f64,
    /// Tokens after which they leave; at least 1.
    pub hangup_after: u32,
}

/// One request, ready to be sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Its place in the run, from 0.
    pub index: usize,
    /// Token ids.
    pub prompt: Vec<u32>,
    /// Tokens asked for.
    pub output_len: u32,
    /// The client leaves when it has this many tokens; `None` stays to the end.
    pub hang_up_after: Option<u32>,
    pub temperature: f32,
    pub seed: u64,
}

impl Load {
    /// The request of this index.
    pub fn request(&self, index: usize) -> Request {
        let mut draws = Draws::new(self.seed, Purpose::Request(index as u64));
        let prompt_len = self.prompt.draw(&mut draws);
        let output_len = self.output.draw(&mut draws);
        let leaves = draws.unit() < self.hangup_share;
        Request {
            index,
            prompt: (0..prompt_len).map(|_| draws.between(0, self.vocab - 1)).collect(),
            output_len,
            hang_up_after: leaves.then_some(self.hangup_after),
            temperature: self.temperature,
            seed: self.seed.wrapping_add(index as u64),
        }
    }
}

/// The body of `POST /v1/completions`.
#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    prompt: &'a [u32],
    max_tokens: u32,
    ignore_eos: bool,
    temperature: f32,
    seed: u64,
    stream: bool,
    stream_options: StreamOptions,
    return_token_ids: bool,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

impl Request {
    /// The JSON text of the request's body.
    pub fn body(&self, model: &str) -> String {
        let body = Body {
            model,
            prompt: &self.prompt,
            max_tokens: self.output_len,
            ignore_eos: true,
            temperature: self.temperature,
            // Servers read seeds as signed numbers.
            seed: self.seed & (i64::MAX as u64),
            stream: true,
            stream_options: StreamOptions { include_usage: true },
            return_token_ids: true,
        };
        serde_json::to_string(&body).expect("plain data becomes JSON; anything else is a bug")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load() -> Load {
        Load {
            requests: 2000,
            prompt: "3-9".parse().unwrap(),
            output: "5".parse().unwrap(),
            vocab: 7,
            temperature: 0.5,
            seed: 1,
            hangup_share: 0.1,
            hangup_after: 2,
        }
    }

    #[test]
    fn requests_keep_their_bounds_and_reach_them() {
        let all: Vec<Request> = (0..2000).map(|index| load().request(index)).collect();
        let lens = all.iter().map(|r| r.prompt.len());
        assert_eq!((lens.clone().min(), lens.max()), (Some(3), Some(9)));
        let ids = all.iter().flat_map(|r| r.prompt.iter().copied());
        assert_eq!((ids.clone().min(), ids.max()), (Some(0), Some(6)));
        assert!(all.iter().all(|r| r.output_len == 5));
        let leavers = all.iter().filter(|r| r.hang_up_after == Some(2)).count();
        assert!((160..240).contains(&leavers), "{leavers}");
    }

    #[test]
    fn no_share_means_nobody_and_a_full_one_everybody() {
        let leavers = |hangup_share| {
            let load = Load { hangup_share, ..load() };
            (0..500).filter(|&index| load.request(index).hang_up_after.is_some()).count()
        };
        assert_eq!((leavers(0.0), leavers(1.0)), (0, 500));
    }

    #[test]
    fn a_request_depends_on_seed_and_index_only() {
        assert_eq!(load().request(4), Load { requests: 5, ..load() }.request(4));
        assert_ne!(load().request(4).prompt, load().request(5).prompt);
        assert_ne!(load().request(4).prompt, Load { seed: 2, ..load() }.request(4).prompt);
    }

    #[test]
    fn the_body_asks_for_a_stream_of_exactly_that_many_tokens() {
        let request = Load { seed: u64::MAX, ..load() }.request(0);
        let body: serde_json::Value = serde_json::from_str(&request.body("m")).unwrap();
        assert_eq!(body["model"], "m");
        assert_eq!(body["max_tokens"], 5);
        assert_eq!(body["ignore_eos"], true);
        assert_eq!(body["stream"], true);
        assert_eq!(body["prompt"].as_array().unwrap().len(), request.prompt.len());
        assert!(body["seed"].as_i64().is_some_and(|seed| seed >= 0));
    }

    #[test]
    fn lengths_parse_and_nonsense_is_refused() {
        assert_eq!("128-512".parse::<Length>().map(|l| l.to_string()), Ok("128-512".into()));
        assert_eq!("64".parse::<Length>().map(|l| l.to_string()), Ok("64".into()));
        for text in ["", "0", "5-4", "-4", "4-", "a", "1-2-3", "99999999999", "10000001"] {
            assert!(text.parse::<Length>().is_err(), "{text}");
        }
    }
}
