//! The memory of choices of a plan.
//!
//! Invariant: bytes are counted by the functions that the start of the engine uses, with the settings that
//! the policy of a choice has.

use super::memory::{EngineMemory, contexts, reserved_beside};
use super::tiers::{PARTS, part_of, residency_of, stores_folder};
use super::{engine_setup, forecast};
use crate::config::{Config, HostTier, KvSize};
use crate::model::ModelSource;
use crate::model::offload::{Offload, OffloadReport, Residency, StorePlace, TierRules};
use crate::planner::placement::{Choice, MemoryFit, PlacementProblem, PlannedPolicy, Variant, Workload};
use crate::quantize::WeightRules;
use anyhow::Result;
use std::collections::HashMap;

/// Rows that are computed at once, if none are configured: GEMMs run at nearly their full rate with these.
const BATCH_ROWS: usize = 512;

/// The size of the KV cache by the number of sequences at once: these share it and grow, so it has room for
/// as many of mean size, and for the longest one alone.
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheSizes {
    /// Tokens of a page.
    page: usize,
    /// Pages of a sequence of mean size; 0 if the model has no cache.
    mean: usize,
    /// Pages of the longest sequence.
    longest: usize,
    /// Maximum tokens of a sequence, with its encoder input.
    limit: usize,
}

impl CacheSizes {
    /// Returns the sizes for requests of a mean size. `longest` has the maximum tokens of a prompt and of an
    /// answer; `None` is what the context has room for.
    pub(super) fn new(
        config: &Config,
        source: &ModelSource,
        workload: &Workload,
        longest: Option<[usize; 2]>,
    ) -> CacheSizes {
        let page = config.kv.page_size;
        let pages = |own: usize, input: usize| own.div_ceil(page) + input.div_ceil(page);
        let ([context, encoder], Workload { prompt, output, .. }) = (contexts(config, source), *workload);
        let [text, answer] = longest.unwrap_or([usize::MAX; 2]);
        let longest = pages(text.saturating_add(answer).min(context), text.min(encoder));
        let mean = match (&source.spec.encoder, &source.spec.decoder) {
            (_, None) => 0,
            (None, Some(_)) => pages(prompt + output, 0),
            (Some(_), Some(_)) => pages(output + 1, prompt),
        };
        CacheSizes { page, mean, longest, limit: context + encoder }
    }

    /// Returns the tokens of the cache; `None` if the model has none.
    pub(super) fn tokens(&self, slots: usize) -> Option<usize> {
        (self.mean > 0).then(|| slots.saturating_mul(self.mean).max(self.longest) * self.page)
    }

    /// Returns the tokens of the longest sequence that has room in any case.
    pub(super) fn longest(&self) -> usize {
        (self.longest.max(self.mean) * self.page).min(self.limit)
    }
}

/// Returns the configuration with a choice, apart from what stays in memory.
pub(super) fn candidate(
    config: &Config,
    choice: &Choice,
    variants: &[Variant],
    rules: &WeightRules,
    cache: &CacheSizes,
) -> Config {
    let mut config = config.clone();
    config.scheduler.slots = choice.slots;
    config.scheduler.token_budget = choice.token_budget;
    config.scheduler.is_budget_auto = false;
    config.scheduler.batch_rows = Some(batch_rows(&config));
    // The time to read and write caches is not predicted.
    config.tiers.kv = HostTier::All;
    config.kv.ty = choice.kv;
    if let Some(tokens) = cache.tokens(choice.slots) {
        config.kv.size = KvSize::Tokens(tokens);
    }
    // The built-in rules are valid.
    let rule = variants[choice.variant].weights.and_then(|rule| WeightRules::parse(rule).ok());
    config.model.weights = rule.unwrap_or_else(|| rules.clone());
    config
}

/// Returns the rows that are computed at once: the same whether weights are read or not, so that memory does
/// not depend on that.
pub(super) fn batch_rows(config: &Config) -> usize {
    config.scheduler.batch_rows.unwrap_or(BATCH_ROWS)
}

