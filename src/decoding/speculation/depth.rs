//! The number of drafts of each sequence in a step.

use super::costs::{StepCost, StepWork};
use super::stats::{MAX_DEPTH, SpeculationStats};

/// Every such plan gives a draft to the sequences that would get none, so that their statistics stay fresh.
const PROBE_INTERVAL: u32 = 64;

/// Largest interval, if no probe shows that drafts pay.
const MAX_PROBE_INTERVAL: u32 = 1024;

/// A sequence that may get drafts.
#[derive(Clone, Copy, Debug)]
pub struct Speculating<'a> {
    pub stats: &'a SpeculationStats,
    /// Maximum number of its drafts in this step.
    pub limit: usize,
    /// Whether a draft model makes them; drafts that are copied from the text cost nothing.
    pub has_model: bool,
    /// Number of tokens that the draft model must compute before it makes drafts, because it has missed
    /// them; 0 if they are few enough to be computed along with a draft.
    pub missing: usize,
}

/// Chooses the numbers of drafts that maximize the expected tokens per second of the whole batch.
///
/// With K_s drafts of sequence s and n rows without drafts, a step emits E = n + Σ_s Σ_(i <= K_s) S_si tokens
/// on average, where S_si is the probability that draft i is emitted ([`SpeculationStats::survival`]), and
/// takes T = step + row (n + Σ K_s) + pass max K_s + draft_row Σ K_s seconds, the last two terms for
/// sequences with a draft model only. The best rate λ = E / T is found by Dinkelbach's iteration: E - λ T is
/// maximized for the rate of the last result, until the rate no longer grows. As S_si falls with i, that
/// maximum takes the drafts whose S exceeds λ times their cost, most valuable first, for each number of
/// passes; this is exact. In a batch so full that rows cost what they give, no draft exceeds it.
#[derive(Clone, Debug)]
pub struct DepthPlanner {
    /// Drafts of the draft model and copied drafts, each most valuable first.
    drafts: [Vec<Draft>; 2],
    depths: Vec<usize>,
    limits: Vec<usize>,
    /// Number of tokens that the draft model must compute first for each sequence.
    missing: Vec<usize>,
    interval: u32,
    plans_since_probe: u32,
}

/// A possible draft.
#[derive(Clone, Copy, Debug)]
struct Draft {
    /// Probability that it is emitted.
    gain: f64,
    /// Number of the drafts of its sequence, up to this one.
    level: usize,
    sequence: usize,
}

/// A choice of drafts: the first ones of each list, of levels up to `passes` in the first.
#[derive(Clone, Copy, Debug, Default)]
struct Choice {
    passes: usize,
    counts: [usize; 2],
    /// Expected tokens that are gained.
    gain: f64,
    /// Seconds that are added.
    seconds: f64,
}

impl Default for DepthPlanner {
    fn default() -> DepthPlanner {
        DepthPlanner {
            drafts: Default::default(),
            depths: Vec::new(),
            limits: Vec::new(),
            missing: Vec::new(),
            interval: PROBE_INTERVAL,
            plans_since_probe: 0,
        }
    }
}

