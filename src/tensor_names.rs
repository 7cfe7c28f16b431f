//! Names of tensors: patterns with placeholders for the numbers of layers and experts.
//!
//! Invariant: a pattern that matches a name gives that name again for the same numbers.

/// Returns the name of a tensor in one layer, of one expert.
pub fn tensor_name(pattern: &str, layer: Option<usize>, expert: Option<usize>) -> String {
    let with = |text: String, mark: &str, number: Option<usize>| match number {
        Some(number) => text.replace(mark, &number.to_string()),
        None => text,
    };
    with(with(pattern.to_owned(), "{i}", layer), "{e}", expert)
}

/// Returns the name of the bias that belongs to a weight.
pub fn bias_name(weight: &str) -> String {
    let named = [("weight", "bias"), ("gamma", "beta")].into_iter().find_map(|(of_weight, of_bias)| {
        let stem = weight.strip_suffix(of_weight).filter(|stem| stem.ends_with(['.', '/']))?;
        Some(format!("{stem}{of_bias}"))
    });
    named.unwrap_or_else(|| format!("{weight}.bias"))
}

/// Returns whether a name matches a pattern: `{i}`, `{e}`, `{g}` and `{j}` match digits, `*` matches any text
/// including none. The time is at most proportional to the product of the two lengths.
pub fn matches(pattern: &str, name: &str) -> bool {
    let name = name.as_bytes();
    // `reached[n]`: whether the pattern so far matches the first n bytes of the name.
    let mut reached = vec![false; name.len() + 1];
    reached[0] = true;
    let mut rest = pattern.as_bytes();
    while !rest.is_empty() {
        let part = PatternPart::first_of(rest);
        rest = &rest[part.len()..];
        let mut next = vec![false; name.len() + 1];
        for at in 0..=name.len() {
            let after_digits =
                |next: &[bool]| name[at - 1].is_ascii_digit() && (reached[at - 1] || next[at - 1]);
            next[at] = match part {
                PatternPart::Anything => reached[at] || at > 0 && next[at - 1],
                PatternPart::Digits => at > 0 && after_digits(&next),
                PatternPart::Byte(byte) => at > 0 && name[at - 1] == byte && reached[at - 1],
            };
        }
        reached = next;
    }
    reached[name.len()]
}

/// An element of a name pattern.
#[derive(Clone, Copy)]
enum PatternPart {
    Byte(u8),
    Digits,
    Anything,
}

impl PatternPart {
    /// Returns the first element of a non-empty pattern. Non-ASCII names are compared byte by byte.
    fn first_of(pattern: &[u8]) -> PatternPart {
        match pattern {
            [b'*', ..] => PatternPart::Anything,
            [b'{', b'i' | b'e' | b'g' | b'j', b'}', ..] => PatternPart::Digits,
            bytes => PatternPart::Byte(bytes[0]),
        }
    }

    /// Returns the length of the element in the pattern in bytes.
    fn len(self) -> usize {
        match self {
            PatternPart::Byte(_) | PatternPart::Anything => 1,
            PatternPart::Digits => 3,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bias_is_named_like_its_weight() {
        for (weight, bias) in [
            ("a.weight", "a.bias"),
            ("a.gamma", "a.beta"),
            ("a/weight", "a/bias"),
            ("a/gamma", "a/beta"),
            ("a.kernel", "a.kernel.bias"),
            ("a_weight", "a_weight.bias"),
        ] {
            assert_eq!(bias_name(weight), bias);
        }
    }

    #[test]
    fn patterns_stand_for_numbers_and_stars_for_anything() {
        for (pattern, name, fits) in [
            ("a.{i}.b", "a.31.b", true),
            ("a.{i}.b", "a.x.b", false),
            ("a.{i}.b", "a..b", false),
            ("a.{i}.b", "a.3.c", false),
            ("a.{i}.e.{e}.w", "a.3.e.12.w", true),
            ("a.{i}.e.{e}.w", "a.3.e.w", false),
            ("a.{g}.b.{j}", "a.1.b.0", true),
            ("pooler.*", "pooler.dense.weight", true),
            ("pooler.*", "xpooler.dense.weight", false),
            ("*.inv_freq", "layers.0.inv_freq", true),
            ("*.inv_freq", "layers.0.inv_freqs", false),
            ("a", "a", true),
            ("a", "ab", false),
            ("*a*b*", "xxaxxbxx", true),
            ("*a*b*", "xxbxxaxx", false),
            ("{i}{e}", "12", true),
            ("{i}{e}", "1", false),
            ("größe.{i}", "größe.7", true),
        ] {
            assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
        }
    }

    /// Patterns may come with a model or a request to convert one, so none may take exponential time.
    #[test]
    fn no_pattern_takes_long() {
        let name = "e".repeat(1000);
        assert!(!matches(&("*e".repeat(200) + "Z"), &name));
        assert!(!matches(&"{i}a".repeat(500), &"1a".repeat(499)));
        assert!(!matches(&("*a".repeat(10) + "*b"), &"a".repeat(10_000)));
    }

    #[test]
    fn a_bias_is_called_as_its_weight_is() {
        assert_eq!(bias_name("a.q.weight"), "a.q.bias");
        assert_eq!(bias_name("LayerNorm.gamma"), "LayerNorm.beta");
        assert_eq!(bias_name("router"), "router.bias");
        assert_eq!(tensor_name("l.{i}.e.{e}.w", Some(3), Some(12)), "l.3.e.12.w");
    }
}
