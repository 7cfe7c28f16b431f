//! Request validation at intake.
//!
//! Invariant: a request that passes can be computed: the model supports its task, all its token ids are in
//! the vocabulary, and it fits into the context and the KV cache.

use crate::memory::WindowCache;
use crate::model::spec::Kind;
use crate::request::{self, Pooling, Request, RequestError, Task};

/// Maximum number of beams of a search.
pub const BEAMS_MAX: usize = 64;

/// Maximum number of most likely tokens that the results of a beam's row have: one for each beam and for each
/// token that ends a sequence.
pub const BEAM_CANDIDATES: usize = 128;

/// The bounds that every request is checked against.
#[derive(Clone, Debug)]
pub struct IntakeLimits {
    /// Maximum number of running sequences.
    pub slots: usize,
    /// Maximum number of beams of a search: the slots of the smallest lane.
    pub max_beams: usize,
    /// Maximum number of queued sequences.
    pub max_waiting: usize,
    /// Maximum positions of a sequence, prompt and generated tokens.
    pub context: usize,
    /// Maximum tokens of the encoder input; 0 without an encoder.
    pub encoder_context: usize,
    pub vocab: usize,
    /// Size of the vocabulary of the encoder input.
    pub source_vocab: usize,
    /// Number of the model's end-of-sequence tokens.
    pub eos: usize,
    /// Maximum number of most likely tokens reported per token.
    pub top_logprobs: usize,
    /// KV pages that can be leased, without the null page.
    pub pages: usize,
    /// The pages of windowed layers, if these have pages of their own.
    pub window: Option<WindowCache>,
    pub page_positions: usize,
    pub kind: Kind,
    /// Whether the model has an output head, and so computes logits.
    pub has_head: bool,
    /// Whether steps may return hidden states.
    pub returns_hidden: bool,
    /// Endpoints that serve the model's tasks, for error messages.
    pub endpoints: Vec<&'static str>,
}

impl IntakeLimits {
    /// Checks a request; returns the first error.
    pub fn check(&self, request: &Request) -> Result<(), RequestError> {
        self.check_task(&request.task)?;
        self.check_encoder_input(request)?;
        match &request.task {
            Task::Generate => self.check_generation(request),
            Task::Embed(_) if self.kind == Kind::Decoder => {
                self.check_prompt(request)?;
                self.check_capacity(request)
            }
            Task::Embed(_) | Task::EmbedTokens => check_encoder_only(request),
            Task::FillMask { positions, top_k } => {
                check_encoder_only(request)?;
                self.check_fill_positions(positions, *top_k, request.encoder_input.len())
            }
        }
    }

    /// Checks that the model supports the task.
    fn check_task(&self, task: &Task) -> Result<(), RequestError> {
        let is_encoder = self.kind == Kind::Encoder;
        let why = match task {
            Task::Generate if is_encoder => "is an encoder-only model and cannot generate",
            Task::Embed(Pooling::Last | Pooling::Mean)
                if self.kind == Kind::Decoder && self.returns_hidden =>
            {
                return Ok(());
            }
            Task::Embed(_) | Task::EmbedTokens if !is_encoder => {
                "is a generative model and computes no embeddings"
            }
            Task::Generate if !self.has_head => "has no output head and cannot generate",
            Task::FillMask { .. } if !is_encoder => "is a generative model and fills no masks",
            Task::FillMask { .. } if !self.has_head => "has no output head to fill a mask with",
            _ => return Ok(()),
        };
        let endpoints = self.endpoints.join(" and ");
        Err(invalid("model", format!("the model {why}; it serves {endpoints}")))
    }

    /// Checks the encoder input.
    fn check_encoder_input(&self, request: &Request) -> Result<(), RequestError> {
        let (param, what) = match request.task {
            Task::Generate => ("prompt", "encoder input"),
            Task::Embed(_) | Task::EmbedTokens | Task::FillMask { .. } => ("input", "input"),
        };
        let (tokens, limit) = (request.encoder_input.len(), self.encoder_context);
        if self.kind == Kind::Decoder {
            let message = || invalid(param, "the model has no encoder and takes no encoder input".to_owned());
            return if tokens == 0 { Ok(()) } else { Err(message()) };
        }
        if tokens == 0 {
            return Err(invalid(param, format!("the {what} has no tokens")));
        }
        if tokens > limit {
            let message = format!("the {what} has {tokens} tokens, more than the model's limit of {limit}");
            return Err(invalid(param, message));
        }
        check_ids(param, &request.encoder_input, self.source_vocab)
    }

