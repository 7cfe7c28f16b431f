//! `POST /v1/chat/completions`: renders messages with the model's chat template, returns a generated message.
//!
//! Invariant: the rendered text is tokenized without adding special tokens.

use super::ServeParts;
use super::access::random;
use super::completions::ResponseTokenIds;
use super::error::ApiError;
use super::fields::Fields;
use super::openapi::describe::Api;
use super::openapi::requests::ChatRequest;
use super::params::{ChatParams, ConstraintParams, Conversation};
use super::prompt_ids::{PromptIds, encode};
use super::respond::{GenerationApi, PreparedRequest, ResponseFormat, Turn, check_choices};
use super::wire::Envelope;
use super::wire::chat::{ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprobs, ResponseMessage};
use super::wire::{ChoiceOutput, Finish, PromptLogprobs};
use crate::text::chat_template::{Chat, TemplateError};
use crate::text::output::{ConstraintContext, OutputEvent, OutputFormats, OutputParser, OutputSettings};
use crate::text::tools::{Tool, ToolChoice};
use std::sync::Arc;

/// Describes the path of the API.
pub fn describe_paths(api: &mut Api) {
    api.post(ChatApi::PATH, "Answers a conversation.")
        .body::<ChatRequest>()
        .returns_generic::<Envelope<'static, ChatChoice>, ChatChoice>("ChatCompletion")
        .streams();
}

/// The chat completions API.
pub struct ChatApi;

/// Response format of the chat completions API.
pub struct ChatFormat {
    logprobs: bool,
    ids: ResponseTokenIds,
    output: OutputSpec,
}

/// Settings of the parsers of all choices.
struct OutputSpec {
    formats: OutputFormats,
    tools: Arc<[Tool]>,
    max_calls: usize,
    /// The rendered prompt.
    prompt: Arc<str>,
    is_continued: bool,
    /// Whether a grammar other than one of calls describes the answer.
    is_constrained: bool,
    /// Whether calls are the reason for which an answer ended. OpenAI and vLLM report the end of an answer
    /// that had to call a named tool as "stop".
    reports_calls: bool,
    include_reasoning: bool,
    /// Seed of the ids of tool calls.
    id_seed: u64,
}

impl OutputSpec {
    /// Creates the settings for the answer to a conversation, and its constraint: `constraint`, or that of
    /// calls if they are required. Tools that the model may call need a format of calls.
    fn new(
        parts: &ServeParts,
        conversation: &Conversation,
        prompt: &str,
        include_reasoning: bool,
        constraint: Option<ConstraintParams>,
    ) -> Result<(OutputSpec, Option<ConstraintParams>), ApiError> {
        let tools = &conversation.tools;
        let formats = parts.model.output_formats;
        if tools.choice != ToolChoice::None && formats.calls.is_none() {
            let message = "the chat template of this model does not show tools; start the server with one \
                           that does (--chat-template)";
            return Err(ApiError::unsupported("tools", message));
        }
        let mut formats = OutputFormats { calls: formats.calls.filter(|_| tools.max_calls() > 0), ..formats };
        let is_continued = conversation.continue_final_message;
        let context = ConstraintContext { tokenizer: &parts.tokenizer, formats, prompt, is_continued };
        let is_constrained = constraint.is_some();
        let constraint = match (context.calls(tools), constraint) {
            (Some((calls, format)), _) => {
                formats.calls = Some(format);
                Some(ConstraintParams::of_calls(calls))
            }
            (None, Some(given)) if tools.choice == ToolChoice::Auto => {
                let (either, format) = given.or_call(tools, &context)?;
                formats.calls = Some(format);
                Some(either)
            }
            (None, given) => given.map(|given| given.in_context(&context)),
        };
        let output = OutputSpec {
            formats,
            tools: tools.tools.clone().into(),
            max_calls: tools.max_calls(),
            prompt: prompt.into(),
            is_continued,
            is_constrained,
            reports_calls: !matches!(tools.choice, ToolChoice::Named(_)),
            include_reasoning,
            id_seed: random(),
        };
        Ok((output, constraint))
    }

    /// Returns the parser of a choice's output.
    fn parser(&self, index: usize, whole_calls: bool) -> OutputParser {
        OutputParser::new(OutputSettings {
            calls: self.formats.calls,
            reasoning: self.formats.reasoning,
            tools: self.tools.clone(),
            prompt: &self.prompt,
            is_continued: self.is_continued,
            is_constrained: self.is_constrained,
            whole_calls,
            max_calls: self.max_calls,
            id_seed: self.id_seed.wrapping_add(index as u64),
        })
    }

    /// Returns why a choice ended, if this part of its output is the last.
    fn finish(&self, part: &ChoiceOutput, parser: &OutputParser) -> Finish {
        Finish::from(part).with_calls(self.reports_calls && parser.has_calls())
    }

    /// Removes the reasoning if the response must not have it.
    fn filter(&self, mut events: Vec<OutputEvent>) -> Vec<OutputEvent> {
        if !self.include_reasoning {
            events.retain(|event| !matches!(event, OutputEvent::Reasoning(_)));
        }
        events
    }
}

