//! Tests of the parser on outputs of all formats. The outputs are constructed after the documented formats of
//! the model families.

use super::*;
use crate::testing::vocabularies::Dice;
use crate::text::tools::ToolSettings;
use serde_json::{Value as Json, json};

/// An answer put together from its events.
#[derive(Clone, Debug, Default, PartialEq)]
struct Answer {
    content: String,
    reasoning: String,
    calls: Vec<Call>,
}

#[derive(Clone, Debug, PartialEq)]
struct Call {
    name: String,
    arguments: String,
    is_complete: bool,
}

impl Answer {
    /// Puts an answer together, and checks the order of the events.
    fn new(events: &[OutputEvent]) -> Answer {
        let mut answer = Answer::default();
        for event in events {
            match event {
                OutputEvent::Content(text) => {
                    assert!(!text.is_empty(), "{events:?}");
                    answer.content += text;
                }
                OutputEvent::Reasoning(text) => answer.reasoning += text,
                OutputEvent::ToolCallStart { index, id, name } => {
                    assert_eq!(*index, answer.calls.len(), "{events:?}");
                    assert!(!id.is_empty() && !name.is_empty());
                    let call = Call { name: name.clone(), arguments: String::new(), is_complete: false };
                    answer.calls.push(call);
                }
                OutputEvent::ToolCallArguments { index, delta } => {
                    assert_eq!(*index + 1, answer.calls.len(), "{events:?}");
                    answer.calls[*index].arguments += delta;
                }
            }
        }
        for call in &mut answer.calls {
            call.is_complete = serde_json::from_str::<Json>(&call.arguments).is_ok_and(|all| all.is_object());
        }
        answer
    }
}

fn tools() -> Arc<[Tool]> {
    let properties = json!({
        "city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}
    });
    let parameters = json!({"type": "object", "properties": properties});
    let definitions = json!([
        {"type": "function", "function": {"name": "get_weather", "parameters": parameters}},
        {"type": "function", "function": {"name": "search-web", "parameters": {"type": "object"}}},
    ]);
    ToolSettings::parse(Some(&definitions), None, None).unwrap().tools.into()
}

fn settings(calls: &str) -> OutputSettings<'static> {
    OutputSettings {
        calls: CallFormat::named(calls),
        reasoning: None,
        tools: tools(),
        prompt: "",
        is_continued: false,
        is_constrained: false,
        whole_calls: false,
        max_calls: usize::MAX,
        id_seed: 7,
    }
}

/// Parses an output in pieces and joins adjacent text of the events.
fn parse_pieces(settings: OutputSettings, pieces: &[&str]) -> Vec<OutputEvent> {
    let mut parser = OutputParser::new(settings);
    let mut events: Vec<OutputEvent> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
    events.extend(parser.finish());
    assert_eq!(parser.finish(), [], "everything is returned once");
    let mut joined: Vec<OutputEvent> = Vec::new();
    for event in events {
        match (joined.last_mut(), event) {
            (Some(OutputEvent::Content(last)), OutputEvent::Content(text))
            | (Some(OutputEvent::Reasoning(last)), OutputEvent::Reasoning(text))
            | (
                Some(OutputEvent::ToolCallArguments { delta: last, .. }),
                OutputEvent::ToolCallArguments { delta: text, .. },
            ) => {
                last.push_str(&text);
            }
            (_, event) => joined.push(event),
        }
    }
    joined
}

fn parse(settings: OutputSettings, output: &str) -> Answer {
    Answer::new(&parse_pieces(settings, &[output]))
}

fn call(name: &str, arguments: &str) -> Call {
    Call { name: name.into(), arguments: arguments.into(), is_complete: true }
}

fn answer(content: &str, calls: &[Call]) -> Answer {
    Answer { content: content.into(), reasoning: String::new(), calls: calls.to_vec() }
}

const PARIS: &str = r#"{"city": "Paris", "days": 2}"#;
/// Arguments with brackets, markers of several formats and escapes in strings.
const NESTED: &str = r#"{"where": {"a": ["}{", "]</tool_call>", {"q": "\"x\\"}], "b": {}},
 "city": "Zürich 世界 😀", "marks": ["<|end|><|start|>", "```", "</think>[TOOL_CALLS]", "<|channel|>"]}"#;

