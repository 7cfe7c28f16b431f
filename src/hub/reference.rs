//! References to models on a hub: `hf:owner/name[@revision]`.
//!
//! Invariant: the parts of a reference consist of letters, digits and `._-/` and contain no `..`, so they are
//! safe in paths and URLs.

use anyhow::{Context, Result, anyhow, bail, ensure};
use std::fmt;

/// Prefix of references, in place of a path.
const PREFIX: &str = "hf:";
/// Prefix of the names of models' folders in the cache.
const FOLDER_PREFIX: &str = "models--";
const DEFAULT_REVISION: &str = "main";

/// A model on a hub at a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubReference {
    /// `owner/name`
    repository: String,
    /// A branch, a tag or a commit.
    pub(super) revision: String,
}

impl HubReference {
    /// Whether a model name has the form of a reference, which starts with `hf:`.
    pub fn has_prefix(model: &str) -> bool {
        model.starts_with(PREFIX)
    }

    /// Parses `hf:owner/name[@revision]`; the revision defaults to `main`.
    pub fn parse(text: &str) -> Result<HubReference> {
        let rest =
            text.strip_prefix(PREFIX).with_context(|| format!("'{text}' does not begin with {PREFIX}"))?;
        let (repository, revision) = rest.split_once('@').unwrap_or((rest, DEFAULT_REVISION));
        let parts = repository.split('/').collect::<Vec<_>>();
        let [owner, name] = parts[..] else {
            bail!("'{text}': expected {PREFIX}owner/name or {PREFIX}owner/name@revision");
        };
        check_name("owner", owner)
            .and_then(|()| check_name("name", name))
            .with_context(|| format!("'{text}'"))?;
        check_revision(revision).with_context(|| format!("'{text}'"))?;
        Ok(HubReference { repository: repository.to_owned(), revision: revision.to_owned() })
    }

    /// Returns the name of the model's folder in the cache.
    pub(super) fn folder_name(&self) -> String {
        format!("{FOLDER_PREFIX}{}", self.repository.replace('/', "--"))
    }

    /// Returns the model whose folder in the cache has this name; `None` for other names.
    pub(super) fn of_folder(name: &str) -> Option<HubReference> {
        let repository = name.strip_prefix(FOLDER_PREFIX)?.replacen("--", "/", 1);
        HubReference::parse(&format!("{PREFIX}{repository}")).ok()
    }

    /// Whether the revision is a full commit hash, whose content never changes.
    pub(super) fn is_commit(&self) -> bool {
        self.revision.len() == 40 && self.revision.bytes().all(|byte| byte.is_ascii_hexdigit())
    }

    /// `owner/name`
    pub fn repository(&self) -> &str {
        &self.repository
    }
}

impl fmt::Display for HubReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}@{}", self.repository, self.revision)
    }
}

/// Checks a name against the hub's rules. Two dashes are forbidden because they separate owner and name in
/// the cache.
fn check_name(what: &str, name: &str) -> Result<()> {
    ensure!(!name.is_empty(), "the {what} is empty");
    ensure!(name.len() <= 96, "the {what} is longer than 96 characters");
    check_characters(what, name)?;
    ensure!(!name.contains("--") && !name.contains(".."), "the {what} '{name}' contains '--' or '..'");
    let edges = name.starts_with(['-', '.']) || name.ends_with(['-', '.']);
    ensure!(!edges, "the {what} '{name}' begins or ends with '-' or '.'");
    Ok(())
}

/// Checks that a revision is safe in paths of the cache and in URLs.
fn check_revision(revision: &str) -> Result<()> {
    ensure!(!revision.is_empty(), "the revision is empty");
    for part in revision.split('/') {
        ensure!(
            !part.is_empty() && !part.starts_with('.') && !part.contains(".."),
            "the revision '{revision}' is invalid"
        );
        check_characters("revision", part)?;
    }
    Ok(())
}

fn check_characters(what: &str, text: &str) -> Result<()> {
    let wrong = text.chars().find(|c| !c.is_ascii_alphanumeric() && !"._-".contains(*c));
    match wrong {
        Some(wrong) => Err(anyhow!(
            "the {what} '{text}' contains {wrong:?}: only letters, digits, '.', '_' and '-' are allowed"
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_read_and_shown() {
        for (text, repository, revision) in [
            ("hf:owner/name", "owner/name", "main"),
            ("hf:meta-llama/Llama-3.2_1B@v1.0", "meta-llama/Llama-3.2_1B", "v1.0"),
            ("hf:a/b@refs/pr/12", "a/b", "refs/pr/12"),
        ] {
            let reference = HubReference::parse(text).unwrap();
            assert_eq!((reference.repository.as_str(), reference.revision.as_str()), (repository, revision));
            assert_eq!(HubReference::parse(&reference.to_string()).unwrap(), reference);
        }
    }

    #[test]
    fn wrong_references_are_refused_with_what_is_wrong() {
        for (text, part) in [
            ("owner/name", "hf:"),
            ("hf:name", "owner/name"),
            ("hf:a/b/c", "owner/name"),
            ("hf:/b", "owner is empty"),
            ("hf:a/", "name is empty"),
            ("hf:../b", "'--' or '..'"),
            ("hf:a/..", "'--' or '..'"),
            ("hf:a--b/c", "'--' or '..'"),
            ("hf:.a/b", "begins or ends"),
            ("hf:a/b-", "begins or ends"),
            ("hf:a/b c", "' '"),
            ("hf:a/b?x", "'?'"),
            ("hf:a/b%2f", "'%'"),
            ("hf:a/b@", "revision is empty"),
            ("hf:a/b@../../x", "'../../x' is invalid"),
            ("hf:a/b@x//y", "'x//y' is invalid"),
            ("hf:a/b@x@y", "'@'"),
            (&format!("hf:a/{}", "b".repeat(97)), "longer than 96"),
        ] {
            let error = format!("{:#}", HubReference::parse(text).unwrap_err());
            assert!(error.contains(part) && error.contains(text), "{text}: {error}");
        }
    }
}