impl GenerationApi for ChatApi {
    type Format = ChatFormat;
    const PATH: &'static str = "/v1/chat/completions";
    const PROMPT_PARAM: &'static str = "messages";

    fn parse(
        parts: &ServeParts,
        turn: &Turn,
        fields: Fields,
    ) -> Result<PreparedRequest<ChatFormat>, ApiError> {
        let ChatParams { generation, conversation, logprobs, constraint, include_reasoning } =
            ChatParams::parse(fields, parts)?;
        check_choices(parts, 1, &generation)?;
        let text = render_conversation(parts, turn, &conversation)?;
        let prompt: Arc<[u32]> = encode(parts, &text, false, "messages")?.into();
        if prompt.is_empty() {
            return Err(ApiError::invalid(
                "messages",
                "the chat template renders these messages to an empty prompt",
            ));
        }
        let prompts = vec![PromptIds::decoder_only(prompt)];
        let ids = ResponseTokenIds {
            enabled: generation.return_token_ids,
            as_names: generation.ids_as_tokens,
            prompts: prompts.clone(),
            choices_per_prompt: generation.n as usize,
        };
        let (output, constraint) =
            OutputSpec::new(parts, &conversation, &text, include_reasoning, constraint)?;
        let shown_tokens = parts.special_tokens.markers_of(&output.formats);
        let format = ChatFormat { logprobs: logprobs.is_some(), ids, output };
        Ok(PreparedRequest { generation, prompts, echo: false, logprobs, constraint, shown_tokens, format })
    }
}

/// Renders a conversation with the model's chat template, and holds the memory to tokenize it.
pub fn render_conversation(
    parts: &ServeParts,
    turn: &Turn,
    conversation: &Conversation,
) -> Result<String, ApiError> {
    let Some(template) = &parts.model.chat_template else {
        let message = "this model has no chat template; start the server with --chat-template, or use \
                       /v1/completions";
        return Err(ApiError::no_chat_template(message));
    };
    let chat = Chat {
        messages: &conversation.messages,
        tools: &conversation.tools.shown(),
        add_generation_prompt: conversation.add_generation_prompt,
        continue_final_message: conversation.continue_final_message,
        kwargs: &conversation.template_kwargs,
    };
    let rendered = template.render(&chat).map_err(|error| match error {
        TemplateError::Rejected(reason) => {
            ApiError::invalid("messages", format!("the chat template rejected the messages: {reason}"))
        }
        TemplateError::Failed(reason) => ApiError::invalid(
            "messages",
            format!("the chat template failed to render the messages: {reason}"),
        ),
    })?;
    turn.hold_text(rendered.len(), "messages")?;
    Ok(rendered)
}

impl ResponseFormat for ChatFormat {
    const ID_PREFIX: &'static str = "chatcmpl-";
    const OPERATION: &'static str = "chat";
    const OBJECT: &'static str = "chat.completion";
    const CHUNK_OBJECT: &'static str = "chat.completion.chunk";
    const PROMPT_LOGPROBS_IN_CHOICES: bool = false;
    type Choice = ChatChoice;
    type ChunkChoice = ChatChunkChoice;
    type ChoiceState = OutputParser;

    fn begin_choice(&self, index: usize) -> OutputParser {
        self.output.parser(index, false)
    }

    fn choice(
        &self,
        parts: &ServeParts,
        index: usize,
        part: ChoiceOutput,
        _: Option<PromptLogprobs>,
    ) -> ChatChoice {
        let logprobs = self.logprobs.then(|| ChatLogprobs::from_output(&part, &self.ids.names(parts)));
        let ids = self.ids.for_choice(index, &part, true);
        let mut parser = self.output.parser(index, true);
        let mut events = parser.push(&part.text);
        events.extend(parser.finish());
        ChatChoice {
            index,
            logprobs,
            ids,
            finish: self.output.finish(&part, &parser),
            message: ResponseMessage::from_events(self.output.filter(events)),
        }
    }

    fn first_chunk(&self, index: usize) -> Option<ChatChunkChoice> {
        let ids = self.ids.for_choice(index, &ChoiceOutput::default(), true);
        Some(ChatChunkChoice {
            index,
            delta: ChatDelta::with_role(),
            logprobs: None,
            finish: Finish::default(),
            ids,
        })
    }

    fn chunk(
        &self,
        parts: &ServeParts,
        index: usize,
        part: ChoiceOutput,
        _: bool,
        parser: &mut OutputParser,
    ) -> ChatChunkChoice {
        let with_logprobs = self.logprobs && !part.tokens.is_empty();
        let logprobs = with_logprobs.then(|| ChatLogprobs::from_output(&part, &self.ids.names(parts)));
        let ids = self.ids.for_choice(index, &part, false);
        let mut events = parser.push(&part.text);
        if part.end.is_some() {
            events.extend(parser.finish());
        }
        ChatChunkChoice {
            index,
            logprobs,
            ids,
            finish: self.output.finish(&part, parser),
            delta: ChatDelta::from_events(self.output.filter(events)),
        }
    }
}