    /// Checks a request that generates tokens.
    fn check_generation(&self, request: &Request) -> Result<(), RequestError> {
        request::validate(&request.sampling).map_err(|(param, message)| invalid(param, message))?;
        self.check_prompt(request)?;
        self.check_stop_tokens_and_biases(request)?;
        for (param, top) in [("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)] {
            if top.is_some_and(|n| usize::from(n) > self.top_logprobs) {
                return Err(invalid(param, format!("{param} can be at most {}", self.top_logprobs)));
            }
        }
        self.check_beams(request)?;
        self.check_capacity(request)
    }

    /// Checks the tokens of a prompt.
    fn check_prompt(&self, request: &Request) -> Result<(), RequestError> {
        if request.prompt.is_empty() {
            let prompt = self.prompt_param();
            return Err(invalid(prompt, format!("the {prompt} has no tokens")));
        }
        check_ids(self.prompt_param(), &request.prompt, self.vocab)
    }

    /// Checks that the beams of a search fit into the slots and the results of a row.
    fn check_beams(&self, request: &Request) -> Result<(), RequestError> {
        let Some(beams) = request.beams else { return Ok(()) };
        let most = self.max_beams.min(BEAMS_MAX);
        if beams.width > most {
            let message = format!(
                "beam_width is {} but must be at most {most}: each beam takes a slot of the same lane \
                 (scheduler.slots, scheduler.lanes), and {BEAMS_MAX} are the most",
                beams.width
            );
            return Err(invalid("beam_width", message));
        }
        let ends = request.stop_ids.len() + self.eos;
        match beams.width + ends <= BEAM_CANDIDATES {
            true => Ok(()),
            false => {
                let most = BEAM_CANDIDATES.saturating_sub(beams.width + self.eos);
                let message = format!("a beam search can have at most {most} stop tokens here");
                Err(invalid("stop_token_ids", message))
            }
        }
    }

    /// The name of the parameter that holds the decoder's prompt; of an encoder-decoder model, `prompt` is
    /// the encoder input.
    fn prompt_param(&self) -> &'static str {
        match self.kind {
            Kind::EncoderDecoder => "decoder_prompt",
            Kind::Decoder | Kind::Encoder => "prompt",
        }
    }

    /// Checks that prompt and generated tokens fit into the context, and that these and the encoder input fit
    /// into the pages.
    fn check_capacity(&self, request: &Request) -> Result<(), RequestError> {
        let (prompt_tokens, max_tokens) = (request.prompt.len(), request.max_tokens as usize);
        let prompt = self.prompt_param();
        let beams = request.beams.map_or(1, |beams| beams.width);
        let what = match (self.kind, beams) {
            (Kind::EncoderDecoder, 1) => "prompt (the encoder input), decoder_prompt and max_tokens",
            (Kind::EncoderDecoder, _) => {
                "beam_width, prompt (the encoder input), decoder_prompt and max_tokens"
            }
            (Kind::Decoder | Kind::Encoder, 1) => "prompt and max_tokens",
            (Kind::Decoder | Kind::Encoder, _) => "beam_width, prompt and max_tokens",
        };
        if prompt_tokens >= self.context && max_tokens > 0 {
            return Err(RequestError::PromptTooLong { prompt, prompt_tokens, context: self.context });
        }
        if prompt_tokens + max_tokens > self.context {
            return Err(RequestError::TooLong { prompt, prompt_tokens, max_tokens, context: self.context });
        }
        let pages_with = |beams: usize, answer: usize| {
            let pages_for = |positions: usize| positions.div_ceil(self.page_positions);
            // Beams share the full pages of their prompt.
            let shared = if beams > 1 { prompt_tokens / self.page_positions } else { 0 };
            let own = pages_for(prompt_tokens + answer) - shared;
            shared + beams * own + pages_for(request.encoder_input.len())
        };
        let shortage = |beams: usize, answer: usize| self.shortage(pages_with(beams, answer), beams);
        let Some((needed, pages)) = shortage(beams, max_tokens) else { return Ok(()) };
        let fits = |beams, answer| shortage(beams, answer).is_none();
        let shortest = max_tokens.min(1);
        // A client that gives no max_tokens has the rest of the context.
        let param = match () {
            () if beams > 1 && fits(1, max_tokens) => "beam_width",
            () if fits(beams, shortest) => "max_tokens",
            () if beams > 1 && fits(1, shortest) => "beam_width",
            () if request.encoder_input.len() >= prompt_tokens => "prompt",
            () => prompt,
        };
        Err(RequestError::TooLarge { param, what, needed, pages })
    }

