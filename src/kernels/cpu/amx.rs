//! AMX: products of tiles, 16 rows by 16 outs (Intel's Advanced Matrix Extensions).
//!
//! Eight registers of 16 rows of 64 bytes. Rust has no stable names for its instructions yet, so they are written out.
//! Invariant: tiles hold something only while a [`Tiles`] or a [`CodeTiles`] lives, on its thread.

#![allow(unsafe_code)]

use std::arch::asm;
use std::arch::x86_64::{__cpuid_count, __get_cpuid_max, _xgetbv};
use std::marker::PhantomData;

/// Rows of a register, at most.
pub const ROWS: usize = 16;
/// Bytes of a register's row.
pub const ROW_BYTES: usize = 64;

/// Which registers are for sums (2, 2), for rows of the input (2), and for outs (2).
pub const SUMS: [[u8; 2]; 2] = [[0, 1], [2, 3]];
const INPUTS: [usize; 2] = [4, 5];
const WEIGHTS: [usize; 2] = [6, 7];

/// Proof that this CPU has AMX with BF16 and bytes, and AVX-512, and that the system lets this process use it.
#[derive(Clone, Copy)]
pub struct Amx(());

impl Amx {
    /// The proof, if there is one.
    pub fn new() -> Option<Amx> {
        (is_x86_feature_detected!("avx512f") && is_there() && is_granted()).then_some(Amx(()))
    }
}

/// Whether the CPU has tiles and their products of BF16 and of bytes, and the system saves them with a thread's other registers.
fn is_there() -> bool {
    const BF16: u32 = 1 << 22;
    const TILE: u32 = 1 << 24;
    const INT8: u32 = 1 << 25;
    const STATE: u64 = 0b11 << 17;
    const OSXSAVE: u32 = 1 << 27;
    // SAFETY: `cpuid` is part of x86-64; its leaf 7 is asked for only where there is one, and `xgetbv` only where the system
    // has switched it on.
    unsafe {
        let (largest, _) = __get_cpuid_max(0);
        if largest < 7 || __cpuid_count(1, 0).ecx & OSXSAVE == 0 {
            return false;
        }
        __cpuid_count(7, 0).edx & (BF16 | TILE | INT8) == BF16 | TILE | INT8 && xcr0() & STATE == STATE
    }
}

#[target_feature(enable = "xsave")]
unsafe fn xcr0() -> u64 {
    // SAFETY: the caller has found it switched on.
    unsafe { _xgetbv(0) }
}

/// Asks Linux for the right to use tiles, which it grants to a process for all its threads (`arch_prctl`, ARCH_REQ_XCOMP_PERM).
#[cfg(target_os = "linux")]
fn is_granted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const REQUEST: u64 = 0x1023;
    const TILE_DATA: u64 = 18;
    let result: i64;
    // SAFETY: the call reads and writes no memory of ours; the kernel changes rax, rcx and r11 only.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") REQUEST,
            in("rsi") TILE_DATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn is_granted() -> bool {
    false
}

/// The registers, set up on this thread until this is dropped: sums of up to 2 x 16 rows with 2 x 16 outs.
pub struct Tiles {
    /// Tiles belong to a thread.
    thread: PhantomData<*const ()>,
}

/// How large the registers are. One of no rows is not set up, and not used.
#[repr(C, align(64))]
struct Setup {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Setup {
    fn new() -> Setup {
        Setup { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] }
    }

    fn set(&mut self, register: usize, rows: usize, row_bytes: usize) {
        assert!(rows <= ROWS && row_bytes <= ROW_BYTES, "registers have up to {ROWS} rows; this is a bug");
        (self.row_bytes[register], self.rows[register]) =
            if rows == 0 { (0, 0) } else { (row_bytes as u16, rows as u8) };
    }

    /// # Safety
    /// * An [`Amx`] exists.
    unsafe fn load(&self) {
        // SAFETY: so the instruction does; what `set` allows is valid.
        unsafe { asm!("ldtilecfg [{}]", in(reg) self, options(nostack, readonly)) };
    }
}

