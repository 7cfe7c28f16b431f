//! Evaluates the formulas of specification files: `sqrt($hidden)`, `ffn_dim / 2`, `scale_depth /
//! sqrt($layers)`.
//!
//! A formula consists of numbers, names, `+ - * / ^`, parentheses, `sqrt(…)` and `floor(…)`. The caller
//! supplies the values of names.
//!
//! Invariant: the recursion depth is bounded, whatever the text.

use anyhow::{Result, bail, ensure};

/// Maximum nesting depth.
const DEPTH_MAX: usize = 16;

/// Evaluates `text`; `named` returns the values of names.
pub fn evaluate(text: &str, named: &mut dyn FnMut(&str) -> Result<f64>) -> Result<f64> {
    let mut reader = FormulaParser { rest: text.trim_start(), variable: named, depth: 0 };
    let value = reader.sum()?;
    ensure!(reader.rest.is_empty(), "formula '{text}': unexpected '{}'", reader.rest);
    ensure!(value.is_finite(), "formula '{text}' evaluates to {value}, which is not finite");
    Ok(value)
}

/// Returns the names in a formula; of one that is not valid, those before the error.
pub fn names(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    // The value does not matter, and an invalid formula is an error when it is evaluated.
    drop(evaluate(text, &mut |name| {
        names.push(name.to_owned());
        Ok(1.0)
    }));
    names
}

struct FormulaParser<'a> {
    /// The remaining text, without leading spaces.
    rest: &'a str,
    variable: &'a mut dyn FnMut(&str) -> Result<f64>,
    depth: usize,
}

impl FormulaParser<'_> {
    fn sum(&mut self) -> Result<f64> {
        let mut value = self.product()?;
        loop {
            match () {
                _ if self.eat('+') => value += self.product()?,
                _ if self.eat('-') => value -= self.product()?,
                _ => return Ok(value),
            }
        }
    }

    fn product(&mut self) -> Result<f64> {
        let mut value = self.power()?;
        loop {
            match () {
                _ if self.eat('*') => value *= self.power()?,
                _ if self.eat('/') => value /= self.power()?,
                _ => return Ok(value),
            }
        }
    }

    /// Parses a power, which is right-associative: `2 ^ 3 ^ 2` is `2 ^ 9`, and `-2 ^ 2` is `-4`.
    fn power(&mut self) -> Result<f64> {
        self.depth += 1;
        ensure!(self.depth <= DEPTH_MAX, "a formula is nested deeper than {DEPTH_MAX} levels");
        let value = match self.eat('-') {
            true => -self.power()?,
            false => {
                let base = self.atom()?;
                if self.eat('^') { base.powf(self.power()?) } else { base }
            }
        };
        self.depth -= 1;
        Ok(value)
    }

    fn atom(&mut self) -> Result<f64> {
        if self.eat('(') {
            return self.inner();
        }
        let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '$');
        let end = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest.trim_start();
        match word {
            "" if self.rest.is_empty() => bail!("a formula ends too early"),
            "" => bail!("unexpected '{}' in a formula", self.rest),
            "sqrt" if self.eat('(') => Ok(self.inner()?.sqrt()),
            "floor" if self.eat('(') => Ok(self.inner()?.floor()),
            number if number.starts_with(|c: char| c.is_ascii_digit() || c == '.') => {
                number.parse().map_err(|_| anyhow::anyhow!("'{number}' in a formula is not a number"))
            }
            name => (self.variable)(name),
        }
    }

    /// Parses a sum up to the closing parenthesis.
    fn inner(&mut self) -> Result<f64> {
        let value = self.sum()?;
        ensure!(self.eat(')'), "a parenthesis in a formula is not closed");
        Ok(value)
    }

    fn eat(&mut self, sign: char) -> bool {
        let Some(rest) = self.rest.strip_prefix(sign) else { return false };
        self.rest = rest.trim_start();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worth(text: &str) -> Result<f64> {
        evaluate(text, &mut |name| match name {
            "$hidden" => Ok(64.0),
            "a.b_2" => Ok(3.0),
            other => bail!("'{other}' is unknown"),
        })
    }

    #[test]
    fn formulas_are_read_as_everybody_reads_them() {
        for (text, expected) in [
            ("4 * $hidden", 256.0),
            ("sqrt($hidden) - 2", 6.0),
            ("1 - 2 - 3", -4.0),
            ("24 / 4 / 2", 3.0),
            ("2 + 3 * 4", 14.0),
            ("(2 + 3) * 4", 20.0),
            ("2 ^ 3 ^ 2", 512.0),
            ("-2 ^ 2", -4.0),
            ("$hidden ^ -0.5", 0.125),
            ("a.b_2*a.b_2", 9.0),
            ("1 / sqrt(16)", 0.25),
            ("floor(96 * 0.3)", 28.0),
        ] {
            assert_eq!(worth(text).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn what_is_no_formula_is_refused() {
        let deep = "(".repeat(100_000);
        for text in
            ["", "1 +", "(1", "1)", "2 3", "sqrt 4", "0.1.2", "$x", "1 / 0", "sqrt(-1)", "1 & 2", &deep]
        {
            assert!(worth(text).is_err(), "{text}");
        }
        let deep = format!("{}1{}", "-".repeat(100_000), "");
        assert!(worth(&deep).is_err());
    }
}
