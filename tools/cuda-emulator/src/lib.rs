//! A library with the CUDA driver's interface that executes PTX on the CPU, for tests on machines without
//! a GPU.
//!
//! Programs run as they run on a device: their kernels as NVRTC compiles them, and their host code without
//! a change. The shared library is loaded by its path before anything asks for the driver; it is found by
//! its name from then on. Errors that a device hides are found and named ([`Finding`]): accesses out of
//! bounds, to freed memory, or misaligned; reads of bytes that nobody wrote; races in shared memory
//! between barriers and in global memory within a launch; copies that were not waited for; exchanges and
//! barriers that not all threads reach.
//!
//! # How it works
//! [`Machine::load`] reads PTX (`ptx`) and makes a typed program of it (`program`), in which each
//! arithmetic form is a function over the 32 lanes of a warp (`arith`, `mma`). `exec` runs CTAs one after
//! another, warps in a seeded order, and lanes in lock-step; lanes that part meet again. `memory` knows
//! of each byte whether it was written, and of each word who accessed it last. `driver` queues work on
//! streams and runs it when somebody must wait for it.
//!
//! # Settings
//! Environment variables, read by `cuInit` and by `cudaEmulatorReset`:
//!
//! | variable | meaning |
//! |---|---|
//! | `CUDA_EMULATOR_DEVICES` | number of devices (1); read by `cuInit` only |
//! | `CUDA_EMULATOR_COMPUTE` | compute capability (`8.0`) |
//! | `CUDA_EMULATOR_MEMORY` | bytes of memory of each device (4 GiB) |
//! | `CUDA_EMULATOR_DRIVER` | driver version (13000), which limits the PTX version |
//! | `CUDA_EMULATOR_SEED` | seed of all order that a device leaves open: warps, CTAs, atomics (0) |
//! | `CUDA_EMULATOR_EAGER` | percentage of calls after which some queued work runs unasked (10) |
//! | `CUDA_EMULATOR_FINDINGS` | `record` if races, unwritten reads and divergence must not fail a launch |
//! | `CUDA_EMULATOR_RACES` | 0 to find races in shared memory only; records are 9 times what is accessed |
//! | `CUDA_EMULATOR_POOLS` | 0 for devices without stream-ordered allocation |
//! | `CUDA_EMULATOR_INSTRUCTIONS` | most instructions of warps in a launch (2^32) |
//! | `CUDA_EMULATOR_INJECT` | failures: `device=1 launch=17 error=719; alloc=3 error=2; launch=5 hang` |
//! | `CUDA_EMULATOR_CORNERS` | 1 to run only the CTAs at the corners of grids, for tests of large buffers |
//! | `CUDA_EMULATOR_COVERAGE` | file that executed lines of PTX are appended to: [`text_hash`], and numbers |
//! | `CUDA_EMULATOR_STATS` | set to print the speed of each launch |
//!
//! A failure `device=1 properties error=46` is that of all questions about a device.
//!
//! `cudaEmulatorFindings(buffer, len) -> needed` gives findings as lines of JSON. `cudaEmulatorReset()`
//! forgets them, releases launches that hang, and lets injected failures count anew. From Rust they are
//! [`findings`] and [`reset`], and [`Emulator`] where the library is loaded.
//!
//! # Functions of the driver
//! Initialization, devices: `cuInit`, `cuDriverGetVersion`, `cuDeviceGet`, `GetCount`, `GetName`,
//! `GetUuid` (and `_v2`), `TotalMem_v2`, `GetAttribute`, `GetPCIBusId`, `CanAccessPeer`,
//! `GetP2PAttribute`, `GetDefaultMemPool`, `GetMemPool`; contexts: `cuDevicePrimaryCtxRetain`,
//! `Release_v2`, `Reset_v2`, `SetFlags_v2`, `GetState`, `cuCtxSetCurrent`, `GetCurrent`,
//! `PushCurrent_v2`, `PopCurrent_v2`, `GetDevice`, `Synchronize`, limits, flags and cache configurations,
//! `EnablePeerAccess`, `DisablePeerAccess`; memory: `cuMemAlloc_v2`, `AllocAsync`, `Free_v2`,
//! `FreeAsync`, `GetInfo_v2`, `GetAddressRange_v2`, `HostAlloc`, `AllocHost_v2`, `FreeHost`,
//! `HostRegister_v2`, `HostUnregister`, `cuMemcpy` `HtoD`, `DtoH`, `DtoD` and `Peer` with and without
//! `Async`, `cuMemsetD8`, `D16` and `D32` with and without `Async`, `cuPointerGetAttribute`; modules:
//! `cuModuleLoad`, `LoadData`, `LoadDataEx`, `Unload`, `GetFunction`, `GetGlobal_v2`; functions:
//! `cuFuncGetAttribute`, `SetAttribute`, `SetCacheConfig`, `cuOccupancyMaxActiveBlocksPerMultiprocessor`
//! (and `WithFlags`), `AvailableDynamicSMemPerBlock`, `MaxPotentialBlockSize`; launches:
//! `cuLaunchKernel`, `KernelEx`, `CooperativeKernel`, `HostFunc`; streams: `cuStreamCreate`,
//! `CreateWithPriority`, `Destroy_v2`, `Synchronize`, `Query`, `WaitEvent`, `GetCtx`, `GetFlags`,
//! `GetPriority`; events: `cuEventCreate`, `Destroy_v2`, `Record`, `Synchronize`, `Query`, `ElapsedTime`
//! (and `_v2`); graphs: `cuStreamBeginCapture_v2`, `EndCapture`, `IsCapturing`, `GetCaptureInfo_v2`,
//! `cuThreadExchangeStreamCaptureMode`, `cuGraphCreate`, `InstantiateWithFlags`, `Instantiate_v2`,
//! `ExecUpdate_v2`, `Upload`, `Launch`, `GetNodes`, `Destroy`, `ExecDestroy`; `cuGetErrorName`,
//! `cuGetErrorString`. Others do not exist here, so a program that calls them fails when it looks for
//! them.
//!
//! # Not emulated
//! `wgmma`, bulk copies and `mbarrier`, clusters, textures, and forms from before Volta are refused by
//! name. Kernels reach the memory of their own device only, not that of peers or of the host. Managed
//! memory and images of machine code are refused as a driver refuses them. Memory is not weaker than the
//! order in which instructions happen to run: a missing fence is found by the rules of ordering, not by a
//! wrong value. A fence, acquire or release of one lane counts as its whole warp's; of many threads that read
//! a word between barriers, two are remembered. Memory that an earlier launch wrote counts as written.
//! Registers that nobody wrote hold anything. The last bits of approximate functions differ from a device's.
//!
//! Invariant: nothing that a kernel does makes the emulator panic.

#![deny(unsafe_code)]

mod arith;
mod coverage;
mod driver;
mod exec;
mod findings;
mod machine;
mod memory;
mod mma;
mod program;
mod ptx;

pub use coverage::text_hash;
pub use driver::{Emulator, findings, reset};
pub use findings::{Finding, Kind};
pub use machine::{Machine, Module, Params, Report, Shape, kinds};
pub use ptx::PtxError;
