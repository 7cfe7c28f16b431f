//! The table of all strategies, in their default order.

use super::params::Param;
use super::unit::{Place, Strategy};
use super::{
    bad_words, cutoffs, dry, fsd, logit_bias, min_p, min_tokens, mirostat, no_repeat_ngram, penalties, pool,
    tail_free, temperature, thinking, token_filter, top_k, top_n_sigma, top_p, typical, xtc,
};

/// All strategies. Rows of a place run in this order.
pub static TABLE: [Strategy; 30] = [
    token_filter::STRATEGY,
    logit_bias::STRATEGY,
    token_filter::SUPPRESS,
    bad_words::STRATEGY,
    min_tokens::STRATEGY,
    thinking::STRATEGY,
    penalties::STRATEGY,
    no_repeat_ngram::STRATEGY,
    dry::STRATEGY,
    temperature::STRATEGY,
    top_n_sigma::STRATEGY,
    top_k::STRATEGY,
    tail_free::STRATEGY,
    typical::STRATEGY,
    top_p::STRATEGY,
    min_p::STRATEGY,
    cutoffs::EPSILON_CUTOFF,
    cutoffs::ETA_CUTOFF,
    xtc::STRATEGY,
    mirostat::STRATEGY,
    pool::GREEDY,
    pool::STD,
    pool::TOP_K,
    pool::POOL_MIN_P,
    pool::POOL_TAIL_FREE,
    pool::POOL_TYPICAL,
    pool::POOL_MIROSTAT,
    fsd::FSD,
    fsd::RANDOM_FSD,
    SAMPLE,
];

/// The strategy of requests that name none.
const SAMPLE: Strategy = Strategy {
    name: "sample",
    aliases: &[],
    place: Place::Named,
    params: &[],
    summary: "Draws one of the candidates that the filters keep. The default.",
    build: |_, _| Ok(None),
};

/// Returns the row with this name among those of `places`.
pub fn find(name: &str, places: &[Place]) -> Option<&'static Strategy> {
    let is_named = |row: &&Strategy| row.name == name || row.aliases.contains(&name);
    TABLE.iter().filter(|row| places.contains(&row.place)).find(is_named)
}

/// Returns the parameter of a request with this name. Parameters in `strategy_params` are not among them.
pub fn find_param(name: &str) -> Option<&'static Param> {
    request_params().find(|param| param.is_named(name))
}

/// Returns all parameters of a request.
pub fn request_params() -> impl Iterator<Item = &'static Param> {
    TABLE.iter().filter(|row| row.place != Place::Named).flat_map(|row| row.params)
}
