//! AMX (Intel's Advanced Matrix Extensions): products of tiles, 16 rows by 16 outputs.
//!
//! AMX has eight tile registers of 16 rows of 64 bytes. Rust has no stable intrinsics for its instructions
//! yet, so they are written in assembly.
//! Invariant: tile registers are in use only while a [`Bf16Tiles`] or an [`Int8Tiles`] lives, on its thread.

#![allow(unsafe_code)]

use std::arch::asm;
use std::arch::x86_64::{__cpuid_count, __get_cpuid_max, _xgetbv};
use std::marker::PhantomData;

/// Maximum number of rows of a register.
pub const ROWS: usize = 16;
/// Bytes of a register's row.
pub const ROW_BYTES: usize = 64;

/// Registers for sums (2, 2).
pub const SUM_REGISTERS: [[u8; 2]; 2] = [[0, 1], [2, 3]];
/// Registers for tiles of the input.
const INPUT_REGISTERS: [usize; 2] = [4, 5];
/// Registers for panels of the weight.
const WEIGHT_REGISTERS: [usize; 2] = [6, 7];

/// Proof that this CPU has AMX with BF16 and int8, and AVX-512 with BF16, and that the operating system lets
/// this process use it.
#[derive(Clone, Copy)]
pub struct Amx(());

impl Amx {
    /// Returns the proof if AMX is available, after requesting permission from the operating system.
    pub fn new() -> Option<Amx> {
        let has_vectors = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512bf16");
        (has_vectors && is_supported() && request_permission()).then_some(Amx(()))
    }
}

/// Returns whether the CPU has tiles and their products of BF16 and of int8, and the operating system saves
/// the tiles on a context switch.
fn is_supported() -> bool {
    const BF16: u32 = 1 << 22;
    const TILE: u32 = 1 << 24;
    const INT8: u32 = 1 << 25;
    const STATE: u64 = 0b11 << 17;
    const OSXSAVE: u32 = 1 << 27;
    // SAFETY: `cpuid` is part of x86-64; its leaf 7 is read only if it exists, and `xgetbv` is executed only
    // if the operating system has enabled it.
    unsafe {
        let (largest, _) = __get_cpuid_max(0);
        if largest < 7 || __cpuid_count(1, 0).ecx & OSXSAVE == 0 {
            return false;
        }
        __cpuid_count(7, 0).edx & (BF16 | TILE | INT8) == BF16 | TILE | INT8 && xcr0() & STATE == STATE
    }
}

/// Returns the register that states which processor state the operating system saves.
///
/// # Safety
/// * The operating system has enabled `xgetbv` (OSXSAVE).
#[target_feature(enable = "xsave")]
unsafe fn xcr0() -> u64 {
    // SAFETY: the caller has checked that `xgetbv` is enabled.
    unsafe { _xgetbv(0) }
}

/// Requests permission from Linux to use tiles, which it grants to a process for all its threads
/// (`arch_prctl`, ARCH_REQ_XCOMP_PERM). Returns whether it was granted.
#[cfg(target_os = "linux")]
fn request_permission() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const REQUEST: u64 = 0x1023;
    const TILE_DATA: u64 = 18;
    let result: i64;
    // SAFETY: the call reads and writes no memory of this process; the kernel changes rax, rcx and r11 only.
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
fn request_permission() -> bool {
    false
}

/// Tile registers for BF16, configured on this thread until this is dropped: sums of up to 2 x 16 rows with 2
/// x 16 outputs.
pub struct Bf16Tiles {
    /// Not `Send`: tile registers belong to a thread.
    thread: PhantomData<*const ()>,
}

/// Operand of `ldtilecfg`: the sizes of the tile registers. A register with no rows is not configured, and
/// must not be used.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl TileConfig {
    fn new() -> TileConfig {
        TileConfig { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] }
    }

    /// Sets the size of a register.
    fn set(&mut self, register: usize, rows: usize, row_bytes: usize) {
        assert!(
            rows <= ROWS && row_bytes <= ROW_BYTES,
            "registers have up to {ROWS} rows of {ROW_BYTES} bytes; this is a bug"
        );
        (self.row_bytes[register], self.rows[register]) =
            if rows == 0 { (0, 0) } else { (row_bytes as u16, rows as u8) };
    }

    /// Configures the tile registers of this thread.
    ///
    /// # Safety
    /// * An [`Amx`] exists.
    unsafe fn load(&self) {
        // SAFETY: the caller guarantees that the instruction exists; the sizes that `set` allows are valid.
        unsafe { asm!("ldtilecfg [{}]", in(reg) self, options(nostack, readonly)) };
    }
}

