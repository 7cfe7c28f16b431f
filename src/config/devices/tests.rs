use super::*;
use std::time::Duration;

const FAKE: DeviceKind = DeviceKind::Fake { step: Duration::ZERO, row: Duration::ZERO };
const KINDS: [DeviceKind; 4] = [DeviceKind::Cpu, DeviceKind::Reference, DeviceKind::Cuda, FAKE];

fn groups_of(value: impl Into<Value>) -> Result<Groups, String> {
    parse_groups(&value.into(), DeviceKind::Cpu, &KINDS)
}

/// Parses groups and formats them in the short form.
fn read(value: impl Into<Value>) -> String {
    format_groups(&groups_of(value).unwrap())
}

fn toml(text: &str) -> Value {
    text.parse().unwrap()
}

#[test]
fn both_forms_parse_to_the_same_groups() {
    for (short, list, spelled) in [
        ("0", "[[\"cpu:0\"]]", "cpu:0"),
        ("0;1", "[[0], [1]]", "cpu:0;cpu:1"),
        ("0&1", "[[\"cpu:0\", 1]]", "cpu:0&cpu:1"),
        ("0&1;2&3", "[[0, 1], [\"2\", \"3\"]]", "cpu:0&cpu:1;cpu:2&cpu:3"),
        ("cpu:3 | cpu:1, 7", "[\"3&1\", 7]", "cpu:3&cpu:1;cpu:7"),
        ("0&1;reference:0", "[[0, 1], [\"reference:0\"]]", "cpu:0&cpu:1;reference:0"),
        ("cuda", "[[\"cuda:0\"]]", "cuda:0"),
        ("cuda&cuda:1;cpu", "[[\"cuda:0\", \"cuda:1\"], [\"cpu\"]]", "cuda:0&cuda:1;cpu:0"),
    ] {
        assert_eq!(read(short), spelled);
        assert_eq!(read(toml(list)), spelled, "{list}");
        assert_eq!(read(list), spelled, "{list} as a text");
        assert_eq!(read(spelled), spelled);
    }
}

#[test]
fn an_empty_value_is_one_device_of_the_default_kind() {
    for nothing in [Value::from(""), toml("[]")] {
        assert_eq!(format_groups(&parse_groups(&nothing, FAKE, &KINDS).unwrap()), "fake:0");
    }
    assert_eq!(
        format_groups(&parse_groups(&"1;cpu:1".into(), DeviceKind::Reference, &KINDS).unwrap()),
        "reference:1;cpu:1"
    );
}

#[test]
fn invalid_groups_are_rejected_with_a_valid_suggestion() {
    for (text, reason) in [
        ("0;1;0", "cpu:0 is listed twice; the nearest possible is cpu:0;cpu:1"),
        ("0&cpu:0", "cpu:0 is listed twice; the nearest possible is cpu:0"),
        (
            "0&reference:0&1",
            "cpu:0 and reference:0 are in one stage, whose devices must be of one kind; \
                             the nearest possible is cpu:0&cpu:1;reference:0",
        ),
        ("fake:0;1", "fake:0 produces no activations for cpu:1; the nearest possible is cpu:1"),
        ("0&fake:0", "fake:0 produces no activations for cpu:0; the nearest possible is cpu:0"),
        (
            "fake:1&0&reference:0;fake:2",
            "fake:1 produces no activations for cpu:0; the nearest possible is cpu:0;reference:0",
        ),
        ("0&0&reference:0;fake:0", "cpu:0 is listed twice; the nearest possible is cpu:0;reference:0"),
        ("fake:0&fake:0", "fake:0 is listed twice; the nearest possible is fake:0"),
        ("gpu:2", "there is no device 'gpu:2'; did you mean 'cuda:2'?"),
        ("cup", "there is no device 'cup'; did you mean 'cpu:0'?"),
        ("refrence0", "there is no device 'refrence0'; did you mean 'reference:0'?"),
        ("cpu:-1", "there is no device 'cpu:-1'; did you mean 'cpu:1'?"),
        ("cpu:123456", "there is no device 'cpu:123456'; did you mean 'cpu:0'?"),
        ("0;;1", "'0;;1' has an empty entry"),
        ("0&", "'0&' has an empty entry"),
        ("[[0], []]", "stage 2 is empty"),
        ("[[0], [1.5]]", "expected a list for each stage"),
        ("[0", "expected a list for each stage"),
    ] {
        let error = groups_of(text).unwrap_err();
        assert!(error.starts_with(reason), "{text}: {error}");
        if let Some((_, nearest)) = error.split_once("the nearest possible is ") {
            assert_eq!(read(nearest), nearest, "the suggestion must be valid");
        }
    }
    assert!(groups_of(1.5).is_err() && groups_of(7).is_err());
    let many: Vec<Value> = (0..257).map(Value::from).collect();
    assert!(groups_of(many[..256].to_vec()).is_ok());
    assert_eq!(groups_of(many).unwrap_err(), "names more than 256 devices");
}

#[test]
fn layers_and_shares_are_as_many_as_stages_and_ranks() {
    let groups = groups_of("0&1;2").unwrap();
    for same in ["[20, 20]", "20,20", "20;20", "[[20], [20]]"] {
        assert_eq!(parse_layers(&same.into(), &groups), Ok(vec![20, 20]), "{same}");
    }
    assert_eq!(parse_layers(&toml("[]"), &groups), Ok(vec![]));
    let error = parse_layers(&toml("[20]"), &groups).unwrap_err();
    assert_eq!(error, "is for 1 stage, but device.groups has 2 (cpu:0&cpu:1;cpu:2); [] splits automatically");
    for wrong in ["0,1", "-1,1", "1&1;1", "1,x", "10000000,1"] {
        assert!(parse_layers(&wrong.into(), &groups).is_err(), "{wrong}");
    }
    for same in ["[[2, 1], [1]]", "2&1;1", "2|1,1"] {
        assert_eq!(parse_shares(&same.into(), &groups), Ok(vec![vec![2, 1], vec![1]]), "{same}");
    }
    assert_eq!(parse_shares(&toml("[]"), &groups), Ok(vec![]));
    for wrong in ["2;1", "2&1", "1&1&1;1"] {
        let error = parse_shares(&wrong.into(), &groups).unwrap_err();
        assert!(error.ends_with("the nearest possible is [[1, 1], [1]]"), "{error}");
    }
    assert_eq!(
        parse_shares(&"0&1;1".into(), &groups).unwrap_err(),
        "'0' must be a whole number from 1 to 1000000"
    );
}
