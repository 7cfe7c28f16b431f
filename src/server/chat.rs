//! `POST /v1/chat/completions`: renders messages with the model's chat template, returns a generated message.
//!
//! Invariant: the rendered text is tokenized without adding special tokens.

use super::ServeParts;
use super::completions::Ids;
use super::error::ApiError;
use super::params::{ChatParams, Conversation};
use super::respond::{Api, Asked, Job, Wording, check_choices, encode, fields_of};
use super::wire::chat::{Choice, ChunkChoice, Delta, Logprobs, Message};
use super::wire::{Finish, Part};
use crate::text::chat_template::{Chat, TemplateError};
use std::sync::Arc;

/// The chat completions API.
pub struct Chats;

/// Response format of the chat completions API.
pub struct ChatWording {
    logprobs: bool,
    ids: Ids,
}

impl Api for Chats {
    type Wording = ChatWording;
    const PATH: &'static str = "/v1/chat/completions";
    const PROMPT: &'static str = "messages";

    fn read(parts: &ServeParts, body: &[u8]) -> Result<Job<ChatWording>, ApiError> {
        let ChatParams { generation, conversation, logprobs } =
            ChatParams::parse(fields_of(parts, body)?, parts.model.vocab, &parts.model.defaults)?;
        check_choices(parts, 1, generation.n)?;
        let text = put(parts, &conversation)?;
        let prompt: Arc<[u32]> = encode(parts, &text, false, "messages")?.into();
        if prompt.is_empty() {
            return Err(ApiError::invalid(
                "messages",
                "the chat template renders these messages to an empty prompt",
            ));
        }
        let prompts = vec![Asked::plainly(prompt)];
        let ids =
            Ids { wanted: generation.return_token_ids, prompts: prompts.clone(), n: generation.n as usize };
        let wording = ChatWording { logprobs: logprobs.is_some(), ids };
        Ok(Job { generation, prompts, echo: false, logprobs, wording })
    }
}

/// Renders a conversation with the model's chat template.
pub fn put(parts: &ServeParts, conversation: &Conversation) -> Result<String, ApiError> {
    let Some(template) = &parts.model.chat else {
        let message = "this model has no chat template; start the server with --chat-template, or use \
                       /v1/completions";
        return Err(ApiError::no_chat_template(message));
    };
    let chat = Chat {
        messages: &conversation.messages,
        add_generation_prompt: conversation.add_generation_prompt,
        continue_final_message: conversation.continue_final_message,
        kwargs: &conversation.template_kwargs,
    };
    template.render(&chat).map_err(|error| match error {
        TemplateError::Refused(reason) => {
            ApiError::invalid("messages", format!("the chat template rejected the messages: {reason}"))
        }
        TemplateError::Failed(reason) => ApiError::invalid(
            "messages",
            format!("the chat template failed to render the messages: {reason}"),
        ),
    })
}

impl Wording for ChatWording {
    const ID: &'static str = "chatcmpl-";
    const OBJECT: &'static str = "chat.completion";
    const CHUNK_OBJECT: &'static str = "chat.completion.chunk";
    type Choice = Choice;
    type ChunkChoice = ChunkChoice;

    fn choice(&self, parts: &ServeParts, index: usize, part: Part) -> Choice {
        let logprobs = self.logprobs.then(|| Logprobs::of(&part, &parts.tokenizer));
        let ids = self.ids.of(index, &part, true);
        Choice { index, logprobs, ids, finish: part.end.as_ref().into(), message: Message::new(part.text) }
    }

    fn opening(&self, index: usize) -> Option<ChunkChoice> {
        let ids = self.ids.of(index, &Part::default(), true);
        Some(ChunkChoice { index, delta: Delta::opening(), logprobs: None, finish: Finish::default(), ids })
    }

    fn chunk(&self, parts: &ServeParts, index: usize, part: Part, _: bool) -> ChunkChoice {
        let with_logprobs = self.logprobs && !part.tokens.is_empty();
        let logprobs = with_logprobs.then(|| Logprobs::of(&part, &parts.tokenizer));
        let ids = self.ids.of(index, &part, false);
        ChunkChoice { index, logprobs, ids, finish: part.end.as_ref().into(), delta: Delta::text(part.text) }
    }
}