impl Bf16Tiles {
    /// Configures registers for `rows` rows of the two tiles of an input, up to 16 each; the first must have
    /// rows. All registers are zero.
    ///
    /// # Safety
    /// * No other tiles are configured on this thread.
    pub unsafe fn new(_: Amx, rows: [usize; 2]) -> Bf16Tiles {
        assert!(rows[0] > 0, "the first tile has rows; this is a bug");
        let mut setup = TileConfig::new();
        for (tile, rows) in rows.into_iter().enumerate() {
            setup.set(INPUT_REGISTERS[tile], rows, ROW_BYTES);
            SUM_REGISTERS[tile].iter().for_each(|sums| setup.set(usize::from(*sums), rows, ROW_BYTES));
            setup.set(WEIGHT_REGISTERS[tile], ROWS, ROW_BYTES);
        }
        // SAFETY: an `Amx` exists.
        unsafe { setup.load() };
        Bf16Tiles { thread: PhantomData }
    }

    /// Sets sums to zero.
    ///
    /// # Safety
    /// * The register is configured: its tile has rows.
    #[inline(always)]
    pub unsafe fn zero<const REGISTER: u8>(&mut self) {
        // SAFETY: `self` proves the instruction; the rest is the caller's promise.
        unsafe { asm!("tilezero tmm{r}", r = const REGISTER, options(nostack, nomem)) };
    }

    /// Loads sums (rows, 16) with rows `stride` bytes apart.
    ///
    /// # Safety
    /// * The register is configured: its tile has rows, which can be read at `at`.
    #[inline(always)]
    pub unsafe fn load_sums<const REGISTER: u8>(&mut self, at: *const f32, stride: usize) {
        // SAFETY: the caller's promise.
        unsafe { load::<REGISTER>(at.cast(), stride) };
    }

    /// Loads input tile 0 or 1: contiguous rows of 64 bytes.
    ///
    /// # Safety
    /// * As many rows as the register is configured for can be read at `at`.
    #[inline(always)]
    pub unsafe fn load_input<const TILE: usize>(&mut self, at: *const u8) {
        // SAFETY: the caller's promise.
        match TILE {
            0 => unsafe { load::<{ INPUT_REGISTERS[0] as u8 }>(at, ROW_BYTES) },
            _ => unsafe { load::<{ INPUT_REGISTERS[1] as u8 }>(at, ROW_BYTES) },
        }
    }

    /// Loads the weights of panel 0 or 1: 16 contiguous rows of 64 bytes.
    ///
    /// # Safety
    /// * They can be read at `at`.
    #[inline(always)]
    pub unsafe fn load_weights<const PANEL: usize>(&mut self, at: *const u8) {
        // SAFETY: the caller's promise.
        match PANEL {
            0 => unsafe { load::<{ WEIGHT_REGISTERS[0] as u8 }>(at, ROW_BYTES) },
            _ => unsafe { load::<{ WEIGHT_REGISTERS[1] as u8 }>(at, ROW_BYTES) },
        }
    }

    /// Adds the products of the BF16 pairs of an input tile and a panel to their sums.
    #[inline(always)]
    pub fn multiply<const TILE: usize, const PANEL: usize>(&mut self) {
        // SAFETY: `self` proves the instruction, and that the registers are configured.
        unsafe {
            match (TILE, PANEL) {
                (0, 0) => multiply::<0, 4, 6>(),
                (0, _) => multiply::<1, 4, 7>(),
                (_, 0) => multiply::<2, 5, 6>(),
                _ => multiply::<3, 5, 7>(),
            }
        }
    }

    /// Stores sums (rows, 16) with rows `stride` bytes apart.
    ///
    /// # Safety
    /// * They can be written at `to`.
    #[inline(always)]
    pub unsafe fn store<const REGISTER: u8>(&self, to: *mut f32, stride: usize) {
        // SAFETY: the caller's promise.
        unsafe { store::<REGISTER>(to.cast(), stride) };
    }
}