impl DepthPlanner {
    /// Returns the number of drafts of each sequence, in their order, at most `max_drafts` together.
    /// `rows` is the number of rows that decode without drafts, one for each of the `sequences` and those
    /// of sequences that never speculate; rows of prompts do not count. As long as no time of a step is
    /// known, every sequence gets one draft.
    pub fn plan<'a>(
        &mut self,
        sequences: impl Iterator<Item = Speculating<'a>>,
        costs: &StepCost,
        rows: usize,
        max_drafts: usize,
    ) -> &[usize] {
        let base = (rows as f64, costs.seconds(&StepWork { rows, ..StepWork::default() }));
        let rate = if base.1 > 0.0 { base.0 / base.1 } else { 0.0 };
        self.list(sequences, [costs.row + costs.draft_row, costs.row].map(|cost| rate * cost));
        self.plans_since_probe += 1;
        if base.1 <= 0.0 {
            self.probe(max_drafts);
            return &self.depths;
        }
        let choice = self.best(costs, base, max_drafts);
        for (list, drafts) in self.drafts.iter().enumerate() {
            let is_within = |draft: &&Draft| list == 1 || draft.level <= choice.passes;
            for draft in drafts.iter().filter(is_within).take(choice.counts[list]) {
                self.depths[draft.sequence] += 1;
            }
        }
        let is_off = choice.counts == [0, 0];
        if !is_off {
            self.interval = PROBE_INTERVAL;
        }
        if self.plans_since_probe >= self.interval && self.probe(max_drafts) {
            self.plans_since_probe = 0;
            self.interval = if is_off { (2 * self.interval).min(MAX_PROBE_INTERVAL) } else { self.interval };
        }
        &self.depths
    }

    /// Lists the drafts that are worth more than what such a draft of each list costs without others, in
    /// tokens. With others, a draft costs more, because the rate grows.
    fn list<'a>(&mut self, sequences: impl Iterator<Item = Speculating<'a>>, costs: [f64; 2]) {
        self.drafts.iter_mut().for_each(Vec::clear);
        self.depths.clear();
        self.limits.clear();
        self.missing.clear();
        for (sequence, speculating) in sequences.enumerate() {
            let survival = speculating.stats.survival();
            let limit = speculating.limit.min(MAX_DEPTH);
            let levels = (1..=limit).zip(survival).map(|(level, gain)| Draft { gain, level, sequence });
            let list = usize::from(!speculating.has_model);
            self.drafts[list].extend(levels.take_while(|draft| draft.gain > costs[list]));
            self.depths.push(0);
            self.limits.push(limit);
            self.missing.push(speculating.missing);
        }
        for drafts in &mut self.drafts {
            drafts.sort_unstable_by(|a, b| {
                b.gain.total_cmp(&a.gain).then((a.level, a.sequence).cmp(&(b.level, b.sequence)))
            });
        }
    }

    /// Returns the choice with the most tokens per second. `base` are the tokens and seconds without drafts.
    fn best(&self, costs: &StepCost, base: (f64, f64), max_drafts: usize) -> Choice {
        let max_passes = self.drafts[0].iter().map(|draft| draft.level).max().unwrap_or(0);
        let rate_of = |choice: &Choice| (base.0 + choice.gain) / (base.1 + choice.seconds);
        let mut best = Choice::default();
        // Each iteration finds a better choice, of which there are few; rounding must not make it endless.
        for _ in 0..50 {
            let rate = rate_of(&best);
            let surplus = |choice: &Choice| choice.gain - rate * choice.seconds;
            let choices = (0..=max_passes).map(|passes| self.choose(costs, rate, passes, max_drafts));
            let Some(better) = choices.max_by(|a, b| surplus(a).total_cmp(&surplus(b))) else { break };
            if rate_of(&better) <= rate * (1.0 + 1e-12) {
                break;
            }
            best = better;
        }
        best
    }

    /// Returns the drafts that gain more than `rate` times their cost, the most valuable ones, if the draft
    /// model runs `passes` times.
    fn choose(&self, costs: &StepCost, rate: f64, passes: usize, max_drafts: usize) -> Choice {
        let cost = [costs.row + costs.draft_row, costs.row];
        let [modelled, copied] = &self.drafts;
        let mut modelled = modelled.iter().filter(|draft| draft.level <= passes).peekable();
        let mut copied = copied.iter().peekable();
        let mut choice = Choice { passes, counts: [0, 0], gain: 0.0, seconds: costs.pass * passes as f64 };
        for _ in 0..max_drafts {
            let surplus = |draft: Option<&&Draft>, cost| draft.map_or(0.0, |draft| draft.gain - rate * cost);
            let surpluses = [surplus(modelled.peek(), cost[0]), surplus(copied.peek(), cost[1])];
            let list = usize::from(surpluses[1] > surpluses[0]);
            if surpluses[list] <= 0.0 {
                break;
            }
            let next = if list == 0 { modelled.next() } else { copied.next() };
            choice.gain += next.map_or(0.0, |draft| draft.gain);
            choice.seconds += cost[list];
            choice.counts[list] += 1;
        }
        choice
    }

    /// Gives a draft to the sequences without any, and returns whether that is a probe of one at least.
    ///
    /// Where the draft model must compute missed tokens first, the draft comes with a later plan, and the
    /// probe stays due. That is worth a probe of one sequence only: of the one that has waited longest.
    fn probe(&mut self, max_drafts: usize) -> bool {
        let mut left = max_drafts.saturating_sub(self.depths.iter().sum());
        let (mut probes, mut waiting) = (false, None);
        for (at, depth) in self.depths.iter_mut().enumerate() {
            if *depth > 0 || self.limits[at] == 0 {
                continue;
            }
            waiting = waiting.max(Some((self.missing[at], at)));
            if self.missing[at] == 0 && left > 0 {
                *depth = 1;
                left -= 1;
                probes = true;
            }
        }
        if let Some((_, at)) = waiting.filter(|_| !probes && left > 0) {
            self.depths[at] = 1;
        }
        probes || waiting.is_none()
    }
}
