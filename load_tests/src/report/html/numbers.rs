//! Number formatting for the HTML report.
//!
//! Invariant: NaN and infinities are never shown as numbers.

/// Placeholder for a missing value.
pub const MISSING: &str = "–";

/// Formats a measured value with at least three significant digits.
pub fn format_value(value: f64) -> String {
    let decimals = match value.abs() {
        size if !size.is_finite() => return MISSING.into(),
        0.0 => return "0".into(),
        1e15.. => return format!("{value:.1e}"),
        100.0.. => 0,
        10.0.. => 1,
        1.0.. => 2,
        0.001.. => 3,
        _ => return format!("{value:.1e}"),
    };
    group_digits(&format!("{value:.decimals$}"))
}

/// Formats a configured value with all its digits.
pub fn format_setting(value: f64) -> String {
    match value.abs() {
        1e-6..1e15 => group_digits(&((value * 1e6).round() / 1e6).to_string()),
        _ => format_value(value),
    }
}

/// Formats a number of requests: `1 request`, `2 requests`.
pub fn format_requests(number: usize) -> String {
    format!("{} request{}", format_count(number), if number == 1 { "" } else { "s" })
}

/// Formats a value that may be missing.
pub fn format_optional(value: Option<f64>) -> String {
    value.map_or(MISSING.into(), format_value)
}

/// Formats a count.
pub fn format_count(value: impl TryInto<u64>) -> String {
    value.try_into().map_or(MISSING.into(), |value: u64| group_digits(&value.to_string()))
}

/// Formats a fraction from 0 to 1 as a percentage.
pub fn format_percent(share: f64) -> String {
    match share.is_finite() {
        true => format!("{:.1} %", share * 100.0),
        false => MISSING.into(),
    }
}

/// Formats `YYYYMMDD-HHMMSS` as a readable date; any other text is returned unchanged.
pub fn format_date(text: &str) -> String {
    let digits: Vec<char> = text.chars().filter(char::is_ascii_digit).collect();
    let shape: String = text.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    if shape != "00000000-000000" {
        return text.into();
    }
    let part = |from: usize, to: usize| digits[from..to].iter().collect::<String>();
    let [year, month, day] = [part(0, 4), part(4, 6), part(6, 8)];
    format!("{year}-{month}-{day} {}:{}:{} UTC", part(8, 10), part(10, 12), part(12, 14))
}

/// Inserts thousands separators: `1234567.8` becomes `1,234,567.8`.
fn group_digits(number: &str) -> String {
    let (whole, fraction) = number.find('.').map_or((number, ""), |dot| number.split_at(dot));
    let (sign, digits) = whole.strip_prefix('-').map_or(("", whole), |digits| ("-", digits));
    let mut text = String::from(sign);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text + fraction
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_three_digits_or_more() {
        let written = [0.0, 0.0123, 1.0, 12.345, 99.96, 123.4, 1_234_567.8, -4321.0].map(format_value);
        assert_eq!(written, ["0", "0.012", "1.00", "12.3", "100.0", "123", "1,234,568", "-4,321"]);
        assert_eq!([f64::NAN, f64::INFINITY, f64::NEG_INFINITY].map(format_value), [MISSING; 3]);
        assert_eq!(format_value(4.2e-7), "4.2e-7");
        assert_eq!((format_percent(0.673), format_percent(f64::NAN)), ("67.3 %".into(), MISSING.into()));
    }

    #[test]
    fn chosen_numbers_are_as_they_were_chosen() {
        let written = [1.0, 0.5, 2500.0, 10.0 / 3.0, 0.1 + 0.2].map(format_setting);
        assert_eq!(written, ["1", "0.5", "2,500", "3.333333", "0.3"]);
    }

    #[test]
    fn only_a_date_is_rewritten() {
        assert_eq!(format_date("20260102-030405"), "2026-01-02 03:04:05 UTC");
        for other in ["", "20260102", "2026-01-02", "20260102-03040é", "<b>20260102-030405"] {
            assert_eq!(format_date(other), other);
        }
    }
}