    /// Returns how many pages a request needs and how many there are, in layers where these are too few;
    /// `None` if the request fits. It needs `needed` pages in layers that see whole sequences, and no more
    /// than that in windowed ones.
    fn shortage(&self, needed: usize, beams: usize) -> Option<(usize, usize)> {
        if needed > self.pages {
            return Some((needed, self.pages));
        }
        let WindowCache { pages, step_pages, .. } = self.window?;
        // One sequence alone may begin with shared pages, and holds these beside its own.
        let in_windows = needed.min(beams.max(2) * step_pages);
        (in_windows > pages - 1).then_some((in_windows, pages - 1))
    }

    /// Checks `min_tokens`, stop tokens and logit biases.
    fn check_stop_tokens_and_biases(&self, request: &Request) -> Result<(), RequestError> {
        let Request { max_tokens, min_tokens, stop_ids, logit_bias, .. } = request;
        let vocab = self.vocab;
        if min_tokens > max_tokens {
            let message = format!("min_tokens is {min_tokens} but max_tokens is {max_tokens}");
            return Err(invalid("min_tokens", message));
        }
        if let Some(id) = stop_ids.iter().find(|id| **id as usize >= vocab) {
            let message = format!("stop token id {id} is not in the vocabulary of {vocab} tokens");
            return Err(invalid("stop_token_ids", message));
        }
        // The biases, too, are at most as many, because each token has one.
        if stop_ids.len() > vocab {
            let message = format!("at most {vocab} stop tokens are possible, not {}", stop_ids.len());
            return Err(invalid("stop_token_ids", message));
        }
        check_biases(logit_bias, vocab).map_err(|message| invalid("logit_bias", message))
    }

    /// Checks the positions to fill, in an input of `tokens` tokens, and the number of tokens to return for
    /// each.
    fn check_fill_positions(&self, at: &[u32], top: u8, tokens: usize) -> Result<(), RequestError> {
        let Some(last) = at.last() else {
            return Err(invalid("input", "the input has no mask to fill".to_owned()));
        };
        if !at.is_sorted_by(|a, b| a < b) {
            return Err(invalid("input", "the positions to fill must ascend".to_owned()));
        }
        if *last as usize >= tokens {
            let message = format!("the position {last} to fill is beyond the input of {tokens} tokens");
            return Err(invalid("input", message));
        }
        match (1..=self.top_logprobs).contains(&usize::from(top)) {
            true => Ok(()),
            false => {
                let message = format!("top_k is {top} but must be from 1 to {}", self.top_logprobs);
                Err(invalid("top_k", message))
            }
        }
    }
}

/// Checks that a request to an encoder-only model has no decoder prompt.
fn check_encoder_only(request: &Request) -> Result<(), RequestError> {
    match request.prompt.is_empty() {
        true => Ok(()),
        false => Err(invalid("prompt", "an encoder-only model takes no prompt beside its input".to_owned())),
    }
}

/// Checks that all ids are in a vocabulary.
fn check_ids(param: &'static str, ids: &[u32], vocab: usize) -> Result<(), RequestError> {
    match ids.iter().find(|id| **id as usize >= vocab) {
        Some(id) => {
            let message = format!("token id {id} is not in the vocabulary of {vocab} tokens");
            Err(invalid(param, message))
        }
        None => Ok(()),
    }
}

/// Checks a request's own logit biases.
fn check_biases(biases: &[(u32, f32)], vocab: usize) -> Result<(), String> {
    if let Some((id, _)) = biases.iter().find(|(id, _)| *id as usize >= vocab) {
        return Err(format!(
            "logit_bias names token id {id}, which is not in the vocabulary of {vocab} tokens"
        ));
    }
    if let Some((id, _)) = biases.iter().find(|(_, bias)| bias.is_nan()) {
        return Err(format!("logit_bias of token id {id} is not a number"));
    }
    let mut ids: Vec<u32> = biases.iter().map(|(id, _)| *id).collect();
    ids.sort_unstable();
    match ids.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(format!("logit_bias names token id {} twice", pair[0])),
        None => Ok(()),
    }
}

/// Returns an error about an invalid parameter.
pub(super) fn invalid(param: &'static str, message: String) -> RequestError {
    RequestError::Invalid { param, message }
}

#[cfg(test)]
mod tests {
    use super::super::testing::request;
    use super::*;
    use crate::decoding::EarlyStopping;
    use crate::request::BeamOptions;

