//! Rules for the number format in which each matrix is loaded.
//!
//! Rules are a list, of which the first match applies: `PATTERN=TYPE` for tensors whose name or role matches
//! the pattern (`*` matches any text, `{i}` and `{e}` match numbers), and finally `TYPE` for all others. The
//! last rule is meant for the matrices that GEMMs stream: embeddings and heads, which are more sensitive, are
//! loaded with at least 8 bits, and no matrix becomes larger than stored.
//!
//! Invariant: vectors and position tables stay as they are stored. Routers and small matrices are not subject
//! to the last rule, nor is a matrix whose rows are not whole blocks of the format.

use crate::tensor_names::matches;
use mainstem_kernels::QuantType;

/// Number of elements below which a matrix is not worth converting.
const SMALL_ELEMENTS: usize = 1 << 14;

/// The names of a matrix that rules may match.
#[derive(Clone, Copy, Debug)]
pub struct MatrixNames<'a> {
    /// Key of the matrix in a specification's `[tensors]`, such as `down`.
    pub role: &'a str,
    /// Name of the tensor that contains the matrix.
    pub name: &'a str,
    /// The name with placeholders for the numbers of layer and expert.
    pub pattern: &'a str,
}

/// A list of rules. An empty list keeps everything as it is stored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WeightRules {
    patterns: Vec<(String, QuantType)>,
    default_type: Option<QuantType>,
}

impl WeightRules {
    /// Parses rules separated by commas. The error names the invalid rule and the reason.
    pub fn parse(text: &str) -> Result<WeightRules, String> {
        let mut weights = WeightRules::default();
        for rule in text.split(',').map(str::trim).filter(|rule| !rule.is_empty()) {
            if weights.default_type.is_some() {
                return Err(format!("'{rule}' comes after the rule for all others and would never apply"));
            }
            match rule.split_once('=') {
                Some((pattern, _)) if pattern.trim().is_empty() => {
                    return Err(format!("'{rule}' has no pattern and would never apply"));
                }
                Some((pattern, ty)) => {
                    weights.patterns.push((pattern.trim().to_owned(), parse_type(ty.trim())?))
                }
                None => weights.default_type = Some(parse_type(rule)?),
            }
        }
        Ok(weights)
    }

    /// Returns the first pattern that applies to none of these matrices, because it matches none or earlier
    /// rules take precedence.
    pub fn unused_pattern(&self, matrices: &[MatrixNames]) -> Option<&str> {
        let used: Vec<_> = matrices.iter().filter_map(|matrix| self.matching_rule(matrix)).collect();
        let mut patterns = (0..).zip(&self.patterns);
        patterns.find(|(number, _)| !used.contains(number)).map(|(_, (pattern, _))| pattern.as_str())
    }

    /// Returns the index of the first rule whose pattern matches.
    fn matching_rule(&self, matrix: &MatrixNames) -> Option<usize> {
        let MatrixNames { role, name, pattern } = *matrix;
        let is_match = |rule: &str| [name, role, pattern].iter().any(|text| matches(rule, text));
        self.patterns.iter().position(|(rule, _)| is_match(rule))
    }

    /// Returns the format in which to load a matrix (n, k) that is stored as `stored`.
    pub fn load_type(&self, matrix: &MatrixNames, stored: QuantType, shape: &[usize]) -> QuantType {
        let [n, k] = *shape else { return stored };
        if is_transformed_at_load(matrix.role) {
            return stored;
        }
        let fits = |ty: QuantType| ty.bytes(k).is_some();
        match (self.matching_rule(matrix).map(|number| self.patterns[number].1), self.default_type) {
            (Some(ty), _) if fits(ty) => ty,
            (None, Some(ty)) if n * k >= SMALL_ELEMENTS && !is_sensitive(matrix.role) => {
                let ty =
                    if is_table(matrix.role) && ty.bits_per_element() < 8.0 { QuantType::Q8_0 } else { ty };
                if fits(ty) && ty.bits_per_element() < stored.bits_per_element() { ty } else { stored }
            }
            _ => stored,
        }
    }
}

fn is_table(role: &str) -> bool {
    matches!(role, "embedding" | "head")
}

