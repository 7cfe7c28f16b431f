//! A GGUF writer and parser for tests, independent of the program's code: for other versions, changed
//! entries, and other tensor layouts.

/// A parsed file of version 3.
#[derive(Clone)]
pub struct Written {
    /// Key, type, and the value's bytes as version 3 has them.
    pub entries: Vec<(String, u32, Vec<u8>)>,
    pub tensors: Vec<Tensor>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub name: String,
    /// Dimensions, innermost first.
    dims: Vec<u64>,
    ty: u32,
    bytes: Vec<u8>,
}

pub const U8: u32 = 0;
pub const U32: u32 = 4;
pub const I32: u32 = 5;
pub const F32: u32 = 6;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// Size in bytes of the values of a type, by type id; none for strings and arrays.
fn width(ty: u32) -> Option<usize> {
    [1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8].get(ty as usize).copied().filter(|width| *width > 0)
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().expect("four bytes"))
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().expect("eight bytes"))
    }

    fn string(&mut self) -> String {
        let len = self.u64() as usize;
        String::from_utf8(self.take(len).to_vec()).expect("the fixture's strings are text")
    }

    /// Returns the bytes of a value.
    fn value(&mut self, ty: u32) -> Vec<u8> {
        let (all, before) = (self.0, self.0.len());
        match (ty, width(ty)) {
            (_, Some(width)) => drop(self.take(width)),
            (STRING, _) => drop(self.string()),
            _ => {
                let (elements, len) = (self.u32(), self.u64());
                (0..len).for_each(|_| drop(self.value(elements)));
            }
        }
        all[..before - self.0.len()].to_vec()
    }
}

impl Tensor {
    /// Creates a tensor of `shape`, outermost first, with this type id.
    pub fn new(name: &str, shape: &[usize], ty: u32, bytes: Vec<u8>) -> Tensor {
        let dims: Vec<u64> = shape.iter().rev().map(|dim| *dim as u64).collect();
        assert_eq!(bytes.len(), bytes_of(&dims, ty), "{name}");
        Tensor { name: name.to_owned(), dims, ty, bytes }
    }

    /// Converts a matrix of one row to a vector.
    pub fn drop_outermost(&mut self) {
        assert_eq!(self.dims.pop(), Some(1));
    }
}

impl Written {
    /// Creates a file without tensors, with the architecture key.
    pub fn new(architecture: &str) -> Written {
        let mut written = Written { entries: Vec::new(), tensors: Vec::new() };
        written.set_string("general.architecture", architecture);
        written
    }

    /// Parses a file of version 3 with an alignment of 32.
    pub fn read(file: &[u8]) -> Written {
        let mut reader = Reader(file);
        assert_eq!(reader.take(8), b"GGUF\x03\0\0\0");
        let (tensors, entries) = (reader.u64(), reader.u64());
        let entry = |reader: &mut Reader| {
            let (key, ty) = (reader.string(), reader.u32());
            (key, ty, reader.value(ty))
        };
        let entries: Vec<_> = (0..entries).map(|_| entry(&mut reader)).collect();
        let described = |reader: &mut Reader| {
            let (name, dimensions) = (reader.string(), reader.u32());
            let dims: Vec<u64> = (0..dimensions).map(|_| reader.u64()).collect();
            (name, dims, reader.u32(), reader.u64() as usize)
        };
        let described: Vec<_> = (0..tensors).map(|_| described(&mut reader)).collect();
        let start = (file.len() - reader.0.len()).next_multiple_of(32);
        let tensor = |(name, dims, ty, offset): (String, Vec<u64>, u32, usize)| {
            let bytes = file[start + offset..][..bytes_of(&dims, ty)].to_vec();
            Tensor { name, dims, ty, bytes }
        };
        Written { entries, tensors: described.into_iter().map(tensor).collect() }
    }

    /// Sets or adds an entry with a value encoded as in version 3.
    pub fn set(&mut self, key: &str, ty: u32, value: Vec<u8>) {
        self.entries.retain(|(known, ..)| known != key);
        self.entries.push((key.to_owned(), ty, value));
    }

