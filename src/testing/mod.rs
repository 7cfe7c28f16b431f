//! Helpers that the unit tests of several modules share; compiled into test builds only.

mod scratch;

pub(crate) mod vocabularies;

pub(crate) use scratch::Scratch;
