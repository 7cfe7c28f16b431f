//! Added tokens: they are found in a text before it is encoded, and some of them are special.
//!
//! Invariant: resolved tokens have ids, and no two tokens share one.

use super::VOCAB_MAX;
use anyhow::{Result, ensure};
use std::collections::{BTreeMap, HashMap};
use tokenizers::AddedToken;

/// An added token as a file specifies it.
#[derive(Clone, Debug)]
pub struct AddedTokenSpec {
    token: AddedToken,
    id: IdSource,
}

/// Source of an added token's id.
#[derive(Clone, Copy, Debug)]
enum IdSource {
    /// The id that the file gives.
    Given(u32),
    /// The vocabulary's id; the token is ignored if the vocabulary lacks it.
    InVocabulary,
    /// The vocabulary's id, or else the next free one.
    Appended,
}

impl AddedTokenSpec {
    /// Creates a token with a given id.
    pub fn with_id(id: u32, token: AddedToken) -> AddedTokenSpec {
        AddedTokenSpec { token, id: IdSource::Given(id) }
    }

    /// Creates a token that is ignored unless the vocabulary has it.
    pub fn if_in_vocabulary(token: AddedToken) -> AddedTokenSpec {
        AddedTokenSpec { token, id: IdSource::InVocabulary }
    }

    /// Creates a token that gets the next free id unless the vocabulary has it.
    pub fn appended(token: AddedToken) -> AddedTokenSpec {
        AddedTokenSpec { token, id: IdSource::Appended }
    }

    /// Returns the token with the vocabulary's id, or ignored if the vocabulary lacks it.
    pub fn looked_up(self) -> AddedTokenSpec {
        AddedTokenSpec { id: IdSource::InVocabulary, ..self }
    }

    /// Returns the id that the file gives.
    pub fn id(&self) -> Option<u32> {
        match self.id {
            IdSource::Given(id) => Some(id),
            IdSource::InVocabulary | IdSource::Appended => None,
        }
    }
}

/// Assigns the ids of added tokens. Returns the tokens in the order of their ids. `find` looks up a token in
/// the vocabulary, whose ids are below `vocabulary`. Fails if an id exceeds the limit or belongs to two
/// tokens.
pub fn resolve(
    added: Vec<AddedTokenSpec>,
    vocabulary: u32,
    find: impl Fn(&str) -> Option<u32>,
) -> Result<Vec<(u32, AddedToken)>> {
    let tokens = merge_duplicates(added);
    let mut next = tokens
        .iter()
        .filter_map(AddedTokenSpec::id)
        .map(|id| id.saturating_add(1))
        .fold(vocabulary, u32::max);
    let mut by_id = BTreeMap::new();
    for AddedTokenSpec { token, id } in tokens {
        let id = match (id, find(&token.content)) {
            (IdSource::Given(id), _) | (_, Some(id)) => id,
            (IdSource::InVocabulary, None) => continue,
            (IdSource::Appended, None) => {
                let id = next;
                next = next.saturating_add(1);
                id
            }
        };
        ensure!(id < VOCAB_MAX, "the token '{}' has id {id}: ids must be below {VOCAB_MAX}", token.content);
        let name = token.content.clone();
        let other = by_id.insert(id, token).map(|other| other.content);
        ensure!(other.is_none(), "the tokens '{}' and '{name}' both have id {id}", other.unwrap_or_default());
    }
    Ok(by_id.into_iter().collect())
}

/// Merges duplicate tokens. A token is special if one of its duplicates is; its other properties are those of
/// the first. If a later duplicate is appended, the token takes that position in the order.
fn merge_duplicates(added: Vec<AddedTokenSpec>) -> Vec<AddedTokenSpec> {
    let mut tokens = Vec::<(usize, AddedTokenSpec)>::new();
    let mut positions = HashMap::<String, usize>::new();
    for (order, token) in added.into_iter().enumerate() {
        let Some(position) = positions.get(&token.token.content) else {
            positions.insert(token.token.content.clone(), tokens.len());
            tokens.push((order, token));
            continue;
        };
        let (first_order, first) = &mut tokens[*position];
        first.token.special |= token.token.special;
        match (first.id, token.id) {
            (IdSource::InVocabulary, id) => (*first_order, first.id) = (order, id),
            (IdSource::Appended, IdSource::Given(id)) => first.id = IdSource::Given(id),
            _ => {}
        }
    }
    tokens.sort_by_key(|(order, _)| *order);
    tokens.into_iter().map(|(_, token)| token).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(name: &str) -> AddedToken {
        AddedToken::from(name, false)
    }

    fn named(added: Vec<AddedTokenSpec>) -> Vec<(u32, String, bool)> {
        let find = |name: &str| ["a", "b"].iter().position(|known| *known == name).map(|id| id as u32);
        let resolved = resolve(added, 5, find).unwrap();
        resolved.into_iter().map(|(id, token)| (id, token.content, token.special)).collect()
    }

    #[test]
    fn ids_are_given_known_or_the_next_free_ones() {
        let added = vec![
            AddedTokenSpec::appended(token("last")),
            AddedTokenSpec::with_id(9, token("given")),
            AddedTokenSpec::if_in_vocabulary(token("b")),
            AddedTokenSpec::if_in_vocabulary(token("nowhere")),
            AddedTokenSpec::appended(token("a")),
            AddedTokenSpec::appended(token("later")),
        ];
        let expected = [(0, "a"), (1, "b"), (9, "given"), (10, "last"), (11, "later")];
        assert_eq!(named(added), expected.map(|(id, name)| (id, name.to_owned(), false)));
    }

    #[test]
    fn ids_beyond_the_limit_are_refused_wherever_they_come_from() {
        let limit = VOCAB_MAX - 1;
        let given = |id| AddedTokenSpec::with_id(id, token("given"));
        let refused = |added, vocabulary| resolve(added, vocabulary, |_| None).is_err();
        assert!(!refused(vec![given(limit)], 5));
        assert!(refused(vec![given(limit), AddedTokenSpec::appended(token("next"))], 5));
        assert!(refused(vec![AddedTokenSpec::appended(token("next"))], VOCAB_MAX));
        assert!(refused(vec![AddedTokenSpec::appended(token("first")), given(u32::MAX)], 5));
    }

    #[test]
    fn duplicates_are_merged_and_ordered_by_where_they_are_appended() {
        let added = vec![
            AddedTokenSpec::if_in_vocabulary(token("<mask>").lstrip(true)),
            AddedTokenSpec::appended(token("x")),
            AddedTokenSpec::appended(token("<mask>").special(true)),
            AddedTokenSpec::with_id(2, token("y")),
            AddedTokenSpec::if_in_vocabulary(token("y").special(true)),
        ];
        let expected = [(2, "y", true), (5, "x", false), (6, "<mask>", true)];
        assert_eq!(named(added.clone()), expected.map(|(id, name, special)| (id, name.to_owned(), special)));
        let resolved = resolve(added, 5, |_| None).unwrap();
        assert!(resolved.iter().any(|(_, token)| token.content == "<mask>" && token.lstrip));
    }
}
