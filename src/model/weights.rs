//! Which number format each matrix is loaded in, where that is not the one it is stored in.
//!
//! A list of rules, of which the first that fits a matrix counts: `PATTERN=TYPE` for tensors whose name or role the pattern
//! fits (`*` stands for any run of characters), and at last `TYPE` for all others. What the last rule says is for matrices that
//! products stream: embeddings and heads, on which more depends, get 8 bits where it says fewer, and it makes nothing larger.
//!
//! Invariant: vectors and tables by position stay as they are stored, routers and small matrices do whatever the last rule says;
//! so does a matrix whose rows are no whole number of the format's blocks.

use super::spec::Piece;
use mainstem_kernels::QuantType;

/// Numbers below which a matrix is not worth another format.
const SMALL: usize = 1 << 14;

/// The rules. None: everything stays as it is stored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Weights {
    named: Vec<(String, QuantType)>,
    others: Option<QuantType>,
}

impl Weights {
    /// Reads rules separated by commas. The error says what is wrong with which.
    pub fn parse(text: &str) -> Result<Weights, String> {
        let mut weights = Weights::default();
        for rule in text.split(',').map(str::trim).filter(|rule| !rule.is_empty()) {
            if weights.others.is_some() {
                return Err(format!("'{rule}' comes after the rule for all others, and would never count"));
            }
            match rule.split_once('=') {
                Some((pattern, _)) if pattern.trim().is_empty() => {
                    return Err(format!("'{rule}' has no pattern, and would never count"));
                }
                Some((pattern, ty)) => weights.named.push((pattern.trim().to_owned(), type_of(ty.trim())?)),
                None => weights.others = Some(type_of(rule)?),
            }
        }
        Ok(weights)
    }

    /// The format to load a matrix (out, inp) in that is stored as `stored`.
    pub fn of(&self, piece: &Piece, stored: QuantType, shape: &[usize]) -> QuantType {
        let [out, inp] = *shape else { return stored };
        if is_made_over(piece.role) {
            return stored;
        }
        let fits = |ty: QuantType| ty.bytes(inp).is_some();
        let named = self.named.iter().find(|(pattern, _)| {
            matches(pattern, &piece.name) || matches(pattern, piece.role) || matches(pattern, &piece.pattern)
        });
        match (named, self.others) {
            (Some((_, ty)), _) if fits(*ty) => *ty,
            (None, Some(ty)) if out * inp >= SMALL && !is_delicate(piece.role) => {
                let ty = if is_table(piece.role) && ty.bits() < 8.0 { QuantType::Q8_0 } else { ty };
                if fits(ty) && ty.bits() < stored.bits() { ty } else { stored }
            }
            _ => stored,
        }
    }
}

fn is_table(role: &str) -> bool {
    matches!(role, "embedding" | "head")
}

/// What few numbers depend on much.
fn is_delicate(role: &str) -> bool {
    matches!(role, "router" | "shared_router")
}

/// What is no matrix any more when it is loaded, or has others added: no rule is for these.
fn is_made_over(role: &str) -> bool {
    matches!(role, "positions" | "token_types" | "relative_bias")
}

/// A format that is written, by any of its names.
fn type_of(name: &str) -> Result<QuantType, String> {
    let written = |ty: &QuantType| ty.row().quantize.is_some();
    QuantType::by_name(name).filter(written).ok_or_else(|| {
        let known: Vec<&str> = QuantType::all().filter(written).map(QuantType::name).collect();
        format!("there is no number format '{name}' to load weights in (known: {})", known.join(", "))
    })
}

/// Whether the whole of `text` fits the pattern.
fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((before, after)) => text.strip_prefix(before).is_some_and(|rest| {
            let ends = rest.char_indices().map(|(at, _)| at).chain([rest.len()]);
            ends.into_iter().any(|at| matches(after, &rest[at..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_fit_as_their_stars_say() {
        for (pattern, text) in
            [("*", ""), ("a*", "a"), ("*.down_proj.*", "l.3.down_proj.weight"), ("ä*e", "äöe")]
        {
            assert!(matches(pattern, text), "{pattern} {text}");
        }
        for (pattern, text) in [("", "a"), ("a", "ab"), ("a*b", "abc"), ("*x*", "abc")] {
            assert!(!matches(pattern, text), "{pattern} {text}");
        }
    }

    #[test]
    fn rules_that_mean_nothing_are_refused() {
        for (rules, told) in [
            ("q9", "'q9'"),
            ("q4,head=q8", "'head=q8'"),
            ("head=", "''"),
            ("=q4", "'=q4'"),
            ("iq4_nl", "'iq4_nl'"),
        ] {
            let error = Weights::parse(rules).unwrap_err();
            assert!(error.contains(told), "{error}");
        }
        assert_eq!(Weights::parse(" ").unwrap(), Weights::default());
    }
}
