//! The search for the prefix of ordered candidates with a given weight, by buckets and selection.
//!
//! Invariant: sums are of integers, so the result does not depend on the order of the candidates.

use crate::reference::draw::nearest;

/// Number of candidates by which a search for a prefix begins.
const FIRST: usize = 64;

/// The bucket in which the weights of items, bucket by bucket, reach a sum.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    pub number: usize,
    /// Sum of the weights of the buckets before it.
    before: u64,
}

/// Moves the shortest prefix of the ordered keys whose weights sum up to `enough` to the front, and returns
/// its length: at least 1, and all if they do not suffice. The keys are ordered around its end only, which is
/// in the bucket `end`. `order` is a number that is not negative and ascends with the keys.
pub fn weighted_prefix(
    keys: &mut Vec<u64>,
    order: impl Fn(u64) -> f32,
    weight: impl Fn(u64) -> u64,
    end: Bucket,
    enough: f64,
) -> usize {
    let (mut low, mut sum) = (0, end.before);
    keys.retain(|&key| bucket(order(key)) <= end.number);
    for i in 0..keys.len() {
        if bucket(order(keys[i])) < end.number {
            keys.swap(low, i);
            low += 1;
        }
    }
    let mut high = keys.len();
    while high - low > 32 {
        let count = FIRST.min((high - low) / 2);
        keys[low..high].select_nth_unstable(count - 1);
        let part: u64 = keys[low..low + count].iter().map(|&key| weight(key)).sum();
        if (sum + part) as f64 >= enough {
            high = low + count;
        } else {
            sum += part;
            low += count;
        }
    }
    keys[low..high].sort_unstable();
    for (i, &key) in keys[low..high].iter().enumerate() {
        sum += weight(key);
        if sum as f64 >= enough {
            return low + i + 1;
        }
    }
    high
}

/// Number of buckets of a search for a prefix.
pub const BUCKETS: usize = 4096;

/// Returns the bucket of a number that is not negative; larger ones are in the same or a later one.
#[inline(always)]
pub fn bucket(order: f32) -> usize {
    let scaled = order * 128.0;
    let limited = if scaled < (BUCKETS - 1) as f32 { scaled } else { (BUCKETS - 1) as f32 };
    nearest(limited).1 as usize
}

/// Returns the bucket in which the weights of the items sum up to `enough`, the last one if they do not.
pub fn last_bucket<T: Copy>(
    items: &[T],
    order: impl Fn(T) -> f32,
    weight: impl Fn(T) -> u64,
    enough: f64,
) -> Bucket {
    find_bucket(&sum_buckets(items, order, weight), enough)
}

/// Returns the sums of the weights of each bucket.
#[inline(always)]
pub fn sum_buckets<T: Copy>(
    items: &[T],
    order: impl Fn(T) -> f32,
    weight: impl Fn(T) -> u64,
) -> [u64; BUCKETS] {
    let mut sums = [0u64; BUCKETS];
    let (chunks, rest) = items.as_chunks::<16>();
    for chunk in chunks {
        // Computed apart from the additions, so that it vectorizes.
        let (mut weights, mut buckets) = ([0; 16], [0; 16]);
        for (i, &item) in chunk.iter().enumerate() {
            weights[i] = weight(item);
            buckets[i] = bucket(order(item));
        }
        weights.iter().zip(buckets).for_each(|(weight, bucket)| sums[bucket % BUCKETS] += weight);
    }
    rest.iter().for_each(|&item| sums[bucket(order(item))] += weight(item));
    sums
}

/// Returns the bucket in which sums of buckets reach `enough`, the last one if they do not.
pub fn find_bucket(sums: &[u64; BUCKETS], enough: f64) -> Bucket {
    let mut end = Bucket { number: 0, before: 0 };
    while end.number < BUCKETS - 1 && ((end.before + sums[end.number]) as f64) < enough {
        end.before += sums[end.number];
        end.number += 1;
    }
    end
}
