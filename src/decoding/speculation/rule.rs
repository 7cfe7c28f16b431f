//! The rules by which drafts are accepted.

use mainstem_kernels::random::philox;
use std::fmt;
use std::str::FromStr;

/// The way in which the token of a row is chosen that has a draft to verify.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AcceptanceRule {
    /// The token is drawn as without speculation, and the draft is accepted if it is that token. The text
    /// does not change.
    #[default]
    Coupled,
    /// Rejection sampling (Chen et al. 2023): the draft is accepted with probability min(1, p / q), where p
    /// and q are its probabilities for the target and for the draft model; otherwise a token is drawn from
    /// the normalized positive part of p - q. The distribution of texts does not change.
    Rejection,
    /// Inferflow's top sampling: the draft is accepted if it is one of the candidates that the filters
    /// leave; otherwise a token is drawn as without speculation. This changes the distribution of texts.
    TopSampling,
}

/// The name of no rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no acceptance rule; the rules are coupled, rejection and top_sampling")]
pub struct UnknownRule(String);

impl AcceptanceRule {
    /// All rules.
    pub const ALL: [AcceptanceRule; 3] =
        [AcceptanceRule::Coupled, AcceptanceRule::Rejection, AcceptanceRule::TopSampling];

    /// Returns the name of the rule.
    pub fn name(self) -> &'static str {
        match self {
            AcceptanceRule::Coupled => "coupled",
            AcceptanceRule::Rejection => "rejection",
            AcceptanceRule::TopSampling => "top_sampling",
        }
    }

    /// Returns the seed with which the drafts of a sequence are drawn: its own with [`Self::Coupled`], so
    /// that draft and target mostly draw the same token; otherwise another one, because a draft must be
    /// independent of the random numbers that accept it.
    pub fn draft_seed(self, seed: u64) -> u64 {
        if self == AcceptanceRule::Coupled {
            return seed;
        }
        let words = philox([seed as u32, (seed >> 32) as u32, 0, 0], [u32::from_le_bytes(*b"draf"), 0]);
        u64::from(words[0]) | u64::from(words[1]) << 32
    }
}

impl fmt::Display for AcceptanceRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for AcceptanceRule {
    type Err = UnknownRule;

    fn from_str(name: &str) -> Result<AcceptanceRule, UnknownRule> {
        let rule = AcceptanceRule::ALL.into_iter().find(|rule| rule.name() == name);
        rule.ok_or_else(|| UnknownRule(name.to_owned()))
    }
}