    fn limits(kind: Kind) -> IntakeLimits {
        IntakeLimits {
            slots: 1,
            max_beams: 1,
            max_waiting: 0,
            context: 64,
            encoder_context: if kind == Kind::Decoder { 0 } else { 40 },
            vocab: 10,
            source_vocab: 10,
            eos: 1,
            top_logprobs: 5,
            pages: if kind == Kind::Encoder { 0 } else { 3 },
            window: None,
            page_positions: 32,
            kind,
            has_head: true,
            returns_hidden: kind == Kind::Encoder,
            endpoints: vec!["/v1/here", "/v1/there"],
        }
    }

    fn translate(encoder_len: usize, prompt: usize, max_tokens: u32) -> Request {
        Request { encoder_input: vec![3; encoder_len].into(), ..request(prompt, max_tokens) }
    }

    fn search(width: usize, prompt: usize, max_tokens: u32) -> Request {
        let early_stopping = EarlyStopping::Estimate;
        let (forced_tokens, answer) = (0, 0);
        let beams = BeamOptions { width, length_penalty: 1.0, early_stopping, forced_tokens, answer };
        Request { beams: Some(beams), ..request(prompt, max_tokens) }
    }

    fn embed(encoder_input: &[u32]) -> Request {
        let task = Task::Embed(Pooling::Mean);
        Request {
            task,
            encoder_input: encoder_input.into(),
            prompt: [].into(),
            max_tokens: 0,
            ..request(0, 0)
        }
    }

    fn fill(encoder_input: &[u32], at: &[u32], top: u8) -> Request {
        Request { task: Task::FillMask { positions: at.into(), top_k: top }, ..embed(encoder_input) }
    }

    /// Asserts that the request is refused because of the parameter `param`, in a message with all of
    /// `words`.
    fn refuses(limits: &IntakeLimits, request: &Request, param: &str, words: &[&str]) {
        match limits.check(request) {
            Err(RequestError::Invalid { param: named, message }) => {
                assert_eq!(named, param, "{message}");
                assert!(words.iter().all(|word| message.contains(word)), "{message}");
            }
            other => panic!("{request:?}: {other:?}"),
        }
    }

    #[test]
    fn each_kind_supports_its_own_tasks_and_errors_name_them() {
        use Kind::{Decoder, Encoder, EncoderDecoder};
        let served = ["/v1/here and /v1/there"];
        let tasks = [
            (request(4, 4), [true, false, false]),
            (translate(4, 4, 4), [false, false, true]),
            (embed(&[1, 2]), [false, true, false]),
            (fill(&[1, 2], &[1], 5), [false, true, false]),
        ];
        for (request, takes) in &tasks {
            for (kind, takes) in [Decoder, Encoder, EncoderDecoder].into_iter().zip(takes) {
                assert_eq!(limits(kind).check(request).is_ok(), *takes, "{kind:?}: {request:?}");
            }
        }
        refuses(&limits(Encoder), &tasks[0].0, "model", &served);
        for kind in [Decoder, EncoderDecoder] {
            refuses(&limits(kind), &tasks[2].0, "model", &served);
            refuses(&limits(kind), &tasks[3].0, "model", &served);
        }
        let headless = IntakeLimits { has_head: false, ..limits(Encoder) };
        refuses(&headless, &tasks[3].0, "model", &served);
        assert_eq!(headless.check(&tasks[2].0), Ok(()));
    }

    #[test]
    fn encoder_input_needs_an_encoder_and_is_limited() {
        let (decoder, both, encoder) =
            (limits(Kind::Decoder), limits(Kind::EncoderDecoder), limits(Kind::Encoder));
        refuses(&decoder, &translate(1, 4, 4), "prompt", &["no encoder input"]);
        refuses(&both, &request(4, 4), "prompt", &["no tokens"]);
        refuses(&encoder, &embed(&[]), "input", &["no tokens"]);
        assert_eq!(both.check(&translate(40, 4, 4)), Ok(()));
        refuses(&both, &translate(41, 4, 4), "prompt", &["41", "40"]);
        assert_eq!(encoder.check(&embed(&[9; 40])), Ok(()));
        refuses(&encoder, &embed(&[9; 41]), "input", &["41", "40"]);
        refuses(&encoder, &embed(&[1, 10]), "input", &["10"]);
        let stranger = Request { encoder_input: [12].into(), ..translate(1, 4, 4) };
        refuses(&both, &stranger, "prompt", &["12"]);
        refuses(&encoder, &Request { prompt: [1].into(), ..embed(&[1]) }, "prompt", &["no prompt"]);
    }

