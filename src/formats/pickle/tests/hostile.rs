//! Malicious files: attempts to run code or to exhaust resources.
//!
//! Invariant: each is rejected with a specific error or is harmless, and has no side effect.

use super::assemble::*;
use super::{opened, refusal, value_refusal};
use crate::testing::Scratch;

/// Python names that run or fetch something, or create objects that do.
const OUTSIDE: [(&str, &str); 44] = [
    ("os", "system"),
    ("posix", "system"),
    ("nt", "system"),
    ("os", "popen"),
    ("pty", "spawn"),
    ("subprocess", "Popen"),
    ("subprocess", "check_output"),
    ("builtins", "eval"),
    ("builtins", "exec"),
    ("builtins", "compile"),
    ("builtins", "getattr"),
    ("builtins", "__import__"),
    ("builtins", "open"),
    ("__builtin__", "eval"),
    ("__builtin__", "set"),
    ("importlib", "import_module"),
    ("runpy", "_run_code"),
    ("timeit", "timeit"),
    ("webbrowser", "open"),
    ("shutil", "rmtree"),
    ("pip", "main"),
    ("copyreg", "_reconstructor"),
    ("copy_reg", "_reconstructor"),
    ("copyreg", "__newobj__"),
    ("functools", "partial"),
    ("functools", "reduce"),
    ("operator", "attrgetter"),
    ("operator", "methodcaller"),
    ("types", "CodeType"),
    ("types", "FunctionType"),
    ("marshal", "loads"),
    ("pickle", "loads"),
    ("_codecs", "encode"),
    ("argparse", "Namespace"),
    ("collections", "defaultdict"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("torch", "load"),
    ("torch.hub", "load"),
    ("torch.jit", "load"),
    ("torch.storage", "_load_from_bytes"),
    ("torch._utils", "_rebuild_qtensor"),
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("__torch__", "Model"),
];

#[test]
fn names_that_lead_outside_are_refused_by_name_and_nothing_is_done() {
    let folder = Scratch::new();
    let trace = folder.path().join("trace");
    let arguments = [text(&format!("touch {}", trace.display()))];
    for (module, name) in OUTSIDE {
        for callable in [global(module, name), stack_global(module, name)] {
            let called = call(callable.clone(), &arguments);
            let beside = dict(&[("a", good_tensor()), ("b", called.clone())]);
            let as_name = [b"}".to_vec(), called.clone(), good_tensor(), b"s".to_vec()].concat();
            let in_attributes =
                [dict(&[("a", good_tensor())]), dict(&[("_metadata", called.clone())]), b"b".to_vec()];
            let dropped = [called.clone(), b"0".to_vec(), dict(&[("a", good_tensor())])];
            for value in [callable, called, beside, as_name, in_attributes.concat(), dropped.concat()] {
                let error = value_refusal(&value);
                let expected =
                    format!("the pickle references {module}.{name}: only collections.OrderedDict, ");
                assert!(error.contains(&expected), "{error}");
            }
        }
    }
    assert!(!trace.exists());
}

/// In protocol 4, a dotted name is a path through attributes; here it is a single name, and unknown.
#[test]
fn no_path_leads_through_a_known_module_or_name() {
    let paths = [
        ("torch", "os.system"),
        ("torch", "serialization.os.system"),
        ("torch._utils", "_rebuild_tensor_v2.__globals__"),
        ("collections", "OrderedDict.__reduce__"),
        ("collections", "_sys.modules"),
        ("torch.FloatStorage", "__init__"),
        ("torch", ""),
        ("", "OrderedDict"),
        ("collections ", "OrderedDict"),
        ("torch", "floatStorage"),
    ];
    for (module, name) in paths {
        let error = value_refusal(&dict(&[("a", good_tensor()), ("b", stack_global(module, name))]));
        assert!(error.contains(&format!("the pickle references {module}.{name}: only")), "{error}");
    }
    let long = "x".repeat(1 << 20);
    assert!(value_refusal(&stack_global(&long, &long)).len() < 1000);
}

#[test]
fn opcodes_that_make_or_fetch_objects_are_refused_by_name() {
    let cases: [(&[u8], &str); 16] = [
        (b"(X\x02\0\0\0idios\nsystem\n", "the opcode INST"),
        (b"(cos\nsystem\nX\x02\0\0\0ido", "the pickle references os.system"),
        (b"(ccollections\nOrderedDict\no", "the opcode OBJ"),
        (b"ccollections\nOrderedDict\n)\x81", "the opcode NEWOBJ is"),
        (b"ccollections\nOrderedDict\n)}\x92", "the opcode NEWOBJ_EX"),
        (b"\x82\x01", "the opcode EXT1"),
        (b"\x83\x01\0", "the opcode EXT2"),
        (b"\x84\x01\0\0\0", "the opcode EXT4"),
        (b"P('storage', <class 'torch.FloatStorage'>, '0', 'cpu', 2)\n", "the opcode PERSID"),
        (b"X\x06\0\0\0moduleQ", "it has a persistent id that is not a storage"),
        (b"(X\x06\0\0\0modulecos\nsystem\ntQ", "the pickle references os.system"),
        (b"(X\x06\0\0\0moduleNNNtQ", "it has a persistent id that is not a storage"),
        (b"c__main__\nx\n", "the pickle references __main__.x"),
        (b"\x97", "the opcode NEXT_BUFFER"),
        (b"S'a'\n", "the opcode STRING"),
        (b"\xff", "byte 0xff is not an opcode"),
    ];
    for (value, reason) in cases {
        let error = value_refusal(value);
        assert!(error.contains(reason), "{error}\nexpected: {reason}");
    }
}

#[test]
fn only_known_constructors_are_called_and_only_as_pytorch_does() {
    let ordered = || global("collections", "OrderedDict");
    let rebuild = |name| global("torch._utils", name);
    let hooks = || call(ordered(), &[]);
    let parts = || [storage("FloatStorage", "0", 2), int(0), tuple(&[int(2)]), tuple(&[int(1)])];
    let negated = [&parts()[..], &[b"\x89".to_vec(), hooks(), dict(&[("neg", b"\x88".to_vec())])]].concat();
    let reduce_list = [ordered(), list(&[]), b"R".to_vec()].concat();
    let cases = [
        (call(call(ordered(), &[]), &[]), "it calls a dict, but only known constructors may be called"),
        (call(good_tensor(), &[]), "it calls a tensor, but"),
        (call(text("os.system"), &[text("id")]), "it calls a string, but"),
        (
            call(global("torch", "FloatStorage"), &[int(1 << 40)]),
            "calls torch.FloatStorage with arguments that",
        ),
        (
            call(global("torch.storage", "UntypedStorage"), &[int(8)]),
            "calls torch.storage.UntypedStorage with",
        ),
        (call(global("torch", "float32"), &[]), "it calls torch.float32 with arguments that"),
        (call(global("torch", "Size"), &[int(2)]), "it calls torch.Size with arguments that"),
        (call(ordered(), &[int(2)]), "it calls collections.OrderedDict with arguments that"),
        (call(ordered(), &[list(&[int(2)])]), "it creates an OrderedDict from items that are not pairs"),
        (reduce_list, "it calls collections.OrderedDict with a list as arguments"),
        (
            call(rebuild("_rebuild_tensor"), &parts()[..3]),
            "it calls torch._utils._rebuild_tensor with arguments",
        ),
        (
            call(rebuild("_rebuild_tensor_v2"), &parts()),
            "it calls torch._utils._rebuild_tensor_v2 with arguments",
        ),
        (
            call(rebuild("_rebuild_tensor_v2"), &negated),
            "it calls torch._utils._rebuild_tensor_v2 with arguments",
        ),
        (
            call(rebuild("_rebuild_tensor_v3"), &negated),
            "it calls torch._utils._rebuild_tensor_v3 with arguments",
        ),
        (
            call(rebuild("_rebuild_parameter"), &[int(1), b"\x88".to_vec(), hooks()]),
            "_rebuild_parameter with arguments",
        ),
        ([good_tensor(), dict(&[]), b"b".to_vec()].concat(), "it sets the state of a tensor to a dict"),
        (
            [global("torch", "FloatStorage"), dict(&[]), b"b".to_vec()].concat(),
            "the state of torch.FloatStorage",
        ),
        ([dict(&[]), tuple(&[]), b"b".to_vec()].concat(), "it sets the state of a dict to a tuple"),
        ([tuple(&[]), int(1), b"a".to_vec()].concat(), "it appends to a tuple"),
        ([good_tensor(), int(1), int(2), b"s".to_vec()].concat(), "it sets an entry of a tensor"),
    ];
    for (value, reason) in cases {
        for value in [value.clone(), dict(&[("a", good_tensor()), ("b", value)])] {
            let error = value_refusal(&value);
            assert!(error.contains(reason), "{error}\nexpected: {reason}");
        }
    }
}

/// A dict with a tensor "a", and `value` as "b".
fn beside(value: &[u8]) -> Vec<u8> {
    dict(&[("a", good_tensor()), ("b", value.to_vec())])
}

#[test]
fn knots_and_bombs_of_shared_values_do_no_harm() {
    // A list and a dict that contain themselves.
    let list_in_itself = b"]q\x01h\x01a".to_vec();
    let dict_in_itself = b"}q\x01X\x01\0\0\0xh\x01s".to_vec();
    // An empty tuple, then two hundred times a pair of the previous value: 2 to the power of 200 leaves.
    let laughs = [&b")"[..], &b"2\x86".repeat(200)].concat();
    // A million nested lists.
    let deep = [b"]".repeat(1_000_000), b"a".repeat(999_999)].concat();
    for value in [list_in_itself, dict_in_itself, laughs] {
        assert!(opened(&archive(&beside(&value))).unwrap().names().eq(["a"]));
    }
    let deep = [dict(&[("a", good_tensor())]), text("b"), deep, b"s".to_vec()].concat();
    assert!(opened(&archive(&deep)).unwrap().names().eq(["a"]));
    let model_in_itself = [b"}q\x01".to_vec(), text("model"), b"h\x01s".to_vec()].concat();
    assert!(value_refusal(&model_in_itself).contains("nested more than 4 dicts deep"));
}

#[test]
fn what_would_be_too_much_is_refused_before_it_is_there() {
    let pairs = [b"](".to_vec(), b"NN\x86".repeat(10_000), b"eq\x01".to_vec()].concat();
    let copies =
        [global("collections", "OrderedDict"), b"q\x020".to_vec(), b"h\x02h\x01\x85R0".repeat(10_000)];
    let copied = [pairs, copies.concat()].concat();
    let cases: [(Vec<u8>, &str); 12] = [
        (b"N".repeat((1 << 20) + 1), "the stack has more than 1048576 values"),
        (b"(".repeat((1 << 20) + 1), "more than 1048576 marks"),
        (b"]".iter().copied().chain(b"]0".repeat(1 << 21)).collect(), "it creates more than 4194304 values"),
        (
            b"N".iter().copied().chain(b"\x94".repeat(1 << 22)).collect(),
            "it creates more than 4194304 values",
        ),
        (copied, "it creates more than 4194304 values"),
        (b"\x8b\xff\xff\xff\xff".to_vec(), "an integer of 4294967295 bytes"),
        (b"\x8a\x11aaaaaaaaaaaaaaaaa".to_vec(), "an integer of 17 bytes"),
        (b"X\xff\xff\xff\xffabc".to_vec(), "truncated: expected 4294967295 bytes"),
        (b"T\xff\xff\xff\xffabc".to_vec(), "truncated: expected 4294967295 bytes"),
        (
            b"\x95\xff\xff\xff\xff\xff\xff\xff\xffN".to_vec(),
            "truncated: a frame of 18446744073709551615 bytes",
        ),
        (b"\x95\x0a\0\0\0\0\0\0\0N\x95\0\0\0\0\0\0\0\0".to_vec(), "a frame begins inside a frame"),
        ([b"c".to_vec(), b"x".repeat(5000), b"\ny\n".to_vec()].concat(), "no line ends within 1024 bytes"),
    ];
    for (value, reason) in cases {
        let error = value_refusal(&value);
        assert!(error.contains(reason), "{error}\nexpected: {reason}");
    }
    let sparse = [b"Nr\xff\xff\xff\xff0j\xff\xff\xff\xff0".to_vec(), beside(b"N")].concat();
    assert!(opened(&archive(&sparse)).is_ok());
}

#[test]
fn a_memo_gives_back_what_it_was_given_and_nothing_else() {
    let cases: [(&[u8], &str); 6] = [
        (b"h\x05", "the memo has no entry 5"),
        (b"cos\nsystem\nq\x010h\x01X\x02\0\0\0id\x85R", "the pickle references os.system"),
        (b"X\x02\0\0\0osq\x01X\x06\0\0\0systemq\x0200h\x01h\x02\x93", "the pickle references os.system"),
        // The memo entry of an allowed constructor is overwritten by a string.
        (b"ccollections\nOrderedDict\nq\x010X\x02\0\0\0idq\x010h\x01)R", "it calls a string, but"),
        (b"(q\x01", "the stack is empty"),
        (b"\x94", "the stack is empty"),
    ];
    for (value, reason) in cases {
        let error = value_refusal(value);
        assert!(error.contains(reason), "{error}\nexpected: {reason}");
    }
}

/// Every pickle of the stream container obeys these rules.
#[test]
fn every_pickle_of_a_stream_is_held_to_the_same() {
    let payload = pickle(&call(global("os", "system"), &[text("id")]));
    let magic = pickle(&[&b"\x8a\x0a"[..], b"\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"].concat());
    let protocol = pickle(&int(1001));
    let system = pickle(&dict(&[("little_endian", b"\x88".to_vec())]));
    let parts = [magic, protocol, system, pickle(&beside(b"N"))];
    for at in 0..=parts.len() {
        let error = refusal(&[&parts[..at].concat()[..], &payload].concat());
        assert!(error.contains("the pickle references os.system: only"), "{error}");
    }
}
