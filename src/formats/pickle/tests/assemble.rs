//! Pickles and archives assembled by hand, for tests.
//!
//! Invariant: nothing is checked or derived here, so that invalid data is as easy to write as valid data.

/// `module.name`, with the opcode of the older protocols.
pub(in super::super) fn global(module: &str, name: &str) -> Vec<u8> {
    format!("c{module}\n{name}\n").into_bytes()
}

/// `module.name`, with the opcode of the newer protocols.
pub(in super::super) fn stack_global(module: &str, name: &str) -> Vec<u8> {
    [text(module), text(name), b"\x93".to_vec()].concat()
}

pub(in super::super) fn text(text: &str) -> Vec<u8> {
    [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
}

pub(in super::super) fn int(number: i128) -> Vec<u8> {
    [b"\x8a\x10", &number.to_le_bytes()[..]].concat()
}

pub(in super::super) fn tuple(items: &[Vec<u8>]) -> Vec<u8> {
    [b"(", &items.concat()[..], b"t"].concat()
}

pub(in super::super) fn list(items: &[Vec<u8>]) -> Vec<u8> {
    [b"](", &items.concat()[..], b"e"].concat()
}

pub(in super::super) fn dict(entries: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let entries: Vec<u8> =
        entries.iter().flat_map(|(key, value)| [text(key), value.clone()].concat()).collect();
    [b"}(", &entries[..], b"u"].concat()
}

pub(in super::super) fn call(callable: Vec<u8>, args: &[Vec<u8>]) -> Vec<u8> {
    [callable, tuple(args), b"R".to_vec()].concat()
}

/// A storage of `torch.CLASS`.
pub(in super::super) fn storage(class: &str, key: &str, count: i128) -> Vec<u8> {
    let id = [text("storage"), global("torch", class), text(key), text("cpu"), int(count)];
    [tuple(&id), b"Q".to_vec()].concat()
}

/// A tensor as in every state dict since PyTorch 0.4.
pub(in super::super) fn tensor(storage: Vec<u8>, offset: i128, sizes: &[i128], strides: &[i128]) -> Vec<u8> {
    let numbers = |numbers: &[i128]| tuple(&numbers.iter().map(|number| int(*number)).collect::<Vec<_>>());
    let hooks = call(global("collections", "OrderedDict"), &[]);
    let args = [storage, int(offset), numbers(sizes), numbers(strides), b"\x89".to_vec(), hooks];
    call(global("torch._utils", "_rebuild_tensor_v2"), &args)
}

/// A tensor of two F32 elements in the storage "0".
pub(in super::super) fn good_tensor() -> Vec<u8> {
    tensor(storage("FloatStorage", "0", 2), 0, &[2], &[1])
}

/// The bytes of the storage "0".
pub(in super::super) const GOOD_STORAGE: [u8; 8] = [0, 0, 128, 63, 0, 0, 0, 64];

/// A complete pickle whose result is `value`.
pub(in super::super) fn pickle(value: &[u8]) -> Vec<u8> {
    [b"\x80\x02", value, b"."].concat()
}

/// A PyTorch archive with the pickle of `value` and one valid storage.
pub(in super::super) fn archive(value: &[u8]) -> Vec<u8> {
    let [pickle, storage] =
        [Member::new("a/data.pkl", &pickle(value)), Member::new("a/data/0", &GOOD_STORAGE)];
    zip(&[pickle, storage])
}

/// A member of a zip archive; sizes and offsets are correct unless they are set.
#[derive(Clone)]
pub(in super::super) struct Member {
    pub(in super::super) name: String,
    pub(in super::super) data: Vec<u8>,
    pub(in super::super) method: u16,
    pub(in super::super) flags: u16,
    /// Name in the member's own header, if it differs from `name`.
    pub(in super::super) header_name: Option<String>,
    /// Overrides of the sizes and the offset in the directory.
    pub(in super::super) stored: Option<u32>,
    pub(in super::super) meant: Option<u32>,
    pub(in super::super) offset: Option<u32>,
}

impl Member {
    pub(in super::super) fn new(name: &str, data: &[u8]) -> Member {
        Member {
            name: name.to_owned(),
            data: data.to_vec(),
            method: 0,
            flags: 0,
            header_name: None,
            stored: None,
            meant: None,
            offset: None,
        }
    }

    fn header(&self) -> Vec<u8> {
        let name = self.header_name.as_ref().unwrap_or(&self.name);
        let size = (self.data.len() as u32).to_le_bytes();
        let head = [b"PK\x03\x04\0\0", &self.flags.to_le_bytes()[..], &self.method.to_le_bytes(), &[0; 8]];
        let sizes = [size, size].concat();
        let lengths = [(name.len() as u16).to_le_bytes(), [0; 2]].concat();
        [&head.concat()[..], &sizes, &lengths, name.as_bytes(), &self.data].concat()
    }

    fn directory_entry(&self, offset: u32) -> Vec<u8> {
        let size = self.data.len() as u32;
        let sizes = [self.stored.unwrap_or(size), self.meant.unwrap_or(size)].map(u32::to_le_bytes).concat();
        let head =
            [b"PK\x01\x02\0\0\0\0", &self.flags.to_le_bytes()[..], &self.method.to_le_bytes(), &[0; 8]];
        let lengths = [&(self.name.len() as u16).to_le_bytes()[..], &[0; 12]].concat();
        let offset = self.offset.unwrap_or(offset).to_le_bytes();
        [&head.concat()[..], &sizes, &lengths, &offset, self.name.as_bytes()].concat()
    }
}

/// A zip archive of these members, in order.
pub(in super::super) fn zip(members: &[Member]) -> Vec<u8> {
    let (mut bytes, mut directory) = (Vec::new(), Vec::new());
    for member in members {
        directory.extend(member.directory_entry(bytes.len() as u32));
        bytes.extend(member.header());
    }
    let (begin, count) = (bytes.len() as u32, (members.len() as u16).to_le_bytes());
    let size = (directory.len() as u32).to_le_bytes();
    bytes.extend(directory);
    bytes.extend([b"PK\x05\x06\0\0\0\0", &count[..], &count, &size, &begin.to_le_bytes(), &[0; 2]].concat());
    bytes
}
