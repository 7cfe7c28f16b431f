//! Damaged files.

use super::assemble::*;
use super::{content, opened, refusal};
use mainstem_kernels::random::philox;

const FILES: [&str; 4] = ["kinds/zip1.bin", "kinds/zip2.bin", "kinds/zip5.bin", "kinds/stream.bin"];

#[test]
fn files_cut_off_anywhere_or_with_anything_after_them_are_refused() {
    for file in FILES {
        let whole = content(file);
        for end in 0..whole.len() {
            assert!(opened(&whole[..end]).is_err(), "{file} cut off at {end}");
        }
        let error = refusal(&[&whole[..], b"\0"].concat());
        assert!(error.contains("oversized"), "{error}");
    }
}

/// `opened` checks the rest: every tensor lies inside the file and has the size its shape implies.
#[test]
fn no_random_damage_makes_it_panic_or_read_outside() {
    for file in FILES {
        let whole = content(file);
        let mut refused = 0;
        for round in 0..2_000u32 {
            let mut bytes = whole.clone();
            let [at, value, more, second] = philox([round, 0, 0, 0], [3, 4]);
            bytes[at as usize % whole.len()] = value as u8;
            if more % 2 == 0 {
                bytes[second as usize % whole.len()] = (value >> 8) as u8;
            }
            refused += u32::from(opened(&bytes).is_err());
        }
        assert!((100..1_900).contains(&refused), "{file}: {refused} of 2000 are refused");
    }
}

/// The archive of a valid model with one edited member.
fn edited(name: &str, edit: impl FnOnce(&mut Member)) -> Vec<u8> {
    let value = dict(&[("a", good_tensor())]);
    let mut members = [
        Member::new("a/data.pkl", &pickle(&value)),
        Member::new("a/byteorder", b"little"),
        Member::new("a/data/0", &GOOD_STORAGE),
        Member::new("a/version", b"3\n"),
    ];
    edit(members.iter_mut().find(|member| member.name == name).unwrap());
    zip(&members)
}

#[test]
fn an_archive_that_is_not_as_pytorch_writes_it_is_refused_by_member() {
    assert!(opened(&edited("a/version", |_| ())).is_ok());
    let storage = |edit: fn(&mut Member)| edited("a/data/0", edit);
    let renamed = |old: &str, new: &str| edited(old, |member| member.name = new.to_owned());
    let cases = [
        (storage(|it| it.method = 8), "member 'a/data/0': it is compressed (8 (DEFLATE))"),
        (storage(|it| it.method = 99), "member 'a/data/0': it is compressed (99"),
        (edited("a/data.pkl", |it| it.method = 8), "member 'a/data.pkl': it is compressed"),
        (edited("a/version", |it| it.method = 12), "member 'a/version': it is compressed"),
        (storage(|it| it.flags = 1), "member 'a/data/0': it is encrypted"),
        (
            storage(|it| it.stored = Some(6)),
            "member 'a/data/0': it is stored in 6 bytes, but has a size of 8",
        ),
        (storage(|it| it.meant = Some(u32::MAX - 1)), "member 'a/data/0': it is stored in 8 bytes"),
        (storage(|it| (it.stored, it.meant) = (Some(1 << 30), Some(1 << 30))), "'a/data/0': truncated"),
        (storage(|it| it.offset = Some(1 << 30)), "member 'a/data/0': truncated, or its header"),
        (storage(|it| it.offset = Some(7)), "member 'a/data/0': truncated, or its header"),
        (storage(|it| it.offset = Some(0)), "its header and the directory disagree about its name"),
        (storage(|it| it.header_name = Some("a/data/1".to_owned())), "its header and the directory disagree"),
        (storage(|it| (it.stored, it.meant) = (Some(50), Some(50))), "beyond the start of the next at"),
        (
            storage(|it| (it.stored, it.meant) = (Some(4), Some(4))),
            "storage '0' has 4 bytes in the file, but 8",
        ),
        (renamed("a/version", "a/data/0"), "member 'a/data/0': it appears twice"),
        (renamed("a/version", "b/data.pkl"), "it has both a/data.pkl and b/data.pkl"),
        (renamed("a/data.pkl", "a/b/data.pkl"), "a zip archive without a data.pkl"),
        (renamed("a/data/0", "b/data/0"), "its storage '0' is not in the file"),
        (edited("a/byteorder", |it| it.data = b"big".to_vec()), "a/byteorder is not 'little'"),
        (edited("a/data.pkl", |it| it.data.push(b'N')), "its pickle ends at"),
    ];
    for (bytes, reason) in cases {
        let error = refusal(&bytes);
        assert!(error.contains(reason), "{error}\nexpected: {reason}");
    }
}