impl Tiles {
    /// Registers for `rows` rows of the two tiles of an input, up to 16 each, of which the first has some. All are zero.
    ///
    /// # Safety
    /// * No other tiles are set up on this thread.
    pub unsafe fn new(_: Amx, rows: [usize; 2]) -> Tiles {
        assert!(rows[0] > 0, "there are rows; this is a bug");
        let mut setup = Setup::new();
        for (tile, rows) in rows.into_iter().enumerate() {
            setup.set(INPUTS[tile], rows, ROW_BYTES);
            SUMS[tile].iter().for_each(|sums| setup.set(usize::from(*sums), rows, ROW_BYTES));
            setup.set(WEIGHTS[tile], ROWS, ROW_BYTES);
        }
        // SAFETY: an `Amx` exists.
        unsafe { setup.load() };
        Tiles { thread: PhantomData }
    }

    /// Sets sums to zero.
    ///
    /// # Safety
    /// * The register was set up: its tile has rows.
    #[inline(always)]
    pub unsafe fn zero<const REGISTER: u8>(&mut self) {
        // SAFETY: `self` proves the instruction; the rest is the caller's promise.
        unsafe { asm!("tilezero tmm{r}", r = const REGISTER, options(nostack, nomem)) };
    }

    /// Input tile 0 or 1: rows of 64 bytes, one after another.
    ///
    /// # Safety
    /// * As many rows as it was set up for can be read at `at`.
    #[inline(always)]
    pub unsafe fn input<const TILE: usize>(&mut self, at: *const u8) {
        // SAFETY: the caller's promise.
        match TILE {
            0 => unsafe { load::<{ INPUTS[0] as u8 }>(at, ROW_BYTES) },
            _ => unsafe { load::<{ INPUTS[1] as u8 }>(at, ROW_BYTES) },
        }
    }

    /// Weights of strip 0 or 1: 16 rows of 64 bytes, one after another.
    ///
    /// # Safety
    /// * They can be read at `at`.
    #[inline(always)]
    pub unsafe fn weights<const STRIP: usize>(&mut self, at: *const u8) {
        // SAFETY: the caller's promise.
        match STRIP {
            0 => unsafe { load::<{ WEIGHTS[0] as u8 }>(at, ROW_BYTES) },
            _ => unsafe { load::<{ WEIGHTS[1] as u8 }>(at, ROW_BYTES) },
        }
    }

    /// Adds the products of BF16 pairs of an input tile and a strip to their sums.
    #[inline(always)]
    pub fn multiply<const TILE: usize, const STRIP: usize>(&mut self) {
        // SAFETY: `self` proves the instruction, and that the registers are set up.
        unsafe {
            match (TILE, STRIP) {
                (0, 0) => multiply::<0, 4, 6>(),
                (0, _) => multiply::<1, 4, 7>(),
                (_, 0) => multiply::<2, 5, 6>(),
                _ => multiply::<3, 5, 7>(),
            }
        }
    }

