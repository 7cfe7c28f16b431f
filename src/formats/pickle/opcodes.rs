//! Decoding of a pickle's bytes to opcodes with their arguments.
//!
//! Invariant: an argument borrows from the pickle and is never longer than the rest of it. An opcode that no
//! weight checkpoint needs is rejected by name.

use super::value::Value;
use crate::formats::fixed_bytes;
use anyhow::{Context, Result, bail, ensure};

/// The newest supported pickle protocol.
const PROTOCOL_MAX: u8 = 5;

/// Maximum length of a line that is an opcode's argument, in bytes.
const LINE_BYTES_MAX: usize = 1024;

/// Maximum length of an integer, in bytes.
const INTEGER_BYTES_MAX: usize = size_of::<i128>();

/// An opcode with its argument.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Op<'a> {
    /// A framing opcode, which has no effect.
    Frame,
    Stop,
    Push(Value<'a>),
    Mark,
    Pop,
    PopMark,
    Dup,
    Put(u32),
    Memoize,
    Get(u32),
    /// A tuple of the values above the mark.
    Tuple,
    /// A tuple of this many values.
    TupleOf(usize),
    EmptyList,
    Append,
    Appends,
    EmptyDict,
    SetItem,
    SetItems,
    Global {
        module: &'a str,
        name: &'a str,
    },
    StackGlobal,
    Reduce,
    Build,
    PersistentId,
}

/// Opcodes that are rejected: they create objects, reference registered extensions, or belong to a protocol
/// or type that PyTorch does not save weights with.
const REFUSED: [(u8, &str); 24] = [
    (b'i', "INST"),
    (b'o', "OBJ"),
    (b'\x81', "NEWOBJ"),
    (b'\x92', "NEWOBJ_EX"),
    (b'\x82', "EXT1"),
    (b'\x83', "EXT2"),
    (b'\x84', "EXT4"),
    (b'P', "PERSID"),
    (b'F', "FLOAT"),
    (b'S', "STRING"),
    (b'V', "UNICODE"),
    (b'p', "PUT"),
    (b'g', "GET"),
    (b'l', "LIST"),
    (b'd', "DICT"),
    (b'B', "BINBYTES"),
    (b'C', "SHORT_BINBYTES"),
    (b'\x8e', "BINBYTES8"),
    (b'\x8d', "BINUNICODE8"),
    (b'\x96', "BYTEARRAY8"),
    (b'\x97', "NEXT_BUFFER"),
    (b'\x8f', "EMPTY_SET"),
    (b'\x90', "ADDITEMS"),
    (b'\x91', "FROZENSET"),
];

