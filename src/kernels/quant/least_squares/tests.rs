//! Tests of the search: it is never worse than round-to-nearest, usually better, and follows the importance
//! weights.

use super::*;
use crate::random::noise;

fn searchable_types() -> impl Iterator<Item = QuantType> {
    QuantType::all().filter(|ty| search_function(*ty).is_some())
}

fn round_to_nearest(ty: QuantType, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0xa5; ty.bytes(values.len()).unwrap()];
    ty.quantize(values, &mut bytes);
    bytes
}

fn least_squares(ty: QuantType, values: &[f32], importance: Option<&[f32]>) -> Vec<u8> {
    let mut bytes = vec![0xa5; ty.bytes(values.len()).unwrap()];
    ty.quantize_least_squares(values, importance, &mut bytes);
    bytes
}

/// Returns the error of each element.
fn errors(ty: QuantType, values: &[f32], bytes: &[u8]) -> Vec<f64> {
    let mut back = vec![f32::NAN; values.len()];
    ty.dequantize(bytes, &mut back);
    values.iter().zip(back).map(|(x, y)| f64::from(*x) - f64::from(y)).collect()
}

/// Returns the sum of squared errors, weighted by importance.
fn weighted_sum_of_squares(lost: &[f64], importance: Option<&[f32]>) -> f64 {
    let count = |number: usize| importance.map_or(1.0, |importance| f64::from(importance[number]));
    lost.iter().enumerate().map(|(number, lost)| count(number) * lost * lost).sum()
}

/// Returns approximately normal numbers: each is a sum of twelve uniform ones.
fn normal(tag: u32, n: usize, spread: f32) -> Vec<f32> {
    noise(tag, 12 * n).chunks(12).map(|some| spread * some.iter().sum::<f32>() / 2.0).collect()
}

/// Returns blocks that are difficult for a search.
fn adversarial(block: usize) -> Vec<Vec<f32>> {
    let plain = normal(4, block, 0.03);
    let with = |at: usize, value: f32| {
        let mut values = plain.clone();
        values[at] = value;
        values
    };
    let of = |number: fn(usize) -> f32| (0..block).map(number).collect::<Vec<f32>>();
    vec![
        with(3, 40.0),
        with(0, -65_504.0),
        of(|n| if n % 2 == 0 { 1.0 } else { -1.0 }),
        of(|n| if n == 0 { 1e-3 } else { 0.0 }),
        of(|n| 1.0 + n as f32 * 1e-6),
        of(|n| 1e-6 * (n % 5) as f32),
        of(|n| 1e-30 * n as f32),
        of(|n| -60_000.0 + 1000.0 * (n % 100) as f32),
        of(|n| -2.0 - (n % 7) as f32),
        of(|n| 2.0 + (n % 7) as f32),
    ]
}

/// Importance weights: none, varied, and such that most columns or whole blocks have none.
fn importances(n: usize) -> Vec<Option<Vec<f32>>> {
    let some = noise(9, n).iter().map(|x| x * x * 1e3).collect();
    let few = (0..n).map(|number| if number % 11 == 5 { 1e-20 } else { 0.0 }).collect();
    let spiked = (0..n).map(|number| if number % 32 == 17 { 1e9 } else { 1.0 }).collect();
    vec![None, Some(some), Some(few), Some(spiked), Some(vec![0.0; n])]
}

#[test]
fn the_error_is_never_larger_than_that_of_round_to_nearest() {
    for ty in searchable_types() {
        let block = ty.row().block_elements;
        let plain = [normal(1, 6 * block, 0.03), noise(2, 6 * block)];
        for values in plain.into_iter().chain(adversarial(block)) {
            for importance in importances(values.len()) {
                let importance = importance.as_deref();
                let bytes = [round_to_nearest(ty, &values), least_squares(ty, &values, importance)];
                let [own, found] =
                    bytes.map(|bytes| weighted_sum_of_squares(&errors(ty, &values, &bytes), importance));
                assert!(found <= own * (1.0 + 1e-9), "{ty}: {found} exceeds {own} for {values:?}");
            }
        }
    }
}

/// A search without effect, or with the bytes of another format, would not reduce the error.
#[test]
fn the_error_of_normal_numbers_is_a_tenth_smaller_and_a_fifth_with_weights() {
    for ty in searchable_types().filter(|ty| ty.row().block_elements < MAX_BLOCK_LEN) {
        let values = normal(3, 128 * 64, 0.03);
        let own = errors(ty, &values, &round_to_nearest(ty, &values));
        let found = errors(ty, &values, &least_squares(ty, &values, None));
        assert!(weighted_sum_of_squares(&found, None) < 0.9 * weighted_sum_of_squares(&own, None), "{ty}");
        let importance: Vec<f32> = normal(5, values.len(), 1.0).iter().map(|x| x.exp()).collect();
        let importance = Some(importance.as_slice());
        let found = errors(ty, &values, &least_squares(ty, &values, importance));
        assert!(
            weighted_sum_of_squares(&found, importance) < 0.8 * weighted_sum_of_squares(&own, importance),
            "{ty}"
        );
    }
}

