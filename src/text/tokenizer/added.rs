//! Added tokens: they are found in a text before it is encoded, and some of them are special.
//!
//! Invariant: resolved tokens have ids, and no two tokens share one.

use super::VOCAB_MAX;
use anyhow::{Result, ensure};
use std::collections::{BTreeMap, HashMap};
use tokenizers::AddedToken;

/// An added token as a file specifies it.
#[derive(Clone, Debug)]
pub struct Added {
    token: AddedToken,
    id: Id,
}

/// How an added token gets its id.
#[derive(Clone, Copy, Debug)]
enum Id {
    /// The id that the file gives.
    Given(u32),
    /// The vocabulary's id; the token is ignored if the vocabulary lacks it.
    Known,
    /// The vocabulary's id, or else the next free one.
    Appended,
}

impl Added {
    /// Creates a token with a given id.
    pub fn at(id: u32, token: AddedToken) -> Added {
        Added { token, id: Id::Given(id) }
    }

    /// Creates a token that is ignored unless the vocabulary has it.
    pub fn known(token: AddedToken) -> Added {
        Added { token, id: Id::Known }
    }

    /// Creates a token that gets the next free id unless the vocabulary has it.
    pub fn appended(token: AddedToken) -> Added {
        Added { token, id: Id::Appended }
    }

    /// Returns the id that the file gives.
    pub fn id(&self) -> Option<u32> {
        match self.id {
            Id::Given(id) => Some(id),
            Id::Known | Id::Appended => None,
        }
    }
}

/// Assigns the ids of added tokens. Returns the tokens in the order of their ids. `find` looks up a token in
/// the vocabulary, whose ids are below `vocabulary`. Fails if an id exceeds the limit or belongs to two
/// tokens.
pub fn resolve(
    added: Vec<Added>,
    vocabulary: u32,
    find: impl Fn(&str) -> Option<u32>,
) -> Result<Vec<(u32, AddedToken)>> {
    let tokens = once_each(added);
    let mut next =
        tokens.iter().filter_map(Added::id).map(|id| id.saturating_add(1)).fold(vocabulary, u32::max);
    let mut by_id = BTreeMap::new();
    for Added { token, id } in tokens {
        let id = match (id, find(&token.content)) {
            (Id::Given(id), _) | (_, Some(id)) => id,
            (Id::Known, None) => continue,
            (Id::Appended, None) => {
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
fn once_each(added: Vec<Added>) -> Vec<Added> {
    let mut tokens = Vec::<(usize, Added)>::new();
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
            (Id::Known, id) => (*first_order, first.id) = (order, id),
            (Id::Appended, Id::Given(id)) => first.id = Id::Given(id),
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

    fn named(added: Vec<Added>) -> Vec<(u32, String, bool)> {
        let find = |name: &str| ["a", "b"].iter().position(|known| *known == name).map(|id| id as u32);
        let resolved = resolve(added, 5, find).unwrap();
        resolved.into_iter().map(|(id, token)| (id, token.content, token.special)).collect()
    }

    #[test]
    fn ids_are_given_known_or_the_next_free_ones() {
        let added = vec![
            Added::appended(token("last")),
            Added::at(9, token("given")),
            Added::known(token("b")),
            Added::known(token("nowhere")),
            Added::appended(token("a")),
            Added::appended(token("later")),
        ];
        let expected = [(0, "a"), (1, "b"), (9, "given"), (10, "last"), (11, "later")];
        assert_eq!(named(added), expected.map(|(id, name)| (id, name.to_owned(), false)));
    }

    #[test]
    fn ids_beyond_the_limit_are_refused_wherever_they_come_from() {
        let limit = VOCAB_MAX - 1;
        let given = |id| Added::at(id, token("given"));
        let refused = |added, vocabulary| resolve(added, vocabulary, |_| None).is_err();
        assert!(!refused(vec![given(limit)], 5));
        assert!(refused(vec![given(limit), Added::appended(token("next"))], 5));
        assert!(refused(vec![Added::appended(token("next"))], VOCAB_MAX));
        assert!(refused(vec![Added::appended(token("first")), given(u32::MAX)], 5));
    }

    #[test]
    fn duplicates_are_merged_and_ordered_by_where_they_are_appended() {
        let added = vec![
            Added::known(token("<mask>").lstrip(true)),
            Added::appended(token("x")),
            Added::appended(token("<mask>").special(true)),
            Added::at(2, token("y")),
            Added::known(token("y").special(true)),
        ];
        let expected = [(2, "y", true), (5, "x", false), (6, "<mask>", true)];
        assert_eq!(named(added.clone()), expected.map(|(id, name, special)| (id, name.to_owned(), special)));
        let resolved = resolve(added, 5, |_| None).unwrap();
        assert!(resolved.iter().any(|(_, token)| token.content == "<mask>" && token.lstrip));
    }
}
