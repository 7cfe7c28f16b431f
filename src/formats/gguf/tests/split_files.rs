//! Models split into several files, and the detection of GGUF files.

use super::*;

/// Creates a model of three files with one tensor each.
fn split(edit: impl Fn(usize, &mut GgufBuilder)) -> Scratch {
    let folder = Scratch::new();
    for (number, name) in ["x", "y", "z"].into_iter().enumerate() {
        let mut made = GgufBuilder {
            version: 3,
            entries: vec![
                ("split.no", tagged(2, &(number as u16).to_le_bytes())),
                ("split.count", tagged(2, &3u16.to_le_bytes())),
                ("split.tensors.count", tagged(5, &3i32.to_le_bytes())),
            ],
            tensors: vec![(name, vec![2], 1, 0)],
            alignment: 32,
            data: name.repeat(4).into_bytes(),
        };
        if number == 0 {
            made.entries.push(("general.architecture", text(3, "llama")));
        }
        edit(number, &mut made);
        folder.write(&format!("m-{:05}-of-00003.gguf", number + 1), &made.bytes());
    }
    folder
}

#[test]
fn a_model_in_several_files_is_one_whichever_is_named() {
    let folder = split(|_, _| {});
    for number in 1..=3 {
        let path = folder.path().join(format!("m-0000{number}-of-00003.gguf"));
        let (checkpoint, gguf) = Checkpoint::open_gguf(&path).unwrap();
        assert_eq!(checkpoint.files().count(), 3);
        assert_eq!(
            ["x", "y", "z"].map(|name| checkpoint.tensor(name).unwrap().bytes()),
            [b"xxxx", b"yyyy", b"zzzz"].map(|bytes| bytes.to_vec())
        );
        assert_eq!(
            (gguf.str("general.architecture").unwrap(), gguf.stem().unwrap().as_str()),
            ("llama", "m")
        );
    }
    let found = Gguf::find_in_folder(folder.path()).unwrap().unwrap();
    assert_eq!(found, folder.path().join("m-00001-of-00003.gguf"));
}

#[test]
fn files_that_do_not_belong_together_are_refused() {
    let third = |folder: &Scratch| folder.path().join("m-00003-of-00003.gguf");
    let refused = |folder: &Scratch| {
        let first = folder.path().join("m-00001-of-00003.gguf");
        format!("{:#}", Checkpoint::open_gguf(&first).unwrap_err())
    };
    let folder = split(|_, _| {});
    std::fs::remove_file(third(&folder)).unwrap();
    assert!(refused(&folder).contains("m-00003-of-00003.gguf"));

    let swapped = |number, made: &mut GgufBuilder| {
        if number == 2 {
            made.entries[0].1 = tagged(2, &1u16.to_le_bytes());
        }
    };
    let error = refused(&split(swapped));
    assert!(error.contains("m-00003-of-00003.gguf: key 'split.no': it is 1 of 3 (from 0), but"), "{error}");
    let error = refused(&split(|_, made| made.tensors[0].0 = "x"));
    assert!(error.contains("m-00002-of-00003.gguf: tensor 'x': it is also in another file"), "{error}");
    let error = refused(&split(|_, made| made.entries[2].1 = tagged(5, &4i32.to_le_bytes())));
    assert!(error.contains("key 'split.tensors.count': it is 4, but the files have 3 tensors"), "{error}");

    let folder = split(|_, _| {});
    let renamed = folder.path().join("model.gguf");
    std::fs::copy(folder.path().join("m-00001-of-00003.gguf"), &renamed).unwrap();
    let error = format!("{:#}", Checkpoint::open_gguf(&renamed).unwrap_err());
    assert!(error.contains("key 'split.count'") && error.contains("NAME-00001-of-00003.gguf"), "{error}");
    let error = format!("{:#}", Gguf::find_in_folder(folder.path()).unwrap_err());
    assert!(error.contains("name one of the files: m-00001-of-00003.gguf, model.gguf"), "{error}");
}

#[test]
fn what_is_meant_as_gguf_is_known_by_name_or_content() {
    let folder = Scratch::new();
    let file = |name, content: &[u8]| Gguf::is_gguf_path(&folder.write(name, content)).unwrap();
    assert!(file("a.gguf", b"") && file("a.bin", b"GGUF") && file("b.bin", b"tjgg\x01\0\0\0"));
    assert!(!file("c.bin", b"\x20\0\0\0") && !file("d.bin", b"GG"));
    assert!(Gguf::find_in_folder(Scratch::new().path()).unwrap().is_none());
}