/// Returns whether the matrices of all layers are in memory.
pub fn is_resident(policy: &PlannedPolicy) -> bool {
    policy.layers[1..].iter().all(|bytes| *bytes == 0.0)
}

/// Counts the memory of choices.
pub(super) struct MemoryCounter<'a> {
    config: &'a Config,
    source: &'a mut ModelSource,
    variants: &'a [Variant],
    /// The configured rules of the formats of weights.
    rules: &'a WeightRules,
    pub(super) cache: CacheSizes,
    /// Bytes of resident matrices, of buffers and of pools of experts by variant and part of the layers'
    /// bytes, as far as they have been counted. Nothing else of a choice affects them.
    counted: HashMap<(usize, usize), f64>,
    /// The reason of the last choice that is impossible.
    pub(super) reason: Option<anyhow::Error>,
}

/// The bytes of a choice with no matrices of layers in memory.
#[derive(Clone, Copy)]
pub(super) struct LeastMemory {
    /// Everything but the matrices of layers and the buffers to read these.
    fixed: f64,
    /// Buffers, and the least pools of experts.
    buffers: f64,
    /// Matrices of layers.
    layers: f64,
}

impl LeastMemory {
    /// Returns the bytes with so many times the matrices of layers in memory.
    pub(super) fn with_layers(&self, times: f64) -> f64 {
        self.fixed + times * self.layers
    }

    /// Returns the bytes of memory that the choice needs at least.
    pub(super) fn total(&self) -> f64 {
        self.fixed + self.layers.min(self.buffers)
    }
}

