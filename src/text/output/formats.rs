//! Formats in which model families write tool calls, as data.
//!
//! Invariant: no marker of a format is the beginning of another one of that format.

use super::headers::{Header, deepseek_header, kimi_header, mistral_header};

/// A format of tool calls.
#[derive(Debug)]
pub struct CallFormat {
    /// Name, as in vLLM if it has the format.
    pub name: &'static str,
    /// Other names, mostly those of vLLM.
    pub aliases: &'static [&'static str],
    pub(super) syntax: Syntax,
    /// Form in which calls must be written if they are required; `None` if their arguments are not JSON.
    pub(super) writing: Option<Writing>,
    /// Texts that a chat template for this format contains: all of one of the lists.
    signatures: &'static [&'static [&'static str]],
    /// Texts that a chat template for this format does not contain.
    foreign: &'static [&'static str],
}

/// Syntax of calls.
#[derive(Debug)]
pub(super) enum Syntax {
    Marked(Markers),
    /// Messages with a channel and a recipient, which also hold content and reasoning.
    Harmony,
}

/// Markers of calls in the text of an answer.
#[derive(Debug)]
pub(super) struct Markers {
    /// Markers that begin one or several calls.
    pub(super) openers: &'static [&'static str],
    /// Markers that may precede a call and are dropped with it.
    pub(super) preludes: &'static [&'static str],
    /// Markers that are dropped after a call.
    pub(super) closers: &'static [&'static str],
    /// Characters with which calls may begin without a marker, at the beginning of the answer and after
    /// other calls. Such calls are taken for calls only if a tool has that name.
    pub(super) bare: &'static [&'static str],
    pub(super) body: Body,
}

/// Form of the text after an opening marker.
#[derive(Clone, Copy, Debug)]
pub(super) enum Body {
    /// A JSON object with name and arguments, or an array of them; or, with a parser of headers, a name and
    /// then the arguments as a JSON object.
    Json { header: Option<HeaderParser> },
    /// A list of calls in Python's syntax.
    Pythonic,
    /// A function and its parameters as XML elements.
    Xml,
}

/// Parser of the text between an opening marker and the arguments.
pub(super) type HeaderParser = fn(&str) -> Option<Header>;

/// Form in which calls are written: `open`, then calls with `separator` between them, then `close`. A call is
/// `before`, the name, `middle`, the arguments, `after`.
#[derive(Debug)]
pub(super) struct Writing {
    pub(super) open: Literal,
    pub(super) before: Literal,
    pub(super) middle: Literal,
    pub(super) after: Literal,
    pub(super) separator: Literal,
    pub(super) close: Literal,
    /// Whether there may be several calls.
    pub(super) is_parallel: bool,
}

/// Text with markers.
pub(super) type Literal = &'static [LiteralPart];