/// A decoder that yields opcodes one by one.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    /// End of the most recent frame.
    frame_end: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { bytes, at: 0, frame_end: 0 }
    }

    /// Number of bytes read so far.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// Decodes the next opcode.
    pub(super) fn next(&mut self) -> Result<Op<'a>> {
        let [code] = self.fixed()?;
        if let Some(op) = without_argument(code) {
            return Ok(op);
        }
        if let Some(value) = self.value(code)? {
            return Ok(Op::Push(value));
        }
        Ok(match code {
            b'\x80' => self.protocol()?,
            b'\x95' => self.frame()?,
            b'q' => Op::Put(u8::from_le_bytes(self.fixed()?).into()),
            b'r' => Op::Put(u32::from_le_bytes(self.fixed()?)),
            b'h' => Op::Get(u8::from_le_bytes(self.fixed()?).into()),
            b'j' => Op::Get(u32::from_le_bytes(self.fixed()?)),
            b'c' => Op::Global { module: self.line()?, name: self.line()? },
            _ => match REFUSED.iter().find(|(refused, _)| *refused == code) {
                Some((_, name)) => {
                    bail!("the opcode {name} is not allowed: weight checkpoints do not need it")
                }
                None => bail!("byte 0x{code:02x} is not an opcode"),
            },
        })
    }

    /// Decodes the argument of an opcode that pushes a value; `None` for other opcodes.
    fn value(&mut self, code: u8) -> Result<Option<Value<'a>>> {
        let value = match code {
            b'K' => Value::Int(u8::from_le_bytes(self.fixed()?).into()),
            b'M' => Value::Int(u16::from_le_bytes(self.fixed()?).into()),
            b'J' => Value::Int(i32::from_le_bytes(self.fixed()?).into()),
            b'\x8a' => self.integer(1)?,
            b'\x8b' => self.integer(4)?,
            b'I' => integer_or_bool(self.line()?)?,
            b'L' => decimal(self.line()?.trim_end_matches('L'))?,
            b'G' => {
                self.take(size_of::<f64>())?;
                Value::Float
            }
            b'U' | b'\x8c' => Value::Text(self.text(1)?),
            b'T' | b'X' => Value::Text(self.text(4)?),
            _ => return Ok(None),
        };
        Ok(Some(value))
    }

    fn protocol(&mut self) -> Result<Op<'a>> {
        let [protocol] = self.fixed()?;
        ensure!(
            protocol <= PROTOCOL_MAX,
            "pickle protocol {protocol} is not supported (at most {PROTOCOL_MAX})"
        );
        Ok(Op::Frame)
    }

    /// Decodes a frame header: the length of the frame, which matters only to readers that buffer by frame.
    fn frame(&mut self) -> Result<Op<'a>> {
        let declared = u64::from_le_bytes(self.fixed()?);
        ensure!(self.at > self.frame_end, "a frame begins inside a frame");
        let left = self.bytes.len() - self.at;
        let length = usize::try_from(declared).ok().filter(|length| *length <= left);
        let length = length
            .with_context(|| format!("truncated: a frame of {declared} bytes, but only {left} are left"))?;
        self.frame_end = self.at + length;
        Ok(Op::Frame)
    }

    /// Decodes a little-endian two's complement integer, preceded by its length in bytes, a number of
    /// `length_bytes` bytes.
    fn integer(&mut self, length_bytes: usize) -> Result<Value<'a>> {
        let length = self.length(length_bytes)?;
        ensure!(length <= INTEGER_BYTES_MAX, "an integer of {length} bytes is too large");
        let digits = self.take(length)?;
        let sign = digits.last().is_some_and(|top| *top >= 0x80);
        let mut wide = [if sign { 0xff } else { 0 }; INTEGER_BYTES_MAX];
        wide[..length].copy_from_slice(digits);
        Ok(Value::Int(i128::from_le_bytes(wide)))
    }

    fn text(&mut self, length_bytes: usize) -> Result<&'a str> {
        let length = self.length(length_bytes)?;
        std::str::from_utf8(self.take(length)?).context("a string that is not UTF-8")
    }

    /// Decodes a length of one or four bytes. Where the protocol has signed lengths, a negative one is read
    /// as a number that is too large.
    fn length(&mut self, bytes: usize) -> Result<usize> {
        let mut wide = [0; size_of::<usize>()];
        wide[..bytes].copy_from_slice(self.take(bytes)?);
        Ok(usize::from_le_bytes(wide))
    }

    /// Decodes text up to the end of the line.
    fn line(&mut self) -> Result<&'a str> {
        let rest = &self.bytes[self.at..];
        let rest = &rest[..rest.len().min(LINE_BYTES_MAX)];
        let end = rest.iter().position(|byte| *byte == b'\n');
        let end = end.with_context(|| format!("truncated: no line ends within {} bytes", rest.len()))?;
        let line = self.take(end + 1)?;
        std::str::from_utf8(&line[..end]).context("a name that is not UTF-8")
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N]> {
        let bytes = fixed_bytes(self.bytes, self.at)?;
        self.at += N;
        Ok(bytes)
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        ensure!(length <= rest.len(), "truncated: expected {length} bytes, but only {} are left", rest.len());
        self.at += length;
        Ok(&rest[..length])
    }
}

fn without_argument(code: u8) -> Option<Op<'static>> {
    Some(match code {
        b'.' => Op::Stop,
        b'(' => Op::Mark,
        b'0' => Op::Pop,
        b'1' => Op::PopMark,
        b'2' => Op::Dup,
        b'\x94' => Op::Memoize,
        b'N' => Op::Push(Value::None),
        b'\x88' => Op::Push(Value::Bool(true)),
        b'\x89' => Op::Push(Value::Bool(false)),
        b')' => Op::TupleOf(0),
        b'\x85' => Op::TupleOf(1),
        b'\x86' => Op::TupleOf(2),
        b'\x87' => Op::TupleOf(3),
        b't' => Op::Tuple,
        b']' => Op::EmptyList,
        b'a' => Op::Append,
        b'e' => Op::Appends,
        b'}' => Op::EmptyDict,
        b's' => Op::SetItem,
        b'u' => Op::SetItems,
        b'\x93' => Op::StackGlobal,
        b'R' => Op::Reduce,
        b'b' => Op::Build,
        b'Q' => Op::PersistentId,
        _ => return None,
    })
}

/// Parses an INT argument. Protocol 1 writes bools as integers of two digits.
fn integer_or_bool(line: &str) -> Result<Value<'_>> {
    match line {
        "00" => Ok(Value::Bool(false)),
        "01" => Ok(Value::Bool(true)),
        digits => decimal(digits),
    }
}

fn decimal(digits: &str) -> Result<Value<'_>> {
    digits.parse().map(Value::Int).with_context(|| format!("'{digits}' is not an integer"))
}
