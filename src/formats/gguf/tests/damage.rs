//! Rejection of invalid files.

use super::*;

#[test]
fn other_formats_are_refused_by_name() {
    let whole = GgufBuilder::sample(3).bytes();
    let begins = |bytes: &[u8]| [bytes, &whole[bytes.len()..]].concat();
    for (bytes, reason) in [
        (begins(b"lmgg"), "a file in the obsolete ggml format: convert the model to GGUF"),
        (begins(b"fmgg"), "a file in the obsolete ggmf format"),
        (begins(b"tjgg"), "a file in the obsolete ggjt format"),
        (begins(b"\x80\0\0\0"), "not a GGUF file: it begins with \\x80\\x00\\x00\\x00"),
        (begins(b"GGUF\0\0\0\x03"), "a big-endian GGUF file"),
        (begins(b"GGUF\0\0\0\x01"), "a big-endian GGUF file"),
        (begins(b"GGUF\0\0\0\0"), "GGUF version 0 is not supported"),
        (begins(b"GGUF\x04\0\0\0"), "GGUF version 4 is not supported"),
    ] {
        let error = refusal(&bytes);
        assert!(error.contains(reason), "{error}\nexpected: {reason}");
    }
}

/// Counts and lengths far beyond the file's size are rejected before memory is allocated for them.
#[test]
fn hostile_counts_are_refused() {
    for version in 1..=3 {
        let whole = GgufBuilder::sample(version);
        let huge = if version == 1 { u64::from(u32::MAX) } else { u64::MAX };
        let patched = |at: usize, value: u64| {
            let (mut bytes, value) = (whole.bytes(), size(version, value));
            bytes[at..at + value.len()].copy_from_slice(&value);
            bytes
        };
        let width = size(version, 0).len();
        let entry = |value: Vec<u8>| whole.clone().with(|made| made.entries.push(("h", value)));
        for (bytes, reason) in [
            (patched(8, huge), "tensors are declared at offset 8"),
            (patched(8 + width, huge), "metadata entries are declared at offset"),
            (patched(8 + 2 * width, huge), "the metadata key at offset"),
            (patched(8 + width, 18), "truncated"),
            (entry(tagged(8, &size(version, huge))), "key 'h': truncated"),
            (entry(array(version, 8, huge / 16, &[])), "key 'h': truncated"),
            (entry(array(version, 12, huge / 8, &[])), "key 'h': truncated"),
            (entry(array(version, 9, huge / 16, &[])), "key 'h': truncated"),
            (entry(nested(version, 5)), "key 'h': arrays are nested more than 4 deep"),
            (entry(nested(version, 300)), "key 'h': arrays are nested"),
            (entry(tagged(13, &[0])), "key 'h': unknown value type 13"),
            (entry(tagged(7, &[2])), "key 'h': 2 is neither true (1) nor false (0)"),
            (entry(array(version, 7, 1, &[9])), "key 'h': 9 is neither"),
        ] {
            let error = refusal(&bytes);
            assert!(error.contains(reason), "version {version}: {error}\nexpected: {reason}");
        }
        assert!(GgufHeader::read(&entry(nested(version, 4))).is_ok());
    }
}

