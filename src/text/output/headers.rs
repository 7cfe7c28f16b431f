//! Headers of calls: the name, and in some formats the id, that stand before the arguments.

/// Markers within headers.
pub(super) const MARKERS: &[&str] =
    &["[ARGS]", "[CALL_ID]", "<｜tool▁sep｜>", "<|tool_call_argument_begin|>"];

/// The name of a call, and its id if the model wrote one.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) name: String,
    pub(super) id: Option<String>,
}

impl Header {
    fn new(name: &str) -> Header {
        Header { name: name.trim().to_owned(), id: None }
    }
}

/// Parses `name[ARGS]` or `name[CALL_ID]id[ARGS]`, of Mistral.
pub(super) fn mistral_header(text: &str) -> Option<Header> {
    let text = text.trim();
    let text = text.strip_suffix("[ARGS]").unwrap_or(text);
    match text.split_once("[CALL_ID]") {
        None => Some(Header::new(text)),
        Some((name, id)) if !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_alphanumeric()) => {
            Some(Header { id: Some(id.to_owned()), ..Header::new(name) })
        }
        Some(_) => None,
    }
}

/// Parses `function<｜tool▁sep｜>name` and the beginning of a code block, of DeepSeek V3 and R1, or
/// `name<｜tool▁sep｜>`, of DeepSeek V3.1.
pub(super) fn deepseek_header(text: &str) -> Option<Header> {
    let (kind, rest) = text.split_once("<｜tool▁sep｜>")?;
    let rest = rest.trim();
    let name = rest.strip_suffix("```json").or(rest.strip_suffix("```")).unwrap_or(rest);
    match name.trim().is_empty() {
        false if kind.trim() == "function" => Some(Header::new(name)),
        false => None,
        true => Some(Header::new(kind)),
    }
}

/// Parses `functions.name:0<|tool_call_argument_begin|>`, of Kimi K2.
pub(super) fn kimi_header(text: &str) -> Option<Header> {
    let id = text.trim().strip_suffix("<|tool_call_argument_begin|>")?.trim();
    let (path, number) = id.rsplit_once(':')?;
    number.parse::<u32>().ok()?;
    Some(Header { id: Some(id.to_owned()), ..Header::new(path.strip_prefix("functions.").unwrap_or(path)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_have_names_and_ids() {
        for (parse, text, name, id) in [
            (mistral_header as fn(&str) -> Option<Header>, " f[ARGS]", "f", None),
            (mistral_header, "f", "f", None),
            (mistral_header, "f[CALL_ID]a1[ARGS]", "f", Some("a1")),
            (deepseek_header, "function<｜tool▁sep｜>to_json\n```json\n", "to_json", None),
            (deepseek_header, "function<｜tool▁sep｜>to_json\n", "to_json", None),
            (deepseek_header, "to_json<｜tool▁sep｜>", "to_json", None),
            (deepseek_header, "to_json<｜tool▁sep｜>```json\n", "to_json", None),
            (kimi_header, "functions.f:12<|tool_call_argument_begin|>", "f", Some("functions.f:12")),
        ] {
            let expected = Header { name: name.into(), id: id.map(String::from) };
            assert_eq!(parse(text), Some(expected), "{text}");
        }
        assert_eq!(mistral_header("f[CALL_ID]a 1[ARGS]"), None);
        assert_eq!(deepseek_header("tool<｜tool▁sep｜>f"), None);
        assert_eq!(deepseek_header("f"), None);
        assert_eq!(kimi_header("functions.f:x<|tool_call_argument_begin|>"), None);
        assert_eq!(kimi_header("functions.f:1"), None);
    }
}
