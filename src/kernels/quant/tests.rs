//! Tests of every format: bytes against those of the gguf package, round trips, and non-finite numbers.

use super::*;
use crate::random::philox;

#[test]
fn table_rows_are_in_the_order_of_the_types() {
    for (number, ty) in QuantType::all().enumerate() {
        assert_eq!((ty as usize, ty.row().ty), (number, ty));
        assert_eq!(QuantType::by_name(&ty.name().to_uppercase()), Some(ty));
        for alias in ty.row().aliases {
            assert_eq!(QuantType::by_name(alias), Some(ty), "every name is unique");
        }
    }
}

#[test]
fn representable_values_survive_and_ties_go_to_even() {
    let values = [0.0f32, -0.0, 1.0, -2.5, 0.15625, 1024.0];
    for ty in QuantType::unblocked() {
        let mut bytes = vec![0; ty.bytes(values.len()).unwrap()];
        let mut back = [0f32; 6];
        ty.quantize(&values, &mut bytes);
        ty.dequantize(&bytes, &mut back);
        assert_eq!(values.map(f32::to_bits), back.map(f32::to_bits), "{ty}");
    }
    let mut half_ulp = [0u8; 2];
    QuantType::F16.quantize(&[1.0 + 1.0 / 2048.0], &mut half_ulp);
    assert_eq!(u16::from_le_bytes(half_ulp), 0x3c00);
    QuantType::BF16.quantize(&[1.0 + 3.0 / 256.0], &mut half_ulp);
    assert_eq!(u16::from_le_bytes(half_ulp), 0x3f82);
}

/// Reads a file of tests/fixtures/quant, which tests/oracle/make_quants.py writes.
fn fixture(name: &str) -> Option<Vec<u8>> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/quant/");
    std::fs::read(format!("{folder}{name}")).ok()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Elements of a fixture.
const FIXTURE_LEN: usize = 1024;

#[test]
fn every_format_of_gguf_is_read_as_the_gguf_package_reads_it() {
    use QuantType::*;
    let all =
        [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, MXFP4];
    for ty in all {
        let file = fixture(&format!("{}.bin", ty.name().to_lowercase())).expect("the fixture exists");
        let (quantized, values) = file.split_at(ty.bytes(FIXTURE_LEN).unwrap());
        let (mut got, want) = (vec![0.0; FIXTURE_LEN], floats(values));
        ty.dequantize(quantized, &mut got);
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(got.to_bits(), want.to_bits(), "{ty}: number {i} is {got}, not {want}");
        }
    }
}

#[test]
fn simple_blocks_are_written_as_the_gguf_package_writes_them() {
    use QuantType::*;
    for ty in [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0] {
        let file = fixture(&format!("{}.codes", ty.name())).expect("the fixture exists");
        let (values, want) = file.split_at(4 * FIXTURE_LEN);
        let mut got = vec![0; want.len()];
        ty.quantize(&floats(values), &mut got);
        assert!(got == want, "{ty}");
    }
}

