//! Compilation of the grammars of constrained requests, and the vocabulary that they are compiled for.
//!
//! Invariant: no event loop waits for the vocabulary or for a compilation, and a request whose grammar is
//! cached does not wait for the compilation of others.

use super::error::ApiError;
use super::params::ConstraintParams;
use super::{BoundedSemaphore, ServeParts};
use crate::config::GrammarConfig;
use crate::decoding::Constraint;
use crate::request::RequestError;
use crate::telemetry;
use crate::text::Tokenizer;
use crate::text::grammar_vocabulary::grammar_vocabulary;
use actix_web::web;
use mainstem_grammar::{Grammar, GrammarCache, GrammarError, Limits};
use std::sync::Arc;
use std::thread;
use tokio::sync::watch;

/// Maximum number of requests that wait for their grammars to be compiled, which usually takes milliseconds.
const WAITERS_MAX: usize = 128;

/// The grammars of a server.
pub struct Grammars {
    /// The cache, or why this model has no constrained output; `None` while the vocabulary is being built.
    cache: watch::Receiver<Option<Result<Arc<GrammarCache>, String>>>,
    /// Limits how many grammars are compiled at once.
    compiling: BoundedSemaphore,
}

impl Grammars {
    /// Begins to build the vocabulary of a model on a thread of its own, which takes half a second for large
    /// vocabularies. Models that generate no text have none.
    pub fn new(parts: &ServeParts, config: &GrammarConfig) -> Grammars {
        let (sender, cache) = watch::channel(None);
        let busy = |limit| RequestError::TooManyGrammars { limit };
        let compiling = BoundedSemaphore::new(config.threads, busy).with_waiters(WAITERS_MAX);
        if parts.model.has_head && !parts.model.endpoints.is_empty() {
            let (tokenizer, size) = (parts.tokenizer.clone(), parts.model.vocab);
            let (eos, config, on_thread) = (parts.model.eos.clone(), config.clone(), sender.clone());
            let build = move || on_thread.send_replace(Some(build_cache(&tokenizer, size, &eos, &config)));
            let builder = thread::Builder::new().name("vocabulary".to_owned());
            if let Err(error) = builder.spawn(build) {
                sender.send_replace(Some(Err(format!("its vocabulary could not be built: {error}"))));
            }
        }
        Grammars { cache, compiling }
    }

    /// Returns the constraint that a request asks for. Waits for the vocabulary and, unless the grammar is
    /// cached, for its compilation on a thread of the blocking pool. The error of a refused specification
    /// names its part.
    pub async fn constraint(&self, params: &ConstraintParams) -> Result<Arc<Constraint>, ApiError> {
        telemetry::CONSTRAINED_REQUESTS.count([params.kind]);
        let cache = self.cache(&params.param).await?;
        let grammar = match cache.cached(&params.spec) {
            Some(compiled) => compiled,
            None => self.compile(cache, params).await?,
        };
        let grammar = grammar.map_err(|error| refusal(&params.param, &error))?;
        Ok(Arc::new(Constraint { grammar, start: params.start.clone() }))
    }

    /// Waits for the vocabulary.
    async fn cache(&self, param: &str) -> Result<Arc<GrammarCache>, ApiError> {
        let mut cache = self.cache.clone();
        let built = cache.wait_for(Option::is_some).await;
        match built.ok().as_deref() {
            Some(Some(Ok(cache))) => Ok(cache.clone()),
            Some(Some(Err(why))) => {
                Err(ApiError::unsupported(param, format!("'{param}' is not supported by this model: {why}")))
            }
            Some(None) | None => Err(ApiError::internal("building the vocabulary of grammars failed")),
        }
    }

    async fn compile(
        &self,
        cache: Arc<GrammarCache>,
        params: &ConstraintParams,
    ) -> Result<Result<Arc<Grammar>, GrammarError>, ApiError> {
        let permit = self.compiling.acquire().await?;
        // Another request may have had the same one compiled meanwhile.
        if let Some(compiled) = cache.cached(&params.spec) {
            return Ok(compiled);
        }
        let spec = params.spec.clone();
        let compile = move || {
            let _permit = permit;
            let (compiled, time) = cache.get_timed(spec);
            if let Some(time) = time {
                telemetry::GRAMMAR_COMPILE.record(time.as_secs_f64());
            }
            compiled
        };
        let failed = |error| ApiError::internal(format!("compiling the grammar failed: {error}"));
        web::block(compile).await.map_err(failed)
    }
}

/// Builds the vocabulary and an empty cache. The error says why the model has no constrained output.
fn build_cache(
    tokenizer: &Arc<Tokenizer>,
    size: usize,
    eos: &[u32],
    config: &GrammarConfig,
) -> Result<Arc<GrammarCache>, String> {
    let vocabulary = grammar_vocabulary(tokenizer, size, eos).map_err(|error| format!("{error:#}"))?;
    if vocabulary.eos().is_empty() {
        return Err("it has no end token".to_owned());
    }
    let limits = Limits { text_bytes: config.text_bytes, ..Limits::default() };
    let cache = GrammarCache::new(Arc::new(vocabulary), limits, config.cache_entries, config.cache_bytes);
    Ok(Arc::new(cache))
}

/// Returns the error of a specification that is refused: the path of the parameter, the part, the reason.
fn refusal(param: &str, error: &GrammarError) -> ApiError {
    match error {
        // The parameter is the part.
        GrammarError::Refused { part, reason }
            if ["regex", "choice", "grammar", "calls"].contains(&&**part) =>
        {
            ApiError::invalid(param, format!("{param}: {reason}"))
        }
        // The part is a path of its own: that of a tool's parameters.
        GrammarError::Refused { part, .. } if part.starts_with("tools[") => {
            ApiError::invalid("tools", error.to_string())
        }
        error => ApiError::invalid(param, format!("{param}: {error}")),
    }
}