    pub fn set_u32(&mut self, key: &str, value: u32) {
        self.set(key, U32, value.to_le_bytes().to_vec());
    }

    pub fn set_f32(&mut self, key: &str, value: f32) {
        self.set(key, F32, value.to_le_bytes().to_vec());
    }

    pub fn set_bool(&mut self, key: &str, value: bool) {
        self.set(key, BOOL, vec![u8::from(value)]);
    }

    pub fn set_string(&mut self, key: &str, value: &str) {
        self.set(key, STRING, text(value));
    }

    /// Sets a key to a list: the type of its values, and the bytes of each.
    pub fn set_list(&mut self, key: &str, ty: u32, values: &[Vec<u8>]) {
        let head = [&ty.to_le_bytes()[..], &(values.len() as u64).to_le_bytes()].concat();
        self.set(key, ARRAY, [head, values.concat()].concat());
    }

    pub fn set_strings<'a>(&mut self, key: &str, values: impl IntoIterator<Item = &'a str>) {
        self.set_list(key, STRING, &values.into_iter().map(text).collect::<Vec<_>>());
    }

    pub fn unset(&mut self, key: &str) {
        self.entries.retain(|(known, ..)| known != key);
    }

    /// Encodes the file for a version, with the tensor data in the order given by `order` and padded to
    /// `alignment`.
    pub fn bytes(&self, version: u32, alignment: usize, order: impl Fn(usize) -> usize) -> Vec<u8> {
        let size = |bytes: &mut Vec<u8>, size: u64| match version {
            1 => bytes.extend((size as u32).to_le_bytes()),
            _ => bytes.extend(size.to_le_bytes()),
        };
        let name = |bytes: &mut Vec<u8>, name: &str| {
            size(bytes, name.len() as u64);
            bytes.extend(name.as_bytes());
        };
        let mut offsets = vec![0; self.tensors.len()];
        let mut data = Vec::new();
        for place in 0..self.tensors.len() {
            let at = order(place);
            data.resize(data.len().next_multiple_of(alignment), 0xee);
            offsets[at] = data.len() as u64;
            data.extend(&self.tensors[at].bytes);
        }
        let mut bytes = [&b"GGUF"[..], &version.to_le_bytes()].concat();
        size(&mut bytes, self.tensors.len() as u64);
        size(&mut bytes, self.entries.len() as u64);
        for (key, ty, value) in &self.entries {
            name(&mut bytes, key);
            bytes.extend(ty.to_le_bytes());
            bytes.extend(narrowed(version, *ty, &mut Reader(value)));
        }
        for (tensor, offset) in self.tensors.iter().zip(offsets) {
            name(&mut bytes, &tensor.name);
            bytes.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| size(&mut bytes, *dim));
            bytes.extend(tensor.ty.to_le_bytes());
            bytes.extend(offset.to_le_bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(alignment), 0xee);
        [bytes, data].concat()
    }
}

/// Returns the bytes of a text, prefixed with its length.
fn text(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes()[..], value.as_bytes()].concat()
}

/// Returns the size in bytes of a tensor of a type used in fixtures.
fn bytes_of(dims: &[u64], ty: u32) -> usize {
    let numbers = dims.iter().product::<u64>() as usize;
    match ty {
        0 => 4 * numbers,
        1 | 30 => 2 * numbers,
        2 => numbers / 32 * 18,
        8 => numbers / 32 * 34,
        other => unreachable!("no fixture has type {other}"),
    }
}

/// Encodes a value for a version: lengths have 32 bits in version 1.
fn narrowed(version: u32, ty: u32, value: &mut Reader) -> Vec<u8> {
    if version > 1 {
        return value.0.to_vec();
    }
    match (ty, width(ty)) {
        (_, Some(width)) => value.take(width).to_vec(),
        (ARRAY, _) => {
            let (elements, len) = (value.u32(), value.u64());
            let mut bytes = [elements.to_le_bytes(), (len as u32).to_le_bytes()].concat();
            (0..len).for_each(|_| bytes.extend(narrowed(version, elements, value)));
            bytes
        }
        _ => {
            let text = value.string();
            [&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
        }
    }
}