/// Outputs with one call each of `get_weather` with PARIS and with NESTED, by format.
fn two_calls() -> Vec<(&'static str, String)> {
    let each = |form: fn(&str) -> String| [PARIS, NESTED].map(form);
    let [first, second] = each(|arguments| format!(r#"{{"name": "get_weather", "arguments": {arguments}}}"#));
    let list = format!("[{first}, {second}]");
    let late = format!(r#"{{"arguments": {PARIS}, "name": "get_weather"}}"#);
    let llama = each(|arguments| format!(r#"{{"name": "get_weather", "parameters": {arguments}}}"#));
    let typed = each(|arguments| {
        format!(r#"{{"type": "function", "name": "get_weather", "parameters": {arguments}}}"#)
    });
    let cohere = each(|arguments| {
        format!(r#"{{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {arguments}}}"#)
    });
    let mistral = each(|arguments| format!("[TOOL_CALLS]get_weather[ARGS]{arguments}"));
    let with_id = format!("[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{NESTED}");
    let v3 = each(|arguments| {
        let code = format!("get_weather\n```json\n{arguments}\n```");
        format!("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{code}<｜tool▁call▁end｜>")
    });
    let v31 = each(|arguments| {
        format!("<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>")
    });
    let kimi = each(|arguments| {
        let id = "functions.get_weather:0";
        format!("<|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>")
    });
    let [recipient, name] = [" to=functions.get_weather", "<|channel|>commentary"];
    let harmony = [
        format!("{name}{recipient} <|constrain|>json<|message|>{PARIS}<|call|>"),
        format!("<|start|>assistant{recipient}{name} json<|message|>{NESTED}"),
    ];
    vec![
        ("hermes", format!("<tool_call>\n{first}\n</tool_call>\n<tool_call>\n{second}\n</tool_call>")),
        ("hermes", format!("<tool_call>{list}</tool_call>")),
        ("hermes", format!("<tool_call>\n{late}\n</tool_call><tool_call>{second}")),
        ("llama3_json", llama.join("; ")),
        ("llama3_json", llama.map(|call| format!("<|python_tag|>{call}")).concat()),
        ("llama3_json", format!("[{}]", typed.join(","))),
        ("mistral", format!("[TOOL_CALLS]{list}")),
        ("mistral", format!("[TOOL_CALLS] {list}")),
        ("mistral", format!("{}{with_id}", mistral[0])),
        ("mistral_args", mistral.concat()),
        ("deepseek_v3", format!("<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>", v3.join("\n"))),
        ("deepseek_v31", format!("<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>", v31.concat())),
        ("kimi_k2", format!("<|tool_calls_section_begin|>{}<|tool_calls_section_end|>", kimi.concat())),
        ("granite", format!("<|tool_call|>{list}")),
        ("granite", format!("<tool_call>{list}")),
        ("granite-20b-fc", format!("<function_call> {first}\n<function_call> {second}")),
        ("phi4_mini_json", format!("functools{list}")),
        ("phi4_mini", format!("<|tool_call|>{list}<|/tool_call|>")),
        ("cohere", format!("<|START_ACTION|>[{}]<|END_ACTION|>", cohere.join(",\n "))),
        ("json", format!("```json\n{list}\n```")),
        ("json", format!("{first}\n{second}")),
        ("json", format!("```json\n{first}\n```\n```json\n{second}\n```")),
        ("openai", harmony.concat()),
    ]
}

/// Outputs of formats whose arguments are not JSON, with the arguments that they mean.
fn other_calls() -> Vec<(&'static str, String, [String; 2])> {
    let search = r#"search-web(q="a \"b, (\n", deep=True, list=[1, None, {'k': (1.5, -2)}])"#;
    let python = format!("[get_weather(city='Paris', days=2), {search}]");
    let list = r#"{"q": "a \"b, (\n", "deep": true, "list": [1, null, {"k": [1.5, -2]}]}"#;
    let arguments = [PARIS.to_owned(), list.to_owned()];
    let weather = "<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>";
    let search = "<function=search-web><parameter=q>\n1 < 2\n\n</parameter></function>";
    let xml = format!(
        "<tool_call>\n<function=get_weather>\n{weather}\n</function>\n</tool_call>\n\
         <tool_call>{search}</tool_call>"
    );
    vec![
        ("pythonic", python.clone(), arguments.clone()),
        ("pythonic", format!("<|tool_call_start|>{python}<|tool_call_end|>"), arguments.clone()),
        ("pythonic", format!("<|python_start|>{python}<|python_end|>"), arguments),
        ("qwen3_coder", xml, [PARIS.to_owned(), r#"{"q": "1 < 2\n"}"#.to_owned()]),
    ]
}

/// All outputs, with text and reasoning around the calls.
fn outputs() -> Vec<(&'static str, String)> {
    let others = other_calls().into_iter().map(|(format, output, _)| (format, output));
    let calls: Vec<_> = two_calls().into_iter().chain(others).collect();
    let led = calls.iter().map(|(format, output)| {
        (*format, format!("<think>\nA plan: <b>\n</think>\n\nLet me see.\n{output} done"))
    });
    led.collect()
}

#[test]
fn two_calls_are_read_in_every_format() {
    for (format, output) in two_calls() {
        for whole_calls in [false, true] {
            let read = parse(OutputSettings { whole_calls, ..settings(format) }, &output);
            let expected = answer("", &[call("get_weather", PARIS), call("get_weather", NESTED)]);
            assert_eq!(read, expected, "{format}: {output}");
        }
    }
    for (format, output, [first, second]) in other_calls() {
        let read = parse(settings(format), &output);
        let expected = answer("", &[call("get_weather", &first), call("search-web", &second)]);
        assert_eq!(read, expected, "{format}: {output}");
    }
}

#[test]
fn text_around_calls_is_content() {
    for (format, output) in two_calls() {
        // Calls without a marker are calls only at the beginning.
        if ["llama3_json", "json", "openai"].contains(&format) && !output.contains("python_tag") {
            continue;
        }
        let read = parse(settings(format), &format!("I look.\n\n{output}\n Then. \n"));
        assert_eq!(read.content, "I look.\n Then. \n", "{format}: {output}");
        assert_eq!(read.calls.len(), 2, "{format}");
    }
    let [first, last] = ["<|channel|>commentary<|message|>I look. ", "<|channel|>final<|message|>So."];
    let read = parse(settings("openai"), &format!("{first}<|end|><|start|>assistant{last}<|return|>"));
    assert_eq!(read, answer("I look. So.", &[]));
}

#[test]
fn plain_text_is_unchanged() {
    let texts = [
        "",
        " ",
        "\n\nHello, 世界!  ",
        "a < b, <tool, [TOOL, {x}, ```json\n{\"a\": 1}\n``` and functool",
        "{\"answer\": [1, 2]}\n",
        "[1, 2, 3]",
        "[get_weather] and [other(x=1)]",
        "{\"name\": \"Bob\", \"arguments\": {}}",
        "{",
        "[",
        "[[",
        "</tool_call> ;,",
        "{\"name\": \"get_weather\" \"x\"}",
        "[get_weather(city=open('f'))]",
        "{\"arguments\": {\"city\": 1}}",
    ];
    for format in CallFormat::names() {
        for text in texts {
            assert_eq!(parse(settings(format), text), answer(text, &[]), "{format}");
        }
    }
    assert_eq!(parse(OutputSettings { calls: None, ..settings("json") }, texts[2]), answer(texts[2], &[]));
}

#[test]
fn malformed_calls_are_content() {
    for (format, output) in [
        ("hermes", "<tool_call>get_weather(1)</tool_call> x"),
        ("hermes", "<tool_call>\n{\"name\": \"bad name\", \"arguments\": {}}\n</tool_call>"),
        ("hermes", "<tool_call>{\"arguments\": {\"a\": 1}}</tool_call>"),
        ("hermes", "<tool_call>[]</tool_call>"),
        ("hermes", "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>"),
        ("mistral", "[TOOL_CALLS] nothing"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜> no"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>a b\n```json\n{}\n```"),
        ("kimi_k2", "<|tool_call_begin|>functions.f<|tool_call_argument_begin|>{}"),
        ("qwen3_coder", "<tool_call>\n<function=f g>"),
        ("pythonic", "<|python_start|>[f(1)]"),
        ("openai", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>city=1"),
    ] {
        assert_eq!(parse(settings(format), output), answer(output, &[]), "{format}");
    }
    // White space and markers before such a call keep their places.
    let output = "A \n <｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>{ B";
    assert_eq!(parse(settings("deepseek_v31"), output), answer(output, &[]));
    // A marker right after another one counts.
    let read = parse(settings("hermes"), "<tool_call><tool_call>{\"name\": \"f\"}</tool_call>");
    assert_eq!(read, answer("<tool_call>", &[call("f", "{}")]));
}

#[test]
fn a_call_that_breaks_off_is_content_as_a_whole_or_from_there() {
    let output = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1, b}}</tool_call>";
    let whole = parse(OutputSettings { whole_calls: true, ..settings("hermes") }, output);
    assert_eq!(whole, answer(output, &[]));
    let streamed = parse(settings("hermes"), output);
    let open = Call { is_complete: false, ..call("f", "{\"a\": 1, ") };
    assert_eq!(streamed, answer("b}}</tool_call>", std::slice::from_ref(&open)));
    let cut = parse(settings("hermes"), "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1, ");
    assert_eq!(cut, answer("", &[open]));
    // Only the bracket of the call lacks.
    let cut =
        parse(settings("hermes"), "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}\n</tool_call>");
    assert_eq!(cut, answer("", &[call("f", "{\"a\": 1}")]));
}

#[test]
fn arguments_have_several_forms() {
    for (arguments, expected) in [
        (r#", "arguments": "{\"a\": \"\\u00e9\"}""#, r#"{"a": "\u00e9"}"#),
        (r#", "arguments": """#, "{}"),
        (r#", "arguments": null"#, "{}"),
        ("", "{}"),
        (", \"arguments\": {\"a\": \"1\n\t2\u{1}\"}", r#"{"a": "1\n\t2\u0001"}"#),
        (r#", "parameters": {}, "id": "x", "more": [{}]"#, "{}"),
    ] {
        let read =
            parse(settings("hermes"), &format!("<tool_call>{{\"name\": \"f\"{arguments}}}</tool_call>"));
        assert_eq!(read, answer("", &[call("f", expected)]));
    }
}

#[test]
fn values_of_elements_are_what_the_schema_says() {
    for (key, value, expected) in [
        ("city", "75", r#""75""#),
        ("city", "\n\n7\n", r#""\n7""#),
        ("days", "75", "75"),
        ("days", "many", r#""many""#),
        ("where", "{\"a\": [True]}", r#""{\"a\": [True]}""#),
        ("where", "\n{\"a\": [1]}\n", r#"{"a":[1]}"#),
        ("where", "None", "null"),
        ("unknown", "75", r#""75""#),
    ] {
        let output =
            format!("<tool_call><function=get_weather><parameter={key}>{value}</parameter></function>");
        let expected = format!("{{\"{key}\": {expected}}}");
        assert_eq!(parse(settings("qwen3_coder"), &output), answer("", &[call("get_weather", &expected)]));
    }
}

#[test]
fn arguments_are_returned_as_they_arrive() {
    let mut parser = OutputParser::new(settings("hermes"));
    assert_eq!(parser.push("Hm. <tool_call>\n{\"name\": \"f\", \"arg"), [OutputEvent::Content("Hm.".into())]);
    let id = match &parser.push("uments\": {\"a\": \"x")[..] {
        [
            OutputEvent::ToolCallStart { index: 0, id, name },
            OutputEvent::ToolCallArguments { index: 0, delta },
        ] => {
            assert_eq!((name.as_str(), delta.as_str()), ("f", "{\"a\": \"x"));
            id.clone()
        }
        other => panic!("{other:?}"),
    };
    assert!(id.len() == 29 && id.starts_with("call_"), "{id}");
    assert!(!parser.has_calls(), "the call may still turn out to be malformed");
    assert_eq!(parser.push("y\"}"), [OutputEvent::ToolCallArguments { index: 0, delta: "y\"}".into() }]);
    assert_eq!((parser.push("}\n</tool_call>"), parser.finish()), (vec![], vec![]));
    assert!(parser.has_calls());
}

#[test]
fn ids_are_the_models_or_new_ones() {
    let ids = |settings: OutputSettings, output: &str| -> Vec<String> {
        let events = parse_pieces(settings, &[output]);
        events
            .into_iter()
            .filter_map(|event| match event {
                OutputEvent::ToolCallStart { id, .. } => Some(id),
                _ => None,
            })
            .collect()
    };
    let output = "<tool_call>[{\"name\": \"f\"}, {\"name\": \"f\"}]";
    let [one, other] = [7, 8].map(|id_seed| ids(OutputSettings { id_seed, ..settings("hermes") }, output));
    assert!(one[0] != one[1] && one[0] != other[0] && one[1] != other[1]);
    assert_eq!(one, ids(settings("hermes"), output));
    let given = ids(settings("mistral"), "[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}[TOOL_CALLS]f[ARGS]{}");
    assert_eq!((given[0].as_str(), given[1].len()), ("a1B2c3D4e", 9));
    let kimi = ids(settings("kimi_k2"), "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}");
    assert_eq!(kimi, ["functions.f:3"]);
}

#[test]
fn further_calls_than_allowed_are_dropped() {
    for whole_calls in [false, true] {
        let output = "<tool_call>{\"name\": \"f\"}</tool_call><tool_call>{\"name\": \"g\"}</tool_call>";
        let read = parse(OutputSettings { max_calls: 1, whole_calls, ..settings("hermes") }, output);
        assert_eq!(read, answer("", &[call("f", "{}")]));
    }
}

#[test]
fn reasoning_is_separated() {
    let with = |reasoning: &str, prompt: &'static str, output: &str| {
        let read = parse(
            OutputSettings { reasoning: ReasoningFormat::named(reasoning), prompt, ..settings("hermes") },
            output,
        );
        (read.reasoning, read.content, read.calls.len())
    };
    let expected =
        |reasoning: &str, content: &str, calls: usize| (reasoning.to_owned(), content.to_owned(), calls);
    for (format, prompt, output, result) in [
        ("qwen3", "", "<think>\nHm, <b>\n\n</think>\n\nYes. ", expected("Hm, <b>", "Yes. ", 0)),
        ("qwen3", "<|assistant|><think>\n", "\nHm</think>Yes", expected("Hm", "Yes", 0)),
        ("qwen3", "<|assistant|><think>\n", "<think>Hm</think>Yes", expected("Hm", "Yes", 0)),
        ("qwen3", "<think>\n\n</think>\n\n", "Yes <think>", expected("", "Yes <think>", 0)),
        ("qwen3", "", "\n Yes </think>", expected("", "\n Yes </think>", 0)),
        (
            "qwen3",
            "",
            "<think>Hm <tool_call>{\"name\": \"f\"}",
            expected("Hm <tool_call>{\"name\": \"f\"}", "", 0),
        ),
        ("qwen3", "", "<think></think>\n<tool_call>{\"name\": \"f\"}", expected("", "", 1)),
        ("qwen3", "<think>", "cut </thi", expected("cut </thi", "", 0)),
        ("mistral", "", "[THINK]Hm[/THINK]Yes", expected("Hm", "Yes", 0)),
        ("cohere", "", "<|START_THINKING|>Hm<|END_THINKING|>Yes", expected("Hm", "Yes", 0)),
        ("granite", "", "Here is my thought process: Hm. Here's my response: Yes", expected("Hm.", "Yes", 0)),
        ("granite", "", "Here is my answer", expected("", "Here is my answer", 0)),
    ] {
        assert_eq!(with(format, prompt, output), result, "{format} {prompt:?} {output:?}");
    }
    let think = ReasoningFormat::named("think").unwrap();
    assert!(think.starts_inside("a</think>b<think>half of a", true));
    assert!(!think.starts_inside("a</think>b<think>c</think>d", true));
    assert!(!think.starts_inside("<think>half of a", false));
}

#[test]
fn harmony_channels_are_separated() {
    let call_message = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>";
    let thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant";
    let output = format!("{thought}{call_message}{{\"city\": \"Paris\"}}<|call|>");
    let output = output.as_str();
    let read = parse(settings("openai"), output);
    let expected =
        Answer { reasoning: "Hm.".into(), ..answer("", &[call("get_weather", "{\"city\": \"Paris\"}")]) };
    assert_eq!(read, expected);
    let without_tools = OutputSettings {
        calls: None,
        reasoning: ReasoningFormat::named("openai_gptoss"),
        ..settings("json")
    };
    let read = parse(without_tools.clone(), output);
    assert_eq!((read.reasoning.as_str(), read.content.as_str()), ("Hm.", "{\"city\": \"Paris\"}"));
    // Text before a header is content.
    let read = parse(settings("openai"), "Hm <|channel|>final<|message|>Yes<|end|>So <|message|>a");
    assert_eq!(read, answer("Hm YesSo <|message|>a", &[]));
    // The prompt ends before a header, within a header or within a message.
    for (prompt, output) in [
        ("<|end|><|start|>assistant", "<|channel|>final<|message|>Yes"),
        ("<|end|><|start|>assistant<|channel|>final", "<|message|>Yes"),
        ("<|end|><|start|>assistant<|channel|>final<|message|>Well: ", "Yes"),
        ("<|end|><|start|>assistant", "Yes"),
    ] {
        let read = parse(OutputSettings { prompt, ..without_tools.clone() }, output);
        assert_eq!(read, answer("Yes", &[]), "{prompt} {output}");
    }
}

#[test]
fn markers_within_a_constrained_answer_are_text() {
    let harmony = OutputSettings {
        calls: None,
        reasoning: ReasoningFormat::named("openai_gptoss"),
        is_constrained: true,
        ..settings("json")
    };
    let text = "{\"a\": \"<|end|> <|channel|>analysis<|message|>\"}";
    let thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant";
    let read = parse(harmony, &format!("{thought}<|channel|>final<|message|>{text}"));
    assert_eq!(read, Answer { reasoning: "Hm.".into(), ..answer(text, &[]) });
}

#[test]
fn formats_of_calls_need_a_template_that_shows_tools() {
    let template = |source: &str| ChatTemplate::new("t", source, Default::default()).unwrap();
    let selected = |name: &str, source: &str| {
        let formats = OutputFormats::select((name, "none"), Some(&template(source))).unwrap();
        formats.calls.map(|format| format.name)
    };
    let shows = "{{ tools | tojson }}";
    assert_eq!((selected("hermes", shows), selected("auto", shows)), (Some("hermes"), Some("json")));
    assert_eq!((selected("hermes", "{{ messages }}"), selected("auto", "{{ messages }}")), (None, None));
    assert!(OutputFormats::select(("nonsense", "none"), Some(&template(shows))).is_err());
}

#[test]
fn the_edges_of_pieces_do_not_matter() {
    for (index, (format, output)) in outputs().into_iter().enumerate() {
        let reasoning = ReasoningFormat::named("think");
        let settings = OutputSettings { whole_calls: index % 2 == 0, reasoning, ..settings(format) };
        let expected = parse_pieces(settings.clone(), &[&output]);
        let single: Vec<&str> = output.split_inclusive(|_| true).collect();
        assert_eq!(parse_pieces(settings.clone(), &single), expected, "{format}");
        for (cut, _) in output.char_indices() {
            let (before, after) = output.split_at(cut);
            assert_eq!(parse_pieces(settings.clone(), &[before, after]), expected, "{format} {cut}");
        }
    }
}

/// Returns the words of a text that are not part of a format.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric())
        .filter(|word| ["Paris", "Zürich", "世界", "plan", "see", "done", "Let"].contains(word))
}

#[test]
fn outputs_that_are_cut_lose_nothing() {
    for (format, output) in outputs() {
        for (index, (cut, _)) in output.char_indices().enumerate() {
            let reasoning = ReasoningFormat::named("think");
            let settings = OutputSettings { whole_calls: index % 2 == 0, reasoning, ..settings(format) };
            let read = parse(settings, &output[..cut]);
            let arguments = read.calls.iter().map(|call| call.arguments.as_str());
            let kept: String =
                [read.content.as_str(), " ", &read.reasoning, " "].into_iter().chain(arguments).collect();
            let [given, kept] = [&output[..cut], &kept].map(|text| words(text).count());
            assert_eq!(given, kept, "{format}: {} -> {read:?}", &output[..cut]);
        }
    }
}

/// Pieces of formats in random order: the parser does not panic, complete calls have valid arguments, and the
/// edges of pieces do not matter.
#[test]
fn random_outputs_are_read() {
    let pieces = [
        "{\"name\": \"",
        "get_weather",
        "\", \"arguments\": ",
        "\"parameters\": ",
        "{",
        "}",
        "[",
        "]",
        "\"",
        "\\",
        "\n",
        " ",
        ",",
        ";",
        "(",
        ")",
        "city=",
        "'x'",
        "1",
        "-",
        "null",
        "{\"city\": \"é\"}",
        "世",
        "<",
        "|",
        "```json",
        "```",
        "function",
        "functions.",
        "<function=get_weather>",
        "<parameter=city>",
        "</parameter>",
        "</function>",
        "analysis",
        "commentary to=functions.get_weather",
        "final",
        "assistant",
        "<think>",
        "</think>",
        "text ",
    ];
    let mut dice = Dice::new(1802);
    let mut calls = 0;
    for format in CallFormat::names() {
        let markers: Vec<&str> = CallFormat::named(format).unwrap().markers().collect();
        let (mut streamed, recorded) = (0, outputs());
        let recorded: Vec<&String> =
            recorded.iter().filter(|(of, _)| *of == format).map(|(_, output)| output).collect();
        for round in 0..200 {
            let mut output = String::new();
            for _ in 0..1 + dice.below(14) {
                match dice.below(4) {
                    0 if !markers.is_empty() => output.push_str(dice.pick::<&str>(&markers)),
                    1 if round % 2 == 0 => {
                        // A part of a recorded output.
                        let chars: Vec<char> = dice.pick(&recorded).chars().collect();
                        let start = dice.below(chars.len());
                        output.extend(&chars[start..start + dice.below(chars.len() - start)]);
                    }
                    _ => output.push_str(dice.pick::<&str>(&pieces)),
                }
            }
            let whole_calls = dice.below(2) == 0;
            let reasoning = ReasoningFormat::named(if format == "openai" { "harmony" } else { "think" });
            let settings = OutputSettings { whole_calls, reasoning, ..settings(format) };
            let events = parse_pieces(settings.clone(), &[&output]);
            let read = Answer::new(&events);
            assert!(read.calls.iter().all(|call| call.is_complete || !whole_calls), "{output}");
            streamed += read.calls.len();
            let mut rest = output.as_str();
            let mut parts = Vec::new();
            while !rest.is_empty() {
                let end = rest.char_indices().nth(1 + dice.below(6)).map_or(rest.len(), |(end, _)| end);
                parts.push(&rest[..end]);
                rest = &rest[end..];
            }
            assert_eq!(parse_pieces(settings, &parts), events, "{format}: {output}");
        }
        calls += streamed;
    }
    assert!(calls > 250, "{calls}");
}

#[test]
fn long_outputs_take_linear_time() {
    for (format, piece) in [
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>{\"a\": \"<tool_call>{"),
        ("qwen3_coder", "<tool_call><function=f><parameter=x>"),
        ("pythonic", "["),
        ("openai", "<|channel|>"),
        ("json", "["),
        ("granite", " "),
    ] {
        let output = piece.repeat(50_000 / piece.len());
        for whole_calls in [false, true] {
            let read = parse(OutputSettings { whole_calls, ..settings(format) }, &output);
            assert_eq!(read.content.len(), output.len(), "{format}");
        }
    }
}