/// K-quants are always searched; only the weights differ here.
#[test]
fn k_quants_follow_weights_too() {
    for ty in searchable_types().filter(|ty| ty.row().block_elements == MAX_BLOCK_LEN) {
        let values = normal(3, 32 * MAX_BLOCK_LEN, 0.03);
        let importance: Vec<f32> = normal(5, values.len(), 1.0).iter().map(|x| x.exp()).collect();
        let importance = Some(importance.as_slice());
        let own = errors(ty, &values, &round_to_nearest(ty, &values));
        let found = errors(ty, &values, &least_squares(ty, &values, importance));
        assert!(
            weighted_sum_of_squares(&found, importance) < 0.92 * weighted_sum_of_squares(&own, importance),
            "{ty}"
        );
    }
}

/// Tests every quant that a block can hold, in the formats of Inferflow and FlexGen, including bin centers.
#[test]
fn a_block_on_a_grid_is_exact() {
    for ty in searchable_types().filter(|ty| *ty as usize >= QuantType::Q8_B32T1 as usize) {
        let row = ty.row();
        let levels = match ty {
            QuantType::Q8_B32T1 => 256,
            QuantType::Q6_B64T1 => 63,
            QuantType::Q5_B64T1 => 31,
            QuantType::Q4_B64T1 => 15,
            QuantType::Q3H_B64T1 => 11,
            QuantType::Q3_B32T1A | QuantType::Q3_B32T1B => 8,
            QuantType::Q2_B32T1A | QuantType::Q2_B32T1B => 4,
            _ => 16,
        };
        let numbers = row.block_elements;
        let quant =
            |n: usize| if levels > numbers { n * (levels - 1) / (numbers - 1) } else { n * 13 % levels };
        let (minimum, scale) = if ty == QuantType::Q4_B16 { (-0.5, 0.05) } else { (-1.25, 0.25) };
        let values: Vec<f32> = (0..numbers).map(|n| minimum + quant(n) as f32 * scale).collect();
        let lost = errors(ty, &values, &least_squares(ty, &values, None));
        assert!(lost.iter().all(|lost| lost.abs() < 1e-6), "{ty}: {lost:?}");
    }
}

#[test]
fn an_important_column_has_a_smaller_error() {
    for ty in searchable_types() {
        let block = ty.row().block_elements;
        let values = normal(6, 64 * block, 0.03);
        let importance: Vec<f32> =
            (0..values.len()).map(|n| if n % block == 5 { 1e4 } else { 1.0 }).collect();
        let own_of = |importance| -> f64 {
            let lost = errors(ty, &values, &least_squares(ty, &values, importance));
            lost.iter().skip(5).step_by(block).map(|lost| lost * lost).sum()
        };
        let (with, without) = (own_of(Some(&importance[..])), own_of(None));
        assert!(with < 0.5 * without, "{ty}: {with}, {without} without importance");
    }
}

#[test]
fn equal_importance_gives_the_same_bytes_as_none() {
    for ty in searchable_types() {
        let values = normal(7, 4 * ty.row().block_elements, 0.03);
        for each in [0.0, 0.7, 1e-12, 3e20] {
            let importance = vec![each; values.len()];
            assert!(
                least_squares(ty, &values, Some(&importance)) == least_squares(ty, &values, None),
                "{ty}, {each}"
            );
        }
    }
}

/// As documented for both methods: blocks with NaN or numbers that a block cannot represent, and constant
/// blocks, are quantized by round-to-nearest. A format without a search has the same bytes in all cases.
#[test]
fn unusual_blocks_and_formats_without_search_are_unchanged() {
    for ty in QuantType::all().filter(|ty| ty.row().quantize.is_some()) {
        let block = ty.row().block_elements.max(16);
        for unusual in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
            let mut values = normal(8, block, 0.03);
            values[7] = unusual;
            assert!(least_squares(ty, &values, None) == round_to_nearest(ty, &values), "{ty} with {unusual}");
        }
        for constant in [0.0, -0.0, 0.375, -1e-9] {
            let values = vec![constant; block];
            assert!(least_squares(ty, &values, None) == round_to_nearest(ty, &values), "{ty} of {constant}");
        }
        if search_function(ty).is_none() {
            let values = normal(8, block, 0.03);
            assert!(
                least_squares(ty, &values, Some(&vec![1.0; block])) == round_to_nearest(ty, &values),
                "{ty}"
            );
        }
    }
}