/// A part of a literal.
#[derive(Clone, Copy, Debug)]
pub(super) enum LiteralPart {
    Text(&'static str),
    /// Text that is one special token in most vocabularies.
    Marker(&'static str),
}

use LiteralPart::{Marker, Text};

const MARKERS: Markers =
    Markers { openers: &[], preludes: &[], closers: &[], bare: &[], body: Body::Json { header: None } };

const WRITING: Writing = Writing {
    open: &[],
    before: &[Text("{\"name\": \"")],
    middle: &[Text("\", \"arguments\": ")],
    after: &[Text("}")],
    separator: &[],
    close: &[],
    is_parallel: false,
};

const LIST: Writing = Writing { separator: &[Text(", ")], close: &[Text("]")], is_parallel: true, ..WRITING };

const FORMAT: CallFormat = CallFormat {
    name: "",
    aliases: &[],
    syntax: Syntax::Harmony,
    writing: None,
    signatures: &[],
    foreign: &[],
};

const MISTRAL: Markers =
    Markers { openers: &["[TOOL_CALLS]"], body: Body::Json { header: Some(mistral_header) }, ..MARKERS };

const DEEPSEEK: Markers = Markers {
    openers: &["<｜tool▁call▁begin｜>"],
    preludes: &["<｜tool▁calls▁begin｜>"],
    closers: &["```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
    body: Body::Json { header: Some(deepseek_header) },
    ..MARKERS
};

const PHI4: Markers =
    Markers { openers: &["functools", "<|tool_call|>"], closers: &["<|/tool_call|>"], ..MARKERS };

/// All formats. A chat template has the first one whose signature it contains.
pub(super) static CALL_FORMATS: &[CallFormat] = &[
    CallFormat {
        name: "openai",
        aliases: &["harmony", "gpt_oss"],
        syntax: Syntax::Harmony,
        writing: Some(Writing {
            before: &[Marker("<|channel|>"), Text("commentary to=functions.")],
            middle: &[Text(" "), Marker("<|constrain|>"), Text("json"), Marker("<|message|>")],
            after: &[],
            ..WRITING
        }),
        signatures: &[&["<|channel|>", "<|message|>"]],
        ..FORMAT
    },
    CallFormat {
        name: "qwen3_coder",
        aliases: &["qwen3_xml"],
        syntax: Syntax::Marked(Markers {
            openers: &["<tool_call>"],
            closers: &["</tool_call>"],
            body: Body::Xml,
            ..MARKERS
        }),
        signatures: &[&["<tool_call>", "<function=", "<parameter="]],
        ..FORMAT
    },
    CallFormat {
        name: "deepseek_v3",
        syntax: Syntax::Marked(DEEPSEEK),
        writing: Some(Writing {
            open: &[Marker("<｜tool▁calls▁begin｜>")],
            before: &[Marker("<｜tool▁call▁begin｜>"), Text("function"), Marker("<｜tool▁sep｜>")],
            middle: &[Text("\n```json\n")],
            after: &[Text("\n```"), Marker("<｜tool▁call▁end｜>")],
            separator: &[Text("\n")],
            close: &[Marker("<｜tool▁calls▁end｜>")],
            is_parallel: true,
        }),
        signatures: &[&["<｜tool▁call▁begin｜>", "```json"]],
        ..FORMAT
    },
    CallFormat {
        name: "deepseek_v31",
        syntax: Syntax::Marked(DEEPSEEK),
        writing: Some(Writing {
            open: &[Marker("<｜tool▁calls▁begin｜>")],
            before: &[Marker("<｜tool▁call▁begin｜>")],
            middle: &[Marker("<｜tool▁sep｜>")],
            after: &[Marker("<｜tool▁call▁end｜>")],
            close: &[Marker("<｜tool▁calls▁end｜>")],
            is_parallel: true,
            ..WRITING
        }),
        signatures: &[&["<｜tool▁call▁begin｜>"]],
        ..FORMAT
    },
    CallFormat {
        name: "kimi_k2",
        syntax: Syntax::Marked(Markers {
            openers: &["<|tool_call_begin|>"],
            preludes: &["<|tool_calls_section_begin|>"],
            closers: &["<|tool_call_end|>", "<|tool_calls_section_end|>"],
            body: Body::Json { header: Some(kimi_header) },
            ..MARKERS
        }),
        writing: Some(Writing {
            open: &[Marker("<|tool_calls_section_begin|>")],
            before: &[Marker("<|tool_call_begin|>"), Text("functions.")],
            middle: &[Text(":0"), Marker("<|tool_call_argument_begin|>")],
            after: &[Marker("<|tool_call_end|>")],
            close: &[Marker("<|tool_calls_section_end|>")],
            ..WRITING
        }),
        signatures: &[&["<|tool_call_argument_begin|>"]],
        ..FORMAT
    },
    CallFormat {
        name: "mistral_args",
        syntax: Syntax::Marked(MISTRAL),
        writing: Some(Writing {
            before: &[Marker("[TOOL_CALLS]")],
            middle: &[Marker("[ARGS]")],
            after: &[],
            is_parallel: true,
            ..WRITING
        }),
        signatures: &[&["[TOOL_CALLS]", "[ARGS]"]],
        ..FORMAT
    },
    CallFormat {
        name: "mistral",
        syntax: Syntax::Marked(MISTRAL),
        writing: Some(Writing { open: &[Marker("[TOOL_CALLS]"), Text("[")], ..LIST }),
        signatures: &[&["[TOOL_CALLS]"]],
        ..FORMAT
    },
    CallFormat {
        name: "phi4_mini_json",
        syntax: Syntax::Marked(PHI4),
        writing: Some(Writing { open: &[Text("functools[")], ..LIST }),
        signatures: &[&["functools["]],
        ..FORMAT
    },
    CallFormat {
        name: "phi4_mini",
        aliases: &["phi4"],
        syntax: Syntax::Marked(PHI4),
        writing: Some(Writing {
            open: &[Marker("<|tool_call|>"), Text("[")],
            close: &[Text("]"), Marker("<|/tool_call|>")],
            ..LIST
        }),
        signatures: &[&["<|/tool_call|>"], &["<|tool|>", "<|/tool|>"]],
        ..FORMAT
    },
    CallFormat {
        name: "granite",
        syntax: Syntax::Marked(Markers { openers: &["<|tool_call|>", "<tool_call>"], ..MARKERS }),
        writing: Some(Writing { open: &[Marker("<|tool_call|>"), Text("[")], ..LIST }),
        signatures: &[&["<|tool_call|>"]],
        ..FORMAT
    },
    CallFormat {
        name: "granite-20b-fc",
        aliases: &["granite_20b_fc"],
        syntax: Syntax::Marked(Markers { openers: &["<function_call>"], ..MARKERS }),
        writing: Some(Writing {
            before: &[Marker("<function_call>"), Text(" {\"name\": \"")],
            separator: &[Text("\n")],
            is_parallel: true,
            ..WRITING
        }),
        signatures: &[&["<function_call>"]],
        ..FORMAT
    },
    CallFormat {
        name: "hermes",
        aliases: &["qwen", "qwen2_5", "granite4"],
        syntax: Syntax::Marked(Markers { openers: &["<tool_call>"], closers: &["</tool_call>"], ..MARKERS }),
        writing: Some(Writing {
            before: &[Marker("<tool_call>"), Text("\n{\"name\": \"")],
            after: &[Text("}\n"), Marker("</tool_call>")],
            separator: &[Text("\n")],
            is_parallel: true,
            ..WRITING
        }),
        signatures: &[&["<tool_call>"]],
        // GLM writes arguments as XML elements.
        foreign: &["<arg_key>"],
    },
    CallFormat {
        name: "cohere",
        aliases: &["command_r", "cohere_command3"],
        syntax: Syntax::Marked(Markers {
            openers: &["<|START_ACTION|>"],
            closers: &["<|END_ACTION|>"],
            ..MARKERS
        }),
        writing: Some(Writing {
            open: &[Marker("<|START_ACTION|>"), Text("[")],
            before: &[Text("{\"tool_name\": \"")],
            middle: &[Text("\", \"parameters\": ")],
            close: &[Text("]"), Marker("<|END_ACTION|>")],
            ..LIST
        }),
        signatures: &[&["<|START_ACTION|>"]],
        ..FORMAT
    },
    CallFormat {
        name: "pythonic",
        aliases: &["llama4_pythonic", "llama3_pythonic", "lfm2"],
        syntax: Syntax::Marked(Markers {
            openers: &["<|tool_call_start|>", "<|python_start|>"],
            preludes: &["<|python_tag|>"],
            closers: &["<|tool_call_end|>", "<|python_end|>"],
            bare: &["["],
            body: Body::Pythonic,
        }),
        signatures: &[&["func_name1("], &["[func_name("], &["<|tool_call_start|>"]],
        ..FORMAT
    },
    CallFormat {
        name: "llama3_json",
        aliases: &["llama", "llama4_json"],
        syntax: Syntax::Marked(Markers {
            openers: &["<|python_tag|>"],
            closers: &[";", ","],
            bare: &["{", "["],
            ..MARKERS
        }),
        writing: Some(Writing { middle: &[Text("\", \"parameters\": ")], ..WRITING }),
        signatures: &[
            &["<|python_tag|>"],
            &["\"parameters\": ", "<|start_header_id|>"],
            &["\"parameters\": ", "<|header_start|>"],
        ],
        ..FORMAT
    },
    CallFormat {
        name: "json",
        aliases: &["generic"],
        syntax: Syntax::Marked(Markers {
            preludes: &["```json"],
            closers: &["```", ","],
            bare: &["{", "["],
            ..MARKERS
        }),
        writing: Some(WRITING),
        // Any template that shows tools; it comes last.
        signatures: &[&["tools"]],
        ..FORMAT
    },
];

impl CallFormat {
    /// Returns the format with this name or alias.
    pub fn named(name: &str) -> Option<&'static CallFormat> {
        CALL_FORMATS.iter().find(|format| format.name == name || format.aliases.contains(&name))
    }

    /// Returns the generic format: JSON objects without markers.
    pub fn generic() -> &'static CallFormat {
        CALL_FORMATS.last().expect("the table is not empty; this is a bug")
    }

    /// Returns the form in which required calls are written, and its format: the generic one in place of
    /// formats whose arguments are not JSON.
    pub(super) fn written(&'static self) -> Option<(&'static CallFormat, &'static Writing)> {
        let formats = [self, CallFormat::generic()];
        formats.into_iter().find_map(|format| Some((format, format.writing.as_ref()?)))
    }

    /// Returns the names of all formats, without aliases.
    pub fn names() -> impl Iterator<Item = &'static str> {
        CALL_FORMATS.iter().map(|format| format.name)
    }

