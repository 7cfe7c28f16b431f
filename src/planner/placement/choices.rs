//! Choices of a plan, and the numbers of sequences and of rows that are worth trying.

use mainstem_kernels::QuantType;

/// Largest number of sequences at once.
const SLOTS_MAX: usize = 1024;

/// Number of sequences up to which each number is tried.
const SLOTS_EACH: usize = 8;

/// Least ratio of two numbers of sequences that are tried, as a fraction.
const SPACING: [usize; 2] = [20, 21];

/// Smallest and largest token budget.
const BUDGETS: [usize; 2] = [128, 8192];

/// A choice of what a plan is free to choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Index of the variant.
    pub variant: usize,
    pub kv: QuantType,
    pub slots: usize,
    pub token_budget: usize,
}

impl Choice {
    /// Returns whether its formats are those of `other`, and its steps are not smaller.
    pub(super) fn is_at_least(&self, other: &Choice) -> bool {
        let is_alike = (self.variant, self.kv) == (other.variant, other.kv);
        is_alike && self.slots >= other.slots && self.token_budget >= other.token_budget
    }
}

/// Returns the numbers of sequences at once that are worth trying for a job: few ones, and the least with
/// which all requests are done when the slots have been filled once, twice, and so on.
pub fn slot_counts(requests: usize) -> Vec<usize> {
    let requests = requests.max(1);
    let most = requests.min(SLOTS_MAX);
    let mut counts: Vec<usize> = (1..=SLOTS_EACH.min(most)).collect();
    counts.extend((1..=requests).map(|waves| requests.div_ceil(waves)).filter(|count| *count <= most));
    counts.push(most);
    counts.sort_unstable();
    counts.dedup();
    // Of those that hardly differ, one is enough.
    let mut kept: Vec<usize> = Vec::new();
    for count in counts.into_iter().rev() {
        let is_apart = kept.last().is_none_or(|last| count * SPACING[1] <= last * SPACING[0]);
        if is_apart || count <= SLOTS_EACH {
            kept.push(count);
        }
    }
    kept.reverse();
    kept
}

/// Returns the token budgets that are worth trying with so many sequences: powers of two, with which at least
/// a quarter of the rows of a step may be of prompts, and no more than all prompts have.
pub fn token_budgets(slots: usize, prompt: usize) -> Vec<usize> {
    let least = (slots + slots / 3 + 1).next_power_of_two().max(BUDGETS[0]);
    let most = slots.saturating_mul(prompt + 1).max(least + 1);
    let mut budgets = vec![least];
    while let Some(next) =
        budgets.last().map(|last| 2 * last).filter(|next| *next <= BUDGETS[1].min(2 * most))
    {
        budgets.push(next);
    }
    budgets
}