/// Returns whether a small matrix has a large influence on the result.
fn is_sensitive(role: &str) -> bool {
    matches!(role, "router" | "shared_router")
}

/// Returns whether a tensor is combined with others or converted at loading, so that no rule applies.
fn is_transformed_at_load(role: &str) -> bool {
    let in_step = matches!(
        role,
        "positions"
            | "token_types"
            | "relative_bias"
            | "distances"
            | "distance_q"
            | "distance_k"
            | "q_norm"
            | "k_norm"
    );
    // The host computes classifiers.
    in_step || matches!(role, "classifier" | "classifier_dense")
}

/// Parses a number format that can be written.
fn parse_type(name: &str) -> Result<QuantType, String> {
    let written = |ty: &QuantType| ty.row().quantize.is_some();
    QuantType::by_name(name).filter(written).ok_or_else(|| {
        let known: Vec<&str> = QuantType::all().filter(written).map(QuantType::name).collect();
        format!("unknown number format '{name}' for weights (known: {})", known.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names<'a>(role: &'a str, name: &'a str) -> MatrixNames<'a> {
        MatrixNames { role, name, pattern: name }
    }

    /// Tests each exception with a matrix that only this exception excludes from its rule.
    #[test]
    fn the_first_rule_that_fits_counts_and_exceptions_stay() {
        use QuantType::*;
        let rules = WeightRules::parse("a.*=q6,down=q8,*.b=q4_K,q4").unwrap();
        let large = [256, 512];
        for (role, name, stored, shape, expected) in [
            ("q", "x", F16, &large[..], Q4_B32T1A),
            ("q", "a.b", F16, &large, Q6_B64T1),
            ("down", "a.x", F16, &large, Q6_B64T1),
            ("down", "x", F16, &large, Q8_0),
            ("q", "x.b", F16, &large, Q4_K),
            // Rows that are not whole blocks of the requested format.
            ("q", "x.b", F16, &[256, 320], F16),
            ("q", "x", F16, &[256, 48], F16),
            // Small, but matched by a pattern.
            ("q", "x", F16, &[64, 64], F16),
            ("q", "a.x", F16, &[64, 64], Q6_B64T1),
            // Never larger than stored, except by a pattern.
            ("q", "x", Q4_0, &large, Q4_0),
            ("down", "x", Q4_0, &large, Q8_0),
            ("embedding", "x", F16, &large, Q8_0),
            ("head", "x", F16, &large, Q8_0),
            ("router", "x", F16, &large, F16),
            ("router", "a.x", F16, &large, Q6_B64T1),
            ("positions", "a.x", F16, &large, F16),
            ("relative_bias", "x", F16, &large, F16),
            ("q", "a.x", F32, &[512], F32),
        ] {
            assert_eq!(
                rules.load_type(&names(role, name), stored, shape),
                expected,
                "{role} {name} {stored} {shape:?}"
            );
        }
        let f16 = WeightRules::parse("f16").unwrap();
        assert_eq!(f16.load_type(&names("embedding", "x"), F32, &large), F16);
        assert_eq!(WeightRules::default().load_type(&names("q", "x"), F16, &large), F16);
    }

    #[test]
    fn rules_that_count_for_nothing_are_found() {
        let matrices = [names("q", "l.0.q"), names("head", "lm_head")];
        for (rules, idle) in
            [("q=q8,lm_*=q6,q4", None), ("q4", None), ("up=q8,q4", Some("up")), ("l.*=q8,q=q6", Some("q"))]
        {
            assert_eq!(WeightRules::parse(rules).unwrap().unused_pattern(&matrices), idle, "{rules}");
        }
    }

    #[test]
    fn rules_that_mean_nothing_are_refused() {
        for (rules, named) in [
            ("q9", "'q9'"),
            ("q4,head=q8", "'head=q8'"),
            ("head=", "''"),
            ("=q4", "'=q4'"),
            ("iq4_nl", "'iq4_nl'"),
        ] {
            let error = WeightRules::parse(rules).unwrap_err();
            assert!(error.contains(named), "{error}");
        }
        assert_eq!(WeightRules::parse(" ").unwrap(), WeightRules::default());
    }
}