impl<'a> MemoryCounter<'a> {
    pub(super) fn new(
        config: &'a Config,
        source: &'a mut ModelSource,
        variants: &'a [Variant],
        rules: &'a WeightRules,
        cache: CacheSizes,
    ) -> MemoryCounter<'a> {
        MemoryCounter { config, source, variants, rules, cache, counted: HashMap::new(), reason: None }
    }

    /// Halves the longest sequence that the cache has room for, down to the mean, until the smallest choices
    /// fit into `memory` bytes.
    pub(super) fn shorten_to(&mut self, memory: f64, problem: &PlacementProblem) {
        let size = |choice: &Choice| (choice.slots, choice.token_budget);
        let least = problem.choices.iter().map(size).min();
        let smallest: Vec<_> = problem.choices.iter().filter(|choice| Some(size(choice)) == least).collect();
        let fits = |counter: &mut Self| {
            let placed = |choice: &&Choice| problem.place(&counter.fit(choice, memory)?);
            smallest.iter().find_map(placed).is_some()
        };
        while self.cache.longest > self.cache.mean && !fits(self) {
            self.cache.longest = (self.cache.longest / 2).max(self.cache.mean);
        }
    }

    /// Returns the memory of a choice with as many matrices as fit into `memory` bytes; `None` if it does not
    /// fit, or if an engine with these sizes is impossible here.
    pub(super) fn fit(&mut self, choice: &Choice, memory: f64) -> Option<MemoryFit> {
        let LeastMemory { fixed, layers, .. } = self.least(choice)?;
        if fixed + layers <= memory {
            return Some(MemoryFit { memory: fixed + layers, resident: layers, streamed: 0.0 });
        }
        let free = memory - fixed;
        if free < 0.0 {
            return None;
        }
        // Buffers may take more with more in memory, or less, so nothing but trying finds the most. With more
        // than what is free, only matrices that are smaller than blocks of the disk fit.
        let most = (free / layers * PARTS as f64).min(PARTS as f64 - 1.0) as usize;
        (0..=most).rev().chain(most + 1..PARTS).find_map(|part| {
            let used = self.layers(choice, layers as usize, part);
            let resident = part_of(layers as usize, part) as f64;
            let fit = MemoryFit { memory: fixed + used, resident, streamed: layers - resident };
            (used <= free).then_some(fit)
        })
    }

    /// Returns the memory of a choice without matrices of layers; `None` if an engine with these sizes is
    /// impossible here.
    pub(super) fn least(&mut self, choice: &Choice) -> Option<LeastMemory> {
        match self.count(choice, Residency(0.0)) {
            Ok((memory, layers)) => {
                let buffers = (layers.buffer_bytes + layers.pool_bytes) as f64;
                let fixed = memory - buffers - layers.resident_bytes as f64;
                let layers = (layers.offloaded_bytes() + layers.resident_bytes) as f64;
                Some(LeastMemory { fixed, buffers, layers })
            }
            Err(reason) => {
                self.reason = Some(reason);
                None
            }
        }
    }

    /// Returns the bytes of matrices that stay, of buffers, and of pools of experts, if `part` of [`PARTS`]
    /// parts of `all` bytes may stay; infinite if an engine with these sizes is impossible here.
    fn layers(&mut self, choice: &Choice, all: usize, part: usize) -> f64 {
        if let Some(known) = self.counted.get(&(choice.variant, part)) {
            return *known;
        }
        match self.count(choice, residency_of(part_of(all, part), all)) {
            Ok((_, layers)) => {
                let used = (layers.resident_bytes + layers.buffer_bytes + layers.pool_bytes) as f64;
                self.counted.insert((choice.variant, part), used);
                used
            }
            Err(reason) => {
                self.reason = Some(reason);
                f64::INFINITY
            }
        }
    }

    /// Counts the bytes of a choice, and those of its layers.
    fn count(&mut self, choice: &Choice, resident: Residency) -> Result<(f64, OffloadReport)> {
        let config = candidate(self.config, choice, self.variants, self.rules, &self.cache);
        let (place, overlaps) = (StorePlace(stores_folder(&config.tiers)?), config.tiers.overlap);
        self.source.weight_rules = config.model.weights.clone();
        let tiers = TierRules::default();
        self.source.offload = Some(Offload { resident, tiers, place, overlaps, max_slab: Offload::MAX_SLAB });
        let setup = engine_setup(&config, self.source)?;
        let devices: Vec<_> = forecast(&config.device, self.source, &setup)?.into_iter().flatten().collect();
        let mut layers = OffloadReport::default();
        devices.iter().filter_map(|device| device.offload.clone()).for_each(|report| layers.add(report));
        // What is reserved apart from sequences does not depend on the choice.
        let (reserved, beside) = reserved_beside(&config, &setup);
        let bytes = EngineMemory::from_reports(devices, &setup).total().saturating_add(beside - reserved);
        Ok((bytes as f64, layers))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tiers::place_tiers;
    use super::*;
    use crate::config::Overrides;
    use crate::model::ModelRef;
    use crate::planner::placement::ModelCost;
    use mainstem_kernels::QuantType;
    use mainstem_kernels::random::philox;
    use std::path::Path;

    fn config(settings: &[(&'static str, &str)]) -> Config {
        let mut flags = Overrides::default();
        for (key, value) in settings {
            match value.parse::<u32>() {
                Ok(number) => flags.set(key, Some(number)),
                Err(_) => flags.set(key, Some(*value)),
            }
        }
        flags.set("tiers.disk_path", Some("/nowhere"));
        Config::load(None, flags).unwrap()
    }

    fn fixture(name: &str) -> ModelSource {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        ModelSource::open(&ModelRef::Path(folder.join(name)), None).unwrap()
    }

    fn variants(source: &ModelSource) -> [Variant; 1] {
        let cost = ModelCost::from_spec(&source.spec, &|piece| source.load_type(piece));
        [Variant { weights: None, cost }]
    }

    fn synthetic(shape: &str) -> ModelSource {
        ModelSource::open(&ModelRef::parse(&format!("synthetic:{shape}")).unwrap(), None).unwrap()
    }

    const CACHE: CacheSizes = CacheSizes { page: 32, mean: 2, longest: 3, limit: 96 };

    /// Returns the bytes that the start of a policy counts.
    fn started(config: &Config, source: &mut ModelSource, choice: &Choice, fit: &MemoryFit) -> f64 {
        let variants = variants(source);
        let mut config = candidate(config, choice, &variants, &WeightRules::default(), &CACHE);
        config.tiers.host = match fit.streamed > 0.0 {
            true => HostTier::Bytes(fit.resident as u64),
            false => HostTier::All,
        };
        source.offload = None;
        place_tiers(&config, source).unwrap();
        let setup = engine_setup(&config, source).unwrap();
        EngineMemory::predict(&config.device, source, &setup).unwrap().total() as f64
    }

    /// Regression: buffers were counted with nothing in memory only, so a policy took more than was counted,
    /// and was dropped without another in its place.
    #[test]
    fn whatever_fits_is_found_and_takes_at_the_start_what_was_counted() {
        let config = config(&[("device.threads", "1")]);
        let mut random = 0;
        let models: [(&dyn Fn() -> ModelSource, usize); 3] = [
            (&|| synthetic("1.1B"), 16),
            (&|| fixture("gqa"), PARTS),
            (&|| fixture("families/mixtral"), PARTS),
        ];
        for (open, pieces) in models {
            let (mut source, mut copy, rules) = (open(), open(), WeightRules::default());
            let variants = variants(&source);
            let mut counter = MemoryCounter::new(&config, &mut source, &variants, &rules, CACHE);
            let choice = Choice { variant: 0, kv: QuantType::F16, slots: 3, token_budget: 256 };
            let least = counter.least(&choice).unwrap();
            let LeastMemory { fixed, layers, .. } = least;
            let used = |counter: &mut MemoryCounter, piece: usize| {
                fixed + counter.layers(&choice, layers as usize, piece * PARTS / pieces)
            };
            let all: Vec<f64> = (0..pieces).map(|piece| used(&mut counter, piece)).collect();
            for _ in 0..12 {
                random += 1;
                let share = f64::from(philox([random, 0, 0, 0], [9, 0])[0]) / 2f64.powi(32);
                let memory = fixed + share * 1.1 * layers;
                let fit = counter.fit(&choice, memory);
                let least = all.iter().copied().fold(fixed + layers, f64::min);
                assert_eq!(fit.is_some(), least <= memory, "{share}: {least}, {memory}");
                let Some(fit) = fit else { continue };
                assert_eq!(started(&config, &mut copy, &choice, &fit), fit.memory, "{share}: {fit:?}");
                assert!(fit.memory <= memory, "{share}: {fit:?}, {memory}");
                let unused = (memory - fit.memory) / layers;
                // Layers of the fixture have few matrices.
                let is_close = fit.streamed == 0.0 || unused < 0.1 || pieces == PARTS;
                assert!(is_close, "{share}: {fit:?}, {memory}");
            }
        }
    }

    #[test]
    fn a_cache_has_room_for_the_mean_and_for_the_longest_request() {
        let (of, workload) = (CacheSizes::new, Workload { requests: 9, prompt: 50, output: 10 });
        let decoder = synthetic("110M");
        let context = decoder.spec.context;
        let tokens = |settings: &[(&'static str, &str)], source: &ModelSource, longest| {
            let sizes = of(&config(settings), source, &workload, longest);
            [1, 100].map(|slots| sizes.tokens(slots))
        };
        assert_eq!(tokens(&[], &decoder, None), [Some(context), Some(6400.max(context))]);
        assert_eq!(tokens(&[("kv.max_context", "100")], &decoder, None), [Some(128), Some(6400)]);
        assert_eq!(tokens(&[], &decoder, Some([200, 20])), [Some(224), Some(6400)]);
        assert_eq!(tokens(&[], &decoder, Some([9, usize::MAX])), [Some(context), Some(6400.max(context))]);
        assert_eq!(tokens(&[], &decoder, Some([0, 0])), [Some(64), Some(6400)]);
        let mut sizes = of(&config(&[]), &decoder, &workload, Some([200, 20]));
        assert_eq!(sizes.longest(), 224);
        sizes.longest = 3;
        assert_eq!(sizes.longest(), 96);
    }
}
