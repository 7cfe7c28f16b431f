//! A chat template: compiled, and rendered with a conversation.

#![no_main]

use mainstem::text::ChatTemplate;
use mainstem::text::chat_template::{Chat, Message};
use serde_json::json;
use std::collections::BTreeMap;

mainstem_fuzz::target!(parse);

fn parse(bytes: &[u8]) {
    let Ok(source) = std::str::from_utf8(bytes) else { return };
    let special = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
    let Ok(template) = ChatTemplate::new("template", source, special) else { return };
    let messages = [("system", "Be brief."), ("user", "Hello?"), ("assistant", "Hi"), ("user", "So long.\n")]
        .map(|(role, text)| Message::new(role, text));
    let kwargs =
        json!({"tools": [{"name": "f", "parameters": {"x": [1, 2.5, null]}}], "enable_thinking": true});
    let kwargs = kwargs.as_object().expect("an object");
    for (add_generation_prompt, continue_final_message) in [(true, false), (false, true)] {
        let chat =
            Chat { messages: &messages, tools: &[], add_generation_prompt, continue_final_message, kwargs };
        let _ = template.render(&chat);
    }
}
