//! The sizes of the KV caches of a plan's choices.
//!
//! Invariant: a cache has room for the longest sequence.

use super::memory::contexts;
use crate::config::Config;
use crate::model::ModelSource;
use crate::planner::placement::Workload;

/// The size of the KV cache by the number of sequences at once: these share it and grow, so it has room for
/// as many of mean size, and for the longest one alone.
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheSizes {
    /// Tokens of a page.
    pub(super) page: usize,
    /// Pages of a sequence of mean size; 0 if the model has no cache.
    pub(super) mean: usize,
    /// Pages of the longest sequence.
    pub(super) longest: usize,
    /// Maximum tokens of a sequence, with its encoder input.
    pub(super) limit: usize,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Overrides;
    use crate::model::ModelRef;

    fn config(settings: &[(&'static str, &str)]) -> Config {
        let mut flags = Overrides::default();
        settings.iter().for_each(|(key, value)| match value.parse::<u32>() {
            Ok(number) => flags.set(key, Some(number)),
            Err(_) => flags.set(key, Some(*value)),
        });
        Config::load(None, flags).unwrap()
    }

    #[test]
    fn a_cache_has_room_for_the_mean_and_for_the_longest_request() {
        let (of, workload) = (CacheSizes::new, Workload { requests: 9, prompt: 50, output: 10 });
        let decoder = ModelSource::open(&ModelRef::parse("synthetic:110M").unwrap(), None).unwrap();
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