/// Returns numbers that are distributed like weights: normal, in groups of different spread.
fn weights(n: usize) -> Vec<f32> {
    let uniform = |i: u32| {
        let words = philox([i, 3, 0, 0], [5, 6]);
        words.map(|word| (f64::from(word) + 0.5) / 4_294_967_296.0)
    };
    let normal = |[a, b, _, _]: [f64; 4]| (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos();
    (0..n as u32).map(|i| (normal(uniform(i)) * [0.02, 0.05][i as usize / 256 % 2]) as f32).collect()
}

fn there_and_back(ty: QuantType, values: &[f32]) -> Vec<f32> {
    let (mut bytes, mut back) = (vec![0xa5; ty.bytes(values.len()).unwrap()], vec![f32::NAN; values.len()]);
    ty.quantize(values, &mut bytes);
    ty.dequantize(&bytes, &mut back);
    back
}

/// Returns the root-mean-square error relative to the root mean square of the numbers.
fn relative_rms_error(ty: QuantType) -> f64 {
    let values = weights(1 << 14);
    let square = |x: f64| x * x;
    let off: f64 =
        values.iter().zip(there_and_back(ty, &values)).map(|(x, y)| square(f64::from(x - y))).sum();
    (off / values.iter().map(|x| square(f64::from(*x))).sum::<f64>()).sqrt()
}

fn writable_types() -> impl Iterator<Item = QuantType> {
    QuantType::all().filter(|ty| ty.row().quantize.is_some())
}

/// The error of rounding normal numbers to evenly spaced levels is known to be near these bounds. A wrong
/// bit, or the scale of another block, gives an error several times as large.
#[test]
fn errors_decrease_with_the_number_of_bits() {
    for ty in writable_types().filter(|ty| ty.is_blocked()) {
        let spread = relative_rms_error(ty);
        let levels = (ty.bits_per_element() - 0.5).floor().min(8.0).exp2();
        assert!(spread < 2.7 / (levels - 1.0), "{ty}: {spread}");
    }
    let order = [
        QuantType::F16,
        QuantType::Q8_0,
        QuantType::Q6_B64T1,
        QuantType::Q5_B64T1,
        QuantType::Q4_B32T1A,
        QuantType::Q4_B64T1,
        QuantType::Q3H_B64T1,
        QuantType::Q3_B32T1A,
        QuantType::Q2_B32T1A,
    ];
    assert!(order.is_sorted_by(|a, b| relative_rms_error(*a) < relative_rms_error(*b)));
    for (searched, simple) in [(QuantType::Q4_K, QuantType::Q4_1), (QuantType::Q5_K, QuantType::Q5_1)] {
        assert!(
            relative_rms_error(searched) < relative_rms_error(simple),
            "{searched} is smaller and better than {simple}"
        );
    }
}

#[test]
fn constant_blocks_come_back_and_zeros_are_zeros() {
    for ty in writable_types() {
        let numbers = 2 * ty.row().block_elements;
        assert_eq!(there_and_back(ty, &vec![0.0; numbers]), vec![0.0; numbers], "{ty}");
        for constant in [0.375f32, -0.375] {
            for back in there_and_back(ty, &vec![constant; numbers]) {
                assert!((back - constant).abs() <= 0.375 / 64.0, "{ty}: {constant} became {back}");
            }
        }
    }
}

/// As documented: in blocks, NaN becomes 0 and too large numbers become the largest one. Dequantized numbers
/// are finite, and other blocks are unaffected.
#[test]
fn blocks_hold_finite_numbers_only() {
    const UNUSUAL: [f32; 6] =
        [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE / 4.0, -1e-30];
    for ty in writable_types().filter(|ty| ty.is_blocked()) {
        let block = ty.row().block_elements;
        let plain = weights(3 * block);
        let undisturbed = there_and_back(ty, &plain);
        for unusual in UNUSUAL {
            let mut values = plain.clone();
            values[block + 5] = unusual;
            let back = there_and_back(ty, &values);
            assert!(back.iter().all(|x| x.is_finite()), "{ty} with {unusual}");
            assert_eq!(back[..block], undisturbed[..block], "{ty} with {unusual}");
            assert_eq!(back[2 * block..], undisturbed[2 * block..], "{ty} with {unusual}");
        }
    }
}

/// Checks the table in docs/quantization.md; `UPDATE_DOCS=1 cargo test documented_table` regenerates it.
#[test]
fn the_documented_table_is_up_to_date() {
    const BEGIN: &str = "<!-- generated from the table of formats -->\n";
    const END: &str = "<!-- end -->";
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/quantization.md");
    let text = std::fs::read_to_string(path).expect("the page exists");
    let (before, rest) = text.split_once(BEGIN).expect("the table has a start marker");
    let (_, after) = rest.split_once(END).expect("the table has an end marker");
    let expected = format!("{before}{BEGIN}{}{END}{after}", format_table());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &expected).expect("the page can be written");
    }
    assert!(text == expected, "docs/quantization.md is out of date; UPDATE_DOCS=1 regenerates it");
}

/// Formats the table of formats as Markdown.
fn format_table() -> String {
    let mut table = String::from(
        "| name | aliases | elements | bytes | bits | block layout | error | purpose |\n\
         |---|---|---|---|---|---|---|---|\n",
    );
    for ty in QuantType::all() {
        let row = ty.row();
        let error = match row.quantize {
            Some(_) if relative_rms_error(ty) == 0.0 => "0".to_owned(),
            Some(_) => format!("{:.2} %", 100.0 * relative_rms_error(ty)),
            None => "-".to_owned(),
        };
        let bits = format!("{:.4}", ty.bits_per_element());
        table += &format!(
            "| {} | {} | {} | {} | {} | {} | {error} | {} |\n",
            row.name,
            row.aliases.join(", "),
            row.block_elements,
            row.block_bytes,
            bits.trim_end_matches('0').trim_end_matches('.'),
            row.layout,
            row.purpose,
        );
    }
    table
}