    /// Detects the format from the source of a chat template. `None` if the template does not show tools.
    pub fn detect(template: &str) -> Option<&'static CallFormat> {
        let shows_tools =
            template.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "tools");
        let contains = |text: &&str| template.contains(*text);
        let matches = |format: &&CallFormat| {
            format.signatures.iter().any(|texts| texts.iter().all(contains))
                && !format.foreign.iter().any(contains)
        };
        CALL_FORMATS.iter().filter(|_| shows_tools).find(matches)
    }

    /// Returns the markers that the parser must see. They are special tokens in most vocabularies, and a
    /// detokenizer that skips special tokens must not skip these.
    pub fn markers(&self) -> impl Iterator<Item = &'static str> {
        let lists: [&[&str]; 3] = match &self.syntax {
            Syntax::Marked(markers) => [markers.openers, markers.preludes, markers.closers],
            Syntax::Harmony => [super::harmony::MARKERS, &[], &[]],
        };
        let within: &[&str] = match &self.syntax {
            Syntax::Marked(Markers { body: Body::Json { header: Some(_) }, .. }) => super::headers::MARKERS,
            _ => &[],
        };
        lists.into_iter().chain([within]).flatten().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        let mut names: Vec<&str> = CALL_FORMATS
            .iter()
            .flat_map(|format| format.aliases.iter().copied().chain([format.name]))
            .collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        assert_eq!(CallFormat::named("llama4_json").unwrap().name, "llama3_json");
        assert!(CallFormat::named("llama5").is_none());
        assert_eq!(CallFormat::generic().name, "json");
    }

    #[test]
    fn no_marker_begins_another() {
        for format in CALL_FORMATS {
            let Syntax::Marked(markers) = &format.syntax else { continue };
            let lists = [markers.openers, markers.preludes, markers.closers, markers.bare];
            let all: Vec<&str> = lists.into_iter().flatten().copied().collect();
            for (i, one) in all.iter().enumerate() {
                let clashes = all.iter().enumerate().any(|(j, other)| i != j && other.starts_with(one));
                // "```" is dropped after a call only, "```json" only before one.
                assert!(!clashes || (format.name == "json" && *one == "```"), "{} {one}", format.name);
                assert!(!one.is_empty());
            }
        }
    }

    #[test]
    fn templates_show_the_format() {
        for (template, expected) in [
            (
                "{% if tools %}<tool_call>\n{\"name\": <function-name>, \"arguments\": <args>}\n</tool_call>",
                "hermes",
            ),
            ("{{ tools }}<tool_call>\n<function=f>\n<parameter=p>\n1\n</parameter>", "qwen3_coder"),
            (
                "{%- set tools = custom_tools %}<|start_header_id|>'{\"name\": \"' \"parameters\": ",
                "llama3_json",
            ),
            ("{{ tools }} Respond in the format [func_name1(name1=value1), func_name2(params)]", "pythonic"),
            ("{{ tools }}[AVAILABLE_TOOLS] [TOOL_CALLS] [", "mistral"),
            ("{{ tools }}[TOOL_CALLS]' + name + '[ARGS]'", "mistral_args"),
            (
                "{{ tools }}'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' '<｜tool▁sep｜>' '\\n```json\\n'",
                "deepseek_v3",
            ),
            ("{{ tools }}<｜tool▁call▁begin｜>name<｜tool▁sep｜>args<｜tool▁call▁end｜>", "deepseek_v31"),
            ("{{ tools }}respond with <|tool_call|> followed by a JSON list of tools used", "granite"),
            ("{{ tools }} formatted as functools[{\"name\": 1}]", "phi4_mini_json"),
            ("'<|tool|>' + (tools | tojson) + '<|/tool|>'", "phi4_mini"),
            ("{{ tools }}<|start|>assistant<|channel|>analysis<|message|>", "openai"),
            ("{{ tools }}<tool_call>f<arg_key>", "json"),
            ("{{ tools | tojson }}", "json"),
        ] {
            assert_eq!(CallFormat::detect(template).map(|format| format.name), Some(expected), "{template}");
        }
        for template in ["{{ messages }}", "<tool_call>", "{{ my_tools }}"] {
            assert!(CallFormat::detect(template).is_none());
        }
    }
}
