//! What a search may never do, what it should, and whether it listens to what counts.

use super::*;
use crate::conformance::noise;

fn searched() -> impl Iterator<Item = QuantType> {
    QuantType::all().filter(|ty| search_of(*ty).is_some())
}

fn coded(ty: QuantType, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0xa5; ty.bytes(values.len()).unwrap()];
    ty.quantize(values, &mut bytes);
    bytes
}

fn fitted(ty: QuantType, values: &[f32], importance: Option<&[f32]>) -> Vec<u8> {
    let mut bytes = vec![0xa5; ty.bytes(values.len()).unwrap()];
    ty.fit(values, importance, &mut bytes);
    bytes
}

/// What is lost of each number.
fn lost(ty: QuantType, values: &[f32], bytes: &[u8]) -> Vec<f64> {
    let mut back = vec![f32::NAN; values.len()];
    ty.dequantize(bytes, &mut back);
    values.iter().zip(back).map(|(x, y)| f64::from(*x) - f64::from(y)).collect()
}

/// The sum of squares, each as often as its number counts.
fn sum(lost: &[f64], importance: Option<&[f32]>) -> f64 {
    let count = |number: usize| importance.map_or(1.0, |importance| f64::from(importance[number]));
    lost.iter().enumerate().map(|(number, lost)| count(number) * lost * lost).sum()
}

/// Near normal: of each number the sum of twelve.
fn normal(tag: u32, n: usize, spread: f32) -> Vec<f32> {
    noise(tag, 12 * n).chunks(12).map(|some| spread * some.iter().sum::<f32>() / 2.0).collect()
}

/// Blocks of which each has something that a search could fall over.
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

/// None, some, and such that most columns or whole blocks count nothing.
fn importances(n: usize) -> Vec<Option<Vec<f32>>> {
    let some = noise(9, n).iter().map(|x| x * x * 1e3).collect();
    let few = (0..n).map(|number| if number % 11 == 5 { 1e-20 } else { 0.0 }).collect();
    let spiked = (0..n).map(|number| if number % 32 == 17 { 1e9 } else { 1.0 }).collect();
    vec![None, Some(some), Some(few), Some(spiked), Some(vec![0.0; n])]
}

#[test]
fn never_more_is_lost_than_to_the_formats_own_codes() {
    for ty in searched() {
        let block = ty.row().block_elements;
        let plain = [normal(1, 6 * block, 0.03), noise(2, 6 * block)];
        for values in plain.into_iter().chain(adversarial(block)) {
            for importance in importances(values.len()) {
                let importance = importance.as_deref();
                let bytes = [coded(ty, &values), fitted(ty, &values, importance)];
                let [own, found] = bytes.map(|bytes| sum(&lost(ty, &values, &bytes), importance));
                assert!(found <= own * (1.0 + 1e-9), "{ty}: {found} is more than {own}, of {values:?}");
            }
        }
    }
}

/// A search that finds nothing, or what another format's bytes mean, loses as much as before.
#[test]
fn normal_numbers_lose_a_tenth_less_and_with_weights_a_fifth() {
    for ty in searched().filter(|ty| ty.row().block_elements < NUMBERS_MAX) {
        let values = normal(3, 128 * 64, 0.03);
        let own = lost(ty, &values, &coded(ty, &values));
        let found = lost(ty, &values, &fitted(ty, &values, None));
        assert!(sum(&found, None) < 0.9 * sum(&own, None), "{ty}");
        let importance: Vec<f32> = normal(5, values.len(), 1.0).iter().map(|x| x.exp()).collect();
        let importance = Some(importance.as_slice());
        let found = lost(ty, &values, &fitted(ty, &values, importance));
        assert!(sum(&found, importance) < 0.8 * sum(&own, importance), "{ty}");
    }
}

/// The formats of superblocks are searched either way; weights are what is new to them.
#[test]
fn superblocks_follow_weights_too() {
    for ty in searched().filter(|ty| ty.row().block_elements == NUMBERS_MAX) {
        let values = normal(3, 32 * NUMBERS_MAX, 0.03);
        let importance: Vec<f32> = normal(5, values.len(), 1.0).iter().map(|x| x.exp()).collect();
        let importance = Some(importance.as_slice());
        let own = lost(ty, &values, &coded(ty, &values));
        let found = lost(ty, &values, &fitted(ty, &values, importance));
        assert!(sum(&found, importance) < 0.92 * sum(&own, importance), "{ty}");
    }
}

/// Every code of a grid that the block can hold, in Inferflow's formats and FlexGen's, those of bin centres among them.
#[test]
fn a_block_on_a_grid_is_exact() {
    for ty in searched().filter(|ty| *ty as usize >= QuantType::Q8_B32T1 as usize) {
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
        let code =
            |n: usize| if levels > numbers { n * (levels - 1) / (numbers - 1) } else { n * 13 % levels };
        let (base, scale) = if ty == QuantType::Q4_B16 { (-0.5, 0.05) } else { (-1.25, 0.25) };
        let values: Vec<f32> = (0..numbers).map(|n| base + code(n) as f32 * scale).collect();
        let lost = lost(ty, &values, &fitted(ty, &values, None));
        assert!(lost.iter().all(|lost| lost.abs() < 1e-6), "{ty}: {lost:?}");
    }
}

#[test]
fn a_column_that_counts_loses_less() {
    for ty in searched() {
        let block = ty.row().block_elements;
        let values = normal(6, 64 * block, 0.03);
        let importance: Vec<f32> =
            (0..values.len()).map(|n| if n % block == 5 { 1e4 } else { 1.0 }).collect();
        let own_of = |importance| -> f64 {
            let lost = lost(ty, &values, &fitted(ty, &values, importance));
            lost.iter().skip(5).step_by(block).map(|lost| lost * lost).sum()
        };
        let (with, without) = (own_of(Some(&importance[..])), own_of(None));
        assert!(with < 0.5 * without, "{ty}: {with}, {without} when all count alike");
    }
}

#[test]
fn columns_that_count_alike_are_as_none_was_said() {
    for ty in searched() {
        let values = normal(7, 4 * ty.row().block_elements, 0.03);
        for each in [0.0, 0.7, 1e-12, 3e20] {
            let importance = vec![each; values.len()];
            assert!(fitted(ty, &values, Some(&importance)) == fitted(ty, &values, None), "{ty}, {each}");
        }
    }
}

/// Documented of both ways: what is no number, and what a block cannot hold, are as the equations have them; so is a block of
/// one number. What a format has no search for is the same altogether.
#[test]
fn strange_blocks_and_plain_formats_are_as_ever() {
    for ty in QuantType::all().filter(|ty| ty.row().quantize.is_some()) {
        let block = ty.row().block_elements.max(16);
        for strange in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
            let mut values = normal(8, block, 0.03);
            values[7] = strange;
            assert!(fitted(ty, &values, None) == coded(ty, &values), "{ty} with {strange}");
        }
        for constant in [0.0, -0.0, 0.375, -1e-9] {
            let values = vec![constant; block];
            assert!(fitted(ty, &values, None) == coded(ty, &values), "{ty} of {constant}");
        }
        if search_of(ty).is_none() {
            let values = normal(8, block, 0.03);
            assert!(fitted(ty, &values, Some(&vec![1.0; block])) == coded(ty, &values), "{ty}");
        }
    }
}
