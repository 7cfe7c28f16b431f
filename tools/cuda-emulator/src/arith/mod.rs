//! Arithmetic of instructions on the 32 lanes of a warp at once. Tables map an opcode with its modifiers to
//! a function whose loop over lanes is compiled for just that form.
//!
//! Invariant: functions are total. Lanes that an instruction's guard excludes hold anything, and are
//! computed as well.

pub(crate) mod approx;
pub(crate) mod convert;
pub(crate) mod double;
pub(crate) mod half;
pub(crate) mod int;
pub(crate) mod long;
pub(crate) mod rounding;
pub(crate) mod single;

/// A 32-bit value of each lane.
pub(crate) type Plane = [u32; 32];

/// A 64-bit value of each lane.
pub(crate) type Wide = [u64; 32];

/// An operation on values of up to 32 bits: sources and result.
pub(crate) type NarrowFn = fn(&[&Plane; 4], &mut Plane);

/// An operation with values of 64 bits: sources and result.
pub(crate) type WideFn = fn(&[Wide; 4], &mut Wide);

/// A comparison of values of up to 32 bits: bit `l` is the result of lane `l`.
pub(crate) type NarrowTest = fn(&Plane, &Plane) -> u32;

/// A comparison of values of 64 bits.
pub(crate) type WideTest = fn(&Wide, &Wide) -> u32;

/// Makes a [`NarrowFn`] of an expression over up to four `u32`.
macro_rules! narrow {
    (|$a:ident| $e:expr) => {{
        fn go(s: &[&$crate::arith::Plane; 4], o: &mut $crate::arith::Plane) {
            for l in 0..32 {
                let $a = s[0][l];
                o[l] = $e;
            }
        }
        go as $crate::arith::NarrowFn
    }};
    (|$a:ident, $b:ident| $e:expr) => {{
        fn go(s: &[&$crate::arith::Plane; 4], o: &mut $crate::arith::Plane) {
            for l in 0..32 {
                let ($a, $b) = (s[0][l], s[1][l]);
                o[l] = $e;
            }
        }
        go as $crate::arith::NarrowFn
    }};
    (|$a:ident, $b:ident, $c:ident| $e:expr) => {{
        fn go(s: &[&$crate::arith::Plane; 4], o: &mut $crate::arith::Plane) {
            for l in 0..32 {
                let ($a, $b, $c) = (s[0][l], s[1][l], s[2][l]);
                o[l] = $e;
            }
        }
        go as $crate::arith::NarrowFn
    }};
    (|$a:ident, $b:ident, $c:ident, $d:ident| $e:expr) => {{
        fn go(s: &[&$crate::arith::Plane; 4], o: &mut $crate::arith::Plane) {
            for l in 0..32 {
                let ($a, $b, $c, $d) = (s[0][l], s[1][l], s[2][l], s[3][l]);
                o[l] = $e;
            }
        }
        go as $crate::arith::NarrowFn
    }};
}

/// Makes a [`WideFn`] of an expression over up to four `u64`.
macro_rules! wide {
    (|$a:ident| $e:expr) => {
        wide!(|$a, _b, _c, _d| $e)
    };
    (|$a:ident, $b:ident| $e:expr) => {
        wide!(|$a, $b, _c, _d| $e)
    };
    (|$a:ident, $b:ident, $c:ident| $e:expr) => {
        wide!(|$a, $b, $c, _d| $e)
    };
    (|$a:ident, $b:ident, $c:ident, $d:ident| $e:expr) => {{
        fn go(s: &[$crate::arith::Wide; 4], o: &mut $crate::arith::Wide) {
            for l in 0..32 {
                let ($a, $b, $c, $d) = (s[0][l], s[1][l], s[2][l], s[3][l]);
                o[l] = $e;
            }
        }
        go as $crate::arith::WideFn
    }};
}

/// Makes a [`NarrowTest`] of a condition over two `u32`.
macro_rules! test {
    (|$a:ident, $b:ident| $e:expr) => {{
        fn go(a: &$crate::arith::Plane, b: &$crate::arith::Plane) -> u32 {
            let mut bits = [0u32; 32];
            for l in 0..32 {
                let ($a, $b) = (a[l], b[l]);
                bits[l] = u32::from($e).wrapping_neg() & $crate::arith::LANE_BITS[l];
            }
            bits.iter().fold(0, |all, bit| all | bit)
        }
        go as $crate::arith::NarrowTest
    }};
}

