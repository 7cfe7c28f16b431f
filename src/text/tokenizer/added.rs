//! Tokens that stand outside a vocabulary's own rules: found in a text before it is cut, and some of them
//! special.
//!
//! Invariant: once resolved, every token has an id, and no two tokens share one.

use super::VOCAB_MAX;
use anyhow::{Result, ensure};
use std::collections::{BTreeMap, HashMap};
use tokenizers::AddedToken;

/// A token as some file names it.
#[derive(Clone, Debug)]
pub struct Added {
    token: AddedToken,
    id: Id,
}

#[derive(Clone, Copy, Debug)]
enum Id {
    Given(u32),
    /// The vocabulary's own; a token that it lacks is left out.
    Known,
    /// The vocabulary's own, or the next free one.
    Appended,
}

impl Added {
    pub fn at(id: u32, token: AddedToken) -> Added {
        Added { token, id: Id::Given(id) }
    }

    pub fn known(token: AddedToken) -> Added {
        Added { token, id: Id::Known }
    }

    pub fn appended(token: AddedToken) -> Added {
        Added { token, id: Id::Appended }
    }

    /// The id that the file gives it.
    pub fn id(&self) -> Option<u32> {
        match self.id {
            Id::Given(id) => Some(id),
            Id::Known | Id::Appended => None,
        }
    }
}

/// The tokens with their ids, in the order of these. `find` is the vocabulary, whose ids are below
/// `vocabulary`.
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

/// Every token once. One named twice is special if either says so, and otherwise as the first says; where it
/// is appended, it comes at the later place.
fn once_each(added: Vec<Added>) -> Vec<Added> {
    let mut tokens = Vec::<(usize, Added)>::new();
    let mut places = HashMap::<String, usize>::new();
    for (order, token) in added.into_iter().enumerate() {
        let Some(place) = places.get(&token.token.content) else {
            places.insert(token.token.content.clone(), tokens.len());
            tokens.push((order, token));
            continue;
        };
        let (first_order, first) = &mut tokens[*place];
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
    fn a_token_named_twice_is_one_and_comes_where_it_is_appended() {
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