#[test]
fn other_files_of_the_same_name_are_distinguished() {
    let mut tar = vec![0; 1024];
    tar[257..262].copy_from_slice(b"ustar");
    let cases = [
        (tar, "a tar archive: this old PyTorch format is not supported"),
        (zip(&[Member::new("word/document.xml", b"<a/>")]), "a zip archive without a data.pkl"),
        (pickle(&dict(&[("a", int(1))])), "not a PyTorch checkpoint: neither a zip archive nor a stream"),
        (b"version https://git-lfs.github.com/spec/v1\n".to_vec(), "byte 0x76 is not an opcode"),
        (Vec::new(), "truncated"),
    ];
    for (bytes, reason) in cases {
        let error = refusal(&bytes);
        assert!(error.contains(reason), "{error}\nexpected: {reason}");
    }
}

/// A stream with one tensor; `edit` changes its parts.
fn stream(edit: impl FnOnce(&mut [Vec<u8>; 6])) -> Vec<u8> {
    let view = tuple(&[text("1"), int(1), int(2)]);
    let id = [text("storage"), global("torch", "FloatStorage"), text("0"), text("cpu"), int(4), view];
    let seen = [tuple(&id), b"Q".to_vec()].concat();
    let mut parts = [
        pickle(&int(0x1950_a86a_20f9_469c_fc6c)),
        pickle(&int(1001)),
        pickle(&dict(&[("protocol_version", int(1001)), ("little_endian", b"\x88".to_vec())])),
        pickle(&dict(&[("a", tensor(seen, 0, &[2], &[1]))])),
        pickle(&list(&[text("0")])),
        [&4u64.to_le_bytes()[..], &[1.0f32, 2.0, 3.0, 4.0].map(f32::to_le_bytes).concat()].concat(),
    ];
    edit(&mut parts);
    parts.concat()
}

#[test]
fn a_streams_views_are_parts_of_its_storages() {
    let checkpoint = opened(&stream(|_| ())).unwrap();
    assert_eq!(*checkpoint.tensor("a").unwrap().bytes(), [2.0f32, 3.0].map(f32::to_le_bytes).concat());
}

#[test]
fn a_stream_that_does_not_fit_together_is_refused() {
    let little = |value: &[u8]| pickle(&dict(&[("little_endian", value.to_vec())]));
    let view = |offset, count| {
        let view = tuple(&[text("1"), int(offset), int(count)]);
        let id = [text("storage"), global("torch", "FloatStorage"), text("0"), text("cpu"), int(4), view];
        pickle(&dict(&[("a", tensor([tuple(&id), b"Q".to_vec()].concat(), 0, &[2], &[1]))]))
    };
    let keys = |keys: &[&str]| pickle(&list(&keys.iter().map(|key| text(key)).collect::<Vec<_>>()));
    let cases = [
        (stream(|it| it[0] = pickle(&int(7))), "neither a zip archive nor a stream"),
        (stream(|it| it[1] = pickle(&int(1000))), "the stream's protocol is not 1001"),
        (stream(|it| it[2] = little(b"\x89")), "does not declare its byte order as little-endian"),
        (stream(|it| it[2] = pickle(&int(1))), "does not declare its byte order as little-endian"),
        (
            stream(|it| it[3] = view(3, 2)),
            "storage '0': a view of 2 elements from element 3 exceeds its 16 bytes",
        ),
        (stream(|it| it[3] = view(i128::from(u64::MAX), 1)), "storage '0': a view of 1 elements from"),
        (stream(|it| it[3] = view(-1, 2)), "-1 is not a valid size"),
        (stream(|it| it[3] = view(1, 1)), "exceeds the 4 bytes of storage '0'"),
        (stream(|it| it[4] = keys(&["1"])), "storage '1': the object does not use it"),
        (stream(|it| it[4] = keys(&[])), "oversized: the last storage ends at byte"),
        (stream(|it| it[4] = keys(&["0", "0"])), "truncated"),
        (stream(|it| it[4] = pickle(&list(&[int(0)]))), "an integer is used as a storage key"),
        (stream(|it| it[4] = pickle(&text("0"))), "expected the list of storage keys, found a string"),
        (stream(|it| it[5][0] = 5), "truncated: storage '0' has 5 elements"),
        (stream(|it| it[5][..8].fill(0xff)), "truncated: storage '0' has 18446744073709551615 elements"),
        (stream(|it| it[5] = vec![0; 8]), "its storage '0' has 0 bytes in the file, but 16 in the pickle"),
    ];
    for (bytes, reason) in cases {
        let error = refusal(&bytes);
        assert!(error.contains(reason), "{error}\nexpected: {reason}");
    }
    let twice = stream(|it| {
        it[4] = keys(&["0", "0"]);
        it[5] = it[5].repeat(2);
    });
    assert!(refusal(&twice).contains("storage '0': it appears twice"));
}
