//! `POST /v1/chat/completions`: renders messages with the model's chat template, returns a generated message.
//!
//! Invariant: the rendered text is tokenized without adding special tokens.

use super::ServeParts;
use super::completions::ResponseTokenIds;
use super::error::ApiError;
use super::fields::Fields;
use super::params::{ChatParams, Conversation};
use super::prompt_ids::{PromptIds, encode};
use super::respond::{GenerationApi, PreparedRequest, ResponseFormat, check_choices};
use super::wire::chat::{ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprobs, ResponseMessage};
use super::wire::{ChoiceOutput, Finish};
use crate::text::chat_template::{Chat, TemplateError};
use std::sync::Arc;

/// The chat completions API.
pub struct ChatApi;

/// Response format of the chat completions API.
pub struct ChatFormat {
    logprobs: bool,
    ids: ResponseTokenIds,
}

impl GenerationApi for ChatApi {
    type Format = ChatFormat;
    const PATH: &'static str = "/v1/chat/completions";
    const PROMPT_PARAM: &'static str = "messages";

    fn parse(parts: &ServeParts, fields: Fields) -> Result<PreparedRequest<ChatFormat>, ApiError> {
        let ChatParams { generation, conversation, logprobs } =
            ChatParams::parse(fields, parts.model.vocab, &parts.model.sampling_defaults)?;
        check_choices(parts, 1, &generation)?;
        let text = render_conversation(parts, &conversation)?;
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
            prompts: prompts.clone(),
            choices_per_prompt: generation.n as usize,
        };
        let format = ChatFormat { logprobs: logprobs.is_some(), ids };
        Ok(PreparedRequest { generation, prompts, echo: false, logprobs, format })
    }
}

/// Renders a conversation with the model's chat template.
pub fn render_conversation(parts: &ServeParts, conversation: &Conversation) -> Result<String, ApiError> {
    let Some(template) = &parts.model.chat_template else {
        let message = "this model has no chat template; start the server with --chat-template, or use \
                       /v1/completions";
        return Err(ApiError::no_chat_template(message));
    };
    let chat = Chat {
        messages: &conversation.messages,
        tools: &[],
        add_generation_prompt: conversation.add_generation_prompt,
        continue_final_message: conversation.continue_final_message,
        kwargs: &conversation.template_kwargs,
    };
    template.render(&chat).map_err(|error| match error {
        TemplateError::Rejected(reason) => {
            ApiError::invalid("messages", format!("the chat template rejected the messages: {reason}"))
        }
        TemplateError::Failed(reason) => ApiError::invalid(
            "messages",
            format!("the chat template failed to render the messages: {reason}"),
        ),
    })
}

impl ResponseFormat for ChatFormat {
    const ID_PREFIX: &'static str = "chatcmpl-";
    const OBJECT: &'static str = "chat.completion";
    const CHUNK_OBJECT: &'static str = "chat.completion.chunk";
    type Choice = ChatChoice;
    type ChunkChoice = ChatChunkChoice;

    fn choice(&self, parts: &ServeParts, index: usize, part: ChoiceOutput) -> ChatChoice {
        let logprobs = self.logprobs.then(|| ChatLogprobs::from_output(&part, &parts.tokenizer));
        let ids = self.ids.for_choice(index, &part, true);
        ChatChoice {
            index,
            logprobs,
            ids,
            finish: part.end.as_ref().into(),
            message: ResponseMessage::new(part.text),
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

    fn chunk(&self, parts: &ServeParts, index: usize, part: ChoiceOutput, _: bool) -> ChatChunkChoice {
        let with_logprobs = self.logprobs && !part.tokens.is_empty();
        let logprobs = with_logprobs.then(|| ChatLogprobs::from_output(&part, &parts.tokenizer));
        let ids = self.ids.for_choice(index, &part, false);
        ChatChunkChoice {
            index,
            logprobs,
            ids,
            finish: part.end.as_ref().into(),
            delta: ChatDelta::text(part.text),
        }
    }
}