    #[test]
    fn prompt_and_answer_share_the_context_and_the_encoder_input_has_its_own_pages() {
        let both = limits(Kind::EncoderDecoder);
        assert_eq!(
            both.check(&translate(32, 60, 4)),
            Ok(()),
            "the encoder input does not count towards the context"
        );
        let prompt = "decoder_prompt";
        let too_long = RequestError::TooLong { prompt, prompt_tokens: 60, max_tokens: 5, context: 64 };
        assert_eq!(both.check(&translate(1, 60, 5)), Err(too_long));
        let alone = RequestError::PromptTooLong { prompt, prompt_tokens: 64, context: 64 };
        assert_eq!(both.check(&translate(1, 64, 5)), Err(alone));
        let too_large = both.check(&translate(33, 60, 4)).unwrap_err();
        assert!(matches!(too_large, RequestError::TooLarge { needed: 4, pages: 3, .. }), "{too_large:?}");
        assert!(too_large.to_string().contains("encoder input"), "{too_large}");
        // Reducing the named parameter helps.
        let narrow = IntakeLimits { pages: 1, ..both.clone() };
        for (encoder_len, prompt, max_tokens, named) in [
            (33, 2, 1, "prompt"),
            (2, 33, 1, "decoder_prompt"),
            (2, 2, 1, "prompt"),
            (2, 33, 0, "decoder_prompt"),
        ] {
            let too_large = narrow.check(&translate(encoder_len, prompt, max_tokens)).unwrap_err();
            assert!(
                matches!(too_large, RequestError::TooLarge { param, .. } if param == named),
                "{too_large:?}"
            );
        }
        let roomy = both.check(&translate(33, 2, 62)).unwrap_err();
        assert!(matches!(roomy, RequestError::TooLarge { param: "max_tokens", .. }), "{roomy:?}");
        assert_eq!(both.check(&translate(33, 28, 4)), Ok(()));
        refuses(&both, &translate(4, 0, 4), "decoder_prompt", &["no tokens"]);
    }

    /// Windowed layers may have fewer pages than the beams of a search need.
    #[test]
    fn beams_fit_into_the_pages_of_windowed_layers() {
        let window = Some(WindowCache { pages: 9, window: 8, step_pages: 2 });
        let limits = IntakeLimits {
            window,
            pages: 99,
            slots: 8,
            max_beams: 8,
            context: 1024,
            ..limits(Kind::Decoder)
        };
        for (width, max_tokens) in [(4, 700), (7, 32), (1, 992)] {
            assert_eq!(limits.check(&search(width, 32, max_tokens)), Ok(()), "{width} beams");
        }
        let refused = limits.check(&search(5, 32, 64)).unwrap_err();
        assert!(matches!(refused, RequestError::TooLarge { needed: 10, pages: 8, .. }), "{refused:?}");
        assert_eq!(limits.check(&request(32, 992)), Ok(()));
    }

    /// Reducing the named parameter helps; of a search, also one whose client gave no `max_tokens`.
    #[test]
    fn a_search_beyond_the_pages_names_its_width() {
        let limits = IntakeLimits { max_beams: 8, pages: 4, ..limits(Kind::Decoder) };
        for (width, prompt, max_tokens, named) in
            [(8, 5, 1, Some("beam_width")), (4, 5, 1, None), (3, 5, 59, Some("beam_width")), (2, 5, 59, None)]
        {
            let refused = limits.check(&search(width, prompt, max_tokens)).err();
            assert_eq!(refused.is_some(), named.is_some(), "{refused:?}");
            let Some(error) = refused else { continue };
            assert!(
                matches!(error, RequestError::TooLarge { param, .. } if Some(param) == named),
                "{error:?}"
            );
            assert!(error.to_string().starts_with("beam_width, prompt and max_tokens need"), "{error}");
        }
        let narrow = IntakeLimits { pages: 1, ..limits };
        for (width, prompt, max_tokens, named) in
            [(2, 5, 59, "beam_width"), (1, 5, 59, "max_tokens"), (2, 33, 1, "prompt")]
        {
            let error = narrow.check(&search(width, prompt, max_tokens)).unwrap_err();
            assert!(matches!(error, RequestError::TooLarge { param, .. } if param == named), "{error:?}");
        }
    }

    #[test]
    fn fill_positions_are_within_the_input() {
        let encoder = limits(Kind::Encoder);
        assert_eq!(encoder.check(&fill(&[1, 2, 3], &[0, 2], 1)), Ok(()));
        for (at, words) in [(&[][..], "no mask"), (&[1, 1], "ascend"), (&[2, 1], "ascend"), (&[0, 3], "3")] {
            refuses(&encoder, &fill(&[1, 2, 3], at, 5), "input", &[words]);
        }
        for top in [0, 6] {
            refuses(&encoder, &fill(&[1], &[0], top), "top_k", &["from 1 to 5"]);
        }
    }
}