/// Makes a [`WideTest`] of a condition over two `u64`.
macro_rules! wide_test {
    (|$a:ident, $b:ident| $e:expr) => {{
        fn go(a: &$crate::arith::Wide, b: &$crate::arith::Wide) -> u32 {
            let mut bits = 0;
            for l in 0..32 {
                let ($a, $b) = (a[l], b[l]);
                bits |= u32::from($e) << l;
            }
            bits
        }
        go as $crate::arith::WideTest
    }};
}

pub(crate) use {narrow, test, wide, wide_test};

/// The bit of each lane.
pub(crate) const LANE_BITS: Plane = {
    let mut bits = [0; 32];
    let mut lane = 0;
    while lane < 32 {
        bits[lane] = 1 << lane;
        lane += 1;
    }
    bits
};

/// A relation of two values (PTX ISA, 9.3.1 and 9.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Relation {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    /// The unordered forms also hold if an operand is NaN.
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    /// Both operands are numbers.
    Num,
    /// An operand is NaN.
    Nan,
}

impl Relation {
    /// The relation of that name. `lo`, `ls`, `hi` and `hs` are those of unsigned integers.
    pub(crate) fn named(name: &str) -> Option<Relation> {
        Some(match name {
            "eq" => Relation::Eq,
            "ne" => Relation::Ne,
            "lt" | "lo" => Relation::Lt,
            "le" | "ls" => Relation::Le,
            "gt" | "hi" => Relation::Gt,
            "ge" | "hs" => Relation::Ge,
            "equ" => Relation::Equ,
            "neu" => Relation::Neu,
            "ltu" => Relation::Ltu,
            "leu" => Relation::Leu,
            "gtu" => Relation::Gtu,
            "geu" => Relation::Geu,
            "num" => Relation::Num,
            "nan" => Relation::Nan,
            _ => return None,
        })
    }

    /// Whether the relation holds for an ordering, which is none if an operand is NaN.
    #[inline(always)]
    pub(crate) fn holds(self, order: Option<std::cmp::Ordering>) -> bool {
        use std::cmp::Ordering::{Equal, Greater, Less};
        match self {
            Relation::Eq => order == Some(Equal),
            Relation::Ne => matches!(order, Some(Less | Greater)),
            Relation::Lt => order == Some(Less),
            Relation::Le => matches!(order, Some(Less | Equal)),
            Relation::Gt => order == Some(Greater),
            Relation::Ge => matches!(order, Some(Greater | Equal)),
            Relation::Equ => matches!(order, None | Some(Equal)),
            Relation::Neu => order != Some(Equal),
            Relation::Ltu => matches!(order, None | Some(Less)),
            Relation::Leu => order != Some(Greater),
            Relation::Gtu => matches!(order, None | Some(Greater)),
            Relation::Geu => order != Some(Less),
            Relation::Num => order.is_some(),
            Relation::Nan => order.is_none(),
        }
    }
}

/// Picks the instance of a comparison that is compiled for just one relation.
macro_rules! by_relation {
    ($relation:expr, $make:ident, |$a:ident, $b:ident| $order:expr) => {{
        use $crate::arith::Relation::*;
        match $relation {
            Eq => $make!(|$a, $b| Eq.holds($order)),
            Ne => $make!(|$a, $b| Ne.holds($order)),
            Lt => $make!(|$a, $b| Lt.holds($order)),
            Le => $make!(|$a, $b| Le.holds($order)),
            Gt => $make!(|$a, $b| Gt.holds($order)),
            Ge => $make!(|$a, $b| Ge.holds($order)),
            Equ => $make!(|$a, $b| Equ.holds($order)),
            Neu => $make!(|$a, $b| Neu.holds($order)),
            Ltu => $make!(|$a, $b| Ltu.holds($order)),
            Leu => $make!(|$a, $b| Leu.holds($order)),
            Gtu => $make!(|$a, $b| Gtu.holds($order)),
            Geu => $make!(|$a, $b| Geu.holds($order)),
            Num => $make!(|$a, $b| Num.holds($order)),
            Nan => $make!(|$a, $b| Nan.holds($order)),
        }
    }};
}

pub(crate) use by_relation;