    /// Writes sums (rows, 16) whose rows lie `stride` bytes apart.
    ///
    /// # Safety
    /// * They can be written at `to`.
    #[inline(always)]
    pub unsafe fn store<const REGISTER: u8>(&self, to: *mut f32, stride: usize) {
        // SAFETY: the caller's promise.
        unsafe { store::<REGISTER>(to.cast(), stride) };
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: it was set up on this thread.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// The registers, set up on this thread until this is dropped: four times the sums of up to 16 rows with 16 outs, of products
/// of bytes with sign.
pub struct CodeTiles {
    /// Tiles belong to a thread.
    thread: PhantomData<*const ()>,
}

impl CodeTiles {
    /// Registers for `rows` rows of `columns` columns, a multiple of four.
    ///
    /// # Safety
    /// * No other tiles are set up on this thread.
    pub unsafe fn new(_: Amx, rows: usize, columns: usize) -> CodeTiles {
        assert!(rows > 0 && columns > 0 && columns.is_multiple_of(4), "there are some; this is a bug");
        let mut setup = Setup::new();
        (0..4).for_each(|sums| setup.set(sums, rows, ROW_BYTES));
        INPUTS.into_iter().for_each(|register| setup.set(register, rows, columns));
        // Four columns of 16 outs are a row.
        WEIGHTS.into_iter().for_each(|register| setup.set(register, columns / 4, ROW_BYTES));
        // SAFETY: an `Amx` exists.
        unsafe { setup.load() };
        CodeTiles { thread: PhantomData }
    }

    /// Sums number `SUMS`, below four, are those of rows that lie `stride` bytes apart, and of weights one after another.
    ///
    /// # Safety
    /// * Rows and weights can be read.
    #[inline(always)]
    pub unsafe fn multiply<const SUMS: u8>(&mut self, input: *const u8, stride: usize, weights: *const u8) {
        const { assert!(SUMS < 4, "there are four sums") };
        // SAFETY: `self` proves the instructions, and that the registers are set up; the rest is the caller's promise.
        unsafe {
            asm!("tilezero tmm{r}", r = const SUMS, options(nostack, nomem));
            match SUMS % 2 {
                0 => {
                    load::<{ INPUTS[0] as u8 }>(input, stride);
                    load::<{ WEIGHTS[0] as u8 }>(weights, ROW_BYTES);
                }
                _ => {
                    load::<{ INPUTS[1] as u8 }>(input, stride);
                    load::<{ WEIGHTS[1] as u8 }>(weights, ROW_BYTES);
                }
            }
        }
        self.add::<SUMS>();
    }

    /// Adds to sums number `SUMS` the products of the rows and weights that were multiplied last for sums as even, or as odd.
    #[inline(always)]
    pub fn add<const SUMS: u8>(&mut self) {
        const { assert!(SUMS < 4, "there are four sums") };
        // SAFETY: `self` proves the instruction, and that the registers are set up.
        unsafe {
            match SUMS % 2 {
                0 => asm!("tdpbssd tmm{r}, tmm4, tmm6", r = const SUMS, options(nostack, nomem)),
                _ => asm!("tdpbssd tmm{r}, tmm5, tmm7", r = const SUMS, options(nostack, nomem)),
            }
        }
    }

    /// Writes sums (rows, 16).
    ///
    /// # Safety
    /// * They can be written at `to`.
    #[inline(always)]
    pub unsafe fn store<const SUMS: u8>(&self, to: *mut i32) {
        const { assert!(SUMS < 4, "there are four sums") };
        // SAFETY: the caller's promise.
        unsafe { store::<SUMS>(to.cast(), ROW_BYTES) };
    }
}

impl Drop for CodeTiles {
    fn drop(&mut self) {
        // SAFETY: it was set up on this thread.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// # Safety
/// * Tiles are set up, and the register's rows can be written at `to`.
#[inline(always)]
unsafe fn store<const REGISTER: u8>(to: *mut u8, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("tilestored [{to} + {stride}*1], tmm{r}", r = const REGISTER, to = in(reg) to,
            stride = in(reg) stride, options(nostack))
    };
}

/// # Safety
/// * Tiles are set up, and the register's rows can be read at `at`.
#[inline(always)]
unsafe fn load<const REGISTER: u8>(at: *const u8, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("tileloadd tmm{r}, [{at} + {stride}*1]", r = const REGISTER, at = in(reg) at,
            stride = in(reg) stride, options(nostack, readonly))
    };
}

/// # Safety
/// * Tiles are set up.
#[inline(always)]
unsafe fn multiply<const SUMS: u8, const INPUT: u8, const WEIGHTS: u8>() {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("tdpbf16ps tmm{s}, tmm{i}, tmm{w}", s = const SUMS, i = const INPUT, w = const WEIGHTS,
            options(nostack, nomem))
    };
}