#[test]
fn tensors_that_cannot_be_are_refused_by_name() {
    let made = |edit: fn(&mut GgufBuilder)| GgufBuilder::sample(3).with(edit);
    let alignment =
        |value: Vec<u8>| GgufBuilder::sample(3).with(|made| made.entries.push(("general.alignment", value)));
    for (bytes, reason) in [
        (made(|m| m.tensors[1].0 = "m"), "tensor 'm': it is described twice"),
        (made(|m| m.entries[1].0 = "a.i8"), "key 'a.i8': it appears twice"),
        (made(|m| m.tensors[0].1 = vec![1; 5]), "tensor 'm': it has 5 dimensions, more than 4"),
        (
            made(|m| m.tensors[0].1 = vec![u64::MAX, 2]),
            "tensor 'm': shape [2, 18446744073709551615] of f32 is too",
        ),
        (made(|m| m.tensors[0].1 = vec![1 << 62]), "tensor 'm': shape"),
        (made(|m| m.tensors[0].1 = vec![3, 0]), "tensor 'm': shape [0, 3] has no elements"),
        (made(|m| m.tensors[0].1 = vec![17]), "truncated: tensor 'm': 68 bytes from"),
        (
            made(|m| m.tensors[0].3 = 1 << 20),
            "truncated: tensor 'm': its offset 1048576 in the data is beyond",
        ),
        (made(|m| m.tensors[0].3 = u64::MAX - 31), "truncated: tensor 'm': its offset"),
        (made(|m| m.tensors[0].3 = 132), "tensor 'm': its offset 132 is not a multiple of the alignment 32"),
        (made(|m| m.tensors[0].3 = 64), "inside the tensor '"),
        (made(|m| m.tensors[0].3 = 96), "tensor 'm': it begins at"),
        (
            made(|m| m.tensors[1].1 = vec![16, 2]),
            "tensor 'q': rows of 16 elements are not a whole number of q8_0",
        ),
        (
            made(|m| {
                m.tensors[1].0 = "a name of more than sixty-four bytes, which the format does not let be"
            }),
            "the tensor name",
        ),
        (alignment(tagged(4, &0u32.to_le_bytes())), "key 'general.alignment': 0 is not a power of two"),
        (alignment(tagged(4, &48u32.to_le_bytes())), "key 'general.alignment': 48 is not a power of two"),
        (
            alignment(tagged(4, &(1u32 << 31).to_le_bytes())),
            "key 'general.alignment': 2147483648 is not a power",
        ),
        (alignment(text(3, "32")), "key 'general.alignment': a string is not a non-negative integer"),
        (
            alignment(tagged(5, &(-32i32).to_le_bytes())),
            "key 'general.alignment': -32 is not a non-negative integer",
        ),
        (made(|m| (m.tensors[0].2, m.tensors[0].3) = (99, 192)), "which leaves no bytes for it"),
        (made(|m| (m.tensors[0].2, m.tensors[0].3) = (99, 64)), "which leaves no bytes for it"),
    ] {
        let error = refusal(&bytes);
        assert!(error.contains(reason), "{error}\nexpected: {reason}");
    }
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    for version in 1..=3 {
        let made = GgufBuilder::sample(version);
        let whole = made.bytes();
        // The file is longer than its last tensor needs.
        let needed = whole.len() - (192 - 128 - 24);
        assert!(GgufHeader::read(&whole[..needed]).is_ok());
        for end in 0..needed {
            let error = format!("{:#}", GgufHeader::read(&whole[..end]).unwrap_err());
            assert!(error.contains("truncated"), "version {version}, {end}: {error}");
        }
    }
}

/// Checks that the tensors lie inside the file, without overlaps, and have the bytes their shapes need.
fn check_sound(bytes: &[u8], head: &GgufHeader) {
    let mut taken: Vec<_> = head.tensors.iter().map(|tensor| tensor.bytes.clone()).collect();
    taken.sort_by_key(|range| (range.start, range.end));
    assert!(taken.iter().all(|range| range.start <= range.end && range.end <= bytes.len()));
    assert!(taken.windows(2).all(|pair| pair[0].end <= pair[1].start));
    for tensor in &head.tensors {
        if let Dtype::Known(ty) = tensor.dtype {
            assert_eq!(elements(&tensor.shape).and_then(|n| ty.bytes(n)), Some(tensor.bytes.len()));
        }
    }
}

#[test]
fn no_random_damage_makes_it_panic_or_read_outside() {
    let folder = Scratch::new();
    let mut sound = 0;
    for round in 0..30_000u32 {
        let whole = GgufBuilder::sample(1 + round % 3).bytes();
        let mut bytes = whole.clone();
        let [first, second, value, both] = philox([round, 0, 0, 0], [5, 6]);
        for at in [first, second].into_iter().take(1 + both as usize % 2) {
            bytes[at as usize % whole.len()] = value.rotate_left(at) as u8;
        }
        let Ok(head) = GgufHeader::read(&bytes) else { continue };
        check_sound(&bytes, &head);
        sound += 1;
        // Lookups need a file on disk, so only some rounds check them.
        if round % 50 == 0
            && let Ok((_, gguf)) = Checkpoint::open_gguf(&folder.write("model.gguf", &bytes))
        {
            for key in gguf.keys() {
                let _ = (gguf.opt_str(key), gguf.opt_u32(key), gguf.opt_f32(key), gguf.opt_bool(key));
                let _ = (gguf.opt_strings(key), gguf.opt_i32s(key), gguf.opt_f32s(key));
            }
        }
    }
    assert!(sound > 1000, "too few damaged files are still valid: {sound}");
}