impl Drop for Bf16Tiles {
    fn drop(&mut self) {
        // SAFETY: the registers were configured on this thread.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Tile registers for int8, configured on this thread until this is dropped: four sets of sums of up to 16
/// rows with 16 outputs, of products of signed bytes.
pub struct Int8Tiles {
    /// Not `Send`: tile registers belong to a thread.
    thread: PhantomData<*const ()>,
}

impl Int8Tiles {
    /// Configures registers for `rows` rows of `columns` columns, a multiple of four.
    ///
    /// # Safety
    /// * No other tiles are configured on this thread.
    pub unsafe fn new(_: Amx, rows: usize, columns: usize) -> Int8Tiles {
        assert!(
            rows > 0 && columns > 0 && columns.is_multiple_of(4),
            "rows and columns are valid; this is a bug"
        );
        let mut setup = TileConfig::new();
        (0..4).for_each(|sums| setup.set(sums, rows, ROW_BYTES));
        INPUT_REGISTERS.into_iter().for_each(|register| setup.set(register, rows, columns));
        // Four columns of 16 outputs form a row.
        WEIGHT_REGISTERS.into_iter().for_each(|register| setup.set(register, columns / 4, ROW_BYTES));
        // SAFETY: an `Amx` exists.
        unsafe { setup.load() };
        Int8Tiles { thread: PhantomData }
    }

    /// Sets sums number `SUMS`, below four, to the products of input rows that lie `stride` bytes apart and
    /// contiguous weights.
    ///
    /// # Safety
    /// * Input rows and weights can be read.
    #[inline(always)]
    pub unsafe fn multiply<const SUMS: u8>(&mut self, input: *const u8, stride: usize, weights: *const u8) {
        const { assert!(SUMS < 4, "there are four sets of sums") };
        // SAFETY: `self` proves the instructions, and that the registers are configured; the rest is the
        // caller's promise.
        unsafe {
            asm!("tilezero tmm{r}", r = const SUMS, options(nostack, nomem));
            match SUMS % 2 {
                0 => {
                    load::<{ INPUT_REGISTERS[0] as u8 }>(input, stride);
                    load::<{ WEIGHT_REGISTERS[0] as u8 }>(weights, ROW_BYTES);
                }
                _ => {
                    load::<{ INPUT_REGISTERS[1] as u8 }>(input, stride);
                    load::<{ WEIGHT_REGISTERS[1] as u8 }>(weights, ROW_BYTES);
                }
            }
        }
        self.add_loaded::<SUMS>();
    }

    /// Adds products to sums number `SUMS`: those of the input rows and weights that were last loaded for
    /// sums of the same parity.
    #[inline(always)]
    pub fn add_loaded<const SUMS: u8>(&mut self) {
        const { assert!(SUMS < 4, "there are four sets of sums") };
        // SAFETY: `self` proves the instruction, and that the registers are configured.
        unsafe {
            match SUMS % 2 {
                0 => asm!("tdpbssd tmm{r}, tmm4, tmm6", r = const SUMS, options(nostack, nomem)),
                _ => asm!("tdpbssd tmm{r}, tmm5, tmm7", r = const SUMS, options(nostack, nomem)),
            }
        }
    }

    /// Stores contiguous sums (rows, 16).
    ///
    /// # Safety
    /// * They can be written at `to`.
    #[inline(always)]
    pub unsafe fn store<const SUMS: u8>(&self, to: *mut i32) {
        const { assert!(SUMS < 4, "there are four sets of sums") };
        // SAFETY: the caller's promise.
        unsafe { store::<SUMS>(to.cast(), ROW_BYTES) };
    }
}

impl Drop for Int8Tiles {
    fn drop(&mut self) {
        // SAFETY: the registers were configured on this thread.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Stores a tile register with rows `stride` bytes apart.
///
/// # Safety
/// * Tiles are configured, and the register's rows can be written at `to`.
#[inline(always)]
unsafe fn store<const REGISTER: u8>(to: *mut u8, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("tilestored [{to} + {stride}*1], tmm{r}", r = const REGISTER, to = in(reg) to,
            stride = in(reg) stride, options(nostack))
    };
}

/// Loads a tile register from rows `stride` bytes apart.
///
/// # Safety
/// * Tiles are configured, and the register's rows can be read at `at`.
#[inline(always)]
unsafe fn load<const REGISTER: u8>(at: *const u8, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("tileloadd tmm{r}, [{at} + {stride}*1]", r = const REGISTER, at = in(reg) at,
            stride = in(reg) stride, options(nostack, readonly))
    };
}

/// Adds the products of the BF16 pairs of two registers to a third.
///
/// # Safety
/// * Tiles are configured.
#[inline(always)]
unsafe fn multiply<const SUMS: u8, const INPUT: u8, const WEIGHTS: u8>() {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("tdpbf16ps tmm{s}, tmm{i}, tmm{w}", s = const SUMS, i = const INPUT, w = const WEIGHTS,
            options(nostack, nomem))
    };
}
